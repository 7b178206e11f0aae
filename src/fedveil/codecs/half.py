"""Half floats: 16 bits for each weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.core import message, schema
from fedveil.core.message import Answer, Count, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@message.kind
class HalfUpdate(Answer, frozen=True):
    """An update in 16 bits a weight."""

    update: Annotated[Tensor, Shape(("weights",), "half")]
    records: Count = 1


@dataclass(frozen=True)
class Half(Codec[HalfUpdate]):
    """Round every number to 16 bits: 1/2 of the bytes."""

    name: ClassVar[str] = "half"
    payload: ClassVar[type[Answer]] = HalfUpdate
    at_weights: ClassVar[bool] = False

    dtype: str = "float16"  # or bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in HALVES:
            raise ValueError(f"half.dtype is '{self.dtype}'; use float16 or bfloat16")

    def sizes(self, task: Task) -> Mapping[str, Size]:
        return {**task.sizes, "half": HALVES[self.dtype]}

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[HalfUpdate]:
        return [HalfUpdate(row) for row in updates.to(HALVES[self.dtype])]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[HalfUpdate]) -> Tensor:
        return schema.stack(payloads, "update").to(w.device).float()
