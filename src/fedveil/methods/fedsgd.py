"""FedSGD: clients send one gradient over all their records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedveil.core.forecast import Compute, Turn
from fedveil.core.method import About
from fedveil.core.stack import ClientStack
from fedveil.methods.fedavg import FedAvg, raw_about
from fedveil.train.local import full_gradient, full_gradient_compute


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """One gradient over all of a client's records; `server.lr` is the step (McMahan et al. 2017, section 2)."""

    name: ClassVar[str] = "fedsgd"
    about: ClassVar[About] = raw_about(
        "Clients send the gradient over all their records; the server takes one step.",
        "the negative gradient (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )

    def update(self, stack: ClientStack, w: Tensor) -> Tensor:
        if not self.privacy:
            return -full_gradient(stack, w)[0]
        (batch, steps), weights = self.private_steps(stack.task.largest), w.expand(len(stack), -1)
        gradient = self.privacy.gradients(stack, weights, batch, [(steps, stack.secrets("gradients"))])
        stack.passes += steps * gradient.records
        return -gradient()

    def private_steps(self, largest: int) -> tuple[int, int]:
        return largest, 1  # all records, over the most there may be

    def training(self, turn: Turn) -> Compute:
        return full_gradient_compute(turn.records)
