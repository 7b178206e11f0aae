"""Windows of a stack of pictures, and their adjoint, as two kernels for GPUs.

PyTorch copies windows element by element with an index calculation in as many dimensions as they have, which takes more
time than the product that follows. Here each picture position is found once for all the entries of its window. Either
kernel is the derivative of the other and each result is one sum in a fixed order, so that runs repeat bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

BLOCK = 512  # positions a program


class Window(NamedTuple):
    """Its size, step and the padding around a picture, each down and across."""

    kh: int
    kw: int
    sh: int
    sw: int
    ph: int
    pw: int

    def over(self, height: int, width: int) -> tuple[int, int]:
        """How many there are, down and across."""
        return (height + 2 * self.ph - self.kh) // self.sh + 1, (width + 2 * self.pw - self.kw) // self.sw + 1


def windows(x: Tensor, window: Window) -> Tensor:
    """Pictures [B, I, H, W] -> [I·kh·kw, B·rows·columns], a column for each place of the window."""
    return _Windows.of(x, window) if x.is_cuda and kernels() else slices(x, window)


def slices(x: Tensor, window: Window) -> Tensor:
    """The same of […, B, I, H, W] without a kernel."""
    rows, columns = window.over(*x.shape[-2:])
    x = F.pad(x, (window.pw, window.pw, window.ph, window.ph))
    shown = [
        x[..., i : i + rows * window.sh : window.sh, j : j + columns * window.sw : window.sw]
        for i in range(window.kh)
        for j in range(window.kw)
    ]
    return torch.stack(shown, -3).movedim(-5, -3).flatten(-3).flatten(-3, -2)  # [I, kh·kw, B, rows, columns] before


class _Windows(torch.autograd.Function):
    """[…, B, I, H, W] -> […, I·kh·kw, B·rows·columns]."""

    @staticmethod
    def of(x: Tensor, window: Window) -> Tensor:
        return cast(Tensor, _Windows.apply(x, window))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(x: Tensor, window: Window) -> Tensor:
        result: Tensor = shown(x, window)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Window], output: Tensor) -> None:
        ctx.shape, ctx.window = tuple(inputs[0].shape[-4:]), inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Folded.of(gradient, ctx.shape, ctx.window), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, None], x: Tensor, window: Window) -> tuple[Tensor, int]:
        assert dims[0] is not None
        return _Windows.of(x.movedim(dims[0], 0), window), 0


class _Folded(torch.autograd.Function):
    """[…, I·kh·kw, B·rows·columns] -> […, B, I, H, W]: at each place the sum of the window entries that show it."""

    @staticmethod
    def of(parts: Tensor, shape: tuple[int, ...], window: Window) -> Tensor:
        return cast(Tensor, _Folded.apply(parts, shape, window))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(parts: Tensor, shape: tuple[int, ...], window: Window) -> Tensor:
        result: Tensor = folded(parts, shape, window)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, ...], Window], output: Tensor) -> None:
        ctx.window = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Windows.of(gradient, ctx.window), None, None

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], parts: Tensor, shape: tuple[int, ...], window: Window
    ) -> tuple[Tensor, int]:
        assert dims[0] is not None
        return _Folded.of(parts.movedim(dims[0], 0), shape, window), 0


def _room(x: Tensor, window: Sequence[int]) -> Tensor:
    *stack, batch, channels, height, width = x.shape
    kh, kw, *_ = window
    return x.new_empty(*stack, channels * kh * kw, batch * math.prod(Window(*window).over(height, width)))


@custom_op("fedveil::shown", mutates_args=())
def shown(x: Tensor, window: Sequence[int]) -> Tensor:
    """What `_Windows` computes, as an operator that a compiler does not look into: it would make a kernel of each place
    of a window, with all that led to the picture in each of them, and of their sum one as long."""
    batch, channels, height, width = x.shape[-4:]
    rows, columns = Window(*window).over(height, width)
    flat, out = x.flatten(0, -5) if x.dim() > 4 else x[None], _room(x, window)
    places = batch * rows * columns
    grid = (-(-places // BLOCK) * len(flat), channels)  # only the first may be large
    kernels().spread[grid](flat, out, places, channels, height, width, rows, columns, *flat.stride(), *window, BLOCK)
    return out


shown.register_fake(_room)


@custom_op("fedveil::folded", mutates_args=())
def folded(parts: Tensor, shape: Sequence[int], window: Sequence[int]) -> Tensor:
    """What `_Folded` computes, as such an operator."""
    batch, channels, height, width = shape
    rows, columns = Window(*window).over(height, width)
    flat = (parts.flatten(0, -3) if parts.dim() > 2 else parts[None]).contiguous()
    out = parts.new_empty(*parts.shape[:-2], *shape)
    places = batch * height * width
    grid = (-(-places // BLOCK) * len(flat), channels)  # only the first may be large
    wide = torch.promote_types(parts.dtype, torch.float32) == torch.float64
    kernels().fold[grid](
        flat, out, places, channels, height, width, rows, columns, batch * rows * columns, *window, BLOCK, wide
    )
    return out


@folded.register_fake
def _(parts: Tensor, shape: Sequence[int], window: Sequence[int]) -> Tensor:
    return parts.new_empty(*parts.shape[:-2], *shape)


@cache
def kernels() -> Any:
    """The module of kernels; None where Triton, which comes with PyTorch for GPUs, is missing."""
    try:
        from fedveil.gpu import kernels
    except ImportError:
        return None
    return kernels
