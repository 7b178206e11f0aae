"""ε against golden values, and that what is solved for is on the safe side and nearly the best."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.privacy.account import read, written
from fedveil.privacy.accountant import CLOSE, Noised, Skellam, epsilon, solve


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


# ---------------------------------------------------------------------------------------------------- Skellam


def divergence(order: float, shift: int, variance: float) -> float:
    """Rényi's, of a Skellam variable from one that is shifted. Probabilities e^-μ I_k(μ) by their ratios, which do not
    underflow: I_k / I_k-1 = 1 / (2k/μ + I_k+1 / I_k)."""
    reach = int(12 * math.sqrt(variance) + 40 + 2 * order * shift)
    ratio, ratios = 0.0, []
    for k in range(2 * reach, 0, -1):
        ratio = 1 / (2 * k / variance + ratio)
        ratios.append(ratio)
    logs = math.log(stats.skellam.pmf(0, variance / 2, variance / 2)) + np.cumsum([0.0, *np.log(ratios[::-1])])
    values = np.arange(-reach, reach + 1)
    terms = order * logs[np.abs(values)] + (1 - order) * logs[np.abs(values - shift)]
    return float((terms.max() + np.log(np.exp(terms - terms.max()).sum())) / (order - 1))


@pytest.mark.parametrize("variance", [0.5, 10.0, 100.0, 1000.0, 5000.0])
@pytest.mark.parametrize("shift", [1, 2, 5, 20])
def test_skellams_divergence_is_within_its_bound_and_close_to_it(variance, shift):
    for order in (2, 3, 5, 8):
        true, bound = divergence(order, shift, variance), Skellam(variance, shift, shift, 1).divergence(order)
        assert true <= bound * (1 + 1e-9)
        if variance >= 100 and order * shift <= math.sqrt(variance):
            assert bound <= 1.03 * true
        assert bound <= order * shift**2 / (2 * variance) + 1.5 * shift / variance


def test_the_bound_in_several_dimensions():
    """A divergence of independent entries is the sum of theirs, and the bound of all is not below it."""
    for vector in ([1, 1, 1], [3, 0, 1], [-2, 5, 4]):
        l2, l1 = math.sqrt(sum(v * v for v in vector)), sum(map(abs, vector))
        for variance in (20.0, 400.0):
            true = sum(divergence(4, abs(v), variance) for v in vector if v)
            assert true <= Skellam(variance, l2, l1, 1).divergence(4) * (1 + 1e-9)


def test_golden_values_of_the_bound():
    """α/2 Δ²/μ + min(((2α - 1)Δ² + 6Δ₁) / 4μ², 3Δ₁ / 2μ), by hand."""
    assert Skellam(100.0, 3.0, 5.0, 1).divergence(4) == pytest.approx(0.18 + 93 / 40_000)
    assert Skellam(0.5, 3.0, 5.0, 1).divergence(4) == pytest.approx(36 + 15)


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (2.0, 10), (5.0, 100)])
def test_fine_skellam_noise_costs_what_gaussian_noise_does(noise, steps):
    fine = Skellam((noise * 1e6) ** 2, 1e6, 1e6, steps)
    gaussian = epsilon([Noised(noise, 1.0, steps)], 1e-5)
    assert gaussian * (1 - 1e-9) <= epsilon([fine], 1e-5) <= 1.02 * gaussian
    assert epsilon([Skellam((noise * 10) ** 2, 10, 30, steps)], 1e-5) > epsilon([fine], 1e-5)


def test_between_whole_orders_the_bound_is_not_below_the_divergence():
    from fedveil.privacy.accountant import _curve

    step = Skellam(50.0, 4.0, 4.0, 1)
    orders, curve = _curve(step)
    for order, bound in zip(orders, curve, strict=True):
        if order < 12:
            assert divergence(float(order), 4, 50.0) <= bound * (1 + 1e-9)
    assert dict(zip(orders, curve, strict=True))[3.0] == step.divergence(3)


@pytest.mark.parametrize("noise", [0.6, 1.0, 5.0])
@pytest.mark.parametrize("rate", [0.001, 0.0256, 0.5])
def test_sampled_skellam_noise_costs_what_sampled_gaussian_noise_does(noise, rate):
    """dp-accounting's own figures at whole orders, where both are sums of the same terms."""
    from fedveil.privacy.accountant import _curve

    orders, gaussian = _curve(Noised(noise, rate, 1))
    _, fine = _curve(Skellam((noise * 2**30) ** 2, 2**30, 2**35, 1, rate))
    whole = [k for k, order in enumerate(orders) if float(order).is_integer() and np.isfinite(gaussian[k])]
    assert len(whole) > 30
    assert fine[whole] == pytest.approx(gaussian[whole], rel=1e-6)
    gaussian, fine = Noised(noise, rate, 100), Skellam((noise * 2**30) ** 2, 2**30, 2**35, 100, rate)
    ratio = epsilon([fine], 1e-5) / epsilon([gaussian], 1e-5)
    assert 1 - 1e-6 <= ratio <= (1.03 if epsilon([gaussian], 1e-5) < 5 else 1.3)  # where orders below 2 count


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize(("shift", "variance"), [(1, 0.7), (3, 20.0), (40, 1500.0)])
def test_a_sampled_record_is_hidden_in_both_directions(rate, shift, variance):
    """By exact probabilities: of the mixture from the noise alone within the bound, and the reverse within that."""
    values = np.arange(-900, 900)
    without, having = (stats.skellam.logpmf(values - by, variance / 2, variance / 2) for by in (0, shift))
    kept = (without > -500) & (having > -500)
    without, having = without[kept], having[kept]
    mixed = np.logaddexp(math.log1p(-rate) + without, math.log(rate) + having)
    for order in (2, 3, 5, 9):
        bound = Skellam(variance, shift, shift, 1, rate).divergence(order)
        there, back = (
            float(np.logaddexp.reduce(order * p + (1 - order) * q)) / (order - 1)
            for p, q in ((mixed, without), (without, mixed))
        )
        assert back <= there * (1 + 1e-9) + 1e-12
        assert there <= bound * (1 + 1e-9) + 1e-12
        if variance > 1000 and order < 4:
            assert there >= 0.9 * bound


