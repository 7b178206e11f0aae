"""Averaging: clients train, and the server steps along the mean of their vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedveil.codecs.base import Codec, as_codec
from fedveil.codecs.raw import Raw
from fedveil.core.account import Account
from fedveil.core.batchnorm import SLOT, Norms
from fedveil.core.cohort import Cohort
from fedveil.core.exchange import Handler
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Size
from fedveil.core.method import Method, State
from fedveil.core.sampling import CohortSampler
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.up import Total
from fedveil.methods import rules
from fedveil.methods.parts import Parts, assemble
from fedveil.privacy.dpsgd import DpSgd
from fedveil.privacy.secagg.client import stages
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.privacy.users import UserLevel
from fedveil.train.aggregators import Aggregator
from fedveil.train.local import LocalTraining
from fedveil.train.optimizers import ServerOptimizer
from fedveil.train.trainers import Correction, Minibatches, PrivateMinibatches, Trained, Trainer, Untrained
from fedveil.train.vectors import Vectors


@dataclass(frozen=True)
class Averaging(Method):
    """Train locally, then step along the mean of the updates. The base class of every method that averages.

    up, down:     the codec of updates to the server, and of the server's steps to the clients (None: full weights)
    feedback:     a client adds the error of the codec to its next update (Seide et al. 2014)
    full_rounds:  number of last rounds with full updates and full weights (TOFU's switch₂)
    privacy:      train with DP-SGD; a client's messages are private for each of its records
    user_privacy: the model is private for each client
    secure:       the server learns the sum of the updates or codes only; with a codec whose messages cannot be added,
                  in full rounds only
    """

    vectors: ClassVar[tuple[str, ...]] = ("update",)  # what clients send, by name
    scalars: ClassVar[Mapping[str, Any]] = {}  # numbers in the clear beside them, with their types
    broadcasts: ClassVar[Mapping[str, Any]] = {}  # further fields of the question, with their types
    weighted: ClassVar[bool] = True  # whether clients count by their records
    limited: ClassVar[bool] = False  # whether a vector far longer than the cohort's median is scaled down

    local: LocalTraining = field(default_factory=LocalTraining)
    up: Codec = field(default_factory=Raw)
    down: Codec | None = None
    server: ServerOptimizer = field(default_factory=ServerOptimizer)
    aggregator: Aggregator = field(default_factory=Aggregator)
    feedback: bool = False
    full_rounds: int = 0
    privacy: DpSgd | None = None
    user_privacy: UserLevel | None = None
    secure: SecureSum | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "up", as_codec(self.up, "up"))
        if self.down is not None:
            object.__setattr__(self, "down", as_codec(self.down, "down"))
        rules.validate(self)

    def __getstate__(self) -> dict[str, Any]:
        """The options alone: parts are built again where the method arrives."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    # ------------------------------------------------------------------------------------------------ what may differ

    @property
    def trainer(self) -> Trainer:
        """Return the trainer: what clients do with their records."""
        if self.privacy:
            return PrivateMinibatches(self.local, self.privacy)
        return Untrained() if self.up.replaces_training else Minibatches(self.local)

    @property
    def own_training(self) -> bool:
        """Return whether the method replaces any of the functions by which FedAvg's clients train."""
        return any(getattr(type(self), f) is not getattr(Averaging, f) for f in ("trainer", "correction", "trained"))

    @property
    def own_step(self) -> bool:
        """Return whether the method replaces any of the functions by which FedAvg's server steps."""
        return any(getattr(type(self), f) is not getattr(Averaging, f) for f in ("round", "step", "combine"))

    def broadcast(self, state: State) -> dict[str, Tensor]:
        """Return the values of `broadcasts` for this round."""
        return {}

    def correction(self, stack: ClientStack, question: Any, w: Tensor) -> Correction | None:
        """Return a function of local weights [C, d] that is added to each gradient [C, d]; None adds nothing.

        Clients train from `w` [d]."""
        return None

    def trained(self, stack: ClientStack, question: Any, w: Tensor, trained: Trained) -> Vectors:
        """Return the vectors that leave the clients, by name, after training from `w` [d]."""
        return Vectors({"update": trained.update})

    def combine(self, total: Total) -> Tensor:
        """Return the direction of the server's step, [d]."""
        return total.mean("update")

    def step(self, state: State, total: Total, cohort: Cohort) -> State:
        """Return the server's state after its step."""
        return self.server.step(state, self.combine(total), cohort.round)

    # ------------------------------------------------------------------------------------------------ a round

    def round(self, state: State, cohort: Cohort) -> State:
        parts, now = self._phase(cohort.rounds_left, cohort.task), self.server.training(state)
        extra = self.broadcast(now) | parts.up.broadcast(cohort.task, now)
        if parts.statistics:
            extra["statistics"] = now.slots[SLOT].statistics
        at, question, cohort = parts.down.reach(now, cohort, extra)
        total = parts.up.collect(now, cohort, question, at)
        after = self.step(now, total, cohort)
        for slot, record in total.slots.items():
            after = after.put(slot, record)
        return self.server.published(state, parts.down.publish(now, after, cohort))

    def released(self, stack: ClientStack, question: Any, w: Tensor, parts: Parts | None = None) -> Vectors:
        """Charge the clients, train from `w` [d], and return the vectors, clipped and noised if privacy needs it.

        Later steps use these vectors and not the records, so they cost no privacy."""
        if cost := self.client_cost(stack.task):
            stack.charge(cost)
        trained = self.trainer.train(stack, w, self.correction(stack, question, w))
        x = self.trained(stack, question, w, trained)
        stack.reveal(**{**x.named, "update": trained.update})
        for transform in (parts or self.parts).release:
            x = transform.client(stack, x)
        return x

    def given(self, parts: Parts, stack: ClientStack, question: Any) -> tuple[Tensor, Vectors]:
        """Return the weights [d] that a question is about, and the vectors that the uplink encodes."""
        w = parts.down.held(stack, question)
        if parts.statistics:
            stack.norms = question.statistics.expand(len(stack), -1)
        elif stack.task.norms.policy == "local":
            held, first = stack.slot(SLOT), stack.task.norms.values
            stack.norms = torch.stack([first if own is None else own.statistics.to(first) for own in held])
        x = self.released(stack, question, w, parts)
        if parts.statistics:
            x = replace(x, statistics=stack.norms)
        elif stack.norms is not None and stack.task.norms.policy == "local":
            stack.remember(SLOT, [Norms(row) for row in stack.norms.cpu()])
        for transform in parts.transforms:
            x = transform.client(stack, x)
        return w, x

    @cached_property
    def parts(self) -> Parts:
        """Return the parts of an ordinary round."""
        return assemble(self)

    @cached_property
    def phases(self) -> tuple[Parts, ...]:
        """Return the parts of every phase. Each phase has its own question type, which tells clients the phase."""
        phases = [self.parts, assemble(self, full=True)] if self.full_rounds else [self.parts]
        if not rules.no_statistics(self):
            phases += [assemble(self, phase.full, statistics=True) for phase in phases]
        return tuple(phases)

    def _phase(self, rounds_left: int, task: Task | None = None) -> Parts:
        full, statistics = rounds_left < self.full_rounds, bool(task and task.norms.policy == "federated")
        return next(phase for phase in self.phases if (phase.full, phase.statistics) == (full, statistics))

    @cached_property
    def handlers(self) -> Mapping[type[Question], Handler]:
        table: dict[type[Question], Handler] = {}
        sums: list[tuple[dict[type[Question], Handler], type[Answer]]] = []
        for parts in self.phases:
            answering = parts.up.answering({parts.down.question: partial(self.given, parts)})
            table |= {**parts.down.handlers, **answering.clear}
            for i, (own, answer) in enumerate(answering.summed):
                before = sums[i][0] if i < len(sums) else {}
                sums[i : i + 1] = [({**before, **own}, answer)]
        return table | stages(self.parts.secure, *sums) if sums and self.parts.secure else table

    # ------------------------------------------------------------------------------------------------ what it takes

    def init_state(self, task: Task) -> State:
        rules.validate_on(self, task)
        for parts in self.phases:
            parts.up.validate(task)
        if self.down:
            self.down.validate(task)
        state = self.server.init_state(task.initial)
        return state.put(SLOT, Norms(task.norms.values)) if task.norms.policy == "federated" else state

    @property
    def min_clients(self) -> int:
        return self.secure.min_clients if self.secure else 0 if self.parts.trusted else 1

    @property
    def reads_rounds(self) -> bool:
        return self.full_rounds > 0

    def over(self, rounds: int) -> Averaging:
        local, server = self.local.over(rounds), self.server.over(rounds)
        return self if (local, server) == (self.local, self.server) else replace(self, local=local, server=server)

    @property
    def promise(self) -> DpSgd | UserLevel | None:
        return self.privacy or self.user_privacy

    @property
    def noised_sum(self) -> SecureSum | None:
        return self.secure if self.user_privacy and self.user_privacy.where == "sum" else None

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return (self.up, self.down) if self.down else (self.up,)

    @property
    def needs(self) -> tuple[str, ...]:
        return *self.trainer.needs, *(need for codec in self.codecs for need in codec.needs)

    @property
    def waits(self) -> str:
        return rules.waits(self)

    def no_batch_norm(self, policy: str) -> str:
        return rules.no_statistics(self) if policy == "federated" else rules.no_norms(self)

    @property
    def needs_all(self) -> str:
        return next((phase.up.needs_all for phase in self.phases if phase.up.needs_all), "")

    def client_cost(self, task: Task) -> Account | None:
        users = self.user_privacy
        if users is None or self.parts.trusted:
            return self.trainer.client_cost(task)
        secure = self.secure if users.where == "sum" else None
        return users.account(task, secure=secure, size=self.summed_numbers(task))

    def summed_numbers(self, task: Task) -> int:
        return len(self.vectors) * (task.layout.size if self.full_rounds else self.up.summed_numbers(task))

    def account(self, task: Task, sampler: CohortSampler) -> Account | None:
        rules.validate_sampling(self, task, sampler)
        if self.user_privacy and self.parts.trusted:
            return self.user_privacy.account(task, sampler.rate(task))
        return super().account(task, sampler)

    def reply(self, question: Question) -> type[Answer]:
        parts = self._asked_by(type(question))
        return parts.up.reply(type(question)) if parts else type(question).reply

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        parts = self._asked_by(type(question))
        sizes = parts.up.sizes(task, type(question), client) if parts else task.sizes
        return {**sizes, "records": 1} if self.parts.equal else sizes

    def question_sizes(self, task: Task) -> Mapping[str, Size]:
        return {**task.sizes, **self.up.sizes(task)}

    def _asked_by(self, question: type[Question]) -> Parts | None:
        return next((parts for parts in self.phases if question in parts.questions), None)

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        parts = self._phase(turn.rounds - turn.round, task)
        sizes = parts.up.sizes(task, parts.down.question, turn.client)
        *before, asked = parts.down.forecast_messages(task, turn, sizes)
        return [*before, *parts.up.forecast_messages(self, task, asked, turn)]

    def forecast_compute(self, turn: Turn) -> Compute:
        parts = self._phase(turn.rounds - turn.round)
        return self.trainer.forecast_compute(turn) + parts.up.forecast_compute(turn)
