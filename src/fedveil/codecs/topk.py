"""Top-k: only the largest entries of an update."""

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
class Sparse(Answer, frozen=True):
    """The largest entries of an update and where they are, in ascending order."""

    values: Annotated[Tensor, Shape(("kept",))]
    places: Annotated[Tensor, Shape(("kept",), torch.int32, 0, 2**31)]
    records: Count = 1


@dataclass(frozen=True)
class TopK(Codec[Sparse]):
    """Send the largest entries and drop the rest; biased, so use it with error feedback (Stich et al. 2018)."""

    name: ClassVar[str] = "top-k"
    payload: ClassVar[type[Answer]] = Sparse
    at_weights: ClassVar[bool] = False

    share: float = 0.01  # of the weights

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"top-k.share is {self.share:g}; use a number above 0 and at most 1")

    def kept(self, task: Task) -> int:
        """Return k, the number of weights that are sent."""
        return max(1, round(self.share * task.layout.size))

    def sizes(self, task: Task) -> Mapping[str, Size]:
        return {**task.sizes, "kept": self.kept(task)}

    def check(self, task: Task, payload: Sparse) -> None:
        places = payload.places
        if int(places[-1]) >= task.layout.size or bool((places[1:] <= places[:-1]).any()):
            raise Refused("out of range", f"places are not ascending numbers below {task.layout.size}")

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Sparse]:
        places = updates.abs().topk(self.kept(task), dim=1).indices.sort(1).values
        values = updates.gather(1, places)
        return [Sparse(v, p) for v, p in zip(values, places.to(torch.int32), strict=True)]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Sparse]) -> Tensor:
        values, places = (schema.stack(payloads, name).to(w.device) for name in ("values", "places"))
        return torch.zeros_like(w).scatter(1, places.long(), values)