def test_golden_value_of_a_sampled_bound():
    """Order 2: log(1 + q² (e^D - 1)), by hand."""
    step = Skellam(100.0, 3.0, 5.0, 1, 0.25)
    assert step.divergence(2) == pytest.approx(math.log1p(math.expm1(0.09 + (27 + 30) / 40_000) / 16))
    assert Skellam(100.0, 0.0, 0.0, 1, 0.25).divergence(5) == 0


def test_prices_are_read_as_they_were_written():
    for price in (Noised(1.5, 0.25, 7), Skellam(9.0, 2.0, 3.0, 4, 0.5)):
        assert read(written(price)) == price
    assert read(["skellam", 9.0, 2.0, 3.0, 4]) == Skellam(9.0, 2.0, 3.0, 4), "of an account without sampled sums"
    for wrong in (["skellam", 9.0, 2.0, 3.0], ["noised", 1.5, 0.25], ["noised", 1.0, 1.0, 1, 1], []):
        with pytest.raises(ValueError, match="is not the price of a private answer"):
            read(wrong)


def test_gaussian_and_skellam_steps_add_up():
    gaussian, integer = Noised(1.0, 0.0256, 200), Skellam(1e4, 50.0, 80.0, 5)
    both = epsilon([gaussian, integer], 1e-5)
    assert max(epsilon([gaussian], 1e-5), epsilon([integer], 1e-5)) < both
    assert both < epsilon([gaussian], 1e-5) + epsilon([integer], 1e-5)
    assert both == pytest.approx(epsilon([integer, gaussian], 1e-5), rel=1e-12)
    assert epsilon([Skellam(1e4, 50.0, 80.0, 0)], 1e-5) == 0


def test_what_skellam_noise_does_not_have():
    with pytest.raises(ValueError, match="'pld', but Skellam noise has no privacy loss distribution here; use rdp"):
        epsilon([Skellam(1.0, 1.0, 1.0, 1)], 1e-5, "pld")
    for wrong, words in [
        ((0.0, 1.0, 1.0, 1), "the variance of Skellam noise is 0"),
        ((1.0, -1.0, 1.0, 1), "norms of -1 and 1"),
        ((1.0, 1.0, math.inf, 1), "norms of 1 and inf"),
        ((1.0, 1.0, 1.0, -1), "steps is -1"),
        ((1.0, 1.0, 1.0, 1, 0.0), "the sample rate is 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            Skellam(*wrong)
