"""DP-SGD: what one record can change, who is drawn, and how much noise there is."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedveil as fv
from fedveil.privacy import dpsgd
from fedveil.privacy.accountant import Noised, epsilon
from fedveil.privacy.dpsgd import GRID, WITHIN, DpSgd, clipped, clipped_sum, normal, poisson, uniform
from privacy import clipping
from toys import linear_task

ROOT = fv.Seed.root(3)
NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
GRADIENTS = st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=1, max_size=6)


def stack_of(task, clients=(0, 1, 2, 3)) -> fv.ClientStack:
    blank = [None] * len(clients)
    return fv.ClientStack(task, clients, 1, fv.Seed.root(0), fv.Seed.root(9), blank, [{} for _ in clients])


# ---------------------------------------------------------------------------------------------------- clipping


@settings(max_examples=300, deadline=None)
@given(GRADIENTS, st.floats(1e-3, 1e3))
def test_one_record_moves_the_sum_by_the_clipping_norm_at_most(rows, clip):
    """Whatever its gradient is, with or without it: sums in float64, so that no rounding of theirs is in the way."""
    cut = clipped(torch.tensor(rows), clip).double()
    assert cut.isfinite().all()
    for k in range(len(cut)):
        without = torch.cat([cut[:k], cut[k + 1 :]]).sum(0)
        assert float((cut.sum(0) - without).norm()) <= clip * (1 + 1e-9)


def test_gradients_below_the_norm_are_left_alone_and_those_above_keep_their_direction():
    found = clipped(torch.tensor([[0.3, 0.4], [30.0, 40.0], [0.0, 0.0]]), 1.0)
    assert torch.equal(found[0], torch.tensor([0.3, 0.4]))
    assert torch.allclose(found[1], torch.tensor([0.6, 0.8]), rtol=1e-4)
    assert torch.equal(found[2], torch.zeros(2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_counts_as_zero(bad):
    assert torch.equal(clipped(torch.tensor([[bad, 1.0], [0.1, bad]]), 1.0), torch.zeros(2, 2))


@pytest.mark.parametrize("clip", [1e3, 1.0, 1e-6])
def test_a_gradient_whose_square_is_no_float32_is_clipped_like_any_other(clip):
    found = clipped(torch.tensor([[3e38, -3e38], [1e-30, 1e-30]]), clip)
    assert found[0].tolist() == pytest.approx([clip * WITHIN / 2**0.5, -clip * WITHIN / 2**0.5])
    assert torch.equal(found[1], torch.tensor([1e-30, 1e-30]))


def test_products_in_tf32_do_not_lift_a_record_above_the_clipping_norm():
    """A GPU's tensor cores round both factors to 10 bits: weights times gradients were 1.0004 clips so."""
    task = clipping.images("cpu")
    with clipping.Tf32():
        assert clipping.largest(task, 24) <= 1
        rounded = torch.tensor([[1 + 2**-11, 1 + 2**-10, 3.0]]) @ torch.eye(3)
    assert rounded.tolist() == [[1 + 2**-10, 1 + 2**-10, 3.0]]
    assert clipping.largest(task, 4) == pytest.approx(WITHIN, rel=1e-9), "gradients should be above the clipping norm"


def test_long_gradients_do_not_lift_a_record_above_the_clipping_norm():
    """A float32 sum of millions of equal squares is off by more than any margin: it gave 1.00002 clips."""
    assert clipping.largest(clipping.long("cpu"), 2) <= 1
    updates = torch.full((1, 4_000_000), 0.37)
    assert float(clipped(updates, 1.0).double().norm()) <= 1
    how = fv.UserLevel(noise=1e-9)
    total = how.noised_sum(how.clipped_sum(updates), ROOT)
    assert float(total.double().norm()) <= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_clipping_keeps_to_the_norm(tensor_cores):
    assert clipping.plain_product() > 1 + 1e-5, "no TF32 here, so this tests nothing"
    assert all(moved <= 1 for moved in clipping.measured("cuda").values())


