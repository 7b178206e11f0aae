"""A few weights of a frozen network: forward passes only, beside backpropagation.

`images.py`, `sentences.py` and `prompts.py` are programs that use this module. There are four steps:

sweep    settings of each method on the IID split compared on validation records; test records are not loaded
seeds    the best settings of each method with three seeds and on each split, on test records
central  what the same layer reaches where one party has all records, or only those that settings are chosen on
attacks  what the server rebuilds from the messages of ten clients, for the cases that a study names

The file is rewritten after each run, and a run that it has is not repeated. Several processes, with different --splits
and --methods, may fill one file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import heads as example
import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

import fedveil as fv
from fedveil.attacks import matrix
from fedveil.attacks.exposure import Attack, control
from fedveil.runs.fingerprint import environment

CLIENTS, COHORT, TUNED, SEEDS = 32, 8, 10, (0, 1, 2)
PARTS = ("sweep", "seeds", "central", "attacks")  # of the file of results
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1)
Case = tuple[Callable[..., fv.Method], int, dict[str, Any]]  # a method, its rounds, its settings


@dataclass(frozen=True)
class Study:
    """What is compared on a file of features.

    script: its program
    noun:   what records are
    sweep:  settings of each method; the best one on validation records is taken
    longer: rounds of methods whose best settings are then used for more of them
    read:   the data of the file, or folder, that is given
    build:  the task of some data, a number of clients, a kind of split, a seed and a method's changes
    changes: to the task, by method
    alone:  what is reached without a federation, by name; None: the new layer is fitted by one party
    once:   methods that are run on the IID split only
    attacks: cases whose messages are attacked
    """

    script: str
    noun: str
    sweep: Mapping[str, Sequence[Case]]
    longer: Mapping[str, int] = field(default_factory=dict)
    read: Callable[[Path], fv.Data] = example.read
    build: Callable[..., fv.Task] = example.build
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alone: Mapping[str, Callable[[fv.Data], dict[str, Any]]] | None = None
    once: Sequence[str] = ()
    splits: Sequence[str] = ("iid", "dirichlet")
    attacks: Sequence[matrix.Case] = ()


# ---------------------------------------------------------------------------------------------------- central


def fitted(x: Tensor, y: Tensor, classes: int, decay: float) -> torch.nn.Linear:
    """The layer with the least loss on some records, by L-BFGS."""
    layer = example.head(x.shape[1:], classes)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Any:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(x), y) + decay / 2 * layer.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return layer


@torch.no_grad()
def accuracy(layer: torch.nn.Linear, x: Tensor, y: Tensor) -> float:
    return float((layer(x).argmax(1) == y).float().mean())


def central(data: fv.Data) -> dict[str, float]:
    """One party has all training records. The weight decay is chosen on the validation records."""
    held = held_out(data)
    scores = {decay: accuracy(fitted(data.x, data.y, data.classes, decay), *held) for decay in DECAYS}
    best = max(scores, key=scores.__getitem__)
    layer = fitted(data.x, data.y, data.classes, best)
    told = {"records": len(data.x), "weight_decay": best, "validation_accuracy": scores[best]}
    return told | {"accuracy": accuracy(layer, data.test_x, data.test_y)}


def few(data: fv.Data) -> dict[str, float]:
    """One party has the validation records only. The weight decay is chosen on a fifth of them."""
    x, y = held_out(data)
    part = len(x) // 5
    scores = {d: accuracy(fitted(x[part:], y[part:], data.classes, d), x[:part], y[:part]) for d in DECAYS}
    best = max(scores, key=scores.__getitem__)
    layer = fitted(x, y, data.classes, best)
    return {"records": len(x), "weight_decay": best, "accuracy": accuracy(layer, data.test_x, data.test_y)}


def held_out(data: fv.Data) -> tuple[Tensor, Tensor]:
    assert data.validation_x is not None
    assert data.validation_y is not None
    return data.validation_x, data.validation_y


# ---------------------------------------------------------------------------------------------------- the runs


class Results:
    """The file of results: runs by name, kept as they end."""

    def __init__(self, study: Study, options: argparse.Namespace) -> None:
        self.study, self.features, self.path = study, options.features, options.out
        self.found: dict[str, Any] = {part: {} for part in PARTS}
        self.read()

    def read(self) -> None:
        """Take over what the file has: another process may fill it, too."""
        if self.path.exists():
            told = json.loads(self.path.read_text(encoding="utf-8"))
            self.found |= {part: told[part] for part in PARTS if part in told}

    def write(self) -> None:
        for part in PARTS:
            self.found[part] = dict(sorted(self.found[part].items()))
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    @functools.cached_property
    def data(self) -> fv.Data:
        return self.study.read(self.features)

    def keep(self, part: str, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A run by its name: from the file, or made and written to it."""
        if name not in self.found[part]:
            began = time.perf_counter()
            made = make() | {"seconds": round(time.perf_counter() - began, 1)}
            self.read()
            self.found[part][name] = made
            self.write()
            figures = {key: round(value, 4) for key, value in made.items() if isinstance(value, float)}
            print(f"{part} {name}: {figures}", flush=True)
        kept: dict[str, Any] = self.found[part][name]
        return kept

    def central(self) -> None:
        if self.study.alone is not None:
            for name, make in self.study.alone.items():
                self.keep("central", name, lambda make=make: make(self.data))
            return
        self.keep("central", f"all training {self.study.noun}", lambda: central(self.data))
        self.keep("central", f"validation {self.study.noun} only", lambda: few(self.data))
        if (told := self.features.with_suffix(".json")).exists():
            untrained = json.loads(told.read_text(encoding="utf-8"))["untrained"]
            self.keep("central", "nothing: the whole network as it is", lambda: {"records": 0, "accuracy": untrained})

    def attacks(self) -> None:
        """What the server rebuilds from the messages of ten clients that hold a few records each."""
        how, seed, tell = Attack(victims=matrix.CLIENTS, seconds=600), fv.Seed.root(0), lambda said: None
        for case in self.study.attacks:
            kept = torch.from_numpy(seed.numpy().permutation(len(self.data.x))[: matrix.CLIENTS * case.records])
            data = dataclasses.replace(self.data, x=self.data.x[kept], y=self.data.y[kept])
            task = self.study.build(data, matrix.CLIENTS)

            def attacked(case: matrix.Case = case, task: fv.Task = task) -> dict[str, Any]:
                pictured = task.x.is_floating_point()
                checked = control(task, how.inversion, seed.child("control")) if pictured else None
                rows, _ = matrix.attacked(case, task, seed, how, checked, tell)
                return {"rows": msgspec.to_builtins(rows)}

            self.keep("attacks", case.name, attacked)

    def chosen(self, name: str) -> Case:
        """The settings of a method: the only ones, or those that were best on the first split."""
        scores, cases = [], self.study.sweep[name]
        if len(cases) == 1:
            return cases[0]
        for case in cases:
            told = self.keep("sweep", f"{name}: {words(case)}", lambda case=case: self.tuning(name, case))
            scores.append(told["validation_accuracy"])
        make, rounds, settings = cases[scores.index(max(scores))]
        return make, self.study.longer.get(name, rounds), settings

    def tuning(self, name: str, case: Case) -> dict[str, Any]:
        x, y = held_out(self.data)
        data = dataclasses.replace(self.data, test_x=x, test_y=y, validation_x=None, validation_y=None)
        found = self.train(data, self.study.splits[0], name, case, TUNED)
        return {"validation_accuracy": found.pop("accuracy")} | {key: found[key] for key in ("up", "down")}

    def train(self, data: fv.Data, split: str, name: str, case: Case, seed: int) -> dict[str, Any]:
        make, rounds, settings = case
        task = self.study.build(data, CLIENTS, split, seed, **self.study.changes.get(name, {}))
        found = example.train(task, make(**settings), rounds, COHORT, seed, max(1, rounds // 20))
        last = found["rounds"][-1]
        told = {key: last[key] for key in ("accuracy", "loss", "up", "down", "most", "epsilon") if key in last}
        told |= {key: found[key] for key in ("up_a_round", "down_a_round", "weights")}
        curve = [[row["round"], row["up"] + row["down"], row["accuracy"]] for row in found["rounds"]]
        return told | {"rounds": rounds, "settings": words(case), "curve": curve}

    def seeds(self, splits: Sequence[str], methods: Sequence[str]) -> None:
        for split in splits:
            for name in methods:
                if split != self.study.splits[0] and name in self.study.once:
                    continue
                case = self.chosen(name)
                for seed in SEEDS:
                    run = lambda n=name, c=case, seed=seed: self.train(self.data, split, n, c, seed)  # noqa: B023, E731
                    self.keep("seeds", f"{split} {name} {seed}", run)


def words(case: Case) -> str:
    """The settings of a run in words."""
    _, rounds, settings = case
    shown = [f"{name} {value:g}" for name, value in settings.items()]
    return ", ".join([*shown, f"{rounds} rounds"])


def main(told: str | None, study: Study) -> None:
    methods = list(study.sweep)
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="the file of features, or the folder of prompts")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file of results")
    parser.add_argument("--splits", nargs="+", default=study.splits, help=f"default: {' '.join(study.splits)}")
    parser.add_argument("--methods", nargs="*", default=methods, help=f"default: {' '.join(methods)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(study, options)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    given = "" if options.splits == study.splits else f" --splits {' '.join(options.splits)}"
    results.found |= {"command": f"python results/{study.script} FEATURES --out results/{options.out.name}{given}"}
    results.found |= environment(device="cpu", commit=commit.stdout.strip())
    results.seeds(options.splits, options.methods)
    results.central()
    results.attacks()
    results.write()
