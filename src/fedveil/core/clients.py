"""The clients' side: a stack answers one question together, and what each client remembers.

Every engine uses `Clients`: in simulation it holds all of them, in a deployment a stack of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import Envelope, Record, Refused
from fedveil.core.seeds import Seed
from fedveil.core.task import Rows, Task
from fedveil.privacy import account
from fedveil.privacy.account import Account
from fedveil.privacy.accountant import Steps
from fedveil.privacy.secagg.identity import Identities, simulated

if TYPE_CHECKING:
    from fedveil.core.federation import Method

# Reasons of refusals that depend on what was asked and when, and on no record. Others are not told where records are
# private: a refusal for what an answer would have held is an answer too.
ABOUT_QUESTIONS = {
    *("over budget", "lost state", "out of step", "too large", "malformed", "truncated", "trailing bytes", "damaged"),
    *("wrong kind", "wrong field", "wrong round", "wrong run", "wrong stage", "wrong version", "unknown client"),
    *("bad key", "bad set", "bad share", "bad signature"),
}
OWN_NOTE = "secure sum"  # the first words of every note that the secure sum keeps for itself
_log = logging.getLogger("fedveil")
TRAIL = "asked"  # the note of which questions left the others


@dataclass(frozen=True)
class Letter:
    """A question on its way to one client. Letters that share a payload are one broadcast."""

    kind: int
    envelope: Envelope
    payload: bytes

    @property
    def client(self) -> int:
        return self.envelope.client

    @property
    def frame(self) -> bytes:
        """The bytes that travel."""
        return message.prefix(self.kind, self.envelope) + self.payload

    @staticmethod
    def read(frame: bytes) -> Letter:
        """A letter from the bytes that travelled. Raises `Refused`."""
        return Letter(*message.envelope(frame), frame[message.PREFIX_BYTES :])

    def __len__(self) -> int:
        return message.PREFIX_BYTES + len(self.payload)


@dataclass(frozen=True)
class Reply:
    """What came back from (or of) a client: a frame, or the reason why there is none."""

    client: int
    frame: bytes = b""
    problem: str = ""
    passes: int = 0  # records run forward and backward for this reply's stack, known in simulation only
    figures: Mapping[str, float] = field(default_factory=dict)  # what the client measured, known in simulation only
    wire_up: int = 0  # bytes of the engine's own message around the frame
    wire_down: int = 0  # and of the one around the question


class Charge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Private answers of one run at one price."""

    run: bytes
    unit: str  # what ε protects, and for which neighbours
    price: list[str | int | float]
    answers: Annotated[int, Meta(ge=0, le=10**9)]


@message.kind(63)
class Spent(Record, frozen=True):
    """The private answers that a client has given, in all runs."""

    common = ()

    charges: list[Charge]


class Memory:
    """What clients remember between rounds. Keyed by round and question, so that a question asked again finds what its
    first asking found: the newest entry of an earlier round is kept beside those of the round in progress.

    What a client has spent is an entry of round 0, which is no round's: what is asked again is charged again.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[tuple[int, int, Record]]] = {}

    def before(self, client: int, round_: int, serial: int) -> Record | None:
        past = [record for r, s, record in self.entries.get(client, []) if r > 0 and (r, s) < (round_, serial)]
        return past[-1] if past else None

    def keep(self, client: int, round_: int, serial: int, record: Record) -> None:
        entries = [e for e in self.entries.get(client, []) if e[:2] < (round_, serial)]
        account = [e for e in entries if e[0] == 0]
        earlier = [e for e in entries if 0 < e[0] < round_][-1:]
        self.entries[client] = [*account, *earlier, *(e for e in entries if e[0] == round_), (round_, serial, record)]

    def account(self, client: int) -> Spent:
        """What a client has charged."""
        return next((e[2] for e in self.entries.get(client, []) if isinstance(e[2], Spent)), Spent([]))

    def open_account(self, client: int, account: Spent) -> None:
        """Put an account in the place of the client's own."""
        rest = [e for e in self.entries.get(client, []) if e[0] > 0]
        self.entries[client] = [(0, 0, account), *rest]

    def spent(self, client: int, unit: str | None = None) -> Counter[Steps]:
        """The answers that a client has charged, by price, in all runs; of one kind of promise or of all."""
        found: Counter[Steps] = Counter()
        for charge in self.account(client).charges:
            if unit in (None, charge.unit):
                found[account.read(charge.price)] += charge.answers
        return found

    def charge(self, client: int, run: bytes, price: Account) -> None:
        """Enter one more answer."""
        one = Charge(run, price.unit, account.written(price.answer), 1)
        charges = {(c.run, c.unit, tuple(c.price)): c for c in self.account(client).charges}
        key = (one.run, one.unit, tuple(one.price))
        if before := charges.get(key):
            one = replace(one, answers=before.answers + 1)
        self.open_account(client, Spent(list((charges | {key: one}).values())))


