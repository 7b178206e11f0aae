"""Statistics of runs that were repeated with several seeds: means, deviations, and paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from scipy import stats

from fedveil.core.metrics import Primary

LEVEL = 0.95
SAME = "no difference seen"


class Spread(msgspec.Struct, frozen=True):
    """The mean of several values and their sample standard deviation (none of a single value)."""

    mean: float
    deviation: float | None
    count: int

    def show(self, primary: Primary) -> str:
        """Both for people, such as "95.83% ± 0.41"."""
        if self.deviation is None:
            return primary.show(self.mean)
        return f"{primary.show(self.mean)} ± {_amount(primary, self.deviation)}"


class Difference(msgspec.Struct, frozen=True):
    """The mean of paired differences, and its 95% interval by Student's t distribution.

    mean ± t(0.975, count - 1) · deviation / √count
    """

    mean: float
    low: float
    high: float
    count: int  # seeds that both have

    @property
    def seen(self) -> bool:
        """Whether the interval is on one side of 0."""
        return self.low > 0 or self.high < 0

    def show(self, primary: Primary) -> str:
        """The interval in words, such as "+1.20 points [0.33, 2.07]"."""
        sign = "+" if self.mean >= 0 else "-"
        unit = " points" if primary.percent else ""
        low, high = (_amount(primary, value) for value in (self.low, self.high))
        shown = f"{sign}{_amount(primary, abs(self.mean))}{unit} [{low}, {high}]"
        return shown if self.seen else f"{SAME}: {shown}"

    def record(self) -> dict[str, Any]:
        """The figures of `--format json`."""
        return msgspec.structs.asdict(self) | {"level": LEVEL, "seen": self.seen}


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of at least one value."""
    return Spread(math.fsum(values) / len(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Return how far `values` are from `base` (both: seed -> value), paired by seed.

    None if they share fewer than two seeds, because a single difference has no interval.
    """
    common = sorted(values.keys() & base.keys())
    if len(common) < 2:
        return None
    found = spread([values[seed] - base[seed] for seed in common])
    assert found.deviation is not None
    half = float(stats.t.ppf((1 + LEVEL) / 2, found.count - 1)) * found.deviation / math.sqrt(found.count)
    return Difference(found.mean, found.mean - half, found.mean + half, found.count)


def _amount(primary: Primary, value: float) -> str:
    return f"{100 * value:.2f}" if primary.percent else f"{value:.4g}"
