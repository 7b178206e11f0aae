"""Statistics of runs that were repeated with several seeds: means, deviations, and paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.filesize import decimal
from scipy.special import stdtrit  # scipy.stats takes seconds to import

from fedveil.core.ledger import Ledger
from fedveil.core.metrics import ACCURACY, VALIDATION, Primary

LEVEL = 0.95
SAME = "no difference seen"

Bits = npt.NDArray[np.bool_]


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
    """The mean of paired differences, and its 95% interval by Student's t distribution."""

    mean: float
    low: float
    high: float
    count: int  # seeds that both have
    records: int = 0  # test records whose choice the interval covers too; 0: it covers the seeds only

    @property
    def seen(self) -> bool:
        """Whether the interval is on one side of 0."""
        return self.low > 0 or self.high < 0

    def show(self, primary: Primary, unit: str = " points", apart: str = ": ") -> str:
        """The interval in words, such as "+1.20 points [0.33, 2.07]"."""
        sign = "+" if self.mean >= 0 else "-"
        unit = unit if primary.percent else ""
        low, high = (_amount(primary, value) for value in (self.low, self.high))
        shown = f"{sign}{_amount(primary, abs(self.mean))}{unit} [{low}, {high}]"
        return shown if self.seen else f"{SAME}{apart}{shown}"

    def record(self) -> dict[str, Any]:
        """The figures of `--format json`."""
        return msgspec.structs.asdict(self) | {"level": LEVEL, "seen": self.seen}


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of at least one value."""
    return Spread(math.fsum(values) / len(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Return how far `values` are from `base` (both: seed -> value), paired by seed.

    The interval is mean ± t(0.975, S - 1) · deviation / √S for S seeds. It does not cover the choice of the test
    records, which all seeds share. None if they share fewer than two seeds: a single difference has no interval.
    """
    common = sorted(values.keys() & base.keys())
    if len(common) < 2:
        return None
    found = spread([values[seed] - base[seed] for seed in common])
    assert found.deviation is not None
    return _interval(found.mean, found.deviation**2 / found.count, found.count - 1, found.count)


def crossed(right: Mapping[int, Bits], base: Mapping[int, Bits]) -> Difference | None:
    """Return how far the accuracy of `right` is from that of `base` (both: seed -> bool [n]), by seed and record.

    The interval covers the seeds and the choice of the n test records, which all S seeds share. The difference of seed
    s on record i is a mean plus independent effects of s, of i and of both. With the mean squares of a two-way analysis
    of variance, the variance of the mean is (MS_seeds + MS_records - MS_rest) / (S n), and its degrees of freedom are
    those of Satterthwaite (1946). It is never below that of the seeds alone. None if they share fewer than two seeds.
    """
    common = sorted(right.keys() & base.keys())
    if len(common) < 2:
        return None
    apart = np.stack([right[seed].astype(np.float64) - base[seed] for seed in common])
    s, n = apart.shape
    mean, by_seed, by_record = float(apart.mean()), apart.mean(1), apart.mean(0)
    seeds = n * float(by_seed.var(ddof=1))
    records = s * float(by_record.var(ddof=1))
    rest = float(((apart - by_seed[:, None] - by_record + mean) ** 2).sum()) / ((s - 1) * (n - 1))
    total, freedom = seeds + records - rest, float(s - 1)
    if total <= seeds:
        total = seeds
    else:
        freedom = total**2 / (seeds**2 / (s - 1) + records**2 / (n - 1) + rest**2 / ((s - 1) * (n - 1)))
    return _interval(mean, total / (s * n), max(1.0, freedom), s, n)


def _interval(mean: float, variance: float, freedom: float, count: int, records: int = 0) -> Difference:
    """The interval of a mean whose variance was estimated with so many degrees of freedom."""
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(variance)
    return Difference(mean, mean - half, mean + half, count, records)


