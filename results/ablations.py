"""Ablations: one recipe, a few changes to it, three seeds, a table.

python results/ablations.py fedlap-digits           run what is not there yet, and print the table
python results/ablations.py fedlap-digits --toy     one round of each variant, to see that it works
python results/ablations.py --write                 write results/ablations/README.md from all results

`results/ablations/NAME.toml` says what is run, and NAME.json beside it holds what came of it. Keys of the first:

title     the heading of the table
recipe    what every variant starts from
changes   changes to it for all variants, as for `fedveil run --set`
records   how many training records are used, drawn at random; all of them by default
choose    whether variants are tested on a tenth of the training records, held out, instead of on the test records
seeds     0, 1 and 2 by default
metrics   numbers of the ledger to show beside the accuracy, as means over the rounds
shows     what the table shows, in a few sentences
imports   modules beside this one that define methods of the variants
variants  name -> changes; the first may name another recipe instead of a change
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fedveil as fv
from fedveil import data
from fedveil.runs import recipe
from fedveil.runs.fingerprint import environment
from fedveil.runs.recipe import Recipe

HERE = Path(__file__).resolve().parent / "ablations"
INTRODUCTION = """# Ablations

One recipe, a few changes to it, and what they do. Accuracies are means and standard deviations over seeds. Bytes are
those that a client sends in a round. Seconds are those of a run on one core of a busy machine, so compare them only
roughly. This page is written by `python results/ablations.py --write` from the results beside it."""
HELD_OUT = 10  # one of so many training records is held out for choosing


@dataclass(frozen=True)
class Ablation:
    """What `NAME.toml` says."""

    name: str
    title: str
    recipe: str
    variants: dict[str, list[str]]
    changes: list[str] = field(default_factory=list)
    records: int | None = None
    choose: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)
    metrics: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    shows: str = ""

    @classmethod
    def read(cls, name: str) -> Ablation:
        return cls(name, **tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8")))

    def plan(self, variant: str, seed: int, toy: bool = False) -> Recipe:
        for module in self.imports:
            imported(module)
        source, changes = self.recipe, self.variants[variant]
        if changes and "=" not in changes[0]:
            source, changes = changes[0], changes[1:]
        return recipe.read(source, [*self.changes, *changes, f"seed={seed}", *["rounds=1"] * toy])

    @property
    def results(self) -> dict[str, Any]:
        """What is in `NAME.json`; empty where there is none."""
        path = HERE / f"{self.name}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def imported(module: str) -> None:
    """Import a module beside this one, once."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, HERE.parent / f"{module}.py")
        assert spec
        assert spec.loader
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])


def part(whole: data.Data, records: int | None, choose: bool) -> data.Data:
    """Some of the training records, the same for all seeds, and if asked a tenth of them in place of the test set."""
    order = torch.randperm(len(whole.x), generator=torch.Generator().manual_seed(0))[:records]
    held = len(order) // HELD_OUT if choose else 0
    test, train = order[:held], order[held:]
    groups = None if whole.groups is None else whole.groups[train]
    kept = dataclasses.replace(whole, x=whole.x[train], y=whole.y[train], groups=groups)
    return dataclasses.replace(kept, test_x=whole.x[test], test_y=whole.y[test]) if choose else kept


def measure(job: tuple[Ablation, str, int, Path | None, bool, str]) -> dict[str, Any]:
    """One run: its accuracies, bytes, seconds and the means of the ledger's numbers."""
    ablation, variant, seed, directory, toy, device = job
    torch.set_num_threads(1)
    plan = ablation.plan(variant, seed, toy)
    loaded = data.load(plan.task.data, directory, **plan.task.data_options)
    task = plan.on(part(loaded, ablation.records, ablation.choose), device)
    result = fv.run(task, plan.method, rounds=plan.rounds, cohort=plan.cohort, seed=seed)
    rows, summary = result.ledger.rows, result.summary()
    shown = {name: [row.metrics[name] for row in rows if name in row.metrics] for name in ablation.metrics}
    return {
        "accuracy": result.accuracy,
        "accuracy_last3": summary["accuracy_last3"],
        "bytes_up": sum(row.bytes_up for row in rows) / sum(len(row.up) for row in rows),
        "epsilon": rows[-1].epsilon,
        "seconds": round(sum(row.seconds for row in rows), 1),
        "metrics": {name: statistics.mean(values) for name, values in shown.items() if values},
    }


