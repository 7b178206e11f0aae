"""Every combination of parts runs, or is refused with a sentence of the rule table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fedveil as fv
from fedveil.methods import rules
from fedveil.runs.cost import cost
from methods import matrix

COVERING = matrix.covering()


def check(cell: matrix.Cell) -> bool:
    """Run two rounds of a cell, unless a rule refuses it; whether it ran."""
    try:
        method = matrix.built(cell)
    except rules.Mismatch as error:
        sentence = str(error)
        assert len(sentence) > 40
        assert ";" in sentence, "a refusal says what to use instead"
        return False
    assert not list(rules.broken(method))
    result = fv.run(matrix.task(), method, rounds=2, cohort=4)
    assert bool(torch.isfinite(result.weights).all())
    assert not torch.equal(result.weights, matrix.task().initial)
    for row in result.ledger.rows:
        assert not row.missing, row.missing
        assert not [event for event in row.events if "stay as they were" in event], row.events
    return True


@pytest.mark.parametrize("cell", COVERING, ids=" × ".join)
def test_each_pair_of_parts_runs_or_is_refused_by_a_rule(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", sorted({*matrix.cells()} - {*COVERING}), ids=" × ".join)
def test_each_combination_runs_or_is_refused_by_a_rule(cell):
    check(cell)


@pytest.mark.parametrize(
    "cell",
    [
        ("scaffold", "top-k", "none", "clear", "full weights"),
        ("scaffold", "raw", "none", "secure", "full weights"),
        ("scaffold", "raw", "user, in the sum", "secure", "steps"),
        ("baffle-epochs", "qsgd", "none", "clear", "full weights"),
        ("baffle-epochs", "raw", "user, by each client", "secure", "full weights"),
        ("feddyn", "raw", "record", "clear", "full weights"),
        ("feddyn", "powersgd", "none", "secure", "steps"),
        ("fedavg", "powersgd", "record", "secure", "full weights"),
    ],
    ids=" × ".join,
)
def test_combinations_of_methods_that_had_no_such_option_run(cell):
    assert check(cell)


def test_the_documented_table_is_that_of_the_rules():
    assert matrix.DOC.read_text(encoding="utf-8") == matrix.page(), "run python tests/methods/matrix.py"


def test_what_a_combination_costs_is_known_before_it_runs():
    """Bytes and passes of two rounds, of combinations with two vectors, two exchanges and two sums."""
    for cell in (
        ("scaffold", "top-k", "none", "clear", "steps"),
        ("scaffold", "raw", "none", "secure", "full weights"),
        ("fedavg", "powersgd", "none", "clear", "full weights"),
        ("fedavg", "powersgd", "none", "secure", "full weights"),
        ("q-fedavg", "fedage", "none", "clear", "full weights"),
        ("scaffold", "sketch", "none", "clear", "steps"),
        ("scaffold", "sketch", "user, in the sum", "secure", "full weights"),
        ("baffle-epochs", "half", "none", "clear", "full weights"),
    ):
        method = matrix.built(cell)
        plan = fv.Recipe(rounds=2, cohort=fv.CohortSampler(size=4), method=method)
        told, rows = cost(matrix.task(), plan), fv.run(matrix.task(), method, rounds=2, cohort=4).ledger.rows
        assert told["up"]["total"] == sum(row.bytes_up for row in rows), cell
        assert told["down"]["total"] == sum(row.bytes_down for row in rows), cell
        assert told["passes"]["total"] == sum(row.passes for row in rows), cell


@dataclass(frozen=True)
class Telling(fv.Averaging):
    """A method of somebody's own that sends a number beside its update."""

    name: ClassVar[str] = "toy-telling"
    about: ClassVar[fv.About] = fv.FedAvg.about

    scalars: ClassVar[Mapping[str, Any]] = {"norm": float}


@pytest.mark.parametrize("options", [{"privacy": matrix.DP}, {"user_privacy": matrix.USER}, {"secure": fv.SecureSum()}])
def test_numbers_in_the_clear_are_neither_private_nor_summed_securely(options):
    with pytest.raises(rules.Mismatch, match="sends norm in the clear"):
        Telling(**options)
