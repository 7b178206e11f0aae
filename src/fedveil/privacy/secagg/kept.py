"""What a client keeps between the stages of a secure sum."""

from __future__ import annotations

import secrets

import msgspec

from fedveil.core.stack import OWN_NOTE
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.records import NONCE

NOTE = OWN_NOTE  # the secrets of the round. The others are no secrets, and a client that restarts finds them again:
OVER = f"{OWN_NOTE}: unmasked"  # it must not unmask twice,
BASIS = f"{OWN_NOTE}: basis"  # nor mask the answers to two questions
PENDING = f"{OWN_NOTE}: memory"  # what it will remember once it has unmasked


class Secrets(msgspec.Struct, frozen=True):
    """What a client keeps between the stages, until the round closes. It is no record: whoever has to carry it from one
    process to another seals it with a key that no disk and no other machine ever sees."""

    stage: str
    channel: bytes = b""  # private keys, until what they open is known
    mask: bytes = b""
    own: bytes = b""  # b, which grows the client's own mask
    ids: list[int] = []  # U1
    quorum: int = 0
    session: bytes = b""  # digest of U1 and the keys seen
    holders: list[int] = []  # the neighbours and the client itself
    channel_keys: dict[int, bytes] = {}  # to open what a neighbour sealed
    pairs: dict[int, bytes] = {}  # secrets shared with neighbours, of which masks are derived
    held: dict[int, bytes] = {}  # shares of neighbours' secrets and of the client's own
    shared: list[int] = []  # who shared, and from the masked stage on U2
    asked: bytes = b""  # digest of what the masked vector was computed from
    alive: list[int] = []  # U3, once it was signed
    number: int = 0  # sums of the round before this one

    def context(self, run: bytes, round_: int) -> Context:
        return Context.of(run, round_, self.ids, self.quorum, self.number)

    def sealed(self, key: bytes, about: bytes) -> bytes:
        return masks.seal(key, secrets.token_bytes(NONCE), msgspec.msgpack.encode(self), about)

    @staticmethod
    def unsealed(data: bytes, key: bytes, about: bytes) -> Secrets | None:
        """None if it was sealed with another key: then it is lost, which is what a restart should do to it."""
        text = masks.unseal(key, data, about)
        return None if text is None else msgspec.msgpack.decode(text, type=Secrets)
