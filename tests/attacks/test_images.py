"""Attacks on synthetic sets: they find records that a set started from, and find nothing where there is nothing."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedveil as fv
from codec_tools import stack_of, through_the_wire, trained
from fedveil.attacks import images
from fedveil.attacks.images import Points, audit, closest, copies, held, likelihood, nearness, noise, points, presence
from fedveil.data import from_tensors
from fedveil.methods.surrogates.feddm import FedDm
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.methods.surrogates.sets import Distil, WhichClasses
from fedveil.models import build

SEED = fv.Seed.root(0)
SHORT = {"images": 10, "batches": 4, "passes": 1, "region": "constant"}
NAMES = ["fedlap", "feddm"]


@functools.cache
def task() -> fv.Task:
    """Four of ten digits; each of two clients holds 150 records, and 420 are held out, drawn alike."""
    data = fv.data.load("digits")
    x, y = torch.cat([data.x, data.test_x]), torch.cat([data.y, data.test_y])
    rows = (y < 4).nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=SEED.torch())]
    own, out = rows[:300], rows[300:]
    part = from_tensors(x[own], y[own], x[out], y[out], classes=10, mean=data.mean, std=data.std)
    return fv.Task(
        build("digits-cnn", (1, 8, 8), 10), part, fv.Split(np.arange(300), np.array([0, 150, 300]), "by hand")
    )


def members() -> images.Records:
    return task().x[:150], task().y[:150]


def others() -> images.Records:
    return task().test_x[:200], task().test_y[:200]


def pool() -> images.Records:
    return task().test_x[200:], task().test_y[200:]


def told(sent: Points, with_pool: bool = True) -> images.SetFigures:
    return audit(sent, members(), others(), pool() if with_pool else None, 10, SEED)


def sent_by(method) -> Points:
    """The set that client 0 sends."""
    stack = stack_of(task(), 0)
    count = method.images * int(method.which(stack, WhichClasses())[0].held.sum())
    return points(task(), method.distil(stack, Distil(task().initial, count))[0])


# ---------------------------------------------------------------------------------------------------- surrogate sets


@pytest.mark.parametrize("method", [FedLap(**SHORT, init="real"), FedDm(images=10, draws=2, init="real")], ids=NAMES)
def test_images_that_start_from_records_are_found(method):
    """The positive control of the issue."""
    figures = told(sent_by(method))
    assert figures.found
    assert figures.nearest.low > 0.5
    assert figures.likelihood.low > 0.5
    assert figures.nearest.auc > 0.55
    assert figures.nearest.rates[1].tpr > 0.1
    assert figures.matched_low > 0.8
    assert figures.chance == pytest.approx(0.5)
    assert figures.classes == 1


@pytest.mark.parametrize("method", [FedLap(**SHORT, init="noise"), FedDm(images=10, draws=2, init="noise")], ids=NAMES)
def test_images_that_start_from_noise_show_classes_only(method):
    figures = told(sent_by(method))
    assert not figures.found
    assert figures.nearest.low < 0.5 < figures.nearest.high
    assert figures.matched_low < figures.chance < figures.matched_high
    assert figures.classes == 1


def test_controls_are_found_and_baselines_are_not():
    sent = sent_by(FedLap(**SHORT))
    control = told(copies(sent, *members(), SEED))
    assert control.matched == 1
    assert control.nearest.low > 0.5
    assert control.nearest.rates[1].tpr == pytest.approx(40 / control.members, abs=0.05)
    for baseline in (copies(sent, *pool(), SEED), noise(sent, SEED)):
        figures = told(baseline)
        assert not figures.found
        assert abs(figures.nearest.auc - 0.5) < 0.07
        assert figures.classes == 1, "labels stay"


def test_without_a_pool_the_likelihood_is_left_out():
    assert told(sent_by(FedLap(**SHORT)), with_pool=False).likelihood is None


def test_intervals_hold_over_many_draws_of_records():
    """A set of strangers' records is found about as seldom as the intervals promise, and one of members always."""
    x, y = (torch.cat(each) for each in zip(members(), others(), pool(), strict=True))
    blank, wrong = Points(torch.zeros(40, 1, 8, 8), torch.arange(4).repeat(10)), 0
    for i in range(20):
        order = torch.randperm(len(x), generator=SEED.child(i).torch())
        sides = [(x[rows], y[rows]) for rows in order.split([150, 200, len(x) - 350])]
        strange = audit(copies(blank, *sides[2], SEED), *sides, 10, SEED)
        wrong += strange.found
        assert audit(copies(blank, *sides[0], SEED), *sides, 10, SEED).found
    assert wrong <= 4


# ---------------------------------------------------------------------------------------------------- the attacks


