"""The uplink in the clear: each client's payload is decoded by itself, then the updates are aggregated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.codecs.fit import cosine
from fedveil.core.batchnorm import SLOT, Norms
from fedveil.core.cohort import Answers, Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Record, Refused, Size
from fedveil.core.method import State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.links.payloads import Payloads
from fedveil.links.up import Answering, Given, Total, Uplink
from fedveil.train.aggregators import Aggregating, clamped, shortened
from fedveil.train.transforms import Transform
from fedveil.train.vectors import Vectors, joined


@dataclass(frozen=True)
class Decoded(Uplink):
    """Payloads of one codec, decoded and aggregated.

    counted:    whether updates are weighted by records; otherwise an answer says 1, or nothing
    limited:    whether a vector far longer than the cohort's median is scaled down to it
    transforms: told what the server will decode
    """

    codec: Codec
    payloads: Payloads
    aggregator: Aggregating
    counted: bool = True
    limited: bool = False
    transforms: tuple[Transform, ...] = ()

    def validate(self, task: Task) -> None:
        self.codec.validate(task)

    # ------------------------------------------------------------------------------------------------ the server

    def collect(self, state: State, cohort: Cohort, question: Question, at: Tensor) -> Total:
        answers = cohort.ask(question) if self.aggregator.quorum else cohort.exchange(question)
        usable = self.usable(answers, cohort)
        rows, clients = self.decoded(usable, cohort, at)
        if self.aggregator.quorum:
            cohort.require(len(clients), len(cohort))
        kept = [usable[k] for k in clients]
        weights = torch.tensor([a.records for a in kept], device=at.device) if self.payloads.counted else None
        widths = [len(at)] * len(rows)

        @cache
        def merged() -> Mapping[str, Tensor]:
            if not self.aggregator.joint:
                return {name: self.aggregator.merge(vectors, weights, cohort) for name, vectors in rows.items()}
            whole = self.aggregator.merge(joined(list(rows.values())), weights, cohort)
            return dict(zip(rows, whole.split(widths), strict=True))

        told = {name: {k: getattr(usable[k], name) for k in clients} for name, _ in self.payloads.scalars}
        scalars = {name: _sum(clamped(cohort, name, each)) for name, each in told.items()}
        slots = dict[str, Record]()
        if self.payloads.statistics and clients:
            each = torch.stack([answer.statistics for answer in kept]).to(at.device)
            slots[SLOT] = Norms(self.aggregator.merge(each, weights, cohort))
        if not self.aggregator.quorum:  # who answered is private: only the noised mean may be looked at
            n = cohort.expected
            return Total(lambda name: merged()[name], lambda name: merged()[name] * n, n, scalars)
        return Total(lambda name: merged()[name], lambda name: rows[name].sum(0), len(clients), scalars, slots)

    def usable(self, answers: Answers, cohort: Cohort) -> dict[int, Any]:
        """The answers that can be decoded, by client; others are rejected by name."""
        usable = {}
        for client, answer in answers.items():
            try:
                for name in self.payloads.vectors:
                    self.codec.for_client(client).check(cohort.task, self.payloads.part(answer, name))
                if self.payloads.statistics:
                    cohort.task.norms.check(answer.statistics)
                usable[client] = answer
            except Refused as error:
                cohort.reject(client, error)
        return usable

    def decoded(self, usable: Mapping[int, Any], cohort: Cohort, at: Tensor) -> tuple[dict[str, Tensor], list[int]]:
        """Vectors [m, d] by name, decoded at the weights the clients had, and whose they are. A client whose vectors
        are not finite is rejected by name."""
        names = self.payloads.vectors
        if not usable:
            return {name: at.new_empty(0, len(at)) for name in names}, []
        if self.aggregator.quorum and (shown := self.codec.exhibit(self._parts(usable, names[0])[0])):
            cohort.exhibit(*shown)
        base = at.expand(len(usable), -1)
        rows = {name: self.codec.decode(cohort.task, base, self._parts(usable, name)) for name in names}
        finite = torch.stack([vectors.sum(1).isfinite() for vectors in rows.values()]).all(0)
        for client, fine in zip(usable, finite.tolist(), strict=True):
            if not fine:
                cohort.reject(client, Refused("not finite", "the decoded update holds a value that is not a number"))
        clients = [client for client, fine in zip(usable, finite.tolist(), strict=True) if fine]
        if len(clients) < len(usable):
            rows = {name: vectors[finite] for name, vectors in rows.items()}
        if self.limited and clients:
            each = {name: dict(zip(clients, vectors, strict=True)) for name, vectors in rows.items()}
            rows = {name: torch.stack(shortened(cohort, name, own)) for name, own in each.items()}
        return rows, clients

    def _parts(self, usable: Mapping[int, Any], name: str) -> list[Any]:
        return [self.payloads.part(answer, name) for answer in usable.values()]

    # ------------------------------------------------------------------------------------------------ the clients

    def answering(self, given: Mapping[type[Question], Given]) -> Answering:
        return Answering({kind: partial(self._answer, vectors) for kind, vectors in given.items()})

    def _answer(self, given: Given, stack: ClientStack, question: Any) -> list[Any]:
        w, x = given(stack, question)
        parts = encoded(self.codec, stack, w, x, self.transforms)
        records = stack.rows.counts.tolist() if self.counted else None
        return self.payloads.join(parts, {n: v.tolist() for n, v in x.scalars.items()}, records, x.statistics)

    # ------------------------------------------------------------------------------------------------ both sides

    def reply(self, question: type[Question]) -> type[Answer]:
        return self.payloads.record

    def sizes(self, task: Task, question: type[Question], client: int) -> Mapping[str, Size]:
        return self.codec.for_client(client).sizes(task)

    def forecast_compute(self, turn: Turn) -> Compute:
        once = self.codec.for_client(turn.client).forecast_compute(turn.records)
        return sum([once] * (len(self.payloads.vectors) - 1), start=once)


def encoded(
    codec: Codec, stack: ClientStack, w: Tensor, x: Vectors, transforms: Sequence[Transform]
) -> dict[str, list[Any]]:
    """Payloads of each vector of clients that trained from `w` [d]. Transforms are told what the server will decode.

    A codec that makes its own updates has nothing to compare them with."""
    base, purposes = w.expand(len(stack), -1), ["encoding", *(f"encoding {name}" for name in list(x.named)[1:])]
    parts = {
        name: codec.encode(stack.task, base, vectors, stack.seeds(purpose), stack)
        for (name, vectors), purpose in zip(x.named.items(), purposes, strict=True)
    }
    if codec.lossy and not codec.replaces_training:
        decoded = Vectors({name: codec.decode(stack.task, base, rows) for name, rows in parts.items()})
        measure(stack, x, decoded)
        for transform in transforms:
            transform.sent(stack, x, decoded)
    return parts


def measure(stack: ClientStack, x: Vectors, decoded: Vectors) -> None:
    """Report how near the decoded vectors are to the true ones, as a whole and for each layer."""
    for name, true in x.named.items():
        label = "cosine" if name == "update" else f"cosine_{name}"
        stack.measure(**{label: cosine(decoded[name], true)})
        for layer in stack.task.layout.layers:
            part = slice(layer.start, layer.stop)
            stack.measure(**{f"{label}/{layer.name}": cosine(decoded[name][:, part], true[:, part])})


def _sum(told: Mapping[int, float]) -> float:
    return float(torch.tensor(list(told.values())).sum())