def commit() -> str | None:
    """The commit of the working tree, where it is one."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def run(ablation: Ablation, options: argparse.Namespace) -> dict[str, Any]:
    """Run the variants and seeds that are missing; what ends is written at once."""
    told = ablation.results if not options.toy else {}
    runs: dict[str, dict[str, Any]] = told.get("runs", {})
    jobs = [
        (ablation, variant, seed, options.data_dir, options.toy, options.device)
        for seed in ablation.seeds[: 1 if options.toy else None]
        for variant in ablation.variants
        if options.only in variant and str(seed) not in runs.get(variant, {})
    ]
    command = f"python results/ablations.py {ablation.name} --workers {options.workers}"
    command += f" --device {options.device}" * (options.device != "cpu")
    where = environment(device=options.device, commit=options.commit or commit())
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for (_, variant, seed, *_), found in zip(jobs, pool.imap(measure, jobs), strict=True):
            runs.setdefault(variant, {})[str(seed)] = found
            print(f"{ablation.name}: {variant}, seed {seed}: {100 * found['accuracy']:.2f}%, {found['seconds']} s")
            if not options.toy:
                told = {"command": command, **where, "runs": runs}
                (HERE / f"{ablation.name}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return runs


def table(ablation: Ablation, runs: dict[str, dict[str, Any]]) -> str:
    """A row for each variant: mean ± deviation over the seeds."""
    private = any(each["epsilon"] for seeds in runs.values() for each in seeds.values())
    heads = ["variant", "accuracy, %", "mean of last 3, %", *ablation.metrics, *["ε"] * private, "bytes up", "seconds"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for variant in ablation.variants:
        if variant not in runs:
            continue
        each = list(runs[variant].values())
        cells = [variant, *(spread([100 * run[key] for run in each]) for key in ("accuracy", "accuracy_last3"))]
        cells += [spread([run["metrics"][m] for run in each if m in run["metrics"]]) for m in ablation.metrics]
        cells += [spread([run["epsilon"] or 0 for run in each])] * private
        cells += [f"{statistics.mean(run[key] for run in each):,.0f}" for key in ("bytes_up", "seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    if not values:
        return ""
    mean = statistics.mean(values)
    digits = 2 if abs(mean) >= 1 else 3
    return f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(set(values)) > 1 else "")


def page() -> str:
    """results/ablations/README.md."""
    parts = [INTRODUCTION]
    for path in sorted(HERE.glob("*.json")):
        ablation = Ablation.read(path.stem)
        told, setting = ablation.results, [f"`{ablation.recipe}`"]
        setting += [f"`{change}`" for change in ablation.changes]
        setting += [f"{ablation.records:,} training records"] if ablation.records else []
        setting += ["tested on a tenth of the training records, held out for choosing"] * ablation.choose
        seeds = sorted({int(seed) for runs in told["runs"].values() for seed in runs})
        origin = (
            f"seeds {', '.join(map(str, seeds))}; {told['device']}, PyTorch {told['torch']}, commit {told['commit']}"
        )
        parts += [f"## {ablation.title}", f"{', '.join(setting)}; {origin}:", f"    {told['command']}"]
        parts += [table(ablation, told["runs"]), *[ablation.shows.strip()] * bool(ablation.shows)]
        named = [v for v, changes in ablation.variants.items() if changes]
        parts += (
            ["\n".join(f"- {v}: {', '.join(f'`{c}`' for c in ablation.variants[v])}" for v in named)] if named else []
        )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--data-dir", type=Path, metavar="DIR")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--commit", help="the commit that is measured, where git does not know it")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the variants those whose name has this in it")
    parser.add_argument("--toy", action="store_true", help="one round and one seed; nothing is written")
    parser.add_argument("--write", action="store_true", help="write results/ablations/README.md")
    options = parser.parse_args()
    for name in options.names:
        ablation = Ablation.read(name)
        print(table(ablation, run(ablation, options)))
    if options.write:
        (HERE / "README.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
