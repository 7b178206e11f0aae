"""Clients' memories in the files of a run folder: a round appends what changed in it.

`memory-*.fv` hold frames of single entries, one after the other. `index-*.fv` tell where each client's entries lie: a
block a round, with the clients that changed. A checkpoint has the length and the digest of the index; the index has the
digest of each entry. A file is only ever appended to, and deleted when neither of the last two checkpoints needs it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from fedveil.core import message
from fedveil.core.files import digest, hasher, naming_file, sync_names
from fedveil.core.memory import Entry
from fedveil.core.message import Envelope, Refused, unfold

FULL = 64 << 20  # bytes of a file of entries after which the next one is begun
WASTE = 64 << 20  # bytes of entries that nobody needs and that may always stay
BLOCKS = 64 << 10  # bytes of blocks that an index has at least before it is written anew
_LENGTH = 8  # bytes in front of a block


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Where an entry of a client's memory lies."""

    round: int
    serial: int
    part: str
    file: int
    start: int
    length: int
    digest: bytes


class Index(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of an index file that a checkpoint refers to."""

    file: int
    length: int
    digest: bytes


Places = dict[int, list[Place]]  # by client; an empty list takes a client away


class Stored(Mapping[int, list[Entry]]):
    """The memories that a checkpoint refers to. A client is read when it is looked up, and not kept."""

    def __init__(self, folder: Path, places: Places, needed: set[Path]) -> None:
        self.folder, self.places, self.needed = folder, places, needed

    @staticmethod
    def read(folder: Path, index: Index | None, round_: int) -> Stored:
        """The memories of a checkpoint of round `round_`. Raises `Refused` if the index is damaged, an entry of this
        round, or a file that is cut off; other entries are checked when they are looked up."""
        if index is None:
            return Stored(folder, {}, set())
        path = _index(folder, index.file)
        with open(path, "rb") as file:
            data = file.read(index.length)
        if len(data) != index.length or digest(data) != index.digest:
            raise Refused("damaged", f"the digest of {path.name} does not match")
        places, at = Places(), 0
        while at < len(data):
            end = at + _LENGTH + int.from_bytes(data[at : at + _LENGTH], "little")
            places |= msgspec.msgpack.decode(data[at + _LENGTH : end], type=Places)
            at = end
        found = Stored(folder, {client: kept for client, kept in places.items() if kept}, {path})
        ends = Counter[int]()
        for client, kept in found.places.items():
            for place in kept:
                ends[place.file] = max(ends[place.file], place.start + place.length)
                if place.round == round_:
                    found.entry(client, place)
        for number, end in ends.items():
            found.needed.add(path := _data(folder, number))
            if path.stat().st_size < end:
                raise Refused("damaged", f"{path.name} is cut off")
        return found

    def entry(self, client: int, place: Place) -> Entry:
        """Read one entry. Raises `Refused`."""
        data = self.raw(place)
        if digest(data) != place.digest:
            name = _data(self.folder, place.file).name
            raise Refused("damaged", f"{name} is damaged where it holds '{place.part}' of client {client}")
        return place.round, place.serial, place.part, unfold(data)

    def raw(self, place: Place) -> bytes:
        """The frame of an entry, unchecked."""
        with open(_data(self.folder, place.file), "rb") as file:
            file.seek(place.start)
            return file.read(place.length)

    def __getitem__(self, client: int) -> list[Entry]:
        return [self.entry(client, place) for place in self.places[client]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class Log:
    """The files that this process appends to. Those of earlier processes are only read."""

    def __init__(self, disk: Stored) -> None:
        self.disk, self.folder = disk, disk.folder
        self.needed = [set[Path](), disk.needed]  # files, of the checkpoint before the newest one and of the newest
        self.last = max((int(path.stem.rpartition("-")[2]) for path in _files(self.folder)), default=0)
        self.live = Counter[int]()  # by file of entries, bytes that are needed
        for places in disk.places.values():
            self._count(places, 1)
        self.sizes = {number: _data(self.folder, number).stat().st_size for number in self.live}
        self.open = 0  # the file of entries that is appended to
        self.index, self.length, self.whole = 0, 0, 0  # the index, its bytes, and those of its first block
        self.hasher = hasher()

    def save(self, run: bytes, handed: Mapping[int, list[Entry]]) -> tuple[Places, Index]:
        """Write entries, and return where those of every client are that has changed or was moved."""
        before, changed = self.last, Places()
        with self._appending() as add:
            for client, entries in handed.items():
                held = self.disk.places.get(client, [])
                changed[client] = [self._placed(add, held, run, client, entry) for entry in entries]
                self._count(held, -1)
                self._count(changed[client], 1)
            self._compact(add, changed)
        self.sizes = {number: size for number, size in self.sizes.items() if number == self.open or self.live[number]}
        block, begun = changed, self.length - self.whole >= max(BLOCKS, self.whole)
        if not self.index or begun:
            block = {client: places for client, places in (self.disk.places | changed).items() if places}
            self.index, self.length, self.hasher = self._new(), 0, hasher()
        data = msgspec.msgpack.encode(block)
        data = len(data).to_bytes(_LENGTH, "little") + data
        path = _index(self.folder, self.index)
        with naming_file(path):
            with open(path, "ab") as file:
                file.write(data)
                _sync(file)
            if self.last > before:
                sync_names(self.folder)
        self.hasher.update(data)
        self.whole = self.whole if self.length else len(data)
        self.length += len(data)
        self.needed = [self.needed[-1], {path, *(_data(self.folder, number) for number in self.sizes)}]
        return changed, Index(self.index, self.length, self.hasher.digest())

    def tidy(self) -> None:
        for path in set(_files(self.folder)).difference(*self.needed):
            path.unlink()

    def _placed(self, add: _Add, held: list[Place], run: bytes, client: int, entry: Entry) -> Place:
        """Write an entry, unless the client's entries on the disk have it."""
        round_, serial, part, record = entry
        parts = message.buffers(record, Envelope(run, round_, client, serial))
        seen = digest(*parts)
        for place in held:
            if (place.round, place.serial, place.part, place.digest) == (round_, serial, part, seen):
                return place
        return Place(round_, serial, part, *add(parts), seen)

    def _compact(self, add: _Add, changed: Places) -> None:
        """Move what is needed out of files of which most is not, as long as more than half of all bytes is not needed.
        Over the rounds this writes no more than the rounds themselves do."""
        while sum(self.sizes.values()) > 2 * self.live.total() + WASTE:
            full = [number for number in self.sizes if number != self.open]
            old = min(full, key=lambda number: self.live[number] / self.sizes[number], default=0)
            if not old or 2 * self.live[old] > self.sizes[old]:
                return
            for client, places in (self.disk.places | changed).items():
                if any(place.file == old for place in places):
                    self._count(places, -1)
                    changed[client] = [self._moved(add, place) if place.file == old else place for place in places]
                    self._count(changed[client], 1)
            del self.sizes[old]

    def _moved(self, add: _Add, place: Place) -> Place:
        number, start, length = add([self.disk.raw(place)])
        return msgspec.structs.replace(place, file=number, start=start, length=length)

    def _count(self, places: list[Place], sign: int) -> None:
        for place in places:
            self.live[place.file] += sign * place.length

    def _new(self) -> int:
        self.last += 1
        return self.last

    @contextlib.contextmanager
    def _appending(self) -> Iterator[_Add]:
        """Yield a function that appends the buffers of a frame, and returns file, start and length. Frames are on the
        disk when the context ends."""
        file: IO[bytes] | None = None

        def add(parts: list[Any]) -> tuple[int, int, int]:
            nonlocal file
            if self.sizes.get(self.open, FULL) >= FULL:
                end()
                self.open = self._new()
                self.sizes[self.open] = 0
            with naming_file(_data(self.folder, self.open)):
                file = file or open(_data(self.folder, self.open), "ab")  # noqa: SIM115 - closed below
                for part in parts:
                    file.write(part)
            start, length = self.sizes[self.open], sum(memoryview(part).nbytes for part in parts)
            self.sizes[self.open] += length
            return self.open, start, length

        def end() -> None:
            nonlocal file
            if file:
                with naming_file(Path(file.name)):
                    _sync(file)
                    file.close()
                file = None

        try:
            yield add
            end()
        finally:
            if file:
                with contextlib.suppress(OSError):  # it was reported when it was tried
                    file.close()


_Add = Callable[[list[Any]], tuple[int, int, int]]


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _files(folder: Path) -> list[Path]:
    return [*folder.glob("memory-*.fv"), *folder.glob("index-*.fv")]


def _data(folder: Path, number: int) -> Path:
    return folder / f"memory-{number:08d}.fv"


def _index(folder: Path, number: int) -> Path:
    return folder / f"index-{number:08d}.fv"
