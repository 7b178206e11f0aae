"""Directions regrown from a key: the same on a server, a client, a GPU, and in NumPy on a device without PyTorch.

Word n of a key is SplitMix64 (Steele et al. 2014) at place n: mix(key + (n + 1) γ) in 64 bits that wrap. There is no
state, so any direction can be had without the ones before it, and none is ever stored. What makes arrays takes `xp`,
either `numpy` or `torch`, and computes with that library's int64 alone; words and signs are the same bit for bit in
both, Gaussians up to the rounding of a logarithm and a cosine. Where all sides must hold the same bits (`combined`),
Gaussians are made of sums, products and quotients only, which IEEE 754 rounds alike everywhere. This module imports
neither library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as an int64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
LAWS = ("gaussian", "rademacher", "orthogonal")
_LOW = (1 << 24) - 1
_FRACTION, _ONE = (1 << 52) - 1, 1023 << 52  # of a float64: the bits behind the point, and those of 1.0
_ROOT_2, _LOG_2 = 1.4142135623730951, 0.6931471805599453  # written out, because libraries may round them apart
AT_ONCE = 1 << 16  # numbers of directions that are regrown at once to be added up


def words(keys: Any, places: Any) -> Any:
    """Word `places` of each key: int64 arrays that broadcast against each other, of at least one dimension."""
    return _mix(keys + (places + 1) * GAMMA)


def _mix(z: Any) -> Any:
    z = (z ^ _right(z, 30)) * _FIRST
    z = (z ^ _right(z, 27)) * _SECOND
    return z ^ _right(z, 31)


def _right(z: Any, bits: int) -> Any:
    """A shift to the right that fills with zeros, which int64 has none of."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def order(xp: Any, keys: Any, count: int) -> Any:
    """0 … count - 1 in an order of each key's own, [C, count]: keys int64 [C]. Its first m are a draw of m."""
    drawn = words(words(keys, xp.arange(-2, -1, device=keys.device))[:, None], xp.arange(count, device=keys.device))
    return xp.argsort(drawn, -1)


