"""Attention of Hugging Face models, made so that it can be stacked over clients and differentiated twice."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn


def prepare(model: nn.Module) -> None:
    """Let a Hugging Face model, or one inside a model, attend by plain operations; any other stays as it is.

    Fused attention has no second derivatives, and `vmap` runs it one client at a time. Masks are looked at while they
    are made, to skip what masks nothing, which `vmap` refuses.
    """
    found: Any = next((module for module in model.modules() if hasattr(module, "set_attn_implementation")), None)
    if found is None:
        return
    with contextlib.suppress(ValueError, AttributeError):  # a model may know no other attention
        found.set_attn_implementation("eager")
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is not None and not hasattr(masks.is_tracing, "stacked"):
        masks.is_tracing = _Tracing(masks.is_tracing)


class _Tracing:
    """Whether a tensor's values must not be looked at: while a graph is made of it, or while it is stacked."""

    stacked = True

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, tensor: Any = None) -> bool:
        batched = isinstance(tensor, Tensor) and torch._C._functorch.is_batchedtensor(tensor)
        return batched or bool(self._before(tensor))
