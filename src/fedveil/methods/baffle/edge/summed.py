"""This client in a secure sum. The protocol is that of `privacy/secagg`, which it shares with clients with PyTorch.

Its secrets live in this process and never on a disk: a process that restarts within a round finds them lost. Its file
tells it what must not happen twice in a round: to mask the answers to two questions, and to unmask.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from numpy.typing import NDArray

from fedveil.core.digests import hashed
from fedveil.core.identity import Identities
from fedveil.core.refused import ABOUT_QUESTIONS, Refused
from fedveil.core.seeds import Seed
from fedveil.methods.baffle.edge import frames
from fedveil.methods.baffle.edge.frames import Where
from fedveil.methods.baffle.edge.model import Floats
from fedveil.methods.baffle.edge.store import Notes, Store
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.party import Keys, Party, Secrets
from fedveil.privacy.secagg.rules import Rules

_log = logging.getLogger("fedveil")


@dataclass(frozen=True)
class Inner:
    """The method's question at the masked stage, once it is read: how many numbers are asked for, and how to get them
    with the number of records behind them."""

    size: int
    answer: Callable[[], tuple[Floats, int]]


@dataclass(frozen=True)
class _Sized:
    ids: list[int]
    elements: int
    wide: bool


class Summed:
    """The client's side of the protocol.

    kind: of the method's question whose answers are summed
    read: a payload of that kind -> what is asked; it raises `Refused` for whatever does not fit
    held: a digest of what the client holds of the server's in a run
    """

    def __init__(
        self,
        settings: dict[str, Any],
        client: int,
        records: int,
        identities: Identities,
        store: Store,
        kind: str,
        read: Callable[[Where, Notes, bytes], Inner],
        held: Callable[[bytes], bytes],
    ) -> None:
        self._how, self._heaviest = Rules(**settings["secure"]), settings["heaviest"]
        self._seed = Seed(bytes.fromhex(settings["seed"]))
        self._client, self._records, self._identities, self._store = client, records, identities, store
        self._kind, self._read, self._held = kind, read, held
        self._secrets: Secrets | None = None
        self._at: tuple[bytes, int] = (b"", 0)

    def answer(self, name: str, where: Where, asked: dict[str, Any], notes: Notes) -> bytes:
        """The frame of the answer to a question of the protocol."""
        if self._at != (where.run, where.round):
            self._at, self._secrets = (where.run, where.round), None
        seed = self._seed.child("round", where.round)
        party = Party(self._how, where.run, where.round, seed, self._identities)
        stage: Callable[..., bytes] = getattr(self, f"_{name.lower()}")
        return stage(party, where, asked, notes)

    def _advertise(self, party: Party, where: Where, asked: dict[str, Any], notes: Notes) -> bytes:
        if notes.over or asked["number"]:
            raise Refused("wrong stage", f"client {self._client} takes part in one sum a round, and unmasks it once")
        self._secrets, keys = party.advertise(self._client, 0)
        fields = [_row(part[0]) for part in (keys.channel, keys.mask, keys.signatures)]
        return frames.write("Advertised", where, fields)

    def _share(self, party: Party, where: Where, asked: dict[str, Any], notes: Notes) -> bytes:
        kept = self._kept("keys")
        listed = party.listed(asked["ids"], asked["quorum"], asked["channel"].tobytes(), asked["mask"].tobytes())
        keys = Keys(*(_rows(asked[part]) for part in ("channel", "mask", "signatures")))
        self._secrets, sealed, marks, mark = party.share(self._client, kept, listed, keys)
        return frames.write("Shared", where, [_table(sealed), _table(marks), _row(mark)])

    def _deal(self, party: Party, where: Where, asked: dict[str, Any], notes: Notes) -> bytes:
        dealt = asked["ids"], _rows(asked["sealed"]), _rows(asked["marks"])
        self._secrets, complaints = party.deal(self._client, self._kept("shares"), *dealt)
        return frames.write("Dealt", where, [complaints])

    def _mask(self, party: Party, where: Where, asked: dict[str, Any], notes: Notes) -> bytes:
        """Mask the answer to one question. What goes wrong for reasons that depend on records is nobody's business:
        zeros are masked then."""
        if asked["asked"] != frames.kind(self._kind):
            raise Refused("wrong kind", f"answers to questions of kind {asked['asked']} are not summed")
        kept, payload = self._kept("dealt"), asked["question"].tobytes()
        party.check_dealt(self._client, kept, asked["ids"])
        inner = self._read(where, notes, payload)
        basis = hashed(hashed(asked["asked"].to_bytes(3, "little"), payload), self._held(where.run))
        if notes.basis not in ("", basis.hex()):
            told = f"client {self._client} has masked the answer to another question in round {where.round}"
            raise Refused("wrong stage", told)
        fixed = FixedPoint(len(kept.ids), self._how.clip, self._how.bits, self._heaviest)
        if (inner.size + 2, fixed.wide) != (asked["elements"], asked["wide"]):
            raise Refused("malformed", f"{asked['elements']} elements were asked for, there are {inner.size + 2}")
        notes.basis = basis.hex()
        self._store.keep_notes(where.run, notes)  # before anything is made of records
        vector = self._encoded(party, fixed, inner)
        sized = _Sized(asked["ids"], asked["elements"], asked["wide"])
        self._secrets = party.mask(self._client, kept, basis, sized, vector)
        signed = vector.view(f"<i{vector.itemsize}")
        return frames.write("Masked", where, [signed, _row(self._secrets.asked)])

    def _encoded(self, party: Party, fixed: FixedPoint, inner: Inner) -> NDArray[Any]:
        """The elements before they are masked."""
        try:
            values, records = inner.answer()
            draw = party.seed.child("client", self._client, "rounding").numpy()
            return fixed.encode(values, records, draw)
        except Exception as error:
            if isinstance(error, Refused) and error.reason in ABOUT_QUESTIONS:
                raise
            _log.warning("client %s masks zeros in round %s", self._client, party.round, exc_info=error)
        return fixed.zeros(inner.size, 1 if fixed.heaviest == 1 else min(self._records, fixed.heaviest))

    def _agree(self, party: Party, where: Where, asked: dict[str, Any], notes: Notes) -> bytes:
        self._secrets, signature = party.agree(self._client, self._kept("masked"), asked["alive"])
        return frames.write("Agreed", where, [_row(signature)])

    def _unmask(self, party: Party, where: Where, asked: dict[str, Any], notes: Notes) -> bytes:
        kept = self._kept("agreement" if self._how.server == "malicious" else "masked")
        said = asked["alive"], asked["gone"], asked["holders"], asked["signers"]
        signatures = None if asked["signatures"] is None else _rows(asked["signatures"])
        if len(signatures or ()) != len(asked["signers"]):
            raise Refused("bad set", "there is not one signature a signer")
        shares = party.unmask(self._client, kept, *said, signatures)
        notes.over += 1
        self._store.keep_notes(where.run, notes)  # before anything is revealed
        self._secrets = None
        return frames.write("Unmasked", where, [_table(shares)])

    def _kept(self, stage: str) -> Secrets:
        if self._secrets is None:
            raise Refused("lost state", "the secrets of this round are gone, or there were none yet")
        if self._secrets.stage != stage:
            raise Refused("wrong stage", f"the client is at '{self._secrets.stage}', the question follows '{stage}'")
        return self._secrets


def identities(known: Path, client: int, own: Path) -> Identities:
    """The public keys in a folder with a file identity-K.pub for each client K, and the client's own private key."""
    public = {}
    for path in known.glob("identity-*.pub"):
        key, number = load_ssh_public_key(path.read_bytes()), path.stem.removeprefix("identity-")
        if not isinstance(key, Ed25519PublicKey) or not number.isdecimal():
            raise ValueError(f"{path} is no Ed25519 key of a client with a number; use: ssh-keygen -t ed25519")
        public[int(number)] = key.public_bytes_raw()
    secret = load_ssh_private_key(own.read_bytes(), None)
    if not isinstance(secret, Ed25519PrivateKey):
        raise ValueError(f"{own} is no Ed25519 key; make one with: ssh-keygen -t ed25519")
    return Identities({client: secret.private_bytes_raw()}, public)


def _row(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _table(parts: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1)


def _rows(table: NDArray[np.uint8]) -> list[bytes]:
    return [row.tobytes() for row in table]
