"""The questions that a method asks, and what answers to them look like: all that both sides of the wire need of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fedveil.core.message import Answer, Question, Size
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task

Handler = Callable[[ClientStack, Any], Sequence[Answer]]  # a stack and a question -> one answer a client


class Exchange:
    """What crosses the wire. A `Method` is one, with a server's side of its own."""

    name: ClassVar[str]

    @property
    def handlers(self) -> Mapping[type[Question], Handler]:
        raise NotImplementedError

    def reply(self, question: Question) -> type[Answer]:
        """The kind of answer to `question`; by default what the question itself states."""
        return type(question).reply

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        """What the dimension names in the answer to `question` stand for; by default the task's own."""
        return task.sizes

    def question_sizes(self, task: Task) -> Mapping[str, Size]:
        """What the dimension names in questions stand for; by default the task's own."""
        return task.sizes