def test_the_nearest_candidate_is_found_in_pieces_as_at_once(monkeypatch):
    draw = SEED.torch()
    own, candidates = torch.randn(7, 1, 3, 3, generator=draw), torch.randn(11, 1, 3, 3, generator=draw)
    candidates[4] = own[2]
    index, distance = closest(own, candidates)
    apart = (own.flatten(1)[:, None] - candidates.flatten(1)).norm(dim=2)
    assert torch.equal(index, apart.argmin(1))
    assert torch.allclose(distance, apart.amin(1))
    assert distance[2] == 0, "a copy is at distance 0 exactly"
    monkeypatch.setattr(images, "PAIRS", 22)
    again = closest(own, candidates)
    assert torch.equal(again[0], index)
    assert torch.equal(again[1], distance)
    far = 1000 * torch.rand(30, 64, generator=draw)
    assert not closest(far, far)[1].any()
    hard = Points(own, torch.arange(7) % 3)
    scores = nearness(hard, candidates, torch.arange(11) // 4)
    for i, score in enumerate(scores):
        assert float(score) == pytest.approx(-float(apart[hard.labels == i // 4, i].min()))


def test_nearness_looks_at_the_candidates_class_if_labels_are_hard():
    own, x = torch.tensor([[0.0], [10.0]]), torch.tensor([[1.0], [1.0], [1.0]])
    y = torch.tensor([0, 1, 2])
    assert nearness(Points(own, torch.tensor([0, 1])), x, y).tolist() == [-1, -9, -math.inf]
    assert nearness(Points(own, torch.tensor([[0.6, 0.4], [0.4, 0.6]])), x, y).tolist() == [-1, -1, -1]


def test_the_likelihood_ratio_is_that_of_gaussian_kernels():
    """By hand: the pool's neighbours are 2 apart in 4 entries, so h² = 1."""
    x, y = torch.zeros(1, 4), torch.tensor([0])
    around = torch.tensor([[0, 0, 3.0, 0], [0, 0, 5.0, 0]]), torch.tensor([0, 0])
    sent = Points(torch.tensor([[1.0, 0, 0, 0], [50, 0, 0, 0], [0, 0, 0, 0]]), torch.tensor([0, 0, 1]))
    expected = (-0.5 - math.log(2)) - (math.log(math.exp(-4.5) + math.exp(-12.5)) - math.log(2))
    assert float(likelihood(sent, x, y, around)) == pytest.approx(expected, rel=1e-5)
    soft = replace(sent, labels=torch.full((3, 2), 0.5))
    expected = math.log((math.exp(-0.5) + 1) / 3) - (math.log(math.exp(-4.5) + math.exp(-12.5)) - math.log(2))
    assert float(likelihood(soft, x, y, around)) == pytest.approx(expected, rel=1e-5)


def test_classes_are_read_from_labels():
    hard = Points(torch.zeros(4, 2), torch.tensor([0, 0, 2, 2], dtype=torch.int16))
    assert presence(hard, 3).tolist() == [0.5, 0, 0.5]
    assert held(hard, 3).tolist() == [True, False, True]
    soft = Points(torch.zeros(2, 2), torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.1, 0.2]]))
    assert presence(soft, 3).tolist() == pytest.approx([0.8, 0.1, 0.1])
    assert held(soft, 3).tolist() == [True, False, False]


def test_candidates_of_both_sides_have_the_same_classes():
    members, others = (torch.zeros(90, 2), torch.tensor([0, 1, 1] * 30)), (torch.zeros(30, 2), torch.arange(30) % 3)
    inside, outside = images._matched(members, others, 1000, SEED)
    assert torch.bincount(members[1][inside]).tolist() == [30, 30], "three times as many, as far as records go"
    assert torch.bincount(others[1][outside]).tolist() == [10, 10], "no class that the client does not hold"
    inside, outside = images._matched(members, others, 40, SEED)
    assert len(inside) + len(outside) <= 40


# ---------------------------------------------------------------------------------------------------- soft labels


@pytest.mark.parametrize(
    "codec",
    [
        fv.TofuCodec(points=3, steps=2),
        fv.TofuCodec(points=3, steps=2, precision="uint8", shrink=2),
        fv.FedSynthCodec(batches=2, batch=3, fits=2),
        fv.FedSynthCodec(batches=2, batch=3, fits=2, precision="uint8"),
    ],
    ids=["tofu", "tofu, small and in bytes", "fedsynth", "fedsynth, in bytes"],
)
def test_points_of_codecs_are_those_that_the_server_decodes_with(codec, monkeypatch):
    stack = stack_of(task(), 0)
    updates = trained(stack, fv.LocalTraining(lr=0.1, batch=150))
    (payload,) = codec.encode(task(), task().initial[None], updates, [SEED], None)
    payload = through_the_wire(codec, task(), payload)
    found, seen = points(task(), payload), []
    f = task().f
    monkeypatch.setattr(task(), "f", lambda w, x: (seen.append(x), f(w, x))[1])
    codec.decode(task(), task().initial[None], [payload])
    shown = torch.cat([each.flatten(0, 0) for each in seen])[: len(found.images)]
    assert torch.equal(shown, found.images)
    assert found.soft
    assert torch.allclose(found.labels.sum(1), torch.ones(len(found.labels)))
    assert not told(found).found


def test_errors_name_what_is_missing():
    with pytest.raises(ValueError, match="Classes holds no synthetic points; give a Surrogate, Synthetic or Proxies"):
        points(task(), FedLap().which(stack_of(task(), 0), WhichClasses())[0])
    sent = Points(torch.zeros(2, 2), torch.tensor([0, 1]))
    x, y = torch.zeros(2, 2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="the pool has no record of class 1; give records of each class"):
        likelihood(sent, x, y, (x, torch.tensor([0, 0])))
    with pytest.raises(ValueError, match="the pool's 2 records have no neighbours to choose a width by"):
        likelihood(sent, x, y, (x, y))
    with pytest.raises(ValueError, match="only 2 held-out records are of the client's classes; give at least 4"):
        audit(sent, (x, y), (x, y), None, 2, SEED)
