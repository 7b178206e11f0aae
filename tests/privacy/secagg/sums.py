"""A method that asks for a secure sum, and engines that drop and spoil what its stages send."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import fedveil as fv
from fedveil.core import message, schema
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.forecast import Turn
from fedveil.core.message import Answer, Count, Envelope, Question, Record, Weights
from fedveil.engines import LocalEngine
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg import masks, shamir
from fedveil.privacy.secagg.client import stages
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.kept import OVER
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.records import Advertise, Deal, Mask, Masked, Share, Shared, Unmask, tensor
from fedveil.privacy.secagg.server import ask_sum
from toys import Plain


@message.kind
class Summand(Answer, frozen=True):
    additive = True
    update: Weights
    records: Count = 1


@message.kind
class Give(Question, frozen=True):
    reply = Summand
    weights: Weights


@dataclass(frozen=True)
class Summed(fv.Method):
    """The weighted mean of what each client gives (drawn from its number), learnt as a secure sum."""

    name: ClassVar[str] = "toy-summed"

    secure: SecureSum = field(default_factory=SecureSum)

    def init_state(self, task: fv.Task) -> fv.State:
        self.secure.validate(task, Summand)
        return Plain(task.initial)

    def round(self, state: Any, cohort: fv.Cohort) -> fv.State:
        total = ask_sum(cohort, Give(state.weights), self.secure)
        LAST[:] = [total]
        return Plain(state.weights + total.mean("update"))

    def forecast_messages(self, task: fv.Task, turn: Turn) -> list[Question]:
        return self.secure.forecast_messages(self, task, schema.blank(Give, task.sizes), turn)

    @property
    def handlers(self) -> Mapping[type[Question], Callable[..., Sequence[Answer]]]:
        return {**stages(self.secure, ({Give: self.give}, Summand))}

    def give(self, stack: fv.ClientStack, question: Give) -> list[Summand]:
        counts = stack.task.clients.sizes
        return [Summand(given(k, len(question.weights)), int(counts[k])) for k in stack.clients]


del fv.METHODS[Summed.name]
LAST: list[Any] = []  # the sum of the last round, to be looked at


def given(client: int, size: int = 8) -> Tensor:
    """What a client gives."""
    return torch.from_numpy(fv.Seed.root(client).numpy().uniform(-1, 1, size).astype(np.float32))


class Only(fv.CohortSampler):
    """The first clients, always."""

    def draw(self, task: fv.Task, seed: fv.Seed) -> tuple[int, ...]:
        return tuple(range(self.size))


def expected(task: fv.Task, clients: Iterable[int], secure: SecureSum, advertised: int) -> tuple[Tensor, int]:
    """The exact sum of some clients' integers, decoded, and the sum of their weights."""
    sizes, chosen = task.clients.sizes, list(clients)
    fixed = FixedPoint(advertised, secure.clip, secure.bits, int(sizes.max()))
    encoded = [fixed.encode(given(k, task.layout.size).numpy(), int(sizes[k]), rounding(k)) for k in chosen]
    signed = [vector.view(np.dtype(f"i{vector.itemsize}")).astype(object) for vector in encoded]
    values = np.array(sum(signed)[:-2], dtype=np.int64) * (fixed.clip / fixed.half)
    return torch.from_numpy(values), int(sum(sizes[k] for k in chosen))


def rounding(client: int, round_: int = 1, seed: int = 0) -> np.random.Generator:
    """By which a client of a run rounds."""
    return fv.Seed.root(seed).child("round", round_, "client", client, "rounding").numpy()


class Transport(LocalEngine):
    """A local engine between server and clients that can lose, change and repeat what passes, and keeps it.

    drop:   stage (kind of question) -> clients whose question gets lost
    ask:    (client, question) -> the question that the client gets instead
    answer: (client, answer) -> the answer that the server gets instead
    """

    def __init__(
        self,
        drop: Mapping[type[Question], Iterable[int]] | None = None,
        ask: Callable[[int, Any], Any] = lambda client, question: question,
        answer: Callable[[int, Any], Any] = lambda client, answer: answer,
    ) -> None:
        super().__init__(stack=1, workers=1, wire="bytes")
        self.drop, self.ask, self.answer = drop or {}, ask, answer
        self.letters: list[Letter] = []
        self.replies: list[Reply] = []

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        kept = [x for x in letters if x.client not in self.drop.get(KIND[x.kind], ())]
        asked = [replace(x, contents=message.pack(self.ask(x.client, unpacked(x)))) for x in kept]
        replies = [replace(r, frame=self._altered(r)) if r.frame else r for r in super().deliver(asked, deadline)]
        self.letters += asked
        self.replies += replies
        return replies

    def again(self, letter: Letter) -> Reply:
        """What the client answers to a letter now."""
        (reply,) = super().deliver([letter], None)
        return reply

    def _altered(self, reply: Reply) -> bytes:
        record, where = message.unframe(reply.frame, message.KINDS, len(reply.frame))
        return message.frame(self.answer(reply.client, record), where)

    def heard(self, kind: type[Record]) -> dict[int, Any]:
        """The records of one kind that passed, by client; of several the last."""
        questions = {x.client: unpacked(x) for x in self.letters if x.kind == kind.kind}
        frames = [r for r in self.replies if r.frame and message.envelope(r.frame)[0] == kind.kind]
        return questions | {r.client: message.unframe(r.frame, message.KINDS, len(r.frame))[0] for r in frames}


