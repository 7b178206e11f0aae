"""What guesses say of a mechanism whose trade-off curve is known up to its noise (f-differential privacy).

A trade-off curve f bounds every test of one record being in or out: a test with false-positive rate α has a
false-negative rate of f(α) at least (Dong, Roth and Su 2022). It says more than one pair (ε, δ), so fewer guesses
contradict it. A curve is a function here: the least false-positive rate α of a test of a given power, so with
1 - f(α) ≥ power.

A bound begins with a family of curves, one for each amount of noise. The most private members that the guesses
contradict are ruled out, and the ε of the last of them is the lower bound. It holds for mechanisms of that family; no
other assumption is made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri

from fedveil.attacks.roc import CONFIDENCE, MOST
from fedveil.privacy.accountant import TIGHTENED, Noised, deltas, epsilon

Curve = Callable[[float], float]  # the power of a test -> the least false-positive rate with which it is possible

LINES = 300  # pairs (ε, δ) that stand for a curve
FAINT = 1e-10  # the δ of the last of them
CLOSE = 0.01  # how far from the best noise a bound may be, relatively, on the safe side
FARTHER = 1.5  # times the noise of which it is asked whether it is ruled out, before a bound lies between two
MOST_NOISE = 1e3  # in clips; where not even that is ruled out, no ε is


# ---------------------------------------------------------------------------------------------------- curves


def gaussian(mu: float) -> Curve:
    """The curve of one Gaussian sum whose neighbours lie μ deviations apart: μ-GDP (Dong, Roth and Su 2022, eq. 6)."""
    return lambda power: float(ndtr(ndtri(power) - mu))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of μ-GDP at δ: δ = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) (Balle and Wang 2018, theorem 8)."""

    def above(epsilon: float) -> float:
        lost = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
        return float(ndtr(mu / 2 - epsilon / mu)) - lost - delta

    if mu <= 0 or above(0.0) <= 0:
        return 0.0
    return MOST if above(MOST) > 0 else float(brentq(above, 0.0, MOST))


@functools.lru_cache(maxsize=64)
def subsampled(steps: Noised) -> Curve:
    """The curve of Poisson-sampled Gaussian steps, with neighbours of add/remove, from their privacy loss distribution.

    Each pair (ε, δ(ε)) bounds a test with rates α and power β by β ≤ e^ε α + δ and, as it holds for the opposite answer
    too, by 1 - α ≤ e^ε (1 - β) + δ. The curve is the best of these lines, so it never says more than the pairs do.
    Where hardly any privacy is left it says nothing: every test is possible.
    """
    if (furthest := epsilon([steps], FAINT)) > TIGHTENED:
        return lambda power: 0.0
    epsilons = furthest * np.linspace(0, 1, LINES) ** 2  # closer where ε is small
    lost, grown = deltas([steps], epsilons), np.exp(epsilons)

    def least(power: float) -> float:
        return float(max(((power - lost) / grown).max(), (1 - lost - grown * (1 - power)).max(), 0.0))

    return least


# ---------------------------------------------------------------------------------------------------- one run


def contradicted(curve: Curve, canaries: int, guesses: int, right: int) -> bool:
    """Whether a mechanism with this curve gives so many right guesses, or more, with probability 1 - CONFIDENCE at most
    (Mahloujifar, Melis and Chaudhuri 2024, theorem 3.2 and algorithm 3).

    Each of `canaries` m is in or out by a fair coin, and `guesses` g of the coins are guessed after the mechanism ran.
    Let C be how many guesses are right, p_c = P(C = c), h_j = Σ_{c ≥ j} c/m p_c and r_j = Σ_{c ≥ j} (g - c)/m p_c.
    Then h_j ≤ 1 - f(r_{j-1}): whoever guesses a coin right and is right j times in all would, with the coin turned, be
    wrong about it and right j - 1 times. If P(C ≥ right) were 1 - CONFIDENCE, these inequalities would ask for more of
    p_{right - 1}, ..., p_0, one after the other, at least until h_0 + r_0 = g/m. Where they ask for more than that, it
    was a contradiction. The least that they ask for is with all of P(C ≥ right) at C = right.
    """
    if right == 0:
        return False
    tail = 1 - CONFIDENCE
    h, r = tail * right / canaries, tail * (guesses - right) / canaries
    for j in range(right, 0, -1):
        if h >= 1:
            return True
        if (least := curve(h)) > r:
            h += (j - 1) / (guesses - j + 1) * (least - r)
            r = least
        if h + r > guesses / canaries:
            return True
    return False


def one_run(canaries: int, guesses: int, right: int, charged: Noised, delta: float) -> float:
    """The ε at δ that right guesses rule out for steps like those that are charged, with noise of any size."""

    def ruled_out(noise: float) -> bool:
        return contradicted(subsampled(replace(charged, noise=noise)), canaries, guesses, right)

    low = high = charged.noise
    if ruled_out(high):
        while ruled_out(low := low / FARTHER):
            high = low
    else:
        while not ruled_out(high := high * FARTHER):
            low = high
            if high > MOST_NOISE:
                return 0.0
    while high / low > 1 + CLOSE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if ruled_out(middle) else (middle, high)
    return epsilon([replace(charged, noise=high)], delta, "pld")


def strength(canaries: int, guesses: int, right: int, known: float = 0.0) -> float:
    """The μ of Gaussian differential privacy that right guesses rule out, or `known` where it is no more than that:
    quick, so that it can choose among ways to guess."""

    def ruled_out(mu: float) -> bool:
        return contradicted(gaussian(mu), canaries, guesses, right)

    low, high = known, known + 0.02
    if not ruled_out(high):
        return known
    while high < MOST and ruled_out(high):
        low, high = high, 2 * high
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low
