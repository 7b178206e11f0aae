"""Measure how far one record moves the sum of clipped gradients; C is the most that is allowed.

As a program it prints what it finds on this machine, with products in the precision that the engine sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedveil as fv
from fedveil import models
from fedveil.data import from_tensors
from fedveil.gpu.context import using
from fedveil.privacy.dpsgd import clipped_sum

CLIP = 0.37
LONG = 2_000_000  # features of a model of twice as many weights
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution")


def largest(task: fv.Task, records: int = 48) -> float:
    """The largest distance of a sum with a record from the sum without it, in clips."""
    rows = torch.arange(records, device=task.device)[None]
    x, y, weights = task.x[rows], task.y[rows], 3 * task.initial[None]
    everyone = torch.ones(1, records, device=task.device)
    total = clipped_sum(task, weights, x, y, everyone, CLIP)
    without = everyone - torch.eye(records, device=task.device)
    sums = torch.cat([clipped_sum(task, weights, x, y, mask[None], CLIP) for mask in without])
    alone = torch.cat([clipped_sum(task, weights, x, y, 1 - mask[None], CLIP) for mask in without])
    return float(torch.cat([total - sums, alone]).double().norm(dim=1).max()) / CLIP


def images(device: str) -> fv.Task:
    """A convolutional network at weights where each record's gradient is clipped."""
    draw = fv.Seed.root(0).torch()
    x, y = 2 * torch.randn(48, 1, 8, 8, generator=draw), torch.randint(0, 10, (48,), generator=draw)
    model = models.build("digits-cnn", (1, 8, 8), 10)
    models.initialise(model, fv.Seed.root(1))
    return _task(model, x, y, device)


def long(device: str) -> fv.Task:
    """A linear model of millions of weights, in whose gradients all numbers are equal up to their sign."""
    model = nn.Linear(LONG, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    return _task(model, torch.full((2, LONG), 0.37 * 2), torch.tensor([0, 1]), device)


def _task(model: nn.Module, x: Tensor, y: Tensor, device: str) -> fv.Task:
    data = from_tensors(x, y, x, y, classes=10 if x.dim() > 2 else 2)
    return fv.Task(model, data, fv.split("iid", data, 1, fv.Seed.root(0)), device=device)


class Tf32(TorchDispatchMode):
    """Products of float32 as a GPU's tensor cores make them: of factors rounded to 10 bits after the point."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__.split(".")[0] in PRODUCTS:
            args = tuple(_rounded(arg) if isinstance(arg, Tensor) else arg for arg in args)
        return func(*args, **(kwargs or {}))


def _rounded(factor: Tensor) -> Tensor:
    if factor.dtype != torch.float32:
        return factor
    return ((factor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def measured(device: str) -> dict[str, float]:
    """In clips: each is at most 1."""
    torch.set_float32_matmul_precision("high")  # as the engine has it
    figures = {"a convolutional network": largest(images(device)), "4 million weights": largest(long(device), 2)}
    if device == "cuda":
        with using(compile=True):
            figures["a convolutional network, compiled"] = largest(images(device))
    return figures


def plain_product() -> float:
    """What the same would be if the GPU multiplied the weights and the gradients of records: the test of the test."""
    gradients = torch.randn(64, 4096, device="cuda")
    factors = torch.diag(1 / gradients.norm(dim=1))  # a product of this size runs on tensor cores
    return float((factors @ gradients).double().norm(dim=1).max())


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, moved in measured(device).items():
        print(f"{name} on {device}: one record moves the sum by {moved:.9f} clips")
        assert moved <= 1
    if device == "cuda":
        print(f"a TF32 product of factors and gradients would reach {plain_product():.6f}")


if __name__ == "__main__":
    main()
