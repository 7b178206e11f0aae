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
(`Context.asked`), so masks of clients who were asked different things do not cancel. This module holds what both sides
know: settings, records and key derivation. The clients' side is `summand.py`, the server's `summing.py`.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from fedveil.core import message, schema
from fedveil.core.message import Answer, Question, Shape, Size
from fedveil.privacy.secagg import graph, masks
from fedveil.privacy.secagg.masks import KEY, FixedPoint
from fedveil.privacy.secagg.shamir import SHARE
from fedveil.privacy.skellam import SumNoise

if TYPE_CHECKING:
    from fedveil.core.forecast import Turn
    from fedveil.core.method import Method
    from fedveil.core.stack import ClientStack
    from fedveil.core.task import Task

PROTOCOL = b"fedveil secure sum 2"
SIGNATURE, DIGEST, MARK, NONCE, TAG = 64, 32, 16, 12, 16  # bytes
SEALED = NONCE + 2 * SHARE + TAG


@dataclass(frozen=True)
class SecureSum:
    """How vectors are summed so that the server sees their sum only.

    clip:       values beyond ±clip are cut, and counted in the ledger
    bits:       of a value in fixed point, its sign among them; elements have 32 bits, or 64 if the sum of all clients
                needs them
    server:     whom it protects from: a "curious" server that keeps to the protocol, or a "malicious" one
    min_clients: the fewest clients that a client lets itself be summed with
    neighbours: with how many others a client masks; None chooses, and is everybody in cohorts of up to 100
    """

    clip: float = 1.0
    bits: int = 20
    server: str = "curious"
    min_clients: int = 3
    neighbours: int | None = None

    def __post_init__(self) -> None:
        if self.clip <= 0 or not 2 <= self.bits <= 52:
            raise ValueError("a secure sum needs clip above 0 and from 2 to 52 bits")
        if self.server not in ("curious", "malicious"):
            raise ValueError(f"secure.server is '{self.server}'; use curious or malicious")
        if self.min_clients < 3:
            raise ValueError("secure.min_clients is at least 3: of a sum of two each knows the other's part")
        if self.neighbours is not None and (self.neighbours < 2 or self.neighbours % 2):
            raise ValueError("secure.neighbours is an even number from 2 on; leave it out to let the cohort decide")
        if self.server == "malicious" and self.neighbours is not None:
            raise ValueError("against a malicious server everybody masks with everybody; leave secure.neighbours out")

    def validate(self, task: Task, answer: type[Answer], aggregator: str = "mean") -> None:
        """Raise a ValueError if such answers cannot be summed securely, or not be merged so."""
        if not answer.additive:
            raise ValueError(
                f"a secure sum of {answer.__name__} means nothing: these messages do not add up, each has to be "
                "decoded by itself; use a codec whose messages do, such as raw"
            )
        if aggregator != "mean":
            raise ValueError(
                f"aggregator.kind is '{aggregator}', which compares clients' updates one by one, and in a secure sum "
                "the server sees none of them; use mean"
            )
        n = len(task.clients)
        self.fixed_point(n, self.quorum(n), task.sizes, answer)

    def fixed_point(self, n: int, quorum: int, sizes: Mapping[str, Size], answer: type[Answer]) -> FixedPoint:
        """The encoding of `answer` in a cohort of n, of whom a quorum is enough."""
        heaviest = sizes.get("records", 1) if "records" in answer.__struct_fields__ else 1
        assert isinstance(heaviest, int)
        return FixedPoint(n, self.clip, self.bits, heaviest)

    @property
    def noise(self) -> SumNoise | None:
        """The noise that clients add, if it is they who make the sum private."""
        return None

    def even(self) -> SecureSum:
        """The same where every client weighs 1: no bits are kept for weights."""
        return _Even(**_settings(self))

    def noised(self, noise: SumNoise) -> SecureSum:
        """The same where every client weighs 1, cuts its vector to norm `clip` and adds a share of this noise."""
        return _Noised(**_settings(self), added=noise)

    def quorum(self, n: int) -> int:
        """The fewest of n clients that are summed, and that together can recover a secret."""
        return max(self.min_clients, 2 * n // 3 + 1 if self.server == "malicious" else graph.majority(n))

    def degree(self, n: int) -> int:
        """The number of a client's neighbours among n."""
        return n - 1 if self.server == "malicious" else min(self.neighbours or graph.degree(n), n - 1)

    def threshold(self, n: int, quorum: int) -> int:
        """The number of shares that recover a secret: the quorum, or a majority of a neighbourhood."""
        k = self.degree(n)
        return quorum if k >= n - 1 else graph.majority(k + 1)

    def forecast_messages(self, method: Method, task: Task, question: Question, turn: Turn) -> list[Question]:
        """What a client is asked for a secure sum of the answers to `question`, without values, if everybody stays."""
        ids, n = list(turn.cohort), len(turn.cohort)
        if n < self.quorum(n):
            return []
        holders = self.degree(n) + 1
        fixed = self.fixed_point(n, self.quorum(n), task.sizes, method.reply(question))
        sizes = {**method.schema(task, question, turn.client), **question.sizes()}
        elements = sum(math.prod(shape) for shape in shapes(method.reply(question), sizes).values()) + 2

        def blank(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device="meta")

        payload = blank(message.size(question) - message.PREFIX_BYTES)
        malicious = self.server == "malicious"
        return [
            Advertise(),
            Share(ids, self.quorum(n), blank(holders, KEY), blank(holders, KEY), blank(holders, SIGNATURE)),
            Deal(ids, blank(holders - 1, SEALED), blank(holders - 1, 2 * MARK)),
            Mask(ids, elements, fixed.wide, question.kind, payload),
            *([Agree(ids)] if malicious else []),
            Unmask(ids, [], holders, ids, blank(n, SIGNATURE)) if malicious else Unmask(ids, [], holders),
        ]

    def stages(
        self, *sums: tuple[Mapping[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]], type[Answer]]
    ) -> dict[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]]:
        """A client's answers to the protocol's questions.

        sums: for each sum of a round, in order, the method's questions whose answers are summed, and the answers' type

        They are answered within the secure sum only, so a server cannot ask them in the clear.
        """
        from fedveil.privacy.secagg.client import Summand

        summand = Summand(self, sums)
        return {
            Advertise: summand.advertise,
            Share: summand.share,
            Deal: summand.deal,
            Mask: summand.mask,
            Agree: summand.agree,
            Unmask: summand.unmask,
        }


