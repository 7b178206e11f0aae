"""The way down in a few scalars: clients regrow the server's step from a key and the K coefficients behind it.

Both sides take the very same step, server optimiser and all, and are kept in step (`fedveil.links.steps`). A schedule
of the server's rate goes by the number of the step, which both know, and not by the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from fedveil.core import message, schema
from fedveil.core.message import Record, Shape
from fedveil.core.method import State
from fedveil.core.sampling import MOST_STALENESS
from fedveil.core.task import Task
from fedveil.links.steps import Steps

MOST_KEYS = MOST_STALENESS + 1  # of a step: one for each version of the weights that answers are about
Key = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


@message.kind
class Step(Record, frozen=True):
    """A step of the server: the gradient is Σ c_k z_k, with directions z_k of this key."""

    key: Key
    coefficients: Annotated[Tensor, Shape(("directions",))]


@message.kind
class MixedStep(Record, frozen=True):
    """A step made of answers about several versions of the weights: the gradient is Σ_j Σ_k c_jk z_jk, with directions
    z_jk of key j."""

    keys: Annotated[list[Key], Meta(min_length=1, max_length=MOST_KEYS)]
    coefficients: Annotated[Tensor, Shape(("keys", "directions"))]


def step_of(keys: Sequence[int], coefficients: Sequence[Tensor]) -> Step | MixedStep:
    """The step along the directions of these keys. Rows of coefficients are of one length."""
    if len(keys) == 1:
        return Step(keys[0], coefficients[0])
    return MixedStep(list(keys), torch.stack(list(coefficients)))


def replay(
    initial: Callable[[Task], State],
    take: Callable[[Task, State, Sequence[int], Sequence[Tensor], int], State],
    max_directions: int,
) -> Steps:
    """Steps from the state of `initial`, of at most so many coefficients a key. `take` takes one, from its keys and
    their coefficients."""

    def read(task: Task, frame: bytes) -> Step | MixedStep:
        kind: type[Step | MixedStep] = MixedStep if message.envelope(frame)[0] == MixedStep.kind else Step
        limit = schema.size_limit(kind, {"keys": MOST_KEYS, "directions": max_directions})
        step, _ = message.unframe(frame, {kind.kind: kind}, limit)
        assert isinstance(step, Step | MixedStep)
        keys = len(step.keys) if isinstance(step, MixedStep) else 1
        schema.check(step, {"keys": keys, "directions": min(step.coefficients.numel() // keys, max_directions)})
        return step

    def taken(task: Task, now: State, step: Step | MixedStep, number: int) -> State:
        if isinstance(step, Step):
            return take(task, now, [step.key], [step.coefficients], number)
        return take(task, now, step.keys, list(step.coefficients), number)

    return Steps(initial, read, taken, moments=True)


def longest(max_directions: int) -> int:
    """The bytes of a step of so many coefficients."""
    return message.size(schema.blank(Step, {"directions": max_directions})) + 8  # a key is 9 bytes, not 1
