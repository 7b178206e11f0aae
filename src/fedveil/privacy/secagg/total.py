"""What the server learns from a secure sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sum:
    """What the server learns."""

    clients: tuple[int, ...]  # whose answers are in it, U3
    weight: int  # Σ n_k, or the number of clients where answers have no `records`
    totals: Mapping[str, Tensor]  # Σ n_k · x_k / the public maximum of n_k, float64, by field
    heaviest: int  # that maximum
    clipped: int  # values that were beyond the range and were cut
    error: float  # how far an element of a mean can be from that of the clients' floats, had none been cut

    def mean(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The mean of one field, weighted by records."""
        return (self.totals[name] * (self.heaviest / self.weight)).to(dtype)
