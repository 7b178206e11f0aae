"""The uplink in the clear: each client's payload is decoded by itself, then the updates are aggregated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace as with_fields
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.codecs.fit import cosine
from fedveil.core import schema
from fedveil.core.batchnorm import SLOT, Norms
from fedveil.core.cohort import Answers, Cohort
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Refused, Size
from fedveil.core.method import State
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack, at_once
from fedveil.core.task import Task
from fedveil.gpu.graphs import one_thread
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
    coded:      whether a linear codec's codes are aggregated, and only the result is decoded
    release:    transforms of a linear codec's codes, after which they may leave a client
    """

    codec: Codec
    payloads: Payloads
    aggregator: Aggregating
    counted: bool = True
    limited: bool = False
    transforms: tuple[Transform, ...] = ()
    coded: bool = False
    release: tuple[Transform, ...] = ()

    def validate(self, task: Task) -> None:
        self.codec.validate(task)

    # ------------------------------------------------------------------------------------------------ the server

    def collect(self, state: State, cohort: Cohort, question: Question, at: Tensor) -> Total:
        with one_thread():  # a batch is small, and threads that wait for the next one take cores from training
            codes_differ = cohort.buffered and self.coded  # what is a code in one round is none in another
            return (replace(self, coded=False) if codes_differ else self)._collect(cohort, question, at)

    def _collect(self, cohort: Cohort, question: Question, at: Tensor) -> Total:
        merged = Merged(self.aggregator, self._width(cohort.task))
        told: dict[str, dict[int, float]] = {name: {} for name, _ in self.payloads.scalars}
        answered = 0
        batches = self._arrived(cohort, question, at)
        for batch in _joined(list(batches)) if self.needs_all else batches:
            rows, kept = batch.rows, list(batch.answers.values())
            if self.limited and kept:
                each = {name: dict(zip(batch.answers, vectors, strict=True)) for name, vectors in rows.items()}
                rows = {name: torch.stack(shortened(cohort, name, own)) for name, own in each.items()}
            weights = torch.tensor([a.records for a in kept], device=at.device) if self.payloads.counted else None
            statistics = schema.stack(kept, "statistics").to(at.device) if self.payloads.statistics and kept else None
            merged.add(rows, weights, statistics)
            for name, own in told.items():
                own.update({k: getattr(answer, name) for k, answer in batch.answers.items()})
            answered += batch.answered
        if self.aggregator.quorum:
            cohort.require(answered, len(cohort))
            cohort.require(merged.clients, len(cohort))
        scalars = {name: _sum(clamped(cohort, name, each)) for name, each in told.items()}
        means = merged.finish(cohort)

        def vector(found: Tensor) -> Tensor:
            if not self.coded:
                return found
            payload = self.codec.payload(**{self.codec.code_field: found}, **self.codec.shared(cohort.seed))
            return self.codec.decode(cohort.task, at[None], [payload])[0]

        if not self.aggregator.quorum:  # who answered is private: only the noised mean may be looked at
            n = cohort.expected
            return Total(lambda name: vector(means[name]), lambda name: vector(means[name]) * n, n, scalars)
        slots = {} if merged.statistics is None else {SLOT: Norms(merged.statistics)}
        sums = merged.sums
        return Total(lambda name: vector(means[name]), lambda name: vector(sums[name]), merged.clients, scalars, slots)

    def _width(self, task: Task) -> int:
        """How many numbers stand for a vector while vectors are aggregated."""
        return self.codec.summed_numbers(task) if self.coded else task.layout.size

    @property
    def needs_all(self) -> str:
        return self.aggregator.needs_all or ("the limit on long vectors" if self.limited else "")

    def _at_once(self, task: Task) -> int | None:
        """How many clients' vectors are merged at once; None: all of them must be."""
        if self.needs_all:
            return None
        return max(1, at_once(task) // len(self.payloads.vectors))

    def _arrived(self, cohort: Cohort, question: Question, at: Tensor) -> Iterator[Batch]:
        """The answers of a round, batch by batch. Late ones are decoded at the weights that they are about, and their
        vectors are scaled for their staleness."""
        kept = at if self.codec.at_weights else None
        for asked, answers in cohort.arrivals(question, self.payloads.record, kept, self._at_once(cohort.task)):
            usable = self.usable(answers, cohort, asked.seed)
            rows, clients = self.decoded(usable, cohort, at if asked.at is None else asked.at)
            if asked.weight != 1:
                rows = {name: vectors * asked.weight for name, vectors in rows.items()}
            yield Batch(rows, {k: usable[k] for k in clients}, len(answers))

    def usable(self, answers: Answers, cohort: Cohort, seed: Seed) -> dict[int, Any]:
        """The answers that can be decoded, by client; others are rejected by name. They are of the round with this
        public seed."""
        usable = {}
        for client, answer in answers.items():
            try:
                for name in self.payloads.vectors:
                    self._check(cohort.task, seed, self.codec.for_client(client), self.payloads.part(answer, name))
                if self.payloads.statistics:
                    cohort.task.norms.check(answer.statistics.cpu())
                usable[client] = answer
            except Refused as error:
                cohort.reject(client, error)
        return usable

    def _check(self, task: Task, seed: Seed, codec: Codec, payload: Any) -> None:
        """Raise `Refused` if a payload cannot be decoded, or is not of the round with this public seed."""
        codec.check(task, payload)
        for name, value in codec.shared(seed).items():
            if getattr(payload, name) != value:
                raise Refused(
                    "out of step", f"the {name} of the message is not that of the round in which it was asked"
                )

    def decoded(self, usable: Mapping[int, Any], cohort: Cohort, at: Tensor) -> tuple[dict[str, Tensor], list[int]]:
        """Vectors [m, d] by name, decoded at the weights the clients had, or their codes [m, K], and whose they are. A
        client whose vectors are not finite is rejected by name."""
        names = self.payloads.vectors
        if not usable:
            return {name: at.new_empty(0, self._width(cohort.task)) for name in names}, []
        if self.aggregator.quorum and (shown := self.codec.exhibit(self._parts(usable, names[0])[0])):
            cohort.exhibit(*shown)
        rows = {name: self._read(cohort.task, self._parts(usable, name), at) for name in names}
        finite = torch.stack([vectors.sum(1).isfinite() for vectors in rows.values()]).all(0)
        for client, fine in zip(usable, finite.tolist(), strict=True):
            if not fine:
                cohort.reject(client, Refused("not finite", "the decoded update holds a value that is not a number"))
        clients = [client for client, fine in zip(usable, finite.tolist(), strict=True) if fine]
        if len(clients) < len(usable):
            rows = {name: vectors[finite] for name, vectors in rows.items()}
        return rows, clients

    def _read(self, task: Task, payloads: Sequence[Any], at: Tensor) -> Tensor:
        """The vectors of payloads, [m, d], or their codes [m, K]."""
        if self.coded:
            return schema.stack(payloads, self.codec.code_field).to(at.device)
        return self.codec.decode(task, at.expand(len(payloads), -1), payloads)

    def _parts(self, usable: Mapping[int, Any], name: str) -> list[Any]:
        return [self.payloads.part(answer, name) for answer in usable.values()]

    # ------------------------------------------------------------------------------------------------ the clients

    def answering(self, given: Mapping[type[Question], Given]) -> Answering:
        return Answering({kind: partial(self._answer, vectors) for kind, vectors in given.items()})

    def _answer(self, given: Given, stack: ClientStack, question: Any) -> list[Any]:
        w, x = given(stack, question)
        parts = encoded(self.codec, stack, w, x, self.transforms, self.release)
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


@dataclass(frozen=True)
class Batch:
    """Vectors [m, d] by name, the answers of their clients in the same order, and how many there were with unusable
    ones."""

    rows: Mapping[str, Tensor]
    answers: Mapping[int, Any]
    answered: int


def _joined(batches: list[Batch]) -> list[Batch]:
    """All of them as one, as a median needs them."""
    if len(batches) < 2:
        return batches
    rows = {name: torch.cat([each.rows[name] for each in batches]) for name in batches[0].rows}
    answers = {client: answer for each in batches for client, answer in each.answers.items()}
    return [Batch(rows, answers, sum(each.answered for each in batches))]


class Merged:
    """Vectors that are merged batch by batch, so that a round of many clients needs the memory of one batch.

    sums:       of the vectors by name, [d]
    statistics: merged running statistics of batch norm layers, [s]; None: there are none
    """

    def __init__(self, aggregator: Aggregating, width: int) -> None:
        self.aggregator, self.width = aggregator, width
        self.clients, self.weight = 0, 0.0
        self.sums: dict[str, Tensor] = {}
        self.statistics: Tensor | None = None
        self._merged: dict[str, Tensor] = {}

    def add(self, rows: Mapping[str, Tensor], weights: Tensor | None, statistics: Tensor | None) -> None:
        """Merge a batch: vectors [m, d] by name, weights [m] (None: all the same), statistics [m, s]."""
        vectors = {"": joined(list(rows.values()))} if self.aggregator.joint else rows
        count = len(next(iter(rows.values())))
        if count == 0 and (self._merged or self.aggregator.quorum):
            return
        own = count if weights is None else float(weights.sum())
        self.clients, self.weight = self.clients + count, self.weight + own
        share = own / self.weight if self.weight else 0.0
        for name, batch in vectors.items():
            merged = self.aggregator.merge(batch, weights)
            before = self._merged.get(name)
            self._merged[name] = merged if before is None else self.aggregator.add(before, merged, share)
        for name, batch in rows.items():
            self.sums[name] = self.sums[name] + batch.sum(0) if name in self.sums else batch.sum(0)
        if statistics is not None:
            merged = self.aggregator.merge(statistics, weights)
            before = self.statistics
            self.statistics = merged if before is None else self.aggregator.add(before, merged, share)

    def finish(self, cohort: Cohort) -> dict[str, Tensor]:
        """The merged vectors, [d] by name."""
        done = {name: self.aggregator.finish(merged, cohort) for name, merged in self._merged.items()}
        if not self.aggregator.joint:
            return done
        return dict(zip(self.sums, done[""].split([self.width] * len(self.sums)), strict=True))


def encoded(
    codec: Codec,
    stack: ClientStack,
    w: Tensor,
    x: Vectors,
    transforms: Sequence[Transform],
    release: Sequence[Transform] = (),
) -> dict[str, list[Any]]:
    """Payloads of each vector of clients that trained from `w` [d]. Transforms are told what the server will decode,
    but for what `release` clips and adds: feedback would take the noise back.

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
    return _released(codec, stack, parts, release) if release else parts


def _released(
    codec: Codec, stack: ClientStack, parts: Mapping[str, list[Any]], release: Sequence[Transform]
) -> dict[str, list[Any]]:
    """Payloads of a linear codec whose codes are clipped, and noised, all of a client's together."""
    codes = Vectors({name: schema.stack(rows, codec.code_field) for name, rows in parts.items()})
    for transform in release:
        codes = transform.client(stack, codes)
    return {
        name: [with_fields(payload, **{codec.code_field: row}) for payload, row in zip(rows, codes[name], strict=True)]
        for name, rows in parts.items()
    }


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
