"""Who is asked each round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.core.version import ADDED


@dataclass(frozen=True)
class CohortSampler:
    """Who is asked each round, and what goes wrong on the way."""

    size: int = 10
    kind: str = "uniform"  # uniform, weighted (by records), or poisson (each client with probability size / clients)
    quorum: float = 1  # answers needed: a number, or below 1 a share of those asked
    drop: float = 0.0  # probability that a question goes unanswered (simulated)
    latency: float = 0.0  # mean seconds to an answer, exponentially distributed (simulated)
    deadline: float | None = None  # seconds after which an answer is late
    seed: int | None = field(default=None, metadata=ADDED)  # of the draws; None: the run's

    def __post_init__(self) -> None:
        if self.kind not in ("uniform", "weighted", "poisson"):
            raise ValueError(f"cohort.kind is '{self.kind}'; use uniform, weighted or poisson")
        if self.size < 1 or self.quorum <= 0 or not 0 <= self.drop < 1 or self.latency < 0:
            raise ValueError("a cohort needs size >= 1, quorum > 0, 0 <= drop < 1 and latency >= 0")
        if self.deadline is not None and self.deadline <= 0:
            raise ValueError(f"cohort.deadline is {self.deadline:g}; it is in seconds, above 0")

    def of_round(self, task: Task, run: Seed, number: int) -> tuple[int, ...]:
        """The clients of round `number` (from 1) of a run with the public seed `run`."""
        root = run if self.seed is None else Seed.root(self.seed)
        return self.draw(task, root.child("round", number, "cohort"))

    def draw(self, task: Task, seed: Seed) -> tuple[int, ...]:
        """The clients of one round, in ascending order."""
        clients, rng = len(task.clients), seed.numpy()
        if self.kind == "weighted":
            sizes = task.clients.sizes
            chosen = rng.choice(clients, min(self.size, clients), replace=False, p=sizes / sizes.sum())
        else:
            size = rng.binomial(clients, min(1, self.size / clients)) if self.kind == "poisson" else self.size
            chosen = rng.choice(clients, min(int(size), clients), replace=False, shuffle=False)
        return tuple(sorted(int(k) for k in chosen))

    def rate(self, task: Task) -> float:
        """The probability with which each client is drawn by itself; 1 where draws depend on each other."""
        return min(1.0, self.size / len(task.clients)) if self.kind == "poisson" else 1.0

    def needed(self, asked: int) -> int:
        share = round(self.quorum * asked, 9)  # as a float, 0.07 × 100 is above 7
        return max(1, math.ceil(share)) if self.quorum < 1 else int(self.quorum)