@dataclass
class ClientStack:
    """C clients that answer one question together. Everything per client is in the order of `clients`."""

    task: Task
    clients: tuple[int, ...]
    round: int
    seed: Seed  # the public seed of the round
    secret: Seed  # the private root of this question; never leaves the client
    memory: list[Any]  # what each client remembers, or None; replaced through `remember`
    notes: list[dict[str, Any]]  # what each client keeps until the round closes
    till: Callable[[Account, int], None] = lambda account, number: None  # enters the n-th charge of this question
    charged: int = 0  # private answers in this question
    passes: int = 0
    kept: list[Record | None] | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    run: bytes = bytes(8)
    identities: Identities = field(default_factory=lambda: Identities({}, {}))  # who signs, and whose keys are known
    debug: bool = False  # whoever asks wants to see exceptions

    def __len__(self) -> int:
        return len(self.clients)

    @cached_property
    def rows(self) -> Rows:
        """The clients' records; a question that needs no data loads none."""
        return self.task.rows(self.clients)

    def seeds(self, purpose: str) -> list[Seed]:
        """A public stream for each client."""
        return [self.seed.child("client", k, purpose) for k in self.clients]

    def secrets(self, purpose: str) -> list[Seed]:
        """A private stream for each client, fresh for every question."""
        return [self.secret.child(k, purpose) for k in self.clients]

    def remember(self, records: Sequence[Record | None]) -> None:
        """What each client will find in `memory` in a later round, if this answer goes through; None: what it has."""
        self.kept = list(records)

    def basis(self, kind: int, payload: bytes | memoryview) -> list[bytes]:
        """A digest, for each client, of everything that the server supplied and the answer to a question of this kind
        and payload can depend on: the question, what the client holds of the server's in its memory (the fields that
        its record states as `common`), and the questions that left the notes of this round."""
        question, held = self._supplied(kind, payload)
        return [_basis(question, own, _trail(note)) for own, note in zip(held, self.notes, strict=True)]

    def _supplied(self, kind: int, payload: bytes | memoryview) -> tuple[bytes, list[bytes]]:
        """Digests of a question, and of what each client's memory holds of the server's."""
        seen = dict[int, bytes]()  # by tensor: a stack shares them
        return hashed(bytes([kind]), payload), [_common(record, seen) for record in self.memory]

    @contextlib.contextmanager
    def followed(self, kind: int, payload: bytes | memoryview) -> Iterator[None]:
        """Keep the trail of the notes that a question leaves. One that left notes and is asked again, because the
        server was killed, takes a client back to where it was: notes that came later are forgotten."""
        if any(TRAIL in note for note in self.notes):
            question, held = self._supplied(kind, payload)
            for note, own in zip(self.notes, held, strict=True):
                _take_back(note, question, own)
        before = [dict(note) for note in self.notes]
        try:
            yield
        finally:
            left = [_left(note, was) for note, was in zip(self.notes, before, strict=True)]
            bases = self.basis(kind, payload) if any(left) else [b""] * len(self)
            for note, names, basis in zip(self.notes, left, bases, strict=True):
                if names:
                    note[TRAIL] = msgspec.msgpack.encode([*_trail(note), Link(basis, names)])

    def charge(self, account: Account) -> None:
        """Charge each client for a private answer. Call it before anything looks at records: the charge is kept, and a
        deployed client has it on its disk, when this returns. Raises `Refused` over budget."""
        self.charged += 1
        self.till(account, self.charged)

    def measure(self, **figures: Tensor) -> None:
        """Figures of each client [C] that a simulation reports as their mean in the ledger; they are not sent."""
        self.figures.update({name: values.tolist() for name, values in figures.items()})

    def recall(self, key: str) -> list[Any]:
        """What each client noted earlier in this round."""
        if any(key not in note for note in self.notes):
            raise Refused(
                "lost state", f"'{key}' of round {self.round} is gone; the client restarted or the round closed"
            )
        return [note[key] for note in self.notes]


