"""How many records of each class a batch has, read off the last layer's gradient.

With cross-entropy the gradient of the last layer's bias is g_i = p̄_i - n_i/n: the mean probability of class i less its
share of the batch. For one record its label is the only negative entry (iDLG, Zhao et al. 2020). For a batch
n_i = n (p̄_i - g_i), where p̄ is estimated at the same weights on random records (as LLG-RND, Wainakh et al. 2022,
estimates the impact of a label).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.attacks.inversion import Target, as_gradient
from fedveil.core.layout import Layer
from fedveil.core.seeds import Seed
from fedveil.core.task import Task

RANDOM = 256  # records on which probabilities are estimated


@dataclass(frozen=True)
class Labels:
    """Label counts [V, classes], whose rows sum to n, and the labels themselves [V, n], sorted."""

    counts: Tensor
    y: Tensor


def count(task: Task, target: Target, seed: Seed) -> Labels:
    """Estimate the labels of each victim's records. For updates of several steps g is their mean gradient."""
    classes, n = task.data.classes, target.records
    if not task.data.labelled or classes < 2:
        raise ValueError("Label counts need one class label a record, and this task has other targets.")
    weight, bias = last_layer(task)
    g = as_gradient(target).to(task.device)
    if n == 1:
        score = -_one(g, weight, bias, classes)
        return _filled(F.one_hot(score.argmax(1), classes), 1)
    x = torch.randn(RANDOM, *task.data.input, generator=seed.child("random").torch()).to(task.device)
    if not task.data.x.is_floating_point():
        raise ValueError("Label counts of a batch need records of real numbers, and these are tokens.")
    weights = target.weights.to(task.device)
    moved = weights + target.vector.to(task.device) if target.means == "update" else weights
    mean = (_probabilities(task, weights, x) + _probabilities(task, moved, x)) / 2  # [V, classes]
    slope = g[:, bias.start : bias.stop] if bias else _sums(g, weight, classes) / _scale(task, weights, x, weight, seed)
    return _filled(allot(n * (mean - slope), slope < 0, n), n)


def last_layer(task: Task) -> tuple[Layer | None, Layer | None]:
    """The places of the weight [classes, features] and of the bias [classes] of the last layer, of which one may be
    missing."""
    layers, classes = task.layout.layers, task.data.classes
    bias = next((layer for layer in reversed(layers) if layer.shape == (classes,)), None)
    weight = next((layer for layer in reversed(layers) if len(layer.shape) == 2 and layer.shape[0] == classes), None)
    if bias and weight and bias.start < weight.start:
        bias = None  # of an earlier layer
    if not (bias or weight):
        raise ValueError(f"Label counts need a last layer of {classes} outputs, one a class; this model has none.")
    return weight, bias


def allot(wanted: Tensor, present: Tensor, n: int) -> Tensor:
    """Whole numbers [V, classes] near `wanted` whose rows sum to n.

    present: the classes that certainly occur, as their gradient is negative; each gets one record first, the most
             wanted ones before others
    """
    first = torch.where(present, wanted, -torch.inf)
    rank = first.argsort(1, descending=True).argsort(1)
    counts = (present & (rank < n)).long()
    for _ in range(n):
        left = (counts.sum(1) < n).long()
        best = (wanted - counts).argmax(1, keepdim=True)
        counts.scatter_add_(1, best, left[:, None])
    return counts


def _one(g: Tensor, weight: Layer | None, bias: Layer | None, classes: int) -> Tensor:
    """p - 1[y] of one record up to a factor above 0, [V, classes]."""
    if bias:
        return g[:, bias.start : bias.stop]
    assert weight
    slopes = g[:, weight.start : weight.stop].view(len(g), classes, -1)  # (p - 1[y]) hᵀ
    left: Tensor = torch.linalg.svd(slopes, full_matrices=False)[0][:, :, 0]
    largest = left.gather(1, left.abs().argmax(1, keepdim=True))
    return left * -largest.sign()  # the entry of the label is as large as all others together, and negative


def _sums(g: Tensor, weight: Layer | None, classes: int) -> Tensor:
    assert weight
    return g[:, weight.start : weight.stop].view(len(g), classes, -1).sum(2)


def _scale(task: Task, weights: Tensor, x: Tensor, weight: Layer | None, seed: Seed) -> Tensor:
    """By how much sums over the rows of the last layer's gradient exceed p̄ - n/N, [V, 1]: measured on random records
    with random labels."""
    classes, victims = task.data.classes, len(weights)
    y = torch.from_numpy(seed.child("labels").numpy().integers(classes, size=len(x))).to(x.device)
    several, marks = x.expand(victims, *x.shape), y.expand(victims, -1)
    g, _ = task.gradient(weights, several, marks, torch.ones(marks.shape, device=x.device))
    true = _probabilities(task, weights, x) - F.one_hot(y, classes).float().mean(0)
    scale = (_sums(g, weight, classes) * true).sum(1, keepdim=True) / true.square().sum(1, keepdim=True)
    return torch.where(scale.abs() < 1e-12, torch.ones_like(scale), scale)


@torch.no_grad()
def _probabilities(task: Task, weights: Tensor, x: Tensor) -> Tensor:
    """The mean probability of each class on records x [B, *input] at weights [V, d], [V, classes]."""
    logits: Tensor = task.stacked(task.f)(weights, x.expand(len(weights), *x.shape))
    return logits.softmax(2).mean(1)


def _filled(counts: Tensor, n: int) -> Labels:
    kinds = torch.arange(counts.shape[1], device=counts.device)
    return Labels(counts, torch.stack([kinds.repeat_interleave(own, output_size=n) for own in counts]))
