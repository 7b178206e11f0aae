"""Skellam noise: integers that clients add to their summands inside the secure sum (Agarwal, Kairouz and Liu 2021).

A Skellam variable of variance μ is the difference of two Poisson variables of mean μ/2. Its probabilities are
p(k) = e^-μ I_k(μ), with I_k the modified Bessel function. The sum of independent Skellam variables is a Skellam
variable, and their variances add up. So the shares of several clients are, together, exactly the noise that the
accountant charges for; neither floats nor a rounding come after them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedveil.core.refused import Refused
from fedveil.privacy.secagg.masks import key_stream

EXACT = 1024.0  # variance up to which every probability is tabulated
DEVIATIONS = 12  # beyond which the probability is below 2^-90 and no value is drawn
PARTS = 32  # blocks in one deviation, at least
WIDEST = 2.0**57  # deviation up to which values are safely within 64 bits
CHUNK = 1 << 16  # values drawn at once

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SumNoise:
    """Integer noise that clients add inside the secure sum.

    sigma:     deviation of the noise in the sum, in clips: sigma · half units of fixed point
    colluders: clients that may tell the server their noise; the others' shares alone have the deviation
    """

    sigma: float
    colluders: int = 0

    def variance(self, half: int, quorum: int) -> float:
        """Variance of one client's share where at least `quorum` clients are summed and `half` units are a clip."""
        if quorum <= self.colluders:
            raise Refused(
                "bad set", f"{quorum} clients are enough for the sum, but {self.colluders} of them may give up noise"
            )
        return (self.sigma * half) ** 2 / (quorum - self.colluders)


def rounded(norm: float, size: int) -> float:
    """Bound on the L2 norm of a vector of `size` entries and norm at most `norm` after conditional stochastic rounding.

    Units are those of rounding. Rounding at random exceeds this bound with probability at most e^-½ and is then
    repeated (Kairouz, Liu and Steinke 2021, with β = e^-½).
    """
    sure = (norm + math.sqrt(size)) ** 2
    likely = norm**2 + size / 4 + norm + math.sqrt(size) / 2
    return math.sqrt(min(sure, likely))


def draw(key: bytes, variance: float, size: int) -> Integers:
    """`size` independent Skellam integers of mean 0 and this variance, from the ChaCha20 stream of a 32-byte key.

    They are exact up to double precision: the distribution of one value differs from Skellam's by a total variation of
    about 2^-50 (about 2^-54 up to a variance of 1024). A vector of d values differs by at most d times that, which adds
    to δ. The time taken depends on the values, slightly.
    """
    table, stream = _table(float(variance)), key_stream(key)
    values, done = np.empty(size, np.int64), 0
    while done < size:
        many = min(size - done, CHUNK)
        words = np.frombuffer(stream.update(bytes(8 * table.words * many)), "<u8").reshape(table.words, many)
        found = table.values(words)
        values[done : done + len(found)] = found
        done += len(found)
    return values


# ---------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, eq=False)
class _Table:
    """Blocks of `width` integers each, by the probability with which a word of 64 bits chooses one.

    A block is chosen in proportion to the probability at its end near 0, where it is highest; a value in it uniformly.
    The value is accepted with its own probability over that of the near end, or a new block is chosen.
    """

    edges: Words  # [blocks - 1]: a word from edges[j - 1] to below edges[j] chooses block j
    first: Integers  # [blocks]
    width: int  # a power of 2
    variance: float
    near: Floats  # [blocks]: log p at the near end
    surely: Floats  # [blocks]: the probability with which every value of the block is accepted, at least

    @property
    def words(self) -> int:
        """How many words of 64 bits one trial takes."""
        return 3 if self.width > 1 else 1

    def values(self, words: Words) -> Integers:
        """Trials [words, n] -> the values that are accepted, [m]."""
        block = np.searchsorted(self.edges, words[0], "right")
        found: Integers = self.first[block]
        if self.width == 1:
            return found
        found += (words[1] & np.uint64(self.width - 1)).astype(np.int64)
        level = (words[2] >> np.uint64(11)) * 2.0**-53
        accepted: NDArray[np.bool_] = level < self.surely[block]
        open_ = np.flatnonzero(~accepted)
        ratio = np.exp(_log_probability(found[open_], self.variance) - self.near[block[open_]])
        accepted[open_] = level[open_] < ratio
        kept: Integers = found[accepted]
        return kept


@functools.lru_cache(maxsize=16)
def _table(variance: float) -> _Table:
    if not 0 < variance <= WIDEST**2:
        raise ValueError(f"the variance of the noise is {variance:g}; it is above 0 and at most {WIDEST**2:.2g}")
    if variance < EXACT:
        half = _bessel(variance)
        first = np.arange(1 - len(half), len(half))
        nothing = np.zeros(len(first))
        return _Table(_edges([*half[:0:-1], *half]), first, 1, variance, nothing, nothing + 1)
    deviation = math.sqrt(variance)
    width = 1 << math.floor(math.log2(deviation / PARTS))
    many = math.ceil(DEVIATIONS * deviation / width)
    first = np.arange(-many, many) * width
    ends = np.abs([first, first + (width - 1)])
    near, far = (_log_probability(end, variance) for end in (ends.min(0), ends.max(0)))
    edges = _edges([int(math.ldexp(weight, 120)) for weight in np.exp(near).tolist()])
    return _Table(edges, first, width, variance, near, np.exp(far - near) * (1 - 1e-9))


def _edges(weights: Sequence[int]) -> Words:
    """Where words of 64 bits pass from one choice to the next; integers, since sums of floats would be rounded."""
    total, below, edges = sum(weights), 0, []
    for weight in weights[:-1]:
        below += weight
        edges.append(min((below << 64) // total, (1 << 64) - 1))
    return np.array(edges, np.uint64)


def _bessel(variance: float) -> list[int]:
    """Integers in proportion to I_0(μ), I_1(μ), …, to 2^-100 or better (Miller's backward recurrence)."""
    over, under = variance.as_integer_ratio()
    values = [0, 1 << 128]
    for k in range(40 + math.ceil(DEVIATIONS * math.sqrt(variance)), 0, -1):
        values.append(values[-2] + 2 * k * under * values[-1] // over)
    return values[:0:-1]


def _log_probability(value: Integers, variance: float) -> Floats:
    """log p(k) + ½ log(2πμ) for a variance μ of `EXACT` or more, by Debye's expansion of I_k in powers of 1/√(k² + μ²).

    The first term left out is below 2^-52. Nothing is the difference of large numbers, however large μ is.
    """
    k = np.abs(value).astype(np.float64)
    x = k / variance
    root = np.sqrt(1 + x * x)
    q, r = (x / root) ** 2, 1 / (variance * root)
    series = (4465125 + q * (-94121676 + q * (349922430 + q * (-446185740 + q * 185910725)))) / 39813120
    series = (30375 + q * (-369603 + q * (765765 - q * 425425))) / 414720 + r * series
    series = (81 + q * (-462 + q * 385)) / 1152 + r * series
    series = (3 - 5 * q) / 24 + r * series
    logs: Floats = k * (x / (1 + root) - np.arcsinh(x)) - np.log1p(x * x) / 4 + np.log1p(r * series)
    return logs