class Link(msgspec.Struct, frozen=True, array_like=True):
    """A question that left notes: its basis, and their names."""

    digest: bytes
    names: list[str]


def hashed(*parts: bytes | memoryview) -> bytes:
    """32 bytes that tell these parts, and where each ends, from any others."""
    state = hashlib.blake2b(digest_size=32, person=b"fedveil-asked")
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def _basis(question: bytes, held: bytes, trail: Sequence[Link]) -> bytes:
    return hashed(question, held, *(link.digest for link in trail))


def _trail(note: Mapping[str, Any]) -> list[Link]:
    """The questions that left a client's notes, in order."""
    return msgspec.msgpack.decode(note[TRAIL], type=list[Link]) if TRAIL in note else []


def _left(note: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The names of the notes that are new or others than before, without those of the secure sum."""
    own = {name: value for name, value in note.items() if name != TRAIL and not name.startswith(OWN_NOTE)}
    return [name for name, value in own.items() if before.get(name, own) is not value]


def _take_back(note: dict[str, Any], question: bytes, held: bytes) -> None:
    trail = _trail(note)
    for at, link in enumerate(trail):
        if link.digest == _basis(question, held, trail[:at]):
            for name in {name for later in trail[at:] for name in later.names}:
                note.pop(name, None)
            note[TRAIL] = msgspec.msgpack.encode(trail[:at])
            return


def _common(record: Record | None, seen: dict[int, bytes]) -> bytes:
    """A digest of what a client's memory holds of the server's; nothing where it holds nothing."""
    parts = list[bytes]()
    for name in (record and record.common) or ():
        value = getattr(record, name)
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen[id(value)] = hashed(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            parts += [name.encode(), seen[id(value)]]
        elif value:
            parts += [name.encode(), msgspec.msgpack.encode(value)]
    return hashed(*parts) if parts else b""


class Unanswered(Exception):
    """There is no answer, for a reason that may depend on records and is therefore in the client's own log only."""

    def __init__(self) -> None:
        super().__init__("the client gives no answer; its own log says why")


def _about_question(error: Exception) -> bool:
    return isinstance(error, Refused) and error.reason in ABOUT_QUESTIONS


class Clients:
    """Clients in one place: reads letters, lets the method answer them, writes replies. Every engine uses it."""

    def __init__(
        self,
        method: Method,
        task: Task,
        run: bytes,
        seed: Seed,
        secret: Seed | None = None,
        identities: Identities | None = None,
    ) -> None:
        self.method, self.task, self.run, self.seed = method, task, run, seed
        self.secret = secret  # fixed in tests only; otherwise every question has a fresh one
        self.identities = identities or simulated(seed)
        self.memory = Memory()
        self.notes: dict[int, dict[str, Any]] = {}
        self.round = 0
        self.debug = False
        self.discreet = False  # whether a failure that may depend on records is told in one constant sentence
        self.persist: Callable[[], object] = lambda: None  # called when something was charged; where there is a disk
        self._charged: dict[tuple[int, int, int], int] = {}  # of the deliveries in progress
        self._opening = threading.Lock()  # stacks are answered beside each other, and one of them is the first

    def answer(self, letters: Sequence[Letter], again: bool = False) -> list[Reply]:
        """Answer letters that share one payload, as one stack. An exception concerns the stack, not one client.

        again: these letters were part of a stack that failed
        """
        first = letters[0]
        if not again:
            for letter in letters:
                self._charged.pop((letter.client, letter.envelope.round, letter.envelope.serial), None)
        table = {q.kind: q for q in self.method.handlers}
        for letter in letters:
            if letter.envelope.run != self.run:
                raise Refused("wrong run", "the question is of another run")
            if letter.client >= len(self.task.clients):
                raise Refused("unknown client", f"there is no client {letter.client} here")
        if first.kind not in table:
            raise Refused("wrong kind", f"{self.method.name} has no question of kind {first.kind}")
        question = message.unpack(first.payload, table[first.kind])
        message.check(question, {**self.task.sizes, **question.sizes()})
        self._open_round(first.envelope.round)
        round_, serial = first.envelope.round, first.envelope.serial
        ids = tuple(letter.client for letter in letters)
        stack = ClientStack(
            self.task,
            ids,
            round_,
            self.seed.child("round", round_),
            Seed.private() if self.secret is None else self.secret.child(round_, serial),
            [self.memory.before(k, round_, serial) for k in ids],
            [self.notes.setdefault(k, {}) for k in ids],
            till=lambda account, number: self._charge(ids, (round_, serial), account, number),
            run=self.run,
            identities=self.identities,
            debug=self.debug,
        )
        try:
            with stack.followed(first.kind, first.payload):
                answers = self.method.handlers[type(question)](stack, question)
            for letter, answer in zip(letters, answers, strict=True):
                message.check(answer, {**self.method.schema(self.task, question, letter.client), **question.sizes()})
        except Exception as error:
            if len(letters) > 1 or self.debug or not (self.discreet or stack.charged) or _about_question(error):
                raise
            _log.warning("client %s gives no answer in round %s", ids[0], round_, exc_info=error)
            raise Unanswered from None
        replies = []
        for i, (letter, answer) in enumerate(zip(letters, answers, strict=True)):
            figures = {name: values[i] for name, values in stack.figures.items()}
            frame = message.frame(answer, letter.envelope)
            replies.append(Reply(letter.client, frame, passes=stack.passes if i == 0 else 0, figures=figures))
        for client, record in zip(ids, stack.kept or (), strict=stack.kept is not None):
            if record is not None:
                self.memory.keep(client, round_, serial, record)
        return replies

    def _charge(self, ids: Sequence[int], question: tuple[int, int], account: Account, number: int) -> None:
        """Enter the n-th charge of a question for each client. A stack that failed is asked again in halves: that is
        the same delivery, and costs nothing more."""
        with self._opening:
            due = [k for k in ids if self._charged.get((k, *question), 0) < number]
            for k in due:
                account.allow(self.memory.spent(k, account.unit))
            for k in due:
                self.memory.charge(k, self.run, account)
                self._charged[k, *question] = number
        if due:
            self.persist()

    @staticmethod
    def problem(error: Exception) -> str:
        """What the ledger says of a client whose answer raised `error`."""
        sentence = " ".join(str(error).split())[:300]
        if isinstance(error, Unanswered):
            return f"failed: {sentence}"
        return f"refused: {sentence}" if isinstance(error, Refused) else f"failed: {type(error).__name__}: {sentence}"

    def _open_round(self, round_: int) -> None:
        with self._opening:
            if round_ < self.round:
                raise Refused("wrong round", f"round {round_} is over, round {self.round} has begun")
            if round_ > self.round:
                self.notes, self.round, self._charged = {}, round_, {}
