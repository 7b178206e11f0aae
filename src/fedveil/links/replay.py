"""The way down in a few scalars: clients regrow the server's step from a key and the K coefficients behind it.

Both sides take the very same step, server optimiser and all, and are kept in step (`fedveil.links.steps`). A schedule
of the server's rate goes by the number of the step, which both know, and not by the round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta
from torch import Tensor

from fedveil.core import message, schema
from fedveil.core.message import Record, Shape
from fedveil.core.method import State
from fedveil.core.task import Task
from fedveil.links.steps import Steps

Key = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


@message.kind
class Step(Record, frozen=True):
    """A step of the server: the gradient is Σ c_k z_k, with directions z_k of this key."""

    key: Key
    coefficients: Annotated[Tensor, Shape(("directions",))]


def replay(
    initial: Callable[[Task], State], take: Callable[[Task, State, Step, int], State], max_directions: int
) -> Steps:
    """Steps that `take` takes from the state of `initial`, of at most so many coefficients."""

    def read(task: Task, frame: bytes) -> Step:
        step, _ = message.unframe(frame, {Step.kind: Step}, schema.size_limit(Step, {"directions": max_directions}))
        assert isinstance(step, Step)
        schema.check(step, {"directions": min(step.coefficients.numel(), max_directions)})
        return step

    return Steps(initial, read, take, moments=True)


def longest(max_directions: int) -> int:
    """The bytes of a step of so many coefficients."""
    return message.size(schema.blank(Step, {"directions": max_directions})) + 8  # a key is 9 bytes, not 1
