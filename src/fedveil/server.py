"""The server's half of a round: clamp what clients say of themselves, merge their updates, and take a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil import message
from fedveil.federation import Answers, Cohort, State
from fedveil.message import Shape, Weights

Versions = Annotated[Tensor, Shape(("clients",), torch.int64, 0, 2**40)]
ROOM = 10.0  # how many times its cohort's median a client's number may be, and what part of it


@message.kind(2)
class ServerState(State, frozen=True):
    """The global weights, the server optimiser's moments, and with a down codec the steps sent so far."""

    first: Weights | None = None
    second: Weights | None = None
    history: list[bytes] = []  # encoded steps, as frames; empty where full weights are fewer bytes
    versions: Versions | None = None  # how many of them each client has applied


@dataclass(frozen=True)
class Server:
    """The server's optimiser: plain (FedAvg), momentum (FedAvgM) or adam (FedAdam, Reddi et al. 2021, algorithm 2)."""

    optimizer: str = "plain"
    lr: float = 1.0
    momentum: float = 0.9  # also Adam's first moment
    beta2: float = 0.99
    tau: float = 1e-3  # Adam's degree of adaptivity

    def __post_init__(self) -> None:
        if self.optimizer not in ("plain", "momentum", "adam"):
            raise ValueError(f"server.optimizer is '{self.optimizer}'; use plain, momentum or adam")
        if self.lr <= 0:
            raise ValueError("server.lr must be above 0")
        if not 0 <= self.momentum < 1 or not 0 <= self.beta2 < 1 or self.tau <= 0:
            raise ValueError("server.momentum and server.beta2 are from 0 to below 1, and server.tau is above 0")

    def begin(self, weights: Tensor) -> ServerState:
        moment = torch.zeros_like(weights)
        return ServerState(
            weights,
            None if self.optimizer == "plain" else moment,
            moment.clone() if self.optimizer == "adam" else None,
        )

    def step(self, state: ServerState, delta: Tensor) -> ServerState:
        """Move the weights along the merged update `delta` [d], which points downhill."""
        if state.first is None:
            return replace(state, weights=state.weights + self.lr * delta)
        if state.second is None:
            first = self.momentum * state.first + delta
            return replace(state, weights=state.weights + self.lr * first, first=first)
        first = self.momentum * state.first + (1 - self.momentum) * delta
        second = self.beta2 * state.second + (1 - self.beta2) * delta**2
        step = self.lr * first / (second.sqrt() + self.tau)
        return replace(state, weights=state.weights + step, first=first, second=second)


@dataclass(frozen=True)
class Merge:
    """Updates [m, d] of m clients -> one update [d].

    mean:    weighted by records
    clip:    the same, after each update's norm is cut to `clip` (Sun et al. 2019)
    median:  of every coordinate, unweighted (Yin et al. 2018)
    trimmed: the mean of every coordinate without its `trim` share at either end, unweighted (Yin et al. 2018)
    krum:    the one update nearest to its m - `byzantine` - 2 neighbours (Blanchard et al. 2017)
    """

    kind: str = "mean"
    clip: float = 1.0
    trim: float = 0.1
    byzantine: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("mean", "clip", "median", "trimmed", "krum"):
            raise ValueError(f"merge.kind is '{self.kind}'; use mean, clip, median, trimmed or krum")
        if self.clip <= 0 or not 0 <= self.trim < 0.5 or self.byzantine < 0:
            raise ValueError("a merge needs clip > 0, 0 <= trim < 0.5 and byzantine >= 0")

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


def clamped(
    cohort: Cohort, name: str, told: Mapping[int, float], room: float = ROOM, least: bool = True
) -> dict[int, float]:
    """The numbers that clients told, each cut to `room` times their median and raised to a `room`-th part of it.

    One client cannot move the median beyond what others told, so none can hold back or drown the rest. A number that
    was clamped is in the ledger's events. Fewer than 3 clients have no majority, and their numbers stay as they are.

    least: whether small numbers are raised
    """
    if len(told) < 3:
        return dict(told)
    middle = median(told.values())
    low, high = middle / room if least else 0.0, middle * room
    kept = {client: min(max(value, low), high) for client, value in told.items()}
    for client, value in told.items():
        if kept[client] != value:
            cohort.tell(f"client {client}: {name} of {value:g} counts as {kept[client]:g}: the median is {middle:g}")
    return kept


def shortened(cohort: Cohort, answers: Answers, name: str) -> list[Tensor]:
    """A vector of every answer; one whose root mean square is more than `ROOM` times the median is scaled to that."""
    vectors: dict[int, Tensor] = {client: getattr(answer, name) for client, answer in answers.items()}
    sizes = {k: float(torch.linalg.vector_norm(v)) / math.sqrt(len(v)) for k, v in vectors.items()}
    kept = clamped(cohort, f"{name} with a root mean square", sizes, least=False)
    return [v * (kept[k] / sizes[k]) if kept[k] < sizes[k] else v for k, v in vectors.items()]
