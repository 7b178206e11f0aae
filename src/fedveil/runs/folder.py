"""A run is a folder: recipe, environment, ledger.jsonl, figures, the clients' memories and the last two checkpoints. It
survives a kill at any moment.

A checkpoint is written beside its final name, fsynced and renamed; a digest at its end tells a damaged one, and then
the one before it is used. A thread writes it while the next round is trained. A lock on the folder keeps a second
process out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import msgspec

from fedveil.core import message
from fedveil.core.files import digest, naming_file, write
from fedveil.core.ledger import RIGHT, Ledger, Right, Row
from fedveil.core.memory import Entry
from fedveil.core.message import Envelope, Refused
from fedveil.core.method import State
from fedveil.core.moving import mapped
from fedveil.gpu.host import HostCopies
from fedveil.privacy import account
from fedveil.privacy.accountant import Steps
from fedveil.runs.checkpoint import RunError, Saved, Snapshot, checkpoints_in, first_rows, newest, read_checkpoint
from fedveil.runs.log import Index
from fedveil.runs.store import Store

KEPT = 2
DEPLOYED = "deployment"  # the engine in environment.json of a run that only its app can go on with


class _Asked(msgspec.Struct, frozen=True):
    """A line of asked.jsonl."""

    cohort: list[int]
    price: list[str | int | float]


class RunFolder:
    """The folder of one run, locked to this process while open.

    decided: fingerprints of what decides the run, which a resumed one must share
    memory:  what clients remember, of which `save` writes what has changed
    saving:  seconds that writing the last checkpoint took
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.decided: dict[str, bytes] = {}
        self.memory = Store(self.path)
        self.saving = 0.0
        self._ledger: IO[bytes] | None = None
        self._writer = ThreadPoolExecutor(1, "fedveil-save")
        self._pending: Future[float] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise RunError(f"{self.path} is a file; give a folder for the run") from None
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115 - held as long as the folder is
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunError(
                f"{self.path} is being written by another process; wait for it or choose another folder"
            ) from None

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and give the folder back. An error of that checkpoint is lost;
        call `join` before."""
        with contextlib.suppress(Exception):
            self.join()
        self._writer.shutdown()
        if self._ledger:
            with contextlib.suppress(OSError):  # a row that could not be written was reported when it was tried
                self._ledger.close()
        self._lock.close()

    def hide(self) -> None:
        """Let nobody but its owner look into the folder: it holds what must stay with the server."""
        self.path.chmod(0o700)

    def describe(self, recipe: str, environment: dict[str, Any]) -> None:
        """Write what was asked for and where it runs; both are for people and for `resume`."""
        write(self.path / "recipe.toml", recipe.encode())
        write(self.path / "environment.json", msgspec.json.format(msgspec.json.encode(environment), indent=2) + b"\n")

    def ledger(self, rounds: int) -> Ledger:
        """The ledger, cut back to its first `rounds` rows, open for more."""
        path, rows = self.path / "ledger.jsonl", first_rows(self.path, rounds)
        write(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        file = open(path, "ab")  # noqa: SIM115 - closed by close()
        self._ledger = file
        return _Ledger(rows, file)

    def asking(self, cohort: Sequence[int], price: Steps) -> None:
        """Note who is about to be asked, and at which price, on the disk before it happens: a round that a kill cuts
        off was asked too."""
        path = self.path / "asked.jsonl"
        with naming_file(path), open(path, "ab") as file:
            file.write(msgspec.json.encode(_Asked(list(cohort), account.written(price))) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def asked(self, rounds: int) -> list[tuple[list[int], Steps]]:
        """Every cohort that was asked and its price, at least `rounds` of them."""
        path = self.path / "asked.jsonl"
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:  # a line that a kill cut off was not asked yet, and the next one must not end it
            write(path, whole)
        cohorts = _asked(whole)
        if len(cohorts) < rounds:
            raise RunError(f"{path} does not tell who was asked in {rounds} rounds; what they cost is not known")
        return cohorts

    def keep_right(self, right: Right) -> None:
        """Write which test records the final weights classify correctly."""
        write(self.path / RIGHT, msgspec.json.encode(right) + b"\n")

    def save(self, run: bytes, round_: int, state: State, best: State | None = None) -> None:
        """Begin to write the checkpoint of a round and what has changed in `memory`, and return; `join` waits for it.
        The ledger's row of that round reaches the disk before it.

        best: the state to be kept as the best so far, if this round has it
        """
        self.join()
        copies = HostCopies()
        here, handed = mapped(state, copies.take), self.memory.hand_over(copies)
        found = mapped(best, copies.take) if best else None
        self._pending = self._writer.submit(self._save, run, round_, here, handed, found, copies)

    def join(self) -> None:
        """Return when the checkpoint that `save` began is on the disk. Raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending:
            self.saving = pending.result()

    def _save(
        self,
        run: bytes,
        round_: int,
        state: State,
        handed: dict[int, list[Entry]],
        best: State | None,
        copies: HostCopies,
    ) -> float:
        began = time.perf_counter()
        if self._ledger:
            with naming_file(Path(self._ledger.name)):
                os.fsync(self._ledger.fileno())
        copies.wait()
        if best:
            self.keep_best(run, round_, best)
        self._write(self._checkpoint(round_), run, round_, state, self.memory.write(run, handed), self.decided)
        for old in self.checkpoints()[KEPT:]:
            old.unlink()
        self.memory.tidy()
        first = _round(self.checkpoints()[-1])  # from where a run may have to go on
        for old in [path for path in bests_in(self.path) if _round(path) <= first][1:]:
            old.unlink()
        return time.perf_counter() - began

    def keep_best(self, run: bytes, round_: int, state: State) -> None:
        """Write the best state so far, before the checkpoint of its round."""
        self._write(self.path / f"best-{round_:08d}.fv", run, round_, state, None, {})

    @staticmethod
    def _write(
        path: Path, run: bytes, round_: int, state: State, memory: Index | None, decided: dict[str, bytes]
    ) -> None:
        where = Envelope(run, round_)
        parts = message.buffers(Snapshot(run, round_, memory, decided), where) + message.buffers(state, where)
        write(path, *parts, digest(*parts))

    def best(self, round_: int) -> State | None:
        """The state that was the best in this round; None where the file is gone or damaged. Later ones, of rounds that
        are done again, are deleted."""
        for later in [path for path in bests_in(self.path) if _round(path) > round_]:
            later.unlink()
        try:
            state: State = read_checkpoint(self.path / f"best-{round_:08d}.fv").state
        except (Refused, OSError):
            return None
        return state

    def exhibit(self, name: str, pictures: Mapping[str, bytes]) -> None:
        """Write pictures of a round, PNGs by their file's stem, for people to look at."""
        folder = self.path / "figures" / name
        folder.mkdir(parents=True, exist_ok=True)
        for stem, picture in pictures.items():
            write(folder / f"{stem}.png", picture)

    def checkpoints(self) -> list[Path]:
        """Checkpoint files, newest first."""
        return checkpoints_in(self.path)

    def load(self) -> Saved | None:
        """The newest checkpoint that is whole; None before the first one."""
        return newest(self.path)

    def _checkpoint(self, round_: int) -> Path:
        return self.path / f"checkpoint-{round_:08d}.fv"