@dataclass(frozen=True)
class Repeats:
    """The runs of one recipe, by seed.

    metric: by which they are compared; by default their primary one
    """

    name: str
    ledgers: Mapping[int, Ledger]
    metric: Primary | None = None

    @property
    def primary(self) -> Primary:
        """The metric by which they are compared: what was asked for, or what the first run says."""
        return self.metric or next((each.primary for each in self.ledgers.values() if each.rows), Ledger().primary)

    def values(self, prefix: str = "") -> dict[int, float]:
        """The primary metric when it was last measured; with the prefix `VALIDATION` that of the validation records."""
        found = {seed: each.series(prefix + self.primary.name)[1] for seed, each in self.ledgers.items()}
        return {seed: values[-1] for seed, values in found.items() if values}

    def spread(self, prefix: str = "") -> Spread | None:
        """Its mean and standard deviation over seeds; None where it was never measured."""
        values = self.values(prefix)
        return spread(list(values.values())) if values else None

    def mean(self, key: str) -> float:
        """The mean of a number of the runs' summaries, such as bytes_up."""
        return math.fsum(each.summary("")[key] for each in self.ledgers.values()) / len(self.ledgers)

    @property
    def epsilon(self) -> float | None:
        """The largest ε that a run has charged, if any is private."""
        charged = [row.epsilon for each in self.ledgers.values() for row in each.rows if row.epsilon is not None]
        return max(charged, default=None)

    def right(self) -> dict[int, Bits]:
        """Which test records the final weights of each run classify correctly; empty if a run does not say."""
        if self.primary != ACCURACY or not all(each.right for each in self.ledgers.values()):
            return {}
        return {seed: each.right.unpacked() for seed, each in self.ledgers.items() if each.right}

    def difference(self, base: Repeats) -> Difference | None:
        """How far this primary metric is from that of `base`, if they share it and at least two seeds.

        The interval covers the choice of the test records if the runs say which of them they classify correctly.
        """
        if self.primary != base.primary:
            return None
        right, of_base = self.right(), base.right()
        if right and of_base and len({len(each) for each in (*right.values(), *of_base.values())}) == 1:
            return crossed(right, of_base)
        return paired(self.values(), base.values())

    def record(self, base: Repeats) -> dict[str, Any]:
        """The figures of `--format json`."""
        value, held, difference = self.spread(), self.spread(VALIDATION), self.difference(base)
        return {
            "recipe": self.name,
            "metric": self.primary.name,
            "value": value and msgspec.structs.asdict(value),
            "validation": held and msgspec.structs.asdict(held),
            "difference": difference.record() if difference and self is not base else None,
            "epsilon": self.epsilon,
            **{key: self.mean(key) for key in ("bytes_up", "bytes_down", "passes", "seconds")},
        }


def table(found: Sequence[Repeats]) -> list[list[str]]:
    """Return a row of heads and a row for each recipe: means, deviations, and differences to the first one."""
    base, metrics = found[0], list(dict.fromkeys(each.primary for each in found))
    words = metrics[0].words if len(metrics) == 1 else "metric"
    unit = ", points" if all(metric.percent for metric in metrics) else ""
    held, private = any(each.values(VALIDATION) for each in found), any(each.epsilon is not None for each in found)
    head = ["recipe", "seeds", words, *[f"validation\n{words}"] * held]
    head += [f"difference{unit}\n[{LEVEL:.0%} interval]"] * (len(found) > 1)
    head += ["up in all", *["ε"] * private, *["seconds"] * (not held)]  # with validation, the table is wide as it is
    rows = [head]
    for each in found:
        cells = [each.name.replace("method.", ""), str(len(each.ledgers)), _shown(each.spread(), each.primary)]
        cells += [_shown(each.spread(VALIDATION), each.primary)] * held
        if len(found) > 1:
            difference = each.difference(base)
            told = difference.show(each.primary, unit="", apart="\n") if difference else "–"
            cells.append("" if each is base else told)
        cells.append(decimal(round(each.mean("bytes_up"))))
        cells += ["–" if each.epsilon is None else f"{each.epsilon:.4g}"] * private
        rows.append([*cells, *[f"{each.mean('seconds'):.3g}"] * (not held)])
    return rows


def note(found: Sequence[Repeats]) -> str:
    """Return what the numbers of that table are."""
    told = "Mean ± standard deviation over seeds"
    if len(found) > 1:
        told += f"; differences to the first recipe are paired by seed, each with its own {LEVEL:.0%} t interval"
        differences = [each.difference(found[0]) for each in found[1:]]
        covered = [difference.records > 0 for difference in differences if difference]
        if covered and all(covered):
            told += ", which covers seeds and the choice of the test records"
        elif covered and not any(covered):
            told += ", which does not cover the choice of the test records"
    return told + "."


def _shown(value: Spread | None, primary: Primary) -> str:
    return "–" if value is None else value.show(primary)


def _amount(primary: Primary, value: float) -> str:
    return f"{100 * value:.2f}" if primary.percent else f"{value:.4g}"
