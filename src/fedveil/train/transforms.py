"""Transforms: change vectors between training and encoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import Record, Weights
from fedveil.core.stack import ClientStack
from fedveil.privacy.dpsgd import clipped
from fedveil.privacy.users import UserLevel
from fedveil.train.vectors import Vectors


class Transform:
    """Change the vectors of a stack of clients.

    name: the slot of a client's memory that the transform may use
    """

    name: ClassVar[str]

    def client(self, stack: ClientStack, x: Vectors) -> Vectors:
        """Return the changed vectors."""
        return x

    def sent(self, stack: ClientStack, x: Vectors, decoded: Vectors) -> None:
        """Take note of the vectors that the server will decode, after `x` left the last transform."""


@dataclass(frozen=True)
class ClipNoise(Transform):
    """Clip all vectors of a client together to norm C, and add Gaussian noise.

    noise: False if the noise is added later, inside the secure sum
    """

    name: ClassVar[str] = "user privacy"

    how: UserLevel
    noise: bool = True

    def client(self, stack: ClientStack, x: Vectors) -> Vectors:
        if self.noise:
            return x.jointly(lambda vectors: self.how.noised(stack, vectors))
        return x.jointly(lambda vectors: clipped(vectors, self.how.clip))


@dataclass(frozen=True)
class Weigh(Transform):
    """Multiply by λ_k, the client's records over the public maximum, because a mean of codes is unweighted."""

    name: ClassVar[str] = "weigh"

    equal: bool = False  # every client counts the same

    def client(self, stack: ClientStack, x: Vectors) -> Vectors:
        share = torch.ones(len(stack), 1)
        if not self.equal:
            share = torch.from_numpy(stack.rows.counts / stack.task.largest).float()[:, None]
        return replace(x.map(lambda _, vector: vector * share.to(vector)), share=share)


@message.kind
class Residuals(Record, frozen=True):
    """The error of the codec, a tensor for each vector of a client."""

    common = ()

    lost: list[Weights]


@dataclass(frozen=True)
class Feedback(Transform):
    """Add the error of the codec to a client's next vectors (Seide et al. 2014)."""

    name: ClassVar[str] = "feedback"

    def client(self, stack: ClientStack, x: Vectors) -> Vectors:
        memory: list[Residuals | None] = stack.slot(self.name)
        order = list(x.named)

        def lost(name: str, like: Tensor) -> Tensor:
            rows = [torch.zeros_like(like[0]) if m is None else m.lost[order.index(name)].to(like) for m in memory]
            return torch.stack(rows)

        return x.map(lambda name, vector: vector + lost(name, vector))

    def sent(self, stack: ClientStack, x: Vectors, decoded: Vectors) -> None:
        lost = [(vector - decoded[name]).cpu() for name, vector in x.named.items()]
        stack.remember(self.name, [Residuals(list(rows)) for rows in zip(*lost, strict=True)])
