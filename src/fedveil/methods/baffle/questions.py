"""What BAFFLE's batch level sends: how many slopes, along which directions, and the slopes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import Answer, Count, Question, Shape, Size, Weights
from fedveil.links.replay import Key
from fedveil.links.steps import Version

K = Annotated[int, Meta(ge=1, le=10**6)]


@message.kind
class Slopes(Answer, frozen=True):
    """How the client's mean loss changes along each direction, and the number of records behind it."""

    additive = True
    slopes: Annotated[Tensor, Shape(("directions",))]
    records: Count = 1


@message.kind
class Probe(Question, frozen=True):
    """Probe these weights along the first so many directions of this key."""

    reply = Slopes
    weights: Weights
    key: Key
    directions: K

    def sizes(self) -> dict[str, Size]:
        return {"directions": self.directions}


@message.kind
class ProbeHere(Question, frozen=True):
    """The same with the weights you hold, which are those of this version."""

    reply = Slopes
    version: Version
    key: Key
    directions: K

    def sizes(self) -> dict[str, Size]:
        return {"directions": self.directions}
