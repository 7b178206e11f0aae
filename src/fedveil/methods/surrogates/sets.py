"""What clients and server of a surrogate method say to each other and keep: synthetic sets."""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import Answer, Count, Question, Record, Shape, Size, Weights
from fedveil.core.task import Task

WIDEST = 1e3  # the range of synthetic inputs, either way
Images = Annotated[Tensor, Shape(("points", "input"), low=-WIDEST, high=WIDEST)]


@message.kind
class Classes(Answer, frozen=True):
    """1 for each class of which the client has records."""

    held: Annotated[Tensor, Shape(("classes",), torch.uint8, 0, 1)]


@message.kind
class WhichClasses(Question, frozen=True):
    """Which classes do you have records of?"""

    reply = Classes


@message.kind
class Surrogate(Answer, frozen=True):
    """A synthetic set, how far from the weights it stands in for the client's data, and the records behind it.

    With differential privacy `records` is 1 whatever it has.
    """

    images: Images
    labels: Annotated[Tensor, Shape(("points",), torch.int16, 0, 2**15 - 1)]
    radius: Annotated[float, Meta(ge=0, le=1e6)]
    records: Count


@message.kind
class Distil(Question, frozen=True):
    """Fit a synthetic set of so many points to your records, as they look around these weights."""

    reply = Surrogate
    weights: Weights
    points: Annotated[int, Meta(ge=1, le=10**6)]

    def sizes(self) -> dict[str, Size]:
        return {"points": self.points}


SLOT = "surrogates"  # of a client's memory


@message.kind
class Last(Record, frozen=True):
    """What a client remembers: the images it sent last."""

    common = ()

    images: Images


def held(task: Task, client: int) -> Tensor:
    """1 for each class of which the client has records, [classes]."""
    own = torch.from_numpy(task.clients[client])
    return torch.bincount(task.data.y[own], minlength=task.data.classes).clamp(max=1).to(torch.uint8)


def declared(task: Task, client: int) -> Tensor:
    """1 for each class that is publicly said to be the client's, [classes], whatever records it has."""
    assert task.clients.held
    found = torch.zeros(task.data.classes, dtype=torch.uint8)
    found[list(task.clients.held[client])] = 1
    return found
