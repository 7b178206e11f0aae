"""Records of different lengths: rows of tokens that a padding token fills up on the right.

A model whose output does not depend on the padding gives the same for a batch that is cut to its longest record.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MULTIPLE = 8  # lengths are rounded up to it, so that few shapes occur


def lengths(x: Tensor, padding: int) -> Tensor:
    """The number of tokens of each record before its padding: x [..., T] -> int64 [...]."""
    places = torch.arange(1, x.shape[-1] + 1, device=x.device)
    return ((x != padding) * places).amax(-1)


def trimmed(x: Tensor, padding: int) -> Tensor:
    """Cut records [..., T] to the longest of them, rounded up to a multiple of `MULTIPLE`."""
    longest = max(1, int(lengths(x, padding).max()))
    return x[..., : -(-longest // MULTIPLE) * MULTIPLE]


def batches(x: Tensor, padding: int | None, size: int, cut: int) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """Which records each batch of x [n, …] has, and the records: `size` of them in the order of x.

    With padding there are `cut` records in a batch, of like length, and they are cut to the longest.
    """
    if padding is None:
        for start in range(0, len(x), size):
            yield slice(start, start + size), x[start : start + size]
        return
    for rows in lengths(x, padding).argsort(stable=True).split(cut):
        yield rows, trimmed(x[rows], padding)
