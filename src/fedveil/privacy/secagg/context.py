"""What the keys, marks and signatures of a secure sum are bound to."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.shamir import SHARE

PROTOCOL = b"fedveil secure sum 3"
SIGNATURE, DIGEST, MARK, NONCE, TAG = 64, 32, 16, 12, 16  # bytes


class Sized(Protocol):
    """The question of the masked stage: who dealt, and which vector is asked for."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def elements(self) -> int: ...

    @property
    def wide(self) -> bool: ...


def digest(*parts: bytes, size: int = 32) -> bytes:
    """A hash of parts that tells where each ends."""
    state = hashlib.blake2b(digest_size=size, person=b"fedveil-sum")
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


def listed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@dataclass(frozen=True)
class Context:
    """What keys and signatures are bound to: the protocol, the run, the round and the number of the sum within it, and
    once they are known who takes part and how many must stay."""

    run: bytes
    round: int
    ids: bytes = b""  # digest of U1, sorted, and of the quorum
    number: int = 0  # sums of the round before this one

    @staticmethod
    def of(run: bytes, round_: int, ids: Sequence[int], quorum: int, number: int = 0) -> Context:
        return Context(run, round_, digest(listed(ids), listed([quorum])), number)

    def info(self, purpose: str, *clients: int) -> bytes:
        where = self.run + self.round.to_bytes(4, "little") + bytes([self.number]) + self.ids
        return PROTOCOL + where + purpose.encode() + listed(clients)

    def asked(self, basis: bytes, question: Sized) -> bytes:
        """A digest of everything that the server supplied and a masked vector depends on: `basis`, which is the
        method's question, the weights held and the round's earlier questions (see `ClientStack.basis`), and the stage's
        own fields."""
        sizes = listed([question.wide, *divmod(question.elements, 1 << 32)])
        return digest(self.info("asked"), basis, sizes, listed(question.ids))

    def signed_keys(self, client: int, channel: bytes, mask: bytes) -> bytes:
        """What a client signs when it advertises; U1 is not known then."""
        return Context(self.run, self.round, number=self.number).info("keys", client) + channel + mask

    def signed_set(self, session: bytes, asked: bytes, alive: Sequence[int]) -> bytes:
        """What a client signs when it agrees on who is left, and on what all of them were asked."""
        return self.info("alive") + session + asked + listed(alive)

    def seal_key(self, shared_secret: bytes, sender: int, receiver: int) -> bytes:
        return masks.derive(shared_secret, self.info("seal", sender, receiver))

    def sealed_about(self, sender: int, receiver: int) -> bytes:
        return self.info("sealed", sender, receiver)

    def pair_mask(self, shared_secret: bytes, asked: bytes, a: int, b: int) -> bytes:
        """The key of the mask that a and b share, if both were asked the same: the one with the lower id adds it, the
        other subtracts it."""
        return masks.derive(shared_secret, self.info("pair mask", min(a, b), max(a, b)) + asked)

    def own_mask(self, secret: bytes, client: int) -> bytes:
        return masks.derive(secret, self.info("own mask", client))

    def marks(self, both: bytes, dealer: int, holder: int) -> bytes:
        """The marks of the two shares that a dealer gives a holder."""
        return self.mark(both[:SHARE], dealer, holder) + self.mark(both[SHARE:], dealer, holder)

    def mark(self, secret: bytes, *clients: int) -> bytes:
        """Tells a forged share (of a dealer, for a holder) or a wrong b (of a dealer), and gives neither away."""
        return digest(self.info("mark", *clients), secret, size=MARK)
