"""What the client keeps between questions, in files of its own: written beside the old ones, synced, then renamed."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.core.files import digested, undigested, write
from fedveil.core.refused import Refused

DAMAGED = "a file of the client's state is damaged; only its owner can remove it"


@dataclass
class Notes:
    """Where a client is in a run.

    over:    sums of the round that it has unmasked
    basis:   a digest of what it has masked the answer to in the round; empty: nothing
    private: round and serial of the newest private question that it has begun to answer
    """

    round: int = 0
    over: int = 0
    basis: str = ""
    private: tuple[int, int] = (0, -1)


class Store:
    """The folder of one client. A file that is damaged is refused, not begun anew."""

    def __init__(self, folder: Path, client: int) -> None:
        self._folder, self._client = folder, client
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / f"lock-{client}", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # as long as this process lives, or until `close`

    def close(self) -> None:
        os.close(self._lock)

    def notes(self, run: bytes) -> Notes:
        """What was kept of a run."""
        held = self._json(self._path("notes", run))
        try:
            return Notes(**{**held, "private": tuple(held["private"])}) if held else Notes()
        except (TypeError, KeyError):
            raise Refused("lost state", DAMAGED) from None

    def keep_notes(self, run: bytes, notes: Notes) -> None:
        self._save(self._path("notes", run), json.dumps(asdict(notes)).encode())

    def charge(self, most: int | None) -> None:
        """Count one more private answer, in all runs; it is on the disk when this returns. Raises `Refused` over the
        budget, which is `most` answers."""
        path = self._folder / f"account-{self._client}"
        before = self._json(path).get("answers", 0)
        if most is not None and before >= most:
            raise Refused("over budget", f"{before} private answers are given, which the budget allows")
        self._save(path, json.dumps({"answers": before + 1}).encode())

    def arrays(self, run: bytes, sizes: list[int]) -> tuple[int, list[NDArray[np.float32]]] | None:
        """A version and float32 arrays of so many numbers each; None where nothing was kept."""
        path = self._path("weights", run)
        if not path.exists():
            return None
        data = self._load(path)
        if len(data) != 8 + 4 * sum(sizes):
            raise Refused("lost state", DAMAGED)
        values = np.frombuffer(data, "<f4", offset=8).copy()
        return int.from_bytes(data[:8], "little"), np.split(values, np.cumsum(sizes)[:-1])

    def keep_arrays(self, run: bytes, version: int, arrays: list[NDArray[np.float32]]) -> None:
        data = b"".join([version.to_bytes(8, "little"), *(each.astype("<f4").tobytes() for each in arrays)])
        self._save(self._path("weights", run), data)

    def _path(self, what: str, run: bytes) -> Path:
        return self._folder / f"{what}-{run.hex()}-{self._client}"

    def _json(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(self._load(path))
        except ValueError:
            raise Refused("lost state", DAMAGED) from None
        return found

    def _load(self, path: Path) -> bytes:
        try:
            return undigested(path.read_bytes())
        except Refused:
            raise Refused("lost state", DAMAGED) from None

    def _save(self, path: Path, data: bytes) -> None:
        write(path, digested(data), private=True)
