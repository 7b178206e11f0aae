"""SCAFFOLD: control variates against the drift of clients (Karimireddy et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.cohort import Cohort
from fedveil.core.message import Record, Weights
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
class Control(Record, frozen=True):
    """A control variate: a client's own c_k in its memory, the mean c in the server's state."""

    common = ()

    control: Weights


@dataclass(frozen=True)
class Scaffold(Averaging):
    """Control variates against client drift (Karimireddy et al. 2020, algorithm 1, option II).

    With `privacy` the control variates are made of the weights before and after private training, and corrections come
    after the noise, so both cost nothing more (Noble et al. 2022). With `user_privacy` update and control variate are
    clipped together.
    """

    name: ClassVar[str] = "scaffold"
    about: ClassVar[About] = raw_about(
        "Clients correct their drift by the difference of their own and the mean gradient.",
        "the weight update and the change of the control variate (2d floats)",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020",
    )
    vectors: ClassVar[tuple[str, ...]] = ("update", "control")
    broadcasts: ClassVar[Mapping[str, Any]] = {"control": Weights}
    weighted: ClassVar[bool] = False
    limited: ClassVar[bool] = True

    def init_state(self, task: Task) -> State:
        return super().init_state(task).put(self.name, Control(torch.zeros_like(task.initial)))

    def broadcast(self, state: State) -> dict[str, Tensor]:
        return {"control": state.slots[self.name].control}

    def correction(self, stack: ClientStack, question: Any, w: Tensor) -> Correction:
        return Pull(w, offset=question.control.to(w.device) - self._own(stack, w))

    def trained(self, stack: ClientStack, question: Any, w: Tensor, trained: Trained) -> Vectors:
        own, c = self._own(stack, w), question.control.to(w.device)
        rate = (trained.steps * self.local.rate(stack.round))[:, None]
        new = own - c - trained.update / rate  # option II: c_k⁺ = c_k - c + (w - w_k) / (K η)
        stack.remember(self.name, [Control(row) for row in new.cpu()])
        return Vectors({"update": trained.update, "control": new - own})

    def _own(self, stack: ClientStack, w: Tensor) -> Tensor:
        """c_k of each client, [C, d]."""
        return stack.vectors(self.name, "control", w)

    def step(self, state: State, total: Total, cohort: Cohort) -> State:
        share = total.clients / len(cohort.task.clients)
        control = state.slots[self.name].control + share * total.mean("control")
        return super().step(state, total, cohort).put(self.name, Control(control))
