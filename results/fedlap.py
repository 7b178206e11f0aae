"""The runs of FedLAP and FedLAP-DP on a GPU, beside FedDM, FedAvg, FedProx and SCAFFOLD, in one process.

python results/fedlap.py --out DIR                    everything
python results/fedlap.py --out DIR rounds private     some of its parts
python results/fedlap.py --out DIR --only fedlap-dp   some of the runs
python results/fedlap.py --out DIR --toy              all of it in miniature, to see that it works

Each run is a folder of DIR, as `fedveil run` makes it; one that is there is continued. `fedveil audit` then tells
whether it can be said who was trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fedveil import data
from fedveil.cli.jobs import Job, holds_run
from fedveil.runs import recipe
from fedveil.runs.fingerprint import environment
from fedveil.runs.origin import Where
from fedveil.runs.recipe import Recipe

CLEAR = {  # name: recipe of a data set's folder, changes
    "fedlap": ("fedlap", ()),
    "feddm": ("feddm", ()),
    "fedavg-2class": ("fedavg-2class", ()),
    "fedavg-2class-slow": ("fedavg-2class", ("method.local.lr=0.01",)),
    "fedprox-2class": ("fedprox-2class", ()),
    "scaffold-2class": ("scaffold-2class", ()),
    "scaffold-2class-slow": ("scaffold-2class", ("method.local.lr=0.01",)),
}
PRIVATE = ("fedlap-dp", "dp-fedavg", "dp-fedprox", "dp-scaffold")  # those that there are
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


def varied(of: str, key: str, values: Sequence[object], rounds: int) -> list[Run]:
    """A recipe with other values of one key."""
    return [Run(f"{of}-{key.split('.')[-1]}-{value}", of, (f"{key}={value}",), rounds) for value in values]


RUNS: dict[str, list[Run]] = {
    "rounds": [*clear("mnist", 10), *clear("fashion", 10)],
    "private": [*private("mnist", 15), *private("fashion", 15)],
    "rates": [  # which is best
        *varied("mnist/dp-fedavg", "method.local.lr", (0.02, 0.05, 0.2, 0.5), 5),
        Run("fashion/fedlap-dp-slow", "fashion/fedlap-dp", ("method.lr=0.002",), 15),
    ],
    "radius": varied("mnist/fedlap", "method.region", ("max", "median", "fixed"), 5),  # table 3; "min" is the recipe's
    "images": varied("mnist/fedlap", "method.images", (10, 20, 100), 5),  # figure 5; 50 are the recipe's
    "passes": varied("mnist/fedlap", "method.passes", (5,), 5),  # the paper's; the recipe's one is a fifth of the work
    "cifar": [*clear("cifar10", 20), Run("cifar10/fedlap-augmented", "cifar10/fedlap", (AUGMENT,), 20)],
    "cifar-private": private("cifar10", 15),
}
TOY = {
    "fedlap": ("images=2", "passes=1", "trajectories=1", "batches=2", "batch=8", "steps=3"),
    "feddm": ("images=2", "draws=2", "batches=1", "batch=8", "steps=3"),
}


@dataclass
class Bench:
    """Where to run, and how much."""

    out: Path
    where: Where
    toy: bool
    loaded: dict[str, data.Data]

    def train(self, run: Run) -> None:
        path = self.out / run.name
        job = Job.held(path) if holds_run(path) else Job(path, self.plan(run), self.environment(run))
        if not job.ended:
            job.train(job.recipe.on(self.data(job), self.where.device), lambda: False)

    def plan(self, run: Run) -> Recipe:
        small: tuple[str, ...] = ()
        if self.toy:
            name = recipe.read(run.source).method.name
            small = ("rounds=1", *(f"method.{c}" for c in TOY.get(name, ("local.steps=2", "local.batch=8"))))
        return recipe.read(run.source, [*run.changes, f"rounds={run.rounds}", *small])

    def environment(self, run: Run) -> dict[str, object]:
        """As `fedveil run` would write it."""
        sets = [word for change in (*run.changes, f"rounds={run.rounds}") for word in ("--set", change)]
        compile = ["--compile"] if self.where.compile else []
        command = shlex.join(["fedveil", "run", run.source, *sets, "--device", self.where.device, *compile])
        return environment(command=command, **msgspec.structs.asdict(self.where))

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
    parser.add_argument("--only", default="", metavar="TEXT", help="of the runs those whose name has this in it")
    parser.add_argument("--compile", action="store_true", help="as fedveil run --compile")
    parser.add_argument("--toy", action="store_true")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.parts) - set(RUNS)):
        parser.error(f"there is no part {unknown[0]}; use {', '.join(RUNS)}")
    wanted = [(part, [run for run in RUNS[part] if chosen.only in run.name]) for part in chosen.parts or RUNS]
    if not any(runs for _, runs in wanted):
        parser.error(f"no run of {', '.join(chosen.parts or RUNS)} has '{chosen.only}' in its name")
    directory, threads = data.files.data_directory(chosen.data_dir), torch.get_num_threads()
    device = recipe.pick_device(chosen.device)
    where = Where(str(directory), device, None, None, threads, False, False, compile=chosen.compile)
    bench = Bench(chosen.out, where, chosen.toy, {})
    for part, runs in wanted:
        began = time.monotonic()
        for run in runs:
            bench.train(run)
        print(f"{part}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
