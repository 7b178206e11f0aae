"""Update codecs: what an update looks like on the wire. Any of them goes up, down, or both ways.

A codec turns updates at weights `w` into payloads and payloads back into updates, with one `decode` for both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from torch import Tensor

from fedveil import message
from fedveil.clients import Crowd
from fedveil.cost import Work
from fedveil.message import Answer, Count, Question, Size, Weights
from fedveil.seeds import Seed
from fedveil.task import Task


class Codec:
    """A frozen dataclass of settings with `encode` and `decode`. One that states a `name` is entered in the `registry`.

    reference: what a down message is relative to. "last": the weights of the round before, so that everyone applies the
               decoded step and stays in step. "init": the initial weights, which everyone can draw.
    """

    name: ClassVar[str]
    payload: ClassVar[type[Answer]]
    reference: ClassVar[str] = "last"
    downward: ClassVar[bool] = True  # whether the server, which has no data and is one, can use it
    registry: ClassVar[dict[str, type[Codec]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            cls.registry[cls.name] = cls

    def of(self, client: int) -> Codec:
        """The codec a client uses: this one, unless clients differ."""
        return self

    def refuse(self, task: Task) -> None:
        """Raise a ValueError if the codec cannot work on this task."""

    def sizes(self, task: Task) -> Mapping[str, Size]:
        """What the dimension names of the payload stand for."""
        return task.sizes

    def work(self) -> Work:
        """What encoding one update takes of a client."""
        return Work()

    def check(self, task: Task, payload: Any) -> None:
        """Raise `Refused` for a payload that fits its schema and still cannot be decoded."""

    def exhibit(self, payload: Any) -> tuple[str, Tensor, Tensor] | None:
        """What a payload holds that can be looked at: a name, images [N, channels, height, width], labels [N, K]."""
        return None

    def encode(self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], crowd: Crowd | None) -> list[Any]:
        """Updates [C, d] at `w` [C, d] -> C payloads. `crowd` is None on the server, which has no data of its own."""
        raise NotImplementedError

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Any]) -> Tensor:
        """C payloads at `w` [C, d] -> updates [C, d]."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- in code space


@message.kind(24)
class Magnitude(Answer, frozen=True):
    """The largest magnitude in what a client will send."""

    largest: Annotated[float, Meta(ge=0, le=1e6)]


@message.kind(25)
class Send(Question, frozen=True):
    """Encode what you trained at this scale, with the code of this digest."""

    reply = Answer  # the codec's payload
    scale: Annotated[float, Meta(ge=0, le=1e9)]
    digest: bytes = bytes(8)


class CodeSpace(Codec):
    """A codec whose payloads are averaged as they are and decoded once, at a scale that the cohort agrees on first.

    agree(largest, round) -> scale    the server: from the largest magnitude of each client [m]
    at(scale, seed)       -> Tuned    both sides: the codec of this round

    A payload has a field `share` [1]: the weight that was put on its vector, which the mean is divided by afterwards.
    All its tensors add up, so their sum over the clients is all that a server needs.
    """

    downward: ClassVar[bool] = False  # a mean of one is no mean

    @property
    def digest(self) -> bytes:
        """8 bytes that tell the code from any other that would not decode it."""
        raise NotImplementedError

    @property
    def reach(self) -> float:
        """The largest magnitude in a payload."""
        raise NotImplementedError

    def agree(self, largest: Tensor, round_: int) -> float:
        raise NotImplementedError

    def at(self, scale: float, seed: Seed) -> Tuned:
        raise NotImplementedError

    @property
    def fixed(self) -> bool:
        """Whether it loses the same directions in every round, so that error feedback would only pile them up."""
        return False


class Tuned(Codec):
    """A codec in code space with the scale of one round. Its codes do not depend on the weights `w`."""

    def merge(self, task: Task, payloads: Sequence[Any]) -> Tensor:
        """The mean of the vectors behind the payloads, decoded from the mean of the codes, [d]."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- as it is


@message.kind(3)
class Update(Answer, frozen=True):
    """w_k - w, and the number of records behind it."""

    sums: ClassVar[bool] = True

    update: Weights
    records: Count = 1


@dataclass(frozen=True)
class Raw(Codec):
    """The update as it is, in float32."""

    name: ClassVar[str] = "raw"
    payload: ClassVar[type[Answer]] = Update

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], crowd: Crowd | None
    ) -> list[Update]:
        return [Update(row) for row in updates.cpu()]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Update]) -> Tensor:
        return message.stack(payloads, "update").to(w.device)
