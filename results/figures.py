"""Every table and figure of results/README.md and README.md, from the ledgers in this folder.

python results/figures.py                print the tables
python results/figures.py --write        put them into the two READMEs, and draw the figures
python results/figures.py --screenshot   take the picture of the report; needs playwright and Chromium
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from matplotlib.figure import Figure

from fedveil.codecs.raw import Update
from fedveil.codecs.tofu import Proxies
from fedveil.core import message
from fedveil.core.ledger import Ledger
from fedveil.core.message import Envelope
from fedveil.core.metrics import ACCURACY
from fedveil.report import curves, svg, write
from fedveil.report.figures import gallery, look
from fedveil.runs import choice
from fedveil.runs.statistics import paired, spread

HERE = Path(__file__).resolve().parent
THREATS = HERE.parent / "docs" / "explanation" / "threat-model.md"
CHOICES = HERE.parent / "docs" / "how-to" / "choose-a-method.md"
PAGES = (HERE.parent / "README.md", HERE / "README.md", THREATS, CHOICES)
EXPOSED = HERE / "exposure"
SHOWN = {  # rows of the matrix of attacks that the README shows
    "raw gradients": "raw gradient",
    "4 bits a weight (QSGD)": "QSGD, 4 bits",
    "synthetic points (FedSynth)": "FedSynth",
    "proxies (TOFU)": "TOFU",
    "codes (FedAGE)": "FedAGE",
    "the largest 6% (top-k)": "top-k, 6%",
    "100 slopes, 20 rounds (BAFFLE)": "BAFFLE, K = 100, 20 rounds",
    "private updates (ε = 8)": "DP-FedAvg, ε = 8",
}
DRAWN = HERE.parent / "docs" / "figures"
DIGITS = (  # in the order of the table; the first is what the others are compared with
    *("fedavg", "fedprox", "scaffold", "q-fedavg", "fedsgd"),
    *("fedavg-half", "fedavg-qsgd", "fedavg-zstd"),
    *("fedavg-top-k-0.06", "fedavg-top-k-0.0155", "fedavg-top-k"),
    *("tofu", "tofu-8bit", "fedsynth", "fedsynth-8bit"),
)
DIGITS_SHORT = (  # tuned alike, in the README
    *("fedavg", "scaffold", "fedavg-half", "fedavg-qsgd", "fedavg-powersgd"),
    *("fedavg-top-k-0.06", "fedavg-top-k-0.0155", "fedavg-sketch"),
    *("tofu", "tofu-8bit", "fedsynth", "fedsynth-8bit", "fedage", "baffle-clear"),
)
PAIRS = (  # of tuned rows
    ("tofu", "fedavg-top-k-0.06"),
    ("fedsynth", "fedavg-top-k-0.06"),
    ("tofu-8bit", "fedavg-top-k-0.0155"),
    ("fedsynth-8bit", "fedavg-top-k-0.0155"),
    ("fedavg-sketch", "fedavg-top-k-0.0155"),
    ("feddyn-classes", "scaffold-classes"),
    ("fedlap", "scaffold-2class"),
    ("fedlap", "feddm"),
    ("fedlap-dp", "dp-fedavg-often"),
    ("dp-sketch-users", "dp-fedavg-users"),
)
CLEAR = ("fedavg-2class", "fedavg-2class-fast", "feddm", "fedlap")
PRIVATE = ("dp-fedavg", "dp-fedprox", "dp-scaffold", "dp-fedavg-often", "fedlap-dp")
SURROGATES = tuple(f"{name}-{seed}" for name in (*CLEAR, *PRIVATE) for seed in range(3))
SUMMED = (
    *("fedage", "fedage-linear", "fedage-secure", "fedavg-secure", "dp-fedavg-users"),
    *("baffle-clear", "baffle"),
)
CLASSES = ("fedavg-classes", "fedprox-classes", "scaffold-classes")
CODECS = ("fedavg", "fedavg-half", "fedavg-qsgd", "fedavg-top-k", "tofu", "tofu-8bit", "fedsynth", "fedsynth-8bit")
CURVES = ("fedavg", "fedavg-qsgd", "fedavg-top-k", "tofu-8bit", "fedsynth-8bit")
FEDAGE = (
    ("mnist/fedavg-batch-100", "mnist/fedage-iid", "mnist/fedage-iid-linear", "mnist/fedage-iid-unshuffled"),
    ("mnist/fedavg-batch-100-shards", "mnist/fedage-shards", "mnist/fedage-shards-linear"),
)
BAFFLE = {  # run: the paper's accuracy, tables 1 and 2
    "mnist/fedavg-baffle-lenet": 94.3,
    "mnist/baffle-lenet-100": 87.3,
    "mnist/baffle-lenet-100-half": None,
    "mnist/baffle-lenet-200": 89.5,
    "mnist/baffle-lenet-500": 92.2,
    "mnist/baffle-lenet-100-no-ema": None,
    "mnist/baffle-lenet-100-relu": None,
    "mnist/baffle-lenet-100-central": None,
    "mnist/fedavg-baffle-wrn": 97.1,
    "mnist/baffle-wrn-100": 88.4,
    "cifar10/fedavg-baffle-lenet": 58.8,
    "cifar10/baffle-lenet-200": 48.8,
    "cifar10/fedavg-baffle-dirichlet": 44.4,
    "cifar10/baffle-dirichlet-200": 35.2,
}
BESIDE = (  # what is trained, the run, the same training with plain updates, the paper's accuracy where it has one
    ("FedSynth, MNIST IID", "mnist/fedsynth-iid", "mnist/fedavg-iid", None),
    ("FedSynth, MNIST shards", "mnist/fedsynth-shards", "mnist/fedavg-shards", None),
    ("TOFU, 64 proxies both ways, MNIST IID", "mnist/tofu-64", "mnist/fedavg-lenet5", 98.14),
    ("FedAGE, MNIST IID", "mnist/fedage-iid", "mnist/fedavg-batch-100", None),
    ("FedAGE, MNIST shards", "mnist/fedage-shards", "mnist/fedavg-batch-100-shards", None),
    ("FedAGE, Shakespeare", "shakespeare/fedage", "shakespeare/fedavg", None),
    ("FedLAP, MNIST, two classes a client", "mnist/fedlap", "mnist/fedavg-2class", None),
    ("the same, Fashion-MNIST", "fashion/fedlap", "fashion/fedavg-2class", None),
    ("the same, CIFAR-10", "cifar10/fedlap", "cifar10/fedavg-2class", None),
    ("FedLAP-DP, MNIST, two classes a client, ε = 10.18", "mnist/fedlap-dp", "mnist/dp-fedavg", 87.77),
    ("the same, Fashion-MNIST", "fashion/fedlap-dp", "fashion/dp-fedavg", 73.00),
    ("BAFFLE, LeNet, K = 500, MNIST IID", "mnist/baffle-lenet-500", "mnist/fedavg-baffle-lenet", 92.18),
    ("BAFFLE, WRN-10-2, K = 100, MNIST IID", "mnist/baffle-wrn-100", "mnist/fedavg-baffle-wrn", 88.35),
    ("BAFFLE, LeNet, K = 200, CIFAR-10 IID", "cifar10/baffle-lenet-200", "cifar10/fedavg-baffle-lenet", 48.78),
    ("the same, 100 clients, skewed", "cifar10/baffle-dirichlet-200", "cifar10/fedavg-baffle-dirichlet", 35.21),
)
LAP = (  # over rounds, where each of 5 clients holds two classes
    *("fedavg-2class", "fedavg-2class-slow", "fedprox-2class", "scaffold-2class", "scaffold-2class-slow", "feddm"),
    *("fedlap", "fedlap-region-median", "fedlap-region-max", "fedlap-region-fixed"),
    *("fedlap-passes-5", "fedlap-images-10", "fedlap-images-20", "fedlap-images-100", "fedlap-augmented"),
)
LAP_CURVES = ("fedavg-2class", "fedprox-2class", "scaffold-2class", "feddm", "fedlap")
LAP_PAPER = {  # run: the paper's accuracy at ε = 2.79 and 10.18, table 2
    "mnist/fedlap-dp": (60.72, 87.77),
    "mnist/dp-fedavg": (45.25, 86.99),
    "mnist/dp-fedprox": (54.58, 88.75),
    "mnist/dp-scaffold": None,
    "fashion/fedlap-dp": (59.85, 73.00),
    "fashion/fedlap-dp-slow": None,
    "fashion/dp-fedavg": (50.11, 72.78),
    "fashion/dp-fedprox": (54.57, 71.67),
    "fashion/dp-scaffold": None,
    "cifar10/fedlap-dp": (21.42, 36.09),
}
LENET5 = 61_706  # weights, in 10 tensors
TOFU = ("tofu-32", "tofu-64", "tofu-128", "tofu-64-half", "tofu-64-8bit")
PAPER = {
    "tofu-32": (95.39, 98.06, 6.6),
    "tofu-64": (96.06, 98.14, 4.1),
    "tofu-128": (95.23, 98.07, 4.1),
}  # TOFU, table 2


# ---------------------------------------------------------------------------------------------------- reading


class Run:
    """A folder with recipe.toml, environment.json and ledger.jsonl."""

    def __init__(self, name: str) -> None:
        folder = HERE / name
        self.name = folder.name
        self.recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
        self.environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        self.ledger = Ledger.read(folder / "ledger.jsonl")
        self.summary = self.ledger.summary(self.recipe["method"]["name"])

    @property
    def up(self) -> float:
        """Bytes a client sent in a round."""
        return float(self.summary["bytes_up_per_client_round"])

    def mean(self, metric: str) -> float | None:
        values = self.ledger.series(metric)[1]
        return sum(values) / len(values) if values else None

    @property
    def sends(self) -> str:
        """What a client sends, in words."""
        return sends(self.recipe["method"])


def sends(method: dict[str, Any]) -> str:
    """What a client of a method sends, in words."""
    plain = {
        "scaffold": "the update and the change of its control variate",
        "q-fedavg": "the update weighted by its loss, and one number",
        "fedsgd": "the gradient over all its records",
    }
    if method["name"] == "baffle":
        said = f"{method['directions']} slopes"
    else:
        said = plain.get(method["name"]) or _payload(method["up"])
    said += ", with noise" if "user_privacy" in method else ""
    return f"{said}, in a secure sum" if "secure" in method else said


def _payload(codec: dict[str, Any]) -> str:
    bits = {"float32": 32, "float16": 16, "uint8": 8}.get(codec.get("precision", "float32"))
    match codec["name"]:
        case "raw":
            return "the update, 32 bits a weight"
        case "half":
            return "the update, 16 bits a weight"
        case "qsgd":
            return f"the update, {codec['bits']} bits a weight"
        case "zstd":
            return f"{_payload(codec['inner'])}, then Zstandard"
        case "top-k":
            return f"the largest {100 * codec['share']:g}% of the update"
        case "tofu":
            return f"{codec['points']} proxy pictures in {bits} bits"
        case "fedage":
            half = codec.get("code_size", codec["block"] // 2)
            kind = codec.get("code", "learned" if codec["width"] else "linear")
            return f"{kind} codes, {half} numbers for {codec['block']}, of either sign"
        case "powersgd":
            return f"factors of rank {codec['rank']} of each layer's update"
        case "sketch":
            return f"{codec['numbers']} numbers of a sketch of the update"
        case "fedsynth":
            return f"{codec['batches'] * codec['batch']} synthetic pictures in {bits} bits"
    raise ValueError(f"no words for the codec {codec['name']}")


# ---------------------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are text."""
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def count(number: float) -> str:
    return f"{number:,.0f}"


