"""Gradient matching: how far the gradient of a synthetic set is from the real one."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.task import Layout, Task

SMALLEST = 1e-4  # of the whole gradient is a row that counts: a bias before a normalisation has nothing but rounding


def distance(layout: Layout, synthetic: Tensor, real: Tensor, mse: float) -> Tensor:
    """Between gradients [C, d] and [C, d], a number a client, [C]: the cosine distance of each output row, averaged
    over a layer's rows and summed over layers, + `mse` × ‖difference‖² (FedLAP-DP, eqs. 9 and 10).

    A row is what leads to one output: of a weight [out, …] the first dimension counts rows, a bias [out] is one row.
    One whose norm is below `SMALLEST` of its whole gradient counts as if it had that norm.
    """
    apart = mse * (synthetic - real).square().sum(1)
    floors = [SMALLEST * torch.linalg.vector_norm(t.detach(), dim=1, keepdim=True) for t in (synthetic, real)]
    for layer in zip(layout.split(synthetic).values(), layout.split(real).values(), strict=True):
        a, b = (t.flatten(2) if t.dim() > 2 else t[:, None] for t in layer)  # [C, rows, n]
        one, other = (
            torch.maximum(torch.linalg.vector_norm(t, dim=2), floor.clamp(min=1e-6))
            for t, floor in zip((a, b), floors, strict=True)
        )
        apart = apart + (1 - (a * b).sum(2) / (one * other)).mean(1)
    return apart


def matched(
    task: Task, mse: float, weights: Tensor, images: Tensor, labels: Tensor, goal: Tensor
) -> tuple[Tensor, Tensor]:
    """The distance between the gradients of `images` [C, points, …] at `weights` [C, d] and `goal` [C, d], and before
    it its gradient with respect to the images: [C, points, …], [C]."""
    here, points = weights.detach().requires_grad_(), images.detach().requires_grad_()
    mean = task.stacked_losses(here, points, labels).mean(1)
    (gradient,) = torch.autograd.grad(mean.sum(), here, create_graph=True)
    found = distance(task.layout, gradient, goal, mse)
    (slope,) = torch.autograd.grad(found.sum(), points)
    return slope, found.detach()
