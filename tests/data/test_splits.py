"""Splits: every kind is a partition, repeats from its seed, and has the property it is named for."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.core.seeds import Seed
from fedveil.data import SPLITS, Data, Share, Split, from_tensors, load, split
from fedveil.data.pictures import picture
from fedveil.data.splits import by_classes, dirichlet, iid, natural, shards

SEED = Seed.root(0)


def toy(y: np.ndarray, groups: np.ndarray | None = None, classes: int = 10) -> Data:
    x = np.zeros((len(y), 1), np.float32)
    return from_tensors(x, y, x[:1], y[:1], classes=classes, groups=groups, name="toy")


def balanced(n: int, classes: int = 10) -> Data:
    """n records in scattered order, their classes as equal as can be, three records a group."""
    return toy(np.arange(n) * 7919 % n % classes, groups=np.arange(n) // 3, classes=classes)


@settings(deadline=None)
@given(
    kind=st.sampled_from(["iid", "dirichlet", "shards"]),
    n=st.integers(2, 200),
    classes=st.integers(1, 6),
    share=st.floats(0, 1),
    number=st.integers(0, 9),
)
def test_every_record_is_dealt_once_and_every_client_has_some(kind, n, classes, share, number) -> None:
    rng = np.random.default_rng(number)
    data = toy(rng.integers(0, classes, n), classes=classes)
    made = split(kind, data, max(1, int(share * n // 2)), Seed.root(number))
    assert sorted(made.order) == list(range(n))
    assert made.sizes.min() >= 1
    assert sum(made.sizes) == n
    np.testing.assert_array_equal(np.concatenate([*made]), made.order)


@settings(deadline=None)
@given(clients=st.integers(1, 40), held=st.integers(1, 7), classes=st.integers(1, 7), number=st.integers(0, 9))
def test_each_client_holds_its_number_of_classes_and_classes_are_evenly_used(clients, held, classes, number) -> None:
    held = min(held, classes)
    data = balanced(60 * classes, classes)
    made = by_classes(data, clients, Seed.root(number), classes=held)
    counts = made.counts(data.y, classes)
    assert ((counts > 0).sum(1) == held).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for c in range(classes):  # each class is divided evenly, and wholly if anybody holds it
        parts = counts[:, c][counts[:, c] > 0]
        assert len(parts) == 0 or (parts.sum() == 60 and parts.max() - parts.min() <= 1)
    assert len(np.unique(made.order)) == len(made.order)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "classes", "shards"])
def test_a_split_repeats_from_its_seed(kind: str) -> None:
    data = balanced(1000)
    one, again, other = (split(kind, data, 20, seed) for seed in (Seed.root(1), Seed.root(1), Seed.root(2)))
    np.testing.assert_array_equal(one.order, again.order)
    np.testing.assert_array_equal(one.starts, again.starts)
    assert not np.array_equal(one.order, other.order)
    assert one.kind == kind


def test_splits_of_the_digits_stay_what_they_were() -> None:
    data = load("digits")
    first = {
        "iid": [407, 638, 6, 941],
        "dirichlet": [93, 756, 104, 903],
        "classes": [1366, 670, 853, 737],
        "shards": [352, 366, 749, 541],
    }
    assert {kind: split(kind, data, 10, SEED)[3][:4].tolist() for kind in first} == first


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = iid(balanced(103), 10, SEED).sizes
    assert sorted(sizes) == [10] * 7 + [11] * 3


def test_five_clients_of_two_out_of_ten_classes_are_disjoint() -> None:
    data = load("digits")
    counts = by_classes(data, 5, SEED, classes=2).counts(data.y, 10)
    assert ((counts > 0).sum(0) == 1).all()
    assert counts.sum() == 1437


def test_many_clients_hold_many_pairs_of_classes() -> None:
    data = balanced(10_000)
    counts = by_classes(data, 500, SEED, classes=2).counts(data.y, 10)
    assert len({tuple(np.flatnonzero(row)) for row in counts}) > 40  # of 45


def test_a_client_with_two_shards_of_pure_classes_has_two_labels_at_most() -> None:
    data = balanced(1000)  # 100 a class, shards of 25
    counts = shards(data, 20, SEED, shards=2).counts(data.y, 10)
    assert (counts.sum(1) == 50).all()
    assert (counts > 0).sum(1).max() == 2
    assert set(counts.flat) == {0, 25, 50}


def test_dirichlet_goes_from_concentrated_to_even() -> None:
    data = balanced(10_000)
    tiny, middle, huge = (dirichlet(data, 10, SEED, alpha=a).counts(data.y, 10) for a in (1e-3, 0.3, 1e6))
    assert (tiny.max(0) > 980).all()  # one client has nearly all of a class
    assert (abs(huge - 100) <= 2).all()
    largest = middle.max(0).mean()
    assert 200 < largest < 900


def test_dirichlet_proportions_have_the_right_spread() -> None:
    """The variance of a share is (1/K)(1 - 1/K)/(K alpha + 1)."""
    data = balanced(100_000, classes=100)
    counts = dirichlet(data, 10, SEED, alpha=0.5).counts(data.y, 100)
    expected = 0.1 * 0.9 / (10 * 0.5 + 1)
    assert np.var(counts / 1000) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("alpha", [1e-300, 1e-8, 1.0, 1e300])
def test_dirichlet_survives_extreme_alphas(alpha: float) -> None:
    made = dirichlet(balanced(500), 50, SEED, alpha=alpha)
    assert sorted(made.order) == list(range(500))


def test_dirichlet_fills_poor_clients_up_from_the_richest() -> None:
    data = balanced(1000)
    poor, filled = (dirichlet(data, 50, SEED, alpha=0.02, min_records=least).sizes for least in (1, 8))
    assert poor.min() == 1
    assert filled.min() == 8
    never_touched = (poor > 8) & (poor < filled.max() - 1)
    np.testing.assert_array_equal(filled[never_touched], poor[never_touched])
    assert dirichlet(data, 50, SEED, alpha=0.02, min_records=20).sizes.tolist() == [20] * 50


def test_records_that_rich_clients_give_away_are_of_any_class() -> None:
    """A rich client keeps its mixture of classes."""
    data = toy(np.repeat([0, 1], 5000), classes=2)
    for number in range(10):
        rich, poorer = (
            dirichlet(data, 3, Seed.root(number), min_records=least).counts(data.y, 2) for least in (1, 3300)
        )
        largest = np.argmax(rich.sum(1))
        before, after = rich[largest] / rich[largest].sum(), poorer[largest] / poorer[largest].sum()
        assert abs(before - after).max() < 0.04


def test_natural_clients_are_the_groups() -> None:
    groups = np.array([7, 2, 7, 7, 2, -1])
    made = natural(toy(np.zeros(6, np.int64), groups))
    assert [part.tolist() for part in made] == [[5], [1, 4], [0, 2, 3]]
    assert len(split("natural", balanced(9), None, SEED)) == len(split("natural", balanced(9), 3, SEED)) == 3


def test_a_clients_records_are_a_view() -> None:
    made = iid(balanced(20), 4, SEED)
    assert np.shares_memory(made[2], made.order)
    assert len(made) == 4
    with pytest.raises(IndexError, match="no client 4; the split has 4"):
        made[4]
    with pytest.raises(IndexError):
        made[-1]


def test_counts_agree_with_counting() -> None:
    data = balanced(200)
    made = dirichlet(data, 7, SEED)
    by_hand = [torch.bincount(data.y[torch.from_numpy(part)], minlength=10).tolist() for part in made]
    assert made.counts(data.y, 10).tolist() == by_hand
    with pytest.raises(ValueError, match="Labels go from 0 to 9, but there are 5 classes"):
        made.counts(data.y, 5)


TOKENS = from_tensors(
    np.zeros((4, 3), np.int64), np.zeros((4, 3), np.int64), np.zeros((1, 3), int), np.zeros((1, 3), int)
)


@pytest.mark.parametrize(
    ("wrong", "call"),
    [
        ("unknown split 'dirichelt'; did you mean 'dirichlet'", lambda d: split("dirichelt", d, 2, SEED)),
        (
            "unknown option of split 'dirichlet' 'alhpa'; did you mean 'alpha'",
            lambda d: split("dirichlet", d, 2, SEED, alhpa=1),
        ),
        ("unknown option of split 'iid' 'alpha'; known: none", lambda d: split("iid", d, 2, SEED, alpha=1)),
        ("100 records, too few for 101 clients with 1 each; use at most 100 clients", lambda d: iid(d, 101, SEED)),
        ("too few for 60 clients with 2 each; use at most 50", lambda d: shards(d, 60, SEED)),
        ("too few for 30 clients with 4 each; use at most 25", lambda d: dirichlet(d, 30, SEED, min_records=4)),
        ("Class 0 of 'toy' has 10 records for 12 clients; use fewer", lambda d: by_classes(d, 60, SEED)),
        ("0 clients", lambda d: iid(d, 0, SEED)),
        ("alpha is 0", lambda d: dirichlet(d, 2, SEED, alpha=0)),
        ("alpha is nan", lambda d: dirichlet(d, 2, SEED, alpha=float("nan"))),
        ("classes is 11, but 'toy' holds 10 classes; use no more", lambda d: by_classes(d, 2, SEED, classes=11)),
        ("shards is 0", lambda d: shards(d, 2, SEED, shards=0)),
        ("needs a number of clients", lambda d: split("iid", d, None, SEED)),
        ("'toy' has 34 groups, not 5; leave clients out", lambda d: split("natural", d, 5, SEED)),
        ("'tensors' has no natural groups", lambda d: natural(TOKENS)),
        (r"one label a record, but y of 'tensors' is \[4, 3\]; use 'iid'", lambda d: split("shards", TOKENS, 2, SEED)),
    ],
)
def test_impossible_splits_say_why_in_a_sentence(wrong: str, call) -> None:
    with pytest.raises(ValueError, match=wrong) as caught:
        call(balanced(100))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("order", "starts", "wrong"),
    [
        ([0, 1], [0, 1], "do not go from 0 to its 2 records"),
        ([0, 1], [0, 2, 2], "Client 1 .* holds no record"),
        ([0, 1], [2], "do not go from 0"),
        ([0.0, 1.0], [0, 2], "not int64"),
    ],
)
def test_a_split_that_is_none_is_refused(order, starts, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Split(np.array(order), np.array(starts), "iid")


def test_a_hundred_thousand_clients_are_split_without_a_loop_over_them() -> None:
    """A loop over clients would be lines of Python by the million."""
    n, lines = 1_000_000, 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    data = balanced(n)
    for kind in SPLITS:
        lines, before = 0, sys.gettrace()
        sys.settrace(count)
        try:
            split(kind, data, None if kind == "natural" else 100_000, SEED)
        finally:
            sys.settrace(before)
        assert lines < 100_000, kind


# --- the picture -------------------------------------------------------------------------------------------------


def bars(figure) -> np.ndarray:
    """Bar lengths, [classes, clients]."""
    return np.array([[bar.get_width() for bar in container] for container in figure.axes[0].containers])


def test_the_picture_shows_who_holds_what(tmp_path) -> None:
    data = load("digits")
    made = by_classes(data, 5, SEED)
    figure = picture(made, data.y, data.labels)
    np.testing.assert_array_equal(bars(figure), made.counts(data.y, 10).T)
    lefts = [[bar.get_x() for bar in container] for container in figure.axes[0].containers]
    np.testing.assert_array_equal(lefts[1:], bars(figure).cumsum(0)[:-1])
    assert figure.axes[0].get_title("left") == "classes split: 5 clients; 1,437 records in all"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(data.labels)
    figure.savefig(tmp_path / "split.png")
    assert (tmp_path / "split.png").stat().st_size > 5000


def test_of_many_clients_the_picture_shows_some_and_says_so() -> None:
    data = load("digits")
    made = dirichlet(data, 100, SEED)
    figure = picture(made, data.y, data.labels)
    shown = [int(tick.get_text()) for tick in figure.axes[0].get_yticklabels()]
    assert (len(shown), shown[0], shown[-1]) == (40, 0, 99)
    assert "40 of 100 clients, evenly chosen" in figure.axes[0].get_title("left")
    np.testing.assert_array_equal(bars(figure), made.counts(data.y, 10)[shown].T)


def test_of_many_classes_the_picture_shows_the_largest() -> None:
    y = np.repeat(np.arange(20), np.arange(1, 21))
    made = iid(toy(y, classes=20), 4, SEED)
    figure = picture(made, y, [f"c{i}" for i in range(20)])
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [*(f"c{i}" for i in range(11, 20)), "other"]
    np.testing.assert_array_equal(bars(figure).sum(0), made.sizes)


def test_without_one_label_a_record_the_picture_shows_sizes() -> None:
    made = iid(TOKENS, 2, SEED)
    figure = picture(made, TOKENS.y, TOKENS.labels)
    assert bars(figure).tolist() == [[2, 2]]
    assert not figure.legends


# ---------------------------------------------------------------------------------------------------- what is public


def test_the_largest_client_is_the_bound_unless_another_one_is_public() -> None:
    plain = Split(np.arange(5), np.array([0, 2, 5]), "own")
    assert plain.largest == 3
    assert Split(plain.order, plain.starts, "own", max_records=8).largest == 8
    with pytest.raises(ValueError, match=r"Client 1 holds 3 records, but split\.max_records is 2; raise it\."):
        Split(plain.order, plain.starts, "own", max_records=2)


def test_a_share_is_what_one_party_knows() -> None:
    share = Share.of(2, clients=4, records=3, max_records=10)
    assert (len(share), share.largest) == (4, 10)
    assert share[2].tolist() == [0, 1, 2]
    assert share.sizes.tolist() == [0, 0, 3, 0]
    for other in (0, 1, 3):
        with pytest.raises(IndexError, match=f"The records of client {other} are not held here"):
            share[other]
    with pytest.raises(IndexError, match="There is no client 4"):
        share[4]


def test_the_server_holds_no_records_and_a_share_keeps_to_the_bound() -> None:
    server = Share.of(None, clients=3, records=100, max_records=10)
    assert (len(server), server.largest, server.sizes.tolist(), len(server.order)) == (3, 10, [0, 0, 0], 0)
    with pytest.raises(ValueError, match="There is no client 3; there are 3, from 0"):
        Share.of(3, clients=3, records=1, max_records=10)
    with pytest.raises(ValueError, match=r"Client 0 holds 11 records, but split\.max_records is 10"):
        Share.of(0, clients=3, records=11, max_records=10)
