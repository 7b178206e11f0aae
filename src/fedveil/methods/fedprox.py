"""FedProx: FedAvg whose local training is held near the global weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedveil.core.method import About
from fedveil.methods.fedavg import FedAvg, raw_about


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with local loss F_k(v) + (μ/2)‖v - w‖² (Li et al. 2020, eq. 2)."""

    name: ClassVar[str] = "fedprox"
    about: ClassVar[About] = raw_about(
        "FedAvg whose local training is held near the global weights.",
        "the weight update w_k - w (d floats) and the record count n_k",
        "Li et al., Federated Optimization in Heterogeneous Networks, 2020",
    )

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0:
            raise ValueError(f"method.mu is {self.mu:g}; it is 0 or more")

    def correction(self, w: Tensor) -> Callable[[Tensor], Tensor] | None:
        return lambda v: self.mu * (v - w)
