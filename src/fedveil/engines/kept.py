"""What a client keeps from one question to the next, where each may be answered by another process.

Its memory and the notes of the round in progress are one record. In a simulation the record travels with the question
and comes back with the answer, so that the server's checkpoint holds it; a deployed client has it in a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from fedveil import message
from fedveil.clients import Clients
from fedveil.message import Envelope, Folded, Record, Refused
from fedveil.privacy.secagg import Secrets
from fedveil.runs import Remembered, digested, undigested, unfold, write

Plain = bool | int | float | str | None
Entries = list[tuple[int, int, Record]]


class Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One note: a plain value, bytes, a tensor, a record as a frame, or sealed secrets of a secure sum."""

    name: str
    plain: Plain = None
    data: bytes | None = None
    tensor: Tensor | None = None
    frame: bytes | None = None
    sealed: bytes | None = None

    def value(self) -> Any:
        return next(
            (v for v in (self.data, self.tensor, self.frame and unfold(self.frame)) if v is not None), self.plain
        )


@message.kind(46)
class Kept(Folded, frozen=True):
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
        sealed = {n: v.sealed(key, _about(clients, client)) for n, v in notes if isinstance(v, Secrets)}
        carried += [Note(name, sealed=data) for name, data in sealed.items()]
    memory = _folded(clients.memory.entries.get(client, []), run, client)
    return message.frame(Kept(clients.round, memory, carried), Envelope(run, clients.round, client))


def pack_memory(run: bytes, client: int, entries: Entries) -> bytes:
    """The same of a client whose memory alone is known, as after a resume."""
    return message.frame(Kept(0, _folded(entries, run, client), []), Envelope(run, 0, client))


def _about(clients: Clients, client: int) -> bytes:
    return message.prefix(Kept.kind, Envelope(clients.run, clients.round, client))


def _folded(entries: Entries, run: bytes, client: int) -> list[Remembered]:
    return [Remembered(client, r, s, message.frame(record, Envelope(run, r, client, s))) for r, s, record in entries]


def _note(name: str, value: Any, run: bytes) -> Note | None:
    if isinstance(value, Tensor):
        return Note(name, tensor=value)
    if isinstance(value, Record):
        return Note(name, frame=message.frame(value, Envelope(run)))
    if isinstance(value, bytes):
        return Note(name, data=value)
    return Note(name, value) if isinstance(value, Plain) else None


def entries(frame: bytes) -> Entries:
    """The memory in a frame. Raises `Refused`."""
    return [(e.round, e.serial, unfold(e.frame)) for e in _read(frame).memory]


def unpack(frame: bytes, clients: Clients, client: int, key: bytes | None = None) -> None:
    """Give `clients` back what one of them kept, without secrets that `key` does not open. Raises `Refused`."""
    kept, device = _read(frame), clients.task.device
    clients.memory.entries[client], clients.round = entries(frame), kept.round
    notes = {note.name: note.value() for note in kept.notes if note.sealed is None}
    for note in kept.notes:
        if key and note.sealed and (secret := Secrets.unsealed(note.sealed, key, _about(clients, client))):
            notes[note.name] = secret
    clients.notes[client] = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in notes.items()}


def _read(frame: bytes) -> Kept:
    kept, _ = message.unframe(frame, {Kept.kind: Kept}, len(frame))
    assert isinstance(kept, Kept)
    return kept


# ---------------------------------------------------------------------------------------------------- on disk


def save(path: Path, frame: bytes) -> None:
    """Write what a client keeps, and return when it is on the disk."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(path, digested(frame))


def load(path: Path) -> bytes:
    """What a client kept; nothing where it kept nothing yet. A damaged file is refused, not begun anew."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    try:
        return undigested(data)
    except Refused:
        raise Refused("lost state", "the client's memory file is damaged; only its owner can remove it") from None
