"""Local steps between two messages, along a few directions that all clients share (FedKSeed, Qin et al. 2024).

In a step, a client measures the slopes s along G of the round's K directions z at its own weights, and moves by
-lr/G Σ s z. After all steps it has moved by -lr/G Σ_k a_k z_k, where a_k is the sum of all slopes along z_k. So K
numbers describe the whole way, and their mean over the clients describes the mean of the ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.methods.baffle.probing import Prober

Batch = tuple[Tensor, Tensor, Tensor]  # records x [C, B, …], y [C, B, …] and mask [C, B]


@dataclass(frozen=True)
class LocalSteps:
    """The local steps of a question. They use the round's K directions in turn, each as often as the others.

    steps:      S, a multiple of K / G
    directions: G, of a step; a divisor of K
    lr:         of a step along the estimate that its G slopes make
    """

    steps: int = 5
    directions: int = 20
    lr: float = 0.05

    def __post_init__(self) -> None:
        if self.steps < 1 or self.directions < 1 or self.lr <= 0:
            raise ValueError(
                "method.local.steps and method.local.directions are at least 1, method.local.lr is above 0"
            )

    def validate(self, count: int, private: bool, apart: bool) -> None:
        """Raise a ValueError unless the steps use each of `count` directions equally often, and the method's other
        options allow them: whether it is private, and whether clients measure along directions of their own."""
        if private:
            raise ValueError(
                "method.local measures records again in every step, and method.privacy charges for one measurement a "
                "question; leave one of them out"
            )
        if apart:
            raise ValueError(
                'method.local adds up slopes along directions that all clients share; set method.seeds="shared" and '
                "leave method.weak out"
            )
        if count % self.directions or self.steps % (count // self.directions):
            raise ValueError(
                f"method.local takes {self.steps} steps of {self.directions} directions, which do not use each of the "
                f"{count} directions equally often; let method.local.directions divide method.directions, and make "
                "method.local.steps a multiple of their quotient"
            )

    def slopes(self, prober: Prober, w: Tensor, key: int, batches: Iterable[Batch], count: int) -> Tensor:
        """Walk from `w` [d], with a batch for each step, and return a_k over the number of visits to z_k, [C, count].

        One step along all directions gives the slopes at `w`.
        """
        weights, total = w[None], w.new_zeros(1, count)
        for step, (x, y, mask) in enumerate(batches):
            weights, total = weights.expand(len(x), -1), total.expand(len(x), -1).clone()
            keys, first = torch.full((len(x),), key, device=w.device), step * self.directions % count
            slopes, estimate = prober.along(weights, keys, x, y, mask, first, self.directions)
            total[:, first : first + self.directions] += slopes
            weights = weights - self.lr * estimate
        return total * (count / (self.steps * self.directions))
