"""The client: an exported model, one client's records, and the questions it answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from fedveil.core.refused import ABOUT_QUESTIONS, Refused
from fedveil.methods.baffle.edge import frames
from fedveil.methods.baffle.edge.frames import Where
from fedveil.methods.baffle.edge.model import Floats, Model
from fedveil.methods.baffle.edge.probing import Probing

if TYPE_CHECKING:
    from fedveil.core.identity import Identities
    from fedveil.methods.baffle.edge.store import Notes
    from fedveil.methods.baffle.edge.summed import Inner

_log = logging.getLogger("fedveil")
STAGES = ("Advertise", "Share", "Deal", "Mask", "Agree", "Unmask")  # of a secure sum
NO_ANSWER = "the client gives no answer; its own log says why"  # for reasons that may depend on records


class Edge:
    """One client: an exported model, its records x [n, *input] and labels y [n, …], and its number.

    state:      the folder of what it keeps; needed for replay, the secure sum and privacy
    identities: its own signing key and the others' public keys; needed for the secure sum
    """

    def __init__(
        self,
        folder: Path,
        x: NDArray[Any],
        y: NDArray[Any],
        client: int,
        state: Path | None = None,
        identities: Identities | None = None,
    ) -> None:
        settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        self.settings, self.client, self._size = settings, client, settings["layers"][-1][3]
        x, y = _checked(settings, x, y)
        self._model = Model(folder, settings)
        self.probing = Probing(self._model, settings, client, x, y)
        self._asks = "ProbeHere" if settings["down"] == "replay" else "Probe"
        parts = [name for name in ("secure", "privacy") if settings[name]] + ["replay"] * (self._asks == "ProbeHere")
        self._store = self._replayed = self._summed = self._private = None
        if parts and state is None:
            raise ValueError(f"this client keeps state ({', '.join(parts)}); give it a folder of its own with --state")
        if state is not None:
            from fedveil.methods.baffle.edge.store import Store

            self._store = Store(state, client)
        if self._store and self._asks == "ProbeHere":
            from fedveil.methods.baffle.edge.replayed import Replayed

            where = self._model.places, self.probing.directions
            self._replayed = Replayed(folder, settings, *where, self._store)
        if settings["privacy"]:
            from fedveil.methods.baffle.edge.private import Private

            self._private = Private(self.probing, settings)
        if self._store and settings["secure"]:
            from fedveil.methods.baffle.edge.summed import Summed

            if identities is None:
                raise ValueError("this client takes part in secure sums; give it --identity and --known")
            held = self._replayed.common if self._replayed else lambda run: b""
            own = settings, client, len(x), identities, self._store
            self._summed = Summed(*own, self._asks, self._inner, held)

    @property
    def limit(self) -> int:
        """The most bytes that a question may have."""
        return (1 << 20) + 8 * 4 * int(self._size)

    def close(self) -> None:
        """Let another process have the client's state."""
        if self._store:
            self._store.close()

    def answer(self, question: bytes) -> bytes:
        """The frame of the answer. Raises `Refused`; a question about private or summed records is refused in one
        constant sentence where the reason may depend on them."""
        try:
            return self._answer(question)
        except Refused as error:
            if error.reason in ABOUT_QUESTIONS or not (self._private or self._summed):
                raise
            _log.warning("client %s: %s", self.client, error)
        except Exception as error:
            _log.warning("client %s gives no answer", self.client, exc_info=error)
        raise Refused("failed", NO_ANSWER) from None

    def _answer(self, question: bytes) -> bytes:
        if len(question) > self.limit:
            raise Refused("too large", f"more than the {self.limit} bytes that were expected")
        name, where, payload = frames.opened(question)
        if where.client != self.client:
            raise Refused("unknown client", f"this is client {self.client}, not {where.client}")
        notes = self._opened_round(where)
        if name == self._asks and not self._summed:
            weights, key, count = self._read(where, name, payload)
            slopes, records = self._slopes(where, notes, weights, key, count)
            return frames.write("Slopes", where, [slopes, records])
        if name == "CatchUp" and self._replayed:
            asked = frames.read(payload, name, {"weights": self._size})
            return frames.write("WeightsDigest", where, [self._replayed.follow(where.run, asked)])
        if self._summed and notes is not None and name in STAGES:
            return self._summed.answer(name, where, frames.read(payload, name, {}), notes)
        raise Refused("wrong kind", f"this client does not answer a {name}")

    def _opened_round(self, where: Where) -> Notes | None:
        """The notes of the round; those of rounds before it are forgotten, and their questions refused."""
        if self._store is None:
            return None
        notes = self._store.notes(where.run)
        if where.round < notes.round:
            raise Refused("wrong round", f"round {where.round} is over, round {notes.round} has begun")
        if where.round > notes.round:
            notes.round, notes.over, notes.basis = where.round, 0, ""
            self._store.keep_notes(where.run, notes)
        return notes

    def _read(self, where: Where, name: str, payload: bytes | memoryview) -> tuple[Floats, int, int]:
        """The weights that a question is about [d], the key, and the number of directions."""
        asked = frames.read(payload, name, {"weights": self._size})
        self.probing.check(asked["directions"])
        weights = self._replayed.held(where.run, asked["version"]) if self._replayed else asked["weights"]
        return weights, asked["key"], asked["directions"]

    def _inner(self, where: Where, notes: Notes, payload: bytes) -> Inner:
        """The question of a secure sum's masked stage."""
        from fedveil.methods.baffle.edge.summed import Inner

        weights, key, asked = self._read(where, self._asks, payload)
        count = self.probing.count(asked)

        def answer() -> tuple[Floats, int]:
            slopes, records = self._slopes(where, notes, weights, key, count)
            return self.probing.summand(slopes, asked), records

        return Inner(asked, answer)

    def _slopes(self, where: Where, notes: Notes | None, weights: Floats, key: int, count: int) -> tuple[Floats, int]:
        """Slopes [count], and the number of records behind them, which is 1 where that is private."""
        if self._private is None or self._store is None or notes is None:
            return self.probing.slopes(weights, key, count), len(self.probing.x)
        if (where.round, where.serial) <= tuple(notes.private):
            raise Refused("wrong stage", f"a private question of round {where.round} is answered once, and it was")
        notes.private = where.round, where.serial
        self._store.keep_notes(where.run, notes)  # first: whatever comes next, this question was answered
        self._store.charge(self.settings["privacy"]["answers"])
        return self._private.slopes(weights, key, count), 1


def _checked(settings: dict[str, Any], x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Records and targets in the types of the model. Raises a ValueError where they do not fit it."""
    x, y = x.astype(settings["x"]), y.astype(settings["y"])
    wanted = settings["input"]
    if list(x.shape[1:]) != wanted or len(x) != len(y) or not len(x):
        raise ValueError(f"the records have shape {x.shape} and the labels {y.shape}; the model takes {wanted} each")
    if list(y.shape[1:]) != settings["target"]:
        raise ValueError(f"the labels have shape {y.shape}; the loss takes {settings['target']} a record")
    if len(x) > settings["largest"] and (settings["privacy"] or settings["secure"]):
        raise ValueError(f"there are {len(x)} records, but a client may hold {settings['largest']}")
    if settings["classes"] and (y.min() < 0 or y.max() >= settings["classes"]):
        raise ValueError(f"a label is not from 0 to {settings['classes'] - 1}")
    return x, y
