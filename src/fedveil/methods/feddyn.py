"""FedDyn: a dynamic regularizer that makes local optima agree with the global one (Acar et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.cohort import Cohort
from fedveil.core.method import About, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.up import Total
from fedveil.methods.about import raw_about
from fedveil.methods.averaging import Averaging
from fedveil.train.stepper import Pull
from fedveil.train.trainers import Correction, Trained
from fedveil.train.vectors import Vectors


@message.kind
class Dual(message.Record, frozen=True):
    """A client's ∇L_k(θ_k) in its memory, or h in the server's state."""

    common = ()
    value: message.Weights


@dataclass(frozen=True)
class FedDyn(Averaging):
    """Local loss L_k(v) - <∇L_k, v> + (α/2)‖v - w‖² (Acar et al. 2021, algorithm 1). Clients count the same."""

    name: ClassVar[str] = "feddyn"
    about: ClassVar[About] = raw_about(
        "FedAvg with a regularizer that each client adapts, so that local optima agree with the global one.",
        "the weight update w_k - w (d floats)",
        "Acar et al., Federated Learning Based on Dynamic Regularization, 2021",
    )
    weighted: ClassVar[bool] = False
    alpha: float = 0.05

    def init_state(self, task: Task) -> State:
        if self.alpha <= 0:
            raise ValueError(f"method.alpha is {self.alpha:g}; it must be above 0")
        return super().init_state(task).put(self.name, Dual(torch.zeros_like(task.initial)))

    def correction(self, stack: ClientStack, question: Any, w: Tensor) -> Correction:
        return Pull(w, self.alpha, -stack.vectors(self.name, "value", w))

    def trained(self, stack: ClientStack, question: Any, w: Tensor, trained: Trained) -> Vectors:
        new = stack.vectors(self.name, "value", w) - self.alpha * trained.update
        stack.remember(self.name, [Dual(row) for row in new.cpu()])
        return super().trained(stack, question, w, trained)

    def step(self, state: State, total: Total, cohort: Cohort) -> State:
        h = state.slots[self.name].value - self.alpha * total.clients / len(cohort.task.clients) * total.mean("update")
        after = self.server.step(state, total.mean("update") - h / self.alpha, cohort.round)
        return after.put(self.name, Dual(h))
