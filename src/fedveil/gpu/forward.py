"""Convolutions of a stack of models as one kernel each, for GPUs and where nothing is differentiated.

Probes run a model forward only. A product of windows then writes and reads again as much as it computes. Here pictures
are read where they are, those of a stack that shares them once for all, and each result is one sum in a fixed order, so
that runs repeat bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fedveil.gpu.context import current
from fedveil.gpu.graphs import traced
from fedveil.gpu.windows import Window, kernels

PRECISION = torch.float16  # of convolutions; in float32 products of windows are as fast or faster
PLACES = 128  # a program of a convolution
WORDS = 1024  # a program that draws
DEPTH = 128  # bytes of channels it reads at a time, at most


def available(t: Tensor) -> bool:
    """Whether there are kernels for a tensor."""
    return t.is_cuda and current().kernels and kernels() is not None


def usable(x: Tensor) -> bool:
    """Whether these kernels may stand in for layers that can be differentiated."""
    return not (torch.is_grad_enabled() or traced()) and available(x)


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Pictures [B, I, H, W] and weights [O, I, kh, kw] -> [B, O, rows, columns], summed in float32."""
    rows = weight.movedim(1, -1).flatten(1)  # channels last: a program takes many of them at one place of the window
    result: Tensor = convolved(x, rows, None if bias is None else bias.expand(len(weight)), window)
    return result


@custom_op("fedveil::convolved", mutates_args=())
def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int]) -> Tensor:
    """x […, B, I, H, W], weight […, O, kh·kw·I] and bias […, O] -> […, B, O, rows, columns]."""
    *stack, batch, channels, height, width = x.shape
    outputs, rows, columns = weight.shape[-2], *Window(*window).over(height, width)
    result = x.new_empty(*stack, batch, outputs, rows, columns)
    x, weight, bias = pair(x, 4), pair(weight, 2), bias if bias is None else pair(bias, 1)
    places, wide, deep = (
        batch * rows * columns,
        max(16, min(128, power(outputs))),
        math.gcd(channels, DEPTH * 2 // x.element_size()),
    )
    kernels().convolve[(math.prod(stack) * -(-places // PLACES) * -(-outputs // wide),)](
        x, weight, bias, result, x.shape[1], places, *x.stride()[:3], *weight.stride(), *_strides(bias),
        *x.stride()[3:], channels, outputs, height, width, rows, columns, *window,
        PLACES, wide, deep if deep >= 16 else 32, multiplied(x.dtype), num_warps=8 if wide == 128 else 4,
    )  # fmt: skip
    return result


@convolved.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, window: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:-3], weight.shape[-2], *Window(*window).over(*x.shape[-2:]))


@convolved.register_vmap
def _(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
    return convolved(*(stacked(t, dim, info.batch_size) for t, dim in zip(inputs, dims, strict=True))), 0


def gaussians(keys: Tensor, first: int, count: int, size: int) -> Tensor:
    """`Directions.rows` of the gaussian law in one kernel: keys int64 [C] -> [C, count, size]."""
    rows = torch.empty(len(keys), count, size, device=keys.device)
    per = -(-size // 2)
    kernels().gaussians[(len(keys) * count, -(-per // WORDS))](keys.contiguous(), rows, size, per, first, count, WORDS)
    return rows


def multiplied(dtype: torch.dtype) -> str:
    """How a kernel multiplies numbers of this type: float32 as TF32, or as three such products if PyTorch may not."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def stacked(t: Any, dim: int | None, size: int) -> Any:
    """A tensor under `vmap` with its stack dimension first, or with one if it has none; other things as they are."""
    if not isinstance(t, Tensor):
        return t
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def pair(t: Tensor, own: int) -> Tensor:
    """[…, *own] -> [G, k, *own]: two stack dimensions, so that neither is copied where it is shared."""
    stack = t.dim() - own
    return t[(None,) * (2 - stack)] if stack < 2 else t.flatten(0, stack - 2)


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if t is None else t.stride()


def power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
