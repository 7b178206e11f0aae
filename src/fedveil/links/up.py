"""Uplinks: how the vectors of a cohort become what the server steps along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


class Uplink:
    """The way up. An uplink owns the questions that follow the method's own."""

    @property
    def needs_all(self) -> str:
        """Return the setting because of which the server holds the vectors of a whole cohort at once; empty if it
        merges them as they come."""
        return ""

    @property
    def questions(self) -> tuple[type[Question], ...]:
        """Return the uplink's own questions; by default it asks none."""
        return ()

    def broadcast(self, task: Task, state: State) -> dict[str, Tensor]:
        """Return the values of the codec's `extra`, which go down with the method's question."""
        return {}

    def validate(self, task: Task) -> None:
        """Raise a ValueError if the uplink cannot work on this task."""
        raise NotImplementedError

    def collect(self, state: State, cohort: Cohort, question: Question, at: Tensor) -> Total:
        """Ask the cohort, whose clients train from `at` [d]."""
        raise NotImplementedError

    def answering(self, given: Mapping[type[Question], Given]) -> Answering:
        """Return the handlers of these questions and of the uplink's own."""
        raise NotImplementedError

    def reply(self, question: type[Question]) -> type[Answer]:
        """Return the type of the answer to a question."""
        raise NotImplementedError

    def sizes(self, task: Task, question: type[Question], client: int) -> Mapping[str, Size]:
        """Return the sizes behind the dimension names of a question and its answer."""
        raise NotImplementedError

    def forecast_messages(self, method: Method, task: Task, question: Question, turn: Turn) -> list[Question]:
        """Return every question of a turn that brings the answer to the method's `question`, without values."""
        return [question]

    def forecast_compute(self, turn: Turn) -> Compute:
        """Return the compute that encoding takes of a client."""
        raise NotImplementedError
