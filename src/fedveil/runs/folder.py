"""A run is a folder: recipe, environment, ledger.jsonl, figures and the last two checkpoints. It survives a kill at any
moment.

A checkpoint is written beside its final name, fsynced and renamed; a digest at its end tells a damaged one, and then
the one before it is used. A lock on the folder keeps a second process out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.ledger import Ledger, Row
from fedveil.core.memory import Entry
from fedveil.core.message import Container, Envelope, Record, Refused, unfold
from fedveil.core.method import State
from fedveil.privacy import account
from fedveil.privacy.accountant import Steps

KEPT = 2
DEPLOYED = "deployment"  # the engine in environment.json of a run that only its app can go on with
_DIGEST = 16


class RunError(ValueError):
    """A folder that holds no run that could be used here: another method's, damaged, or in use."""


class Remembered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of one client's memory, as a frame of its own."""

    client: int
    round: int
    serial: int
    part: str
    frame: bytes


class _Asked(msgspec.Struct, frozen=True):
    """A line of asked.jsonl."""

    cohort: list[int]
    price: list[str | int | float]


@message.kind
class Checkpoint(Container, frozen=True):
    """Everything a run needs to go on: the server's state and the clients' memories."""

    run: bytes
    round: int
    state: bytes
    memory: list[Remembered]
    decided: dict[str, bytes]  # what decides the run, by name: see `fingerprint`


@dataclass(frozen=True)
class Saved:
    """A checkpoint, decoded."""

    run: bytes
    round: int
    state: Any
    memory: dict[int, list[Entry]]
    decided: dict[str, bytes] = dataclasses.field(default_factory=dict)
    damaged: tuple[str, ...] = ()  # newer checkpoints that cannot be read, and why


class RunFolder:
    """The folder of one run, locked to this process while open."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.decided: dict[str, bytes] = {}  # fingerprints of what decides the run, which a resumed one must share
        self._ledger: IO[bytes] | None = None
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
        with _saying(path), open(path, "ab") as file:
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

    def save(self, run: bytes, round_: int, state: Record, memory: dict[int, list[Entry]]) -> None:
        """Write the checkpoint of a round; the ledger's row of that round reaches the disk before it."""
        if self._ledger:
            with _saying(Path(self._ledger.name)):
                os.fsync(self._ledger.fileno())
        entries = [
            Remembered(client, r, s, part, message.frame(record, Envelope(run, r, client, s)))
            for client, kept in memory.items()
            for r, s, part, record in kept
        ]
        data = message.frame(
            Checkpoint(run, round_, message.frame(state, Envelope(run, round_)), entries, self.decided),
            Envelope(run, round_),
        )
        write(self._checkpoint(round_), digested(data))
        for old in self.checkpoints()[KEPT:]:
            old.unlink()

    def exhibit(self, name: str, round_: int, images: Tensor, real: Tensor) -> None:
        """Write a round's images [N, channels, height, width], and real ones beside them, for people to look at."""
        from fedveil.report.figures import strip

        folder = self.path / "figures" / name
        folder.mkdir(parents=True, exist_ok=True)
        for stem, row in ((f"{round_:05d}", images), ("real", real)):
            write(folder / f"{stem}.png", strip(row))

    def checkpoints(self) -> list[Path]:
        """Checkpoint files, newest first."""
        return _checkpoints(self.path)

    def load(self) -> Saved | None:
        """The newest checkpoint that is whole; None before the first one."""
        return newest(self.path)

    def _checkpoint(self, round_: int) -> Path:
        return self.path / f"checkpoint-{round_:08d}.fv"


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint in a folder that is whole; None before the first one. Whoever reads needs no lock."""
    problems = list[str]()
    for path in _checkpoints(folder):
        try:
            return dataclasses.replace(read_checkpoint(path.read_bytes()), damaged=tuple(problems))
        except (Refused, OSError) as error:
            problems.append(f"{path.name} ({error})")
    if problems:
        raise RunError(f"no checkpoint in {folder} can be read: {', '.join(problems)}")
    if len(rows := _rows(folder)) > 1:  # one is what a kill before the first checkpoint leaves
        raise RunError(
            f"{folder} keeps the figures of {len(rows)} rounds and no checkpoint, so its weights are gone; "
            "run it again in another folder (--out)"
        )
    return None


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


def first_rows(folder: Path, rounds: int) -> list[Row]:
    """The first `rounds` rows of a folder's ledger, which a checkpoint of that round is beside."""
    rows = _rows(folder)
    if len(rows) < rounds:
        raise RunError(
            f"{folder / 'ledger.jsonl'} has {len(rows)} rows but the checkpoint is of round {rounds}; "
            "the ledger was damaged"
        )
    return rows[:rounds]


