"""Keeping in step: the server sends its own steps down, and clients take them too.

All take the very same steps from the same start, so all hold the same: the weights, and where a step needs them the
server optimizer's moments. A client that was away gets the steps it missed, or the whole state where that is fewer
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
from torch import Tensor

from fedveil.core import message
from fedveil.core.cohort import BelowQuorum, Cohort
from fedveil.core.message import Answer, Container, Envelope, Question, Record, Refused, Shape, Weights
from fedveil.core.method import State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.train.optimizers import Moments, moments

SLOT = "down"  # of the server's state and of a client's memory
Version = Annotated[int, Meta(ge=0, le=2**40)]
Versions = Annotated[Tensor, Shape(("clients",), torch.int64, 0, 2**40)]


@message.kind
class WeightsDigest(Answer, frozen=True):
    """A digest of what a client now holds."""

    digest: bytes = bytes(8)


@message.kind
class CatchUp(Question, Container, frozen=True):
    """Take these steps, oldest first, or this state; you then hold `version`."""

    reply = WeightsDigest
    version: Version
    frames: list[bytes] = []
    weights: Weights | None = None
    first: Weights | None = None
    second: Weights | None = None


@message.kind
class ClientWeights(Record, frozen=True):
    """What a client remembers: the weights it holds, the server optimizer's moments, and how many steps led there."""

    common = ("version", "weights", "first", "second")

    version: Version = 0
    weights: Weights | None = None
    first: Weights | None = None
    second: Weights | None = None


@message.kind
class Sent(Container, frozen=True):
    """The server's slot: the steps sent so far and how many of them each client has taken."""

    history: list[bytes] = []  # encoded steps, as frames; empty where the whole state is fewer bytes
    versions: Versions | None = None


