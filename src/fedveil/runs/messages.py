"""Messages of some rounds, kept in a run folder for an audit, and beside them what they were made from.

`messages/` holds what the server saw: a file for each kept round, with the server's state and the payloads of all
questions and answers. `truth/` holds what it did not see: which records each client used, and the vectors that it then
encoded. Only the scores of an audit read `truth/`. Nobody but the owner of the folder may read either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.clients import Letter, Reply
from fedveil.core.files import digest, undigested, write
from fedveil.core.message import KINDS, Answer, Question, Refused
from fedveil.core.method import Method, State

MESSAGES, TRUTH = "messages", "truth"
ALL = "all"
WARNING = (
    "this run keeps its messages and, in truth/, which records each client used and its exact update; whoever can read "
    "the folder can attack these records"
)
Truths = Mapping[int, Mapping[int, Mapping[str, Tensor]]]  # by round, client and name
_LENGTH = 8  # bytes that hold the length of a file's table


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A payload in a file: a question to some clients, an answer of one, or the server's state."""

    kind: int
    serial: int
    clients: list[int]
    size: int


@dataclass(frozen=True)
class Exchanged:
    """A question to a client, and its answer if one came."""

    serial: int  # of the question within the round
    client: int
    question: Question
    answer: Answer | None


@dataclass(frozen=True)
class KeptRound:
    """What the server saw in a round: its own state before and after, and the messages by serial and client."""

    round: int
    state: State
    after: State
    messages: tuple[Exchanged, ...]


class Rounds:
    """A choice of rounds, from "all", "3" or "1-3,10"."""

    def __init__(self, text: str) -> None:
        self.text = text.replace(" ", "")
        self._ranges: list[tuple[int, int]] = []
        for part in [] if self.text == ALL else self.text.split(","):
            found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
            if not 1 <= first <= last:
                raise ValueError(f"rounds to keep are '{text}'; give all, or rounds from 1 such as 1-3,10")
            self._ranges.append((first, last))

    def __contains__(self, number: int) -> bool:
        return self.text == ALL or any(first <= number <= last for first, last in self._ranges)


@dataclass
class MessageLog:
    """Notes the messages of chosen rounds and writes a file of each when it ends."""

    folder: Path
    rounds: Rounds
    _entries: list[_Entry] = field(default_factory=list)
    _payloads: list[bytes] = field(default_factory=list)
    _truth: dict[str, Tensor] = field(default_factory=dict)
    _on: bool = False

    def __post_init__(self) -> None:
        for name in (MESSAGES, TRUTH):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            (self.folder / name).chmod(0o700)

    def begin(self, number: int, state: State) -> None:
        """Start a round from the server's state."""
        self._entries, self._payloads, self._truth = [], [], {}
        self._on = number in self.rounds
        if self._on:
            self._add(_Entry(State.kind, 0, [], 0), message.pack(state))

    def overhear(self, letters: Sequence[Letter], replies: Iterable[Reply]) -> Iterable[Reply]:
        """Note questions and answers on their way."""
        return self._noted(letters, replies) if self._on else replies

    def _noted(self, letters: Sequence[Letter], replies: Iterable[Reply]) -> Iterator[Reply]:
        broadcasts: dict[int, list[Letter]] = {}
        for letter in letters:
            broadcasts.setdefault(id(letter.contents), []).append(letter)
        for group in broadcasts.values():
            first = group[0]
            clients = [letter.client for letter in group]
            self._add(_Entry(first.kind, first.envelope.serial, clients, 0), first.payload)
        for reply in replies:
            answer = reply.letter
            if answer is None and reply.frame:
                with suppress(Refused):  # what is no frame is no message
                    answer = Letter.read(reply.frame)
            if answer:
                self._add(_Entry(answer.kind, answer.envelope.serial, [reply.client], 0), answer.payload)
                named = {f"{reply.client}.{answer.envelope.serial}.{name}": each for name, each in reply.truth.items()}
                self._truth |= named
            yield reply

    def end(self, number: int, state: State) -> None:
        """Write the files of the round, at whose end the server has this state."""
        if not self._on:
            return
        self._add(_Entry(State.kind, 0, [], 0), message.pack(state))
        table = msgspec.msgpack.encode(self._entries)
        parts = [len(table).to_bytes(_LENGTH, "little"), table, *self._payloads]
        write(self.folder / MESSAGES / _file(number), *parts, digest(*parts), private=True)
        truth = safetensors.torch.save({name: each.contiguous() for name, each in self._truth.items()})
        write(self.folder / TRUTH / _file(number), truth, private=True)

    def _add(self, entry: _Entry, payload: bytes) -> None:
        self._entries.append(msgspec.structs.replace(entry, size=len(payload)))
        self._payloads.append(payload)


def _file(number: int) -> str:
    return f"round-{number:08d}.fv"


def kept_rounds(folder: Path) -> list[int]:
    """The rounds of which a folder keeps messages; a folder that keeps none is a ValueError."""
    files = sorted((folder / MESSAGES).glob("round-*.fv"))
    if not files:
        raise ValueError(
            f"{folder} keeps no messages to attack; run the recipe again with --keep-messages all, or with some rounds"
        )
    return [int(file.stem.rpartition("-")[2]) for file in files]


def read_round(folder: Path, number: int, method: Method) -> KeptRound:
    """Read the messages of a round; a damaged file is a ValueError. `method` states the questions that there are."""
    path = folder / MESSAGES / _file(number)
    table: Mapping[type[Question], Any] = method.handlers  # also makes the kinds of its records known
    try:
        whole = undigested(path.read_bytes())
        start = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
        entries = msgspec.msgpack.decode(whole[_LENGTH:start], type=list[_Entry])
        states: list[State] = []
        asked: dict[tuple[int, int], Question] = {}
        answered: dict[tuple[int, int], Answer] = {}
        for entry in entries:
            payload, start = whole[start : start + entry.size], start + entry.size
            record = message.opened(payload, entry.kind, KINDS, len(payload) + message.PREFIX_BYTES)
            places = [(entry.serial, client) for client in entry.clients]
            if isinstance(record, State):
                states.append(record)
            elif type(record) in table:
                asked |= dict.fromkeys(places, record)  # type: ignore[arg-type]
            elif isinstance(record, Answer):
                answered.setdefault(places[0], record)
    except (Refused, msgspec.DecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; keep the messages of this round again") from None
    if len(states) != 2:
        raise ValueError(f"{path} lacks a state of the server; keep the messages of this round again")
    places = sorted(asked)
    return KeptRound(
        number, states[0], states[1], tuple(Exchanged(*place, asked[place], answered.get(place)) for place in places)
    )


def read_truth(folder: Path, number: int) -> dict[int, dict[str, Tensor]]:
    """What the messages of a round were made from: by client, its `records` as indices and its vectors by name. Only
    the scores of attacks may depend on it."""
    path = folder / TRUTH / _file(number)
    try:
        found = safetensors.torch.load(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; keep the messages of this round again") from None
    truth: dict[int, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        client, _, what = name.split(".", 2)
        truth.setdefault(int(client), {})[what] = tensor
    return truth
