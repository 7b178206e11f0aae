"""Gradient descent that stops at the edge of a ball: a trajectory, a client's radius and the server's training."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedveil.gpu.graphs import Loop

CHECKED = 10  # steps between two looks at whether anybody is still within


DESCENTS = ("monotone", "plain")


def rates(lr: float, steps: int, descent: str = "monotone") -> Tensor:
    """A learning rate for each step, [steps]: falling from `lr` to 0 along half a cosine, or "plain": always `lr`."""
    if descent == "plain":
        return torch.full((steps,), lr)
    return lr * (1 + torch.cos(torch.arange(steps) * (math.pi / steps))) / 2


def descend(
    weights: Tensor,
    start: Tensor,
    reach: float,
    rates: Tensor,
    gradient: Callable[[Tensor], tuple[Tensor, ...]],
    watch: Callable[[Tensor], None] | None = None,
    descent: str = "monotone",
) -> tuple[Tensor, Tensor]:
    """A step of each of `rates` by `weights` [C, d], in place; who is `reach` away from `start` [d] stays there.

    `gradient` maps weights [C, d] to the gradient [C, d] and the loss [C] there. A step that does not lower the loss is
    not taken and halves that client's later ones: a rate that suits the first round overshoots in later ones, and a
    small region can end before the loss falls again. A "plain" descent takes every step that leads to a finite loss, as
    FedLAP-DP's algorithms do. `watch` gets the distances [C] after each step. Returns the steps
    taken and those tried, [C] each.
    """
    away: Tensor = torch.linalg.vector_norm(weights - start, dim=1)
    taken, tried = torch.zeros_like(away), torch.zeros_like(away)
    if not len(rates):
        return taken, tried
    rates, scale = rates.to(weights), torch.ones_like(away)
    cursor = torch.zeros(1, dtype=torch.int64, device=weights.device)
    slope, loss = (t.clone() for t in gradient(weights))

    def step() -> None:
        within = away < reach
        moved = weights - (rates.index_select(0, cursor) * scale * within)[:, None] * slope
        there, found = gradient(moved)
        accepted = within & (found.isfinite() if descent == "plain" else found < loss)
        weights.copy_(torch.where(accepted[:, None], moved, weights))
        slope.copy_(torch.where(accepted[:, None], there, slope))
        loss.copy_(torch.where(accepted, found, loss))
        scale.copy_(torch.where(within & ~accepted, scale / 2, scale))
        away.copy_(torch.linalg.vector_norm(weights - start, dim=1))
        taken.add_(accepted)
        tried.add_(within)
        cursor.add_(1)
        if watch:
            watch(away)

    loop = Loop(step, len(rates), weights.device, (0, len(rates)))
    for first in range(0, len(rates), CHECKED):
        if not (away < reach).any():
            break
        loop.run(min(CHECKED, len(rates) - first))
    return taken, tried
