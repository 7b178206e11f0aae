"""A stack: clients that answer one question together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from fedveil.core.account import Account
from fedveil.core.data import Rows
from fedveil.core.digests import hashed
from fedveil.core.identity import Identities
from fedveil.core.message import Record, Refused, Size, Slots
from fedveil.core.seeds import Seed
from fedveil.core.task import Task

OWN_NOTE = "secure sum"  # the first words of every note that the secure sum keeps for itself
TRAIL = "asked"  # the note of which questions left the others
AT_ONCE = 1 << 30  # bytes of weights that a stack of clients holds, and of updates that a server merges at once


def at_once(task: Task) -> int:
    """How many clients' weights are held at once."""
    return max(1, AT_ONCE // (4 * task.layout.size))


class Asked(Protocol):
    """A question with its bytes, which are made when somebody asks for them."""

    @property
    def kind(self) -> int: ...

    @property
    def payload(self) -> bytes: ...


@dataclass
class ClientStack:
    """C clients that answer one question together. Everything per client is in the order of `clients`."""

    task: Task
    clients: tuple[int, ...]
    round: int
    seed: Seed  # the public seed of the round
    secret: Seed  # the private root of this question; never leaves the client
    memory: list[Slots]  # what each client remembers; replaced through `remember`
    notes: list[dict[str, Any]]  # what each client keeps until the round closes
    till: Callable[[Account, int], None] = lambda account, number: None  # enters the n-th charge of this question
    charged: int = 0  # private answers in this question
    passes: int = 0
    kept: dict[str, list[Record | None]] = field(default_factory=dict)  # by slot, what each client will remember
    figures: dict[str, list[float]] = field(default_factory=dict)
    run: bytes = bytes(8)
    identities: Identities = field(default_factory=lambda: Identities({}, {}))  # who signs, and whose keys are known
    debug: bool = False  # whoever asks wants to see exceptions
    sizes: Mapping[str, Size] = field(default_factory=dict)  # what the dimension names in questions stand for
    norms: Tensor | None = None  # [C, e]: what batch norm layers hold beside the weights; training replaces it
    witnessed: bool = False  # whether `reveal` keeps anything: in a simulation whose messages are kept for an audit
    truth: dict[str, Tensor | Sequence[Tensor]] = field(default_factory=dict)

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

    def keys(self, purpose: str) -> Tensor:
        """A public key for each client, int64 [C], from which random numbers are regrown (see `directions`)."""
        return torch.tensor([seed.word for seed in self.seeds(purpose)], device=self.task.device)

    def slot(self, part: str) -> list[Any]:
        """What each client remembers of a part of the method; None: nothing yet."""
        return [memory.get(part) for memory in self.memory]

    def vectors(self, part: str, field: str, like: Tensor) -> Tensor:
        """Return a field of each client's slot, [C, d], on the device of `like` [d]; zeros where a client has none."""
        held = self.slot(part)
        return torch.stack([torch.zeros_like(like) if m is None else getattr(m, field).to(like) for m in held])

    def remember(self, part: str, records: Sequence[Record | None]) -> None:
        """What each client will find in this slot in a later round, if this answer goes through; None: what it has."""
        self.kept[part] = list(records)

    def kept_by(self, i: int) -> dict[str, Record]:
        """What the i-th client will remember, by slot."""
        return {part: record for part, records in self.kept.items() if (record := records[i]) is not None}

    def part(self, rows: Sequence[int]) -> ClientStack:
        """Some of the clients, by their places in the stack."""
        clients = tuple(self.clients[i] for i in rows)
        memory, notes = [self.memory[i] for i in rows], [self.notes[i] for i in rows]
        return replace(self, clients=clients, memory=memory, notes=notes, passes=0, truth={})

    def basis(self, kind: int, payload: bytes | memoryview) -> list[bytes]:
        """A digest, for each client, of everything that the server supplied and the answer to a question of this kind
        and payload can depend on: the question, what the client holds of the server's in its memory (the fields that
        its record states as `common`), and the questions that left the notes of this round."""
        question, held = self._supplied(kind, payload)
        return [_basis(question, own, _trail(note)) for own, note in zip(held, self.notes, strict=True)]

    def _supplied(self, kind: int, payload: bytes | memoryview) -> tuple[bytes, list[bytes]]:
        """Digests of a question, and of what each client's memory holds of the server's."""
        seen = dict[int, bytes]()  # by tensor: a stack shares them
        return hashed(kind.to_bytes(3, "little"), payload), [_common(memory, seen) for memory in self.memory]

    @contextlib.contextmanager
    def followed(self, question: Asked) -> Iterator[None]:
        """Keep the trail of the notes that a question leaves. One that left notes and is asked again, because the
        server was killed, takes a client back to where it was: notes that came later are forgotten."""
        if any(TRAIL in note for note in self.notes):
            asked, held = self._supplied(question.kind, question.payload)
            for note, own in zip(self.notes, held, strict=True):
                _take_back(note, asked, own)
        before = [dict(note) for note in self.notes]
        try:
            yield
        finally:
            left = [_left(note, was) for note, was in zip(self.notes, before, strict=True)]
            bases = self.basis(question.kind, question.payload) if any(left) else [b""] * len(self)
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

    def reveal(self, **truth: Tensor | Sequence[Tensor]) -> None:
        """Tell an audit what the answers are made from, by name: a tensor for each client. Nothing of it is sent."""
        if self.witnessed:
            self.truth.update(truth)

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


def _common(memory: Slots, seen: dict[int, bytes]) -> bytes:
    """A digest of what a client's memory holds of the server's; nothing where it holds nothing."""
    parts = list[bytes]()
    for part, record in sorted(memory.items()):
        for name in record.common or ():
            value = getattr(record, name)
            if isinstance(value, Tensor):
                if id(value) not in seen:
                    seen[id(value)] = hashed(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
                parts += [part.encode(), name.encode(), seen[id(value)]]
            elif value:
                parts += [part.encode(), name.encode(), msgspec.msgpack.encode(value)]
    return hashed(*parts) if parts else b""
