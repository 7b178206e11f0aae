"""The memories of the clients of a run in progress: this round's in memory, all others in files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping, ValuesView
from pathlib import Path
from typing import Any

from fedveil.core.memory import Entry
from fedveil.core.moving import mapped
from fedveil.gpu.host import HostCopies
from fedveil.runs.log import Index, Log, Stored


class Store(MutableMapping[int, list[Entry]]):
    """The memories of a run in progress: those of the clients of a round are in memory, all others on the disk.

    `hand_over` gives what changed since it was last called to `write`, which may run in another thread. Until that is
    done, what was handed over stays in memory. Any number of threads may look up and enter clients.

    saved: the memories of the checkpoint from which a run goes on
    """

    def __init__(self, folder: Path, saved: Mapping[int, list[Entry]] | None = None) -> None:
        stored = saved if isinstance(saved, Stored) else Stored(folder, {}, set())
        self._disk = Stored(folder, dict(stored.places), stored.needed)
        self._changed: dict[int, list[Entry]] = {} if saved is stored else dict(saved or {})
        self._handed: dict[int, list[Entry]] = {}
        self._read: dict[int, list[Entry]] = {}  # in this round
        self._copies = HostCopies()
        self._lock = threading.Lock()
        self._log: Log | None = None

    # ------------------------------------------------------------------------------------------------ a mapping

    def __getitem__(self, client: int) -> list[Entry]:
        entries = self.look_up(client)
        with self._lock:
            if client not in self._changed and client not in self._handed:
                self._read[client] = entries
        return entries

    def look_up(self, client: int) -> list[Entry]:
        """What a client remembers, without keeping what is read for it in memory."""
        with self._lock:
            found = [held[client] for held in (self._changed, self._handed, self._read) if client in held]
            places, copies = [] if found else self._disk.places.get(client, []), self._copies
        copies.wait()
        entries = found[0] if found else [self._disk.entry(client, place) for place in places]
        if not entries:
            raise KeyError(client)
        return entries

    def __setitem__(self, client: int, entries: list[Entry]) -> None:
        with self._lock:
            self._changed[client] = entries
            self._read.pop(client, None)

    def __delitem__(self, client: int) -> None:
        self[client] = []

    def __iter__(self) -> Iterator[int]:
        with self._lock:
            held: Mapping[int, list[Any]] = self._disk.places | self._handed | self._changed
        return (client for client, entries in held.items() if entries)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def values(self) -> ValuesView[list[Entry]]:
        """Every client's entries, of which those that are read from the disk are in memory one client at a time."""
        return _Values(self)

    # ------------------------------------------------------------------------------------------------ saving

    def hand_over(self, copies: HostCopies) -> dict[int, list[Entry]]:
        """Forget what was read in this round, and return what changed, in the host's memory after `copies.wait`."""
        with self._lock:
            self._handed = {
                client: [(*e[:3], mapped(e[3], copies.take)) for e in _visible(entries)]
                for client, entries in self._changed.items()
            }
            self._changed, self._read, self._copies = {}, {}, copies
            return self._handed

    def write(self, run: bytes, handed: Mapping[int, list[Entry]]) -> Index | None:
        """Write what was handed over, and return, when it is on the disk, what a checkpoint has to tell of it; None
        where no client has ever remembered anything."""
        if self._log is None:
            if not handed and not self._disk.places:
                return None
            self._log = Log(self._disk)
        changed, index = self._log.save(run, handed)
        with self._lock:
            self._disk.places |= changed
            self._handed = {}
        return index

    def tidy(self) -> None:
        """Delete the files that neither the newest checkpoint needs nor the one before."""
        if self._log:
            self._log.tidy()


class _Values(ValuesView[list[Entry]]):
    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._store = store

    def __iter__(self) -> Iterator[list[Entry]]:
        return (self._store.look_up(client) for client in self._store)


def _visible(entries: list[Entry]) -> list[Entry]:
    """Of entries of rounds that are over, those that a later round can find: the last one of each part."""
    return list({(entry[0] == 0, entry[2]): entry for entry in entries}.values())
