"""The secure sum: the server learns the sum of its clients' vectors and nothing else of them (Bonawitz et al. 2017).

    stage      the server asks              a client answers
    keys       Advertise                    two fresh X25519 public keys, signed with its identity
    shares     Share: everybody's keys      Shamir shares of its two secrets, sealed for each neighbour
    dealt      Deal: what was sealed for it whose shares it cannot open
    masked     Mask: the method's question  its vector + PRG(b) ± PRG(each neighbour's pair key), in a wrapping ring
    agreement  Agree: who is left           its signature of that set            (only against a malicious server)
    unmask     Unmask: who is left or gone  a share of b of each who is left, of the mask key of each who is gone

Pair masks cancel in the sum; those of clients who are gone and every b are recovered from t shares. Cohorts shrink,
U1 ⊇ U2 ⊇ U3 ⊇ U4, and the sum is of U3. A pair mask is derived from all that the two clients were asked
(`Context.asked`), so masks of clients who were asked different things do not cancel.

This module holds the questions and answers of each stage.
"""

from __future__ import annotations

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import Answer, Question, Shape, Size
from fedveil.privacy.secagg.context import DIGEST, MARK, NONCE, SIGNATURE, TAG
from fedveil.privacy.secagg.masks import KEY
from fedveil.privacy.secagg.shamir import SHARE

SEALED = NONCE + 2 * SHARE + TAG
Ids = list[Annotated[int, Meta(ge=0, lt=message.SERVER)]]


def octets(rows: str | None, width: int) -> Shape:
    return Shape((width,) if rows is None else (rows, width), torch.uint8, 0, 255)


Sealed = Annotated[Tensor, octets("peers", SEALED)]


@message.kind
class Advertised(Answer, frozen=True):
    """Two public keys, fresh for this round, and the client's signature of them."""

    channel: Annotated[Tensor, octets(None, KEY)]
    mask: Annotated[Tensor, octets(None, KEY)]
    signature: Annotated[Tensor, octets(None, SIGNATURE)]


@message.kind
class Advertise(Question, frozen=True):
    """Make two key pairs for this sum of the round."""

    reply = Advertised
    number: Annotated[int, Meta(ge=0, le=255)] = 0  # sums of the round before this one


@message.kind
class Shared(Answer, frozen=True):
    """Sealed shares for each neighbour, a mark of each share by which a forged one is told, and one of b."""

    sealed: Sealed
    marks: Annotated[Tensor, octets("holders", 2 * MARK)]
    mark: Annotated[Tensor, octets(None, MARK)]


@message.kind
class Share(Question, frozen=True):
    """Who advertised keys (U1), how many must stay, and the signed keys of the client's neighbours and itself."""

    reply = Shared
    ids: Ids
    quorum: int
    channel: Annotated[Tensor, octets("holders", KEY)]
    mask: Annotated[Tensor, octets("holders", KEY)]
    signatures: Annotated[Tensor, octets("holders", SIGNATURE)]

    def sizes(self) -> dict[str, Size]:
        return {"holders": len(self.channel), "peers": len(self.channel) - 1}


@message.kind
class Dealt(Answer, frozen=True):
    """Whose shares the client cannot open, or which are not what their dealer says it dealt."""

    complaints: Ids = []


@message.kind
class Deal(Question, frozen=True):
    """Who shared, what the client's neighbours among them sealed for it, and the marks of these shares."""

    reply = Dealt
    ids: Ids
    sealed: Sealed
    marks: Annotated[Tensor, octets("peers", 2 * MARK)]

    def sizes(self) -> dict[str, Size]:
        return {"peers": len(self.sealed)}


@message.kind
class Masked(Answer, frozen=True):
    """The masked vector: ring elements, 32 or 64 bits each, as signed integers; and a digest of all that the client was
    asked and computed it from, which its masks are made of."""

    vector: Annotated[Tensor, Shape(("elements",), "ring", -(2.0**63), 2.0**63)]
    asked: Annotated[Tensor, octets(None, DIGEST)]


@message.kind
class Mask(Question, frozen=True):
    """Whose shares were dealt (U2), and the method's own question, of which the answer is masked."""

    reply = Masked
    ids: Ids
    elements: Annotated[int, Meta(ge=3, lt=2**40)]
    wide: bool
    asked: Annotated[int, Meta(ge=0, lt=2**24)]  # the kind of the method's question
    question: Annotated[Tensor, Shape(("bytes",), torch.uint8, 0, 255)]  # its payload

    def sizes(self) -> dict[str, Size]:
        return {
            "bytes": self.question.numel(),
            "elements": self.elements,
            "ring": torch.int64 if self.wide else torch.int32,
        }


@message.kind
class Agreed(Answer, frozen=True):
    """The client's signature of who is left."""

    signature: Annotated[Tensor, octets(None, SIGNATURE)]


@message.kind
class Agree(Question, frozen=True):
    """Whose masked vectors arrived (U3)."""

    reply = Agreed
    alive: Ids


@message.kind
class Unmasked(Answer, frozen=True):
    """One share of one secret of each neighbour and of the client itself."""

    shares: Annotated[Tensor, octets("holders", SHARE)]


@message.kind
class Unmask(Question, frozen=True):
    """Who is left (U3) and who is gone (U2 without U3), how many of U2 are the client's neighbours or itself, and,
    against a malicious server, who signed that set."""

    reply = Unmasked
    alive: Ids
    gone: Ids
    holders: Annotated[int, Meta(ge=1, lt=message.SERVER)]
    signers: Ids = []
    signatures: Annotated[Tensor, octets("signers", SIGNATURE)] | None = None

    def sizes(self) -> dict[str, Size]:
        return {"holders": self.holders, "signers": len(self.signers)}


def tensor(data: bytes | bytearray | memoryview, width: int | None = None) -> Tensor:
    """Bytes as a uint8 tensor [N] or [N / width, width]."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat if width is None else flat.view(-1, width)


def rows(octets_: Tensor) -> list[bytes]:
    """The rows of a uint8 tensor [N, width]."""
    return [row.tobytes() for row in octets_.numpy()]
