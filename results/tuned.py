"""Give every method of the digits tables the same budget of tuning, test what it chose with five seeds, and write
results/tuned.json and the table of `fedveil choose`.

    python results/tuned.py --out runs/tuned --jobs 2

Each row is searched by `fedveil tune`: 12 trials over its rates, chosen by the mean accuracy on validation records of
three seeds, each of which holds out another tenth of the training records. The chosen recipe is then trained on all
training records with seeds 0 to 4, which the search has not seen, and measured on the test records.

Some rows are not searched and take what another row has chosen: a secure sum that of the same messages in the clear,
because the sum is the same up to rounding; synthetic points in 32 bits that of points in 8 bits; and other codecs under
differential privacy that of raw updates.

The same command goes on after a stop. With --only it does some rows, and with --write it only writes the JSON files. A
method enters `fedveil choose` by a row here.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedveil.core.ledger import Ledger
from fedveil.runs import choice, recipe
from fedveil.runs.choice import Measured, MeasuredRun, Table
from fedveil.runs.fingerprint import environment
from fedveil.runs.space import parse_over, validate_spaces

TRIALS, SEARCHED, TESTED = 12, "100-102", "0-4"
HOME = Path(__file__).parent
CHOICES = Path(choice.__file__).with_name(choice.FILE)
RATE, STEP = "method.local.lr=log:0.03..3", "method.server.lr=log:0.3..3"
SKETCH = ("method.up.name=sketch", "method.up.numbers=620")
PRIVACY = tuple(f"method.privacy.{each}" for each in ("noise=auto", "budget=8", "delta=1e-3"))
DP = (
    "rounds=12",
    "cohort.size=10",
    "split.max_records=144",
    "method.local.steps=10",
    "method.local.batch=36",
    *PRIVACY,
)
TWO = ("split.kind=classes", "split.classes=2")
TOP_K = ("method.up.name=top-k", "method.up.share=0.0155", "method.feedback=true")
QSGD = ("method.up.name=qsgd", "method.up.bits=4")
NUMBERS = ("method.up.name=sketch", "method.up.numbers=1000")


@dataclass(frozen=True)
class Entry:
    """A row: a recipe with changes, and what is searched.

    over: the keys and their ranges; none: take the values that the row `like` has chosen
    """

    table: str
    recipe: str
    changes: tuple[str, ...] = ()
    over: tuple[str, ...] = (RATE, STEP)
    like: str = ""


def _rates(name: str, low: float, high: float) -> str:
    return f"method.{name}=log:{low:g}..{high:g}"


MOMENTUM = ("method.server.optimizer=momentum",)
OFTEN = ("rounds=12", "method.local.steps=10")
FITTED, IMAGES = _rates("up.lr", 0.03, 0.6), (_rates("lr", 0.02, 2), _rates("image_lr", 1, 300))
ENTRIES = {  # in this order, long searches late
    "fedavg": Entry("iid", "fedavg"),
    "fedavg-momentum": Entry("iid", "fedavg", MOMENTUM, (RATE, _rates("server.lr", 0.03, 1))),
    "fedprox": Entry("iid", "fedprox"),
    "scaffold": Entry("iid", "scaffold"),
    "q-fedavg": Entry("iid", "q-fedavg", over=(RATE, _rates("q", 0.01, 1))),
    "fedsgd": Entry("iid", "fedsgd", over=(_rates("server.lr", 0.1, 10),)),
    "fedavg-half": Entry("iid", "fedavg-half"),
    "fedavg-qsgd": Entry("iid", "fedavg-qsgd"),
    "fedavg-powersgd": Entry("iid", "fedavg-powersgd"),
    "fedavg-top-k-0.06": Entry("iid", "fedavg-top-k", ("method.up.share=0.06",)),
    "fedavg-top-k-0.0155": Entry("iid", "fedavg-top-k", ("method.up.share=0.0155",)),
    "fedavg-top-k": Entry("iid", "fedavg-top-k"),
    "fedavg-sketch": Entry("iid", "fedavg", SKETCH, (RATE, _rates("server.lr", 1, 60))),
    "fedage": Entry("iid", "fedage", over=(RATE, _rates("server.lr", 0.3, 4))),
    "fedage-linear": Entry("iid", "fedage", ("method.up.code=linear",), (RATE, _rates("server.lr", 0.3, 4))),
    "fedavg-classes": Entry("classes", "fedavg-classes"),
    "fedavg-momentum-classes": Entry("classes", "fedavg-classes", MOMENTUM, (RATE, _rates("server.lr", 0.03, 1))),
    "dp-fedavg": Entry("private", "dp-fedavg"),
    "dp-fedavg-often": Entry("private", "dp-fedavg", OFTEN),
    "dp-fedavg-iid": Entry("private iid", "fedavg", DP),
    "dp-fedprox": Entry("private", "dp-fedprox"),
    "dp-scaffold": Entry("private", "dp-scaffold"),
    "fedlap-dp": Entry("private", "fedlap-dp", over=(_rates("lr", 0.01, 1), _rates("image_lr", 1, 100))),
    "baffle-clear": Entry("forward", "baffle-clear", over=(_rates("server.lr", 0.001, 0.1),)),
    "dp-baffle": Entry("forward", "dp-baffle", over=(_rates("server.lr", 0.001, 0.1),)),
    "fedavg-2class": Entry("few", "fedavg-2class"),
    "scaffold-2class": Entry("few", "fedavg-2class", ("method.name=scaffold",)),
    "feddm": Entry("few", "feddm", over=(_rates("lr", 0.02, 2), _rates("image_lr", 0.03, 30))),
    "fedlap": Entry("few", "fedlap", over=IMAGES),
    "tofu-8bit": Entry("iid", "tofu-8bit", over=(RATE, STEP, FITTED)),
    "fedsynth-8bit": Entry("iid", "fedsynth-8bit", over=(RATE, STEP, FITTED)),
    "dp-fedavg-users-server": Entry("users", "dp-fedavg-users", ("method.secure=none",)),
    "dp-sketch-users-server": Entry(
        "users", "dp-fedavg-users", ("method.secure=none", *NUMBERS), (RATE, _rates("server.lr", 1, 60))
    ),
    "scaffold-classes": Entry("classes", "scaffold-classes"),
    "fedprox-classes": Entry("classes", "fedprox-classes"),
    "feddyn-classes": Entry("classes", "feddyn-classes", over=(RATE, _rates("alpha", 0.01, 1))),
    "fedavg-qsgd-classes": Entry("classes", "fedavg-classes", QSGD),
    "fedavg-top-k-classes": Entry("classes", "fedavg-classes", TOP_K),
    "tofu": Entry("iid", "tofu", like="tofu-8bit"),
    "fedsynth": Entry("iid", "fedsynth", like="fedsynth-8bit"),
    "baffle-classes": Entry("classes", "baffle-clear", TWO, like="baffle-clear"),
    "fedavg-secure-classes": Entry("classes", "fedavg-classes", ("method.secure.bits=20",), like="fedavg-classes"),
    "dp-fedavg-qsgd-iid": Entry("private iid", "fedavg", (*DP, *QSGD), like="dp-fedavg-iid"),
    "dp-fedavg-top-k-iid": Entry("private iid", "fedavg", (*DP, *TOP_K), like="dp-fedavg-iid"),
    "dp-fedavg-secure-iid": Entry("private iid", "fedavg", (*DP, "method.secure.bits=20"), like="dp-fedavg-iid"),
    "fedavg-secure": Entry("summed", "fedavg-secure", like="fedavg"),
    "fedavg-sketch-secure": Entry("summed", "fedavg", (*SKETCH, "method.secure.clip=8.0"), like="fedavg-sketch"),
    "fedage-secure": Entry("summed", "fedage", ("method.secure.bits=20",), like="fedage"),
    "baffle": Entry("summed", "baffle", like="baffle-clear"),
    "dp-fedavg-users": Entry("users", "dp-fedavg-users", like="dp-fedavg-users-server"),
    "dp-sketch-users": Entry("users", "dp-fedavg-users", NUMBERS, like="dp-sketch-users-server"),
}


def changes(name: str, chosen: Mapping[str, Any]) -> list[str]:
    """What a row changes of its recipe, with what was chosen."""
    return [*ENTRIES[name].changes, *(f"{key}={value}" for key, value in chosen.items())]


def command(name: str, chosen: Mapping[str, Any] | None = None) -> list[str]:
    """The `fedveil` command of a row, without --out and --format."""
    entry = ENTRIES[name]
    words = ["run" if entry.like else "tune", f"digits/{entry.recipe}"]
    words += [word for change in entry.changes for word in ("--set", change)]
    if entry.like:
        words += [word for key, value in (chosen or {}).items() for word in ("--set", f"{key}={value}")]
        return [*words, "--seeds", TESTED]
    words += [word for space in entry.over for word in ("--over", space)]
    return [*words, "--trials", str(TRIALS), "--seeds", SEARCHED, "--test-seeds", TESTED]


def do(name: str, out: Path) -> dict[str, Any]:
    """Do a row, or take what is there, and return what `fedveil` told of it."""
    told, like = out / f"{name}.json", ENTRIES[name].like
    if told.exists():
        return dict(json.loads(told.read_text(encoding="utf-8")))
    words = command(name, chosen_of(do(like, out)) if like else None)
    whole = [sys.executable, "-m", "fedveil", *words, "--out", str(out / name), "--format", "json"]
    with (out / f"{name}.log").open("a", encoding="utf-8") as log:
        done = subprocess.run(whole, stdout=subprocess.PIPE, stderr=log, text=True, env=_environment())
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}; see {out / name}.log")
    found = json.loads(done.stdout)
    found |= {"row": name, "command": f"fedveil {shlex.join(words)} --out DIR"}
    found["commit"] = (out / "commit").read_text(encoding="utf-8")
    told.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{time.strftime('%H:%M')} {name}", flush=True)
    return dict(found)


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def chosen_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a search chose, by key."""
    return dict(found["best"]["changes"])


