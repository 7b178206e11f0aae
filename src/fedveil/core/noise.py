"""Random numbers of a model in training, from a key: a run repeats whatever the stack, the engine or the device is.

A draw is a function of the key and of how many draws came before it in the same pass. Records lie in the first
dimension, so what a record draws does not depend on how many follow it, and padding changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedveil.core.directions import GAMMA, words
from fedveil.core.stackable import batched

_ALPHA = -1.7580993408473766  # what SELU tends to far below 0
_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
)
_FILLS: dict[Any, dict[str, float]] = {  # draws into a tensor, and their arguments
    Tensor.bernoulli_: {"p": 0.5},
    Tensor.uniform_: {"from": 0.0, "to": 1.0},
    Tensor.normal_: {"mean": 0.0, "std": 1.0},
    Tensor.exponential_: {"lambd": 1.0},
}


class Seeded(TorchFunctionMode):
    """While active, dropout and draws of random numbers come from `key`, an int64 of no dimension.

    calls: how many draws there were
    """

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._key, self.calls = key, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return self._dropout(func, *args, **given)
        if func is F.scaled_dot_product_attention and _attention_dropout(args, given):
            return self._attention(*args, **given)
        if func in (torch.rand_like, torch.randn_like):
            like = args[0]
            drawn = self._uniform(like.shape) if func is torch.rand_like else self._normal(like.shape)
            return drawn.to(given.get("dtype") or like.dtype)
        if func in (torch.rand, torch.randn) and given.get("generator") is None:
            shape = given["size"] if "size" in given else args[0] if isinstance(args[0], Sequence) else args
            drawn = self._uniform(shape) if func is torch.rand else self._normal(shape)
            return drawn.to(given.get("dtype") or torch.get_default_dtype())
        if func in (torch.bernoulli, Tensor.bernoulli) and len(args) == 1 and not given:
            return (self._uniform(args[0].shape) < args[0]).to(args[0].dtype)
        if func in _FILLS and given.pop("generator", None) is None:
            names = _FILLS[func]
            return self._fill(func, args[0], *(names | dict(zip(names, args[1:], strict=False)) | given).values())
        return func(*args, **(kwargs or {}))

    def _fill(self, func: Callable[..., Any], target: Tensor, a: Any, b: float = 0.0) -> Tensor:
        """Draw into `target`, as stochastic depth does. In a stack `target` cannot hold the draws of all clients, so
        return a new tensor and fill `target` with NaN, which shows if a model uses it."""
        drawn: Tensor
        if func is Tensor.normal_:
            drawn = a + b * self._normal(target.shape)
        else:
            uniform = self._uniform(target.shape)
            if func is Tensor.bernoulli_:
                drawn = (uniform < a).float()
            elif func is Tensor.uniform_:
                drawn = a + (b - a) * uniform
            else:
                drawn = -(uniform + 2.0**-25).log() / a
        stacked = batched(drawn) and not batched(target)
        if not (stacked and target.is_floating_point()):
            return target.copy_(drawn)
        target.fill_(math.nan)
        return drawn.to(target.dtype)

    def _uniform(self, shape: Sequence[int]) -> Tensor:
        """The next draw from [0, 1), in steps of 2⁻²⁴."""
        drawn = self._words(math.prod(shape))
        return (((drawn >> 40) & 0xFFFFFF).float() * 2.0**-24).view(*shape)

    def _normal(self, shape: Sequence[int]) -> Tensor:
        """The next Gaussian draw (Box & Muller 1958)."""
        drawn = self._words(math.prod(shape))
        radius = (((drawn >> 40) & 0xFFFFFF) + 1).float() * 2.0**-24
        angle = (drawn & 0xFFFFFF).float() * (2.0**-24 * 2 * math.pi)
        return ((-2 * radius.log()).sqrt() * angle.cos()).view(*shape)

    def _words(self, count: int) -> Tensor:
        self.calls += 1
        shift = (self.calls * GAMMA + 2**63) % 2**64 - 2**63  # as an int64 that wraps
        first = torch.zeros(1, dtype=torch.int64, device=self._key.device)
        own = words(self._key.view(1) ^ shift, first)
        drawn: Tensor = words(own ^ torch.arange(count, device=self._key.device), first)  # compilers index in 32 bits
        return drawn

    def _dropout(
        self, func: Callable[..., Any], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        x = input
        if not training or p == 0:
            return x
        spread = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}.get(func, 0)  # dimensions that are dropped as one
        if func is F.feature_alpha_dropout:
            spread = x.dim() - 2
        whole = x.shape[: x.dim() - spread]
        keep = self._uniform(whole).view(*whole, *[1] * spread) >= p
        if func not in (F.alpha_dropout, F.feature_alpha_dropout):
            return x * keep / (1 - p) if p < 1 else torch.zeros_like(x)
        scale: float = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5  # Klambauer et al. 2017
        return scale * (torch.where(keep, x, _ALPHA) - p * _ALPHA)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`F.scaled_dot_product_attention`, in plain operations so that its weights can be dropped."""
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self._dropout(F.dropout, scores.softmax(-1), dropout_p) @ value


def _attention_dropout(args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    return bool(args[4] if len(args) > 4 else given.get("dropout_p", 0.0))


def silence(model: nn.Module) -> list[str]:
    """Turn off dropout, in place, in layers that draw their masks internally; return their names."""
    silenced = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout and module.training:
            module.dropout = 0.0
            silenced.append(name)
    return silenced
