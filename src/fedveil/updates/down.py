"""The way down: full weights, or the server's own steps encoded, with everyone kept in step.

A down codec with reference "last" sends steps. Server and clients apply the *decoded* step, so all hold the same
weights; a client that was away gets the steps it missed, or full weights where that is fewer bytes. A digest of its
weights comes back, and a mismatch means full weights. With reference "init" each message stands alone: it encodes the
way from the initial weights, which everyone knows, to the server's.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil import message
from fedveil.clients import Crowd
from fedveil.cost import Turn
from fedveil.federation import BelowQuorum, Cohort, State
from fedveil.graphs import one_thread
from fedveil.message import Answer, Envelope, Folded, Question, Record, Refused, Weights
from fedveil.server import Server, ServerState
from fedveil.task import Task
from fedveil.updates.codec import Codec, Update


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
class TrainFrom(Question, Folded, frozen=True):
    """Train from the initial weights plus this encoded step."""

    reply = Update
    frame: bytes


@message.kind(18)
class TrainHere(Question, frozen=True):
    """Train from the weights you hold, which are those of this version."""

    reply = Update
    version: int


@message.kind(19)
class InStep(Answer, frozen=True):
    """A digest of the weights a client now holds."""

    digest: bytes = bytes(8)


@message.kind(20)
class Follow(Question, Folded, frozen=True):
    """Apply these steps, oldest first, or take these weights; you then hold `version`."""

    reply = InStep
    version: int
    frames: list[bytes] = []
    weights: Weights | None = None


@message.kind(21)
class Held(Record, frozen=True):
    """What a client remembers: the weights it holds and their version, and what its codec has lost of its updates."""

    version: int = 0
    weights: Weights | None = None
    residual: Weights | None = None


@dataclass(frozen=True)
class Down:
    """Both sides of the way down with one codec, or none."""

    codec: Codec | None

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
        versions = _versions(state, cohort.task)
        digest = _digest(state.weights)
        questions = {k: self._missed(state, int(versions[k])) for k in cohort.ids}
        answers = cohort.ask(_shared(questions))
        strayed = [k for k, answer in answers.items() if answer.digest != digest]
        full = Follow(_version(state), weights=state.weights)
        again: Mapping[int, InStep] = {}
        if strayed:
            with contextlib.suppress(BelowQuorum):  # the others go on
                again = cohort.only(strayed).ask(full)
        for k, answer in again.items():
            if answer.digest != digest:
                cohort.refuse(k, Refused("out of step", "it was sent full weights and says that it holds others"))
        in_step = [k for k, answer in {**answers, **again}.items() if answer.digest == digest]
        cohort.note(caught_up=sum(len(q.frames) > 1 for q in questions.values()), resynced=len(strayed))
        return state.weights, TrainHere(_version(state)), cohort.only(in_step)

    def step(self, server: Server, state: ServerState, delta: Tensor, cohort: Cohort) -> State:
        """The server's step along `delta`; with reference "last" it is what the clients will decode that is applied."""
        after = server.step(state, delta)
        if self.codec is None or self.codec.reference == "init":
            return after
        task = cohort.task
        change = (after.weights - state.weights)[None]
        payload = self.codec.encode(task, state.weights[None], change, [cohort.seed.child("down")], None)[0]
        weights = self._apply(task, state.weights, payload)
        cohort.note(cosine_down=_cosine(weights - state.weights, change[0]))
        versions = _versions(state, task).clone()
        versions[list(cohort.ids)] = _version(state)  # the cohort is down to those in step
        history = _worth_keeping([*state.history, message.frame(payload, Envelope())], state.weights)
        return replace(after, weights=weights, history=history, versions=versions)

    def questions(self, task: Task, turn: Turn) -> list[Question]:
        """What a client will be asked in a turn, without values."""
        if self.codec is None:
            return [message.blank(Train, task.sizes)]
        frame = bytes(message.size(message.blank(self.codec.payload, self.codec.sizes(task))))
        if self.codec.reference == "init":
            return [TrainFrom(frame)]
        version = turn.round - 1
        state = ServerState(torch.empty(task.layout.size, device="meta"), history=[frame] * version)
        return [self._missed(state, version - turn.missed), TrainHere(version)]

    def _missed(self, state: ServerState, version: int) -> Follow:
        """What a client of that version has missed, in steps or in full, whichever is fewer bytes."""
        frames = state.history[version:]
        if not all(_worth_keeping(frames, state.weights)):
            return Follow(_version(state), weights=state.weights)
        return Follow(_version(state), frames)

    # ------------------------------------------------------------------------------------------------ the clients

    def follow(self, crowd: Crowd, question: Follow) -> list[InStep]:
        """Apply the steps each client missed, which may be fewer than were sent: an answer of an earlier round may have
        been lost. One client at a time: all must round alike."""
        task, held, digests = crowd.task, [], []
        for memory in crowd.memory:
            before = memory or Held()
            weights = task.initial if before.weights is None else before.weights.to(task.device)
            if question.weights is not None:
                weights = question.weights.to(task.device)
            known = len(question.frames) - (question.version - before.version)
            for frame in question.frames[max(known, 0) :]:
                weights = self._apply(task, weights, self._read(task, frame))
            held.append(replace(before, version=question.version, weights=weights.cpu()))
            digests.append(InStep(_digest(weights)))
        crowd.remember(held)
        return digests

    def held(self, crowd: Crowd, question: TrainHere) -> Tensor:
        """The weights the crowd holds, [d]: the same for all."""
        for memory in crowd.memory:
            if memory is None or memory.weights is None or memory.version != question.version:
                raise Refused("lost state", f"the weights of version {question.version} are not held; resync first")
        weights: Tensor = crowd.memory[0].weights
        return weights.to(crowd.task.device)

    def drawn(self, crowd: Crowd, question: TrainFrom) -> Tensor:
        """The weights an encoded step leads to from the initial ones, [d]."""
        return self._apply(crowd.task, crowd.task.initial, self._read(crowd.task, question.frame))

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
            frame, {self.codec.payload.kind: self.codec.payload}, message.size_limit(self.codec.payload, sizes)
        )
        message.check(payload, sizes)
        self.codec.check(task, payload)
        return payload


def _worth_keeping(frames: Sequence[bytes], weights: Tensor) -> list[bytes]:
    """The newest steps that together are fewer bytes than the weights; older ones are never sent and become empty."""
    left = 4 * weights.numel()
    kept = []
    for frame in reversed(frames):
        left -= len(frame) + 8
        kept.append(frame if frame and left >= 0 else b"")
    return kept[::-1]


def _version(state: ServerState) -> int:
    return len(state.history)


def _versions(state: ServerState, task: Task) -> Tensor:
    """How many steps each client has applied, [clients]."""
    return torch.zeros(len(task.clients), dtype=torch.int64) if state.versions is None else state.versions


def _digest(weights: Tensor) -> bytes:
    return hashlib.blake2b(weights.cpu().numpy().tobytes(), digest_size=8).digest()


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def _shared(questions: Mapping[int, Follow]) -> dict[int, Question]:
    """Equal questions as one object, so that they are packed once and stacked."""
    one: dict[tuple[int, bool], Follow] = {}
    return {k: one.setdefault((len(q.frames), q.weights is None), q) for k, q in questions.items()}