@dataclass(frozen=True)
class _Even(SecureSum):
    def fixed_point(self, n: int, quorum: int, sizes: Mapping[str, Size], answer: type[Answer]) -> FixedPoint:
        return FixedPoint(n, self.clip, self.bits, 1)


@dataclass(frozen=True)
class _Noised(SecureSum):
    added: SumNoise = field(kw_only=True)

    @property
    def noise(self) -> SumNoise:
        return self.added

    def fixed_point(self, n: int, quorum: int, sizes: Mapping[str, Size], answer: type[Answer]) -> FixedPoint:
        fixed = FixedPoint(n, self.clip, self.bits, 1)
        return replace(fixed, variance=self.added.variance(fixed.half, quorum))


def _settings(how: SecureSum) -> dict[str, Any]:
    return {each.name: getattr(how, each.name) for each in fields(SecureSum)}


@dataclass(frozen=True)
class Sum:
    """What the server learns."""

    clients: tuple[int, ...]  # whose answers are in it, U3
    weight: int  # Σ n_k, or the number of clients where answers have no `records`
    totals: Mapping[str, Tensor]  # Σ n_k · x_k / the public maximum of n_k, float64, by field
    heaviest: int  # that maximum
    clipped: int  # values that were beyond the range and were cut
    error: float  # how far an element of a mean can be from that of the clients' floats, had none been cut

    def mean(self, name: str) -> Tensor:
        """The mean of one field, weighted by records, float32."""
        return (self.totals[name] * (self.heaviest / self.weight)).float()


def shapes(answer: type[Answer], sizes: Mapping[str, Size]) -> dict[str, tuple[int, ...]]:
    """The shapes of an answer's tensors, which are summed one after the other."""
    return {name: shape.bind(sizes)[1] for name, shape in schema.fields(answer).items()}


# ---------------------------------------------------------------------------------------------------- records

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
    """Make two key pairs for this round."""

    reply = Advertised


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


