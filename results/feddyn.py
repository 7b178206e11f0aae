"""FedDyn against FedAvg where clients hold two classes each, both tuned over the same learning rates.

python results/feddyn.py --out results/feddyn.json [--workers N] [--toy]

Settings are chosen by the mean accuracy over three seeds, and reported on three others. Both look at the same test
records, so the reported accuracies are a little optimistic for either method.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import subprocess
from pathlib import Path

import torch

import fedveil as fv
from fedveil.runs import recipe
from fedveil.runs.fingerprint import environment

RATES, ALPHAS = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (0.03, 0.1, 0.3)
TUNING, REPORTED = (10, 11, 12), (0, 1, 2)
Setting = tuple[str, ...]


def settings() -> dict[str, list[Setting]]:
    rates = [f"method.local.lr={rate}" for rate in RATES]
    alphas = [f"method.alpha={alpha}" for alpha in ALPHAS]
    return {"fedavg": [(rate,) for rate in rates], "feddyn": list(itertools.product(rates, alphas))}


def accuracy(job: tuple[str, Setting, int, int | None]) -> float:
    """The mean test accuracy of the last three rounds of one run."""
    name, changes, seed, rounds = job
    torch.set_num_threads(1)
    short = [f"rounds={rounds}"] if rounds else []
    plan = recipe.read(f"digits/{name}-classes", [*changes, f"seed={seed}", *short])
    result = fv.run(plan.build(), plan.method, rounds=plan.rounds, cohort=plan.cohort, seed=seed)
    return float(result.summary()["accuracy_last3"])


def commit() -> str | None:
    """The commit of the working tree, where it is one."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="two rounds a run, to see that it works")
    options = parser.parse_args()
    rounds = 2 if options.toy else None
    found = {}
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for name, tried in settings().items():
            jobs = [(name, setting, seed, rounds) for setting in tried for seed in TUNING]
            reached = pool.map(accuracy, jobs, chunksize=1)
            each = {setting: reached[3 * i : 3 * i + 3] for i, setting in enumerate(tried)}
            best = max(tried, key=lambda setting: statistics.mean(each[setting]))
            last = pool.map(accuracy, [(name, best, seed, rounds) for seed in REPORTED], chunksize=1)
            found[name] = {
                "settings": len(tried),
                "chosen": list(best),
                "tuning": {" ".join(setting): accuracies for setting, accuracies in each.items()},
                "accuracy": last,
                "mean": statistics.mean(last),
                "deviation": statistics.stdev(last),
            }
    command = f"python results/feddyn.py --out results/feddyn.json --workers {options.workers}"
    told = {"command": command, **environment(device="cpu", commit=commit()), "figures": found}
    options.out.write_text(json.dumps(told, indent=2) + "\n")
    for name, row in found.items():
        print(f"{name}: {row['mean']:.4f} ± {row['deviation']:.4f} with {' '.join(row['chosen'])}")


if __name__ == "__main__":
    main()
