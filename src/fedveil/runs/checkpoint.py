"""A checkpoint: everything a run needs to go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedveil.core import message
from fedveil.core.files import undigested
from fedveil.core.ledger import Ledger, Row
from fedveil.core.memory import Entry
from fedveil.core.message import Container, Refused, unfold
from fedveil.core.method import State
from fedveil.runs.log import Index, Stored


class RunError(ValueError):
    """A folder that holds no run that could be used here: another method's, damaged, or in use."""


class Remembered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of one client's memory, as a frame of its own."""

    client: int
    round: int
    serial: int
    part: str
    frame: bytes


@message.kind
class Snapshot(Container, frozen=True):
    """Everything a run needs to go on, but for the server's state: the frame of that is behind this one."""

    run: bytes
    round: int
    memory: Index | None  # where the clients' memories are
    decided: dict[str, bytes]  # what decides the run, by name: see `fingerprint`


@message.kind
class Checkpoint(Container, frozen=True):
    """A checkpoint of fedveil 0.3 and before, which holds the clients' memories itself."""

    run: bytes
    round: int
    state: bytes
    memory: list[Remembered]
    decided: dict[str, bytes]


@dataclass(frozen=True)
class Saved:
    """A checkpoint, decoded."""

    run: bytes
    round: int
    state: Any
    memory: Mapping[int, list[Entry]]  # read from the disk when it is looked up
    decided: dict[str, bytes] = dataclasses.field(default_factory=dict)
    damaged: tuple[str, ...] = ()  # newer checkpoints that cannot be read, and why


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint in a folder that is whole; None before the first one. Whoever reads needs no lock."""
    problems = list[str]()
    for path in checkpoints_in(folder):
        try:
            return dataclasses.replace(read_checkpoint(path), damaged=tuple(problems))
        except (Refused, OSError) as error:
            problems.append(f"{path.name} ({error})")
    if problems:
        raise RunError(f"no checkpoint in {folder} can be read: {', '.join(problems)}")
    if len(rows := rows_of(folder)) > 1:  # one is what a kill before the first checkpoint leaves
        raise RunError(
            f"{folder} keeps the figures of {len(rows)} rounds and no checkpoint, so its weights are gone; "
            "run it again in another folder (--out)"
        )
    return None


def first_rows(folder: Path, rounds: int) -> list[Row]:
    """The first `rounds` rows of a folder's ledger, which a checkpoint of that round is beside."""
    rows = rows_of(folder)
    if len(rows) < rounds:
        raise RunError(
            f"{folder / 'ledger.jsonl'} has {len(rows)} rows but the checkpoint is of round {rounds}; "
            "the ledger was damaged"
        )
    return rows[:rounds]


def rows_of(folder: Path) -> list[Row]:
    path = folder / "ledger.jsonl"
    try:
        return Ledger.read(path).rows if path.exists() else []
    except ValueError as error:
        raise RunError(error) from None


def checkpoints_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.fv"), reverse=True)


def read_checkpoint(path: Path) -> Saved:
    """The contents of a checkpoint file. Raises `Refused` if it is damaged, or what it refers to in its folder."""
    body = undigested(path.read_bytes())
    memory: Mapping[int, list[Entry]]
    if message.envelope(body)[0] == Checkpoint.kind:
        old, _ = message.unframe(body, {Checkpoint.kind: Checkpoint}, len(body))
        assert isinstance(old, Checkpoint)
        run, round_, decided, state, memory = old.run, old.round, old.decided, unfold(old.state), _inside(old)
    else:
        end = message.PREFIX_BYTES + 4 + int.from_bytes(body[message.PREFIX_BYTES :][:4], "little")
        end += -end % 8
        new, _ = message.unframe(body[:end], {Snapshot.kind: Snapshot}, end)
        assert isinstance(new, Snapshot)
        run, round_, decided, state = new.run, new.round, new.decided, unfold(body[end:])
        memory = Stored.read(path.parent, new.memory, round_)
    if not isinstance(state, State):
        raise Refused("wrong kind", f"a {type(state).__name__} is no server's state")
    return Saved(run, round_, state, memory, decided)


def _inside(old: Checkpoint) -> dict[int, list[Entry]]:
    memory: dict[int, list[Entry]] = {}
    for entry in old.memory:
        memory.setdefault(entry.client, []).append((entry.round, entry.serial, entry.part, unfold(entry.frame)))
    return memory
