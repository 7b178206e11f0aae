"""What a client keeps between the stages of a secure sum."""

from __future__ import annotations

import secrets

import msgspec

from fedveil.core.stack import OWN_NOTE
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.context import NONCE
from fedveil.privacy.secagg.party import Secrets

NOTE = OWN_NOTE  # the secrets of the round. The others are no secrets, and a client that restarts finds them again:
OVER = f"{OWN_NOTE}: unmasked"  # it must not unmask twice,
BASIS = f"{OWN_NOTE}: basis"  # nor mask the answers to two questions
PENDING = f"{OWN_NOTE}: memory"  # what it will remember once it has unmasked


def sealed(kept: Secrets, key: bytes, about: bytes) -> bytes:
    """The secrets, as bytes that only `key` opens."""
    return masks.seal(key, secrets.token_bytes(NONCE), msgspec.msgpack.encode(kept), about)


def unsealed(data: bytes, key: bytes, about: bytes) -> Secrets | None:
    """None if it was sealed with another key: then it is lost, which is what a restart should do to it."""
    text = masks.unseal(key, data, about)
    return None if text is None else msgspec.msgpack.decode(text, type=Secrets)