def by_hand(task, w, rows, clip):
    """Σ min(1, C/‖g‖) g, a record after the other."""
    total = torch.zeros_like(w, dtype=torch.float64)
    for row in rows:
        here = w.clone().requires_grad_()
        (g,) = torch.autograd.grad(task.losses(here, task.x[row : row + 1], task.y[row : row + 1]).sum(), here)
        total += g * min(1.0, WITHIN * clip / float(g.norm()))
    return total


@pytest.mark.parametrize("held", [1 << 24, 16])
def test_the_sum_is_that_of_each_records_own_clipped_gradient(monkeypatch, held):
    """Also where records are taken one at a time because no more fit."""
    monkeypatch.setitem(dpsgd.HELD, "cpu", held)
    task = linear_task()
    w = torch.stack([task.initial, task.initial * 2])
    rows, mask = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    found = clipped_sum(task, w, task.x[rows], task.y[rows], mask, 0.4)
    assert torch.allclose(found[0], by_hand(task, w[0], [0, 1, 2], 0.4), atol=1e-6)
    assert torch.allclose(found[1], by_hand(task, w[1], [3], 0.4), atol=1e-6)
    alone = clipped_sum(task, w[:1], task.x[rows[:1]], task.y[rows[:1]], mask[:1], 0.4)
    assert torch.allclose(alone[0], found[0], atol=1e-6)


def test_a_record_of_huge_numbers_moves_the_sum_by_the_norm_at_most():
    task = linear_task()
    x, y = task.x[:3].clone()[None], task.y[:3][None]
    x[0, 2] = 1e18
    w, mask = task.initial[None], torch.ones(1, 3)
    with_it = clipped_sum(task, w, x, y, mask, 1.0)
    mask[0, 2] = 0
    assert float((with_it - clipped_sum(task, w, x, y, mask, 1.0)).norm()) <= 1 + 1e-6


# ---------------------------------------------------------------------------------------------------- draws


def test_each_record_is_drawn_by_itself_with_the_rate():
    own, rate, steps = np.arange(100, 150), 0.2, 4000
    drawn = poisson(ROOT.child("draw"), own, rate, steps)
    hits = np.zeros((steps, 50))
    for t, rows in enumerate(drawn):
        assert len(np.unique(rows)) == len(rows)
        hits[t, rows - 100] = 1
    five = 5 * math.sqrt(rate * (1 - rate) / steps)
    assert np.abs(hits.mean(0) - rate).max() < five
    sizes = hits.sum(1)  # binomial, as records are independent: not a batch of a fixed size
    assert sizes.var() == pytest.approx(50 * rate * (1 - rate), rel=0.15)
    together = np.corrcoef(hits[:, 0], hits[:, 1])[0, 1]
    assert abs(together) < 5 / math.sqrt(steps)


