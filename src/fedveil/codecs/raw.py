"""The update as it is, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.core import message, schema
from fedveil.core.message import Answer, Count, Weights
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task


@message.kind
class Update(Answer, frozen=True):
    """w_k - w, and the number of records behind it."""

    additive: ClassVar[bool] = True

    update: Weights
    records: Count = 1


@dataclass(frozen=True)
class Raw(Codec[Update]):
    """The update as it is, in float32."""

    name: ClassVar[str] = "raw"
    payload: ClassVar[type[Answer]] = Update
    at_weights: ClassVar[bool] = False
    lossy: ClassVar[bool] = False

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Update]:
        return [Update(row) for row in updates]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Update]) -> Tensor:
        return schema.stack(payloads, "update").to(w.device)
