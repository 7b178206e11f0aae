"""Every model of the zoo × every method: which run, and why the others do not.

python tests/models/models_by_methods.py    write docs/reference/models.md
"""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from pathlib import Path

import torch

import fedveil as fv

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from models import zoo
from testing import settings

DOC = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
PRIVATE = "fedavg, privacy"
METHODS: dict[str, fv.Method] = {
    name: settings.METHODS.get(name) or kind()
    for name, kind in sorted(fv.METHODS.items())
    if kind.__module__.startswith("fedveil.")
} | {PRIVATE: fv.FedAvg(privacy=fv.DpSgd(noise=1.0, clip=1.0, delta=1e-3))}


@cache
def task_of(name: str) -> fv.Task:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this model cannot be stacked")
        return zoo.task_of(name)


def run(model: str, method: str) -> str:
    """Train for two rounds; return the sentence with which the model is refused, or nothing."""
    task = task_of(model)
    try:
        result = fv.run(task, METHODS[method], rounds=2, cohort=3)
    except ValueError as error:
        return str(error)
    for row in result.ledger.rows:
        assert not row.missing, row.missing
        assert not [event for event in row.events if "stay as they were" in event], row.events
    assert bool(torch.isfinite(result.weights).all())
    assert not torch.equal(result.weights, task.initial)
    return ""


def reason(sentence: str, method: str) -> str:
    """A refusal without the names of the method and of the batch norm policy, and without a model's shapes."""
    found = sentence.replace(METHODS[method].name, "…")
    return re.sub(r"(?<=layers that are )\w+|\(its outputs .*?\)", "…", found)


HEAD = """# Models and methods

This table shows which methods train which models. `tests/models/zoo.py` defines the models. They are small, and each
stands for its kind. Each ✓ is a run of two rounds with three clients. A number refers to an error message below the
table.
"""
FOOT = """Each is the error of the first cell with this number. Other cells name their own method, policy and shapes.
[Use any PyTorch model](../how-to/any-model.md) explains what a model may be, and the policies of batch norm.
"""


def page() -> str:
    """The page, in Markdown: a table of runs, and the sentences behind its numbers."""
    reasons: dict[str, str] = {}

    def cell(model: str, method: str) -> str:
        sentence = run(model, method)
        if not sentence:
            return "✓"
        reasons.setdefault(reason(sentence, method), sentence)
        return str(list(reasons).index(reason(sentence, method)) + 1)

    lines = ["| model | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    lines += [f"| {model} | " + " | ".join(cell(model, method) for method in METHODS) + " |" for model in zoo.KINDS]
    sentences = [f"{i}. {sentence}" for i, sentence in enumerate(reasons.values(), 1)]
    return "\n".join([HEAD, *lines, "", "## Reasons", "", FOOT, *sentences, ""])


if __name__ == "__main__":
    DOC.write_text(page(), encoding="utf-8")
