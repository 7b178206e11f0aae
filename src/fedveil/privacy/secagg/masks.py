"""Keys, streams and fixed point: what turns a vector of floats into one that only a sum gives meaning to.

An element is an integer of a ring (unsigned, 32 or 64 bits, wrapping); a mask is a ChaCha20 key stream read as such
integers, one a position. Everything happens in arrays, a block at a time, so that a block stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedveil.core.refused import Refused

KEY = 32  # bytes
BLOCK = 1 << 18  # bytes of key stream made at a time
_ZEROS = bytes(BLOCK)
TAIL = 8.0  # deviations of noise that a sum has room for; beyond is about one number in 10^15
ROUNDINGS = 20  # tries at a norm that one try in three keeps at worst
Vector = NDArray[Any]  # uint32 or uint64 [elements]


def exchange(private: bytes, publics: Iterable[bytes]) -> list[bytes]:
    """X25519 (RFC 7748): the secrets that a key pair shares with others. A public key of low order is refused."""
    own = X25519PrivateKey.from_private_bytes(private)
    try:
        return [own.exchange(X25519PublicKey.from_public_bytes(public)) for public in publics]
    except ValueError:
        raise Refused("bad key", "a public key is of low order or no key") from None


def public_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def derive(secret: bytes, info: bytes, salt: bytes | None = None, length: int = KEY) -> bytes:
    """HKDF with SHA-256 (RFC 5869): a key for the purpose that `info` names."""
    return HKDF(hashes.SHA256(), length, salt, info).derive(secret)


def key_stream(key: bytes, nonce: bytes = bytes(12), counter: int = 0) -> Any:
    """ChaCha20 (RFC 8439). A mask's key is used for one mask only, so its nonce may be zero."""
    return Cipher(algorithms.ChaCha20(key, counter.to_bytes(4, "little") + nonce), None).encryptor()


