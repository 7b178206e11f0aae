"""Layers of a stack as matrix products, for GPUs.

Clients with weights of their own make `vmap` turn a convolution into a grouped one. GPUs have poor kernels for those,
and the gradient of their gradient is launched in small pieces. Windows of the input times the weights are
one batched matrix product instead, and so are all its derivatives. A linear layer is the same product: its gradients
come out in the weights' own layout, where PyTorch's are transposed, then copied or added at a third of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedveil import forward, norms
from fedveil.windows import Window, windows


class Products(TorchFunctionMode):
    """While active, linear layers and 2-D convolutions without groups are products, and mean pools are means.

    Group norms are kernels of their own, and so are half-precision convolutions where nothing is differentiated.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.conv2d, torch.conv2d):
            return conv2d(*args, **kwargs)
        if func is F.linear:
            return linear(*args, **kwargs)
        if func is F.avg_pool2d:
            return avg_pool2d(*args, **kwargs)
        if func is F.group_norm:
            return group_norm(*args, **kwargs)
        return func(*args, **kwargs)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for inputs […, I] and weights [O, I]."""
    result = product(weight, x.flatten(0, -2).T).T.reshape(*x.shape[:-1], -1)
    return result if bias is None else result + bias


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`torch.conv2d` for inputs [B, I, H, W]."""
    (sh, sw), (dh, dw) = _pair(stride), _pair(dilation)
    out, _, kh, kw = weight.shape
    if padding == "same" and kh % 2 and kw % 2:
        padding = (kh // 2, kw // 2)
    if groups != 1 or x.dim() != 4 or (dh, dw) != (1, 1) or isinstance(padding, str):
        with torch._C.DisableTorchFunction():
            return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    window = Window(kh, kw, sh, sw, *_pair(padding))
    if forward.usable(x) and x.dtype == weight.dtype == forward.PRECISION and x.shape[1] == weight.shape[1]:
        return forward.conv2d(x, weight, bias, window)
    result = product(weight.flatten(1), windows(x, window))  # [O, B·rows·columns]
    result = result.view(out, len(x), *window.over(*x.shape[2:])).transpose(0, 1)
    return result if bias is None else result + bias[:, None, None]


def avg_pool2d(
    x: Tensor, kernel_size: int | list[int], stride: int | list[int] | None = None, *more: Any, **options: Any
) -> Tensor:
    """`F.avg_pool2d`; where tiles do not overlap a mean, whose derivative costs a fraction of the kernel's."""
    (kh, kw), steps = _pair(kernel_size), _pair(stride or kernel_size)
    if more not in ((), (0,), (0, False), (0, False, True), (0, False, True, None)) or options or steps != (kh, kw):
        with torch._C.DisableTorchFunction():
            return F.avg_pool2d(x, kernel_size, stride, *more, **options)
    rows, columns = x.shape[-2] // kh, x.shape[-1] // kw
    tiles = x[..., : rows * kh, : columns * kw].unflatten(-1, (columns, kw)).unflatten(-3, (rows, kh))
    mean: Tensor = tiles.mean((-1, -3))
    return mean


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """`F.group_norm` for inputs [B, C, …]."""
    if norms.usable(x, num_groups):
        return norms.group_norm(x, num_groups, weight, bias, eps)
    with torch._C.DisableTorchFunction():
        return F.group_norm(x, num_groups, weight, bias, eps)


def product(w: Tensor, x: Tensor) -> Tensor:
    """W X for W […, o, i] and X […, i, n]."""
    return _Forward.of(w, x) if torch.is_grad_enabled() else w @ x


class _Product(torch.autograd.Function):
    """One of three products that are each other's derivatives. All take two matrices, stacked or not."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> Tensor:
        return cast(Tensor, cls.apply(a, b))  # type: ignore[no-untyped-call]

    @classmethod
    def vmap(cls, info: Any, dims: tuple[int | None, int | None], *matrices: Tensor) -> tuple[Tensor, int]:
        a, b = (
            m.expand(info.batch_size, *m.shape) if d is None else m.movedim(d, 0)
            for m, d in zip(matrices, dims, strict=True)
        )
        return cls.of(aligned(a, b), aligned(b, a)), 0


def aligned(m: Tensor, other: Tensor) -> Tensor:
    """A stack of matrices, copied where they begin at addresses for which GPUs have slow kernels only: a layer's
    weights, in a stack of models with an odd number of them. What it is multiplied with, `other`, pays for the copy."""
    return m.contiguous() if m.stride(0) * m.element_size() % 16 and 4 * m.numel() <= other.numel() else m


class _Forward(_Product):
    """W X: what a layer gives, […, o, n]."""

    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return w @ x

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        w, x = ctx.saved_tensors
        return _Outer.of(y, x), _Back.of(w, y)


class _Outer(_Product):
    """Y Xᵀ: the gradient by the weights, […, o, i]."""

    @staticmethod
    def forward(y: Tensor, x: Tensor) -> Tensor:
        (o, n), i = y.shape[-2:], x.shape[-2]
        parts = next((p for p in (16, 10, 8, 5, 4, 2) if n % p == 0), 1) if n > 64 * max(o, i) else 1
        if parts == 1:
            return y @ x.mT
        # A long sum for a small result keeps few of a GPU's processors busy: several shorter ones instead.
        y, x = (t.unflatten(-1, (parts, n // parts)).transpose(-2, -3) for t in (y, x))
        return (y @ x.mT).sum(-3)

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        y, x = ctx.saved_tensors
        return _Forward.of(w, x), _Back.of(w, y)


class _Back(_Product):
    """Wᵀ Y: the gradient by the input, […, i, n]."""

    @staticmethod
    def forward(w: Tensor, y: Tensor) -> Tensor:
        return w.mT @ y

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, y = ctx.saved_tensors
        return _Outer.of(y, x), _Forward.of(w, x)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
