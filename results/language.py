"""Fine-tuning of SmolLM2-135M on SST-2 by clients that only run it forward, beside backpropagation.

    PYTHONPATH=examples python results/language.py timing FOLDER --device cuda --out OUT --budget-seconds 60

FOLDER is written by examples/smollm2.py. Parts, and about how long each takes on an H200:

timing   1 minute     milliseconds of a forward pass of 128 sentences, by directions and by how passes are launched;
                      also for a folder that `smollm2.py keep` wrote
sweep    4 minutes    settings compared on validation sentences; test sentences are not loaded
seeds    4 minutes    the chosen settings with three seeds
rivals   3 minutes    FedAvg by backpropagation: LoRA, the same weights, and top-k and sketches at equal bytes
private  5 minutes    record-level differential privacy, in float64
secure   2 minutes    slopes under the secure sum

Each run is a file OUT/PART-NAME.json, rewritten at every evaluation. A run whose file says that it is done is not
repeated, so a part can be continued. With --budget-seconds a part ends in time: a run that would exceed it stops after
a round, and its file says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import finetune_language_model as example
import smollm2
import torch

import fedveil as fv
from fedveil.core.ledger import Row
from fedveil.gpu.context import using
from fedveil.methods.baffle.probing import forward_only
from fedveil.runs.fingerprint import environment

CLIENTS, COHORT, EVERY = 32, 8, 20
MEMORY = 60_000  # megabytes of a pass, as fedveil counts them: what a backward pass would hold
ALL = ("*_norm.scale", "norm.scale")
ADAPTERS = ("*adapter*",)
PRIVATE = {"delta": 1e-3, "noise": "auto"}


@dataclass(frozen=True)
class Case:
    """A run: a method, which weights are trained, and for how many rounds."""

    method: fv.Method
    trainable: tuple[str, ...] = ()  # patterns; none: the scales of the middle layers
    rounds: int = 240
    seed: int = 0
    lora: int = 0
    max_records: int | None = None


class Parts:
    """The cases of each part, on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.precision = options.precision or {"cuda": "bfloat16"}.get(options.device, "float32")
        self.until = time.monotonic() + options.budget_seconds
        self.tasks: dict[Any, fv.Task] = {}

    # ------------------------------------------------------------------------------------------------ the cases

    def probing(self, directions: int = 32, batch: int = 16, rate: float = 0.002, **more: Any) -> fv.Baffle:
        server = {"schedule": "cosine"} | more.pop("server", {})
        settings = {"precision": self.precision, "memory": MEMORY, "centered": True} | more
        return example.probing(directions, batch, rate, server=server, **settings)

    def sweep(self) -> dict[str, Case]:
        found = {f"middle-{rate:g}": Case(self.probing(rate=rate)) for rate in (0.002, 0.005)}
        found["all-0.002"] = Case(self.probing(), ALL)
        found["middle-0.002-batch-32"] = Case(self.probing(batch=32))
        found["middle-0.001"] = Case(self.probing(rate=0.001))
        found["middle-0.003-K64"] = Case(self.probing(64, rate=0.003), rounds=145)
        found["middle-0.002-uncentered"] = Case(self.probing(centered=False))
        found["middle-0.002-ema"] = Case(self.probing(server={"schedule": "constant", "ema": 0.97}))
        found["middle-gains-0.006"] = Case(self.probing(rate=0.006), example.middle(self.options.folder, "gain"))
        return found

    def chosen(self) -> Case:
        """The case of the sweep that --like names, or the one that was best on validation sentences."""
        cases, name = self.sweep(), self.options.like
        if name == "best":
            scores = {each: self.score(each) for each in cases}
            name = max(scores, key=scores.__getitem__)
            print(f"chosen: {name}, of {scores}", flush=True)
        return cases[name]

    def score(self, name: str) -> float:
        """The mean accuracy of a finished run of the sweep in its last three evaluations."""
        path = self.options.out / f"sweep-{name}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"done": False}
        if not found["done"]:
            return 0.0
        return sum(row["accuracy"] for row in found["rounds"][-3:]) / 3

    def seeds(self) -> dict[str, Case]:
        return {f"seed-{seed}": dataclasses.replace(self.chosen(), seed=seed) for seed in range(3)}

    def rivals(self) -> dict[str, Case]:
        local = fv.LocalTraining("adam", 1e-3, epochs=1, batch=16, beta2=0.99, precision=self.precision)
        few, small = dict.fromkeys(("up", "down"), fv.TopK(0.035)), dict.fromkeys(("up", "down"), fv.Sketch(400))
        return {  # the last two send about as many bytes as slopes in 240 rounds
            "fedavg-lora": Case(fv.FedAvg(local), ADAPTERS, 10, lora=8),
            "fedavg-middle": Case(fv.FedAvg(local), rounds=20),
            "fedavg-middle-top-k": Case(fv.FedAvg(local, feedback=True, **few), rounds=30),
            "fedavg-middle-sketch": Case(fv.FedAvg(local, feedback=True, **small), rounds=30),
        }

    def private(self) -> dict[str, Case]:
        case, found = self.chosen(), {}
        method = dataclasses.replace(case.method, precision="float32", sigma=None, batch=32)
        for budget in (8.0, 2.0):
            made = dataclasses.replace(method, privacy=fv.DpSgd(clip=2.0, budget=budget, **PRIVATE))
            found[f"epsilon-{budget:g}"] = dataclasses.replace(case, method=made, rounds=60, max_records=self.largest)
        return found

    def secure(self) -> dict[str, Case]:
        case = self.chosen()
        return {"sum": dataclasses.replace(case, method=dataclasses.replace(case.method, secure=fv.SecureSum(clip=64)))}

    @property
    def largest(self) -> int:
        return -(-len(self.data.x) // CLIENTS)

    # ------------------------------------------------------------------------------------------------ running them

    @functools.cached_property
    def where(self) -> dict[str, Any]:
        """What a result depends on besides its settings."""
        commit = {"commit": self.options.commit} if self.options.commit else {}
        return environment(device=self.options.device, **commit)

    @functools.cached_property
    def data(self) -> fv.Data:
        data = smollm2.data(self.options.folder)
        if self.options.part == "sweep":
            data = dataclasses.replace(data, test_x=data.validation_x, test_y=data.validation_y)
            return dataclasses.replace(data, validation_x=None, validation_y=None)
        return data

    @functools.cache  # noqa: B019
    def model(self, lora: int) -> torch.nn.Module:
        return smollm2.model(self.options.folder, lora=lora)

    def task(self, case: Case) -> fv.Task:
        names = case.trainable or example.scales(self.options.folder)
        key = names, case.lora, case.seed, case.max_records
        if key not in self.tasks:
            self.tasks.clear()  # one at a time is on the device
            split = fv.split("iid", self.data, CLIENTS, fv.Seed.root(case.seed), max_records=case.max_records)
            made = self.model(case.lora)
            self.tasks[key] = fv.Task(made, self.data, split, trainable=list(names), device=self.options.device)
        return self.tasks[key]

    def run(self, name: str, case: Case) -> None:
        path = self.options.out / f"{self.options.part}-{name}.json"
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["done"]:
            return
        began, task = time.monotonic(), self.task(case)
        before = task.evaluate(task.initial)
        told = {"name": name, "method": case.method.name, "seed": case.seed}
        told |= {"trainable": list(case.trainable) or "middle"}
        told |= {"weights": task.layout.size, "settings": str(case.method), "preparing": time.monotonic() - began}
        told |= self.where | {"before": before, "done": False}
        rows: list[dict[str, float]] = []
        seconds: list[float] = []

        def save() -> None:
            text = json.dumps(told | {"rounds": rows, "seconds": sum(seconds)}, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")

        def show(row: dict[str, float]) -> None:
            rows.append(row)
            save()
            share = f"validation {100 * row.get('validation_accuracy', row['accuracy']):.2f}%"
            if "validation_accuracy" in row:
                share += f" test {100 * row['accuracy']:.2f}%"
            sent = f"{row['up']:,.0f} up {row['down']:,.0f} down, most {row['most']:,.0f} bytes"
            print(f"{name} round {row['round']:.0f}: {share} {sent} {sum(seconds):.1f} s", flush=True)

        observe = example.recorded(show)

        def observed(row: Row) -> None:
            seconds.append(row.seconds)
            observe(row)

        result = fv.run(
            task,
            case.method,
            rounds=case.rounds,
            cohort=COHORT,
            seed=case.seed,
            evaluate_every=min(EVERY, max(1, case.rounds // 5)),
            observer=observed,
            stop=lambda: time.monotonic() > self.until,
        )
        told |= {"done": result.stopped == "rounds", "stopped": result.stopped}
        if result.ledger.rows and result.ledger.rows[-1].epsilon is not None:
            told["epsilon"] = result.ledger.rows[-1].epsilon
        save()

    # ------------------------------------------------------------------------------------------------ timing

    def timing(self) -> None:
        path = self.options.out / "timing.json"
        task = self.task(Case(self.probing()))
        found: dict[str, Any] = self.where | {"weights": task.layout.size}
        found |= {"sentences": 128, "tokens": int((task.x[:128] != 0).sum())}
        for capture in (False, True):
            for directions in (1, 8, 32):
                if time.monotonic() > self.until:
                    break
                with using(capture=capture):
                    name = f"{'captured' if capture else 'eager'}, {directions} directions"
                    found[name] = example.milliseconds(task, self.probing(directions, centered=False))
                    print(name, f"{found[name]:.2f} ms a pass", flush=True)
                    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        found["operators"] = self.profile(task)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def profile(self, task: fv.Task) -> list[Any]:
        """What takes the time of a question of 32 directions: operators, milliseconds and calls."""
        from torch.profiler import ProfilerActivity, profile

        prober, w = self.probing().prober(task), task.initial[None]
        x, y = task.x[:128][None], task.y[:128][None]
        share = torch.full((1, x.shape[1], 1), 1 / x.shape[1], device=task.device)
        gpu = task.device.type == "cuda"
        with forward_only(task.device), using(capture=False):
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
            with profile(activities=activities) as seen:
                prober.slopes(w, torch.tensor([1], device=task.device), x, y, share, 32).sum().item()

        def spent(event: Any) -> float:
            return float(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1000

        events = sorted(seen.key_averages(), key=spent, reverse=True)[:30]
        return [[event.key[:90], round(spent(event), 3), event.count] for event in events]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("timing", "sweep", "seeds", "rivals", "private", "secure"))
    parser.add_argument("folder", type=Path, help="a folder written by examples/smollm2.py")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", help="float32 or bfloat16 (default: bfloat16 with cuda, else float32)")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="end the part after so long")
    parser.add_argument("--only", nargs="+", help="runs of the part (default: all)")
    parser.add_argument("--like", default="best", help="the case of the sweep that seeds, private and secure use")
    parser.add_argument("--eager", action="store_true", help="capture no CUDA graphs")
    parser.add_argument("--rounds", type=int, help="fewer rounds in each run, to try a part")
    parser.add_argument("--commit", help="the commit that is measured")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = Parts(options)
    if options.part == "timing":
        parts.timing()
        return
    cases: Mapping[str, Case] = dict[str, Callable[[], dict[str, Case]]](
        sweep=parts.sweep, seeds=parts.seeds, rivals=parts.rivals, private=parts.private, secure=parts.secure
    )[options.part]()
    for name, case in cases.items():
        if time.monotonic() < parts.until and (not options.only or name in options.only):
            with using(capture=not options.eager):
                parts.run(name, dataclasses.replace(case, rounds=options.rounds or case.rounds))


if __name__ == "__main__":
    main()
