"""How much privacy steps of noise cost: (ε, δ) of the Gaussian and of the Skellam mechanism, both Poisson-sampled.

A Gaussian step includes each record (or each client, for user-level privacy) by itself with probability `sample_rate`,
sums contributions of norm at most C, and adds Gaussian noise of deviation noise × C, once. Neighbours differ in one
record that is there or not (add/remove). That is what Google's dp-accounting assumes; a sampler that shuffles is not
covered. Where neighbours lie 2C apart and everybody is included, the same step counts with half its noise.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

ACCOUNTANTS = ("rdp", "pld")  # Rényi (quick) and privacy loss distributions (tighter)
CLOSE = 1e-3  # how far from the best a solved value may be, relatively, on the safe side
NOISES = (0.01, 1e4)  # between these a noise multiplier is sought
MOST_STEPS = 10**9
FINE, COARSE = 1e-4, 1e-3  # steps of the grid of a privacy loss distribution, which rounds δ up
TIGHTENED = 50.0  # ε above which the tighter accountant, whose grids grow with ε, is not asked any more


@dataclass(frozen=True)
class Noised:
    """`steps` steps, of which each includes a record with probability `sample_rate` and adds `noise` × C."""

    noise: float
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise is {self.noise:g}; it is a multiple of the clipping norm, 0 or more")
        _check_rate(self.sample_rate)
        _check_steps(self.steps)

    def times(self, factor: float) -> Noised:
        """The same steps with noise of `factor` times the deviation."""
        return replace(self, noise=self.noise * factor)


@dataclass(frozen=True)
class Skellam:
    """`steps` sums of integer vectors, of which each gets Skellam noise of this variance in every entry.

    l2, l1:      the norms of what neighbours' sums differ by, at most
    sample_rate: the probability with which a step includes a record; below 1 neighbours are those of add/remove
    """

    variance: float
    l2: float
    l1: float
    steps: int
    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.variance < math.inf:
            raise ValueError(f"the variance of Skellam noise is {self.variance:g}; it is above 0")
        if not (0 <= self.l2 < math.inf and 0 <= self.l1 < math.inf):
            raise ValueError(f"sums differ by norms of {self.l2:g} and {self.l1:g}; they are 0 or more")
        _check_rate(self.sample_rate)
        _check_steps(self.steps)

    def times(self, factor: float) -> Skellam:
        """The same steps with noise of `factor` times the deviation."""
        return replace(self, variance=self.variance * factor**2)

    def divergence(self, order: int) -> float:
        """Bound on the Rényi divergence of one step at a whole order α from 2 on.

        With a sample rate q below 1 it is log(Σ_k binomial(α, k) (1 - q)^(α-k) q^k e^((k-1) D_k)) / (α - 1), where D_k
        is the bound of an included record. By the binomial theorem this bounds the divergence of (1 - q) P + q Q from
        P, with P the sum without the record and Q the sum with it (Zhu and Wang 2019).

        The divergence of P from the mixture is no larger, as the noise is symmetric (Mironov, Talwar and Zhang 2019).
        A result at which Q / P is r > 1 has a mirror image, of r times the probability P, at which it is 1 / r. Let
        a = 1 - q + q r, b = 1 - q + q / r and f(t) = t^α - t^(1-α). The pair adds f(a) + r f(b) to the difference of
        the two moments. This is 0 at α = 1, and above 0 beyond: -f(a) / f(b) grows with α because a b > 1.
        """
        if self.sample_rate == 1:
            return self._included(order)
        logs = [-math.inf]  # of the terms less what they are without e^...: those add up to 1
        for k in range(2, order + 1):
            binomial = math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            chance = binomial + (order - k) * math.log1p(-self.sample_rate) + k * math.log(self.sample_rate)
            logs.append(chance + _log_expm1((k - 1) * self._included(k)))
        return float(np.logaddexp(0.0, np.logaddexp.reduce(logs))) / (order - 1)

    def _included(self, order: int) -> float:
        """The bound for a record that is surely included (Agarwal, Kairouz and Liu 2021)."""
        square, first = self.l2**2 / self.variance, self.l1 / self.variance
        return order / 2 * square + min(((2 * order - 1) * square + 6 * first) / (4 * self.variance), 1.5 * first)


Steps = Noised | Skellam


def _log_expm1(x: float) -> float:
    """log(e^x - 1) of x from 0 on."""
    return x + math.log(-math.expm1(-x)) if x else -math.inf


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise ValueError(f"the sample rate is {rate:g}; it is a probability above 0 and at most 1")


def _check_steps(steps: int) -> None:
    if not 0 <= steps <= MOST_STEPS:
        raise ValueError(f"steps is {steps}; it is from 0 to {MOST_STEPS:,}")


def epsilon(spent: Sequence[Steps], delta: float, accountant: str = "rdp") -> float:
    """ε of all these steps together; infinite where there is no noise.

    Where privacy is lost anyway, at a Rényi bound above `TIGHTENED`, that bound is the answer of both accountants.
    Skellam steps are composed by their Rényi divergences only.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta:g}; it is a probability between 0 and 1, below 1 / the number of records")
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"the accountant is '{accountant}'; use {' or '.join(ACCOUNTANTS)}")
    spent = [part for part in spent if part.steps]
    if not spent:
        return 0.0
    gaussian = [part for part in spent if isinstance(part, Noised)]
    if accountant == "pld" and len(gaussian) < len(spent):
        raise ValueError("the accountant is 'pld', but Skellam noise has no privacy loss distribution here; use rdp")
    if any(part.noise == 0 for part in gaussian):
        return math.inf
    from dp_accounting import rdp  # takes a second to import

    curves = [part.steps * _curve(replace(part, steps=1))[1] for part in spent]
    found = float(rdp.compute_epsilon(_curve(replace(spent[0], steps=1))[0], sum(curves), delta)[0])
    if accountant == "rdp" or found > TIGHTENED:
        return found
    return float(_distribution(gaussian).get_epsilon(delta))