class Secrets(msgspec.Struct, frozen=True):
    """What a client keeps between the stages, until the round closes. It is no record: whoever has to carry it from one
    process to another seals it with a key that no disk and no other machine ever sees."""

    stage: str
    channel: bytes = b""  # private keys, until what they open is known
    mask: bytes = b""
    own: bytes = b""  # b, which grows the client's own mask
    ids: list[int] = []  # U1
    quorum: int = 0
    session: bytes = b""  # digest of U1 and the keys seen
    holders: list[int] = []  # the neighbours and the client itself
    channel_keys: dict[int, bytes] = {}  # to open what a neighbour sealed
    pairs: dict[int, bytes] = {}  # secrets shared with neighbours, of which masks are derived
    held: dict[int, bytes] = {}  # shares of neighbours' secrets and of the client's own
    shared: list[int] = []  # who shared, and from the masked stage on U2
    asked: bytes = b""  # digest of what the masked vector was computed from
    alive: list[int] = []  # U3, once it was signed

    def sealed(self, key: bytes, about: bytes) -> bytes:
        return masks.seal(key, secrets.token_bytes(NONCE), msgspec.msgpack.encode(self), about)

    @staticmethod
    def unsealed(data: bytes, key: bytes, about: bytes) -> Secrets | None:
        """None if it was sealed with another key: then it is lost, which is what a restart should do to it."""
        text = masks.unseal(key, data, about)
        return None if text is None else msgspec.msgpack.decode(text, type=Secrets)


# ---------------------------------------------------------------------------------------------------- derivation


def digest(*parts: bytes, size: int = 32) -> bytes:
    """A hash of parts that tells where each ends."""
    state = hashlib.blake2b(digest_size=size, person=b"fedveil-sum")
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def listed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@dataclass(frozen=True)
class Context:
    """What keys and signatures are bound to: the protocol, the run and the round, and once they are known who takes
    part and how many must stay."""

    run: bytes
    round: int
    ids: bytes = b""  # digest of U1, sorted, and of the quorum

    @staticmethod
    def of(run: bytes, round_: int, ids: Sequence[int], quorum: int) -> Context:
        return Context(run, round_, digest(listed(ids), listed([quorum])))

    def info(self, purpose: str, *clients: int) -> bytes:
        where = self.run + self.round.to_bytes(4, "little") + self.ids
        return PROTOCOL + where + purpose.encode() + listed(clients)

    def asked(self, basis: bytes, question: Mask) -> bytes:
        """A digest of everything that the server supplied and a masked vector depends on: `basis`, which is the
        method's question, the weights held and the round's earlier questions (see `ClientStack.basis`), and the stage's
        own fields."""
        sizes = listed([question.wide, *divmod(question.elements, 1 << 32)])
        return digest(self.info("asked"), basis, sizes, listed(question.ids))

    def signed_keys(self, client: int, channel: bytes, mask: bytes) -> bytes:
        """What a client signs when it advertises; U1 is not known then."""
        return Context(self.run, self.round).info("keys", client) + channel + mask

    def signed_set(self, session: bytes, asked: bytes, alive: Sequence[int]) -> bytes:
        """What a client signs when it agrees on who is left, and on what all of them were asked."""
        return self.info("alive") + session + asked + listed(alive)

    def seal_key(self, shared_secret: bytes, sender: int, receiver: int) -> bytes:
        return masks.derive(shared_secret, self.info("seal", sender, receiver))

    def sealed_about(self, sender: int, receiver: int) -> bytes:
        return self.info("sealed", sender, receiver)

    def pair_mask(self, shared_secret: bytes, asked: bytes, a: int, b: int) -> bytes:
        """The key of the mask that a and b share, if both were asked the same: the one with the lower id adds it, the
        other subtracts it."""
        return masks.derive(shared_secret, self.info("pair mask", min(a, b), max(a, b)) + asked)

    def own_mask(self, secret: bytes, client: int) -> bytes:
        return masks.derive(secret, self.info("own mask", client))

    def marks(self, both: bytes, dealer: int, holder: int) -> bytes:
        """The marks of the two shares that a dealer gives a holder."""
        return self.mark(both[:SHARE], dealer, holder) + self.mark(both[SHARE:], dealer, holder)

    def mark(self, secret: bytes, *clients: int) -> bytes:
        """Tells a forged share (of a dealer, for a holder) or a wrong b (of a dealer), and gives neither away."""
        return digest(self.info("mark", *clients), secret, size=MARK)


def tensor(data: bytes | bytearray | memoryview, width: int | None = None) -> Tensor:
    """Bytes as a uint8 tensor [N] or [N / width, width]."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat if width is None else flat.view(-1, width)


def rows(octets_: Tensor) -> list[bytes]:
    """The rows of a uint8 tensor [N, width]."""
    return [row.tobytes() for row in octets_.numpy()]
