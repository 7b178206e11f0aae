"""How the server combines updates, and clamps the numbers that clients state about themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedveil.core.cohort import Cohort
from fedveil.privacy.users import UserLevel

ROOM = 10.0  # how many times its cohort's median a client's number may be, and what part of it


class Aggregating(Protocol):
    """Updates [m, d] of m clients become one update [d].

    quorum: whether a round needs a quorum of answers, and the server may look at single ones
    joint:  whether all vectors of a client must be seen as one, because their norm or distance counts
    """

    quorum: ClassVar[bool]

    @property
    def joint(self) -> bool: ...

    @property
    def needs_all(self) -> str:
        """What needs the updates of all clients at once; empty if they can be merged as they come."""

    def merge(self, updates: Tensor, weights: Tensor | None) -> Tensor:
        """Merge a batch of updates. Without `weights` [m] clients count the same."""

    def add(self, merged: Tensor, batch: Tensor, share: float) -> Tensor:
        """Add a merged batch [d] to what was merged before it. The batch has this share of the weight of both."""

    def finish(self, merged: Tensor, cohort: Cohort) -> Tensor:
        """The result of all batches."""


@dataclass(frozen=True)
class Aggregator:
    """Updates [m, d] of m clients -> one update [d].

    mean:    weighted by records
    clip:    the same, after each update's norm is cut to `clip` (Sun et al. 2019)
    median:  of every coordinate, unweighted (Yin et al. 2018)
    trimmed: the mean of every coordinate without its `trim` share at either end, unweighted (Yin et al. 2018)
    krum:    the one update nearest to its m - `byzantine` - 2 neighbours (Blanchard et al. 2017)
    """

    quorum: ClassVar[bool] = True

    kind: str = "mean"
    clip: float = 1.0
    trim: float = 0.1
    byzantine: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("mean", "clip", "median", "trimmed", "krum"):
            raise ValueError(f"aggregator.kind is '{self.kind}'; use mean, clip, median, trimmed or krum")
        if self.clip <= 0 or not 0 <= self.trim < 0.5 or self.byzantine < 0:
            raise ValueError("an aggregator needs clip > 0, 0 <= trim < 0.5 and byzantine >= 0")

    @property
    def linear(self) -> bool:
        """Whether it is a mean, which a sum of the updates is enough for."""
        return self.kind == "mean"

    @property
    def joint(self) -> bool:
        return not self.linear

    @property
    def needs_all(self) -> str:
        return "" if self.kind in ("mean", "clip") else f"aggregator.kind = {self.kind}"

    def merge(self, updates: Tensor, weights: Tensor | None) -> Tensor:
        if weights is None and self.linear:
            return updates.mean(0)
        return self(updates, updates.new_ones(len(updates)) if weights is None else weights)

    def add(self, merged: Tensor, batch: Tensor, share: float) -> Tensor:
        return merged.lerp(batch, share)

    def finish(self, merged: Tensor, cohort: Cohort) -> Tensor:
        return merged

    def __call__(self, updates: Tensor, weights: Tensor) -> Tensor:
        share = (weights / weights.sum()).to(updates.dtype)
        match self.kind:
            case "clip":
                norms: Tensor = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
                return share @ (updates * (self.clip / norms.clamp(min=self.clip)))
            case "median":
                ordered = updates.sort(dim=0).values
                return (ordered[(len(updates) - 1) // 2] + ordered[len(updates) // 2]) / 2
            case "trimmed":
                cut = math.floor(round(self.trim * len(updates), 9))  # 0.29 × 100 is below 29
                return updates.sort(dim=0).values[cut : len(updates) - cut].mean(dim=0)
            case "krum":
                neighbours = max(1, len(updates) - self.byzantine - 2)
                distances = torch.cdist(updates, updates).square().sort(dim=1).values[:, 1 : neighbours + 1]
                return updates[int(distances.sum(dim=1).argmin())]
        return share @ updates


@dataclass(frozen=True)
class NoisySum:
    """The sum of clipped updates with Gaussian noise over the public number of clients: a server that is trusted with
    the updates makes the model private. Every answer counts, because a round that is skipped would tell who was drawn.
    """

    quorum: ClassVar[bool] = False
    joint: ClassVar[bool] = True
    needs_all: ClassVar[str] = ""

    how: UserLevel

    def merge(self, updates: Tensor, weights: Tensor | None) -> Tensor:
        return self.how.clipped_sum(updates)

    def add(self, merged: Tensor, batch: Tensor, share: float) -> Tensor:
        return merged + batch

    def finish(self, merged: Tensor, cohort: Cohort) -> Tensor:
        return self.how.noised_sum(merged, cohort.secret) / cohort.expected


def clamped(
    cohort: Cohort, name: str, told: Mapping[int, float], room: float = ROOM, raise_low: bool = True
) -> dict[int, float]:
    """The numbers that clients told, each cut to `room` times their median and raised to a `room`-th part of it.

    One client cannot move the median beyond what others told, so none can hold back or drown the rest. A number that
    was clamped is in the ledger's events. Fewer than 3 clients have no majority, and their numbers stay as they are.

    raise_low: whether small numbers are raised
    """
    if len(told) < 3:
        return dict(told)
    middle = median(told.values())
    low, high = middle / room if raise_low else 0.0, middle * room
    kept = {client: min(max(value, low), high) for client, value in told.items()}
    for client, value in told.items():
        if kept[client] != value:
            cohort.tell(f"client {client}: {name} of {value:g} counts as {kept[client]:g}: the median is {middle:g}")
    return kept


def shortened(cohort: Cohort, name: str, vectors: Mapping[int, Tensor]) -> list[Tensor]:
    """The clients' vectors; one whose root mean square is more than `ROOM` times the median is scaled to that."""
    sizes = {k: float(torch.linalg.vector_norm(v)) / math.sqrt(len(v)) for k, v in vectors.items()}
    kept = clamped(cohort, f"{name} with a root mean square", sizes, raise_low=False)
    return [v * (kept[k] / sizes[k]) if kept[k] < sizes[k] else v for k, v in vectors.items()]
