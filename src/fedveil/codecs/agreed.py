"""Codecs in code space: the server averages the codes of all clients and decodes only the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec.structs import replace
from torch import Tensor

from fedveil.codecs.base import Codec, P
from fedveil.core import message
from fedveil.core.cohort import Cohort
from fedveil.core.message import Answer, Question, Record, Shape
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task


@message.kind
class Offer(Answer, frozen=True):
    """A vector, of which the server needs the mean over the clients."""

    additive = True
    vector: Annotated[Tensor, Shape(("offer",))]


@message.kind
class Agreement(Question, frozen=True):
    """The vector that the cohort agrees on."""

    reply = Answer  # the codec's payload
    vector: Annotated[Tensor, Shape(("agreed",))]


@message.kind
class SharedCode(Answer, frozen=True):
    """A code, and the weight that was put on the vector behind it."""

    additive = True
    code: Annotated[Tensor, Shape(("code",))]
    share: Annotated[Tensor, Shape((1,), low=1e-9, high=1)]


class AgreedCodec(Codec[P]):
    """A codec with two exchanges: clients send an offer, the server sends an agreement, clients send codes.

    offer:     a client's first answer, by default a vector. If offers add up, the server needs their mean only
    agreement: the server's question that states what was agreed on, by default a vector
    extra:     further fields of the method's question, such as a basis that the server keeps between rounds
    reach:     the largest magnitude in a payload; None: that of the vectors
    tolerance: the error of a sum of codes that `merge` can correct; None: sums need not be exact

    A payload has a field `share` [1]: the weight that was put on its vector, by which the mean is divided afterwards.
    All its tensors add up, so their sum over the clients is all that a server needs.
    """

    in_code_space: ClassVar[bool] = True
    server_can_encode: ClassVar[bool] = False  # a mean of one is no mean
    payload: ClassVar[type[Answer]] = SharedCode
    offer: ClassVar[type[Answer]] = Offer
    agreement: ClassVar[type[Question]] = Agreement
    extra: ClassVar[Mapping[str, Any]] = {}

    @property
    def reach(self) -> float | None:
        return None

    @property
    def tolerance(self) -> float | None:
        return None

    def broadcast(self, task: Task, kept: Record | None) -> dict[str, Tensor]:
        """Return the values of `extra`, given the record that the server kept from the round before."""
        return {}

    def offers(self, stack: ClientStack, vectors: Tensor, question: Any) -> list[Any]:
        """Return an offer for each of the vectors [C, d], on the clients."""
        raise NotImplementedError

    def check_offer(self, task: Task, offer: Any) -> None:
        """Raise `Refused` if an offer fits its schema but cannot be used."""

    def agree(self, cohort: Cohort, offers: Mapping[int, Any]) -> Question:
        """Return the agreement, on the server, from the offers by client; with a secure sum, from their mean only."""
        raise NotImplementedError

    def at(self, task: Task, agreed: Any, seed: Seed) -> Tuned[P]:
        """Return the codec of this round, on both sides. Raise `Refused` if the agreement cannot be used."""
        raise NotImplementedError


class Tuned(Codec[P]):
    """A codec in code space, in one round. Its codes do not depend on the weights `w`."""

    def merge(self, task: Task, payloads: Sequence[P], clients: int) -> tuple[Tensor, Record | None]:
        """Return the mean of the encoded vectors [d], and a record to keep for the next round.

        payloads: those of all clients, or under a secure sum one that holds their mean
        clients:  how many clients are in that mean
        """
        raise NotImplementedError

    def weighed(self, payload: P, share: Tensor) -> P:
        """Return the payload with the weight [1] of its vector."""
        return replace(payload, share=share)
