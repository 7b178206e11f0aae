"""The server's optimizers: how the weights move along the combined update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import Shape, Weights
from fedveil.core.method import State

Versions = Annotated[Tensor, Shape(("clients",), torch.int64, 0, 2**40)]


@message.kind(2)
class ServerState(State, frozen=True):
    """The global weights, the server optimiser's moments, and with a down codec the steps sent so far."""

    first: Weights | None = None
    second: Weights | None = None
    history: list[bytes] = []  # encoded steps, as frames; empty where full weights are fewer bytes
    versions: Versions | None = None  # how many of them each client has applied


@dataclass(frozen=True)
class ServerOptimizer:
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

    def init_state(self, weights: Tensor) -> ServerState:
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
