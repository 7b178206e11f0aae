"""Layers of a stack as matrix products, for GPUs.

Clients with weights of their own make `vmap` turn a convolution into a grouped one. GPUs have poor kernels for those,
and the gradient of their gradient is launched in small pieces. Windows of the input times the weights are
one batched matrix product instead, and so are all its derivatives. A linear layer is the same product: its gradients
come out in the weights' own layout, where PyTorch's are transposed, then copied or added at a third of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op
from torch.overrides import TorchFunctionMode

from fedveil.gpu import convolutions, forward, norms, windows
from fedveil.gpu.graphs import mutable, traced
from fedveil.gpu.windows import Window

PIECE = 2048  # of a long sum


class Products(TorchFunctionMode):
    """While active, linear layers and 2-D convolutions without groups are products, and mean pools are means.

    Group norms are kernels of their own, and so are half-precision convolutions where nothing is differentiated. While
    a compiler looks on, a group norm is one kernel with the bias of a convolution before it and with a ReLU and a mean
    pool of 2 × 2 after it. What that skips is there by itself as well, should something else need it; if nothing does,
    the compiler throws it away.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        """What layers gave last, and what to make something better of it with."""
        self._conv: tuple[Tensor, Tensor, Tensor] | None = None  # without its bias, and its bias
        self._norm: tuple[Tensor, Callable[..., Tensor]] | None = None
        self._relu: tuple[Tensor, Callable[..., Tensor]] | None = None  # of that norm
        self._differentiated = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if torch.is_grad_enabled() != self._differentiated:
            self._forget()
        if func in (F.conv2d, torch.conv2d, F.linear, F.avg_pool2d) and not args:
            args = (given.pop("input"),)
        if func in (F.conv2d, torch.conv2d):
            return self._convolution(*args, **given)
        if func is F.linear:
            return linear(*args, **given)
        if func is F.group_norm:
            return self._group_norm(*args, **given)
        if func is F.avg_pool2d:
            if self._relu and args[0] is self._relu[0] and tiled(*args, **given) == (2, 2):
                return self._relu[1](pooled=True)
            return avg_pool2d(*args, **given)
        result = func(*args, **given)
        if in_place(func, given):
            self._forget()
        elif func is F.relu and self._norm and args[0] is self._norm[0]:
            self._relu = result, self._norm[1]
        return result

    def _convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *more: Any, **settings: Any
    ) -> Tensor:
        if not traced() or bias is None or x.dim() != 4:
            return conv2d(x, weight, bias, *more, **settings)
        bare = conv2d(x, weight, None, *more, **settings)
        self._conv = bare + bias[:, None, None], bare, bias
        return self._conv[0]

    def _group_norm(self, x: Tensor, *settings: Any, **options: Any) -> Tensor:
        if self._conv and x is self._conv[0]:
            _, x, options["offset"] = self._conv
        result = group_norm(x, *settings, **options)
        if traced():
            self._norm = result, partial(group_norm, x, *settings, **options)
        return result


def in_place(func: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether a function may change what it is given."""
    name = getattr(func, "__name__", "")
    named = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return named or mutable(func) or bool(options.get("inplace")) or options.get("out") is not None


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
    if convolutions.usable(x, weight, window):
        result = convolutions.conv2d(x, weight, window)
    else:
        result = product(weight.flatten(1), windows.windows(x, window))  # [O, B·rows·columns]
        result = result.view(out, len(x), *window.over(*x.shape[2:])).transpose(0, 1)
    return result if bias is None else result + bias[:, None, None]


def tiled(
    x: Tensor, kernel_size: int | list[int], stride: int | list[int] | None = None, *more: Any, **options: Any
) -> tuple[int, int] | None:
    """The tiles of an `F.avg_pool2d` of these arguments, down and across; None where they overlap or are padded."""
    tile = _pair(kernel_size)
    plain = more in ((), (0,), (0, False), (0, False, True), (0, False, True, None)) and not options
    return tile if plain and _pair(stride or kernel_size) == tile else None


def avg_pool2d(x: Tensor, *settings: Any, **options: Any) -> Tensor:
    """`F.avg_pool2d`; where tiles do not overlap a mean, whose derivative costs a fraction of the kernel's."""
    tile = tiled(x, *settings, **options)
    if not tile:
        with torch._C.DisableTorchFunction():
            return F.avg_pool2d(x, *settings, **options)
    (kh, kw), rows, columns = tile, x.shape[-2] // tile[0], x.shape[-1] // tile[1]
    tiles = x[..., : rows * kh, : columns * kw].unflatten(-1, (columns, kw)).unflatten(-3, (rows, kh))
    mean: Tensor = tiles.mean((-1, -3))
    return mean


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    pooled: bool = False,
    offset: Tensor | None = None,
) -> Tensor:
    """`F.group_norm` for inputs [B, C, …] with `offset` [C] added, if that is given; with `pooled` followed by a ReLU
    and a mean pool of 2 × 2. Autocast leaves it in float32."""
    x = x.float() if torch.is_autocast_enabled(x.device.type) else x
    if norms.usable(x, num_groups, pooled, offset is not None):
        return norms.group_norm(x, num_groups, weight, bias, eps, pooled, offset)
    x = x if offset is None else x + offset[:, None, None]
    with torch._C.DisableTorchFunction():
        result = F.group_norm(x, num_groups, weight, bias, eps)
    return avg_pool2d(F.relu(result), 2) if pooled else result


