"""Weights that the client holds and moves itself: the server sends the K coefficients of its step.

The step is computed in the arithmetic of `Directions.combined` and `train/moments.py`, which is the server's bit for
bit. The digest that goes back tells whether that is so; a server that finds another one sends the whole state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.core.digests import hashed
from fedveil.core.directions import Directions
from fedveil.core.refused import Refused
from fedveil.methods.baffle.edge import frames
from fedveil.methods.baffle.edge.model import Floats
from fedveil.methods.baffle.edge.store import Store
from fedveil.train.moments import clipped, same_root, stepped
from fedveil.train.schedules import Scheduled

PIECE = 1 << 14  # words of directions that are drawn at a time
MOMENTS = {"plain": 0, "momentum": 1, "adam": 2}


@dataclass(frozen=True, kw_only=True)
class Server(Scheduled):
    """The server's optimizer, as `train/optimizers.py` has it."""

    key = "server"

    optimizer: str
    lr: float
    momentum: float
    beta2: float
    tau: float


class Replayed:
    """The weights and moments of a client, by run."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], places: NDArray[np.int64], directions: Directions, store: Store
    ) -> None:
        self._server, self._clip, self._most = Server(**settings["server"]), settings["clip"], settings["directions"]
        self._places, self._directions, self._store = places, directions, store
        self._initial = np.load(folder / "initial.npy", allow_pickle=False).astype(np.float32)
        self._parts = 1 + MOMENTS[self._server.optimizer]
        self._run, self._version, self._held, self._kept = b"", 0, list[Floats](), False

    def follow(self, run: bytes, question: dict[str, Any]) -> bytes:
        """Take the steps that it missed, which may be fewer than were sent, or the state; a digest of it all."""
        self._open(run)
        sizes = {"weights": len(self._initial)}
        steps = [self._read(frame, sizes) for frame in question["frames"]]
        sent = [question[name] for name in ("weights", "first", "second")]
        held, version = self._held, question["version"]
        if sent[0] is not None:
            if [part is not None for part in sent] != [i < self._parts for i in range(3)]:
                raise Refused("wrong field", "the state has not the moments that this run's server keeps")
            held = sent[: self._parts]
        known = max(len(steps) - (version - self._version), 0)
        for number, step in enumerate(steps[known:], version - len(steps) + known + 1):
            held = self._taken(held, step, number)
        if not self._kept or held is not self._held or version != self._version:
            self._store.keep_arrays(run, version, held)
            self._held, self._version, self._kept = held, version, True
        digest = hashlib.blake2b(digest_size=8)
        for part in held:
            digest.update(part.tobytes())
        return digest.digest()

    def held(self, run: bytes, version: int) -> Floats:
        """The weights of a version, [d]."""
        self._open(run)
        if version != self._version or not self._kept:
            raise Refused("lost state", f"the weights of version {version} are not held; catch up first")
        return self._held[0]

    def common(self, run: bytes) -> bytes:
        """A digest of what is held of the server's, as `ClientStack.basis` makes it."""
        self._open(run)
        if not self._kept:
            return b""
        parts = [b"down", b"version", frames.packed(self._version)] if self._version else []
        for name, part in zip(("weights", "first", "second"), self._held, strict=False):
            parts += [b"down", name.encode(), hashed(part.tobytes())]
        return hashed(*parts)

    def _open(self, run: bytes) -> None:
        if run == self._run and self._held:
            return
        found = self._store.arrays(run, [len(self._initial)] * self._parts)
        self._kept = found is not None
        self._version, self._held = found or (0, [self._initial, *self._zeros()])
        self._run = run

    def _zeros(self) -> list[Floats]:
        return [np.zeros_like(self._initial) for _ in range(self._parts - 1)]

    def _read(self, frame: bytes, sizes: dict[str, int]) -> dict[str, Any]:
        name, _, payload = frames.opened(frame)
        if name != "Step":
            raise Refused("wrong kind", f"a {name} where a step was expected")
        step = frames.read(payload, name, sizes)
        if len(step["coefficients"]) > self._most:
            raise Refused("too large", f"a step of {len(step['coefficients'])} coefficients; {self._most} are the most")
        return step

    def _taken(self, held: list[Floats], step: dict[str, Any], number: int) -> list[Floats]:
        """The state after a step of the server with this number, from 1."""
        gradient = np.zeros_like(self._initial)
        key, coefficients = np.array([step["key"]], np.int64), step["coefficients"].tolist()
        gradient[self._places] = self._directions.combined(np, key, coefficients, PIECE)
        lr = self._server.lr * self._server.factor(number)
        weights, first, second = (*held, None, None)[:3]
        with np.errstate(over="ignore", invalid="ignore"):
            downhill = -clipped(np, gradient, self._clip)
            after = stepped(self._server, same_root(np), lr, weights, first, second, downhill)
        return [part for part in after if part is not None]
