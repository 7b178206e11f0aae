"""Uplinks: how the vectors of a cohort become what the server steps along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedveil.core.cohort import Cohort
from fedveil.core.exchange import Handler
from fedveil.core.forecast import Compute, Turn
from fedveil.core.message import Answer, Question, Record, Size
from fedveil.core.method import Method, State
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.train.vectors import Vectors

Given = Callable[[ClientStack, Any], tuple[Tensor, Vectors]]  # a question -> the weights it is about [d], vectors


@dataclass(frozen=True)
class Total:
    """What the server learns of a cohort's vectors.

    mean, sum: of a vector by name, [d]
    clients:   how many the mean is over: those who are in it, or a public number where the mean is private
    scalars:   the sums of the numbers that clients told in the clear
    slots:     what the uplink remembers in the server's state
    """

    mean: Callable[[str], Tensor]
    sum: Callable[[str], Tensor]
    clients: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    slots: Mapping[str, Record] = field(default_factory=dict)


@dataclass(frozen=True)
class Answering:
    """The clients' side: handlers of questions answered in the clear, and of those answered inside a secure sum, one
    table for each sum of a round with the type of its answers."""

    clear: Mapping[type[Question], Handler] = field(default_factory=dict)
    summed: Sequence[tuple[Mapping[type[Question], Handler], type[Answer]]] = ()


class Uplink(Protocol):
    """The way up. An uplink owns the `questions` that follow the method's own."""

    @property
    def questions(self) -> tuple[type[Question], ...]: ...

    def validate(self, task: Task) -> None:
        """Raise a ValueError if it cannot work on this task."""

    def collect(self, state: State, cohort: Cohort, question: Question, at: Tensor) -> Total:
        """Ask the cohort, whose clients train from `at` [d]."""

    def answering(self, given: Mapping[type[Question], Given]) -> Answering:
        """The handlers of these questions and of the uplink's own."""

    def broadcast(self, task: Task, state: State) -> dict[str, Tensor]:
        """What goes down with the method's question, by the names in `extra`."""

    def reply(self, question: type[Question]) -> type[Answer]:
        """The kind of answer to one of its questions."""

    def sizes(self, task: Task, question: type[Question], client: int) -> Mapping[str, Size]:
        """What the dimension names in the question and its answer stand for."""

    def forecast_messages(self, method: Method, task: Task, question: Question, turn: Turn) -> list[Question]:
        """What a client is asked so that the method's `question` gets its answer, without values."""

    def forecast_compute(self, client: int) -> Compute:
        """What encoding takes of a client."""
