"""Scores of reconstructions: they know a perfect one from a guess, and say how sure they are."""

import math

import pytest
import torch

import fedveil as fv
from fedveil.attacks import scores
from fedveil.attacks.scores import Pool, matching, overlap, score, share, ssim
from fedveil.data import from_tensors

SEED = fv.Seed.root(0)


@pytest.fixture(scope="module")
def data():
    return fv.load("digits")


@pytest.fixture(scope="module")
def pool(data):
    return Pool.of(data, SEED)


def test_the_truth_is_exact_and_is_identified_whatever_its_order(data, pool):
    true = data.x[:12].view(6, 2, *data.input)
    found = score(true.flip(1), true, pool, data.y[:12].view(6, 2).flip(1), data.y[:12].view(6, 2)).figures(SEED)
    assert (found.mse.value, found.psnr.value, found.labels.value) == (0, 100, 1)
    assert found.ssim.value == pytest.approx(1)
    assert found.identified.value == found.exact.value == 1
    assert found.exact.low == pytest.approx(0.025 ** (1 / 6))  # six victims, not twelve records
    assert (found.victims, found.records, found.candidates) == (6, 2, 181)
    assert found.chance == pytest.approx(2 / 181)


def test_baselines_come_in_their_order_and_are_not_exact(data, pool):
    true = data.x[:40, None]
    guesses = pool.baselines(true, SEED)
    found = {name: score(guess, true, pool).figures(SEED) for name, guess in guesses.items()}
    assert found["nearest"].mse.high < found["mean"].mse.low
    assert found["mean"].mse.high < found["random"].mse.low
    assert found["nearest"].ssim.value > found["random"].ssim.value
    assert all(each.exact.value == 0 for each in found.values())
    assert found["mean"].identified.value <= 1 / 40
    assert found["mean"].labels is None


def test_candidates_are_not_what_baselines_guess_from(pool, data):
    assert len(pool.others) == 180
    assert len(pool.held) == 180
    assert float(torch.cdist(pool.others.flatten(1), pool.held.flatten(1)).min()) > 0
    assert torch.equal(Pool.of(data, SEED).others, pool.others)
    large = Pool.of(data, SEED, data.x.repeat(2, 1, 1, 1))
    assert (len(large.others), len(large.held)) == (999, 2 * len(data.x) - 999)


def test_pixels_are_compared_not_standardised_units(data, pool):
    true = data.x[:3, None]
    (mse,) = score(true + 0.1 / 0.376, true, pool).mse[:1]
    assert 0 < float(mse) <= 0.01 + 1e-6  # a tenth of a pixel, less where it is cut at white
    assert torch.equal(pool.pixels(torch.full((1, 1, 8, 8), math.nan)), torch.full((1, 1, 8, 8), 0.5))


def test_ssim_is_that_of_scikit_image_and_works_for_small_pictures():
    draw = SEED.torch()
    a, b = torch.rand(2, 3, 8, 8, generator=draw), torch.rand(2, 3, 8, 8, generator=draw)
    assert ssim(a, a).tolist() == pytest.approx([1, 1])
    assert float(ssim(a, b).abs().max()) < 0.3
    assert float(ssim(a, (a + 0.1 * b).clamp(0, 1)).min()) > 0.9
    flat = torch.full((1, 1, 7, 7), 0.25), torch.full((1, 1, 7, 7), 0.75)
    expected = (2 * 0.25 * 0.75 + 1e-4) / (0.25**2 + 0.75**2 + 1e-4)  # only the means differ
    assert float(ssim(*flat)) == pytest.approx(expected)
    assert ssim(a[..., :2, :3], a[..., :2, :3]).tolist() == pytest.approx([1, 1])


def test_matching_minimises_the_total_error_and_not_each_record_by_itself():
    true, found = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.9], [2.5]])
    assert matching(found, true).tolist() == [0, 1]


def test_label_accuracy_is_of_multisets():
    found, true = torch.tensor([[0, 0, 1], [2, 1, 0]]), torch.tensor([[0, 1, 1], [0, 1, 2]])
    assert overlap(found, true, 3).tolist() == pytest.approx([2 / 3, 1])


def test_a_share_counts_victims_and_its_interval_holds_it():
    hits = torch.tensor([[True, False], [True, True], [False, False]])
    found = share(hits)
    assert found.value == pytest.approx(0.5)
    assert found.low < 0.5 < found.high
    assert share(torch.zeros(10, 1, dtype=torch.bool)).high == pytest.approx(1 - 0.025**0.1)


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    draws = 5 + torch.randn(200, 30, generator=SEED.torch())
    within = [
        each.low <= 5 <= each.high for i, row in enumerate(draws) for each in [scores.bootstrap(row, SEED.child(i))]
    ]
    assert 0.88 <= sum(within) / 200 <= 0.99


def test_records_that_are_no_pictures_have_no_psnr():
    x = torch.randn(40, 5, generator=SEED.torch())
    y = torch.arange(40) % 2
    data = from_tensors(x, y, x + 1, y, classes=2)
    found = score(x[:4, None], x[:4, None], Pool.of(data, SEED)).figures(SEED)
    assert (found.psnr, found.ssim, found.mse.value, found.exact.value) == (None, None, 0, 1)


def test_what_cannot_be_scored_is_one_sentence(data, pool):
    with pytest.raises(ValueError, match=r"Reconstructions are \[1, 1, 8, 8\] but true records \[1, 2, 8, 8\]\."):
        score(data.x[:1], data.x[:2][None, :, 0], pool)
    with pytest.raises(ValueError, match="The pool has 1 record"):
        Pool.of(data, SEED, data.x[:1])
