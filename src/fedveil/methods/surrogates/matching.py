"""Gradient matching: how far the gradient of a synthetic set is from the real one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedveil.core.layout import Layout
from fedveil.core.task import Task

DISTANCES = ("averaged", "paper", "mse")
SMALLEST = 1e-4  # of the whole gradient is a row that counts: a bias before a normalisation has nothing but rounding


def distance(layout: Layout, synthetic: Tensor, real: Tensor, mse: float, kind: str) -> tuple[Tensor, Tensor]:
    """Between gradients [C, d] and [C, d], a number a client, [C]: cosine distances of output rows + `mse` ×
    ‖difference‖² (FedLAP-DP, eqs. 9 and 10). And its gradient with respect to `synthetic`, [C, d], written out:
    autograd would launch three times as many kernels.

    A row is what leads to one output: of a weight [out, …] the first dimension counts rows, a bias [out] is one row.
    One whose norm is below `SMALLEST` of its whole gradient counts as if it had that norm. The kinds are

    averaged  the mean over a layer's rows, summed over layers, each bias and norm a layer of its own
    paper     the sum over all rows of weights; biases and norms have no rows
    mse       no cosine distance
    """
    difference = synthetic - real
    apart, slope = mse * difference.square().sum(1), 2 * mse * difference
    if kind == "mse":
        return apart, slope
    ours, theirs = _rows(layout, synthetic), _rows(layout, real)
    counts = [a.shape[1] for a in ours]
    divisors = [_divisor(rows, layer.shape, kind) for rows, layer in zip(counts, layout.layers, strict=True)]
    (norms, one), (_, other) = _lengths(synthetic, ours), _lengths(real, theirs)
    cosine = torch.cat([(a * b).sum(2) for a, b in zip(ours, theirs, strict=True)], 1) / (one * other)
    layers = torch.stack([part.sum(1) / by for part, by in zip((1 - cosine).split(counts, 1), divisors, strict=True)])
    lengthwise = torch.where(norms < one, 0, cosine / one.square())  # 0 where a row's own norm does not count
    parts = zip(ours, theirs, lengthwise.split(counts, 1), (1 / (one * other)).split(counts, 1), divisors, strict=True)
    slopes = [((p[..., None] * a - q[..., None] * b) / by).flatten(1) for a, b, p, q, by in parts]
    return apart + layers.sum(0), slope + torch.cat(slopes, 1)


def _divisor(rows: int, shape: tuple[int, ...], kind: str) -> float:
    """What the distances of a layer's rows are divided by."""
    if kind == "averaged":
        return rows
    return 1 if len(shape) > 1 else math.inf


def _rows(layout: Layout, gradient: Tensor) -> list[Tensor]:
    """[C, d] -> [C, rows, n] of each layer."""
    return [t.flatten(2) if t.dim() > 2 else t[:, None] for t in layout.split(gradient).values()]


def _lengths(gradient: Tensor, layers: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The norm of each row of all layers, [C, R], and what counts as its norm, [C, R]."""
    norms = torch.cat([torch.linalg.vector_norm(rows, dim=2) for rows in layers], 1)
    least = SMALLEST * torch.linalg.vector_norm(gradient, dim=1, keepdim=True).clamp(min=1e-2)
    return norms, torch.maximum(norms, least)


def matched(
    task: Task, mse: float, kind: str, weights: Tensor, images: Tensor, labels: Tensor, goal: Tensor
) -> tuple[Tensor, Tensor]:
    """The distance between the gradients of `images` [C, points, …] at `weights` [C, d] and `goal` [C, d], and before
    it its gradient with respect to the images: [C, points, …], [C]."""
    here, points = weights.detach().requires_grad_(), images.detach().requires_grad_()
    mean = task.stacked_losses(here, points, labels).mean(1)
    (gradient,) = torch.autograd.grad(mean.sum(), here, create_graph=True)
    found, by_gradient = distance(task.layout, gradient.detach(), goal, mse, kind)
    (slope,) = torch.autograd.grad(gradient, points, by_gradient)
    return slope, found
