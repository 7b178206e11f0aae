"""ε against golden values, and that what is solved for is on the safe side and nearly the best."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.privacy.accountant import CLOSE, Noised, epsilon, solve


@pytest.mark.parametrize(("rounds", "expected"), [(1, 2.79), (7, 6.73), (15, 10.18), (17, 10.93)])
def test_golden_values_of_fedlap_dp(rounds, expected):
    assert epsilon([Noised(1, 0.0256, 200 * rounds)], 1e-5) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("rounds", "expected"), [(1, 2.38), (15, 9.38)])
def test_golden_values_of_the_tighter_accountant(rounds, expected):
    assert epsilon([Noised(1, 0.0256, 200 * rounds)], 1e-5, "pld") == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("accountant", "expected"), [("rdp", 4.183), ("pld", 3.899)])
def test_golden_values_of_user_level_fedavg(accountant, expected):
    assert epsilon([Noised(1, 5000 / 763430, 5000)], 1e-9, accountant) == pytest.approx(expected, abs=0.0005)


def test_parts_add_up_and_no_noise_is_no_privacy():
    whole, half = Noised(1, 0.0256, 200), Noised(1, 0.0256, 100)
    assert epsilon([half, half], 1e-5) == pytest.approx(epsilon([whole], 1e-5))
    assert epsilon([], 1e-5) == epsilon([Noised(0, 0.5, 0)], 1e-5) == 0
    assert epsilon([whole, Noised(0, 0.5, 1)], 1e-5) == math.inf


def test_where_privacy_is_lost_the_quick_bound_answers():
    lost = [Noised(0.01, 1.0, 5)]
    assert epsilon(lost, 1e-5, "pld") == epsilon(lost, 1e-5) > 1e4


@settings(max_examples=6)
@given(st.floats(0.8, 20), st.floats(0.001, 0.3), st.integers(1, 5000))
def test_more_noise_fewer_steps_and_smaller_samples_cost_less(noise, rate, steps):
    """Up to a thousandth: the accountant tries orders of a list, and beyond these ranges leaves some of them out."""
    here = epsilon([Noised(noise, rate, steps)], 1e-5)
    assert epsilon([Noised(1.2 * noise, rate, steps)], 1e-5) <= 1.001 * here
    assert epsilon([Noised(noise, 0.8 * rate, steps)], 1e-5) <= 1.001 * here
    assert epsilon([Noised(noise, rate, steps + 1)], 1e-5) >= 0.999 * here


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["noise", "sample_rate", "steps"])
def test_each_is_solved_for_on_the_safe_side(name, accountant):
    known = {"noise": 1.0, "sample_rate": 0.0256, "steps": 200}
    del known[name]
    found, reached = solve(1e-5, **known, target=2.0, accountant=accountant)
    assert reached <= 2.0
    value = getattr(found, name)
    worse = {"noise": value * (1 - 3 * CLOSE), "sample_rate": value * (1 + 3 * CLOSE), "steps": value + 1}[name]
    assert epsilon([Noised(**{**known, name: worse})], 1e-5, accountant) > 2.0
    assert solve(1e-5, found.noise, found.sample_rate, found.steps, accountant=accountant)[1] == pytest.approx(reached)


def test_what_cannot_be_solved_is_said():
    with pytest.raises(ValueError, match="2 are missing"):
        solve(1e-5, noise=1, steps=200)
    with pytest.raises(ValueError, match="0 are missing"):
        solve(1e-5, 1, 0.1, 200, 2)
    with pytest.raises(ValueError, match=r"no steps keeps epsilon at 0\.01"):
        solve(1e-5, noise=0.5, sample_rate=1.0, target=0.01)
    assert solve(1e-5, noise=1e4, steps=1, target=5.0)[0].sample_rate == 1.0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"noise": -1}, "noise is -1"),
        ({"sample_rate": 0}, "sample rate is 0"),
        ({"sample_rate": 1.5}, "sample rate is 1.5"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": 10**20}, "steps is 1000"),
        ({"delta": 0}, "delta is 0"),
        ({"delta": 1}, "delta is 1"),
        ({"accountant": "moments"}, "'moments'; use rdp or pld"),
    ],
    ids=str,
)
def test_values_out_of_range(changed, words):
    with pytest.raises(ValueError, match=words):
        solve(**{"delta": 1e-5, "noise": 1.0, "sample_rate": 0.1, "steps": 10} | changed)
