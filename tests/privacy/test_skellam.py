"""Skellam noise: its distribution at every size, its shares, and the norm of what is rounded."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from fedveil.core.message import Refused
from fedveil.privacy import skellam
from fedveil.privacy.skellam import EXACT, SumNoise, draw, rounded


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


@pytest.mark.parametrize("variance", [1e-3, 0.3, 2.0, 50.0, 1000.0, EXACT, 3000.0, 4097.0, 17_000.0])
def test_each_integer_has_its_probability(variance):
    """A chi-square over single integers; in rejection the fewest to a block are 2, at 4097."""
    size = 400_000
    found = draw(key(1), variance, size)
    reach = math.ceil(8 * math.sqrt(variance)) + 5
    values = np.arange(-reach, reach + 1)
    assert np.abs(found).max() <= reach
    expected = size * special.ive(np.abs(values), variance)
    seen = np.bincount(found + reach, minlength=len(values))
    often = expected >= 20
    rest = [seen[~often].sum()], [size - expected[often].sum()]
    tested = [np.concatenate([a, b]) for a, b in zip((seen[often], expected[often]), rest, strict=True)]
    assert stats.chisquare(*tested, sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("variance", [1e6, 1e10, 1e14, 1e20, 1e30])
def test_large_noise_is_normal(variance):
    found = draw(key(2), variance, 200_000)
    assert stats.kstest(found / math.sqrt(variance), "norm").pvalue > 1e-4
    assert float(np.mean(found % 2)) == pytest.approx(0.5, abs=0.006)  # every integer is reached, not a grid of them
    assert stats.chisquare(np.bincount(found % 32, minlength=32)).pvalue > 1e-4


@pytest.mark.parametrize("variance", [1.0, 700.0, 1e5, 1e12])
def test_moments(variance):
    found, size = draw(key(3), variance, 1_000_000).astype(float), 1e6
    assert abs(found.mean()) < 4.5 * math.sqrt(variance / size)
    assert found.var() == pytest.approx(variance, rel=4.5 * math.sqrt((2 + 1 / variance) / size))
    assert stats.kurtosis(found) == pytest.approx(1 / variance, abs=4.5 * math.sqrt((24 + 300 / variance) / size))


def test_probabilities_to_the_last_digit():
    """Golden values by mpmath, 50 digits: log(e^-μ I_k(μ)) + ½ log(2πμ)."""
    golden = {
        (1024.0, 0): 0.000122129977870312667,
        (1024.0, 100): -4.881196298039886809,
        (1024.0, 350): -59.27906871259471943,
        (5000.0, 35): -0.1224867496532352366,
        (5000.0, 424): -17.96861674036484764,
    }
    for (variance, k), expected in golden.items():
        found = skellam._log_probability(np.array([-k, k]), variance)
        np.testing.assert_allclose(found, expected, rtol=1e-15, atol=5e-16)


@pytest.mark.parametrize("variance", [0.01, 7.0, 1023.0])
def test_tabulated_probabilities(variance):
    found = skellam._bessel(variance)
    total = found[0] + 2 * sum(found[1:])
    shown = [value / total for value in found]
    np.testing.assert_allclose(shown, special.ive(np.arange(len(shown)), variance), rtol=1e-12, atol=2.0**-100)
    assert shown[-1] < 2**-90


def test_a_key_fixes_the_noise_and_another_key_changes_it():
    for variance in (5.0, 1e7):
        one = draw(key(1), variance, 100_000)
        np.testing.assert_array_equal(one, draw(key(1), variance, 100_000))
        other = draw(key(2), variance, 100_000)
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(100_000)
        assert len(draw(key(1), variance, 0)) == 0
        assert one.dtype == np.int64
        lagged = np.corrcoef(one[1:], one[:-1])[0, 1]
        assert abs(lagged) < 5 / math.sqrt(100_000)


@pytest.mark.parametrize(("clients", "quorum", "colluders"), [(5, 5, 0), (9, 5, 0), (9, 7, 3)])
def test_shares_of_a_quorum_without_colluders_have_all_of_the_noise(clients, quorum, colluders):
    noise, size = SumNoise(1.5, colluders), 100_000
    share = noise.variance(127, quorum)
    assert share * (quorum - colluders) == pytest.approx((1.5 * 127) ** 2, rel=1e-12)
    total = sum(draw(key(k), share, size) for k in range(clients))
    assert total.var() == pytest.approx(share * clients, rel=5 * math.sqrt(2 / size))


def test_a_client_refuses_a_sum_of_colluders_only():
    assert SumNoise(2.0, 4).variance(7, 5) == 14.0**2
    with pytest.raises(Refused, match="5 clients are enough for the sum, but 5 of them may give up noise"):
        SumNoise(2.0, 5).variance(7, 5)


@pytest.mark.parametrize("variance", [0.0, -1.0, math.nan, math.inf, 1e36])
def test_a_variance_that_cannot_be_drawn_is_refused(variance):
    with pytest.raises(ValueError, match="the variance of the noise is"):
        draw(key(1), variance, 3)


# ---------------------------------------------------------------------------------------------------- rounding


def test_the_norm_after_rounding():
    assert rounded(127, 100) == pytest.approx(math.sqrt(127**2 + 25 + 127 + 5))
    assert rounded(1, 10_000) == pytest.approx(math.sqrt(1 + 2500 + 1 + 50))
    assert rounded(1, 1) == pytest.approx(math.sqrt(1 + 0.25 + 1.5))
    assert rounded(0, 0) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.floats(0.1, 200), st.integers(0, 2**32))
def test_rounding_exceeds_the_bound_with_probability_at_most_that_of_the_paper(size, norm, seed):
    """Else a client would have to try again too often; toward zero nothing exceeds it."""
    rng = np.random.default_rng(seed)
    vector = rng.normal(size=size)
    vector *= norm / np.linalg.norm(vector)
    tries = np.floor(vector + rng.random((500, size)))
    within = np.linalg.norm(tries, axis=1) <= rounded(norm, size)
    assert within.mean() > 1 - math.exp(-0.5) - 0.1
    assert np.linalg.norm(np.trunc(vector)) <= rounded(norm, size)