def _rows(folder: Path) -> list[Row]:
    path = folder / "ledger.jsonl"
    try:
        return Ledger.read(path).rows if path.exists() else []
    except ValueError as error:
        raise RunError(error) from None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*.fv"), reverse=True)


def read_checkpoint(data: bytes) -> Saved:
    """The contents of a checkpoint file. Raises `Refused` if it is damaged."""
    body = undigested(data)
    checkpoint, _ = message.unframe(body, {Checkpoint.kind: Checkpoint}, len(body))
    assert isinstance(checkpoint, Checkpoint)
    memory: dict[int, list[Entry]] = {}
    for entry in checkpoint.memory:
        memory.setdefault(entry.client, []).append((entry.round, entry.serial, entry.part, unfold(entry.frame)))
    state = unfold(checkpoint.state)
    if not isinstance(state, State):
        raise Refused("wrong kind", f"a {type(state).__name__} is no server's state")
    return Saved(checkpoint.run, checkpoint.round, state, memory, checkpoint.decided)


def fingerprint(*parts: Any) -> bytes:
    """8 bytes that tell settings, arrays and tensors from any others: equal for equal values, in every process.

    A dataclass counts with its class and its fields, a tensor or an array with its values, anything else that is no
    plain value with its class alone.
    """

    def plain(thing: Any) -> Any:
        if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            own = {f.name: plain(getattr(thing, f.name)) for f in dataclasses.fields(thing) if f.compare}
            return [type(thing).__qualname__, own]
        if isinstance(thing, Tensor):
            thing = thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        if isinstance(thing, np.ndarray):
            return [str(thing.dtype), list(thing.shape), hashlib.blake2b(thing.tobytes()).hexdigest()]
        if isinstance(thing, Mapping):
            return {str(key): plain(value) for key, value in thing.items()}
        if isinstance(thing, (list, tuple)):
            return [plain(each) for each in thing]
        if isinstance(thing, float) and thing.is_integer():  # a recipe may say 1 where a file says 1.0
            return int(thing)
        if thing is None or isinstance(thing, (bool, int, float, str, bytes)):
            return thing
        return getattr(thing, "__qualname__", type(thing).__qualname__)

    text = msgspec.json.encode(plain(parts), order="sorted")
    return hashlib.blake2b(text, digest_size=8).digest()


def validate_same(path: Path, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> None:
    """Raise a `RunError` that names what decides the run in `path` and is not what it was when the run began."""
    if others := [name for name, value in now.items() if before.get(name, value) != value]:
        names = " and ".join([", ".join(others[:-1]), others[-1]] if others[1:] else others)
        raise RunError(f"{path} holds a run of another {names}; choose another folder, or change the {names} back")


def digested(data: bytes) -> bytes:
    """With a digest at its end, which tells whether a file is whole."""
    return data + hashlib.blake2b(data, digest_size=_DIGEST).digest()


def undigested(data: bytes) -> bytes:
    """What was `digested`. Raises `Refused` if it is damaged."""
    body, digest = data[:-_DIGEST], data[-_DIGEST:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise Refused("damaged", "the digest at its end does not match")
    return body


class _Ledger(Ledger):
    """A ledger whose file is part of a run folder."""

    def append(self, row: Row) -> None:
        assert self.file
        with _saying(Path(self.file.name)):
            super().append(row)


def write(path: Path, data: bytes, private: bool = False) -> None:
    """Replace a file in one step: whoever looks finds the old one or the new one, whole.

    private: nobody but its owner may read it
    """
    beside = path.with_name(path.name + ".new")
    with _saying(path):
        try:
            mode = 0o600 if private else 0o666
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)  # half a file would only take the room that is missing
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _saying(path: Path) -> Iterator[None]:
    """An error of the disk becomes a sentence with the file in it."""
    try:
        yield
    except OSError as error:
        told = f"could not write {path}: {error.strerror}; what was written before is kept"
        raise OSError(error.errno, told) from error


def environment(**more: Any) -> dict[str, Any]:
    """What a result depends on besides its recipe."""
    import fedveil

    return {
        "fedveil": fedveil.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **more,
    }
