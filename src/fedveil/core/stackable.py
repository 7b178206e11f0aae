"""Change the layers of a model that cannot be stacked over clients or differentiated twice: embeddings, and the
attention of Hugging Face models."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def prepare(model: nn.Module) -> None:
    """Replace operations of a model, in place, by equivalent ones that can be stacked.

    - Fused attention has no second derivatives, and `vmap` runs it one client at a time.
    - transformers skips a mask that hides nothing. It reads the mask's values to find out, which `vmap` rejects.
    - `vmap` ignores `padding_idx`, so that the embedding of the padding token would get a gradient.
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


def batched(tensor: Tensor) -> bool:
    """Return whether `vmap` is running and stacks this tensor."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


class _Tracing:
    """transformers' test whether a tensor's values cannot be read, which is also true while it is stacked."""

    stacked = True

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, tensor: Any = None) -> bool:
        return (isinstance(tensor, Tensor) and batched(tensor)) or bool(self._before(tensor))
