"""Calibration: clients send how long their real gradient is in each layer, and the server stretches its step to that.

FedLAP-DP's appendix A.1 compares it with the squared difference in the fit. It is defined for one step of the server:
lengths are those at the weights that were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.layout import Layout
from fedveil.core.message import Shape
from fedveil.core.task import Task
from fedveil.methods.surrogates.sets import Surrogate
from fedveil.train.local import GRADIENT_CHUNK


@message.kind
class Calibrated(Surrogate, frozen=True):
    """A synthetic set, and the norm of the client's real gradient in each layer."""

    lengths: Annotated[Tensor, Shape(("layers",), low=0)]


def lengths(layout: Layout, gradient: Tensor) -> Tensor:
    """The norm of each layer of gradients [C, d]: [C, layers]."""
    pieces = layout.split(gradient).values()
    return torch.stack([torch.linalg.vector_norm(piece.flatten(1), dim=1) for piece in pieces], 1)


def stretched(layout: Layout, gradient: Tensor, to: Tensor) -> Tensor:
    """Gradients [C, d] with each layer stretched to its norm in `to` [C, layers], eq. 20. One of zeros stays so."""
    sizes = torch.tensor([layer.stop - layer.start for layer in layout.layers], device=to.device)
    factors = to / lengths(layout, gradient).clamp(min=1e-12)
    return gradient * factors.repeat_interleave(sizes, 1)


def calibrated_slope(task: Task, w: Tensor, sets: Sequence[Surrogate], shares: Sequence[float]) -> Tensor:
    """The gradient of the server's one step from `w` [d]: the stretched ones of the sets, weighted by `shares`, [d]."""
    total = torch.zeros_like(w)
    for each, share in zip(sets, shares, strict=True):
        assert isinstance(each, Calibrated)
        gradient, points = torch.zeros_like(w)[None], len(each.labels)
        images, labels = (t.to(w.device)[None] for t in (each.images, each.labels.long()))
        for x, y in zip(images.split(GRADIENT_CHUNK, 1), labels.split(GRADIENT_CHUNK, 1), strict=True):
            gradient += task.gradient(w[None], x, y, torch.full_like(y, 1 / points, dtype=torch.float32))[0]
        total += share * stretched(task.layout, gradient, each.lengths.to(w.device)[None])[0]
    return total
