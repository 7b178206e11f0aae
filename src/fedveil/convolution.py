"""Convolutions of a stack as matrix products.

Clients with weights of their own make `vmap` turn a convolution into a grouped one. GPUs have poor kernels for those,
and the gradient of their gradient is launched in small pieces. Windows of the input times the weights are
one batched matrix product instead, and so are all its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Unfolded(TorchFunctionMode):
    """While active, 2-D convolutions without groups are computed by unfolding."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.conv2d, torch.conv2d):
            return conv2d(*args, **kwargs)
        return func(*args, **kwargs)


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
    batch, _, height, width = x.shape
    ph, pw = _pair(padding)
    rows, columns = (height + 2 * ph - kh) // sh + 1, (width + 2 * pw - kw) // sw + 1
    windows = F.pad(x, (pw, pw, ph, ph)).unfold(2, kh, sh).unfold(3, kw, sw)  # [B, I, rows, columns, kh, kw]
    patches = windows.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)  # [I·kh·kw, B·rows·columns]
    product = weight.flatten(1) @ patches  # one product a client: [O, B·rows·columns]
    result = product.view(out, batch, rows, columns).transpose(0, 1)
    return result if bias is None else result + bias[:, None, None]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