def ratio(whole: float, part: float) -> str:
    """How many times fewer."""
    times = whole / part
    return f"{times:.1f}" if times >= 10 else f"{times:.2f}"


def cpu(threads: int) -> str:
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def where(run: Run) -> str:
    e = run.environment
    device = e["gpu"] if e["device"].startswith("cuda") else cpu(e["threads"])
    commit = f", commit {e['commit']}" if "commit" in e else ""
    return f"{device}; PyTorch {e['torch'].split('+')[0]}, Python {e['python']}{commit}; seed {run.recipe['seed']}"


RENAMED = {  # keys in recorded commands, and what they are called now
    "method.ema=": "method.server.ema=",
    "method.up.width=0": "method.up.code=linear",
}


def commands(names: Iterable[str]) -> str:
    """The commands behind some runs, each once, with its device."""
    seen: dict[tuple[str, str], list[str]] = {}
    for run in map(Run, names):
        line = run.environment["command"]
        for old, new in RENAMED.items():
            line = line.replace(old, new)
        seen.setdefault((line, where(run)), []).append(run.name)
    parts = [f"{', '.join(runs)} ({device}):\n\n    {line}" for (line, device), runs in seen.items()]
    return "\n\n".join(parts)


def digits(names: Iterable[str]) -> str:
    runs = [Run(f"digits/{name}") for name in names]
    rows = [
        (
            f"`{run.name}`",
            run.sends,
            count(run.up),
            ratio(runs[0].up, run.up),
            percent(run.summary["accuracy"]),
            percent(run.summary["accuracy_last3"]),
        )
        for run in runs
    ]
    head = ("run", "a client sends", "bytes up, a client and round", "times fewer", "accuracy, %", "mean of last 3, %")
    return table(head, rows, 2)


def summed() -> str:
    """Methods whose messages add up, in the clear and in a secure sum."""
    rows = []
    for run in (Run(f"digits/{name}") for name in SUMMED):
        asked = sum(len(row.cohort) for row in run.ledger.rows)
        rows.append(
            (
                f"`{run.name}`",
                run.sends,
                str(run.recipe["rounds"]),
                str(run.recipe["cohort"]["size"]),
                count(run.up),
                count(run.summary["protocol_up"] / asked),
                percent(run.summary["clients_failed"] / asked),
                percent(run.summary["accuracy_last3"]),
            )
        )
    head = (
        *("run", "a client sends", "rounds", "clients a round", "bytes up, a client and round", "of that the protocol"),
        *("answers missing, %", "mean of last 3, %"),
    )
    return table(head, rows, 2)


def surrogates() -> str:
    """FedLAP beside FedAvg where each of 5 clients holds two classes, a column a seed."""
    rows = []
    for name in (*CLEAR, *PRIVATE):
        runs = [Run(f"digits/{name}-{seed}") for seed in range(3)]
        spent = runs[0].summary["epsilon"]
        told = f"{spent:.2f} at δ = {runs[0].recipe['method']['privacy']['delta']:g}" if spent else "none promised"
        accuracies = [run.summary["accuracy"] for run in runs]
        mean = percent(sum(accuracies) / len(accuracies))
        rows.append((f"`{name}`", told, str(runs[0].recipe["rounds"]), *map(percent, accuracies), mean))
    return table(("run", "ε", "rounds", "seed 0, %", "seed 1, %", "seed 2, %", "mean, %"), rows, 2)


