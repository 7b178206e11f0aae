"""How well inversion works where its papers say it does: untrained networks and the raw gradient of CIFAR-10 pictures.

python results/inversion.py --data DIR --out results/exposure/inversion.json [--victims N] [--parts …] [--device cuda]

`DIR/cifar10` holds the binary batches. Victims are drawn by the seed before anything is attacked. Parts:

linear:       exact recovery from a linear layer
idlg, dlg:    the sigmoid LeNet of the DLG paper; the label is read off the bias' gradient, or fitted
cosine:       Inverting Gradients on a ConvNet with ReLU, the label read off the bias' gradient
cosine-batch: the same, and four records a victim
epochs:       FedAvg updates of several steps on the ConvNet
wrong:        the same attacks on random vectors as long as the gradients, where they must fail
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.attacks import labels, linear
from fedveil.attacks.epochs import Simulation, invert_epochs, order, simulate
from fedveil.attacks.inversion import DLG, Inversion, Target, invert
from fedveil.attacks.scores import Pool, overlap, score
from fedveil.runs.fingerprint import environment

SEED = fv.Seed.root(0)


def lenet() -> nn.Module:
    """The network of the DLG paper; weights and biases U(-0.5, 0.5)."""
    act = nn.Sigmoid
    model = nn.Sequential(
        *(nn.Conv2d(3, 12, 5, stride=2, padding=2), act()),
        *(nn.Conv2d(12, 12, 5, stride=2, padding=2), act()),
        *(nn.Conv2d(12, 12, 5, stride=1, padding=2), act()),
        *(nn.Flatten(), nn.Linear(768, 10)),
    )
    draw = SEED.child("lenet").torch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=draw) - 0.5)
    return model


def convnet() -> nn.Module:
    """Three convolutions with ReLU, of 32, 64 and 64 channels; PyTorch's initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(4096, 10)),
        )