def test_draws_of_other_seeds_are_other_draws():
    one, again, other = (uniform(ROOT.child(k), 8) for k in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert (one >= 0).all()
    assert (one < 1).all()


def test_noise_is_standard_normal():
    drawn = normal(ROOT.child("noise"), 200_001).numpy()
    assert len(drawn) == 200_001
    count = len(drawn)
    assert abs(drawn.mean()) < 5 / math.sqrt(count)
    assert abs(drawn.std() - 1) < 5 / math.sqrt(2 * count)
    for at in (-2.0, -1.0, 0.5, 1.5, 3.0):
        below = 0.5 * math.erfc(-at / math.sqrt(2))
        assert abs((drawn < at).mean() - below) < 5 * math.sqrt(below * (1 - below) / count)
    half = count // 2
    assert abs(np.corrcoef(drawn[:half], drawn[half : 2 * half])[0, 1]) < 5 / math.sqrt(half)


# ---------------------------------------------------------------------------------------------------- together


def test_a_private_gradient_has_the_noise_once_over_the_expected_batch():
    """Of a batch in which nobody is drawn only the noise is left: deviation σ C / batch, whatever the batch is."""
    task = linear_task(clients=1, records=24)
    how = DpSgd(noise=3.0, clip=0.5)
    w = task.initial[None]
    steps, batch = 5000, 6
    gradient = how.gradients(stack_of(task, (0,)), w, batch, [(steps, [ROOT.child("one")])])
    found = torch.stack([gradient()[0] for _ in range(steps)])  # [steps, 8]
    assert how.rate(task, batch) == 0.25
    mean = by_hand(task, task.initial, range(24), 0.5) * 0.25 / batch
    noise = 3.0 * 0.5 / batch
    per_record = torch.stack([by_hand(task, task.initial, [k], 0.5) for k in range(24)])
    spread = (noise**2 + 0.25 * 0.75 * per_record.square().sum(0) / batch**2).sqrt()
    assert ((found.mean(0) - mean).abs() < 5 * spread / math.sqrt(steps)).all()
    assert ((found.std(0) / spread - 1).abs() < 5 / math.sqrt(2 * steps)).all()


def test_an_empty_batch_is_noise_and_no_less():
    task = linear_task(clients=1, records=24)
    how = DpSgd(noise=2.0)
    rare = next(
        s for s in map(ROOT.child, range(10**6)) if not len(poisson(s.child("draw"), task.clients[0], 1 / 24, 1)[0])
    )
    stack = stack_of(task, (0,))
    found = how.gradients(stack, task.initial[None], 1, [(1, [rare])])()
    expected = 2.0 * normal(rare.child("noise"), 8).float()
    assert torch.allclose(found[0], expected)


@pytest.mark.parametrize("ahead", [1, 3])
def test_clients_have_noise_of_their_own_whatever_the_stack(ahead, monkeypatch):
    monkeypatch.setitem(dpsgd.AHEAD, "cpu", ahead)
    task, how = linear_task(), DpSgd()
    stack = stack_of(task)
    secrets = stack.secrets("gradients")
    w = task.initial.expand(4, -1)
    draw = how.gradients(stack, w, 3, [(2, secrets)])
    together = torch.stack([draw(), draw()])
    assert len(together.flatten(0, 1).unique(dim=0)) == 8
    for k in range(4):
        alone = how.gradients(stack_of(task, (k,)), w[k : k + 1], 3, [(2, secrets[k : k + 1])])
        assert torch.allclose(torch.stack([alone()[0], alone()[0]]), together[:, k], atol=1e-5)


def test_pieces_are_what_each_is_alone_and_their_noise_serves_once():
    task, how, w = linear_task(), DpSgd(), linear_task().initial.expand(2, -1)
    pieces = [(steps, [ROOT.child(steps, k) for k in range(2)]) for steps in (3, 1, 2)]
    expected = []
    for steps, secrets in pieces:
        alone = how.gradients(stack_of(task, (0, 1)), w, 3, [(steps, secrets)])
        expected.append(torch.stack([alone() for _ in range(steps)]))
    draw = how.gradients(stack_of(task, (0, 1)), w, 3, pieces)
    assert torch.allclose(draw(), expected[0][0], atol=1e-6)
    draw.begin(0)  # stays
    assert torch.allclose(draw(), expected[0][1], atol=1e-6)
    draw.begin(1)
    assert torch.allclose(draw(), expected[1][0], atol=1e-6)
    assert draw().isnan().all()  # a step that is not there, instead of one with the noise of piece 0
    draw.begin(2)
    assert torch.allclose(torch.stack([draw(), draw()]), expected[2], atol=1e-6)
    with pytest.raises(RuntimeError, match="piece 1 is over and its noise serves once"):
        draw.begin(1)
    assert draw.records == sum(min(3, len(task.clients[k])) for k in range(2))


def test_the_rate_is_of_the_public_bound_and_not_of_what_a_client_has():
    task = linear_task(uneven=True)
    assert DpSgd().rate(task, 2) == 2 / task.largest
    assert DpSgd().rate(task, 10**6) == 1


# ---------------------------------------------------------------------------------------------------- whole numbers


def test_with_a_grid_clipped_gradients_are_whole_and_no_longer_than_the_clip():
    task = linear_task()
    w, x, y = task.initial[None], task.x[None], task.y[None]
    for k in range(24):
        mask = torch.zeros(1, 24)
        mask[0, k] = 1
        plain, whole = (clipped_sum(task, w, x, y, mask, 0.2, grid) for grid in (None, 1000))
        assert torch.equal(whole, whole.trunc())
        assert torch.equal(whole, (plain * 5000).trunc())
        assert float(whole.norm()) <= 1000


def test_skellam_noise_is_whole_and_the_gradients_are_those_of_gaussian_noise_but_for_it():
    task = linear_task(clients=1, records=24)
    how = DpSgd(noise=3.0, clip=0.5, mechanism="skellam")
    steps, batch, stack = 2000, 6, stack_of(task, (0,))
    secret = [ROOT.child("one")]
    gradient = how.gradients(stack, task.initial[None], batch, [(steps, secret)])
    assert torch.equal(gradient._noise, gradient._noise.trunc())
    deviation = 3 * GRID
    assert float(gradient._noise.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * 8 * steps))
    silent, other = (
        dataclasses.replace(how, noise=1e-9, mechanism=kind).gradients(stack, task.initial[None], batch, [(9, secret)])
        for kind in ("skellam", "gaussian")
    )
    for _ in range(9):
        assert torch.allclose(silent(), other(), atol=1e-7)
    first = how.gradients(stack, task.initial[None], batch, [(9, secret)])
    plain = dataclasses.replace(how, noise=1e-9).gradients(stack, task.initial[None], batch, [(9, secret)])
    added = first._noise[0] * (0.5 / GRID / batch)
    assert torch.allclose(first(), plain() + added.float(), atol=1e-6)


