"""Every combination of the parts of methods that average, on a toy: which run, and why the others do not.

python tests/methods/matrix.py    write the tables of docs/reference/combinations.md
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedveil as fv
from fedveil.data import from_tensors
from fedveil.methods.rules import UNSUPPORTED, Mismatch

DOC = Path(__file__).parents[2] / "docs" / "reference" / "combinations.md"
LOCAL = fv.LocalTraining(lr=0.2, batch=8)
DP = fv.DpSgd(noise=1.0, clip=1.0, delta=1e-3)
USER = fv.UserLevel(noise=1.0, clip=1.0, delta=1e-2)

METHODS: dict[str, Callable[..., fv.Averaging]] = {
    name: kind
    for name, kind in sorted(fv.METHODS.items())
    if issubclass(kind, fv.Averaging) and not name.startswith("toy")
}
OWN: dict[str, Mapping[str, Any]] = {
    "baffle-epochs": {"directions": 8},
    "fedsgd": {"server": fv.ServerOptimizer(lr=0.2)},
}
CODECS: dict[str, fv.Codec] = {
    "raw": fv.Raw(),
    "half": fv.Half(),
    "qsgd": fv.Qsgd(bucket=64),
    "top-k": fv.TopK(0.1),
    "zstd": fv.Zstd(),
    "tiers": fv.Tiers(fv.TopK(0.2), fv.TopK(0.1)),
    "powersgd": fv.PowerSgd(2),
    "sketch": fv.Sketch(48),
    "fedage": fv.FedAgeCodec(block=16, cohort=5, code="linear"),
    "fedsynth": fv.FedSynthCodec(batches=1, batch=2, epochs=1, fits=2, best=False),
    "tofu": fv.TofuCodec(points=2, steps=2),
}
PRIVACY: dict[str, Mapping[str, Any]] = {
    "none": {},
    "record": {"privacy": DP},
    "user, by each client": {"user_privacy": replace(USER, where="client")},
    "user, in the sum": {"user_privacy": USER},
}
SECURE: dict[str, Mapping[str, Any]] = {"clear": {}, "secure": {"secure": fv.SecureSum(clip=4.0)}}
DOWN: dict[str, Mapping[str, Any]] = {
    "full weights": {},
    "steps": {"down": fv.Qsgd(bucket=64)},
    "from the initial weights": {"down": fv.FedSynthCodec(batches=1, batch=2, epochs=1, fits=2, best=False)},
}
AXES: tuple[Mapping[str, Any], ...] = (METHODS, CODECS, PRIVACY, SECURE, DOWN)
Cell = tuple[str, ...]


@cache
def task() -> fv.Task:
    """A network of 163 weights, 6 clients of 16 records."""
    x = torch.randn(96, 6, generator=fv.Seed.root(0).torch())
    y = (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()
    data = from_tensors(x, y, x, y, classes=3)
    split = fv.split("iid", data, 6, fv.Seed.root(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return fv.Task(model, data, replace(split, max_records=split.largest))


def made(method: str, codec: str, **options: Any) -> fv.Averaging:
    """A method with a codec and further options. Raises a ValueError with the sentence of a rule."""
    return METHODS[method](**{"local": LOCAL, **OWN.get(method, {}), "up": CODECS[codec], **options})


def built(cell: Cell) -> fv.Averaging:
    """The method of a cell, tried on the task. Raises a ValueError with the sentence of a rule."""
    method, codec, privacy, secure, down = cell
    chosen = made(method, codec, **PRIVACY[privacy], **SECURE[secure], **DOWN[down])
    chosen.init_state(task())
    chosen.account(task(), fv.CohortSampler(size=4))
    return chosen


def cells() -> Iterator[Cell]:
    """All combinations."""
    return itertools.product(*AXES)


def covering() -> list[Cell]:
    """Few cells in which every pair of values of two axes occurs, found greedily."""
    axes = [list(axis) for axis in AXES]
    pairs = {
        ((i, a), (j, b))
        for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2)
        for a in first
        for b in second
    }
    chosen: list[Cell] = []
    every = list(cells())
    while pairs:
        best = max(every, key=lambda cell: sum(pair in pairs for pair in itertools.combinations(enumerate(cell), 2)))
        pairs -= set(itertools.combinations(enumerate(best), 2))
        chosen.append(best)
    return chosen


# ---------------------------------------------------------------------------------------------------- the tables

OPTIONS: dict[str, Mapping[str, Any]] = {
    "privacy": {"privacy": DP},
    "user privacy, client": {"user_privacy": replace(USER, where="client")},
    "user privacy, sum": {"user_privacy": USER},
    "secure": {"secure": fv.SecureSum()},
    "secure, user privacy": {"secure": fv.SecureSum(), "user_privacy": USER},
    "feedback": {"feedback": True},
    "median": {"aggregator": fv.Aggregator("median")},
    "full rounds": {"full_rounds": 1},
    "steps down": {"down": fv.Qsgd(bucket=64)},
}


class Reasons:
    """Rules by number, in the order in which they are first needed, with the sentence of the first cell."""

    def __init__(self) -> None:
        self.sentences: dict[str, str] = {}

    def cell(self, make: Callable[[], fv.Averaging]) -> str:
        try:
            make().init_state(task())
        except Mismatch as error:
            rule = str(error) if error.rule == UNSUPPORTED else error.rule
            self.sentences.setdefault(rule, str(error))
            return str(list(self.sentences).index(rule) + 1)
        return "✓"


def table(head: str, rows: Mapping[str, Mapping[str, str]]) -> str:
    names = list(next(iter(rows.values())))
    lines = [f"| {head} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | " + " | ".join(row.values()) + " |" for name, row in rows.items())])


def tables() -> str:
    """The three tables and the sentences behind their numbers, in Markdown."""
    why = Reasons()
    by_codec = {m: {c: why.cell(lambda m=m, c=c: made(m, c)) for c in CODECS} for m in METHODS}
    by_option = {m: {o: why.cell(lambda m=m, o=o: made(m, "raw", **OPTIONS[o])) for o in OPTIONS} for m in METHODS}
    codecs = {c: {o: why.cell(lambda c=c, o=o: made("fedavg", c, **OPTIONS[o])) for o in OPTIONS} for c in CODECS}
    sentences = "\n".join(f"{i}. {sentence}" for i, sentence in enumerate(why.sentences.values(), 1))
    return "\n\n".join(
        [
            "## Methods and codecs",
            table("method", by_codec),
            "## Methods and options\n\nWith the codec `raw`.",
            table("method", by_option),
            "## Codecs and options\n\nWith `fedavg`.",
            table("codec", codecs),
            "## Reasons\n\nEach is the error of the first cell with this number. Other cells name their own parts.",
            sentences,
        ]
    )


HEAD = """# Combinations

A method that averages combines a trainer, a codec up, a codec down, a server optimizer, an aggregator, privacy and the
secure sum. These tables show which of them work together. A number refers to an error message below the tables. The
rules are the rows of `src/fedveil/methods/rules.py`; a test runs the combinations.
"""


def page() -> str:
    return f"{HEAD}\n{tables()}\n"


if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
