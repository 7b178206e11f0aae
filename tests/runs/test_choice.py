"""Which measured recipe suits a situation: what excludes one, what ranks them, and what they cost there."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

import fedveil as fv
from fedveil.core.ledger import Right
from fedveil.runs import choice, recipe
from fedveil.runs.choice import Broken, Candidate, Measured, MeasuredRun, Table, Wish
from fedveil.runs.cost import cost

TUNED = Path(__file__).parents[2] / "results" / "tuned.json"
TOLD = {"up": {"most": 1, "total": 0}, "down": {"most": 1, "total": 0}, "memory_estimate": {}}


@pytest.fixture(scope="module")
def digits() -> fv.Data:
    return fv.load("digits")


def right(wrong: int, seed: int, records: int = 360) -> Right:
    """Right but for so many records, which depend on the seed a little."""
    bits = np.ones(records, np.bool_)
    bits[:wrong] = False
    bits[-1 - seed % 3] = False
    return Right(1, records, np.packbits(bits).tobytes().hex())


def row(name: str, wrong: int = 10, source: str = "digits/fedavg", changes: tuple[str, ...] = ()) -> Measured:
    runs = [MeasuredRun(seed, 1 - (wrong + 1) / 360, right(wrong, seed)) for seed in range(5)]
    return Measured(name, source, list(changes), runs, records=144)


def candidate(name: str, wrong: int, sent: int, **more: object) -> Candidate:
    told = TOLD | {"up": {"most": sent, "total": sent}}
    return Candidate(row(name, wrong), recipe.read("digits/fedavg"), told, **more)  # type: ignore[arg-type]


def considered(wish: Wish, rows: list[Measured], digits: fv.Data, *changes: str) -> list[Candidate]:
    plan, task = choice.placed(recipe.read("digits/fedavg", changes), digits)
    return choice.consider(wish, plan, task, Table("", "", rows))


def test_of_recipes_that_no_other_is_seen_to_beat_the_one_with_the_fewest_bytes_is_first() -> None:
    dear, cheap = candidate("dear", 9, sent=1000), candidate("cheap", 10, sent=100)
    worse = candidate("worse", 80, sent=1)
    assert [each.row.name for each in choice.ranked([worse, dear, cheap])] == ["cheap", "dear", "worse"]
    assert choice.unbeaten([worse, dear, cheap]) == [dear, cheap]


def test_what_does_not_fit_comes_last_and_the_nearest_first() -> None:
    far = candidate("far", 1, 1, broken=(Broken("--uplink", "", 9.0),))
    near = candidate("near", 50, 1, broken=(Broken("--uplink", "", 2.0),))
    never = candidate("never", 1, 1, broken=(Broken("--no-backprop", ""),))
    failed = candidate("failed", 1, 1, failed="it cannot")
    found = choice.ranked([failed, never, far, near, candidate("fits", 300, 5)])
    assert [each.row.name for each in found] == ["fits", "near", "far", "never", "failed"]


PRIVATE = ("method.privacy.noise=1.0", "method.privacy.delta=1e-3", "split.max_records=144", "method.local.batch=36")
ROWS = [
    row("fedavg"),
    row("small", changes=("method.up.name=qsgd", "method.up.bits=4")),
    row("forward", source="digits/baffle-clear"),
    row("secure", changes=("method.secure.bits=20",)),
    row("private", changes=PRIVATE),
    row("two classes", source="digits/fedavg-classes"),
]


@pytest.mark.parametrize(
    ("wish", "fits"),
    [
        (Wish(), {"fedavg", "small", "forward", "secure", "private"}),
        (Wish(uplink=20e3), {"small", "forward"}),
        (Wish(downlink=1e3), set()),
        (Wish(total=9.1e6), {"small"}),
        (Wish(rounds=20), {"fedavg", "small", "secure", "private"}),
        (Wish(backprop=False), {"forward"}),
        (Wish(secure=True), {"secure"}),
        (Wish(epsilon=8.0, delta=1e-3), {"private"}),
        (Wish(epsilon=8.0, delta=1e-3, unit="client"), set()),
        (Wish(passes=100), set()),
        (Wish(memory=100e3), set()),
    ],
)
def test_wishes_exclude_what_does_not_grant_them(wish: Wish, fits: set[str], digits: fv.Data) -> None:
    found = considered(wish, ROWS, digits)
    assert {each.row.name for each in found if each.fits} == fits
    assert all(each.broken or each.failed for each in found if each.row.name not in fits)


def test_only_recipes_that_were_measured_on_such_a_split_are_considered(digits: fv.Data) -> None:
    assert [c.row.name for c in considered(Wish(), ROWS, digits, "split.kind=classes", "split.classes=2")] == [
        "two classes"
    ]


def test_on_clients_that_differ_what_was_measured_with_all_of_them_needs_all(digits: fv.Data) -> None:
    rows, split = [row("all", source="digits/fedlap")], ("split.kind=classes", "split.classes=2")
    (some,) = considered(Wish(), rows, digits, *split, "cohort.size=5")
    assert [broken.option for broken in some.broken] == ["--cohort"]
    (everybody,) = considered(Wish(), rows, digits, *split, "cohort.size=10")
    assert everybody.fits


def test_the_noise_is_what_the_wished_epsilon_needs(digits: fv.Data) -> None:
    rows = [row("private", changes=PRIVATE)]
    (loose,) = considered(Wish(epsilon=8.0, delta=1e-3), rows, digits)
    (tight,) = considered(Wish(epsilon=2.0, delta=1e-3), rows, digits)
    assert loose.told
    assert tight.told
    assert 0.95 * 8 < loose.told["epsilon"] <= 8
    assert 0.95 * 2 < tight.told["epsilon"] <= 2
    assert tight.told["noise"] > loose.told["noise"]


def test_what_cannot_run_on_the_task_says_why(digits: fv.Data) -> None:
    rows = [row("secure", changes=("method.secure.bits=20",))]
    (found,) = considered(Wish(secure=True), rows, digits, "cohort.size=1")
    assert "clients per round" in found.failed


def test_imagined_clients_cost_what_real_ones_of_that_size_do(digits: fv.Data) -> None:
    plan = recipe.read("digits/fedavg", ["split.clients=3", "cohort.size=2"])  # 1,437 records are three times 479
    real, imagined = (choice.placed(plan, digits, records) for records in (None, 479))
    assert cost(real[1], real[0]) == cost(imagined[1], imagined[0])
    assert imagined[1].clients.sizes.tolist() == [479] * 3


def test_imagined_clients_may_be_many_and_large(digits: fv.Data) -> None:
    plan, task = choice.placed(recipe.read("digits/fedlap", ["split.clients=1000"]), digits, 5000)
    assert (len(task.clients), task.largest, task.clients.held) == (1000, 5000, ((0, 1),) * 1000)
    assert plan.split.max_records == 5000
    assert int(task.y.max()) == 1


def test_what_was_not_measured_is_said(digits: fv.Data) -> None:
    changes = ["task.model=baffle-lenet", "split.kind=dirichlet", "cohort.size=10"]
    plan, task = choice.placed(recipe.read("digits/fedavg", changes), digits)
    private = msgspec.structs.replace(row("private", source="digits/dp-fedavg"), epsilon=5.85)
    (found,) = choice.consider(Wish(epsilon=4.0, delta=1e-4), plan, task, Table("", "", [private]))
    told = choice.beyond(found, task, imagined=False)
    assert len(told) == 4, found.failed
    for sentence, word in zip(told, ("baffle-lenet", "5 of 5 clients", "dirichlet", "ε 5.85"), strict=True):
        assert word in sentence


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"uplink": 0.0}, "--uplink is 0"),
        ({"epsilon": float("inf")}, "--epsilon is inf"),
        ({"delta": 1.0}, "--delta is 1"),
        ({"unit": "house"}, "--unit is 'house'"),
    ],
)
def test_a_wish_has_sensible_numbers(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Wish(**wrong)  # type: ignore[arg-type]


def test_claims_of_options_that_are_not_used_are_left_out() -> None:
    plain = choice.proves(recipe.read("digits/fedavg"))
    summed = choice.proves(recipe.read("digits/fedavg-secure"))
    assert {kind for kind, _ in plain} == {"measured"}
    assert {kind for kind, _ in summed} == {"proved"}  # what was measured is of updates in the clear
    assert all(sentence.startswith("with secure:") for _, sentence in summed)


# ------------------------------------------------------------------------------------------------ the table


def test_the_table_that_comes_with_fedveil_is_that_of_the_results() -> None:
    table, told = choice.measured(), json.loads(TUNED.read_text(encoding="utf-8"))
    assert [each.name for each in table.rows] == [each["row"] for each in told["rows"]]
    for ours, theirs in zip(table.rows, told["rows"], strict=True):
        assert ours.changes == theirs["changes"]
        assert ours.accuracies == {run["seed"]: run["accuracy"] for run in theirs["runs"]}


def test_each_measured_recipe_can_be_read_and_has_five_seeds() -> None:
    for each in choice.measured().rows:
        assert each.plan.task.data == "digits"
        assert len(each.runs) == 5, each.name
        assert each.value.mean > 0.5, each.name
