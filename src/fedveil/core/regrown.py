"""Directions as PyTorch tensors, and vectors regrown from coefficients along them: what BAFFLE and sketches share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedveil.core.directions import Directions
from fedveil.gpu import forward

WORDS = 1 << 14  # of directions, drawn at a time on a CPU, because caches are small


def rows(
    directions: Directions,
    keys: Tensor,
    first: int,
    count: int,
    span: tuple[int, int] | None = None,
    words: int = WORDS,
) -> Tensor:
    """Directions first … first + count - 1 of each key (int64 [C]), float32 [C, count, n or the length of `span`].

    words: how many words are drawn at a time on a CPU
    """
    if directions.law == "gaussian" and span is None and forward.available(keys):
        return forward.gaussians(keys, first, count, directions.size)
    piece = None if keys.is_cuda else max(1024, words // (len(keys) * count))
    found: Tensor = directions.rows(torch, keys, first, count, piece, span)
    return found


def pieces(directions: Directions, key: int, count: int, at_once: int, device: torch.device) -> Iterator[Tensor]:
    """The first `count` directions of a key, [at_once or fewer, n] at a time."""
    keys = torch.tensor([key], device=device)
    for first in range(0, count, at_once):
        yield rows(directions, keys, first, min(at_once, count - first))[0]


def combine(directions: Directions, key: int, coefficients: Tensor, at_once: int) -> Tensor:
    """Σ_k c_k z_k for coefficients [C, K] along the first K directions of a key, [C, n]."""
    total = coefficients.new_zeros(len(coefficients), directions.size)
    every = pieces(directions, key, coefficients.shape[1], at_once, coefficients.device)
    for part, z in zip(coefficients.split(at_once, 1), every, strict=True):
        total += part @ z
    return total
