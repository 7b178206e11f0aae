"""Downlinks: how the server's weights reach the clients.

A down codec with reference "last" sends steps. Server and clients apply the *decoded* step, so all hold the same
weights, and are kept in step (`steps.py`). With reference "init" each message stands alone: it encodes the way from the
initial weights, which everyone knows, to the server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.codecs.raw import Update
from fedveil.core import message, schema
from fedveil.core.cohort import Cohort
from fedveil.core.exchange import Handler
from fedveil.core.forecast import Turn
from fedveil.core.message import Container, Envelope, Question, Record, Size, Weights
from fedveil.core.method import State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.gpu.graphs import one_thread
from fedveil.links.steps import CatchUp, Steps, Version


@message.kind
class Train(Question, frozen=True):
    """Train from these weights on your own records."""

    reply = Update
    weights: Weights


@message.kind
class TrainFull(Question, frozen=True):
    """The same, and send the update as it is."""

    reply = Update
    weights: Weights


@message.kind
class TrainFrom(Question, Container, frozen=True):
    """Train from the initial weights plus this encoded step."""

    reply = Update
    frame: bytes


@message.kind
class TrainHere(Question, frozen=True):
    """Train from the weights you hold, which are those of this version."""

    reply = Update
    version: Version


class Downlink(Protocol):
    """The way down.

    question: the kind of question that asks clients to train, with the method's further vectors
    handlers: the clients' answers to the downlink's own questions
    """

    @property
    def question(self) -> type[Question]: ...

    @property
    def handlers(self) -> Mapping[type[Question], Handler]: ...

    def reach(self, state: State, cohort: Cohort, extra: Mapping[str, Tensor]) -> tuple[Tensor, Question, Cohort]:
        """Bring the cohort to common weights: those weights [d], the question to ask next, and who can be asked."""

    def held(self, stack: ClientStack, question: Any) -> Tensor:
        """The clients: the weights [d] that a question is about."""

    def publish(self, before: State, after: State, cohort: Cohort) -> State:
        """The state after the server's step, as clients will be able to follow it."""

    def forecast_messages(self, task: Task, turn: Turn, sizes: Mapping[str, Size]) -> list[Question]:
        """What a client will be asked in a turn, without values; the last one asks it to train."""


@dataclass(frozen=True)
class FullWeights:
    """The weights as they are."""

    question: type[Question] = Train
    handlers: Mapping[type[Question], Handler] = field(default_factory=dict)

    def reach(self, state: State, cohort: Cohort, extra: Mapping[str, Tensor]) -> tuple[Tensor, Question, Cohort]:
        return state.weights, self.question(weights=state.weights, **extra), cohort

    def held(self, stack: ClientStack, question: Any) -> Tensor:
        weights: Tensor = question.weights
        return weights.to(stack.task.device)

    def publish(self, before: State, after: State, cohort: Cohort) -> State:
        return after

    def forecast_messages(self, task: Task, turn: Turn, sizes: Mapping[str, Size]) -> list[Question]:
        return [schema.blank(self.question, sizes)]


@dataclass(frozen=True)
class FromInit:
    """The way from the initial weights, encoded anew in every round."""

    codec: Codec
    question: type[Question] = TrainFrom
    handlers: Mapping[type[Question], Handler] = field(default_factory=dict)

    def reach(self, state: State, cohort: Cohort, extra: Mapping[str, Tensor]) -> tuple[Tensor, Question, Cohort]:
        task = cohort.task
        step = (state.weights - task.initial)[None]
        payload = self.codec.encode(task, task.initial[None], step, [cohort.seed.child("down")], None)[0]
        reached = _apply(self.codec, task, task.initial, payload)
        cohort.note(cosine_down=_cosine(reached - task.initial, step[0]))
        frame = message.frame(payload, Envelope())
        return reached, self.question(frame=frame, **extra), cohort

    def held(self, stack: ClientStack, question: Any) -> Tensor:
        task = stack.task
        return _apply(self.codec, task, task.initial, _read(self.codec, task, question.frame))

    def publish(self, before: State, after: State, cohort: Cohort) -> State:
        return after

    def forecast_messages(self, task: Task, turn: Turn, sizes: Mapping[str, Size]) -> list[Question]:
        return [schema.blank(self.question, {**sizes, "bytes": _step_bytes(self.codec, task)})]


@dataclass(frozen=True)
class EncodedSteps:
    """The server's steps, encoded; clients take the ones they missed."""

    codec: Codec
    question: type[Question] = TrainHere

    @cached_property
    def steps(self) -> Steps:
        def take(task: Task, now: State, payload: Any, number: int) -> State:
            return replace(now, weights=_apply(self.codec, task, now.weights, payload))

        def read(task: Task, frame: bytes) -> Record:
            return _read(self.codec, task, frame)

        return Steps(lambda task: State(task.initial), read, take)

    @property
    def handlers(self) -> Mapping[type[Question], Handler]:
        return {CatchUp: self.steps.follow}

    def reach(self, state: State, cohort: Cohort, extra: Mapping[str, Tensor]) -> tuple[Tensor, Question, Cohort]:
        question = self.question(version=self.steps.version(state), **extra)
        return state.weights, question, self.steps.reach(state, cohort)

    def held(self, stack: ClientStack, question: Any) -> Tensor:
        return self.steps.held(stack, question.version)

    def publish(self, before: State, after: State, cohort: Cohort) -> State:
        """The clients will decode the step, so the decoded one is what the server takes, too."""
        task = cohort.task
        change = (after.weights - before.weights)[None]
        seed = cohort.seed if self.codec.linear else cohort.seed.child("down")  # a step in the span of sketches fits
        payload = self.codec.encode(task, before.weights[None], change, [seed], None)[0]
        weights = _apply(self.codec, task, before.weights, payload)
        cohort.note(cosine_down=_cosine(weights - before.weights, change[0]))
        return self.steps.record(before, replace(after, weights=weights), payload, cohort)

    def forecast_messages(self, task: Task, turn: Turn, sizes: Mapping[str, Size]) -> list[Question]:
        version = turn.round - 1
        caught = self.steps.foreseen(task, _step_bytes(self.codec, task), version, turn.missed)
        return [caught, replace(schema.blank(self.question, sizes), version=version)]


def _step_bytes(codec: Codec, task: Task) -> int:
    return message.size(schema.blank(codec.payload, codec.sizes(task)))


def _apply(codec: Codec, task: Task, w: Tensor, payload: Any) -> Tensor:
    """The weights an encoded step leads to from `w`, [d] -> [d]; on one thread, so that all sides round alike."""
    with one_thread():
        return w + codec.decode(task, w[None], [payload])[0]


def _read(codec: Codec, task: Task, frame: bytes) -> Record:
    """A payload from a frame within a question, checked like any other bytes from outside."""
    sizes = codec.sizes(task)
    payload, _ = message.unframe(frame, {codec.payload.kind: codec.payload}, schema.size_limit(codec.payload, sizes))
    schema.check(payload, sizes)
    codec.check(task, payload)
    return payload


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
