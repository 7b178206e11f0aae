"""BAFFLE's memory beside that of backpropagation, and fine-tuning of a part of a network.

python results/baffle.py memory     write results/baffle-memory.json: bytes at the peak, on a CPU
python results/baffle.py tuning     write results/baffle-tuning.json: accuracies over three seeds
                                    (--toy: one round and one seed, and nothing is written)

memory: tensors that a client holds beyond weights and records, for one batch of 32. Backpropagation is split over
records too: gradients of slices add up in the parameters' `grad`.

tuning: the paper's table 3 without its data. A network learns the digits 0 to 4 by FedAvg. Its last layer is drawn anew
and trained on the digits 5 to 9, alone or with the whole network, by forward passes or by backpropagation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil import data, models
from fedveil.data import from_tensors
from fedveil.methods.baffle.memory import peak
from fedveil.methods.baffle.probing import forward_only
from fedveil.runs import recipe
from fedveil.runs.fingerprint import environment

HERE = Path(__file__).resolve().parent
BATCH, DIRECTIONS = 32, 3
LOCAL = fv.LocalTraining("adam", 0.005, batch=32, beta2=0.99)
ROUNDS = 20
RANDOM, HEAD = "last layer of a random network", "last layer, backpropagation"


# ---------------------------------------------------------------------------------------------------- memory


def memory(_: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Bytes at the peak, by model and by how a client works."""
    return {name: _held(name) for name in ("baffle-lenet", "wrn-10-2")}


def _held(name: str) -> dict[str, int]:
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(BATCH, 1, 28, 28, generator=draw), torch.randint(0, 10, (BATCH,), generator=draw)
    drawn = from_tensors(x, y, x[:2], y[:2])
    model = models.build(name, drawn.input, 10, activation="hardswish")
    task = fv.Task(model, drawn, fv.split("iid", drawn, 1, fv.Seed.root(0)))
    x, y, found = task.x, task.y, {"weights": 4 * task.layout.size}
    for records in (BATCH, 8, 1):
        found[f"backpropagation, {records} records at a time"] = peak(lambda n=records: _derived(model, x, y, n))
    given = task.initial[None], torch.tensor([1]), x[None], y[None]
    share, mask = torch.full((1, BATCH, 1), 1 / BATCH), torch.ones(1, BATCH)
    for slices in ("records", "layers"):
        made = fv.Baffle(directions=DIRECTIONS, slices=slices).prober(task)
        for setting, limit in (("by default", None), ("within 4 MB", 4 << 20), ("one record at a time", 1)):
            how = dataclasses.replace(made, memory=limit)
            with forward_only(task.device):
                found[f"slopes, slices of {slices}, {setting}"] = peak(
                    lambda h=how: h.slopes(*given, share, DIRECTIONS)
                )
                found[f"gradient, slices of {slices}, {setting}"] = peak(
                    lambda h=how: h.gradient(*given, mask, DIRECTIONS)
                )
    return found


def _derived(model: nn.Module, x: Tensor, y: Tensor, records: int) -> None:
    """The gradient of the mean loss, in `grad`: so many records at a time."""
    model.zero_grad(set_to_none=True)
    for u, v in zip(x.split(records), y.split(records), strict=True):
        (nn.functional.cross_entropy(model(u), v, reduction="sum") / len(x)).backward()


# ---------------------------------------------------------------------------------------------------- fine-tuning


def tuning(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Test accuracies on the new classes by variant, each seed's and their mean."""
    counts = (20,) if options.toy else (20, 100)
    variants: dict[str, fv.Method] = {f"last layer, K = {k}": _probing(k, ["fc2*"]) for k in counts}
    variants |= {f"all layers, K = {k}": _probing(k, []) for k in counts}
    variants |= {RANDOM: _probing(counts[-1], ["fc2*"]), HEAD: fv.FedAvg(LOCAL)}
    variants["all layers, backpropagation"] = fv.FedAvg(LOCAL)
    found: dict[str, dict[str, Any]] = {}
    for seed in (0,) if options.toy else (0, 1, 2):
        with tempfile.TemporaryDirectory() as folder:
            before = _pretrained(seed, Path(folder) / "before.npz")
            for name, method in variants.items():
                plan = recipe.read("digits/fedavg", [f"seed={seed}", *[f"task.weights={before}"] * (name != RANDOM)])
                task = plan.on(_half(lambda y: y >= 5))
                result = fv.run(
                    _head(task) if name == HEAD else task,
                    method,
                    rounds=1 if options.toy else ROUNDS,
                    cohort=10,
                    seed=seed,
                )
                print(f"seed {seed}: {name}: {100 * result.accuracy:.2f}%", flush=True)
                found.setdefault(name, {"accuracies": []})["accuracies"].append(round(result.accuracy, 4))
    for each in found.values():
        each["mean"] = round(statistics.mean(each["accuracies"]), 4)
        each["deviation"] = round(statistics.stdev(each["accuracies"]), 4) if len(each["accuracies"]) > 1 else None
    return found


def _half(chosen: Callable[[Tensor], Tensor]) -> data.Data:
    """The digits of some classes; the network still has ten outputs."""
    whole = data.load("digits")
    train, test = chosen(whole.y), chosen(whole.test_y)
    return dataclasses.replace(
        whole, x=whole.x[train], y=whole.y[train], test_x=whole.test_x[test], test_y=whole.test_y[test]
    )


def _pretrained(seed: int, path: Path) -> Path:
    """Weights of a network that knows the digits 0 to 4, but for its last layer."""
    plan = recipe.read("digits/fedavg", [f"seed={seed}"])
    task = plan.on(_half(lambda y: y < 5))
    result = fv.run(task, plan.method, rounds=plan.rounds, cohort=plan.cohort, seed=seed)
    layers = task.layout.split(result.weights).items()
    np.savez(path, **{name: value.numpy() for name, value in layers if not name.startswith("fc2")})
    return path


def _probing(directions: int, layers: list[str]) -> fv.Method:
    return fv.BaffleEpochs(directions=directions, layers=layers, seeds="own", local=LOCAL, server=fv.ServerOptimizer())


def _head(task: fv.Task) -> fv.Task:
    """The last layer alone, on what it sees of the records."""
    model = task.model
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        body = nn.Sequential(*list(model)[:-1])
        seen = from_tensors(body(task.x), task.y, body(task.test_x), task.test_y, classes=10)
    return fv.Task(model[-1], seen, task.clients)


# ---------------------------------------------------------------------------------------------------- both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "tuning"))
    parser.add_argument("--toy", action="store_true", help="of tuning one round and one seed; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"memory": memory, "tuning": tuning}[options.what](options)
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    told = {"command": f"python results/baffle.py {options.what}"}
    told |= environment(device="cpu", commit=asked.stdout.strip() or None) | {"results": found}
    text = json.dumps(told, indent=1, ensure_ascii=False)
    print(text)
    if not options.toy:
        (HERE / f"baffle-{options.what}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