def dense() -> nn.Module:
    """A linear layer on the pixels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))


@dataclass
class Bench:
    """The victims' records and what all parts need."""

    data: fv.Data
    count: int
    device: str
    toy: bool

    def __post_init__(self) -> None:
        self.pool = Pool.of(self.data, SEED)
        self.split = fv.split("iid", self.data, 10, SEED)

    def task(self, model: nn.Module) -> fv.Task:
        return fv.Task(model, self.data, self.split, device=self.device)

    def victims(self, n: int) -> tuple[Tensor, Tensor]:
        """Training records x [V, n, 3, 32, 32] and their labels [V, n]."""
        order = torch.from_numpy(SEED.child("victims", n).numpy().permutation(len(self.data.x)))
        rows = order[: self.count * n].view(self.count, n)
        return self.data.x[rows].to(self.device), self.data.y[rows].to(self.device)

    def seen(self, task: fv.Task, x: Tensor, y: Tensor) -> Target:
        """Their gradients at the initial weights, without labels."""
        w = task.initial.expand(len(x), -1)
        vector, _ = task.gradient(w, x, y, torch.ones(x.shape[:2], device=self.device))
        return Target(w, vector, "gradient", x.shape[1])

    def steps(self, how: Inversion) -> Inversion:
        return replace(how, steps=10) if self.toy else how

    def told(self, found: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
        scores = score(found.x, x, self.pool, found.y, y)
        return {
            **msgspec.to_builtins(scores.figures(SEED)),
            "each_mse": scores.mse.flatten().tolist(),
            "loss": found.loss.tolist(),
            "finished": found.finished,
        }

    def baselines(self, x: Tensor) -> dict[str, Any]:
        guesses = self.pool.baselines(x, SEED)
        return {k: msgspec.to_builtins(score(g, x, self.pool).figures(SEED)) for k, g in guesses.items()}


def random_like(vector: Tensor) -> Tensor:
    """Random vectors of the same norms."""
    noise = torch.randn(vector.shape, generator=SEED.child("noise").torch()).to(vector)
    return noise * (torch.linalg.vector_norm(vector, dim=1) / torch.linalg.vector_norm(noise, dim=1))[:, None]


def named(task: fv.Task, target: Target) -> Target:
    """The target with the labels that its vector tells."""
    return replace(target, labels=labels.count(task, target, SEED).y)


def doubled(target: Target) -> Target:
    """In float64, with which L-BFGS comes nearer."""
    return replace(target, weights=target.weights.double(), vector=target.vector.double())


def dlg(bench: Bench, given: bool = False) -> dict[str, Any]:
    """DLG, or iDLG with the label that the bias tells."""
    task, (x, y), how = bench.task(lenet()), bench.victims(1), bench.steps(DLG)
    target = bench.seen(task, x, y)
    found = invert(task, doubled(named(task, target) if given else target), how, SEED, tell=tell)
    return {"settings": asdict(how), "precision": "float64"} | bench.told(found, x, y)


def cosine(bench: Bench, n: int = 1) -> dict[str, Any]:
    task, how, (x, y) = bench.task(convnet()), bench.steps(Inversion(steps=600)), bench.victims(n)
    found = invert(task, named(task, bench.seen(task, x, y)), how, SEED, tell=tell)
    return {"settings": asdict(how)} | bench.told(found, x, y) | {"baselines": bench.baselines(x)}


def read_off(bench: Bench) -> dict[str, Any]:
    task, (x, y) = bench.task(dense()), bench.victims(1)
    found = linear.recover(task, bench.seen(task, x, y).vector, 1).x
    return msgspec.to_builtins(score(found, x, bench.pool).figures(SEED))


def wrong(bench: Bench) -> dict[str, Any]:
    (x, y), rows = bench.victims(1), {}
    for name, model, how in (("dlg", lenet(), replace(DLG, steps=600)), ("cosine", convnet(), Inversion(steps=300))):
        task = bench.task(model)
        target = bench.seen(task, x, y)
        target = named(task, replace(target, vector=random_like(target.vector)))
        rows[name] = bench.told(invert(task, target, bench.steps(replace(how, restarts=1)), SEED, tell=tell), x, y)
    noise = random_like(bench.seen(bench.task(dense()), x, y).vector)
    found = linear.recover(bench.task(dense()), noise, 1).x
    return rows | {"linear": msgspec.to_builtins(score(found, x, bench.pool).figures(SEED))}


def several_steps(bench: Bench) -> dict[str, Any]:
    """Updates of two epochs of two batches of two records, in the order that the public seed gives away."""
    task, (x, y), rows = bench.task(convnet()), bench.victims(4), {}
    local = fv.LocalTraining(lr=0.01, epochs=2, batch=2)
    seeds = [SEED.child("shuffle", v) for v in range(bench.count)]
    w, plan = task.initial.expand(bench.count, -1), order(local, 4, seeds, bench.count).to(x.device)
    update = simulate(task, w, x, y, local, plan).detach()
    target = Target(w, update, "update", 4, y, local)
    how = bench.steps(Inversion(steps=300))
    for name, own in (("known order", False), ("own records an epoch", True)):
        known = None if own else seeds
        found = invert_epochs(task, target, how, Simulation(own_epochs=own), SEED, shuffles=known, tell=tell)
        rows[name] = bench.told(found, x, y)
    single = invert(task, target, how, SEED, tell=tell)
    rows["read as one gradient"] = bench.told(single, x, y)
    guessed = labels.count(task, replace(target, labels=None), SEED).y
    rows["label accuracy"] = float(overlap(guessed.cpu(), y.cpu(), 10).mean())
    return {"settings": asdict(how), "baselines": bench.baselines(x)} | rows


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "linear": read_off,
    "idlg": partial(dlg, given=True),
    "dlg": dlg,
    "cosine": cosine,
    "cosine-batch": partial(cosine, n=4),
    "epochs": several_steps,
    "wrong": wrong,
}


def tell(sentence: str) -> None:
    if "00/" in sentence:
        print(sentence, flush=True)


def commit() -> str | None:
    """The commit of the working tree, where it is one."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--victims", type=int, default=10)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--toy", action="store_true", help="ten steps an attack, to see that it works")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(fv.load("cifar10", options.data), options.victims, options.device, options.toy)
    done = json.loads(options.out.read_text()) if options.out.exists() else {}
    for part in options.parts:
        began = time.monotonic()
        found = PARTS[part](bench)
        command = f"python results/inversion.py --data DIR --out {options.out} --victims {options.victims}"
        about = {"command": f"{command} --parts {part} --device {options.device}", "seed": 0}
        about |= {"seconds": round(time.monotonic() - began), "toy": options.toy}
        done[part] = about | environment(device=options.device, commit=commit()) | found
        options.out.write_text(json.dumps(done, indent=2) + "\n")
        print(f"{part}: {about['seconds']} s")


if __name__ == "__main__":
    main()
