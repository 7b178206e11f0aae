"""QSGD: stochastic rounding to a few levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.core import message, schema
from fedveil.core.message import Answer, Count, Refused, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task


@message.kind
class Quantised(Answer, frozen=True):
    """Levels packed into bytes, and the largest magnitude of each bucket."""

    codes: Annotated[Tensor, Shape(("packed",), torch.uint8, 0, 255)]
    scales: Annotated[Tensor, Shape(("buckets",), low=0)]
    records: Count = 1


@dataclass(frozen=True)
class Qsgd(Codec[Quantised]):
    """Stochastic rounding to 2^bits - 1 levels from -max to max of a bucket (Alistarh et al. 2017, max-norm variant).

    Unbiased: the expected decoded update is the update.
    """

    name: ClassVar[str] = "qsgd"
    payload: ClassVar[type[Answer]] = Quantised
    at_weights: ClassVar[bool] = False

    bits: int = 4  # 2, 4 or 8 a weight
    bucket: int = 512

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8) or self.bucket < 8:
            raise ValueError("qsgd packs 2, 4 or 8 bits a weight in buckets of at least 8 weights")

    @property
    def levels(self) -> int:
        """s: codes are 0 … 2s, of which s is zero."""
        return int(2 ** (self.bits - 1) - 1)

    def sizes(self, task: Task) -> Mapping[str, Size]:
        d = task.layout.size
        return {**task.sizes, "packed": -(-d * self.bits // 8), "buckets": -(-d // self.bucket)}

    def check(self, task: Task, payload: Quantised) -> None:
        if int(self._unpack(payload.codes[None]).max()) > 2 * self.levels:
            raise Refused("out of range", f"a code is above {2 * self.levels}, the highest level of {self.bits} bits")

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Quantised]:
        rows = []
        for update, seed in zip(updates, seeds, strict=True):
            buckets = self._buckets(update)
            scales = buckets.abs().amax(1)
            level = buckets / scales.clamp(min=1e-30)[:, None] * self.levels  # in [-s, s]
            draw = torch.rand(level.shape, generator=seed.child("rounding").torch()).to(level.device)
            codes = (level + draw).floor().clamp(-self.levels, self.levels) + self.levels
            packed = self._pack(codes.to(torch.uint8).flatten()[: len(update)])
            rows.append(Quantised(packed, scales))
        return rows

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Quantised]) -> Tensor:
        codes, scales = (schema.stack(payloads, name).to(w.device) for name in ("codes", "scales"))
        level = self._unpack(codes)[:, : task.layout.size].float() - self.levels
        return level * (scales / self.levels).repeat_interleave(self.bucket, 1)[:, : task.layout.size]

    def _buckets(self, update: Tensor) -> Tensor:
        """[d] -> [buckets, bucket], the last padded with zeros."""
        return torch.nn.functional.pad(update, (0, -len(update) % self.bucket)).view(-1, self.bucket)

    def _pack(self, codes: Tensor) -> Tensor:
        each = 8 // self.bits
        shifts = torch.arange(each, device=codes.device, dtype=torch.uint8) * self.bits
        padded = torch.nn.functional.pad(codes, (0, -len(codes) % each)).view(-1, each)
        return (padded << shifts).sum(1, dtype=torch.uint8)

    def _unpack(self, packed: Tensor) -> Tensor:
        shifts = torch.arange(8 // self.bits, device=packed.device, dtype=torch.uint8) * self.bits
        codes: Tensor = (packed[..., None] >> shifts) & (2**self.bits - 1)
        return codes.flatten(1)
