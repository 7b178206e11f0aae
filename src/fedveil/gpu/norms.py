"""Group norms of a stack of models with their first and second derivatives, as kernels for GPUs.

PyTorch differentiates the derivative of a group norm as a chain of some forty operations, each of which reads and
writes a whole activation. What they come to is a few sums over each group and one expression in three tensors. Here a
program holds a group, so that each tensor is read once, also where a ReLU and a mean pool of 2 × 2 follow, which are
then part of it. Each result is one sum in a fixed order, so that runs repeat bit for bit.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from fedveil.gpu import forward
from fedveil.gpu.context import current
from fedveil.gpu.windows import kernels

ENTRIES = 16384  # a program of the norm itself holds
GROUP = 8192  # the largest group with derivatives: what a program of theirs can hold
WARP = 512  # of them a warp holds


def usable(x: Tensor, groups: int, pooled: bool = False, offset: bool = False) -> bool:
    """Whether there are kernels for inputs [B, C, …] with so many groups, and for these with a pool or an offset."""
    if not (x.is_cuda and current().kernels and kernels() is not None) or x.dim() < 3 or x.shape[1] % groups:
        return False
    if pooled and (x.dim() != 4 or x.shape[2] % 2 or x.shape[3] % 2):
        return False
    held = forward.power(x.shape[1] // groups) * forward.power(math.prod(x.shape[2:]))
    return held <= GROUP or not (pooled or offset or torch.is_grad_enabled())


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    pooled: bool = False,
    offset: Tensor | None = None,
) -> Tensor:
    """`F.group_norm` for inputs [B, C, …], with moments in float32 or, of float64, in float64.

    offset: [C], added to x first: the bias of the layer before
    pooled: with a ReLU and a mean pool of 2 × 2 after it, for inputs [B, C, H, W]
    """
    channels, across = x.shape[1], x.shape[3] if pooled else 0
    weight = x.new_ones(channels) if weight is None else weight.expand(channels)
    bias = x.new_zeros(channels) if bias is None else bias.expand(channels)
    result = _Norm.of(x.flatten(2), offset, weight, bias, groups, eps, across)
    return result.unflatten(2, (-1, across // 2)) if pooled else result.view(x.shape)


class _Norm(torch.autograd.Function):
    """x […, B, C, P], offset, weight and bias […, C] -> x̂ · weight + bias […, B, C, P], where x̂ = (x + offset - mean) ·
    scale.

    across: 0, or how wide pictures are that a ReLU and a mean pool make […, B, C, P/4] of
    """

    @staticmethod
    def of(*inputs: Any) -> Tensor:
        return cast(Tensor, _Norm.apply(*inputs))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        result: Tensor = normalised(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.groups, ctx.eps, ctx.across = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, offset, weight, bias = ctx.saved_tensors
        by_x, sums = _Slope.of(x, offset, weight, bias, g, ctx.groups, ctx.eps, ctx.across)
        by_weight, by_bias, by_offset = sums.sum(-2).to(weight.dtype).unbind(-2)
        return by_x, None if offset is None else by_offset, by_weight, by_bias, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _Norm.of(*_stacked(info, dims, inputs)), 0


class _Slope(torch.autograd.Function):
    """x […, B, C, P], offset, weight and bias […, C] and g as the result of `_Norm` -> the gradient by x, if g is that
    by the result, […, B, C, P]:

        scale · (u - ⟨u⟩ - x̂ ⟨u x̂⟩)   with u = weight · g and ⟨…⟩ the mean over a group,

    and sums over places, […, 3, B, C], of g x̂, of g and of that gradient: the sums of these over pictures are the
    gradients by weight, bias and offset. Where a pool follows, this g is a quarter of that of its tile, or 0 where the
    ReLU cut something off.
    """

    @staticmethod
    def of(*inputs: Any) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], _Slope.apply(*inputs))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = sloped(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.groups, ctx.eps, ctx.across = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, a: Tensor, c: Tensor) -> tuple[Tensor | None, ...]:
        x, offset, weight, bias, g = ctx.saved_tensors
        by_x, by_g, sums = _Curve.of(x, offset, weight, bias, g, a, c, ctx.groups, ctx.eps, ctx.across)
        by_weight, by_offset = sums.sum(-2).to(weight.dtype).unbind(-2)
        return by_x, None if offset is None else by_offset, by_weight, None, by_g, None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _Slope.of(*_stacked(info, dims, inputs)), (0, 0)


class _Curve(torch.autograd.Function):
    """`curved`, the derivative of `_Slope`, which has none itself."""

    @staticmethod
    def of(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor, Tensor], _Curve.apply(*inputs))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = curved(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            "a group norm in a stack on a GPU has no third derivative; use fedveil.gpu.context.using(kernels=False)"
        )

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _Curve.of(*_stacked(info, dims, inputs)), (0, 0, 0)


def _made(
    x: Tensor, offset: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, across: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 4 if across else x.shape[-1])


@custom_op("fedveil::normalised", mutates_args=())
def normalised(
    x: Tensor, offset: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, across: int
) -> Tensor:
    """What `_Norm` computes, as an operator that a compiler does not look into."""
    result = _made(x, offset, weight, bias, groups, eps, across)
    if across or offset is not None:
        _launch(kernels().apply, groups, eps, across, x, offset, weight, bias, result)
        return result
    *stack, batch, channels, places = x.shape
    x, weight, bias = forward.pair(x, 3), forward.pair(weight, 1), forward.pair(bias, 1)
    tall = forward.power(channels // groups)
    wide = min(forward.power(places), max(1, ENTRIES // tall))
    kernels().normalise[(math.prod(stack) * batch * groups,)](
        x, weight, bias, result, x.shape[1], batch, groups, *x.stride()[:3], *weight.stride(), *bias.stride(),
        *x.stride()[3:], channels // groups, places, eps, tall, wide, x.dtype == torch.float64,
        num_warps=max(1, min(16, tall * wide // 1024)),
    )  # fmt: skip
    return result


normalised.register_fake(_made)


@custom_op("fedveil::sloped", mutates_args=())
def sloped(
    x: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    g: Tensor,
    groups: int,
    eps: float,
    across: int,
) -> tuple[Tensor, Tensor]:
    """What `_Slope` computes. Each gradient lies in memory as its tensor does."""
    by_x, sums = _like(x), _sums(x, 3)
    _launch(kernels().slope, groups, eps, across, x, offset, weight, bias, g, by_x, sums)
    return by_x, sums


@sloped.register_fake
def _(x: Tensor, offset: Tensor | None, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _like(x), _sums(x, 3)


@custom_op("fedveil::curved", mutates_args=())
def curved(
    x: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    g: Tensor,
    a: Tensor,
    c: Tensor,
    groups: int,
    eps: float,
    across: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by x and g, and what those by weight and offset are the sums of over pictures, […, 2, B, C], of
    what `_Slope` computes, if those by its results are a […, B, C, P] and c […, 3, B, C]."""
    by_x, by_g, sums = _like(x), _like(g), _sums(x, 2)
    _launch(kernels().curve, groups, eps, across, x, offset, weight, bias, g, a, c, by_x, by_g, sums)
    return by_x, by_g, sums


