"""Records of different lengths: rows of tokens that a padding token fills up on the right.

A model whose output does not depend on the padding gives the same for a batch that is cut to its longest record.
"""

from __future__ import annotations

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
