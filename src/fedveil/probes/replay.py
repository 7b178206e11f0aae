"""The way down in a few scalars: clients regrow the server's step from a key and the K coefficients behind it.

Both sides take the very same step, server optimiser and all, so both hold the same weights. A client that was away gets
the steps it missed, or the whole state (weights, and with momentum or Adam their moments) where that is fewer bytes. A
digest of what it holds comes back, and a mismatch, as between a GPU and a CPU that round differently, means the whole
state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fedveil import message
from fedveil.clients import Crowd
from fedveil.federation import BelowQuorum, Cohort
from fedveil.message import Answer, Envelope, Folded, Question, Record, Refused, Shape, Weights
from fedveil.server import ServerState
from fedveil.task import Task

Key = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Version = Annotated[int, Meta(ge=0, le=2**40)]


@message.kind(52)
class Step(Record, frozen=True):
    """A step of the server: the gradient is Σ c_k z_k, with directions z_k of this key."""

    key: Key
    coefficients: Annotated[Tensor, Shape(("directions",))]


@message.kind(53)
class Caught(Answer, frozen=True):
    """A digest of what a client now holds."""

    digest: bytes = bytes(8)


@message.kind(54)
class CatchUp(Question, Folded, frozen=True):
    """Take these steps, oldest first, or this state; you then hold `version`."""

    reply = Caught
    version: Version
    frames: list[bytes] = []
    weights: Weights | None = None
    first: Weights | None = None
    second: Weights | None = None


@message.kind(55)
class Stand(Record, frozen=True):
    """What a client remembers: the weights it holds, the server optimiser's moments, and their version."""

    version: int
    weights: Weights
    first: Weights | None = None
    second: Weights | None = None


@dataclass(frozen=True)
class Replay:
    """Both sides of the way down.

    begin: the state that everyone begins with, known from the recipe
    take:  a state and a step -> the next state
    most:  how many coefficients a step can have
    """

    begin: Callable[[Task], ServerState]
    take: Callable[[Task, ServerState, Step], ServerState]
    most: int

    # ------------------------------------------------------------------------------------------------ the server

    def reach(self, now: ServerState, cohort: Cohort) -> Cohort:
        """Bring the cohort to the server's state; who can be asked from there."""
        versions, digest = _versions(now, cohort.task), _digest(now)
        one: dict[tuple[int, bool], CatchUp] = {}  # equal questions as one object, packed once and stacked
        questions = {k: self.missed(now, int(versions[k])) for k in cohort.ids}
        questions = {k: one.setdefault((len(q.frames), q.weights is None), q) for k, q in questions.items()}
        answers = cohort.ask(questions)
        strayed = [k for k, answer in answers.items() if answer.digest != digest]
        again: Mapping[int, Caught] = {}
        if strayed:
            with contextlib.suppress(BelowQuorum):  # the others go on
                again = cohort.only(strayed).ask(_whole(now))
        for k, answer in again.items():
            if answer.digest != digest:
                cohort.refuse(k, Refused("out of step", "it was sent the whole state and says that it holds another"))
        cohort.note(caught_up=sum(len(q.frames) > 1 for q in questions.values()), resynced=len(strayed))
        return cohort.only([k for k, answer in {**answers, **again}.items() if answer.digest == digest])

    def record(self, now: ServerState, step: Step, cohort: Cohort) -> tuple[list[bytes], Tensor]:
        """The steps so far with this one, and how many each client has taken: the cohort, all but this one."""
        versions = _versions(now, cohort.task).clone()
        versions[list(cohort.ids)] = len(now.history)
        return _worth_keeping([*now.history, message.frame(step, Envelope())], now), versions

    def missed(self, now: ServerState, version: int) -> CatchUp:
        """What a client of that version has missed, in steps or as a whole, whichever is fewer bytes."""
        frames = now.history[version:]
        return CatchUp(len(now.history), frames) if all(_worth_keeping(frames, now)) else _whole(now)

    def foreseen(self, task: Task, version: int, missed: int) -> CatchUp:
        """What a client that missed so many steps will be sent, without values."""
        frame = bytes(message.size(message.blank(Step, {"directions": self.most})) + 8)  # a key is 9 bytes, not 1
        return self.missed(replace(_onto(self.begin(task), "meta"), history=[frame] * version), version - missed)

    # ------------------------------------------------------------------------------------------------ the clients

    def catch_up(self, crowd: Crowd, question: CatchUp) -> list[Caught]:
        """Take the steps each client missed, which may be fewer than were sent: an answer of an earlier round may have
        been lost. Clients that hold the same take them once."""
        task = crowd.task
        steps = [self._read(frame) for frame in question.frames]
        taken: dict[tuple[int, bytes], ServerState] = {}
        stands, answers = [], []
        for memory in crowd.memory:
            held = self.begin(task) if memory is None else _state(memory.weights, memory, task)
            version = 0 if memory is None else memory.version
            place = version, _digest(held)
            if place not in taken:
                if question.weights is not None:
                    held = _state(question.weights, question, task)
                known = len(steps) - (question.version - version)
                for step in steps[max(known, 0) :]:
                    held = self.take(task, held, step)
                taken[place] = held
            now = _onto(taken[place], "cpu")
            stands.append(Stand(question.version, now.weights, now.first, now.second))
            answers.append(Caught(_digest(now)))
        crowd.remember(stands)
        return answers

    def held(self, crowd: Crowd, version: int) -> Tensor:
        """The weights the crowd holds, [d]: the same for all."""
        for memory in crowd.memory:
            if memory is None or memory.version != version:
                raise Refused("lost state", f"the weights of version {version} are not held; catch up first")
        weights: Tensor = crowd.memory[0].weights
        return weights.to(crowd.task.device)

    def _read(self, frame: bytes) -> Step:
        """A step from a frame within a question, checked like any other bytes from outside."""
        limit = message.size_limit(Step, {"directions": self.most})
        step, _ = message.unframe(frame, {Step.kind: Step}, limit)
        assert isinstance(step, Step)
        message.check(step, {"directions": min(step.coefficients.numel(), self.most)})
        return step


def _state(weights: Tensor, held: Stand | CatchUp, task: Task) -> ServerState:
    return _onto(ServerState(weights, held.first, held.second), task.device)


def _onto(now: ServerState, device: torch.device | str) -> ServerState:
    first, second = (None if moment is None else moment.to(device) for moment in (now.first, now.second))
    return ServerState(now.weights.to(device), first, second)


def _whole(now: ServerState) -> CatchUp:
    return CatchUp(len(now.history), [], now.weights, now.first, now.second)


def _worth_keeping(frames: Sequence[bytes], now: ServerState) -> list[bytes]:
    """The newest steps that together are fewer bytes than the state; older ones are never sent and become empty."""
    left = 4 * sum(part.numel() for part in (now.weights, now.first, now.second) if part is not None)
    kept = []
    for frame in reversed(frames):
        left -= len(frame) + 8
        kept.append(frame if frame and left >= 0 else b"")
    return kept[::-1]


def _versions(now: ServerState, task: Task) -> Tensor:
    """How many steps each client has taken, [clients]."""
    return torch.zeros(len(task.clients), dtype=torch.int64) if now.versions is None else now.versions


def _digest(now: ServerState) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in (now.weights, now.first, now.second):
        if part is not None:
            digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
