"""Layers made so that they can be stacked over clients and differentiated twice: embeddings, and the attention of
Hugging Face models."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def prepare(model: nn.Module) -> None:
    """Let the layers of a model compute the same by operations that can be stacked.

    Fused attention has no second derivatives, and `vmap` runs it one client at a time. Masks are looked at while they
    are made, to skip what masks nothing, which `vmap` refuses. And `vmap` forgets that an embedding's row for padding
    has no gradient.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            layer.register_forward_hook(partial(_keep_padding, layer.padding_idx), with_kwargs=True)
            layer.padding_idx = None
    found: Any = next((module for module in model.modules() if hasattr(module, "set_attn_implementation")), None)
    if found is None:
        return
    with contextlib.suppress(ValueError, AttributeError):  # a model may know no other attention
        found.set_attn_implementation("eager")
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is not None and not hasattr(masks.is_tracing, "stacked"):
        masks.is_tracing = _Tracing(masks.is_tracing)


def _keep_padding(index: int, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: Tensor) -> Tensor:
    """Return an embedding's output […, width] without a gradient where its input […] is `index`."""
    (tokens,) = args or kwargs.values()
    return torch.where((tokens == index)[..., None], out.detach(), out)


class _Tracing:
    """Whether a tensor's values must not be looked at: while a graph is made of it, or while it is stacked."""

    stacked = True

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, tensor: Any = None) -> bool:
        batched = isinstance(tensor, Tensor) and torch._C._functorch.is_batchedtensor(tensor)
        return batched or bool(self._before(tensor))
