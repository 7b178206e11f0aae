"""Gradient descent that stops at the edge of a ball: a trajectory, a client's radius and the server's training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedveil.graphs import repeat


def rates(lr: float, steps: int) -> Tensor:
    """A learning rate for each step, falling from `lr` to 0 along half a cosine: [steps]."""
    return lr * (1 + torch.cos(torch.arange(steps) * (math.pi / steps))) / 2


def descend(
    weights: Tensor,
    start: Tensor,
    reach: float,
    rates: Tensor,
    gradient: Callable[[], Tensor],
    watch: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """A step of each of `rates` by `weights` [C, d], in place; who is `reach` away from `start` [d] stays there.

    `gradient` gives the present one, [C, d]. `watch` gets the distances [C] after each step. Returns the steps taken,
    [C].
    """
    rates = rates.to(weights)
    cursor = torch.zeros(1, dtype=torch.int64, device=weights.device)
    away: Tensor = torch.linalg.vector_norm(weights - start, dim=1)
    taken = torch.zeros_like(away)

    def step() -> None:
        within = (away < reach).to(weights.dtype)
        weights.sub_(rates.index_select(0, cursor) * within[:, None] * gradient())
        away.copy_(torch.linalg.vector_norm(weights - start, dim=1))
        taken.add_(within)
        cursor.add_(1)
        if watch:
            watch(away)

    repeat(step, len(rates), weights.device)
    return taken
