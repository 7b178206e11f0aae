"""Directions regrown from a key: the same on a server, a client, a GPU, and in NumPy on a device without PyTorch.

Word n of a key is SplitMix64 (Steele et al. 2014) at place n: mix(key + (n + 1) γ) in 64 bits that wrap. There is no
state, so any direction can be had without the ones before it, and none is ever stored. What makes arrays takes `xp`,
either `numpy` or `torch`, and computes with that library's int64 alone; words and signs are the same bit for bit in
both, Gaussians up to the rounding of a logarithm and a cosine. This module imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as an int64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
LAWS = ("gaussian", "rademacher", "orthogonal")
_LOW = (1 << 24) - 1


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

    def rows(
        self, xp: Any, keys: Any, first: int, count: int, piece: int | None = None, span: tuple[int, int] | None = None
    ) -> Any:
        """Directions first … first + count - 1 of each of C keys (int64 [C]), float32 [C, count, n].

        `piece` is how many words of a direction are drawn at a time, which takes less memory than all of them.
        `span` is from which entry of a direction to which: [C, count, stop - start] instead of all n.
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
                cosines, sines = _gaussians(xp, drawn)
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
