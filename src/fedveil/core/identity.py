"""Who is who: Ed25519 keys with which clients sign what others must be able to trust without trusting the server."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedveil.core.refused import Refused
from fedveil.core.seeds import Seed


@dataclass(frozen=True)
class Identities:
    """The private keys of the clients that live here, and everybody's public keys (32 bytes each, by client).

    The public keys must not come from the server that is to be kept honest: whoever hands them out can speak for all.
    """

    own: Mapping[int, bytes]
    known: Mapping[int, bytes]

    def sign(self, client: int, data: bytes) -> bytes:
        """64 bytes that only this client can make."""
        if client not in self.own:
            raise Refused("bad signature", f"the private key of client {client} is not here")
        return Ed25519PrivateKey.from_private_bytes(self.own[client]).sign(data)

    def verify(self, client: int, signature: bytes, data: bytes) -> None:
        """Raises `Refused` unless the client signed the data."""
        if client not in self.known:
            raise Refused("bad signature", f"no public key of client {client} is known here")
        if not _valid(self.known[client], signature, data):
            raise Refused("bad signature", f"client {client} did not sign this")


@functools.lru_cache(4096)  # where many clients live in one process, each asks the same of the same signatures
def _valid(public: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def simulated(seed: Seed) -> Identities:
    """Keys of simulated clients, grown from the public seed so that every process of a simulation has the same ones.

    Their signatures are real and prove nothing, since anyone who knows the recipe can make them.
    """
    return Identities(_Grown(seed, public=False), _Grown(seed, public=True))


class _Grown(dict[int, bytes]):
    """Keys that come into being when they are asked for."""

    def __init__(self, seed: Seed, public: bool) -> None:
        super().__init__()
        self.seed, self.public = seed.child("identity"), public

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int)

    def __missing__(self, client: int) -> bytes:
        raw = b"".join(self.seed.child(client, part).key for part in ("low", "high"))
        if self.public:
            raw = Ed25519PrivateKey.from_private_bytes(raw).public_key().public_bytes_raw()
        self[client] = raw
        return raw
