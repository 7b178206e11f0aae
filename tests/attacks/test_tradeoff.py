"""Bounds by a trade-off curve: against a linear program, closed forms and mechanisms whose noise is known."""

import math

import numpy as np
import pytest
from scipy import optimize, special

from fedveil.attacks import roc, tradeoff
from fedveil.attacks.tradeoff import contradicted, gaussian, gaussian_epsilon, one_run, strength, subsampled
from fedveil.privacy.accountant import Noised, epsilon

Pairs = list[tuple[float, float]]


def of_pairs(pairs: Pairs):
    """The curve of a mechanism that is (ε, δ)-private for each of some pairs."""

    def least(power: float) -> float:
        lines = [((power - d) / math.exp(e), 1 - d - math.exp(e) * (1 - power)) for e, d in pairs]
        return max(0.0, *(value for line in lines for value in line))

    return least


def most_likely(pairs: Pairs, canaries: int, guesses: int, right: int) -> float:
    """The largest P(C ≥ right) that the inequalities of the theorem leave to any distribution of C, [0..guesses]."""
    count = np.arange(guesses + 1)
    rows, limits = [], []
    for j in range(1, guesses + 1):
        h = np.where(count >= j, count, 0) / canaries
        r = np.where(count >= j - 1, guesses - count, 0) / canaries
        for e, d in pairs:
            rows += [h - math.exp(e) * r, math.exp(e) * h - r]
            limits += [d, math.exp(e) + d - 1]
    found = optimize.linprog(
        -(count >= right).astype(float), A_ub=np.array(rows), b_ub=limits, A_eq=np.ones((1, guesses + 1)), b_eq=[1.0]
    )
    return -float(found.fun)


@pytest.mark.parametrize(
    ("pairs", "canaries", "guesses"),
    [([(0.5, 0.0)], 10, 10), ([(0.3, 0.01)], 30, 12), ([(0.0, 0.2), (0.5, 0.05), (1.5, 0.001)], 20, 15)],
)
def test_what_is_contradicted_is_what_a_linear_program_finds_too_rare(pairs, canaries, guesses):
    curve, decided = of_pairs(pairs), []
    for right in range(guesses + 1):
        likely = most_likely(pairs, canaries, guesses, right)
        decided.append(contradicted(curve, canaries, guesses, right))
        assert decided[-1] == (likely < 1 - roc.CONFIDENCE), (right, likely)
    assert decided == sorted(decided)  # more right guesses contradict more
    assert any(decided)
    assert not all(decided)


def guessed(mu: float, count: int, side: int, rng: np.random.Generator) -> int:
    """How many of the `side` highest and lowest of `count` Gaussian answers to a coin are guessed right."""
    coins = rng.random(count) < 0.5
    order = (mu * coins + rng.normal(size=count)).argsort()
    return int(coins[order[-side:]].sum()) + int((~coins[order[:side]]).sum())


def test_a_private_mechanism_is_contradicted_no_more_often_than_it_may():
    rng = np.random.default_rng(0)
    curve, honest = of_pairs([(1.0, 0.0)]), 1 / (1 + math.exp(-1))  # randomised response
    wrong = sum(contradicted(curve, 400, 400, int(right)) for right in rng.binomial(400, honest, 400))
    assert 5 <= wrong <= 0.05 * 400 + 8  # and is not so cautious that it never is
    found = [strength(1000, 200, guessed(1.0, 1000, 100, rng)) for _ in range(200)]
    assert max(found) < 1.0
    assert np.mean(found) > 0.55


def test_less_noise_than_charged_is_noticed():
    rng, charged = np.random.default_rng(1), Noised(2.0, 1.0, 1)
    lower = [one_run(1000, 100, guessed(1 / noise, 1000, 50, rng), charged, 1e-5) for noise in (2.0, 0.4)]
    assert lower[0] < epsilon([charged], 1e-5, "pld") < lower[1]


def test_a_bound_is_that_of_the_last_noise_that_is_contradicted(monkeypatch):
    charged = Noised(2.0, 0.25, 40)
    found = one_run(2000, 200, 162, charged, 1.25e-6)
    assert found == pytest.approx(1.917, abs=0.02)
    assert roc.one_run(2000, 200, 162, 1.25e-6) == pytest.approx(1.144, abs=0.001)  # by one pair (ε, δ)
    below, above = (Noised(noise, 0.25, 40) for noise in (3.8, 4.0))
    assert epsilon([above], 1.25e-6, "pld") < found < epsilon([below], 1.25e-6, "pld")
    assert not contradicted(subsampled(below), 2000, 200, 162)
    assert contradicted(subsampled(above), 2000, 200, 162)
    assert one_run(2000, 200, 162, Noised(0.8, 0.25, 40), 1.25e-6) == pytest.approx(found, rel=0.02)
    monkeypatch.setattr(tradeoff, "CLOSE", 0.3)
    assert 0.7 * found < one_run(2000, 200, 162, charged, 1.25e-6) <= found  # on the safe side


def test_guesses_that_are_chance_rule_out_nothing_and_certain_ones_what_the_count_allows():
    charged = Noised(1.0, 1.0, 1)
    assert one_run(500, 100, 50, charged, 1e-5) == 0
    assert one_run(500, 100, 0, charged, 1e-5) == 0
    assert strength(500, 0, 0) == 0
    some, more = (one_run(5 * count, count, count, charged, 1e-5) for count in (50, 100))
    assert 4 < some < more < 50


def test_without_sampling_a_step_has_the_curve_of_the_gaussian_mechanism():
    found, exact = subsampled(Noised(2.0, 1.0, 1)), gaussian(0.5)
    for power in (0.001, 0.01, 0.2, 0.5, 0.9, 0.999):
        assert found(power) <= exact(power) + 1e-9  # never more than is true
        assert found(power) == pytest.approx(exact(power), rel=5e-3, abs=1e-4)
    assert strength(1000, 100, 90) == pytest.approx(_as_mu(one_run(1000, 100, 90, Noised(1.0, 1.0, 1), 1e-5)), rel=0.02)


def _as_mu(at: float) -> float:
    return float(optimize.brentq(lambda mu: gaussian_epsilon(mu, 1e-5) - at, 0.01, 9))


def test_epsilon_of_gaussian_privacy_is_the_accountants():
    for mu in (0.1, 0.5, 2.0):
        assert gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon([Noised(1 / mu, 1.0, 1)], 1e-5, "pld"), rel=1e-3)
    assert gaussian_epsilon(0.0, 1e-5) == 0
    assert gaussian_epsilon(0.01, 0.1) == 0
    assert gaussian_epsilon(50.0, 1e-5) == roc.MOST
    assert gaussian(1.0)(0.5) == pytest.approx(special.ndtr(-1))
