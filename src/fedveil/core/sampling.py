"""Who is asked each round."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.core.version import ADDED

MOST_STALENESS = 100  # a client takes a step along the directions of no more versions than this and the newest


@dataclass(frozen=True)
class Fate:
    """What happens to a question: after how many seconds the server knows, and why there is no answer, if so."""

    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class CohortSampler:
    """Who is asked each round, and what goes wrong on the way.

    With `buffer`, the server does not wait for a cohort. It keeps `size` clients busy and takes a step after every
    `buffer` answers (FedBuff, Nguyen et al. 2022). An answer about the weights of τ steps ago is scaled by
    (1 + τ)^-staleness.
    """

    size: int = 10
    kind: str = "uniform"  # uniform, weighted (by records), or poisson (each client with probability size / clients)
    quorum: float = 1  # answers needed: a number, or below 1 a share of those asked
    drop: float = 0.0  # probability that a question goes unanswered (simulated)
    latency: float = 0.0  # mean seconds to an answer, exponentially distributed (simulated)
    deadline: float | None = None  # seconds after which an answer is late
    seed: int | None = field(default=None, metadata=ADDED)  # of the draws; None: the run's
    spread: float = field(default=0.0, metadata=ADDED)  # deviation of the logarithm of clients' mean latencies
    buffer: int | None = field(default=None, metadata=ADDED)  # answers of a step; None: a round waits for its cohort
    staleness: float = field(default=0.5, metadata=ADDED)  # exponent of a late answer's weight; 0: all count the same
    max_staleness: int = field(default=10, metadata=ADDED)  # steps after which an answer is discarded

    def __post_init__(self) -> None:
        if self.kind not in ("uniform", "weighted", "poisson"):
            raise ValueError(f"cohort.kind is '{self.kind}'; use uniform, weighted or poisson")
        if self.size < 1 or self.quorum <= 0 or not 0 <= self.drop < 1 or self.latency < 0:
            raise ValueError("a cohort needs size >= 1, quorum > 0, 0 <= drop < 1 and latency >= 0")
        if self.deadline is not None and self.deadline <= 0:
            raise ValueError(f"cohort.deadline is {self.deadline:g}; it is in seconds, above 0")
        if self.spread < 0:
            raise ValueError(f"cohort.spread is {self.spread:g}; it is 0 or more")
        if self.buffer is not None and self.buffer < 1:
            raise ValueError(
                f"cohort.buffer is {self.buffer}; use 1 answer or more, or leave it out to wait for a cohort"
            )
        if self.buffer is not None and self.kind == "poisson":
            raise ValueError(
                "cohort.kind is poisson, which draws a cohort for each round, but cohort.buffer asks a client whenever "
                "another one is done; use uniform or weighted"
            )
        if self.staleness < 0 or not 0 <= self.max_staleness <= MOST_STALENESS:
            raise ValueError(
                f"cohort.staleness is {self.staleness:g} and cohort.max_staleness is {self.max_staleness}; use 0 or "
                f"more, and a number of steps from 0 to {MOST_STALENESS}"
            )

    def of_round(self, task: Task, run: Seed, number: int) -> tuple[int, ...]:
        """The clients of round `number` (from 1) of a run with the public seed `run`."""
        root = run if self.seed is None else Seed.root(self.seed)
        return self.draw(task, root.child("round", number, "cohort"))

    def draw(self, task: Task, seed: Seed) -> tuple[int, ...]:
        """The clients of one round, in ascending order."""
        size, clients = self.size, len(task.clients)
        if self.kind == "poisson":
            rng = seed.numpy()
            chosen = rng.choice(
                clients, int(rng.binomial(clients, min(1, size / clients))), replace=False, shuffle=False
            )
            return tuple(sorted(int(k) for k in chosen))
        return self.drawn(task, size, seed)

    def drawn(self, task: Task, size: int, seed: Seed, without: Collection[int] = ()) -> tuple[int, ...]:
        """So many clients `without` some, or all that are left, in ascending order."""
        left, taken, rng = len(task.clients) - len(without), sorted(without), seed.numpy()
        size = min(size, left)
        if self.kind == "weighted":
            sizes = np.delete(task.clients.sizes, taken)
            chosen = rng.choice(left, size, replace=False, p=sizes / sizes.sum())
        else:
            chosen = rng.choice(left, size, replace=False, shuffle=False)
        return tuple(sorted(_skipping(taken, int(place)) for place in chosen))

    def fate(self, seed: Seed, client: int, serial: int = 0) -> Fate:
        """What happens to a question of the round with this public seed. The server learns of a client that drops out
        at the deadline, or without one when its answer would have arrived."""
        if not self.drop and not self.latency:
            return Fate()
        rng = seed.child("client", client, "fate", serial).numpy()
        dropped = rng.random() < self.drop
        wait = float(rng.exponential(self.latency)) * self._slowness(client) if self.latency else 0.0
        late = self.deadline is not None and wait > self.deadline
        seconds = self.deadline if self.deadline is not None and (dropped or late) else wait
        return Fate(seconds, "dropped" if dropped else f"late: {wait:.3g} s" if late else "")

    def _slowness(self, client: int) -> float:
        """A client's mean latency as a multiple of the mean over all, drawn by its number: the same in every run."""
        if not self.spread:
            return 1.0
        drawn = float(Seed.root(0).child("latency", client).numpy().standard_normal())
        return math.exp(self.spread * drawn - self.spread**2 / 2)

    def weight(self, staleness: int) -> float:
        """The weight of an answer about the weights of so many steps ago (Nguyen et al. 2022, section 5)."""
        return float((1 + staleness) ** -self.staleness)

    def rate(self, task: Task) -> float:
        """The probability with which each client is drawn by itself; 1 where draws depend on each other."""
        return min(1.0, self.size / len(task.clients)) if self.kind == "poisson" else 1.0

    def needed(self, asked: int) -> int:
        share = round(self.quorum * asked, 9)  # as a float, 0.07 × 100 is above 7
        return max(1, math.ceil(share)) if self.quorum < 1 else int(self.quorum)


def _skipping(taken: Sequence[int], place: int) -> int:
    """The number at a place among those that are not taken."""
    for number in taken:
        if number > place:
            break
        place += 1
    return place
