"""q-FedAvg: clients with a high loss count more (Li et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from torch import Tensor

from fedveil.core.forecast import Compute, Turn
from fedveil.core.method import About
from fedveil.core.stack import ClientStack
from fedveil.links.up import Total
from fedveil.methods.about import raw_about
from fedveil.methods.averaging import Averaging
from fedveil.train.local import full_gradient, full_gradient_compute
from fedveil.train.trainers import Trained
from fedveil.train.vectors import Vectors


@dataclass(frozen=True)
class QFedAvg(Averaging):
    """Clients with a high loss count more (Li et al. 2020, algorithm 2). q = 0 is the unweighted FedAvg."""

    name: ClassVar[str] = "q-fedavg"
    about: ClassVar[About] = raw_about(
        "FedAvg that weights clients by their loss to the power q, for a fairer model.",
        "the loss-weighted update Δ_k (d floats) and the scalar h_k",
        "Li et al., Fair Resource Allocation in Federated Learning, 2020",
        more=(),
    )
    unsupported: ClassVar[Mapping[str, str]] = {
        "privacy": "a client's weight h_k is its loss on all its records, which no noise covers; use fedavg",
        "user_privacy": "clients weight their updates by their loss, so nothing bounds a client's part in the sum; use "
        "fedavg",
        "secure": "it divides by the sum of h_k, which has no bound that fixed point could hold; use fedavg",
    }
    scalars: ClassVar[Mapping[str, Any]] = {"weight": Annotated[float, Meta(gt=0, lt=1e12)]}  # h_k
    weighted: ClassVar[bool] = False
    limited: ClassVar[bool] = True

    q: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q < 0:
            raise ValueError(f"method.q is {self.q:g}; it is 0 or more")

    def no_batch_norm(self, policy: str) -> str:
        return "it weights clients by a loss, which is taken at fixed running statistics"

    def trained(self, stack: ClientStack, question: Any, w: Tensor, trained: Trained) -> Vectors:
        _, loss = full_gradient(stack, w)
        lipschitz = 1 / self.local.rate(stack.round)  # the paper's L
        change = lipschitz * -trained.update  # [C, d]
        power = (loss + 1e-10) ** self.q
        h = self.q * (loss + 1e-10) ** (self.q - 1) * change.square().sum(1) + lipschitz * power
        return Vectors({"update": power[:, None] * change}, {"weight": h})

    def combine(self, total: Total) -> Tensor:
        return -(total.sum("update") / total.scalars["weight"])

    def forecast_compute(self, turn: Turn) -> Compute:
        return full_gradient_compute(turn.records) + super().forecast_compute(turn)