def seal(key: bytes, nonce: bytes, text: bytes, about: bytes) -> bytes:
    """ChaCha20-Poly1305 (RFC 8439): nonce, ciphertext and tag; `about` is authenticated and not sent."""
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """What was sealed, or None if it was not sealed with this key about this."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], about)
    except InvalidTag:
        return None


def mask(vector: Vector, added: Iterable[bytes], subtracted: Iterable[bytes] = ()) -> None:
    """Add and subtract the streams of these keys, in place."""
    streams = [(np.add, key_stream(key)) for key in added] + [(np.subtract, key_stream(key)) for key in subtracted]
    buffer = bytearray(BLOCK)
    stream = np.frombuffer(buffer, vector.dtype)
    for start in range(0, len(vector), len(stream)):
        block = vector[start : start + len(stream)]
        zeros = _ZEROS if block.nbytes == BLOCK else _ZEROS[: block.nbytes]
        for change, cipher in streams:
            cipher.update_into(zeros, buffer)
            change(block, stream[: len(block)], out=block)


@dataclass(frozen=True)
class FixedPoint:
    """Weighted floats as elements of a ring in which n clients' sum does not wrap.

    A value x of a client of weight w becomes w/heaviest · x/clip · half, with half = 2^(bits-1) - 1, rounded at random
    to one of its two whole neighbours, so that it is right on average and 0 stays 0. A negative element is its two's
    complement. Two elements follow the values: the weight itself, and how many values were beyond ±clip and were cut.

    n:        the most clients in a sum
    heaviest: the public maximum of a client's weight
    variance: of the noise that a client adds to each element after rounding; with noise, weights are 1
    """

    n: int
    clip: float
    bits: int
    heaviest: int
    variance: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", float(np.float32(self.clip)))  # what a float32 can be compared with exactly
        if not self._fits(64):
            raise ValueError(
                f"the sum of {self.n} clients with {self.bits} bits and weights up to {self.heaviest} needs more than "
                "64 bits; set fewer bits"
            )

    def _fits(self, bits: int) -> bool:
        return self.reach(self.n) < 1 << bits - 1 and self.n * self.heaviest < 1 << bits

    @property
    def half(self) -> int:
        """What a value of `clip` becomes at the largest weight."""
        return (1 << self.bits - 1) - 1

    @property
    def wide(self) -> bool:
        """Whether elements have 64 bits: when 32 do not hold the sum."""
        return not self._fits(32)

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        return np.uint64 if self.wide else np.uint32

    def reach(self, clients: int) -> int:
        """The largest magnitude that an element of so many honest clients' sum can have."""
        noise = TAIL * math.sqrt(clients * self.variance) + TAIL**2 if self.variance else 0
        return clients * self.half + math.ceil(noise)

    def zeros(self, size: int, weight: int) -> Vector:
        """The elements of `size` values that are all 0."""
        elements = np.zeros(size + 2, self.dtype)
        elements[-2] = weight
        return elements

    def encode(
        self, values: NDArray[np.float32], weight: int, draw: np.random.Generator, norm: float | None = None
    ) -> Vector:
        """Values [m] -> elements [m + 2], rounded by `draw`. Raises `Refused` for a value that is no number or a weight
        out of range.

        norm: what the norm of the rounded values may be at most, for differential privacy. They are rounded again until
              they are within it and towards zero if they never are; how many values were cut is not told then.
        """
        if not 1 <= weight <= self.heaviest:
            raise Refused("out of range", f"the weight is {weight}, the public maximum {self.heaviest}")
        scale = self.half * (weight / self.heaviest / self.clip)
        elements = self.zeros(len(values), weight)
        whole = elements[:-2].view(np.dtype(f"i{elements.itemsize}"))
        if norm is not None:
            scale *= min(1.0, self.half / max(float(np.linalg.norm(values.astype(np.float64))) * scale, 1e-300))
        clipped = self._round(values, scale, draw, whole)
        if norm is None:
            elements[-1] = min(clipped, ((1 << 8 * elements.itemsize) - 1) // self.n)
            return elements
        for _ in range(ROUNDINGS):
            if float(np.linalg.norm(whole.astype(np.float64))) <= norm:
                return elements
            self._round(values, scale, draw, whole)
        np.trunc(values.astype(np.float64) * scale, out=whole, casting="unsafe")
        return elements

    def _round(self, values: NDArray[np.float32], scale: float, draw: np.random.Generator, whole: NDArray[Any]) -> int:
        """Write scale × values, cut and rounded, to `whole`; how many were cut."""
        clipped, step = 0, BLOCK // 8
        for start in range(0, len(values), step):
            block = values[start : start + step]
            low, high = block.min(), block.max()  # NaN comes through
            if not (np.isfinite(low) and np.isfinite(high)):
                raise Refused("not finite", "the vector to be summed holds a value that is not a finite number")
            if low < -self.clip or high > self.clip:
                clipped += int(np.count_nonzero(np.abs(block) > self.clip))
                block = np.clip(block, -self.clip, self.clip)
            scaled = np.multiply(block, scale, dtype=np.float64)
            scaled += draw.bit_generator.random_raw(-(-len(block) // 4)).view(np.uint16)[: len(block)] * 2.0**-16
            np.floor(scaled, out=scaled)
            whole[start : start + len(block)] = scaled
        return clipped

    def check(self, total: Vector, clients: int) -> None:
        """Raise `Refused` for a sum of elements [m + 2] that so many honest clients cannot have."""
        values, weight, clipped = self._parts(total)
        furthest, reach = max(-int(values.min()), int(values.max())), self.reach(clients)
        if furthest > reach:
            raise Refused("out of range", f"an element of it is {furthest:,}, and {clients} clients reach {reach:,}")
        if not clients <= weight <= clients * self.heaviest:
            most = clients * self.heaviest
            told = f"its weight is {weight}, and that of {clients} clients is from {clients} to {most}"
            raise Refused("out of range", told)
        if clipped > clients * len(values):
            most = clients * len(values)
            raise Refused("out of range", f"{clipped} values were cut, and {clients} clients have {most}")

    def decode(self, total: Vector) -> tuple[NDArray[np.float64], int, int]:
        """A sum of elements [m + 2] -> Σ w/heaviest · x [m], Σ w, and how many values were cut."""
        values, weight, clipped = self._parts(total)
        return values.astype(np.float64) * (self.clip / self.half), weight, clipped

    def _parts(self, total: Vector) -> tuple[NDArray[np.signedinteger[Any]], int, int]:
        return total[:-2].view(np.dtype(f"i{total.itemsize}")), int(total[-2]), int(total[-1])

    def error(self, clients: int, weight: int) -> float:
        """How far an element of the weighted mean of so many clients can be from that of the values within ±clip."""
        return clients * self.clip / self.half * self.heaviest / weight