def fedsynth() -> str:
    rows = []
    for split in ("iid", "shards"):
        plain, run = Run(f"mnist/fedavg-{split}"), Run(f"mnist/fedsynth-{split}")
        rounds = run.recipe["rounds"]
        for each in (plain, run):
            accuracy, cosine = each.ledger.series("accuracy")[1], each.mean("cosine")
            behind = last3(each, rounds) - last3(plain, rounds)
            rows.append(
                (
                    split,
                    each.recipe["method"]["name"],
                    percent(accuracy[rounds - 1]),
                    percent(last3(each, rounds)),
                    f"{100 * behind:+.2f}",
                    count(each.up),
                    ratio(plain.up, each.up),
                    f"{cosine:.3f}" if cosine else "",
                    f"{sum(row.seconds for row in each.ledger.rows[:rounds]):.0f}",
                )
            )
    head = (
        *("split", "method", "accuracy after 15 rounds, %", "mean of last 3, %", "against FedAvg, points"),
        *("bytes up, a client and round", "times fewer", "mean cosine", "seconds"),
    )
    return table(head, rows, 2)


def last3(run: Run, rounds: int) -> float:
    """Mean accuracy of the three rounds up to this one."""
    return sum(run.ledger.series("accuracy")[1][rounds - 3 : rounds]) / 3


def shards() -> str:
    """Round by round: both curves swing together, for both ask the same clients."""
    plain, run = (Run(f"mnist/{name}-shards").ledger.series("accuracy")[1] for name in ("fedavg", "fedsynth"))
    rows = [
        (str(i + 1), percent(a), percent(b), f"{100 * (b - a):+.2f}")
        for i, (a, b) in enumerate(zip(plain, run, strict=False))
    ]
    return table(("round", "FedAvg, %", "FedSynth, %", "points"), rows)


def both_ways() -> str:
    plain, up, both = (Run(f"mnist/{name}") for name in ("fedavg-iid", "fedsynth-iid", "fedsynth-both"))
    cosine = dict(zip(*both.ledger.series("cosine_down"), strict=True))
    accuracy = [run.ledger.series("accuracy")[1] for run in (plain, up, both)]
    rows = [
        (
            str(row.round),
            *(percent(one[i]) for one in accuracy),
            f"{cosine[row.round]:.3f}" if row.round in cosine else "",
            count(sum(row.down.values()) / len(row.cohort)),
            ratio(sum(plain.ledger.rows[i].down.values()), sum(row.down.values())),
        )
        for i, row in enumerate(both.ledger.rows)
    ]
    head = (
        *("round", "FedAvg, %", "FedSynth up, %", "FedSynth both ways, %", "cosine down"),
        *("bytes down, a client", "times fewer"),
    )
    return table(head, rows)


def tofu() -> str:
    """The paper's table 2. It reports the best round, so this does too."""
    plain = Run("mnist/fedavg-lenet5")
    rows = [(f"FedAvg, {plain.recipe['rounds']} rounds", "", "", percent(best(plain)), "98.91", "", "")]
    for name in TOFU:
        run = Run(f"mnist/{name}")
        synthetic = run.recipe["rounds"] - run.recipe["method"]["full_rounds"]
        paper = [f"{value:.2f}" for value in PAPER[name][:2]] if name in PAPER else ["", ""]
        cosines = [f"{run.mean(metric):.3f}" for metric in ("cosine", "cosine_down")]
        rows.append((f"`{name}`", percent(best(run, synthetic)), paper[0], percent(best(run)), paper[1], *cosines))
    head = (
        *("run", "proxies alone, %", "paper", "with 3 full rounds, %", "paper"),
        *("mean cosine up", "mean cosine down"),
    )
    return table(head, rows)


def best(run: Run, rounds: int | None = None) -> float:
    return max(run.ledger.series("accuracy")[1][:rounds])


def reached(run: Run, accuracy: float) -> int:
    """The first round with at least this accuracy."""
    return next(n for n, a in zip(*run.ledger.series("accuracy"), strict=True) if a >= accuracy)


def proxy_bytes(points: int) -> int:
    """The length of a TOFU message for LeNet5 on MNIST, from a client with 6,000 records."""
    parts = torch.zeros(points, 1, 28, 28), torch.zeros(points, 10), torch.zeros(points), torch.zeros(10)
    return len(message.frame(Proxies(*parts, 0.0, 0.0, 6000), Envelope()))


def full_bytes() -> int:
    return len(message.frame(Update(torch.zeros(LENET5), 6000), Envelope()))


def tofu_messages() -> str:
    rows = []
    for points in (32, 64, 96, 128):
        numbers = points * (28 * 28 + 10 + 1)
        sent = proxy_bytes(points)
        rows.append((str(points), count(numbers), count(sent), count(full_bytes()), f"{full_bytes() / sent:.2f}"))
    return table(("N", "the paper's D_size, numbers", "message, bytes", "full update, bytes", "times fewer"), rows)


