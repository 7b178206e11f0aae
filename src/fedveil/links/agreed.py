"""The uplink in code space: the cohort agrees on something first, then sends codes whose mean alone is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedveil.codecs.agreed import AgreedCodec
from fedveil.core import schema
from fedveil.core.cohort import Cohort
from fedveil.core.exchange import Handler
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Refused, Size
from fedveil.core.method import Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.decoded import measure
from fedveil.links.payloads import Payloads
from fedveil.links.up import Answering, Given, Total, Uplink
from fedveil.privacy.secagg.server import ask_sum
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.privacy.secagg.total import Sum
from fedveil.train.aggregators import clamped
from fedveil.train.transforms import Transform
from fedveil.train.vectors import Vectors

SLOT = "up"  # of the server's state: what the codec keeps
NOTE, SHARE = "vector", "share"  # what a client keeps from the first exchange to the second


@dataclass(frozen=True)
class Agreed(Uplink):
    """Two exchanges of an `AgreedCodec`: offers and what the cohort agrees on, then codes.

    scalars: numbers beside the offers, with their types
    how:     sum the codes, and offers that add up, securely; None: in the clear
    """

    codec: AgreedCodec
    scalars: tuple[tuple[str, Any], ...] = ()
    how: SecureSum | None = None
    transforms: tuple[Transform, ...] = ()

    @property
    def offers(self) -> Payloads:
        return Payloads(self.codec.offer, scalars=self.scalars, counted=False)

    @property
    def _sums_offers(self) -> bool:
        return self.how is not None and self.codec.offer.additive

    @property
    def questions(self) -> tuple[type[Question], ...]:
        return (self.codec.agreement,)

    def validate(self, task: Task) -> None:
        self.codec.validate(task)
        if self.how:
            self.how.validate(task, self.codec.payload)
            self._validate_exact(self.how)

    def _validate_exact(self, how: SecureSum) -> None:
        """Raise a ValueError if the sum's rounding, below clip / (2^(bits-1) - 1) a client, could change the codes."""
        if self.codec.tolerance is not None and self.codec.most is not None:
            needed = math.ceil(math.log2(self.codec.most * how.clip / self.codec.tolerance + 2)) + 1
            if how.bits < needed:
                raise ValueError(
                    f"secure.bits is {how.bits}, but {self.codec.name}'s codes of {self.codec.most} clients add up "
                    f"exactly with {needed} bits or more; set secure.bits={needed}"
                )

    def broadcast(self, task: Task, state: State) -> dict[str, Tensor]:
        return self.codec.broadcast(task, state.slots.get(SLOT))

    # ------------------------------------------------------------------------------------------------ the server

    def collect(self, state: State, cohort: Cohort, question: Question, at: Tensor) -> Total:
        agreed, asked, scalars = self._agree(cohort, question)
        clients: Sequence[int]
        if self.how:
            total = ask_sum(asked, agreed, self.how, number=int(self._sums_offers))
            dtype = torch.float32 if self.codec.tolerance is None else torch.float64
            clients, payloads = total.clients, [_mean(self.codec.payload, total, dtype)]
        else:
            usable = {k: answer for k, answer in asked.ask(agreed).items() if self._checks(asked, k, answer)}
            asked.require(len(usable), len(asked))
            clients, payloads = list(usable), list(usable.values())
        codec = self.codec.at(cohort.task, agreed, cohort.seed)
        mean, kept = codec.merge(cohort.task, payloads, len(clients))
        mean = mean / float(schema.stack(payloads, "share").mean())
        sums = {name: sum(each[k] for k in clients) for name, each in scalars.items()}
        slots = {} if kept is None else {SLOT: kept}
        return Total(lambda _: mean, lambda _: mean * len(clients), len(clients), sums, slots)

    def _agree(self, cohort: Cohort, question: Question) -> tuple[Question, Cohort, dict[str, dict[int, float]]]:
        """The question that states what was agreed on, whom to ask it, and the scalars of each client."""
        if self._sums_offers and self.how:
            total = ask_sum(cohort, question, self.how)
            return self.codec.agree(cohort, {0: _mean(self.codec.offer, total)}), cohort.only(total.clients), {}
        told = {k: answer for k, answer in cohort.ask(question).items() if self._offers(cohort, k, answer)}
        cohort.require(len(told), len(cohort))
        scalars = {
            name: clamped(cohort, name, {k: getattr(a, name) for k, a in told.items()}) for name, _ in self.scalars
        }
        return self.codec.agree(cohort, told), cohort.only(told), scalars

    def _offers(self, cohort: Cohort, client: int, offer: Any) -> bool:
        return _fine(cohort, client, lambda: self.codec.check_offer(cohort.task, offer))

    def _checks(self, cohort: Cohort, client: int, payload: Any) -> bool:
        return _fine(cohort, client, lambda: self.codec.check(cohort.task, payload))

    # ------------------------------------------------------------------------------------------------ the clients

    def answering(self, given: Mapping[type[Question], Given]) -> Answering:
        first: dict[type[Question], Handler] = {kind: partial(self._offer, own) for kind, own in given.items()}
        second: dict[type[Question], Handler] = {self.codec.agreement: self._send}
        if self.how is None:
            return Answering(first | second)
        codes = (second, self.codec.payload)
        if self._sums_offers:
            return Answering(summed=[(first, self.offers.record), codes])
        return Answering(first, [codes])

    def _offer(self, given: Given, stack: ClientStack, question: Any) -> list[Any]:
        """Keep what each client will send until everybody has agreed."""
        _, x = given(stack, question)
        (vectors,) = x.named.values()
        share = torch.ones(len(stack), 1) if x.share is None else x.share
        for note, vector, own in zip(stack.notes, vectors, share, strict=True):
            note[NOTE], note[SHARE] = vector, own
        parts = {"update": self.codec.offers(stack, vectors, question)}
        return self.offers.join(parts, {n: v.tolist() for n, v in x.scalars.items()}, None)

    def _send(self, stack: ClientStack, question: Any) -> list[Any]:
        """Send the codes of what was trained in this round."""
        vectors, share = (torch.stack(stack.recall(name)) for name in (NOTE, SHARE))
        codec = self.codec.at(stack.task, question, stack.seed)
        payloads = codec.encode(stack.task, vectors, vectors, stack.seeds("encoding"), stack)
        x = Vectors({"update": vectors})
        decoded = Vectors({"update": codec.decode(stack.task, vectors, payloads)})
        measure(stack, x, decoded)
        for transform in self.transforms:
            transform.sent(stack, x, decoded)
        return [codec.weighed(payload, row) for payload, row in zip(payloads, share, strict=True)]

    # ------------------------------------------------------------------------------------------------ both sides

    def reply(self, question: type[Question]) -> type[Answer]:
        return self.codec.payload if question is self.codec.agreement else self.offers.record

    def sizes(self, task: Task, question: type[Question], client: int) -> Mapping[str, Size]:
        return self.codec.sizes(task)

    def forecast_messages(self, method: Method, task: Task, question: Question, turn: Turn) -> list[Question]:
        asked, send = [question], [schema.blank(self.codec.agreement, self.codec.sizes(task))]
        if self.how:
            send = self.how.forecast_messages(method, task, send[0], turn)
        if self.how and self._sums_offers:
            asked = self.how.forecast_messages(method, task, question, turn)
        return asked + send

    def forecast_compute(self, turn: Turn) -> Compute:
        return self.codec.forecast_compute(turn.records)


def _mean(kind: type[Answer], total: Sum, dtype: torch.dtype = torch.float32) -> Any:
    return kind(**{name: total.mean(name, dtype) for name in total.totals})


def _fine(cohort: Cohort, client: int, check: Any) -> bool:
    try:
        check()
    except Refused as error:
        cohort.reject(client, error)
        return False
    return True