def product(w: Tensor, x: Tensor) -> Tensor:
    """W X for W […, o, i] and X […, i, n]; under autocast in fewer bits, and so are its derivatives."""
    if torch.is_autocast_enabled(w.device.type):  # it would cast what is multiplied, but not what derivatives need
        w, x = (t.to(torch.get_autocast_dtype(w.device.type)) for t in (w, x))
    return _Forward.of(w, x) if torch.is_grad_enabled() or traced() else w @ x


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
        return cls.of(aligned(a, b), aligned(b, a)), 0  # so that all derivatives share one copy


def aligned(m: Tensor, other: Tensor) -> Tensor:
    """A stack of matrices, copied where they begin at addresses for which GPUs have slow kernels only: a layer's
    weights, in a stack of models with an odd number of them. What it is multiplied with, `other`, pays for the copy."""
    odd = m.dim() > 2 and m.stride(0) * m.element_size() % 16
    return m.contiguous() if odd and 4 * m.numel() <= other.numel() else m


class _Forward(_Product):
    """W X: what a layer gives, […, o, n]."""

    @staticmethod
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return aligned(w, x) @ aligned(x, w)

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        w, x = ctx.saved_tensors
        return _Outer.of(y, x), _Back.of(w, y)


class _Outer(_Product):
    """Y Xᵀ: the gradient by the weights, […, o, i]."""

    @staticmethod
    def forward(y: Tensor, x: Tensor) -> Tensor:
        (o, n), i = y.shape[-2:], x.shape[-2]
        if n <= 64 * max(o, i):
            return aligned(y, x) @ aligned(x, y).mT
        # A long sum for a small result keeps few of a GPU's processors busy: several shorter ones instead.
        if y.is_cuda and y.dtype == torch.float32 and windows.kernels():
            pieces: Tensor = parts(y, x)
            return pieces.sum(-3)
        cut = next((p for p in (16, 10, 8, 5, 4, 2) if n % p == 0), 1)
        y, x = (t.unflatten(-1, (cut, n // cut)).transpose(-2, -3) for t in (y, x))
        return (y @ x.mT).sum(-3)

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        y, x = ctx.saved_tensors
        return _Forward.of(w, x), _Back.of(w, y)


class _Back(_Product):
    """Wᵀ Y: the gradient by the input, […, i, n]."""

    @staticmethod
    def forward(w: Tensor, y: Tensor) -> Tensor:
        return aligned(w, y).mT @ aligned(y, w)

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, y = ctx.saved_tensors
        return _Outer.of(y, x), _Forward.of(w, x)


def _pieces(y: Tensor, x: Tensor) -> Tensor:
    return y.new_empty(*y.shape[:-2], -(-y.shape[-1] // PIECE), y.shape[-2], x.shape[-2])


@custom_op("fedveil::parts", mutates_args=())
def parts(y: Tensor, x: Tensor) -> Tensor:
    """Y […, o, n] and X […, i, n] -> Y Xᵀ of each piece of n, […, pieces, o, i]: a kernel that reads either where it
    is, which a stacked product cannot."""
    result = _pieces(y, x)
    stack, (o, n), i = y.shape[:-2], y.shape[-2:], x.shape[-2]
    y, x = (t.flatten(0, -3) if stack else t[None] for t in (y, x))
    tall, wide = min(128, max(16, forward.power(o))), min(64, max(16, forward.power(i)))
    tensor_cores = torch.get_float32_matmul_precision() != "highest"
    windows.kernels().outer[(len(y) * result.shape[-3], -(-o // tall), -(-i // wide))](
        y, x, result, o, i, n, result.shape[-3], *y.stride(), *x.stride(), PIECE, tall, wide, 64, tensor_cores
    )
    return result


parts.register_fake(_pieces)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