def bests_in(folder: Path) -> list[Path]:
    """Files of best weights, newest first."""
    return sorted(folder.glob("best-*.fv"), reverse=True)


def _round(path: Path) -> int:
    """The round in the name of a checkpoint's file."""
    return int(path.stem.rpartition("-")[2])


def tallied(folder: Path, delta: float) -> account.Tally | None:
    """What the rounds in a folder were charged, for a summary; None where it is not known."""
    path = folder / "asked.jsonl"
    if not 0 < delta < 1 or not path.is_file() or not (cohorts := _asked(path.read_bytes())):
        return None
    tally = account.Tally(account.Account(cohorts[0][1], account.Promise(delta=delta)))
    tally.recall(cohorts)
    return tally


def _asked(lines: bytes) -> list[tuple[list[int], Steps]]:
    """The cohorts and prices in the lines of an asked.jsonl; none if one of them is damaged."""
    try:
        asked = [msgspec.json.decode(line, type=_Asked) for line in lines.splitlines()]
        return [(line.cohort, account.read(line.price)) for line in asked]
    except ValueError:
        return []


class _Ledger(Ledger):
    """A ledger whose file is part of a run folder."""

    def append(self, row: Row) -> None:
        assert self.file
        with naming_file(Path(self.file.name)):
            super().append(row)
