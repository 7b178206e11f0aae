"""The server's optimizer: step along the mean update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import Record, Weights
from fedveil.core.method import State
from fedveil.train.moments import stepped
from fedveil.train.schedules import Scheduled

SLOT, AVERAGE = "server", "average"  # slots of the server's state


@message.kind
class Moments(Record, frozen=True):
    """The optimizer's running moments of the update."""

    first: Weights
    second: Weights | None = None


@message.kind
class Average(Record, frozen=True):
    """The weights in training, if their moving average is published, and the number of steps."""

    live: Weights
    steps: int = 0


@dataclass(frozen=True)
class ServerOptimizer(Scheduled):
    """The server's optimizer: plain (FedAvg), momentum (FedAvgM) or adam (FedAdam, Reddi et al. 2021, algorithm 2).

    momentum: also Adam's first moment
    tau:      Adam's degree of adaptivity
    ema:      publish a moving average of the weights, with coefficient min(ema, (1+t)/(10+t)) in step t; 0: do not
    """

    key: ClassVar[str] = "server"

    optimizer: str = "plain"
    lr: float = 1.0
    momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    ema: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in ("plain", "momentum", "adam"):
            raise ValueError(f"server.optimizer is '{self.optimizer}'; use plain, momentum or adam")
        if self.lr <= 0:
            raise ValueError(f"server.lr is {self.lr:g}; it must be above 0")
        if not 0 <= self.momentum < 1 or not 0 <= self.beta2 < 1 or self.tau <= 0 or not 0 <= self.ema < 1:
            raise ValueError(
                "server.momentum, server.beta2 and server.ema must be from 0 to below 1, and server.tau above 0"
            )

    def init_state(self, weights: Tensor) -> State:
        """Return the state before the first step."""
        state, moment = State(weights), torch.zeros_like(weights)
        if self.optimizer != "plain":
            state = state.put(SLOT, Moments(moment, moment.clone() if self.optimizer == "adam" else None))
        return state.put(AVERAGE, Average(weights)) if self.ema else state

    def training(self, state: State) -> State:
        """Return the state with the weights in training in place of their average."""
        average = state.slots.get(AVERAGE)
        return replace(state, weights=average.live) if isinstance(average, Average) else state

    def step(
        self,
        state: State,
        delta: Tensor,
        round_: int | None = None,
        sqrt: Callable[[Tensor], Tensor] = torch.sqrt,
    ) -> State:
        """Move the weights along the merged update `delta` [d], which points downhill. A schedule needs the round.

        sqrt: how Adam takes roots
        """
        if round_ is None and not self.constant:
            raise ValueError("server.schedule and server.warmup need the round, and this method gives none; unset them")
        lr = self.lr if round_ is None else self.lr * self.factor(round_)
        first, second = moments(state)
        weights, first, second = stepped(self, sqrt, lr, state.weights, first, second, delta)
        after = replace(state, weights=weights)
        return after if first is None else after.put(SLOT, Moments(first, second))

    def published(self, before: State, after: State) -> State:
        """Return the state to publish: with the weights of `after`, or with their moving average."""
        average = before.slots.get(AVERAGE)
        if not isinstance(average, Average):
            return after
        steps = average.steps + 1
        keep = min(self.ema, (1 + steps) / (10 + steps))
        weights = torch.lerp(after.weights, before.weights, keep)
        return replace(after, weights=weights).put(AVERAGE, Average(after.weights, steps))


def moments(state: State) -> tuple[Tensor | None, Tensor | None]:
    """Return the optimizer's moments in a state."""
    held = state.slots.get(SLOT)
    return (held.first, held.second) if isinstance(held, Moments) else (None, None)