@dataclass(frozen=True)
class Directions:
    """A law of random directions in n dimensions with E[z zᵀ] = I.

    gaussian:   z ~ N(0, I), two Gaussians a word (Box & Muller 1958), each |z_i| below 5.8
    rademacher: signs, 64 a word
    orthogonal: z_k = s_i H[k mod B, i mod B] with Sylvester's Hadamard matrix H and random signs s, which are drawn
                anew for every B directions. Those B are orthogonal if B divides n; else z_k · z_l is at most n mod B
                instead of 0, where signs drawn at random have √n. B is `block`, a power of two.
    """

    law: str
    size: int  # n
    block: int = 1

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ValueError(f"the law of directions is '{self.law}'; use {', '.join(LAWS[:-1])} or {LAWS[-1]}")

    @staticmethod
    def of(law: str, size: int, count: int) -> Directions:
        """With blocks that hold all of `count` directions, as far as there are as many dimensions."""
        block = 1 << min(max(count - 1, 0).bit_length(), size.bit_length() - 1)
        return Directions(law, size, block)

    def combined(self, xp: Any, key: Any, coefficients: Sequence[float], piece: int | None = None) -> Any:
        """Σ_k c_k z_k along the first directions of a key (int64 [1]) for float32 numbers c, float32 [n].

        It is the same bit for bit in both libraries and with any number of threads: each product is exact in float64,
        the sum goes from the first to the last, and is rounded once.
        """
        total = xp.zeros(self.size, dtype=xp.float64, device=key.device)
        at_once = max(1, AT_ONCE // self.size)
        for first in range(0, len(coefficients), at_once):
            some = coefficients[first : first + at_once]
            for c, z in zip(some, self.rows(xp, key, first, len(some), piece, exact=True)[0], strict=True):
                total += c * xp.asarray(z, dtype=xp.float64)
        return xp.asarray(total, dtype=xp.float32)

    def rows(
        self,
        xp: Any,
        keys: Any,
        first: int,
        count: int,
        piece: int | None = None,
        span: tuple[int, int] | None = None,
        exact: bool = False,
    ) -> Any:
        """Directions first … first + count - 1 of each of C keys (int64 [C]), float32 [C, count, n].

        `piece` is how many words of a direction are drawn at a time, which takes less memory than all of them.
        `span` is from which entry of a direction to which: [C, count, stop - start] instead of all n.
        With `exact` Gaussians are the same bit for bit in both libraries, which takes longer.
        """
        start, stop = span or (0, self.size)
        numbers = xp.arange(first, first + count, device=keys.device)[:, None]
        of = numbers // self.block if self.law == "orthogonal" else numbers
        per = -(-self.size // (2 if self.law == "gaussian" else 64))
        rows = xp.empty((len(keys), count, stop - start), dtype=xp.float32, device=keys.device)
        begin, end = self._words(start, stop, per)
        for low in range(begin, end, piece or end - begin):
            high = min(low + (piece or end - begin), end)
            drawn = words(keys[:, None, None], of * per + xp.arange(low, high, device=keys.device))
            if self.law == "gaussian":  # all cosines, then all sines
                cosines, sines = (_exact_gaussians if exact else _gaussians)(xp, drawn)
                _put(rows, cosines, low - start)
                _put(rows, sines, per + low - start)
            else:
                signs = _signs(xp, drawn)
                if self.law == "orthogonal":
                    places = xp.arange(64 * low, 64 * high, device=keys.device)
                    signs = signs * _hadamard(xp, numbers % self.block, self.block)[:, places % self.block]
                _put(rows, signs, 64 * low - start)
        return rows

    def _words(self, start: int, stop: int, per: int) -> tuple[int, int]:
        """From which word of a direction to which its entries start … stop - 1 are drawn."""
        if self.law != "gaussian":
            return start // 64, -(-stop // 64)
        if start < per < stop:  # cosines from `start` on, sines up to `stop`
            return 0, per
        return (start, stop) if stop <= per else (start - per, stop - per)


def _put(rows: Any, values: Any, at: int) -> None:
    """Write values […, m] to rows from place `at` on, as far as there are such places."""
    low, high = max(at, 0), min(at + values.shape[-1], rows.shape[-1])
    if low < high:
        rows[..., low:high] = values[..., low - at : high - at]


def _gaussians(xp: Any, drawn: Any) -> tuple[Any, Any]:
    """Words -> two arrays of independent Gaussians, float32."""
    radius = xp.asarray(_right(drawn, 40) + 1, dtype=xp.float32) * 2.0**-24  # from (0, 1]
    angle = xp.asarray(drawn & _LOW, dtype=xp.float32) * (2.0**-24 * 6.283185307179586)
    radius = xp.sqrt(-2 * xp.log(radius))
    return radius * xp.cos(angle), radius * xp.sin(angle)


def _exact_gaussians(xp: Any, drawn: Any) -> tuple[Any, Any]:
    """The same to 2⁻²⁴ of each number and better, by operations that round alike everywhere."""
    radius = root(xp, -2 * _logarithm(xp, _right(drawn, 40) + 1))
    turn = drawn & _LOW
    quarter = (turn + (1 << 21)) >> 22
    angle = xp.asarray(turn - (quarter << 22), dtype=xp.float64) * (2.0**-24 * 2 * math.pi)  # from -π/4 to below π/4
    square = angle * angle
    cosine = _horner(square, [(-1) ** i / math.factorial(2 * i) for i in range(7)])
    sine = angle * _horner(square, [(-1) ** i / math.factorial(2 * i + 1) for i in range(6)])
    swapped = (quarter & 1) == 1
    negative = [xp.asarray(1 - 2 * ((k >> 1) & 1), dtype=xp.float64) for k in (quarter + 1, quarter)]
    return radius * xp.where(swapped, sine, cosine) * negative[0], radius * xp.where(swapped, cosine, sine) * negative[
        1
    ]


def _logarithm(xp: Any, whole: Any) -> Any:
    """log(m 2⁻²⁴) for whole numbers m from 1 to 2²⁴, in float64: m is 2^e f with f from 1/√2 to √2, and log f is the
    series of 2 artanh((f - 1) / (f + 1))."""
    bits = xp.asarray(whole, dtype=xp.float64).view(xp.int64)
    fraction = ((bits & _FRACTION) | _ONE).view(xp.float64)
    large = fraction > _ROOT_2
    fraction = xp.where(large, fraction * 0.5, fraction)
    exponent = xp.asarray(((bits >> 52) - (1023 + 24)) + large, dtype=xp.float64)
    s = (fraction - 1) / (fraction + 1)
    return exponent * _LOG_2 + 2 * s * _horner(s * s, [1 / (2 * i + 1) for i in range(7)])


def root(xp: Any, x: Any) -> Any:
    """√x of float64 numbers from 0 on, within 10⁻¹¹ of it, by operations that round alike everywhere: libraries do not
    round roots alike. Heron's method begins with half the exponent, within 6%; √0 is below 10⁻¹⁵⁰."""
    near = (((x.view(xp.int64) & (2**63 - 1)) >> 1) + (_ONE >> 1)).view(xp.float64)
    for _ in range(3):
        near = (near + x / near) * 0.5
    return near


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    """c_0 + c_1 x + c_2 x² + …"""
    value = x * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        value = (value + c) * x
    return value + coefficients[0]


def _signs(xp: Any, drawn: Any) -> Any:
    """[…, m] words -> […, 64 m] signs: bit i of a word is that of its place i."""
    bits = (drawn.view(xp.uint8)[..., None] >> xp.arange(8, dtype=xp.uint8, device=drawn.device)) & 1
    return 1 - 2 * xp.asarray(bits.reshape(*drawn.shape[:-1], -1), dtype=xp.float32)


def _hadamard(xp: Any, numbers: Any, block: int) -> Any:
    """Rows `numbers` [k, 1] of Sylvester's matrix, [k, block]: -1 where row and column share an odd number of bits."""
    odd = numbers & xp.arange(block, device=numbers.device)
    for shift in (32, 16, 8, 4, 2, 1):
        odd = odd ^ (odd >> shift)
    return xp.asarray(1 - 2 * (odd & 1), dtype=xp.float32)
