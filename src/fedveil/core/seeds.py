"""Randomness as a tree of seeds: run / round / client / purpose, and never a global generator.

A `Seed` is 16 bytes; a child's bytes are a hash of the parent's and the child's name. A draw therefore depends only
on its path, not on the engine, the order of clients or the size of a stack.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Seed:
    """A node of the tree. `Seed.root(7).child("round", 3, "client", 12, "shuffle")` names one stream."""

    key: bytes

    @staticmethod
    def root(number: int) -> Seed:
        """The public root of a run: everything below it can be regrown by anyone who knows the recipe."""
        return Seed(hashlib.blake2b(str(number).encode(), digest_size=16, person=b"fedveil-public").digest())

    @staticmethod
    def private() -> Seed:
        """A root from the operating system: noise, Poisson draws, keys. It never leaves the client."""
        return Seed(secrets.token_bytes(16))

    def child(self, *path: str | int) -> Seed:
        """The seed at `path` below this one; the type of each part counts, so `1` and `"1"` differ."""
        key = self.key
        for part in path:
            tag = b"i" if isinstance(part, int) else b"s"
            key = hashlib.blake2b(tag + str(part).encode(), digest_size=16, key=key).digest()
        return Seed(key)

    @property
    def word(self) -> int:
        """64 bits of the seed as an int64: the key of a counter-based generator (see `directions`)."""
        return int.from_bytes(self.key[:8], "little", signed=True)

    def numpy(self) -> np.random.Generator:
        """A NumPy generator (PCG64) that starts here."""
        return np.random.Generator(np.random.PCG64(int.from_bytes(self.key, "little")))

    def torch(self) -> torch.Generator:
        """A CPU torch generator that starts here. Draw on the CPU and move: the stream is then the same everywhere."""
        import torch  # here, because clients without PyTorch share this module

        return torch.Generator().manual_seed(int.from_bytes(self.key[:8], "little") >> 1)


def is_weak(client: int, share: float) -> bool:
    """Whether a client is among the `share` of all with few resources: drawn by its number, so that it is so in every
    round and run, and everyone knows."""
    return Seed.root(0).child("resources", client).numpy().random() < share
