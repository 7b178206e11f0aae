"""FedProx: local training held near the global weights (Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedveil.core.method import About
from fedveil.core.stack import ClientStack
from fedveil.methods.about import raw_about
from fedveil.methods.averaging import Averaging
from fedveil.train.stepper import Pull
from fedveil.train.trainers import Correction


@dataclass(frozen=True)
class FedProx(Averaging):
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

    def correction(self, stack: ClientStack, question: Any, w: Tensor) -> Correction | None:
        return Pull(w, self.mu)
