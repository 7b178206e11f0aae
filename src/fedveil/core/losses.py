"""The loss of each record, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of each record, [B]: logits [B, K] against labels [B] or probabilities [B, K]."""
    if y.is_floating_point():
        return -(y * F.log_softmax(logits, -1)).sum(-1)
    return F.cross_entropy(logits, y, reduction="none")


def next_character(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of each record, [B]: the mean over its positions. Logits [B, T, K] against characters [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(-1)


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "next-character": next_character}
