"""Random numbers for differential privacy, from a secret of the operating system. Clients without PyTorch share this
module: `xp` is `numpy` or `torch`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.privacy import skellam
from fedveil.privacy.secagg import masks

GRID = 2.0**30  # units that C is where numbers are whole: sums of 2^22 records are exact in float64
WITHIN = 1 - 1e-5  # of C is what a record is clipped to: float64 sums of 2^40 numbers are off by less


def words(secret: bytes, count: int) -> NDArray[np.int64]:
    """64 bits each from a ChaCha20 stream, [count]."""
    stream = np.zeros(count, np.uint64)
    masks.mask(stream, [masks.derive(secret, b"fedveil differential privacy")])
    return stream.view(np.int64)


def uniform(xp: Any, drawn: Any) -> Any:
    """What 53 bits of each of the words say, from 0 to below 1."""
    return xp.asarray((drawn >> 11) & (2**53 - 1), dtype=xp.float64) * 2.0**-53


def normal(xp: Any, drawn: Any) -> Any:
    """Standard normal numbers of an even number of words (Box and Muller)."""
    half = len(drawn) // 2
    first, second = uniform(xp, drawn[:half]), uniform(xp, drawn[half:])
    radius, angle = xp.sqrt(-2 * xp.log1p(-first)), (2 * math.pi) * second
    return xp.concatenate([radius * xp.cos(angle), radius * xp.sin(angle)])


def whole_noise(secret: bytes, sigma: float, count: int) -> NDArray[np.int64]:
    """Skellam noise of deviation σ, in units of which C is `GRID`."""
    key = masks.derive(secret, b"fedveil Skellam noise of records")
    return skellam.draw(key, (sigma * GRID) ** 2, count)


def even(count: int) -> int:
    return count + count % 2
