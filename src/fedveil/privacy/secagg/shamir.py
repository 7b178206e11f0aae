"""Shamir's secret sharing of 32-byte secrets over the smallest prime field that holds every one of them.

A secret is the value at 0 of a random polynomial of degree t - 1, a share its value at x = 1, 2, …: t shares give the
polynomial and fewer give nothing at all (Shamir 1979).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes


def share(secret: bytes, t: int, points: Sequence[int]) -> list[bytes]:
    """Shares of a secret at `points` (distinct, from 1), any t of which recover it."""
    if len(secret) != SECRET or not 1 <= t <= len(points) or min(points) < 1:
        raise ValueError(f"a secret has {SECRET} bytes, and of shares at points from 1 on there are at least t")
    coefficients = [int.from_bytes(secret, "little"), *(secrets.randbelow(PRIME) for _ in range(t - 1))]
    coefficients.reverse()
    shares = []
    for x in points:
        value = 0
        for c in coefficients:  # Horner's rule; x is small, so reducing once at the end is cheaper than every time
            value = value * x + c
        shares.append((value % PRIME).to_bytes(SHARE, "little"))
    return shares


def recover(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret behind shares by point, or None if they are of no 32-byte secret."""
    points = tuple(shares)
    value = sum(w * int.from_bytes(s, "little") for w, s in zip(_lagrange(points), shares.values(), strict=True))
    value %= PRIME
    return value.to_bytes(SECRET, "little") if value < 1 << 8 * SECRET else None


@functools.lru_cache(4096)
def _lagrange(points: tuple[int, ...]) -> list[int]:
    """The weights with which values at these points give the value at 0."""
    weights = []
    for x in points:
        above = below = 1
        for y in points:
            if y != x:
                above, below = above * y, below * (y - x)
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights
