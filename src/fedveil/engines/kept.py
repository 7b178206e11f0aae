"""What a client keeps from one question to the next, where each may be answered by another process.

Its memory and the notes of the round in progress are one record. In a simulation the record travels with the question
and comes back with the answer, so that the server's checkpoint holds it; a deployed client has it in a file of its own.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from fedveil.core import message
from fedveil.core.clients import Clients
from fedveil.core.files import digested, undigested, write
from fedveil.core.memory import Entry, Spent
from fedveil.core.message import Container, Envelope, Record, Refused, Slots, unfold
from fedveil.privacy.secagg.kept import sealed, unsealed
from fedveil.privacy.secagg.party import Secrets
from fedveil.runs.checkpoint import Remembered

Plain = bool | int | float | str | None


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One note: a plain value, bytes, a tensor, a record as a frame, slots, or sealed secrets of a secure sum."""

    name: str
    plain: Plain = None
    data: bytes | None = None
    tensor: Tensor | None = None
    frame: bytes | None = None
    slots: Slots | None = None
    sealed: bytes | None = None

    def value(self) -> Any:
        values = (self.data, self.tensor, self.slots, self.frame and unfold(self.frame))
        return next((value for value in values if value is not None), self.plain)


@message.kind
class Kept(Container, frozen=True):
    """A client between two questions: the round it is in, what it remembers, and what it noted in this round."""

    round: int
    memory: list[Remembered]
    notes: list[Note]


def pack(clients: Clients, client: int, key: bytes | None = None) -> bytes:
    """What `client` keeps, as a frame. Secrets are sealed with `key`; they and a note of any other type than those of
    `Note` go nowhere without one: whoever recalls it in another process finds its state lost."""
    run, notes = clients.run, clients.notes.get(client, {}).items()
    carried = [note for name, value in notes if (note := _note(name, value, run))]
    if key:
        hidden = {n: sealed(v, key, _about(clients, client)) for n, v in notes if isinstance(v, Secrets)}
        carried += [Note(name, sealed=data) for name, data in hidden.items()]
    memory = _folded(clients.memory.entries.get(client, []), run, client)
    return message.frame(Kept(clients.round, memory, carried), Envelope(run, clients.round, client))


def pack_memory(run: bytes, client: int, entries: list[Entry]) -> bytes:
    """The same of a client whose memory alone is known, as after a resume."""
    return message.frame(Kept(0, _folded(entries, run, client), []), Envelope(run, 0, client))


def _about(clients: Clients, client: int) -> bytes:
    return message.prefix(Kept.kind, Envelope(clients.run, clients.round, client))


def _folded(entries: list[Entry], run: bytes, client: int) -> list[Remembered]:
    return [
        Remembered(client, r, s, part, message.frame(record, Envelope(run, r, client, s)))
        for r, s, part, record in entries
    ]


def _note(name: str, value: Any, run: bytes) -> Note | None:
    if isinstance(value, Tensor):
        return Note(name, tensor=value)
    if isinstance(value, Record):
        return Note(name, frame=message.frame(value, Envelope(run)))
    if isinstance(value, Slots):
        return Note(name, slots=value)
    if isinstance(value, bytes):
        return Note(name, data=value)
    return Note(name, value) if isinstance(value, Plain) else None


def entries(frame: bytes) -> list[Entry]:
    """The memory in a frame. Raises `Refused`."""
    return [(e.round, e.serial, e.part, unfold(e.frame)) for e in _read(frame).memory]


def unpack(frame: bytes, clients: Clients, client: int, key: bytes | None = None) -> None:
    """Give `clients` back what one of them kept, without secrets that `key` does not open. Raises `Refused`."""
    kept, device = _read(frame), clients.task.device
    clients.memory.entries[client], clients.round = entries(frame), max(clients.round, kept.round)
    notes = {note.name: note.value() for note in kept.notes if note.sealed is None}
    for note in kept.notes:
        if key and note.sealed and (secret := unsealed(note.sealed, key, _about(clients, client))):
            notes[note.name] = secret
    clients.notes[client] = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in notes.items()}


def _read(frame: bytes) -> Kept:
    kept, _ = message.unframe(frame, {Kept.kind: Kept}, len(frame))
    assert isinstance(kept, Kept)
    return kept


# ---------------------------------------------------------------------------------------------------- on its way


class Carried:
    """What the clients of a simulation keep, on the server's side: it travels with a question and comes back with the
    answer, so that any process may answer for any client."""

    def __init__(self, clients: Clients) -> None:
        self.clients, self._round = clients, 0
        self._frames: dict[int, bytes] = {}  # of this round, with notes; memory alone lasts longer

    def along(self, client: int, round_: int) -> bytes:
        """What to send with a question of a round."""
        if round_ != self._round:
            self._round, self._frames = round_, {}
        if client not in self._frames and (entries := self.clients.memory.entries.get(client)):
            return pack_memory(self.clients.run, client, entries)
        return self._frames.get(client, b"")

    def back(self, client: int, frame: bytes) -> None:
        """Take what came with an answer."""
        self._frames[client] = frame
        if frame and (found := entries(frame)):
            self.clients.memory.entries[client] = found


# ---------------------------------------------------------------------------------------------------- on disk


class Home:
    """The folder of a deployed client: a file for each run, and one account for all of them, so that a budget belongs
    to the client's records and not to a run. One question at a time: the folder is locked from loading to saving."""

    def __init__(self, folder: Path, client: int) -> None:
        self.folder, self.client, self._before = folder, client, b""

    def __enter__(self) -> Home:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.folder / f"lock-{self.client}", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def load(self, clients: Clients, key: bytes) -> None:
        """Give `clients` back what the client kept of this run, and its account. Raises `Refused` for damaged files."""
        self._before = load(self._path(clients))
        if self._before:
            unpack(self._before, clients, self.client, key)
        account = load(self._account)
        record = message.unframe(account, {Spent.kind: Spent}, len(account))[0] if account else Spent([])
        assert isinstance(record, Spent)
        clients.memory.open_account(self.client, record)

    def save(self, clients: Clients, key: bytes) -> None:
        """Write what the client keeps of this run, and return when it is on the disk."""
        after = pack(clients, self.client, key)
        if after != self._before:
            save(self._path(clients), after)

    def save_account(self, clients: Clients) -> None:
        """The same of its account."""
        account = clients.memory.account(self.client)
        save(self._account, message.frame(account, Envelope(client=self.client)))

    @property
    def _account(self) -> Path:
        return self.folder / f"account-{self.client}.fv"

    def _path(self, clients: Clients) -> Path:
        return self.folder / f"{clients.run.hex()}-{self.client}.fv"


def save(path: Path, frame: bytes) -> None:
    """Write a frame to a file that only its owner may read, and return when it is on the disk."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(path, digested(frame), private=True)


def load(path: Path) -> bytes:
    """What was saved; nothing where nothing was yet. A damaged file is refused, not begun anew."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    try:
        return undigested(data)
    except Refused:
        raise Refused("lost state", "the client's memory file is damaged; only its owner can remove it") from None