@dataclass
class Driven:
    """Clients who are driven through the stages one by one, and what they answered."""

    where: dict[int, Clients]
    run: bytes = bytes(8)
    quorum: int | None = None
    numbers: dict[int, int] = field(default_factory=dict)
    keys: dict[int, Any] = field(default_factory=dict)
    shared: dict[int, Shared] = field(default_factory=dict)
    masked: dict[int, Masked] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        return list(self.where)

    def ask(self, question: Any, k: int) -> Any:
        frame = self.where[k].answer([letter(question, k, self.run)])[0].frame
        return message.unframe(frame, message.KINDS, len(frame))[0]

    def number(self, k: int) -> int:
        """The sum of the round that a client is at."""
        return int(self.where[k].notes.get(k, {}).get(OVER, 0))

    def deal(self) -> Driven:
        ids = self.ids
        self.quorum = self.quorum or SecureSum().quorum(len(ids))
        self.numbers = {k: self.number(k) for k in ids}
        self.keys = {k: self.ask(Advertise(self.numbers[k]), k) for k in ids}
        parts = [torch.stack([getattr(self.keys[k], name) for k in ids]) for name in ("channel", "mask", "signature")]
        self.shared = {k: self.ask(Share(ids, self.quorum, *parts), k) for k in ids}
        for k in ids:
            near = [o for o in ids if o != k]
            sealed = torch.stack([self.shared[o].sealed[[p for p in ids if p != o].index(k)] for o in near])
            self.ask(Deal(ids, sealed, torch.stack([self.shared[o].marks[ids.index(k)] for o in near])), k)
        return self

    def mask(self, question: Any) -> Driven:
        asked = Mask(self.ids, 10, False, question.kind, tensor(message.pack(question)))
        self.masked = {k: self.ask(asked, k) for k in self.ids}
        return self

    def unmask(self, k: int, gone: tuple[int, ...] = ()) -> list[bytes]:
        """The shares that client k reveals, by dealer."""
        alive = [o for o in self.ids if o not in gone]
        return [row.numpy().tobytes() for row in self.ask(Unmask(alive, list(gone), len(self.ids)), k).shares]

    def recovered(self, shares: dict[int, bytes]) -> bytes:
        """The secret behind shares by holder."""
        found = shamir.recover({self.ids.index(k) + 1: share for k, share in shares.items()})
        assert found is not None
        return found

    def vector(self, k: int, own: bytes, mask: bytes) -> np.ndarray:
        """A client's elements without masks, from its two secrets."""
        context, others = (
            Context.of(self.run, 1, self.ids, self.quorum, self.number(k)),
            [o for o in self.ids if o != k],
        )
        vector, asked = self.masked[k].vector.clone().numpy().view(np.uint32), self.masked[k].asked.numpy().tobytes()
        met = masks.exchange(mask, (self.keys[o].mask.numpy().tobytes() for o in others))
        pairs = {o: context.pair_mask(each, asked, k, o) for o, each in zip(others, met, strict=True)}
        away = [context.own_mask(own, k), *(key for o, key in pairs.items() if o > k)]
        masks.mask(vector, [key for o, key in pairs.items() if o < k], away)
        return vector


KIND: dict[int, Any] = message.KINDS


def unpacked(letter: Letter) -> Any:
    return message.unpack(letter.payload, KIND[letter.kind])


def letter(question: Question, client: int, run: bytes, round_: int = 1, serial: int = 0) -> Letter:
    return Letter(question.kind, Envelope(run, round_, client, serial), message.pack(question))


__all__ = [
    "LAST",
    "Clients",
    "Driven",
    "Give",
    "Only",
    "Summand",
    "Summed",
    "Transport",
    "expected",
    "given",
    "letter",
    "rounding",
    "unpacked",
]
