"""The audit of private gradients: it holds for DP-SGD as it is, and each way to break DP-SGD breaks it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.attacks.guesses import bound, curve_bound
from fedveil.attacks.mechanism import Heard, Mechanism, Planted, Tapped, audit, canary, noise, quiet
from fedveil.core.message import Slots
from fedveil.core.setup import private_root
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.privacy import account, dpsgd
from fedveil.privacy.accountant import Noised, epsilon
from fedveil.privacy.dpsgd import clipped_sum

PRIVATE = fv.DpSgd(noise=4.0, clip=0.5, delta=1e-3)
METHODS = {
    "fedavg": fv.FedAvg(fv.LocalTraining(lr=0.1, batch=6, steps=10), privacy=PRIVATE),
    "secure": fv.FedAvg(fv.LocalTraining(lr=0.1, batch=6, steps=10), privacy=PRIVATE, secure=fv.SecureSum()),
    "fedlap": fv.FedLap(
        images=1,
        passes=2,
        batches=5,
        batch=6,
        image_steps=1,
        image_lr=0.01,
        region="constant",
        weighting="equal",
        privacy=PRIVATE,
    ),
}


def wide_task() -> fv.Task:
    """A linear model of 1,640 weights; 4 clients with 12 records each of 2 classes."""
    draw = fv.Seed.root(0).torch()
    x = torch.randn(48, 40, generator=draw)
    y = (x.sum(1) > 0).long()
    data = from_tensors(x, y, x, y, classes=40)
    torch.manual_seed(0)
    split = fv.split("iid", data, 4, fv.Seed.root(0), max_records=len(x) // 4)
    return fv.Task(nn.Linear(40, 40), data, replace(split, held=((0, 1),) * 4))


TASK = wide_task()


def audited(name: str = "fedavg", **options: int) -> Mechanism:
    return audit(TASK, METHODS[name], TASK.initial, fv.Seed.root(1), private_root(1), **options)


def planted(included: np.ndarray, clients: tuple[int, ...] = (0,)) -> Planted:
    places = quiet(TASK, 0, TASK.initial, len(included))
    return Planted(TASK, clients, TASK.initial, places, included, 5.0)


# ---------------------------------------------------------------------------------------------------- canaries


def test_a_canary_has_one_coordinate_as_its_gradient_and_records_have_theirs():
    task = planted(np.array([True, False, True]))
    own = task.clients[0]
    assert own.tolist() == [*TASK.clients[0].tolist(), 48, 50]
    rows = torch.from_numpy(own)
    found = [
        clipped_sum(task, task.initial[None], task.x[rows][None], task.y[rows][None], only[None], 1.0)[0]
        for only in torch.eye(len(own))
    ]
    for k, number in ((-2, 0), (-1, 2)):
        assert found[k].nonzero().tolist() == [[int(task.places[number])]]
        assert float(found[k].sum()) == pytest.approx(1, rel=1e-4)
    plain = clipped_sum(TASK, TASK.initial[None], TASK.x[rows[:1]][None], TASK.y[rows[:1]][None], torch.ones(1, 1), 1.0)
    assert torch.allclose(found[0], plain[0], atol=1e-6)


def test_a_planted_client_seems_to_hold_what_it_held():
    task = planted(np.ones(8, bool), (0, 3))
    assert len(task.clients) == 2
    assert task.largest == TASK.largest
    assert np.array_equal(task.clients[1], TASK.clients[3])
    assert set(task.data.y[task.clients[0]].tolist()) == set(TASK.data.y[TASK.clients[0]].tolist())
    assert task.sizes == TASK.sizes
    assert canary(task.x, 1).sum() == 8
    assert not canary(TASK.x, 1).any()


def test_tokens_have_canaries_too():
    x = torch.randint(0, 7, (12, 5), generator=fv.Seed.root(0).torch())
    x, y = x.to(torch.uint8), x
    data = fv.Data("tokens", x, y, x, y, 7, tuple("abcdefg"))
    model = nn.Sequential(Long(), nn.Embedding(7, 6), nn.Linear(6, 7))
    task = fv.Task(
        model, data, fv.split("iid", data, 2, fv.Seed.root(0), max_records=len(x) // 2), loss="next-character"
    )
    with_it = Planted(task, (0,), task.initial, torch.tensor([3, 5]), np.array([True, True]), 2.0)
    losses = with_it.losses(task.initial, with_it.x, with_it.y)
    assert torch.allclose(losses[:12], task.losses(task.initial, task.x, task.y))
    assert torch.equal(losses[12:], 2 * task.initial[[3, 5]])


class Long(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.long()


def test_canaries_are_where_the_records_hardly_pull():
    places = quiet(TASK, 0, TASK.initial, 400)
    rows = torch.from_numpy(TASK.clients[0])
    slope = torch.stack([slope_of(int(row)).abs() for row in rows]).sum(0)
    rest = np.setdiff1d(np.arange(len(slope)), places)
    assert slope[places].max() <= slope[rest].min() + 1e-6


def slope_of(row: int) -> torch.Tensor:
    """The gradient of one record."""
    here, where = TASK.initial.clone().requires_grad_(), slice(row, row + 1)
    return torch.autograd.grad(TASK.losses(here, TASK.x[where], TASK.y[where]).sum(), here)[0]


def test_a_change_of_the_records_leaves_canaries_as_they_are():
    task = planted(np.ones(8, bool))
    heard = Heard(task.places)
    how = Tapped(noise=1.0, heard=heard, silent=True)
    stack = ClientStack(task, (0,), 1, fv.Seed.root(0), fv.Seed.root(1), [Slots()], [{}])
    draw = how.gradients(stack, task.initial[None], 12, [(3, [fv.Seed.root(2)])], lambda x: x * 0)
    for _ in range(3):
        draw()
    assert heard.rate == 1
    assert np.allclose(heard.steps, 1, atol=0.1)


# ---------------------------------------------------------------------------------------------------- the audit


@pytest.mark.parametrize("name", METHODS)
def test_dp_sgd_as_it_is_holds_and_the_same_without_noise_does_not(name):
    found = audited(name)
    assert list(found.broken()) == []
    assert (found.canaries, found.answers, found.steps) == (410, 1, 10)
    privacy = METHODS[name].privacy
    assert found.delta == pytest.approx(0.01 / 820)
    assert found.epsilon == pytest.approx(epsilon([Noised(privacy.noise, 0.5, 10)], found.delta))
    assert found.lower < found.epsilon < found.control
    assert found.curve < found.epsilon < found.curve_control
    assert found.control > 3
    assert found.found == pytest.approx(4.0, rel=0.15)
    assert 4.0 < found.most < 6.0
    assert not found.reused


def test_skellam_noise_holds_too():
    whole = replace(METHODS["fedavg"], privacy=replace(METHODS["fedavg"].privacy, mechanism="skellam"))
    found = audit(TASK, whole, TASK.initial, fv.Seed.root(1), private_root(1))
    assert not list(found.broken())
    assert found.lower < found.epsilon < found.control
    assert found.found == pytest.approx(found.noise, rel=0.1)


def test_without_noise_the_gate_breaks(monkeypatch):
    monkeypatch.setattr(dpsgd, "_normal", lambda words: torch.zeros(len(words), dtype=torch.float64))
    found = audited()
    assert found.lower > 3 > found.epsilon
    told = " | ".join(found.broken())
    assert "canaries rule out every ε below" in told
    assert "the noise is" in told


def test_a_quarter_of_the_noise_is_found(monkeypatch):
    """As if it were divided by what is drawn: the trade-off curve notices, one pair (ε, δ) does not."""
    real = dpsgd._normal
    monkeypatch.setattr(dpsgd, "_normal", lambda words: real(words) / 4)
    found = audited()
    assert found.lower < found.epsilon < found.curve
    _, told = found.broken()
    assert told.startswith("the noise is 1.")
    assert told.endswith("clips at most, but the recipe's is 4")


def test_gradients_that_are_not_clipped_are_found(monkeypatch):
    real = dpsgd.clipped_sum
    monkeypatch.setattr(dpsgd, "clipped_sum", lambda *args: real(*args[:5], 1e6, *args[6:]))
    found = audited()
    assert found.found == pytest.approx(0.4, rel=0.1)
    assert list(found.broken())


def test_noise_that_is_the_same_in_every_step_is_found(monkeypatch):
    real = dpsgd._normal
    size = TASK.layout.size
    monkeypatch.setattr(dpsgd, "_normal", lambda words: real(words)[:size].repeat(len(words) // size))
    assert len(list(audited().broken())) == 2


def test_private_seeds_that_serve_twice_are_found(monkeypatch):
    monkeypatch.setattr(
        ClientStack, "secrets", lambda stack, purpose: [fv.Seed.root(5).child(k) for k in stack.clients]
    )
    assert "one private seed served" in " | ".join(audited(answers=2).broken())


def test_steps_that_are_not_charged_are_found(monkeypatch):
    real = account._spent
    monkeypatch.setattr(account, "_spent", lambda *asked: real(*asked) / 100)
    assert any("is charged" in told for told in audited(answers=4).broken())


def test_private_draws_that_come_more_often_than_charged_are_found(monkeypatch):
    real = dpsgd.poisson
    monkeypatch.setattr(dpsgd, "poisson", lambda secret, own, rate, steps: real(secret, own, 1.0, steps))
    assert any("the noise is" in told for told in audited().broken())


def test_more_answers_are_charged_and_heard():
    once, twice = audited(), audited(answers=2)
    assert twice.steps == 2 * once.steps
    assert twice.epsilon > once.epsilon


def test_a_client_that_fails_before_it_releases_anything_is_a_sentence(monkeypatch):
    monkeypatch.setattr(dpsgd, "poisson", lambda *_: 1 / 0)
    with pytest.raises(ValueError, match="released no private gradient to audit: failed: the client gives no answer"):
        audited()


def test_too_few_canaries_are_refused():
    with pytest.raises(ValueError, match="50 canaries tell nothing; there must be 100, and 4 weights for each"):
        audited(canaries=50)


# ---------------------------------------------------------------------------------------------------- the figures


def heard(sigma: float, steps: int, m: int, rate: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What would be overheard: noisy, silent, and the coins."""
    rng = np.random.default_rng(seed)
    included = rng.random(m) < 0.5
    drawn = [(rng.random((steps, m)) < rate) & included for _ in range(2)]
    return drawn[0] + rng.normal(0, sigma, (steps, m)), drawn[1].astype(float), included


