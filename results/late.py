"""A server that waits for its cohort against one that goes on, where some clients are far slower than others.

python results/late.py --out results/late.json [--workers N] [--toy]

Every run has the same simulated time. Learning rates are those of `digits/fedavg` and were not tuned for any of the
servers. Of 50 clients, each with classes of its own by a Dirichlet split, 10 are busy at once. A client's mean time to
an answer is log-normal, and a single time exponential around it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

import fedveil as fv
from fedveil.runs import recipe
from fedveil.runs.fingerprint import environment

SECONDS, SEEDS, TARGET = 100.0, (0, 1, 2), 0.95
TASK = ("split.kind=dirichlet", "split.alpha=0.3", "split.clients=50", "cohort.size=10", "cohort.latency=1.0")
TASK = (*TASK, "cohort.spread=1.0", "rounds=100000")
SERVERS: dict[str, tuple[str, ...]] = {
    "waits": (),
    "waits 2 s": ("cohort.deadline=2.0",),
    "buffer 10": ("cohort.buffer=10",),
    "buffer 5": ("cohort.buffer=5",),
    "buffer 5, all count the same": ("cohort.buffer=5", "cohort.staleness=0.0"),
    "buffer 2": ("cohort.buffer=2",),
}


def run(job: tuple[str, int, float]) -> dict[str, Any]:
    """One run: accuracy in the end, and when and after how many bytes the target was reached."""
    name, seed, seconds = job
    torch.set_num_threads(1)
    plan = recipe.read("digits/fedavg", [*TASK, *SERVERS[name], f"seed={seed}"])
    rows: list[fv.Row] = []
    now = [0.0]

    def see(row: fv.Row) -> None:
        assert isinstance(row.simulated, float)
        rows.append(row)
        now.append(now[-1] + row.simulated)

    fv.run(
        plan.build(),
        plan.method,
        rounds=plan.rounds,
        cohort=plan.cohort,
        seed=seed,
        observer=see,
        stop=lambda: now[-1] >= seconds,
    )
    rows = rows if now[-1] == seconds else rows[:-1]  # the last one ended later
    reached = next((i for i, row in enumerate(rows) if row.metrics["accuracy"] >= TARGET), None)
    answers = sum(len(row.cohort) - len(row.missing) for row in rows)
    old = [row.metrics.get("staleness", 0.0) for row in rows]
    return {
        "steps": len(rows),
        "answers": answers,
        "bytes_up": sum(row.bytes_up for row in rows),
        "staleness": statistics.mean(old),
        "staleness_most": max(row.metrics.get("staleness_most", 0) for row in rows),
        "stale": sum(why.startswith("stale") for row in rows for why in row.missing.values()),
        "accuracy": statistics.mean(row.metrics["accuracy"] for row in rows[-3:]),
        "seconds_to_target": None if reached is None else now[reached + 1],
        "bytes_to_target": None if reached is None else sum(row.bytes_up for row in rows[: reached + 1]),
    }


def commit() -> str | None:
    """The commit of the working tree, where it is one."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Means over the seeds, as a table in Markdown."""
    lines = [
        "| server | steps | answers | too old | mean staleness | accuracy, % | seconds to 95% | megabytes up to 95% |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, runs in found.items():
        counts = [f"{statistics.mean(each[key] for each in runs):.0f}" for key in ("steps", "answers", "stale")]
        old, right = statistics.mean(each["staleness"] for each in runs), [100 * each["accuracy"] for each in runs]
        cells = [name, *counts, f"{old:.2f}"]
        cells.append(f"{statistics.mean(right):.2f} ± {statistics.stdev(right):.2f}")
        for key, scale, digits in (("seconds_to_target", 1, 1), ("bytes_to_target", 1e6, 2)):
            reached = [each[key] / scale for each in runs if each[key] is not None]
            all_did = len(reached) == len(runs)
            cells.append(f"{statistics.mean(reached):.{digits}f}" if all_did else f"{len(reached)} of {len(runs)} did")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="20 simulated seconds a run, to see that it works")
    options = parser.parse_args()
    seconds = 20.0 if options.toy else SECONDS
    jobs = [(name, seed, seconds) for name in SERVERS for seed in SEEDS]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        runs = pool.map(run, jobs, chunksize=1)
    found = {name: runs[len(SEEDS) * i : len(SEEDS) * (i + 1)] for i, name in enumerate(SERVERS)}
    command = f"python results/late.py --out results/late.json --workers {options.workers}"
    told = {"command": command, **environment(device="cpu", commit=commit()), "seconds": seconds, "figures": found}
    options.out.write_text(json.dumps(told, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
