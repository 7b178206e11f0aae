"""Keeping in step: what goes down are the server's own steps, which clients take too.

All take the very same steps from the same start, so all hold the same: the weights, and where a step needs them the
server optimiser's moments. A client that was away gets the steps it missed, or the whole state where that is fewer
bytes. A digest of what it holds comes back, and a mismatch, as between a GPU and a CPU that round differently, means
the whole state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fedveil.core import message
from fedveil.core.cohort import BelowQuorum, Cohort
from fedveil.core.message import Answer, Container, Envelope, Question, Record, Refused, Weights
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.train.optimizers import ServerState

Version = Annotated[int, Meta(ge=0, le=2**40)]


@message.kind(19)
class WeightsDigest(Answer, frozen=True):
    """A digest of what a client now holds."""

    digest: bytes = bytes(8)


@message.kind(68)
class CatchUp(Question, Container, frozen=True):
    """Take these steps, oldest first, or this state; you then hold `version`."""

    reply = WeightsDigest
    version: Version
    frames: list[bytes] = []
    weights: Weights | None = None
    first: Weights | None = None
    second: Weights | None = None


@message.kind(55)
class ClientWeights(Record, frozen=True):
    """What a client remembers: the weights it holds, the server optimiser's moments, and how many steps led there."""

    common = ("version", "weights", "first", "second")

    version: Version = 0
    weights: Weights | None = None
    first: Weights | None = None
    second: Weights | None = None


@dataclass(frozen=True)
class Steps:
    """Both sides of the way down.

    initial: the state that everyone begins with, known from the recipe
    read:  a step from a frame within a question, checked like any other bytes from outside
    take:  a state and a step -> the next state
    stand: the record that a client remembers; what it has beside `ClientWeights`'s fields stays as it is
    """

    initial: Callable[[Task], ServerState]
    read: Callable[[Task, bytes], Any]
    take: Callable[[Task, ServerState, Any], ServerState]
    stand: type[ClientWeights] = ClientWeights

    # ------------------------------------------------------------------------------------------------ the server

    def reach(self, now: ServerState, cohort: Cohort) -> Cohort:
        """Bring the cohort to the server's state; who can be asked from there."""
        versions, digest = _versions(now, cohort.task), _digest(now)
        one: dict[tuple[int, bool], CatchUp] = {}  # equal questions as one object, packed once and stacked
        questions = {k: self.missed(now, int(versions[k])) for k in cohort.ids}
        questions = {k: one.setdefault((len(q.frames), q.weights is None), q) for k, q in questions.items()}
        answers = cohort.ask(questions)
        strayed = [k for k, answer in answers.items() if answer.digest != digest]
        again: Mapping[int, WeightsDigest] = {}
        if strayed:
            with contextlib.suppress(BelowQuorum):  # the others go on
                again = cohort.only(strayed).ask(_whole(now))
        for k, answer in again.items():
            if answer.digest != digest:
                cohort.reject(k, Refused("out of step", "it was sent the whole state and says that it holds another"))
        cohort.note(caught_up=sum(len(q.frames) > 1 for q in questions.values()), resynced=len(strayed))
        return cohort.only([k for k, answer in {**answers, **again}.items() if answer.digest == digest])

    def record(self, now: ServerState, step: Record, cohort: Cohort) -> tuple[list[bytes], Tensor]:
        """The steps so far with this one, and how many each client has taken: the cohort, all but this one."""
        versions = _versions(now, cohort.task).clone()
        versions[list(cohort.ids)] = len(now.history)
        return _worth_keeping([*now.history, message.frame(step, Envelope())], now), versions

    def missed(self, now: ServerState, version: int) -> CatchUp:
        """What a client of that version has missed, in steps or as a whole, whichever is fewer bytes."""
        frames = now.history[version:]
        return CatchUp(len(now.history), frames) if all(_worth_keeping(frames, now)) else _whole(now)

    def foreseen(self, task: Task, step: int, version: int, missed: int) -> CatchUp:
        """What a client will be sent that missed so many steps, of so many bytes each, without values."""
        return self.missed(
            replace(_onto(self.initial(task), "meta"), history=[bytes(step)] * version), version - missed
        )

    # ------------------------------------------------------------------------------------------------ the clients

    def follow(self, stack: ClientStack, question: CatchUp) -> list[WeightsDigest]:
        """Take the steps each client missed, which may be fewer than were sent: an answer of an earlier round may have
        been lost. Clients that hold the same take them once, by themselves: all must round alike."""
        task = stack.task
        steps = [self.read(task, frame) for frame in question.frames]
        start, taken = self.initial(task), dict[tuple[int, bytes], ServerState]()
        if question.weights is not None and _parts(question) != _parts(start):
            raise Refused("wrong field", "the state has not the moments that this run's server keeps")
        stands, answers = [], []
        for memory in stack.memory:
            before = memory or self.stand()
            held = start if before.weights is None else _state(before, task)
            place = before.version, _digest(held)
            if place not in taken:
                if question.weights is not None:
                    held = _state(question, task)
                known = len(steps) - (question.version - before.version)
                for step in steps[max(known, 0) :]:
                    held = self.take(task, held, step)
                taken[place] = held
            now = _onto(taken[place], "cpu")
            stands.append(
                replace(before, version=question.version, weights=now.weights, first=now.first, second=now.second)
            )
            answers.append(WeightsDigest(_digest(now)))
        stack.remember(stands)
        return answers

    def held(self, stack: ClientStack, version: int) -> Tensor:
        """The weights the stack holds, [d]: the same for all."""
        for memory in stack.memory:
            if memory is None or memory.weights is None or memory.version != version:
                raise Refused("lost state", f"the weights of version {version} are not held; catch up first")
        weights: Tensor = stack.memory[0].weights
        return weights.to(stack.task.device)


def _parts(held: ServerState | ClientWeights | CatchUp) -> list[bool]:
    return [part is not None for part in (held.weights, held.first, held.second)]


def _state(held: ClientWeights | CatchUp, task: Task) -> ServerState:
    assert held.weights is not None
    return _onto(ServerState(held.weights, held.first, held.second), task.device)


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