@dataclass(frozen=True)
class Steps:
    """Both sides of the way down in steps.

    initial: the state that everyone begins with, known from the recipe
    read:    a step from a frame within a question, checked like any other bytes from outside
    take:    a state, a step and its number, from 1 -> the next state
    moments: whether a step needs the server optimizer's moments, so that clients hold them too
    """

    initial: Callable[[Task], State]
    read: Callable[[Task, bytes], Any]
    take: Callable[[Task, State, Any, int], State]
    moments: bool = False

    # ------------------------------------------------------------------------------------------------ the server

    def version(self, state: State) -> int:
        """How many steps the server has taken."""
        return len(_sent(state).history)

    def reach(self, state: State, cohort: Cohort) -> Cohort:
        """Bring the cohort to the server's state; who can be asked from there."""
        held, versions = self._parts(state), _versions(state, cohort.task)
        digest = _digest(held)
        one: dict[tuple[int, bool], CatchUp] = {}  # equal questions as one object, packed once and stacked
        questions = {k: self.missed(state, int(versions[k])) for k in cohort.ids}
        questions = {k: one.setdefault((len(q.frames), q.weights is None), q) for k, q in questions.items()}
        answers = cohort.ask(questions)
        strayed = [k for k, answer in answers.items() if answer.digest != digest]
        again: Mapping[int, WeightsDigest] = {}
        if strayed:
            with contextlib.suppress(BelowQuorum):  # the others go on
                again = cohort.only(strayed).ask(self._whole(state))
        for k, answer in again.items():
            if answer.digest != digest:
                cohort.reject(k, Refused("out of step", "it was sent the whole state and says that it holds another"))
        cohort.note(caught_up=sum(len(q.frames) > 1 for q in questions.values()), resynced=len(strayed))
        return cohort.only([k for k, answer in {**answers, **again}.items() if answer.digest == digest])

    def record(self, before: State, after: State, step: Record, cohort: Cohort) -> State:
        """The state `after` a step with that step in its history. The cohort has taken all but this one."""
        versions, history = _versions(before, cohort.task).clone(), _sent(before).history
        versions[list(cohort.ids)] = len(history)
        kept = _worth_keeping([*history, message.frame(step, Envelope())], self._parts(before))
        return after.put(SLOT, Sent(kept, versions))

    def missed(self, state: State, version: int) -> CatchUp:
        """What a client of that version has missed, in steps or as a whole, whichever is fewer bytes."""
        history = _sent(state).history
        frames = history[version:]
        if all(_worth_keeping(frames, self._parts(state))):
            return CatchUp(len(history), frames)
        return self._whole(state)

    def foreseen(self, task: Task, step: int, version: int, missed: int) -> CatchUp:
        """What a client will be sent that missed so many steps, of so many bytes each, without values."""
        held = (None if part is None else part.to("meta") for part in self._parts(self.initial(task)))
        return self.missed(_state(*held).put(SLOT, Sent([bytes(step)] * version)), version - missed)

    def _whole(self, state: State) -> CatchUp:
        return CatchUp(self.version(state), [], *self._parts(state))

    def _parts(self, state: State) -> tuple[Tensor | None, ...]:
        """What clients hold of a state: the weights, and the moments if a step needs them."""
        return (state.weights, *(moments(state) if self.moments else (None, None)))

    # ------------------------------------------------------------------------------------------------ the clients

    def follow(self, stack: ClientStack, question: CatchUp) -> list[WeightsDigest]:
        """Take the steps each client missed, which may be fewer than were sent: an answer of an earlier round may have
        been lost. Clients that hold the same take them once, by themselves: all must round alike."""
        task = stack.task
        steps = [self.read(task, frame) for frame in question.frames]
        start, taken = self.initial(task), dict[tuple[int, bytes], State]()
        sent = (question.weights, question.first, question.second)
        if question.weights is not None and [p is None for p in sent] != [p is None for p in self._parts(start)]:
            raise Refused("wrong field", "the state has not the moments that this run's server keeps")
        remembered, answers = [], []
        for memory in stack.slot(SLOT):
            before = memory or ClientWeights()
            held = start
            if before.weights is not None:
                held = _state(*(_to(p, task.device) for p in (before.weights, before.first, before.second)))
            place = before.version, _digest(self._parts(held))
            if place not in taken:
                if question.weights is not None:
                    held = _state(*(_to(part, task.device) for part in sent))
                known = max(len(steps) - (question.version - before.version), 0)
                for number, step in enumerate(steps[known:], question.version - len(steps) + known + 1):
                    held = self.take(task, held, step, number)
                taken[place] = held
            parts = [_to(part, "cpu") for part in self._parts(taken[place])]
            remembered.append(ClientWeights(question.version, *parts))
            answers.append(WeightsDigest(_digest(parts)))
        stack.remember(SLOT, remembered)
        return answers

    def held(self, stack: ClientStack, version: int) -> Tensor:
        """The weights the stack holds, [d]: the same for all."""
        memory = stack.slot(SLOT)
        for own in memory:
            if own is None or own.weights is None or own.version != version:
                raise Refused("lost state", f"the weights of version {version} are not held; catch up first")
        weights: Tensor = memory[0].weights
        return weights.to(stack.task.device)


def _state(weights: Tensor | None, first: Tensor | None, second: Tensor | None) -> State:
    assert weights is not None
    state = State(weights)
    return state if first is None else state.put("server", Moments(first, second))


def _to(part: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if part is None else part.to(device)


def _sent(state: State) -> Sent:
    sent = state.slots.get(SLOT)
    return sent if isinstance(sent, Sent) else Sent()


def _worth_keeping(frames: Sequence[bytes], held: Sequence[Tensor | None]) -> list[bytes]:
    """The newest steps that together are fewer bytes than the state; older ones are never sent and become empty."""
    left = 4 * sum(part.numel() for part in held if part is not None)
    kept = []
    for frame in reversed(frames):
        left -= len(frame) + 8
        kept.append(frame if frame and left >= 0 else b"")
    return kept[::-1]


def _versions(state: State, task: Task) -> Tensor:
    """How many steps each client has taken, [clients]."""
    versions = _sent(state).versions
    return torch.zeros(len(task.clients), dtype=torch.int64) if versions is None else versions


def _digest(held: Sequence[Tensor | None]) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in held:
        if part is not None:
            digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
