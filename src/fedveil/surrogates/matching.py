"""Gradient matching: how far the gradient of a synthetic set is from the real one."""

from __future__ import annotations

import torch
from torch import Tensor

from fedveil.task import Layout


def distance(layout: Layout, synthetic: Tensor, real: Tensor, mse: float) -> Tensor:
    """Between gradients [C, d] and [C, d], a number a client, [C]: the cosine distance of each output row, averaged
    over a layer's rows and summed over layers, + `mse` × ‖difference‖² (FedLAP-DP, eqs. 9 and 10).

    A row is what leads to one output: of a weight [out, …] the first dimension counts rows, a bias [out] is one row.
    """
    apart = mse * (synthetic - real).square().sum(1)
    for a, b in zip(layout.split(synthetic).values(), layout.split(real).values(), strict=True):
        a, b = (t.flatten(2) if t.dim() > 2 else t[:, None] for t in (a, b))  # [C, rows, n]
        norms: Tensor = torch.linalg.vector_norm(a, dim=2) * torch.linalg.vector_norm(b, dim=2)
        apart = apart + (1 - (a * b).sum(2) / norms.clamp(min=1e-12)).mean(1)
    return apart
