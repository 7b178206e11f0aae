"""q-FedAvg: clients with a high loss count more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta

from fedveil.codecs.base import Codec
from fedveil.codecs.fit import cosine
from fedveil.codecs.raw import Raw
from fedveil.core import message
from fedveil.core.cohort import Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Size, Weights
from fedveil.core.method import About, Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.agreed import CodeSpace, Send, in_code_space, noted, recalled, tuned
from fedveil.methods.fedavg import raw_about
from fedveil.train.aggregators import clamped, shortened
from fedveil.train.local import LocalTraining, full_gradient, full_gradient_compute
from fedveil.train.optimizers import ServerOptimizer, ServerState


@message.kind(9)
class FairUpdate(Answer, frozen=True):
    """Δ_k and h_k of q-FedAvg: a weighted update and its share of the step's denominator."""

    update: Weights
    weight: Annotated[float, Meta(gt=0, lt=1e12)]


@message.kind(27)
class FairMagnitude(Answer, frozen=True):
    """h_k, and the largest magnitude in Δ_k, which follows in code."""

    largest: Annotated[float, Meta(ge=0, le=1e6)]
    weight: Annotated[float, Meta(gt=0, lt=1e12)]


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
        more=(),
    )
    unsupported: ClassVar[Mapping[str, str]] = {
        "privacy": "a client's weight is its loss on all its records, which no noise covers",
        "user_privacy": "clients weight their updates by their loss, so that nothing bounds a client's part in the sum",
    }

    local: LocalTraining = field(default_factory=LocalTraining)
    up: Codec = field(default_factory=Raw)
    q: float = 0.2

    def __post_init__(self) -> None:
        if self.q < 0:
            raise ValueError("q must be 0 or more")
        if not isinstance(self.up, Raw | CodeSpace):
            raise ValueError(f"method.up is {self.up.name}; q-fedavg takes raw, or fedage, whose codes it can sum")

    def init_state(self, task: Task) -> State:
        self.up.validate(task)
        return ServerOptimizer().init_state(task.initial)

    def round(self, state: ServerState, cohort: Cohort) -> State:
        answers = cohort.ask(TrainFair(state.weights))
        weights = clamped(cohort, "weight", {k: answer.weight for k, answer in answers.items()})
        if isinstance(self.up, CodeSpace):
            mean, _, clients = in_code_space(self.up, answers, cohort)
            return ServerState(state.weights - mean * (len(clients) / sum(weights[k] for k in clients)))
        total = torch.stack(shortened(cohort, answers, "update")).to(cohort.task.device).sum(0)
        return ServerState(state.weights - total / torch.tensor(list(weights.values())).to(total.device).sum())

    def reply(self, question: Question) -> type[Answer]:
        if isinstance(self.up, CodeSpace):
            return self.up.payload if isinstance(question, Send) else FairMagnitude
        return type(question).reply

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        return self.up.sizes(task) if isinstance(question, Send) else task.sizes

    @property
    def handlers(self) -> Mapping[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]]:
        return {TrainFair: self.train} | ({Send: self.send} if isinstance(self.up, CodeSpace) else {})

    def send(self, stack: ClientStack, question: Send) -> list[Any]:
        codec, delta = tuned(self.up, stack, question), recalled(stack)
        payloads = codec.encode(stack.task, delta, delta, stack.seeds("encoding"), stack)
        stack.measure(cosine=cosine(codec.decode(stack.task, delta, payloads), delta))
        return payloads

    def forecast_compute(self, turn: Turn) -> Compute:
        return full_gradient_compute(turn.records) + self.local.forecast_compute(turn.records)

    def train(self, stack: ClientStack, question: TrainFair) -> list[FairUpdate] | list[FairMagnitude]:
        w = question.weights.to(stack.task.device)
        _, loss = full_gradient(stack, w)
        trained, _ = self.local.train(stack, w)
        lipschitz = 1 / self.local.rate(stack.round)  # the paper's L
        change = lipschitz * (w - trained)  # [C, d]
        power = (loss + 1e-10) ** self.q
        delta = power[:, None] * change
        weight = self.q * (loss + 1e-10) ** (self.q - 1) * change.square().sum(1) + lipschitz * power
        if isinstance(self.up, CodeSpace):
            largest = noted(stack, delta)
            return [FairMagnitude(*pair) for pair in zip(largest, weight.tolist(), strict=True)]
        return [FairUpdate(d, float(h)) for d, h in zip(delta.cpu(), weight, strict=True)]