def tested_folders(name: str, out: Path, found: Mapping[str, Any]) -> Iterator[tuple[int, Path]]:
    """The runs with the seeds of the test."""
    home = out / name if ENTRIES[name].like else out / name / f"best-{found['best']['trial']:04d}"
    for path in sorted(home.glob("seed-*")):
        yield int(path.name.removeprefix("seed-")), path


def row(name: str, out: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the JSON file: what was chosen by what, and the runs of the test."""
    entry, runs = ENTRIES[name], []
    for seed, path in tested_folders(name, out, found):
        ledger = Ledger.read(path / "ledger.jsonl")
        summary = ledger.summary(name)
        clients = sum(len(r.cohort) for r in ledger.rows)
        runs.append(
            {
                "seed": seed,
                "accuracy": summary["accuracy"],
                "accuracy_last3": summary["accuracy_last3"],
                "right": ledger.right and msgspec.to_builtins(ledger.right),
                "bytes_up": summary["bytes_up"],
                "bytes_down": summary["bytes_down"],
                "turns": clients,
                "rounds": len(ledger.rows),
                "epsilon": ledger.rows[-1].epsilon,
                "seconds": summary["seconds"],
            }
        )
    took = sum(r.seconds for path in (out / name).rglob("ledger.jsonl") for r in Ledger.read(path).rows)
    told: dict[str, Any] = {"row": name, "table": entry.table, "command": found["command"], "seconds": took}
    told["commit"] = found.get("commit", (out / "commit").read_text(encoding="utf-8"))
    if entry.like:
        like = json.loads((out / f"{entry.like}.json").read_text(encoding="utf-8"))
        return told | {"like": entry.like, "changes": changes(name, chosen_of(like)), "runs": runs}
    states = [trial["state"] for trial in found["trials"]]
    return told | {
        "chosen": chosen_of(found),
        "changes": changes(name, chosen_of(found)),
        "validation": found["best"]["value"],
        "by_hand": next((t["value"] for t in found["trials"] if t["trial"] == 0), None),
        "complete": states.count("complete"),
        "pruned": states.count("pruned"),
        "failed": states.count("fail"),
        "runs": runs,
    }


def validate() -> None:
    """Raise the error of the first row whose keys or ranges its recipe does not take."""
    for name, entry in ENTRIES.items():
        try:
            validate_spaces(f"digits/{entry.recipe}", entry.changes, [parse_over(each) for each in entry.over])
        except ValueError as error:
            if not entry.like:
                raise SystemExit(f"{name}: {error}") from None


def write(out: Path) -> None:
    """Write results/tuned.json, and what `fedveil choose` reads of it, from the rows that are done."""
    done = {name: json.loads(path.read_text()) for name in ENTRIES if (path := out / f"{name}.json").exists()}
    rows = [row(name, out, found) for name, found in done.items()]
    where = environment(device="cpu", commit=(out / "commit").read_text(encoding="utf-8"), threads=1)
    told = {"command": "python results/tuned.py --out DIR --jobs 2", **where, "trials": TRIALS}
    told |= {"searched": SEARCHED, "tested": TESTED, "rows": rows}
    (HOME / "tuned.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    CHOICES.write_bytes(msgspec.json.format(msgspec.json.encode(table(told)), indent=1) + b"\n")


def table(told: Mapping[str, Any]) -> Table:
    """The table of `fedveil choose`."""
    rows = []
    for each in told["rows"]:
        source, runs = f"digits/{ENTRIES[each['row']].recipe}", msgspec.convert(each["runs"], list[MeasuredRun])
        records = recipe.read(source, each["changes"]).build().largest
        epsilon = max((run["epsilon"] for run in each["runs"] if run["epsilon"] is not None), default=None)
        rows.append(Measured(each["row"], source, each["changes"], runs, records, epsilon))
    return Table(told["command"], told["commit"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the searches and runs")
    parser.add_argument("--jobs", type=int, default=1, help="rows beside each other, one thread each (default 1)")
    parser.add_argument("--only", nargs="+", choices=ENTRIES, help="some rows (default: all)")
    parser.add_argument("--write", action="store_true", help="write results/tuned.json from what is done, and stop")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.write:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        (options.out / "commit").write_text(commit.stdout.strip(), encoding="utf-8")  # of the code that does the runs
        validate()
        names = [name for name in ENTRIES if not options.only or name in options.only]
        for like in (False, True):  # first the searches, then the rows that take what they chose
            with ThreadPoolExecutor(options.jobs) as pool:
                chosen = [name for name in names if bool(ENTRIES[name].like) is like]
                list(pool.map(lambda name: do(name, options.out), chosen))
    write(options.out)


if __name__ == "__main__":
    main()
