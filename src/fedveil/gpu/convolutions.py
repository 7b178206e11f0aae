"""Convolutions of a stack of models with their derivatives, which write no windows, as kernels for GPUs.

A convolution, its gradient by the pictures and its gradient by the weights are each other's derivatives, as the three
products of products.py are. With a stride of 1 the second is a convolution with the weights turned around. Each result
is one sum in a fixed order, so that runs repeat bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from fedveil.gpu import forward
from fedveil.gpu.context import current
from fedveil.gpu.windows import Window, kernels

CHANNELS = 4  # in and out, at least: the windows of fewer are small, and a kernel multiplies 16 at a time
DEPTH = 32  # places that a program reads at a time


def usable(x: Tensor, weight: Tensor, window: Window) -> bool:
    """Whether to use these kernels for pictures [B, I, H, W] and weights [O, I, kh, kw].

    They take seconds to make, so they are used where `--compile` asks for that."""
    outputs, channels = weight.shape[:2]
    plain = x.dtype == weight.dtype == torch.float32 and x.shape[1] == channels and min(outputs, channels) >= CHANNELS
    inside = window.ph < window.kh and window.pw < window.kw and min(window.over(*x.shape[2:])) > 0
    fast = torch.get_float32_matmul_precision() != "highest" and not torch.is_autocast_enabled(x.device.type)
    return current().compile and plain and inside and fast and window.sh == window.sw == 1 and forward.available(x)


def conv2d(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Pictures [B, I, H, W] and weights [O, I, kh, kw] -> [B, O, rows, columns]."""
    return _Forward.of(weight.movedim(1, -1).flatten(1), x, window)


class _Convolution(torch.autograd.Function):
    """One of three convolutions that are each other's derivatives. Weights […, O, kh·kw·I] have channels last, pictures
    are […, B, I, H, W] and results […, B, O, rows, columns]."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Window], output: Tensor) -> None:
        *tensors, ctx.window = inputs
        ctx.save_for_backward(*tensors)

    @classmethod
    def of(cls, a: Tensor, b: Tensor, window: Window) -> Tensor:
        return cast(Tensor, cls.apply(a, b, window))  # type: ignore[no-untyped-call]

    @classmethod
    def vmap(cls, info: Any, dims: tuple[int | None, ...], a: Tensor, b: Tensor, window: Window) -> tuple[Tensor, int]:
        a, b = (forward.stacked(t, dim, info.batch_size) for t, dim in zip((a, b), dims, strict=False))
        return cls.of(a, b, window), 0


class _Forward(_Convolution):
    """What a layer gives, of its weights and pictures."""

    @staticmethod
    def forward(weight: Tensor, x: Tensor, window: Window) -> Tensor:
        result: Tensor = forward.convolved(x, weight, None, window)
        return result

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, x = ctx.saved_tensors
        return _Outer.of(y, x, ctx.window), _Back.of(weight, y, ctx.window), None


class _Outer(_Convolution):
    """The gradient by the weights, of that by the result and of the pictures."""

    @staticmethod
    def forward(y: Tensor, x: Tensor, window: Window) -> Tensor:
        pieces: Tensor = correlated(y, x, window)
        return pieces.sum(-3) if pieces.shape[-3] > 1 else pieces.squeeze(-3)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor, None]:
        y, x = ctx.saved_tensors
        return _Forward.of(weight, x, ctx.window), _Back.of(weight, y, ctx.window), None


class _Back(_Convolution):
    """The gradient by the pictures, of the weights and of that by the result."""

    @staticmethod
    def forward(weight: Tensor, y: Tensor, window: Window) -> Tensor:
        kh, kw, _, _, ph, pw = window
        turned = weight.unflatten(-1, (kh, kw, -1)).flip(-3, -2).transpose(-4, -1).flatten(-3)
        result: Tensor = forward.convolved(y, turned, None, Window(kh, kw, 1, 1, kh - 1 - ph, kw - 1 - pw))
        return result

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, y = ctx.saved_tensors
        return _Outer.of(y, x, ctx.window), _Forward.of(weight, x, ctx.window), None


def _piece(outputs: int, entries: int) -> int:
    """Places of a sum: few programs do small results, so that each does less."""
    return 2048 if outputs * entries >= 1 << 14 else 512


def _pieces(y: Tensor, x: Tensor, window: Sequence[int]) -> Tensor:
    *stack, batch, outputs, rows, columns = y.shape
    entries = window[0] * window[1] * x.shape[-3]
    return y.new_empty(*stack, -(-batch * rows * columns // _piece(outputs, entries)), outputs, entries)


@custom_op("fedveil::correlated", mutates_args=())
def correlated(y: Tensor, x: Tensor, window: Sequence[int]) -> Tensor:
    """y […, B, O, rows, columns] and x […, B, I, H, W] -> the gradient by the weights of each piece of the places,
    […, pieces, O, kh·kw·I]."""
    result = _pieces(y, x, window)
    pieces, outputs, entries = result.shape[-3:]
    y, x = (t.flatten(0, -5) if t.dim() > 4 else t[None] for t in (y, x))
    tall, wide = (max(16, min(128, forward.power(n))) for n in (outputs, entries))
    shared = math.gcd(x.shape[2], wide)
    wide = shared if shared >= 32 else min(wide, 64)
    grid = len(y) * pieces, -(-outputs // tall), -(-entries // wide)
    kernels().correlate[grid](
        y, x, result, y.shape[1] * math.prod(y.shape[3:]), pieces, *y.stride()[:2], *x.stride()[:2],
        *y.stride()[2:], *x.stride()[2:], x.shape[2], outputs, *x.shape[3:], *y.shape[3:], *window,
        _piece(outputs, entries), DEPTH, tall, wide, forward.multiplied(x.dtype),
        num_warps=8 if tall * wide > 64 * 64 else 4,
    )  # fmt: skip
    return result


correlated.register_fake(_pieces)
