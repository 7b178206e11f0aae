"""Group norms of a stack of models with their first and second derivatives, as three kernels for GPUs.

PyTorch differentiates the derivative of a group norm as a chain of some forty operations, each of which reads and writes
a whole activation. What they come to is a few sums over each group and one expression in three tensors. Here a program
holds a group, so that each tensor is read once; each result is one sum in a fixed order, so that runs repeat bit for
bit.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from fedveil import forward
from fedveil.windows import kernels

ENTRIES = 16384  # a program of the norm itself holds
GROUP = 8192  # the largest group with derivatives: what a program of theirs can hold


def usable(x: Tensor, groups: int) -> bool:
    """Whether there are kernels for inputs [B, C, …] with so many groups."""
    if not (forward.ENABLED and x.is_cuda and kernels() is not None) or x.dim() < 3 or x.shape[1] % groups:
        return False
    return not torch.is_grad_enabled() or forward.power(x.shape[1] // groups) * forward.power(x[0, 0].numel()) <= GROUP


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`F.group_norm` for inputs [B, C, …], with moments in float32 or, of float64, in float64."""
    channels = x.shape[1]
    weight = x.new_ones(channels) if weight is None else weight.expand(channels)
    bias = x.new_zeros(channels) if bias is None else bias.expand(channels)
    return _Norm.of(x.flatten(2), weight, bias, groups, eps).view(x.shape)


class _Norm(torch.autograd.Function):
    """x […, B, C, P], weight and bias […, C] -> x̂ · weight + bias […, B, C, P], where x̂ = (x - mean) · scale."""

    @staticmethod
    def of(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        return cast(Tensor, _Norm.apply(x, weight, bias, groups, eps))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        result: Tensor = normalised(x, weight, bias, groups, eps)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, float], output: Tensor) -> None:
        x, weight, _, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        by_x, sums = _Slope.of(x, g, weight, ctx.groups, ctx.eps)
        by_weight, by_bias = sums.sum(-2).to(weight.dtype).unbind(-2)
        return by_x, by_weight, by_bias, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return _Norm.of(*_stacked(info, dims, inputs)), 0


class _Slope(torch.autograd.Function):
    """x and g […, B, C, P] and weight […, C] -> the gradient by x, if g is that by the result, […, B, C, P]:

        scale · (u - ⟨u⟩ - x̂ ⟨u x̂⟩)   with u = weight · g and ⟨…⟩ the mean over a group,

    and what the gradients by weight and bias are the sums of over pictures, […, 2, B, C]: those over places of g x̂, g.
    """

    @staticmethod
    def of(x: Tensor, g: Tensor, weight: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
        return cast(tuple[Tensor, Tensor], _Slope.apply(x, g, weight, groups, eps))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(x: Tensor, g: Tensor, weight: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = sloped(x, g, weight, groups, eps)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, float], output: Any) -> None:
        *tensors, ctx.groups, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, g, weight = ctx.saved_tensors
        by_x, by_g, sums = curved(x, g, weight, a, c, ctx.groups, ctx.eps)
        return by_x, by_g, sums.sum(-2).to(weight.dtype), None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _Slope.of(*_stacked(info, dims, inputs)), (0, 0)


@custom_op("fedveil::normalised", mutates_args=())
def normalised(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """What `_Norm` computes, as an operator that a compiler does not look into."""
    *stack, batch, channels, places = x.shape
    result = x.new_empty(x.shape)
    x, weight, bias = forward.pair(x, 3), forward.pair(weight, 1), forward.pair(bias, 1)
    tall = forward.power(channels // groups)
    wide = min(forward.power(places), max(1, ENTRIES // tall))
    kernels().normalise[(math.prod(stack) * batch * groups,)](
        x, weight, bias, result, x.shape[1], batch, groups, *x.stride()[:3], *weight.stride(), *bias.stride(),
        *x.stride()[3:], channels // groups, places, eps, tall, wide, x.dtype == torch.float64,
        num_warps=max(1, min(16, tall * wide // 1024)),
    )  # fmt: skip
    return result


@normalised.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("fedveil::sloped", mutates_args=())
def sloped(x: Tensor, g: Tensor, weight: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """What `_Slope` computes. Each gradient lies in memory as its tensor does."""
    stack, x, g, weight = x.shape[:-3], _flat(x, 3), _flat(g, 3), _flat(weight, 1)
    by_x, sums = torch.empty_like(x), _sums(x, 2)
    _launch(kernels().slope, groups, eps, x, g, weight, by_x, sums)
    return _unflat(by_x, stack), _unflat(sums, stack)


@sloped.register_fake
def _(x: Tensor, g: Tensor, weight: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    stack, x = x.shape[:-3], _flat(x, 3)
    return _unflat(torch.empty_like(x), stack), _unflat(_sums(x, 2), stack)


@custom_op("fedveil::curved", mutates_args=())
def curved(
    x: Tensor, g: Tensor, weight: Tensor, a: Tensor, c: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by x and g […, B, C, P], and what that by weight is the sum of over pictures, […, B, C], of what
    `_Slope` computes, if those by its results are a […, B, C, P] and c […, 2, B, C]."""
    stack, x, g, a, c, weight = x.shape[:-3], _flat(x, 3), _flat(g, 3), _flat(a, 3), _flat(c, 3), _flat(weight, 1)
    by_x, by_g, sums = torch.empty_like(x), torch.empty_like(g), _sums(x, 1)
    _launch(kernels().curve, groups, eps, x, g, weight, a, c, by_x, by_g, sums)
    return _unflat(by_x, stack), _unflat(by_g, stack), _unflat(sums, stack)[..., 0, :, :]


@curved.register_fake
def _(
    x: Tensor, g: Tensor, weight: Tensor, a: Tensor, c: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    stack, x, g = x.shape[:-3], _flat(x, 3), _flat(g, 3)
    sums = _unflat(_sums(x, 1), stack)[..., 0, :, :]
    return _unflat(torch.empty_like(x), stack), _unflat(torch.empty_like(g), stack), sums


def _launch(kernel: Any, groups: int, eps: float, x: Tensor, *tensors: Tensor) -> None:
    """A program for each group of each picture; the last of the tensors is contiguous."""
    members, batch, channels, places = x.shape
    tall, wide = forward.power(channels // groups), forward.power(places)
    strides = [step for t in (x, *tensors[:-1]) for step in t.stride()]
    kernel[(members * batch * groups,)](
        x, *tensors, batch, groups, *strides, channels // groups, places, eps, tall, wide, x.dtype == torch.float64,
        num_warps=max(1, min(16, tall * wide // 256)),
    )  # fmt: skip


def _flat(t: Tensor, own: int) -> Tensor:
    """[…, *own] -> [n, *own]."""
    return t.flatten(0, -own - 1) if t.dim() > own else t[None]


def _unflat(t: Tensor, stack: tuple[int, ...]) -> Tensor:
    return t.unflatten(0, stack) if stack else t[0]


def _sums(x: Tensor, kinds: int) -> Tensor:
    """Room for sums over places, [n, kinds, B, C]."""
    return x.new_empty(len(x), kinds, *x.shape[1:3], dtype=torch.promote_types(x.dtype, torch.float32))


def _stacked(info: Any, dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[Any]:
    """Under `vmap` all tensors get one more stack dimension, before their own."""
    return [forward.stacked(t, dim, info.batch_size) for t, dim in zip(inputs, dims, strict=True)]
