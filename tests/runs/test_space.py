"""What a search is over, and where runs are compared."""

import math

import pytest

from fedveil.core.ledger import Row
from fedveil.runs.space import Budget, Space, fits, parse_budget, parse_over, set_by_hand, validate_spaces


def test_a_space_is_a_range_or_a_list():
    assert parse_over("a.lr=log:0.001..1") == Space("a.lr", "log", 0.001, 1)
    assert parse_over("a=1e-3..0.5") == Space("a", "float", 0.001, 0.5)
    assert parse_over("a=int:1..10").ends == (1, 10)
    assert parse_over("a=logint:1..1000").log
    assert parse_over("a=qsgd, top-k").values == ("qsgd", "top-k")
    assert parse_over("a=[1, 2],[3]").values == ("[1, 2]", "[3]")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a", "--over takes KEY=VALUES, not 'a'"),
        ("a=", "--over takes KEY=VALUES"),
        ("a=1..1", "is an empty range"),
        ("a=log:1..0.1", "is an empty range"),
        ("a=log:0..1", "lower end must be above 0"),
        ("a=int:0.5..2", "is a range of whole numbers"),
        ("a=x..y", "has an end that is no number"),
        ("a=1..inf", "is an empty range"),
        ("a=1", "is no range and no list of different values"),
        ("a=b,b", "is no range and no list"),
        ("a=log:3", "is no range and no list"),
        ("seed=1,2", "--seeds says over how many"),
    ],
)
def test_a_wrong_space_is_one_sentence(text, told):
    with pytest.raises(ValueError, match=told):
        parse_over(text)


def test_keys_and_ends_are_checked_by_the_recipe():
    for text, told in (
        ("method.local.lrr=0.1..1", "unknown key 'method.local.lrr'"),
        ("method.local.epochs=0.5..2", "must be a whole number"),
        ("method.up.name=raw,top-kk", "there is no codec 'top-kk'"),
        ("rounds=int:0..5", "at least 1"),
    ):
        with pytest.raises(ValueError, match=f"--over {text.partition('=')[0]}: .*{told}"):
            validate_spaces("digits/fedavg", [], [parse_over(text)])
    with pytest.raises(ValueError, match="names rounds twice"):
        validate_spaces("digits/fedavg", [], [parse_over("rounds=1,2"), parse_over("rounds=int:1..2")])


def test_a_key_may_depend_on_a_list():
    spaces = [parse_over("method.up.share=0.1..0.5"), parse_over("method.up.name=raw,top-k")]
    validate_spaces("digits/fedavg", [], spaces)
    with pytest.raises(ValueError, match="share"):
        validate_spaces("digits/fedavg", [], spaces[:1])
    assert fits("digits/fedavg", [], {"method.up.name": "top-k"}, spaces[0])
    assert not fits("digits/fedavg", [], {"method.up.name": "raw"}, spaces[0])


def test_the_first_trial_has_the_values_of_the_recipe():
    spaces = [parse_over(text) for text in ("method.local.lr=log:0.1..1", "method.local.epochs=int:6..9")]
    assert set_by_hand("digits/fedavg", [], spaces) == {"method.local.lr": 0.3}
    assert set_by_hand("digits/fedavg", [], [parse_over("method.up.name=top-k,raw")]) == {"method.up.name": "raw"}
    assert set_by_hand("digits/fedavg", [], [parse_over("method.feedback=true,false")]) == {"method.feedback": "false"}


def test_a_budget_ends_before_the_round_that_exceeds_it():
    rows = [Row(round=n, cohort=[0], up={"0": 100}, epsilon=float(n)) for n in (1, 2, 3)]
    assert [row.round for row in Budget("bytes", 250).rows(rows)] == [1, 2]
    assert [row.round for row in Budget("epsilon", 1.5).rows(rows)] == [1]
    assert Budget().rows(rows) == rows
    assert Budget("bytes", 250).spent(rows)
    assert not Budget("bytes", 300).spent(rows)
    assert parse_budget("bytes=1.5MB") == Budget("bytes", 1.5e6)
    assert parse_budget("epsilon=8").most == 8
    assert Budget().most == math.inf
    for text in ("bytes", "bytes=0", "passes=3", "epsilon=8MB", "bytes=-1", "bytes=1e999"):
        with pytest.raises(ValueError, match=f"--at is '{text}'; use for example"):
            parse_budget(text)
