"""What is measured of FedLAP and FedLAP-DP on a GPU, beside FedDM, FedAvg, FedProx and SCAFFOLD.

python results/fedlap.py --out DIR                    everything
python results/fedlap.py --out DIR rounds private     some of its parts
python results/fedlap.py --out DIR --rounds 3 radius  with so many rounds
python results/fedlap.py --out DIR --only fedlap      some of the runs
python results/fedlap.py --out DIR --toy              all of it in miniature, to see that it works

A part writes DIR/PART.json, after every run, and runs are folders of DIR; one that is there is not done again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from fedveil import data, recipe
from fedveil.cli.jobs import Job, Where
from fedveil.recipe import Recipe
from fedveil.runs import environment

CLEAR = {  # name: recipe of a data set's folder, changes
    "fedlap": ("fedlap", ()),
    "feddm": ("feddm", ()),
    "fedavg-2class": ("fedavg-2class", ()),
    "fedavg-2class-slow": ("fedavg-2class", ("method.local.lr=0.01",)),
    "fedprox-2class": ("fedprox-2class", ()),
    "scaffold-2class": ("scaffold-2class", ()),
    "scaffold-2class-slow": ("scaffold-2class", ("method.local.lr=0.01",)),
}
PRIVATE = ("fedlap-dp", "dp-fedavg", "dp-fedprox")  # those that there are
AUGMENT = 'method.augment="flip crop scale rotate color"'


@dataclass(frozen=True)
class Run:
    """A recipe's run: its folder, what it is a run of, and for how many rounds."""

    name: str
    source: str
    changes: tuple[str, ...]
    rounds: int


def clear(of: str, rounds: int) -> list[Run]:
    """All methods without noise on a data set."""
    return [Run(f"{of}/{name}", f"{of}/{source}", changes, rounds) for name, (source, changes) in CLEAR.items()]


def private(of: str, rounds: int) -> list[Run]:
    """All methods with record-level differential privacy on a data set."""
    names = [f"{of}/{name}" for name in PRIVATE]
    return [Run(name, name, (), rounds) for name in names if name in recipe.names()]


RUNS: dict[str, list[Run]] = {
    "rounds": [*clear("mnist", 10), *clear("fashion", 10)],
    "private": [*private("mnist", 15), *private("fashion", 15)],
    "rates": [  # which rate is best for DP-FedAvg
        Run(f"rates/{rate}", "mnist/dp-fedavg", (f"method.local.lr={rate}",), 5)
        for rate in (0.02, 0.05, 0.2, 0.5)
        if "mnist/dp-fedavg" in recipe.names()
    ],
    "radius": [  # table 3
        Run(f"radius/{region}", "mnist/fedlap", (f"method.region={region}",), 5)
        for region in ("min", "max", "median", "fixed")
    ],
    "images": [  # figure 5
        Run(f"images/{count}", "mnist/fedlap", (f"method.images={count}",), 3) for count in (10, 20, 50, 100)
    ],
    "cifar": [*clear("cifar10", 20), Run("cifar10/fedlap-augmented", "cifar10/fedlap", (AUGMENT,), 20)],
    "cifar-private": private("cifar10", 15),
}
TOY = {
    "fedlap": ("images=2", "passes=1", "trajectories=1", "batches=2", "batch=8", "steps=3"),
    "feddm": ("images=2", "draws=2", "batches=1", "batch=8", "steps=3"),
}


@dataclass
class Bench:
    """Where to measure, and how much."""

    out: Path
    directory: Path
    device: str
    toy: bool
    compile: bool
    rounds: int | None
    loaded: dict[str, data.Data]

    def plan(self, source: str, changes: Sequence[str], rounds: int) -> Recipe:
        """A recipe with these changes and so many rounds, or as --rounds and --toy say."""
        name = recipe.read(source).method.name
        small = [f"method.{change}" for change in TOY.get(name, ("local.steps=2", "local.batch=8"))]
        changes = [*changes, f"rounds={self.rounds or rounds}"]
        return recipe.read(source, [*changes, *small, "rounds=1"] if self.toy else changes)

    def job(self, path: Path, plan: Recipe) -> Job:
        threads = torch.get_num_threads()
        where = Where(str(self.directory), self.device, None, None, threads, False, False, compile=self.compile)
        command = f"python results/fedlap.py {shlex.join(sys.argv[1:])}"
        return Job(path, plan, environment(command=command, **msgspec.structs.asdict(where)))

    def train(self, run: Run) -> dict[str, Any]:
        """Do a run in its folder; what came of it, and the accuracy and ε of each round."""
        plan = self.plan(run.source, run.changes, run.rounds)
        job = self.job(self.out / run.name, plan)
        job.train(plan.on(self.data(job), self.device), lambda: False)
        rows = job.ledger.rows
        return job.summary() | {
            "out": run.name,
            "curve": [row.metrics.get("accuracy") for row in rows],
            "epsilons": [row.epsilon for row in rows],
            "seconds_a_round": sum(row.seconds for row in rows) / len(rows),
            "metrics": rows[-1].metrics,
        }

    def data(self, job: Job) -> data.Data:
        """A job's data; a little of it where all is in miniature."""
        whole = job.data(False, self.loaded)
        if not self.toy:
            return whole
        x, y, test_x, test_y = whole.x[:300], whole.y[:300], whole.test_x[:50], whole.test_y[:50]
        return dataclasses.replace(whole, x=x, y=y, test_x=test_x, test_y=test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data-dir", type=Path, metavar="DIR")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, metavar="N", help="instead of as many as each part has")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the runs those whose name has this in it")
    parser.add_argument("--compile", action="store_true", help="as fedveil run --compile")
    parser.add_argument("--toy", action="store_true")
    chosen = parser.parse_args()
    directory = data.files.data_directory(chosen.data_dir)
    device = recipe.pick_device(chosen.device)
    bench = Bench(chosen.out, directory, device, chosen.toy, chosen.compile, chosen.rounds, {})
    bench.out.mkdir(parents=True, exist_ok=True)
    for part in chosen.parts or RUNS:
        began, told = time.monotonic(), environment()
        for run in RUNS[part]:
            if chosen.only in run.name:
                told[run.name] = bench.train(run)
                _write(bench.out / f"{part}.json", told)
        print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)


def _write(path: Path, told: dict[str, Any]) -> None:
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
