"""Convolutions of a stack, one client after another, for CPUs.

Clients with weights of their own make `vmap` turn a convolution into a grouped one. On a CPU, a grouped kernel takes up
to three times as long as plain ones on each client's own pictures (`python -m benchmarks.rivals lenet5`). Second
derivatives, which synthetic codecs need, are faster with grouped kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Multiply-adds a record from which arithmetic costs more than dispatch. In smaller models, the calls would cost more
# than the kernels save. The engine stacks fewer clients of larger ones.
LARGE = 100_000

aten = torch.ops.aten


class Separate(TorchFunctionMode):
    """While active, a 2-D convolution of stacked pictures with stacked weights is one for each client."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (conv2d if func in (F.conv2d, torch.conv2d) else func)(*args, **(kwargs or {}))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d`."""
    plain = groups == 1 and input.dim() == 4 and not isinstance(padding, str)
    if not plain or torch.is_autocast_enabled(input.device.type):
        with torch._C.DisableTorchFunction():
            return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    settings = tuple((v, v) if isinstance(v, int) else tuple(v) for v in (stride, padding, dilation))
    return _Convolution.of(input, weight, bias, settings)


class _Convolution(torch.autograd.Function):
    """Pictures [B, I, H, W], weights [O, I, h, w] and bias [O] -> [B, O, …], or stacks of all of them."""

    @staticmethod
    def of(x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
        return cast(Tensor, _Convolution.apply(x, weight, bias, settings))  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
        if x.dim() == 4:
            return torch.conv2d(x, weight, bias, *settings)
        biases = [None] * len(x) if bias is None else bias
        return torch.stack([torch.conv2d(*own, *settings) for own in zip(x, weight, biases, strict=True)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.settings = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        asked = [*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2]]

        def derived(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
            size = [len(weight)] if ctx.biased else None
            found = aten.convolution_backward(gradient, x, weight, size, *ctx.settings, False, (0, 0), 1, asked)
            return tuple(each if there else None for each, there in zip(found, asked, strict=True))

        if x.dim() == 4:
            return *derived(gradient, x, weight), None
        every = zip(*map(derived, gradient, x, weight), strict=True)
        return *(torch.stack(own) if there else None for own, there in zip(every, asked, strict=True)), None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
        *tensors, settings = given
        count = info.batch_size
        x, weight, bias = (
            t if t is None else t.expand(count, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(tensors, dims, strict=False)
        )
        assert x is not None
        assert weight is not None
        if dims[0] is None and x.dim() == 5:  # the same pictures for all: their filters side by side
            out = torch.conv2d(x[0], weight.flatten(0, 1), None if bias is None else bias.flatten(), *settings)
            return out.unflatten(1, (count, -1)), 1
        if x.dim() == 5:
            return _Convolution.of(x, weight, bias, settings), 0
        biases = None if bias is None else bias.flatten(0, 1)
        stack = _Convolution.of(x.flatten(0, 1), weight.flatten(0, 1), biases, settings)
        return stack.unflatten(0, (count, -1)), 0
