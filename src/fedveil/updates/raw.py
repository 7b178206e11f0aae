"""FedSGD, FedAvg, FedProx, SCAFFOLD and q-FedAvg: clients send their update as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedveil import message
from fedveil.federation import About, Cohort, Crowd, Method, State
from fedveil.message import Answer, Count, Question, Record, Weights
from fedveil.task import Task
from fedveil.updates.local import Local, full_gradient
from fedveil.updates.server import Merge, Server, ServerState


@message.kind(3)
class Update(Answer, frozen=True):
    """w_k - w, and the number of records behind it."""

    update: Weights
    records: Count


@message.kind(4)
class Train(Question, frozen=True):
    """Train from these weights on your own records."""

    reply = Update
    weights: Weights


def raw_about(summary: str, sends: str, paper: str) -> About:
    """What holds for every method that sends updates in the clear."""
    return About(
        summary,
        sends,
        server_sees="every client's update, exactly; from one record's gradient its input can be rebuilt",
        network_sees="the same bytes, unless the transport encrypts them",
        claims=(("measured", "no privacy: an update is as exposed as a gradient; inversion attacks apply to it."),),
        paper=paper,
    )


@dataclass(frozen=True)
class FedAvg(Method):
    """Local training, then the mean of the updates (McMahan et al. 2017, algorithm 1)."""

    name: ClassVar[str] = "fedavg"
    about: ClassVar[About] = raw_about(
        "Clients train locally; the server averages what changed.",
        "the weight update w_k - w (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )

    local: Local = field(default_factory=Local)
    server: Server = field(default_factory=Server)
    merge: Merge = field(default_factory=Merge)

    def begin(self, task: Task) -> State:
        return self.server.begin(task.initial)

    def round(self, state: ServerState, cohort: Cohort) -> State:
        answers = cohort.ask(Train(state.weights))
        device = cohort.task.device
        return self.server.step(state, self.merge(answers.stack("update", device), answers.stack("records", device)))

    @property
    def answer(self) -> Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]:
        return {Train: self.train}

    def train(self, crowd: Crowd, question: Train) -> list[Update]:
        w = question.weights.to(crowd.task.device)
        trained, _ = self.local.train(crowd, w, self.correction(w))
        return updates(crowd, trained - w)

    def correction(self, w: Tensor) -> Callable[[Tensor], Tensor] | None:
        """What is added to each local gradient: nothing."""
        return None


def updates(crowd: Crowd, delta: Tensor) -> list[Update]:
    """Rows of [C, d] as answers."""
    return [Update(row, int(n)) for row, n in zip(delta.cpu(), crowd.rows.counts, strict=True)]


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

    def correction(self, w: Tensor) -> Callable[[Tensor], Tensor] | None:
        return lambda v: self.mu * (v - w)


@dataclass(frozen=True)
class FedSGD(FedAvg):
    """One gradient over all of a client's records; `server.lr` is the step (McMahan et al. 2017, section 2)."""

    name: ClassVar[str] = "fedsgd"
    about: ClassVar[About] = raw_about(
        "Clients send the gradient over all their records; the server takes one step.",
        "the negative gradient (d floats) and the record count n_k",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    )

    def train(self, crowd: Crowd, question: Train) -> list[Update]:
        gradient, _ = full_gradient(crowd, question.weights)
        return updates(crowd, -gradient)


# ---------------------------------------------------------------------------------------------------- SCAFFOLD


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

    control: Weights


@message.kind(8)
class ScaffoldState(State, frozen=True):
    """Global weights and control variate."""

    control: Weights


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates against client drift (Karimireddy et al. 2020, algorithm 1, option II)."""

    name: ClassVar[str] = "scaffold"
    about: ClassVar[About] = raw_about(
        "Clients correct their drift by the difference of their own and the mean gradient.",
        "the weight update and the change of the control variate (2d floats)",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, 2020",
    )

    local: Local = field(default_factory=Local)
    server_lr: float = 1.0

    def begin(self, task: Task) -> State:
        return ScaffoldState(task.initial, torch.zeros_like(task.initial))

    def round(self, state: ScaffoldState, cohort: Cohort) -> State:
        answers = cohort.ask(TrainControlled(state.weights, state.control))
        device = cohort.task.device
        share = len(answers) / len(cohort.task.clients)
        return ScaffoldState(
            state.weights + self.server_lr * answers.stack("update", device).mean(0),
            state.control + share * answers.stack("control", device).mean(0),
        )

    @property
    def answer(self) -> Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]:
        return {TrainControlled: self.train}

    def train(self, crowd: Crowd, question: TrainControlled) -> list[Controlled]:
        device = crowd.task.device
        w, c = question.weights.to(device), question.control.to(device)
        own = torch.stack([torch.zeros_like(c) if m is None else m.control.to(device) for m in crowd.memory])
        trained, steps = self.local.train(crowd, w, lambda v: c - own)
        new = own - c + (w - trained) / (steps * self.local.rate(crowd.round))[:, None]  # option II
        crowd.remember([Control(row) for row in new.cpu()])
        return [Controlled(u, d) for u, d in zip((trained - w).cpu(), (new - own).cpu(), strict=True)]


# ---------------------------------------------------------------------------------------------------- q-FedAvg


@message.kind(9)
class FairUpdate(Answer, frozen=True):
    """Δ_k and h_k of q-FedAvg: a weighted update and its share of the step's denominator."""

    update: Weights
    weight: Annotated[float, Meta(gt=0, le=1e12)]


@message.kind(10)
class TrainFair(Question, frozen=True):
    """Train from these weights and weight the update by your loss at them."""

    reply = FairUpdate
    weights: Weights


@dataclass(frozen=True)
class QFedAvg(Method):
    """Clients with a high loss count more (Li et al. 2020, algorithm 2). q = 0 is the unweighted FedAvg."""

    name: ClassVar[str] = "q-fedavg"
    about: ClassVar[About] = raw_about(
        "FedAvg that weights clients by their loss to the power q, for a fairer model.",
        "the loss-weighted update Δ_k (d floats) and the scalar h_k",
        "Li et al., Fair Resource Allocation in Federated Learning, 2020",
    )

    local: Local = field(default_factory=Local)
    q: float = 0.2

    def __post_init__(self) -> None:
        if self.q < 0:
            raise ValueError("q must be 0 or more")

    def begin(self, task: Task) -> State:
        return Server().begin(task.initial)

    def round(self, state: ServerState, cohort: Cohort) -> State:
        answers = cohort.ask(TrainFair(state.weights))
        device = cohort.task.device
        step = answers.stack("update", device).sum(0) / answers.stack("weight", device).sum().float()
        return ServerState(state.weights - step)

    @property
    def answer(self) -> Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]:
        return {TrainFair: self.train}

    def train(self, crowd: Crowd, question: TrainFair) -> list[FairUpdate]:
        w = question.weights.to(crowd.task.device)
        _, loss = full_gradient(crowd, w)
        trained, _ = self.local.train(crowd, w)
        lipschitz = 1 / self.local.rate(crowd.round)  # the paper's L
        change = lipschitz * (w - trained)  # [C, d]
        power = (loss + 1e-10) ** self.q
        delta = power[:, None] * change
        weight = self.q * (loss + 1e-10) ** (self.q - 1) * change.square().sum(1) + lipschitz * power
        return [FairUpdate(d, float(h)) for d, h in zip(delta.cpu(), weight, strict=True)]