@curved.register_fake
def _(
    x: Tensor, offset: Tensor | None, weight: Tensor, bias: Tensor, g: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), _like(g), _sums(x, 2)


def _launch(
    kernel: Any, groups: int, eps: float, across: int, x: Tensor, offset: Tensor | None, *tensors: Tensor
) -> None:
    """A program for each group of each picture of x […, B, C, P]; the last of the tensors is contiguous."""
    stack, batch, channels, places = x.dim() - 3, *x.shape[-3:]
    tall, wide = forward.power(channels // groups), forward.power(places // 4 if across else places)
    given = [t if t is None else t.flatten(0, stack - 1) if stack else t[None] for t in (x, offset, *tensors)]
    strides = [step for t in given[:-1] for step in ((0, 0) if t is None else t.stride())]
    kernel[(math.prod(x.shape[:-3]) * batch * groups,)](
        *given, batch, groups, *strides, channels // groups, places, eps, across, tall, wide,
        x.dtype == torch.float64, num_warps=max(1, min(16, tall * wide * (4 if across else 1) // WARP)),
    )  # fmt: skip


def _like(t: Tensor) -> Tensor:
    """Room for a gradient by t […, B, C, P], with one stack dimension or so that several could be one."""
    return torch.empty_like(t) if t.dim() < 5 else t.new_empty(t.shape)


def _sums(x: Tensor, kinds: int) -> Tensor:
    """Room for sums over places, […, kinds, B, C]."""
    return x.new_empty(*x.shape[:-3], kinds, *x.shape[-3:-1], dtype=torch.promote_types(x.dtype, torch.float32))


def _stacked(info: Any, dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """Under `vmap` all tensors get one more stack dimension, before their own."""
    return [forward.stacked(t, dim, info.batch_size) for t, dim in zip(inputs, dims, strict=True)]