def tofu_run() -> str:
    """The paper's η, and true bytes of one client both ways, at FedAvg's best accuracy and at the accuracy TOFU has."""
    plain, rows = Run("mnist/fedavg-lenet5"), []
    longest = reached(plain, best(plain))
    for name in TOFU:
        run = Run(f"mnist/{name}")
        full, clients = run.recipe["method"]["full_rounds"], run.recipe["split"]["clients"]
        synthetic, codec = run.recipe["rounds"] - full, run.recipe["method"]["up"]
        numbers = codec["points"] * (28 * 28 // codec["shrink"] ** 2 + 10 + 1)
        alone, whole = numbers * synthetic, numbers * synthetic + LENET5 * full
        iso, iso_alone = reached(plain, best(run)), reached(plain, best(run, synthetic))
        sent = (run.summary["bytes_up"] + run.summary["bytes_down"]) / clients
        paper = f"{PAPER[name][2]:.1f}" if name in PAPER else ""
        rows.append(
            (
                f"`{name}`",
                *(f"{LENET5 * rounds / size:.2f}" for rounds, size in ((longest, alone), (longest, whole))),
                paper,
                *(f"{LENET5 * rounds / size:.2f}" for rounds, size in ((iso_alone, alone), (iso, whole))),
                str(iso),
                count(sent),
                f"{2 * iso * full_bytes() / sent:.2f}",
                count(sum(bool(row.metrics.get("resynced")) for row in run.ledger.rows)),
            )
        )
    head = (
        *("run", "η at maximum, proxies alone", "with full rounds", "paper", "η at iso-accuracy, proxies alone"),
        *("with full rounds", "FedAvg rounds to that accuracy", "bytes a client, both ways", "true times fewer"),
        "rounds resynced",
    )
    return table(head, rows)


# ---------------------------------------------------------------------------------------------------- FedAGE


def measured(name: str) -> dict[str, Any]:
    """What results/fedage.py or results/fedlap.py wrote."""
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    return found


def fedage_pairs() -> str:
    """σ_ν of learned pairs beside the floor of the linear code, a row for b and s, by cohort."""
    rows: dict[tuple[int, int], list[str]] = {}
    for one in measured("fedage/pairs")["pairs"]:
        told = f"{one['spread']:.3f} / {one['floor']:.3f} = {one['ratio']:.3f}"
        rows.setdefault((one["block"], one["levels"]), []).append(told)
    cohorts = [f"m = {m}" for m in dict.fromkeys(one["cohort"] for one in measured("fedage/pairs")["pairs"])]
    return table(("b", "s", *cohorts), [(str(b), str(levels), *told) for (b, levels), told in rows.items()], 0)


def fedage_cohorts() -> str:
    """The recipes' pairs with cohorts that are not their own."""
    chosen = [one for one in measured("fedage/pairs")["pairs"] if "others" in one]
    rows = [
        (str(one["cohort"]), ", ".join(f"{value:.3f} of {size}" for size, value in one["others"].items()))
        for one in chosen
    ]
    return table(("trained for a cohort of", "σ_ν / floor when it decodes the mean"), rows, 2)


def fedage_errors() -> str:
    rows = [
        (
            name,
            f"{one['spread']:.3f}",
            f"{one['mean']:.4f}",
            f"{one['skewness']:.4f}",
            f"{one['excess_kurtosis']:.4f}",
            f"{one['p']:.3f}",
            "yes" if one["again_the_same"] else "no",
        )
        for name, one in measured("fedage/errors").items()
        if name in ("learned", "linear")
    ]
    head = ("code", "σ_ν", "mean", "skewness", "excess kurtosis", "p of normality", "the same for the same inputs")
    return table(head, rows)


def attacked() -> str:
    """What the server finds of single clients' updates in the round after a run's last: cosines over its clients."""
    rows = []
    for name in ("fedage", "fedage-secure"):
        found = measured(f"digits/{name}/attack")
        ranges = (
            f"{min(found[key]):.3f} to {max(found[key]):.3f}" for key in ("control", "direct", "differential", "own")
        )
        rows.append((f"`{name}`", *ranges))
    return table(("run", "control", "direct decode", "differential attack", "without the cohort's mean"), rows)


def fedage_sweep() -> str:
    factors = {k: v for k, v in measured("fedage/sweep").items() if isinstance(v, dict)}
    rows = [
        (name, percent(one["accuracy"]), percent(one["accuracy_last3"]), f"{one['cosine']:.3f}")
        for name, one in factors.items()
    ]
    head = ("n, times the largest entry", "accuracy, %", "mean of last 3, %", "cosine of one client's code")
    return table(head, rows)


def fedage_runs(*groups: tuple[str, ...]) -> str:
    """FedAGE beside FedAvg; the first of each group is FedAvg on the same clients."""
    rows = []
    for names in groups:
        plain = Run(names[0])
        for run in map(Run, names):
            cosine, last = run.mean("cosine"), run.summary["accuracy_last3"]
            apart = 100 * (last - plain.summary["accuracy_last3"])
            rows.append(
                (
                    f"`{run.name}`",
                    run.sends,
                    str(run.recipe["rounds"]),
                    percent(run.summary["accuracy"]),
                    percent(last),
                    f"{apart:+.2f}",
                    count(run.up),
                    f"{cosine:.3f}" if cosine else "",
                )
            )
    head = (
        *("run", "a client sends", "rounds", "accuracy, %", "mean of last 3, %", "against FedAvg, points"),
        *("bytes up, a client and round", "mean cosine"),
    )
    return table(head, rows, 2)


# ---------------------------------------------------------------------------------------------------- FedLAP


def made(names: Iterable[str]) -> dict[str, Run]:
    """Those of the runs that are there, by name."""
    return {name: Run(name) for name in names if (HERE / name).is_dir()}


def fedlap_rounds() -> str:
    """Accuracy after some rounds, of FedLAP and what it is compared with."""
    shown, rows = (1, 2, 3, 5, 7, 10, 20), []
    for name, run in made(f"{of}/{name}" for of in ("mnist", "fashion", "cifar10") for name in LAP).items():
        accuracy = dict(zip(*run.ledger.series("accuracy"), strict=True))
        rows.append((f"`{name}`", *(percent(accuracy[n]) if n in accuracy else "" for n in shown), count(run.up)))
    return table(("accuracy after round, %", *map(str, shown), "bytes up, a client and round"), rows)


def fedlap_private() -> str:
    """Accuracy at the two ε of the paper's table 2, which are those of the first and the last round."""
    rows = []
    for name, run in made(LAP_PAPER).items():
        ends = run.ledger.rows[0], run.ledger.rows[-1]
        papers = [f"{value:.2f}" for value in LAP_PAPER[name] or ()] or ["", ""]
        told = [(percent(row.metrics["accuracy"]), paper) for row, paper in zip(ends, papers, strict=True)]
        assert [f"{row.epsilon:.2f}" for row in ends] == ["2.79", "10.18"]
        rows.append((f"`{name}`", *told[0], *told[1], count(run.up)))
    head = ("run", "ε = 2.79, %", "paper, %", "ε = 10.18, %", "paper, %", "bytes up, a client and round")
    return table(head, rows)


def fedlap_audit() -> str:
    """Whether it can be said who was trained on, from the audit.json beside a ledger."""
    rows = []
    for path in sorted(HERE.glob("*/*/audit.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for attack, one in found["attacks"].items():
            caught = (percent(rate["tpr"]) for rate in one["rates"])
            promised = "" if found["epsilon"] is None else f"{found['epsilon']:.2f}"
            between = f"{one['low']:.3f} to {one['high']:.3f}"
            rows.append((f"`{path.parent.name}`", attack, promised, f"{one['auc']:.3f}", between, *caught))
    head = (
        *("run", "attack by", "ε", "AUC", "95% between"),
        *("members found at 0.1% false, %", "at 1% false, %"),
    )
    return table(head, rows, 2)


# ---------------------------------------------------------------------------------------------------- BAFFLE


def baffle() -> str:
    """Forward-only training beside backpropagation with the same network and optimiser, and the paper's tables."""
    rows = []
    for name, paper in BAFFLE.items():
        run = Run(name)
        method = run.recipe["method"]
        passes = sum(row.passes for row in run.ledger.rows) / len(run.ledger.rows)
        rows.append(
            (
                f"`{name}`",
                str(method.get("directions", "")),
                percent(run.summary["accuracy"]),
                percent(run.summary["accuracy_last3"]),
                "" if paper is None else f"{paper:.1f}",
                count(passes),
                f"{run.summary['seconds'] / run.recipe['rounds']:.1f}",
            )
        )
    head = ("run", "K", "accuracy, %", "mean of last 3, %", "paper, %", "passes a round", "seconds a round")
    return table(head, rows)


def beside() -> str:
    """What stands in for updates beside plain updates after as many rounds, and the papers."""
    rows = []
    for told, name, plain, paper in BESIDE:
        run, other = Run(name), Run(plain)
        rounds, accuracies = (each.ledger.series("accuracy") for each in (run, other))
        counterpart = accuracies[1][accuracies[0].index(rounds[0][-1])]
        figures = [percent(each) for each in (rounds[1][-1], counterpart)]
        rows.append(
            (told, str(rounds[0][-1]), *figures, "" if paper is None else f"{paper:.2f}", ratio(other.up, run.up))
        )
    head = ("", "rounds", "accuracy, %", "plain updates, %", "paper, %", "times fewer bytes up")
    return table(head, rows)


def bench() -> str:
    parts = []
    for path in sorted(HERE.glob("bench*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        commit = f", commit {one['commit']}" if "commit" in one else ""
        head = f"`{one['command']}` ({one['gpu'] or 'CPU'}; PyTorch {one['torch'].split('+')[0]}{commit}):"
        rows = [(name, key, figure(value)) for name, each in one["figures"].items() for key, value in each.items()]
        parts.append(f"{head}\n\n{table(('benchmark', 'figure', 'value'), rows, 2)}")
    return "\n\n".join(parts) or "Nothing yet: `python -m benchmarks -o results/bench.json` writes it."


SPEED = (  # rows of the README: file, part and what it is
    ("rivals-h200", "cifar", "CIFAR-10 network, 1.6 million weights"),
    ("rivals-h200", "private", "the same, central differential privacy"),
    ("rivals-h200-more", "cohort", "the same, without privacy"),
    ("rivals-cpu-long", "small", "small CNN, 24 thousand weights"),
    ("rivals-cpu-long", "lenet5", "LeNet5, 62 thousand weights"),
)
RACED = ("fedveil", "pfl-research", "FedJAX", "plain loop")


def speed() -> str:
    """Rounds of FedAvg by fedveil and by others, in milliseconds."""
    rows = []
    for file, name, told in SPEED:
        one = json.loads((HERE / f"{file}.json").read_text(encoding="utf-8"))
        players = one["parts"][name]["players"]
        taken = {label.removesuffix(", wire memory"): each["milliseconds"] for label, each in players.items()}
        where = one["gpu"] or f"CPU, {one['threads']} cores"
        shown = [count(taken[key]) if key in taken else "" for key in RACED]
        rows.append((told, where, count(players["plain loop"]["cohort"]), *shown))
    return table(("workload", "device", "clients", *RACED), rows, 2)


def floors() -> str:
    """Inner loops beside what their bytes and operations take, and the kernels that take most of them."""
    pieces = []
    for path in sorted(HERE.glob("floor*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        where = one["gpu"] or f"CPU, {one['threads']} threads"
        told = f"`{one['command']}` ({where}; PyTorch {one['torch'].split('+')[0]}, commit {one['commit']}):"
        head = ("inner loop", "ms", "floor, ms", "ms / floor", "operators", "groups", "GB as launched", "GB", "GFLOP")
        keys = ("operators", "groups", "gigabytes as launched", "gigabytes", "billion operations")
        clock = ("measured, milliseconds", "floor, milliseconds", "measured / floor")
        rows = []
        for name, each in one["figures"].items():
            times, counts = [f"{each[key]:.3g}" for key in clock], [figure(each[key]) for key in keys]
            rows.append((f"`{name}`", *times, *counts))
        pieces += [told, table(head, rows)]
        for name, kernels in one.get("kernels", {}).items():
            total = sum(each["milliseconds"] for each in kernels)
            rows = [
                (f"`{short(each['kernel'])}`", f"{each['calls']:.0f}", f"{each['milliseconds']:.2f}", percent(part))
                for each in kernels[:8]
                if (part := each["milliseconds"] / total) >= 0
            ]
            pieces += [f"Kernels of `{name}`:", table(("kernel", "calls", "ms", "%"), rows)]
    return "\n\n".join(pieces) or "Nothing yet: `python -m benchmarks --floor -o results/floor.json` writes it."


def short(kernel: str) -> str:
    """A kernel's name without its namespaces, templates and arguments, apart from the functor that names the work."""
    functor = re.search(r"(\w+Functor\w*|\w+_kernel_cuda|sum_functor|ArgMaxOps|direct_copy)", kernel)
    name = re.sub(r"\(anonymous namespace\)::", "", kernel).removeprefix("void ")
    name = re.split(r"[<(]", name)[0].split("::")[-1]
    return f"{name}, {functor[1]}" if functor and functor[1] != name else name[:60]


def rivals() -> str:
    """Rounds of FedAvg of fedveil and others, from what `benchmarks.rivals` has written."""
    pieces = []
    for path in sorted(HERE.glob("rivals*.json")):
        one = json.loads(path.read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {version}" for name, version in one["opponents"].items())
        commit = f", commit {one['commit']}" if "commit" in one else ""
        where = one["gpu"] if one["device"] == "cuda" else f"CPU, {one['threads']} threads"
        pieces.append(f"`{one['command']}` ({where}; PyTorch {one['torch'].split('+')[0]}, {versions}{commit}):")
        head = ["", "clients", "ms a round", "least to most", "ms a client", "/ plain loop", "/ pfl-research"]
        head += ["GPU, MiB", "host, MiB", "accuracy, %"]
        for name, part in one["parts"].items():
            weights = next(each["weights"] for each in part["players"].values() if "weights" in each)
            pieces.append(f"**{name}**: {part['what']}, {count(weights)} weights")
            pieces.append(table(head, [_rival(label, each) for label, each in part["players"].items()]))
    return "\n\n".join(pieces) or "Nothing yet: `python -m benchmarks.rivals -o results/rivals-cpu.json` writes it."


def tuned(group: str, base: str, more: Sequence[str] = ()) -> str:
    """Rows that were tuned alike: what was chosen, bytes, and the accuracy of five seeds beside that of `base`.

    more: rows of other groups to be shown too
    """
    told = tuned_rows()
    rows = [row for row in told.values() if row["table"] == group or row["row"] in more]
    measured_rows = {row.name: row for row in choice.measured().rows}
    sent = {row["row"]: row["runs"][0]["bytes_up"] / row["runs"][0]["turns"] for row in rows}
    private = any(row["runs"][0]["epsilon"] is not None for row in rows)
    body = []
    for row in sorted(rows, key=lambda row: (row["row"] != base, -sent[row["row"]])):
        ours = measured_rows[row["row"]]
        apart = ours.difference(measured_rows[base])
        epsilon = row["runs"][0]["epsilon"]
        cells = [f"`{row['row']}`", count(round(sent[row["row"]])), str(row["runs"][0]["rounds"])]
        cells += [f"{epsilon:.3g}" if epsilon is not None else "none"] * private
        cells += [_chosen(row), f"{percent(row['validation'])}" if "validation" in row else ""]
        shown = apart.show(ACCURACY, unit="") if apart and row["row"] != base else ""
        body.append([*cells, ours.value.show(ACCURACY).replace("%", ""), shown])
    head = ["run", "bytes up, a client and round", "rounds", *["ε"] * private, "chosen", "validation, %"]
    return table([*head, "test, %, five seeds", f"difference to `{base}`, points, with 95%"], body)


def tuned_pairs() -> str:
    """Differences between some tuned rows, other than to FedAvg."""
    found = {row.name: row for row in choice.measured().rows}
    body = []
    for name, base in PAIRS:
        apart = found[name].difference(found[base])
        values = [each.value.show(ACCURACY).replace("%", "") for each in (found[name], found[base])]
        body.append([f"`{name}`", f"`{base}`", *values, apart.show(ACCURACY, unit="") if apart else ""])
    return table(["run", "against", "test, %", "the other's, %", "difference, points, with 95%"], body, 2)


def tuned_short() -> str:
    """Some of these rows for the README: what a client sends, and the accuracy beside that of FedAvg."""
    found, told = {row.name: row for row in choice.measured().rows}, tuned_rows()
    sent = {name: told[name]["runs"][0]["bytes_up"] / told[name]["runs"][0]["turns"] for name in DIGITS_SHORT}
    body = []
    for name, up in sent.items():
        row, apart = found[name], found[name].difference(found["fedavg"])
        method = tomllib.loads(row.plan.toml())["method"]
        cells = [f"`{name}`", sends(method), count(round(up)), ratio(sent["fedavg"], up)]
        cells.append(row.value.show(ACCURACY).replace("%", ""))
        body.append([*cells, apart.show(ACCURACY, unit="") if apart and name != "fedavg" else ""])
    head = ["run", "a client sends", "bytes up, a client and round", "times fewer", "accuracy, %"]
    return table([*head, "difference to `fedavg`, points, with 95%"], body, 2)


def tuned_rows() -> dict[str, dict[str, Any]]:
    told = json.loads((HERE / "tuned.json").read_text(encoding="utf-8"))
    return {row["row"]: row for row in told["rows"]}


def _chosen(row: dict[str, Any]) -> str:
    """The settings that a search has chosen, in a few words."""
    if "chosen" not in row:
        return f"as `{row['like']}`"
    return ", ".join(f"{key.removeprefix('method.')} {value:.3g}" for key, value in row["chosen"].items())


def tuned_commands() -> str:
    """How the tuned rows were made."""
    told = json.loads((HERE / "tuned.json").read_text(encoding="utf-8"))
    hours = sum(row["seconds"] for row in told["rows"]) / 3600
    commits = ", ".join(dict.fromkeys(row["commit"] for row in told["rows"]))
    where = f"CPU, one thread a row, commits {commits}"
    said = f"`{told['command']}` ({where}) takes {hours:.1f} hours of one core. Its commands:"
    return f"{said}\n\n" + "\n".join(f"    {row['command']}" for row in told["rows"])


def situations() -> str:
    """What `fedveil choose` recommends in ten situations, and what the runs of its recipes took and reached."""
    told = json.loads((HERE / "situations.json").read_text(encoding="utf-8"))
    head = ["situation", "options", "first recipe", "bytes up and ε, forecast", "in its run"]
    head += ["accuracy as measured, %", "in its run, %"]
    body = []
    for row in told["rows"]:
        options = row["command"].removeprefix("fedveil choose").strip()
        sent = [count(row[part]["up"]) for part in ("forecast", "run")]
        if row["run"]["epsilon"] is not None:
            sent = [f"{up}, ε {row[p]['epsilon']:.3g}" for up, p in zip(sent, ("forecast", "run"), strict=True)]
        reached = "" if row["run"]["accuracy"] is None else percent(row["run"]["accuracy"])
        accuracy = f"{percent(row['accuracy']['mean'])} ± {percent(row['accuracy']['deviation'])}"
        name = f"`{row['recipe']}`"
        body.append([row["situation"], f"`{options}`" if options else "", name, *sent, accuracy, reached])
    return table(head, body, 3) + f"\n\nBy `{told['command']}` (commit {told['commit']})."


def new_layer(
    study: str, noun: str, enough: float, alone: str = "The same layer where one party has the {}, by L-BFGS:"
) -> str:
    """Some weights of a frozen network: where they end with each method and with one party, and what was tried.

    study: the file of results; noun: what records are; enough: the accuracy that bytes are counted to
    alone: what is said of one party
    """
    told = json.loads((HERE / f"{study}.json").read_text(encoding="utf-8"))
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, run in told["seeds"].items():
        split, method, _ = name.split()
        runs.setdefault((split, method), []).append(run)
    private = any("epsilon" in run for run in told["seeds"].values())
    body = []
    order = ("iid", "dirichlet", "forward", "private-8", "private-2", "secure", "fedavg", "lora", "top-k", "sketch")
    for (split, method), each in sorted(runs.items(), key=lambda run: [order.index(name) for name in run[0]]):
        values, base = ([run["accuracy"] for run in own] for own in (each, runs[split, "forward"]))
        middle, apart = spread(values), paired(dict(enumerate(values)), dict(enumerate(base)))
        sent = [("up_a_round",), ("down_a_round",), ("up", "down")]
        figures = [count(sum(run[key] for run in each for key in keys) / len(each)) for keys in sent]
        reached = [next((sent for _, sent, accuracy in run["curve"] if accuracy >= enough), None) for run in each]
        figures.append("" if None in reached else count(sum(filter(None, reached)) / len(reached)))
        figures += [f"{each[0]['epsilon']:.2f}" if "epsilon" in each[0] else ""] * private
        figures.append(f"{percent(middle.mean)} ± {percent(middle.deviation or 0.0)}")
        difference = apart.show(ACCURACY) if apart and method != "forward" else ""
        body.append([split, f"`{method}`", each[0]["settings"], *figures, difference])
    head = ["split", "method", "settings", "bytes up, a client and round", "bytes down", "bytes of a client in all"]
    head += [f"until it first has {100 * enough:g}%", *["ε"] * private, "accuracy, %"]
    head.append("difference to `forward`, with 95%")
    central = [[name, count(run["records"]), percent(run["accuracy"])] for name, run in told["central"].items()]
    tried = [[n, count(r["up"] + r["down"]), percent(r["validation_accuracy"])] for n, r in told["sweep"].items()]
    parts = [
        f"`{told['command']}` ({cpu(told['threads'])}; PyTorch {told['torch']}, commit {told['commit']}):",
        table(head, body, 3),
        alone.format(noun),
        table(["trained on", noun, "accuracy, %"], central),
        "The settings that were tried, with seed 10:",
        table(["method and settings", "bytes of a client in all", "validation, %"], tried),
    ]
    return "\n\n".join(parts)


def rebuilt(study: str) -> str:
    """What the server rebuilds from messages about a new layer."""
    told = json.loads((HERE / f"{study}.json").read_text(encoding="utf-8"))
    body = []
    for name, case in told["attacks"].items():
        for row in case["rows"]:
            found = row["exposure"]
            near, labels = found["reached"] or {}, _value(found["labels"], 100)
            figures = [f"{found['cosine']['value']:.2f}", labels, _value(near.get("identified"), 100)]
            body.append([name, count(row["records"]), found["kind"], *figures, found["verdict"]])
    return table(["clients send", "records", "the server attacks", "cosine", "labels, %", "identified, %", ""], body, 1)


def tested(study: str) -> str:
    """Which records a server that has a list of candidates picks for the messages of a study."""
    told, body = json.loads((HERE / f"{study}.json").read_text(encoding="utf-8")), []
    for name, case in told["attacks"].items():
        for row in case["rows"]:
            found, test = row["exposure"], row["exposure"]["picked"]
            if test:
                figures = [_value(test["share"], 100), f"{100 * test['chance']:.1f}", f"{test['auc']['value']:.3f}"]
                body.append([name, count(found["records"]), count(test["candidates"]), *figures, found["verdict"]])
    return table(["clients send", "records", "candidates", "picked, %", "by chance, %", "AUC", ""], body, 1)


def exposure() -> str:
    """What messages of the digits expose, from the matrix of attacks and the test of candidates."""
    done, told = (
        json.loads((EXPOSED / f"{name}.json").read_text(encoding="utf-8")) for name in ("matrix", "candidates")
    )
    tests = {(row["case"], row["kind"], row["records"]): row["picked"] for row in told["rows"]}
    head = ["clients send", "records", "the server attacks", "cosine", "labels, %", "PSNR, dB", "identified, %"]
    body = []
    for row in done["rows"]:
        found = row["exposure"]
        near, epsilon = found["reached"] or {}, row["epsilon"]
        figures = [_value(found["labels"], 100), _value(near.get("psnr")), _value(near.get("identified"), 100)]
        records = str(found["records"] or row["records"])
        cosine = f"{found['cosine']['value']:.2f}"
        assert epsilon is None or "ε" in row["case"]
        tested = tests.get((row["case"], found["kind"], found["records"]))
        picked = _value(tested["share"], 100) if tested else ""
        body.append([row["case"], records, found["kind"], cosine, *figures, found["verdict"], picked])
    ran = f"`{done['environment']['command']}`, commit {done['environment']['commit']}"
    ran += f"; picked: `{told['command']}`, commit {told['commit']}:"
    return f"{ran}\n\n{table([*head, '', 'picked, %'], body, 1)}"


def guesses() -> str:
    """What is reached without a message."""
    done = json.loads((EXPOSED / "matrix.json").read_text(encoding="utf-8"))
    seen: dict[int, dict[str, Any]] = {}
    for row in done["rows"]:
        if row["exposure"]["baselines"]:
            seen.setdefault(row["exposure"]["records"], row["exposure"]["baselines"])
    body = [
        [str(records), guess, _value(near["psnr"]), _value(near["identified"], 100)]
        for records, found in sorted(seen.items())
        for guess, near in found.items()
    ]
    return table(["records", "guess", "PSNR, dB", "identified, %"], body, 2)


def given_away() -> str:
    """Pictures rebuilt from slopes, against K / d and rounds."""
    told = json.loads((EXPOSED / "slopes.json").read_text(encoding="utf-8"))
    body = []
    for each in told["points"]:
        ranged = f"{each['psnr']:.1f} ({each['psnr low']:.1f} to {each['psnr high']:.1f})"
        measured = [f"{each['cosine']:.2f}", ranged, percent(each["identified"])]
        body.append([count(each["rounds"]), count(each["K"]), f"{each['slopes / d']:.2f}", *measured])
    head = ["rounds", "K", "slopes / d", "cosine", "PSNR, dB (95%)", "identified, %"]
    first = told["points"][0]
    said = (
        f"`{told['command']}`, commit {told['commit']}. The mean test picture has {first['mean: psnr']:.1f} dB, "
        f"the one nearest to the truth {first['nearest: psnr']:.1f} dB."
    )
    return f"{said}\n\n{table(head, body, 0)}"


def inverted() -> str:
    """Attacks on CIFAR-10 pictures in the settings of their own papers."""
    parts = json.loads((EXPOSED / "inversion.json").read_text(encoding="utf-8"))
    names = {
        "linear": "a linear layer, 1 record",
        "idlg": "DLG, 1 record, the label read off (iDLG)",
        "dlg": "DLG, 1 record, the label fitted",
        "cosine": "Inverting Gradients, 1 record",
        "cosine-batch": "Inverting Gradients, 4 records",
    }
    rows = {name: parts[part] for part, name in names.items()}
    rows |= {f"2 epochs in batches of 2, 4 records: {k}": v for k, v in _measured(parts["epochs"])}
    rows |= {f"random vectors: {k}": v for k, v in _measured(parts["wrong"])}
    body = [
        [name, count(each["victims"]), _value(each["psnr"]), f"{each['ssim']['value']:.2f}", *_found(each)]
        for name, each in rows.items()
    ]
    return table(["attack", "victims", "PSNR, dB", "SSIM", "identified, %", "exact, %"], body, 1)


def _measured(part: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The scores among the entries of a part."""
    return [(name, each) for name, each in part.items() if isinstance(each, dict) and "psnr" in each]


def _found(each: dict[str, Any]) -> list[str]:
    return [_value(each["identified"], 100), _value(each["exact"], 100)]


def hidden() -> str:
    """How slopes on records compare with those on noise, and what they give away all the same."""
    told = json.loads((EXPOSED / "histograms.json").read_text(encoding="utf-8"))
    near = told["inverted"]
    body = [
        ["told apart by a Kolmogorov–Smirnov test (p < 0.05), %", _share(told["told apart"])],
        ["the same after both are scaled to a deviation of 1, %", _share(told["told apart after scaling"])],
        ["records identified by inverting the slopes, %", _share(near["identified"])],
        ["PSNR of the rebuilt records, dB", f"{near['psnr']:.1f}"],
    ]
    pairs = f"{near['K']} slopes, {told['pairs']} pairs of a record and noise"
    said = f"`{told['command']}`, commit {told['commit']}: {pairs}."
    return f"{said}\n\n{table(['', 'figure'], body)}"


def _share(value: float) -> str:
    return f"{100 * value:.0f}"


def argued() -> str:
    """The attacks of the papers on FedAGE and TOFU, beside stronger ones."""
    told = json.loads((EXPOSED / "papers.json").read_text(encoding="utf-8"))
    body = []
    for row in told["rows"]:
        found = row["exposure"]
        near = found["reached"]
        figures = [f"{found['cosine']['value']:.2f}", _value(near["psnr"]), _value(near["identified"], 100)]
        body.append([row["case"], count(row["records"]), row["attack"], found["kind"], *figures])
    head = ["clients send", "records", "attack", "on", "cosine", "PSNR, dB", "identified, %"]
    return f"`{told['command']}`, commit {told['commit']}:\n\n{table(head, body, 1)}"


def _value(measured: dict[str, float] | None, times: float = 1.0) -> str:
    """A mean or a share, without its interval."""
    return "" if measured is None else f"{measured['value'] * times:.{0 if times > 1 else 1}f}"


def _rival(label: str, found: dict[str, Any]) -> Sequence[str]:
    asked = f"{count(found['cohort'])} of {count(found['clients'])}"
    if "milliseconds" not in found:
        return (label, asked, "failed", *[""] * 7)
    ratios = (found.get(f"/ {base}") for base in ("plain loop", "pfl-research"))
    return (
        label,
        asked,
        f"{found['milliseconds']:.4g}",
        f"{found['least']:.4g} to {found['most']:.4g}",
        f"{found['milliseconds a client']:.3g}",
        *("" if value is None else f"{value:.3g}" for value in ratios),
        *(count(round(found["MiB"][kind])) if kind in found["MiB"] else "" for kind in ("GPU, allocated", "host")),
        percent(found["accuracy"]),
    )


def figure(value: float) -> str:
    return count(value) if value == int(value) else f"{value:.4g}"


TABLES: dict[str, Callable[[], str]] = {
    "digits": lambda: digits(DIGITS),
    "digits commands": lambda: commands(f"digits/{name}" for name in DIGITS),
    "digits classes": lambda: digits(CLASSES),
    "digits classes commands": lambda: commands(f"digits/{name}" for name in CLASSES),
    "digits surrogates": surrogates,
    "digits surrogates commands": lambda: commands(f"digits/{name}" for name in SURROGATES),
    "digits summed": summed,
    "digits summed commands": lambda: commands(f"digits/{name}" for name in SUMMED),
    "mnist fedsynth": fedsynth,
    "mnist fedsynth shards": shards,
    "mnist fedsynth both": both_ways,
    "mnist tofu": tofu,
    "mnist tofu messages": tofu_messages,
    "mnist tofu run": tofu_run,
    "digits attack": attacked,
    "fedage pairs": fedage_pairs,
    "fedage cohorts": fedage_cohorts,
    "fedage errors": fedage_errors,
    "fedage sweep": fedage_sweep,
    "mnist fedage": lambda: fedage_runs(*FEDAGE),
    "shakespeare": lambda: fedage_runs(("shakespeare/fedavg", "shakespeare/fedage")),
    "shakespeare commands": lambda: commands(("shakespeare/fedavg", "shakespeare/fedage")),
    "baffle": baffle,
    "fedlap rounds": fedlap_rounds,
    "fedlap private": fedlap_private,
    "fedlap audit": fedlap_audit,
    "beside": beside,
    "mnist commands": lambda: commands(f"mnist/{path.name}" for path in sorted((HERE / "mnist").iterdir())),
    "cifar commands": lambda: commands(f"cifar10/{path.name}" for path in sorted((HERE / "cifar10").iterdir())),
    "fashion commands": lambda: commands(f"fashion/{path.name}" for path in sorted((HERE / "fashion").iterdir())),
    "tuned short": tuned_short,
    "tuned pairs": tuned_pairs,
    "tuned iid": lambda: tuned("iid", "fedavg"),
    "tuned classes": lambda: tuned("classes", "fedavg-classes"),
    "tuned few": lambda: tuned("few", "fedavg-2class"),
    "tuned private": lambda: tuned("private", "dp-fedavg"),
    "tuned private iid": lambda: tuned("private iid", "dp-fedavg-iid"),
    "tuned forward": lambda: tuned("forward", "baffle-clear"),
    "tuned users": lambda: tuned("users", "dp-fedavg-users-server"),
    "tuned summed": lambda: tuned("summed", "fedavg", ["fedavg"]),
    "tuned commands": tuned_commands,
    "situations": situations,
    "images": lambda: new_layer("images", "pictures", 0.85),
    "sentences": lambda: new_layer("sentences", "sentences", 0.86),
    "sentences attacks": lambda: rebuilt("sentences"),
    "prompts attacks": lambda: tested("prompts"),
    "prompts": lambda: new_layer("prompts", "sentences", 0.86, "The same weights where one party has the {}, by Adam:"),
    "exposure": exposure,
    "guesses": guesses,
    "slopes": given_away,
    "inversion": inverted,
    "papers": argued,
    "histograms": hidden,
    "bench": bench,
    "speed": speed,
    "floors": floors,
    "rivals": rivals,
}


def filled(text: str) -> str:
    """A page with what stands between its `<!-- begin: NAME -->` and `<!-- end -->` written anew."""

    def block(found: re.Match[str]) -> str:
        return f"<!-- begin: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- begin: ([a-z ]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


# ---------------------------------------------------------------------------------------------------- figures


def draw() -> None:
    """Accuracy against rounds and bytes: of the digits runs, and of the MNIST runs."""
    DRAWN.mkdir(exist_ok=True)
    pictures = {
        DRAWN / "curves.svg": [f"digits/{name}" for name in CURVES],
        HERE / "digits-codecs.svg": [f"digits/{name}" for name in CODECS],
        HERE / "digits-classes.svg": [f"digits/{name}" for name in CLASSES],
    }
    for split in ("iid", "shards"):
        pictures[HERE / f"mnist-{split}.svg"] = [f"mnist/fedavg-{split}", f"mnist/fedsynth-{split}"]
    pictures[HERE / "mnist-tofu.svg"] = ["mnist/fedavg-lenet5", *(f"mnist/{name}" for name in TOFU)]
    pictures[HERE / "mnist-fedlap.svg"] = [f"mnist/{name}" for name in LAP_CURVES]
    pictures[HERE / "mnist-fedlap-dp.svg"] = [name for name in LAP_PAPER if name.startswith("mnist/")]
    for path, names in pictures.items():
        runs = made(names).values()
        private = all(run.summary["epsilon"] for run in runs)
        figure = curves({run.name: run.ledger for run in runs}, ("epsilon" if private else "rounds", "bytes"))
        figure.set_facecolor("white")  # readable where the page is dark
        if "digits/fedavg" in names:
            for axes in figure.axes:
                axes.set_ylim(0.85, 1)  # where the runs differ
                axes.set_ylabel("test accuracy")
        path.write_text(svg(figure) + "\n", encoding="utf-8")


def draw_exposed() -> None:
    """What is rebuilt from some kinds of messages, for the README."""
    held = safetensors.torch.load((EXPOSED / "pictures.safetensors").read_bytes())
    lines = {"records of clients": held["raw gradient, 1 record/true"] / 255}
    lines |= {f"from {name}": held[f"{title}, 1 record/found"] / 255 for name, title in SHOWN.items()}
    drawn = gallery(lines)
    drawn.set_facecolor("white")
    (DRAWN / "exposed.svg").write_text(svg(drawn) + "\n", encoding="utf-8")


def draw_slopes() -> None:
    """PSNR of pictures rebuilt from slopes against slopes / d, a line for each number of rounds."""
    told = json.loads((EXPOSED / "slopes.json").read_text(encoding="utf-8"))["points"]
    drawn = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = drawn.add_subplot()
    for i, rounds in enumerate(sorted({each["rounds"] for each in told})):
        own = [each for each in told if each["rounds"] == rounds]
        places, middle, low, high = (
            [each[key] for each in own] for key in ("slopes / d", "psnr", "psnr low", "psnr high")
        )
        label = f"{rounds} round{'s' if rounds > 1 else ''}"
        axes.plot(places, middle, **look(i), label=label)
        axes.fill_between(places, low, high, color=look(i)["color"], alpha=0.15, linewidth=0)
    for guess, style in (("mean", ":"), ("nearest", "--")):
        label = f"the {guess} test record"
        axes.axhline(told[0][f"{guess}: psnr"], color="#888888", linestyle=style, linewidth=1, label=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8d8d8", linewidth=0.6)
    axes.set(xscale="log", xlabel="slopes of all rounds / weights", ylabel="PSNR of rebuilt pictures, dB")
    axes.legend(frameon=False, fontsize=8)
    drawn.set_facecolor("white")
    (EXPOSED / "slopes.svg").write_text(svg(drawn) + "\n", encoding="utf-8")


LINES = {  # methods of the figure on sentences, and what it calls them
    "forward": "16 slopes, forward passes only",
    "private-8": "the same, ε = 8 for each record",
    "private-2": "the same, ε = 2",
    "fedavg": "FedAvg, whole updates",
    "top-k": "FedAvg, top-k",
}


def draw_sentences() -> None:
    """Accuracy on sentences against the bytes of a client, with the range over seeds."""
    told = json.loads((HERE / "sentences.json").read_text(encoding="utf-8"))
    drawn = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = drawn.add_subplot()
    for i, (method, label) in enumerate(LINES.items()):
        curves = [run["curve"] for name, run in told["seeds"].items() if name.startswith(f"iid {method} ")]
        places = [sum(sent for _, sent, _ in point) / len(curves) / 1000 for point in zip(*curves, strict=True)]
        values = [[100 * accuracy for _, _, accuracy in point] for point in zip(*curves, strict=True)]
        axes.plot(places, [sum(each) / len(each) for each in values], **look(i), label=label)
        axes.fill_between(
            places, *zip(*((min(v), max(v)) for v in values), strict=True), color=look(i)["color"], alpha=0.15
        )
    alone = told["central"]
    for name, label, style in (
        ("all training sentences", "one party with all sentences", "--"),
        ("nothing: the whole network as it is", "the language model as it is", ":"),
    ):
        axes.axhline(100 * alone[name]["accuracy"], color="#888888", linestyle=style, linewidth=1, label=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8d8d8", linewidth=0.6)
    axes.set(xscale="log", xlabel="kilobytes of a client, up and down, all rounds", ylabel="test accuracy, %")
    axes.set_ylim(70, 91)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    drawn.set_facecolor("white")
    (DRAWN / "sentences.svg").write_text(svg(drawn) + "\n", encoding="utf-8")


def screenshot() -> None:
    """The top of the report on the digits runs, as a reader sees it."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page = write([HERE / "digits" / name for name in CURVES], Path(folder) / "report.html")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        view = browser.new_page(viewport={"width": 1200, "height": 1265}, color_scheme="light")
        view.goto(page.as_uri())
        view.screenshot(path=DRAWN / "report.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--screenshot", action="store_true")
    chosen = parser.parse_args()
    if chosen.write:
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        draw()
        draw_slopes()
        draw_exposed()
        draw_sentences()
    if chosen.screenshot:
        screenshot()
    if not chosen.write and not chosen.screenshot:
        for name, make in TABLES.items():
            print(f"{name}\n\n{make()}\n")


if __name__ == "__main__":
    main()
