"""SCAFFOLD: control variates against the drift of clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.cohort import Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Record, Weights
from fedveil.core.method import About, Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.methods.fedavg import PRIVATE, raw_about
from fedveil.privacy.account import Account
from fedveil.privacy.dpsgd import DpSgd
from fedveil.train.aggregators import shortened
from fedveil.train.local import LocalTraining


@message.kind(5)
class Controlled(Answer, frozen=True):
    """The client's update and the change of its control variate."""

    update: Weights
    control: Weights


@message.kind(6)
class TrainControlled(Question, frozen=True):
    """Train from these weights, correcting the drift with the server's control variate c."""

    reply = Controlled
    weights: Weights
    control: Weights


@message.kind(7)
class Control(Record, frozen=True):
    """A client's memory: its own control variate c_k."""

    common = ()

    control: Weights


@message.kind(8)
class ScaffoldState(State, frozen=True):
    """Global weights and control variate."""

    control: Weights


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates against client drift (Karimireddy et al. 2020, algorithm 1, option II).

    privacy: local training is DP-SGD. Control variates are made of the weights before and after it and corrections come
             after the noise, so both cost nothing more (Noble et al. 2022)
    """

    name: ClassVar[str] = "scaffold"
    about: ClassVar[About] = raw_about(
        "Clients correct their drift by the difference of their own and the mean gradient.",
        "the weight update and the change of the control variate (2d floats)",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020",
        more=PRIVATE[:1],
    )
    unsupported: ClassVar[Mapping[str, str]] = {
        "user_privacy": "an update is cut and noised there, and its control variate would go along as it is",
    }

    local: LocalTraining = field(default_factory=LocalTraining)
    server_lr: float = 1.0
    privacy: DpSgd | None = None

    def __post_init__(self) -> None:
        if self.server_lr <= 0:
            raise ValueError(f"method.server_lr is {self.server_lr:g}; it is above 0")

    def init_state(self, task: Task) -> State:
        return ScaffoldState(task.initial, torch.zeros_like(task.initial))

    def round(self, state: ScaffoldState, cohort: Cohort) -> State:
        answers = cohort.ask(TrainControlled(state.weights, state.control))
        update, control = (
            torch.stack(shortened(cohort, answers, name)).to(cohort.task.device).mean(0)
            for name in ("update", "control")
        )
        share = len(answers) / len(cohort.task.clients)
        return ScaffoldState(state.weights + self.server_lr * update, state.control + share * control)

    @property
    def handlers(self) -> Mapping[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]]:
        return {TrainControlled: self.train}

    def forecast_compute(self, turn: Turn) -> Compute:
        if self.privacy:
            return self.local.forecast_private_compute(turn.records, turn.largest)
        return self.local.forecast_compute(turn.records)

    def client_cost(self, task: Task) -> Account | None:
        if not self.privacy:
            return None
        return self.privacy.account(task, self.local.batch, self.local.private_steps(task.largest))

    def train(self, stack: ClientStack, question: TrainControlled) -> list[Controlled]:
        device = stack.task.device
        w, c = question.weights.to(device), question.control.to(device)
        own = torch.stack([torch.zeros_like(c) if m is None else m.control.to(device) for m in stack.memory])
        trained, steps = self.trained(stack, w, lambda v: c - own)
        new = own - c + (w - trained) / (steps * self.local.rate(stack.round))[:, None]  # option II
        stack.remember([Control(row) for row in new.cpu()])
        return [Controlled(u, d) for u, d in zip((trained - w).cpu(), (new - own).cpu(), strict=True)]

    def trained(self, stack: ClientStack, w: Tensor, correction: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Weights [C, d] and steps taken [C]; all that is released of the records is in the weights."""
        if not self.privacy:
            return self.local.train(stack, w, correction)
        if price := self.client_cost(stack.task):
            stack.charge(price)
        steps = self.local.private_steps(stack.task.largest)
        weights = self.local.train_privately(stack, w, self.privacy, correction)
        return weights, torch.full((len(stack),), steps, device=w.device)