def deltas(spent: Sequence[Noised], epsilons: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """δ of all these steps together at each ε [n], by their privacy loss distribution, rounded up."""
    return np.asarray(_distribution(spent, COARSE).get_delta(epsilons), dtype=np.float64)


def _distribution(spent: Sequence[Noised], grid: float = FINE) -> Any:
    from dp_accounting import pld

    total = pld.PLDAccountant(value_discretization_interval=grid)
    for part in spent:
        total.compose(_step(part), part.steps)
    return total


@functools.lru_cache(maxsize=256)
def _curve(one: Steps) -> tuple[Any, Any]:
    """The Rényi divergence of one step at each of some orders; of several steps it is as many times that."""
    from dp_accounting import rdp

    if isinstance(one, Skellam):
        orders, _ = _curve(Noised(1.0, 1.0, 1))
        return orders, np.array([_between(one, float(order)) for order in orders])
    logging.getLogger("absl").setLevel(logging.ERROR)  # orders it leaves out make ε larger, never smaller
    accountant = rdp.RdpAccountant()
    accountant.compose(_step(one))
    return accountant.orders, accountant.rdp


def _between(one: Skellam, order: float) -> float:
    """The divergence at any order above 1: (α - 1) times it is a convex function of α, and 0 at 1."""
    low = math.floor(order)
    ends = [0.0 if whole == 1 else (whole - 1) * one.divergence(whole) for whole in (low, low + 1)]
    return (ends[0] + (order - low) * (ends[1] - ends[0])) / (order - 1)


def _step(one: Noised) -> Any:
    import dp_accounting

    return dp_accounting.PoissonSampledDpEvent(one.sample_rate, dp_accounting.GaussianDpEvent(one.noise))


def solve(
    delta: float,
    noise: float | None = None,
    sample_rate: float | None = None,
    steps: int | None = None,
    target: float | None = None,
    accountant: str = "rdp",
    tell: Callable[[str], object] = lambda sentence: None,
) -> tuple[Noised, float]:
    """The one of noise, sample rate, steps and ε (`target`) that is not given, and the ε that it all comes to.

    A value that is solved for keeps ε at or below `target`: the least noise, the most steps, the highest sample rate.
    """
    given = {"noise": noise, "sample_rate": sample_rate, "steps": steps, "epsilon": target}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        told = ", ".join(name.replace("_", " ") for name in given)
        raise ValueError(f"of {told} give all but one, which is solved for; {len(missing)} are missing")
    (name,) = missing
    known = Noised(1.0 if noise is None else noise, 1.0 if sample_rate is None else sample_rate, steps or 1)
    if target is None:
        known = replace(known, steps=steps or 0)
        return known, epsilon([known], delta, accountant)
    if not 0 < target < math.inf:
        raise ValueError(f"epsilon is {target:g}; it is above 0")

    def cost(value: Any, by: str) -> float:
        tell(f"trying {name.replace('_', ' ')} {value:.5g}")
        return epsilon([replace(known, **{name: value})], delta, by)

    best = replace(known, **{name: _best(name, cost, target, accountant)})
    return best, epsilon([best], delta, accountant)


def least_noise(cost: Callable[[float, str], float], target: float, accountant: str = "rdp") -> float:
    """The least noise whose `cost`, by an accountant, is within the target; to 4 digits, rounded up."""
    found = float(_best("noise", cost, target, accountant))
    scale = 10.0 ** (3 - math.floor(math.log10(found)))
    above = math.ceil(found * scale) / scale
    return above if cost(above, accountant) <= target else found


def _best(name: str, cost: Callable[[Any, str], float], target: float, accountant: str) -> Any:
    """The best value whose cost is within the target: the least noise, the most steps or the highest sample rate.

    The Rényi bound is quick and never below the tighter one, so that what satisfies it is where to begin.
    """
    found = _search(name, lambda value: cost(value, "rdp") <= target, target)
    return _improve(name, lambda value: cost(value, "pld") <= target, found) if accountant == "pld" else found


def _search(name: str, within: Callable[[Any], bool], target: float) -> Any:
    """The best value that is within the target, to `CLOSE`."""
    private, exposed = {"noise": NOISES[::-1], "steps": (1, MOST_STEPS), "sample_rate": (1e-9, 1.0)}[name]
    if within(exposed):
        return exposed
    if not within(private):
        raise ValueError(f"no {name.replace('_', ' ')} keeps epsilon at {target:g}; allow more, or change the others")
    return _bisect(name, within, private, exposed)


def _improve(name: str, within: Callable[[Any], bool], found: Any) -> Any:
    """A better value than one that a looser bound allows: at most twice as good, or as far as it goes."""
    exposed = found / 2 if name == "noise" else min(2 * found, 1.0 if name == "sample_rate" else MOST_STEPS)
    return exposed if within(exposed) else _bisect(name, within, found, exposed)


def _bisect(name: str, within: Callable[[Any], bool], private: Any, exposed: Any) -> Any:
    """The most exposed value that is still within, between one that is and one that is not."""
    while abs(math.log(exposed / private)) > CLOSE and (name != "steps" or exposed - private > 1):
        middle: Any = math.sqrt(private * exposed)
        middle = min(max(round(middle), private + 1), exposed - 1) if name == "steps" else middle
        private, exposed = (middle, exposed) if within(middle) else (private, middle)
    return private
