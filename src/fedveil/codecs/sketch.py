"""Sketches: an update as its products with K random directions, which the public seed of the round determines.

A sketch is a linear map S, the same for all clients of a round. The sum of sketches is the sketch of the sum, so a
server, or a secure sum, adds messages up and decodes once. E[SᵀS] = I, so a sketch is about as long as its update:
clipping a sketch to norm C bounds it as a clip of the update does, and noise covers K numbers instead of d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.core import message, regrown, schema
from fedveil.core.directions import Directions, words
from fedveil.core.message import Answer, Count, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task

AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 28}  # numbers that are transformed, or regrown, at once
GROUPS = 16  # of weights that are mixed by themselves, at least: fewer than a sixteenth of all are left over
MASK = 2**63 - 1  # of a word without its sign


@message.kind
class Sketched(Answer, frozen=True):
    """Products of an update with the directions of a key, which is that of the round."""

    additive: ClassVar[bool] = True

    numbers: Annotated[Tensor, Shape(("numbers",))]
    key: Annotated[bytes, Meta(min_length=8, max_length=8)]
    records: Count = 1


@dataclass(frozen=True)
class Sketch(Codec[Sketched]):
    """K products of the update with random directions, drawn anew every round. Messages add up; use `feedback`.

    Decoding is the linear map from a sketch with the least mean squared error. For "hadamard" and "count" it projects
    the update onto K orthonormal directions. The mean decoded update is therefore about K/d of the mean update; without
    `feedback`, a server learning rate of up to d/K makes up for that.

    numbers: K
    law:     "hadamard": K of d rows of a randomised Hadamard transform, in O(d log d) (Ailon and Chazelle 2006)
             "count": a count sketch of one row, whose weights share K buckets in turn, in O(d) (Charikar et al. 2002)
             "gaussian": the directions of BAFFLE, in O(K d)
    """

    name: ClassVar[str] = "sketch"
    payload: ClassVar[type[Answer]] = Sketched
    at_weights: ClassVar[bool] = False
    linear: ClassVar[bool] = True

    numbers: int = 1000
    law: str = "hadamard"

    def __post_init__(self) -> None:
        if self.numbers < 1:
            raise ValueError(f"sketch.numbers is {self.numbers}; it is at least 1")
        if self.law not in LAWS:
            raise ValueError(f"sketch.law is '{self.law}'; use {', '.join(list(LAWS)[:-1])} or {list(LAWS)[-1]}")

    def validate(self, task: Task) -> None:
        if self.numbers > task.layout.size:
            raise ValueError(
                f"sketch.numbers is {self.numbers:,}, but the model has {task.layout.size:,} weights; use fewer "
                "numbers, or the codec raw"
            )

    def sizes(self, task: Task) -> Mapping[str, Size]:
        return {**task.sizes, "numbers": self.numbers}

    def shared(self, seed: Seed) -> Mapping[str, Any]:
        return {"key": seed.child("sketch").key[:8]}

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Sketched]:
        """With the seed of the round; on the server, whose `seeds` are those of a message, with the first of them."""
        common = self.shared(stack.seed if stack else seeds[0])
        numbers = self._map(common["key"], updates.shape[1]).sketch(updates)
        return [Sketched(row, **common) for row in numbers]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Sketched]) -> Tensor:
        """Payloads of one key are decoded together."""
        if len({payload.key for payload in payloads}) > 1:
            return torch.cat([self.decode(task, w, [payload]) for payload in payloads])
        numbers = schema.stack(payloads, "numbers").to(w.device)
        return self._map(payloads[0].key, w.shape[1]).restore(numbers)

    def _map(self, key: bytes, size: int) -> Map:
        return LAWS[self.law](int.from_bytes(key, "little", signed=True), size, self.numbers)


# ---------------------------------------------------------------------------------------------------- the maps


@dataclass(frozen=True)
class Map:
    """A random map S of d numbers to K, regrown from a key, with E[SᵀS] = I.

    sketch:  vectors [C, d] -> S u, [C, K]
    restore: sketches [C, K] -> vectors [C, d]: the linear map of S u that is nearest to u in the mean square
    """

    key: int
    size: int  # d
    count: int  # K

    def sketch(self, vectors: Tensor) -> Tensor:
        raise NotImplementedError

    def restore(self, numbers: Tensor) -> Tensor:
        raise NotImplementedError

    def signs(self, device: torch.device) -> Tensor:
        """A random sign for each weight, [d]."""
        return regrown.rows(Directions("rademacher", self.size), torch.tensor([self.key], device=device), 0, 1)[0, 0]


@dataclass(frozen=True)
class Hadamard(Map):
    """√(d/K) times K rows of H diag(s), drawn without replacement, with random signs s and an orthonormal H (`mix`)."""

    def sketch(self, vectors: Tensor) -> Tensor:
        signs, places = self.signs(vectors.device), self._places(vectors.device)
        numbers = _piecewise(lambda rows: mix(rows * signs)[:, places], vectors, self.size)
        return numbers * math.sqrt(self.size / self.count)

    def restore(self, numbers: Tensor) -> Tensor:
        signs, places = self.signs(numbers.device), self._places(numbers.device)

        def back(rows: Tensor) -> Tensor:
            return mix(rows.new_zeros(len(rows), self.size).index_copy_(1, places, rows)) * signs

        return _piecewise(back, numbers * math.sqrt(self.count / self.size), self.size)

    def _places(self, device: torch.device) -> Tensor:
        """K of d places, [K]: one of each K-th part of them, from a random place on, so that all are equally likely."""
        bounds = torch.arange(self.count + 1, device=device) * self.size // self.count
        drawn = words(torch.tensor([self.key], device=device), torch.arange(-2 - self.count, -1, device=device)) & MASK
        places: Tensor = (bounds[:-1] + drawn[:-1] % bounds.diff() + drawn[-1] % self.size) % self.size
        return places


@dataclass(frozen=True)
class CountSketch(Map):
    """√(d/K) times K orthonormal rows: number k is the sum of s_i u_i over the weights i = k mod K, over its root."""

    def sketch(self, vectors: Tensor) -> Tensor:
        signed = F.pad(vectors * self.signs(vectors.device), (0, -self.size % self.count))
        numbers: Tensor = signed.unflatten(1, (-1, self.count)).sum(1)
        return numbers * self._scales(vectors.device)

    def restore(self, numbers: Tensor) -> Tensor:
        scaled = numbers * self._scales(numbers.device) * (self.count / self.size)
        return scaled.repeat(1, -(-self.size // self.count))[:, : self.size] * self.signs(numbers.device)

    def _scales(self, device: torch.device) -> Tensor:
        """√(d/K) over the root of how many weights share each number, [K]."""
        many = (self.size - 1 - torch.arange(self.count, device=device)) // self.count + 1
        return (self.size / self.count / many.float()).sqrt()


@dataclass(frozen=True)
class Gaussian(Map):
    """1/√K times K Gaussian directions z_k. As E[(ZᵀZ)²] = K (d + K + 1) I, the nearest is ZᵀZ u / (d + K + 1)."""

    def sketch(self, vectors: Tensor) -> Tensor:
        every = regrown.pieces(self._law, self.key, self.count, self._at_once(vectors), vectors.device)
        return torch.cat([vectors @ z.T for z in every], 1) / math.sqrt(self.count)

    def restore(self, numbers: Tensor) -> Tensor:
        scale = math.sqrt(self.count) / (self.size + self.count + 1)
        return regrown.combine(self._law, self.key, numbers * scale, self._at_once(numbers))

    @property
    def _law(self) -> Directions:
        return Directions("gaussian", self.size)

    def _at_once(self, like: Tensor) -> int:
        return max(1, AT_ONCE[like.device.type] // self.size)


LAWS: dict[str, type[Map]] = {"hadamard": Hadamard, "count": CountSketch, "gaussian": Gaussian}


def mix(x: Tensor) -> Tensor:
    """Change x [C, d] in place by an orthonormal matrix [d, d] that is its own inverse.

    n groups of B weights, a power of two, are each multiplied by the Hadamard matrix of B over √B. Weight i is in group
    i mod n, so each group has weights of all layers. The fewer than B weights that are left are mixed in the same way.
    """
    at, size = 0, x.shape[1]
    while at < size:
        block = 1 << max(0, ((size - at) // GROUPS).bit_length() - 1)
        many = (size - at) // block
        transform(x[:, at : at + block * many].unflatten(1, (block, many))).mul_(1 / math.sqrt(block))
        at += block * many
    return x


def transform(x: Tensor) -> Tensor:
    """Multiply x [C, B, n] in place by Sylvester's Hadamard matrix [B, B], whose entries are ±1, in B log₂ B additions.

    A number is the same sum in the same order wherever it is computed, so a CPU and a GPU agree bit for bit.
    """
    half = 1
    while half < x.shape[1]:
        first, second = x.unflatten(1, (-1, 2, half)).unbind(2)
        difference = first - second
        first += second
        second.copy_(difference)
        half *= 2
    return x


def _piecewise(change: Callable[[Tensor], Tensor], rows: Tensor, width: int) -> Tensor:
    """Change so many rows at a time that `width` numbers for each are no more than may be held."""
    at_once = max(1, AT_ONCE[rows.device.type] // width)
    return torch.cat([change(part) for part in rows.split(at_once)]) if len(rows) > at_once else change(rows)