@pytest.mark.parametrize("steps", [1, 30])
def test_the_noise_found_is_the_noise(steps):
    for seed in range(20):
        noisy, silent, included = heard(1.5, steps, 2000, 0.4, seed)
        found, most = noise(noisy, silent, included, 0.4)
        assert found == pytest.approx(1.5, rel=0.15 if steps == 1 else 0.05)
        assert most >= 1.5


def test_the_most_that_the_noise_can_have_been_is_no_less_than_it_was():
    """Where canaries are always drawn, so that what they add is known, and only the noise is not."""
    found = [noise(*heard(1.0, 4, 60, 1.0, seed), 1.0) for seed in range(200)]
    assert min(most for _, most in found) >= 1
    assert np.mean([each for each, _ in found]) == pytest.approx(1, abs=0.05)


def test_noise_that_is_another_one_now_and_then_only_is_none():
    noisy, silent, included = heard(1.0, 30, 200, 0.4)
    rare = noisy[[0] * 5 + [1] * 10 + [2] * 15]
    assert noise(rare, silent, included, 0.4)[1] < 0.01


def test_a_lower_bound_stays_below_the_truth():
    """One step without sampling is the Gaussian mechanism: at σ = 1, ε(1e-5) is 4.38 (Balle and Wang 2018)."""
    found = [bound(*heard(1.0, 1, 2000, 1.0, seed)[::2], 1e-5)[0] for seed in range(10)]
    assert max(found) < 4.38
    assert np.median(found) > 1


def test_guesses_are_about_canaries_that_chose_nothing():
    """Were they the same ones, noise alone would rule out some ε now and then."""
    rng = np.random.default_rng(0)
    found = [bound(rng.normal(size=(3, 400)), rng.random(400) < 0.5, 1e-5)[0] for _ in range(60)]
    assert np.mean(np.array(found) > 0) <= 0.12


def test_the_trade_off_curve_rules_out_more_than_one_pair_and_no_more_than_is_true():
    charged = Noised(2.0, 0.25, 40)
    true = epsilon([charged], 1e-5, "pld")
    for seed in range(4):
        noisy, _, included = heard(2.0, 40, 2000, 0.25, seed)
        found = curve_bound(noisy, included, 1e-5, charged)
        assert bound(noisy, included, 1e-5).epsilon < found.epsilon < true
        assert found.epsilon > 0.25 * true
        assert found.right <= found.guesses