def test_skellam_noise_costs_what_gaussian_noise_costs_and_its_accountant_is_rdp():
    task = linear_task()
    skellam, gaussian = (
        DpSgd(noise=2.0, delta=1e-3, mechanism=kind).account(task, 3, 40) for kind in ("skellam", "gaussian")
    )
    assert gaussian.answer == Noised(2.0, 0.5, 40)
    assert gaussian.spent(3) * (1 - 1e-9) <= skellam.spent(3) <= 1.02 * gaussian.spent(3)
    assert gaussian.spent(3) == epsilon([Noised(2.0, 0.5, 120)], 1e-3)
    assert skellam.unit == gaussian.unit


def test_a_run_with_skellam_noise():
    how = DpSgd(noise=1.0, delta=1e-3, mechanism="skellam")
    method = fv.FedAvg(fv.LocalTraining(lr=0.1, steps=3, batch=3), privacy=how)
    result = fv.run(linear_task(), method, rounds=2, cohort=4)
    assert not any(row.missing for row in result.ledger.rows)
    expected = epsilon([Noised(1.0, 0.5, 6)], 1e-3)
    assert expected * (1 - 1e-9) <= result.summary()["epsilon"] <= 1.05 * expected


# ---------------------------------------------------------------------------------------------------- the account


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"noise": 0.0}, "privacy.noise and privacy.clip are above 0"),
        ({"clip": -1.0}, "privacy.noise and privacy.clip are above 0"),
        ({"delta": 1.0}, "privacy.delta is 1; it is above 0 and below 1"),
        ({"budget": 0.0}, "privacy.budget is 0; it is an ε above 0"),
        ({"accountant": "moments"}, "privacy.accountant is 'moments'; use rdp or pld"),
        ({"mechanism": "laplace"}, "privacy.mechanism is 'laplace'; use gaussian or skellam"),
        ({"mechanism": "skellam", "accountant": "pld"}, '"skellam" is accounted by "rdp" only'),
        ({"mechanism": "skellam", "noise": 1e6}, 'too much for "skellam"; 100000 is the most'),
    ],
)
def test_settings_that_promise_nothing_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        DpSgd(**given)


def test_a_delta_that_lets_a_record_be_published_is_refused():
    with pytest.raises(ValueError, match=r"privacy.delta is 0.5, but a client may hold 6 records; set it below 0.17"):
        DpSgd(delta=0.5).account(linear_task(), 3, 1)
    with pytest.raises(ValueError, match=r"privacy\.budget is 0\.1, but one answer already costs \d+"):
        DpSgd(delta=1e-3, budget=0.1).account(linear_task(), 6, 5).validate()
