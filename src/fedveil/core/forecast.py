"""What a client's turn in a round will cost, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Turn:
    """One client in one round to come."""

    client: int
    records: int  # n_k
    round: int
    rounds: int
    missed: int  # rounds since the client took part; since the first one if it never did
    cohort: tuple[int, ...] = ()  # all who take part in the round
    largest: int = 1  # the most records that any client may have


@dataclass(frozen=True)
class Compute:
    """What a turn takes besides messages. Works that follow each other are added."""

    passes: int = 0  # records run forward and backward
    vectors: int = 3  # of the weights' size, held at once: weights, gradient, update
    held: int = 1  # records whose activations are held at once

    def memory(self, weights: int, activations: int) -> int:
        """An estimate in bytes of what a client holds, for a model of so many weights and activations per record."""
        return FLOAT * (weights * self.vectors + activations * self.held)

    def __add__(self, other: Compute) -> Compute:
        return Compute(self.passes + other.passes, max(self.vectors, other.vectors), max(self.held, other.held))
