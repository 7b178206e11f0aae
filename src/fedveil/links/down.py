"""The way down: full weights, or the server's own steps encoded.

A down codec with reference "last" sends steps. Server and clients apply the *decoded* step, so all hold the same
weights, and are kept in step (`fedveil.links.steps`). With reference "init" each message stands alone: it encodes the
way from the initial weights, which everyone knows, to the server's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.codecs.raw import Update
from fedveil.core import message, schema
from fedveil.core.cohort import Cohort
from fedveil.core.forecast import Turn
from fedveil.core.message import Container, Envelope, Question, Record, Refused, Weights
from fedveil.core.method import State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.gpu.graphs import one_thread
from fedveil.links.steps import ClientWeights, Steps, Version
from fedveil.train.optimizers import ServerOptimizer, ServerState


@message.kind(4)
class Train(Question, frozen=True):
    """Train from these weights on your own records."""

    reply = Update
    weights: Weights


@message.kind(16)
class TrainFull(Question, frozen=True):
    """The same, and send the update as it is."""

    reply = Update
    weights: Weights


@message.kind(17)
class TrainFrom(Question, Container, frozen=True):
    """Train from the initial weights plus this encoded step."""

    reply = Update
    frame: bytes


@message.kind(18)
class TrainHere(Question, frozen=True):
    """Train from the weights you hold, which are those of this version."""

    reply = Update
    version: Version


@message.kind(69)
class ClientMemory(ClientWeights, frozen=True):
    """What a client remembers beside the weights it holds: what its codec has lost of its updates."""

    residual: Weights | None = None


@dataclass(frozen=True)
class Down:
    """Both sides of the way down with one codec, or none."""

    codec: Codec | None

    @cached_property
    def steps(self) -> Steps:
        def take(task: Task, now: ServerState, payload: Any) -> ServerState:
            return replace(now, weights=self._apply(task, now.weights, payload))

        return Steps(lambda task: ServerState(task.initial), self._read, take, ClientMemory)

    # ------------------------------------------------------------------------------------------------ the server

    def reach(self, state: ServerState, cohort: Cohort) -> tuple[Tensor, Question, Cohort]:
        """Bring the cohort to common weights: those weights [d], the question to ask next, and who can be asked."""
        if self.codec is None:
            return state.weights, Train(state.weights), cohort
        if self.codec.reference == "init":
            task = cohort.task
            step = (state.weights - task.initial)[None]
            payload = self.codec.encode(task, task.initial[None], step, [cohort.seed.child("down")], None)[0]
            reached = self._apply(task, task.initial, payload)
            cohort.note(cosine_down=_cosine(reached - task.initial, step[0]))
            return reached, TrainFrom(message.frame(payload, Envelope())), cohort
        return state.weights, TrainHere(len(state.history)), self.steps.reach(_followed(state), cohort)

    def step(self, server: ServerOptimizer, state: ServerState, delta: Tensor, cohort: Cohort) -> State:
        """The server's step along `delta`; with reference "last" it is what the clients will decode that is applied."""
        after = server.step(state, delta)
        if self.codec is None or self.codec.reference == "init":
            return after
        task = cohort.task
        change = (after.weights - state.weights)[None]
        payload = self.codec.encode(task, state.weights[None], change, [cohort.seed.child("down")], None)[0]
        weights = self._apply(task, state.weights, payload)
        cohort.note(cosine_down=_cosine(weights - state.weights, change[0]))
        history, versions = self.steps.record(_followed(state), payload, cohort)
        return replace(after, weights=weights, history=history, versions=versions)

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        """What a client will be asked in a turn, without values."""
        if self.codec is None:
            return [schema.blank(Train, task.sizes)]
        step = message.size(schema.blank(self.codec.payload, self.codec.sizes(task)))
        if self.codec.reference == "init":
            return [TrainFrom(bytes(step))]
        version = turn.round - 1
        return [self.steps.foreseen(task, step, version, turn.missed), TrainHere(version)]

    # ------------------------------------------------------------------------------------------------ the clients

    def drawn(self, stack: ClientStack, question: TrainFrom) -> Tensor:
        """The weights an encoded step leads to from the initial ones, [d]."""
        return self._apply(stack.task, stack.task.initial, self._read(stack.task, question.frame))

    def _apply(self, task: Task, w: Tensor, payload: Any) -> Tensor:
        """The weights an encoded step leads to from `w`, [d] -> [d]; on one thread, so that all sides round alike."""
        assert self.codec
        with one_thread():
            return w + self.codec.decode(task, w[None], [payload])[0]

    def _read(self, task: Task, frame: bytes) -> Record:
        """A payload from a frame within a question, checked like any other bytes from outside."""
        if self.codec is None:
            raise Refused("wrong kind", "this run sends full weights down")
        sizes = self.codec.sizes(task)
        payload, _ = message.unframe(
            frame, {self.codec.payload.kind: self.codec.payload}, schema.size_limit(self.codec.payload, sizes)
        )
        schema.check(payload, sizes)
        self.codec.check(task, payload)
        return payload


def _followed(state: ServerState) -> ServerState:
    """What clients follow: the weights. The server optimiser's moments are its own."""
    return replace(state, first=None, second=None)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))
