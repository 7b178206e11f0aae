"""Which node of a Flower grid is which client.

The SuperLink draws a node's id when the node's public key is registered, keeps the two together for good, and checks
the key with every request of the node. So a client number that is bound to a node id is bound to a key.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedveil.core.files import write


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The node that is a client, and the fingerprint of its key."""

    node: int
    key: str


class Roster(msgspec.Struct, forbid_unknown_fields=True):
    """Who is which client, as the operator's commands write it, and the fingerprints of keys that were revoked."""

    clients: dict[int, Seat] = {}
    revoked: list[str] = []

    @staticmethod
    def read(path: Path) -> Roster:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Roster)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not a roster: {error}; restore it from a backup") from None

    def write(self, path: Path) -> None:
        write(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class Claims:
    """Binds each client number to one node.

    roster: the operator's file; where it exists, it alone decides
    kept:   the file that otherwise keeps the first claim of each number for good; None: for this process only
    """

    def __init__(self, roster: Path | None = None, kept: Path | None = None) -> None:
        self.roster, self.kept = roster, kept
        self._ruled = False
        self._first: dict[int, int] = {}
        if kept and kept.exists():
            try:
                self._first = msgspec.json.decode(kept.read_bytes(), type=dict[int, int])
            except msgspec.DecodeError as error:
                raise ValueError(f"{kept} does not say which node is which client: {error}; restore it") from None

    def bound(self) -> dict[int, int]:
        """The node of each client, as of now: the roster may change while a run goes on."""
        if self.roster and (self._ruled or self.roster.exists()):
            self._ruled = True  # a roster that disappears is an error and not an open door
            return {client: seat.node for client, seat in Roster.read(self.roster).clients.items()}
        return dict(self._first)

    def open_to(self, node: int) -> bool:
        """Whether `node` may be a client at all. By a roster that does not have it, it is none."""
        return node in self.bound().values() or not self._ruled

    def refusal(self, client: int, node: int) -> str:
        """Why `node` is not `client`, or nothing if it is. Without a roster the first claim is written down."""
        bound = self.bound()
        numbers = [k for k, owner in bound.items() if owner == node]
        if numbers == [client]:
            return ""
        said = f"Flower node {node} says that it is client {client}"
        if numbers:
            return f"{said}, but its key is client {numbers[0]}'s; start it with partition-id={numbers[0]}"
        if self._ruled:
            whose = f"that is node {bound[client]}" if client in bound else "nobody is"
            return f"{said}, but by the roster {whose}; a key gets a number with 'fedveil deploy add' only"
        if client in bound:
            said = f"{said}, but node {bound[client]} said so first"
            return f"{said}; to give the number to another key, register clients with 'fedveil deploy add'"
        self._first[client] = node
        if self.kept:
            write(self.kept, msgspec.json.encode(self._first) + b"\n")
        return ""
