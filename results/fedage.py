"""What is measured of FedAGE on a GPU: pairs against the floor, their errors, the sweep of n, and runs beside FedAvg.
Its part `pretraining` is for a CPU.

python results/fedage.py --out DIR               everything
python results/fedage.py --out DIR pairs sweep   some of its parts
python results/fedage.py --out DIR --toy         all of it in miniature, to see that it works

A part writes DIR/PART.json, and runs are folders of DIR. Trained pairs go to `fedage` beside the data sets, which
--data-dir names, and are used again; those of --toy, which are good for nothing, to DIR/data/fedage.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

import fedveil as fv
from fedveil import data
from fedveil.cli.jobs import Job
from fedveil.codecs import autoencoder
from fedveil.codecs.autoencoder import Code, Pair
from fedveil.codecs.autoencoder import errors as errors_of
from fedveil.codecs.pretraining import PRETRAININGS, Pretraining, pretrain
from fedveil.codecs.pretraining import groups as drawn
from fedveil.core.seeds import Seed
from fedveil.report.figures import densities, svg
from fedveil.runs import recipe
from fedveil.runs.fingerprint import environment
from fedveil.runs.origin import Where

GRID = [  # b, s; each for every cohort
    *((block, 64) for block in (16, 64, 256)),
    *((64, levels) for levels in (16, 256)),
]
COHORTS = (5, 10, 40)
RUNS = {  # folder: recipe, changes
    "mnist/fedavg-batch-100": ("mnist/fedavg-batch-100", ()),
    "mnist/fedage-iid": ("mnist/fedage-iid", ()),
    "mnist/fedage-iid-linear": ("mnist/fedage-iid", ("method.up.code=linear",)),
    "mnist/fedage-iid-unshuffled": ("mnist/fedage-iid", ("method.up.permute=false", "method.server.lr=1.0")),
    "mnist/fedavg-batch-100-shards": ("mnist/fedavg-batch-100-shards", ()),
    "mnist/fedage-shards": ("mnist/fedage-shards", ()),
    "mnist/fedage-shards-linear": ("mnist/fedage-shards", ("method.up.code=linear",)),
}
SHAKESPEARE = {name: (f"shakespeare/{name}", ("evaluate_every=5",)) for name in ("fedavg", "fedage")}
OWN, OTHER = 40, 12  # epochs of pairs that recipes use, and of the rest of the grid
SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass
class Bench:
    """Where to measure, and how much."""

    out: Path
    directory: Path
    device: str
    toy: bool
    loaded: dict[str, data.Data]

    def pair(self, code: Code, epochs: int) -> Pair:
        """A pair, trained if it is not there yet."""
        path = autoencoder.home() / code.file
        if not path.is_file():
            effort = (2, 200, 100) if self.toy else (epochs, 500_000 // code.cohort, 5000 // code.cohort)
            autoencoder.save(pretrain(code, Pretraining(*effort), self.device), path)
        return autoencoder.read(path, code).to(self.device)

    def run(self, name: str, source: str, changes: tuple[str, ...], rounds: int) -> dict[str, Any]:
        """A recipe's run in its folder; what came of it."""
        small = ("rounds=1", "cohort.size=3", "method.local.steps=2", "method.local.batch=8") if self.toy else ()
        plan = recipe.read(source, (*changes, *(small or (f"rounds={rounds}",))))
        where = Where(str(self.directory), self.device, None, None, torch.get_num_threads(), False, False)
        command = f"python results/fedage.py {shlex.join(sys.argv[1:])}"
        job = Job(self.out / name, plan, environment(command=command, **msgspec.structs.asdict(where)))
        job.train(plan.on(job.data(False, self.loaded), self.device), lambda: False)
        metrics = job.ledger.rows[-1].metrics
        return job.summary() | {"cosine": metrics.get("cosine"), "out": name}


def pairs(bench: Bench) -> dict[str, Any]:
    """σ_ν of learned pairs beside the floor, and of cohorts that are not their own."""
    rows = []
    for block, levels in GRID:
        for cohort in COHORTS:
            main = (block, levels) == (64, 64)  # the recipes' own
            code = Code(block, block // 2, levels, cohort, 64 if bench.toy else 512)
            pair = bench.pair(code, OWN if main else OTHER)
            row = {"block": block, "levels": levels, "cohort": cohort, "spread": pair.spread, "floor": code.floor}
            row["ratio"] = pair.spread / code.floor
            if main:
                row["others"] = {m: _ratio(pair, m, bench.device) for m in (1, cohort // 2, cohort, 2 * cohort)}
            rows.append(row)
            print(" ".join(f"{k} {v:.4g}" for k, v in row.items() if not isinstance(v, dict)), flush=True)
    return {"pairs": rows}


def _ratio(pair: Pair, cohort: int, device: str) -> float:
    """σ_ν for a cohort against the linear floor of that size."""
    groups = drawn(pair.code, 4000, Seed.root(1).child(cohort), device, cohort)
    own = Code(**{**vars(pair.code), "cohort": cohort})
    return float(errors_of(pair, groups).std()) / own.floor


def errors(bench: Bench) -> dict[str, Any]:
    """Whether ν is normal, by its histogram, moments and D'Agostino and Pearson's test; and whether it is random."""
    from scipy import stats

    found, drawn = {}, {}
    for name in ("learned", "linear"):
        code = Code(cohort=10, width=64 if bench.toy else 512, kind=name)
        pair = bench.pair(code, OWN) if name == "learned" else autoencoder.linear(code).to(bench.device)
        groups = drawn(code, 10_000, Seed.root(2), bench.device)
        nu = errors_of(pair, groups).cpu()
        sample = nu.flatten()[:: max(1, nu.numel() // 100_000)].double().numpy()
        statistic, p = stats.normaltest(sample)
        found[name] = {
            "samples": len(sample),
            "spread": float(nu.std()),
            "mean": float(nu.mean()),
            "skewness": float(stats.skew(sample)),
            "excess_kurtosis": float(stats.kurtosis(sample)),
            "normaltest": float(statistic),
            "p": float(p),
            "again_the_same": bool(torch.equal(nu, errors_of(pair, groups).cpu())),
        }
        drawn[name] = nu / nu.std()
    (bench.out / "errors.svg").write_text(svg(densities(drawn, "ν, in its standard deviations")), encoding="utf-8")
    return found


def sweep(bench: Bench) -> dict[str, Any]:
    """Figure 4: accuracy on MNIST, IID, for factors on n."""
    bench.pair(_pair_of("mnist/fedage-iid", bench), OWN)
    table = {}
    for scale in SWEEP:
        changes = (f"method.up.scale={scale}", *_small(bench))
        table[f"{scale:g}"] = bench.run(f"sweep/scale-{scale:g}", "mnist/fedage-iid", changes, 15)
    return table


def runs(bench: Bench) -> dict[str, Any]:
    """FedAGE beside FedAvg on MNIST, on the same splits, cohorts and initial weights."""
    bench.pair(_pair_of("mnist/fedage-iid", bench), OWN)
    return {name: bench.run(name, *_widened(bench, *what), 30) for name, what in RUNS.items()}


def shakespeare(bench: Bench) -> dict[str, Any]:
    """The same on Shakespeare's roles."""
    bench.pair(_pair_of("shakespeare/fedage", bench), OWN)
    named = {f"shakespeare/{name}": what for name, what in SHAKESPEARE.items()}
    return {name: bench.run(name, *_widened(bench, *what), 30) for name, what in named.items()}


def pretraining(bench: Bench) -> dict[str, Any]:
    """Our training of a pair beside the paper's, both with a tenth of its groups and small networks; on the digits."""
    found: dict[str, Any] = {}
    settings = {"ours": [], "as printed": ["method.up.permute=false", "method.server.lr=1"]}
    for name, how in PRETRAININGS.items():
        code = Code(16, 8, cohort=5, width=16 if bench.toy else 64, pretraining=name)
        how = replace(how, groups=500 if bench.toy else 5000, batch=50, epochs=1 if bench.toy else how.epochs)
        pair = pretrain(code, how, bench.device)
        autoencoder.save(pair, autoencoder.home() / code.file)
        autoencoder.load.cache_clear()
        found[name] = {**asdict(how), "spread": pair.spread, "floor": code.floor, "ratio": pair.spread / code.floor}
        for what, changes in settings.items():
            keys = [f"method.up.pretraining={name}", f"method.up.width={code.width}", *changes]
            runs = [recipe.read("digits/fedage", [*keys, f"seed={seed}"]) for seed in range(3)]
            rounds = 1 if bench.toy else 20
            ends = [fv.run(r.build(), r.method, rounds=rounds, cohort=r.cohort, seed=r.seed) for r in runs]
            cosines = [row.metrics["cosine"] for end in ends for row in end.ledger.rows]
            found[name][what] = {"accuracy": [end.accuracy for end in ends], "cosine": sum(cosines) / len(cosines)}
    return found


def _small(bench: Bench) -> tuple[str, ...]:
    return ("method.up.width=64",) if bench.toy else ()


def _widened(bench: Bench, source: str, changes: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    coded = "fedage" in source and "method.up.code=linear" not in changes
    return source, (*changes, *(_small(bench) if coded else ()))


def _pair_of(source: str, bench: Bench) -> Code:
    up: Any = recipe.read(source, _small(bench)).method
    code: Code = up.up.pair
    return code


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "pairs": pairs,
    "errors": errors,
    "runs": runs,
    "sweep": sweep,
    "shakespeare": shakespeare,
    "pretraining": pretraining,
}


def _commit() -> str | None:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data-dir", type=Path, metavar="DIR")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--toy", action="store_true")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.parts) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]}; use {', '.join(PARTS)}")
    directory = data.files.data_directory(chosen.data_dir)
    os.environ["FEDVEIL_DATA"] = str(chosen.out / "data" if chosen.toy else directory)  # where pairs are kept
    bench = Bench(chosen.out, directory, recipe.pick_device(chosen.device), chosen.toy, {})
    bench.out.mkdir(parents=True, exist_ok=True)
    for part in chosen.parts or PARTS:
        began = time.monotonic()
        figures = PARTS[part](bench)
        command = f"python results/fedage.py --out DIR --data-dir DATA {part}"
        told = {"seconds": time.monotonic() - began, **environment(command=command, commit=_commit()), **figures}
        (bench.out / f"{part}.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        print(f"{part}: {told['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
