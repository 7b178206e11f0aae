"""Bytes of each client over the rounds of a run, for the other examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fedveil.core.ledger import Row


class Traffic:
    """Bytes of each client over all rounds so far."""

    def __init__(self) -> None:
        self.up: Counter[str] = Counter()
        self.down: Counter[str] = Counter()
        self.asked = 0  # clients, counted in each round

    def add(self, row: Row) -> dict[str, float]:
        """Count a round, and return the bytes of a client: the mean, and of the one with the most."""
        self.up.update(row.up)
        self.down.update(row.down)
        self.asked += len(row.cohort)
        both = self.up + self.down
        clients = max(1, len(both))
        return {
            "up": sum(self.up.values()) / clients,
            "down": sum(self.down.values()) / clients,
            "most": max(both.values(), default=0),
        }

    @property
    def a_round(self) -> dict[str, float]:
        """The mean bytes of a client in a round in which it takes part, up and down."""
        asked = max(1, self.asked)
        return {"up_a_round": sum(self.up.values()) / asked, "down_a_round": sum(self.down.values()) / asked}


def recorded(told: Callable[[dict[str, float]], object], traffic: Traffic | None = None) -> Callable[[Row], None]:
    """An observer that passes on, for each round with an evaluation, its metrics, the traffic so far and ε."""
    traffic = Traffic() if traffic is None else traffic

    def observe(row: Row) -> None:
        sent = traffic.add(row)
        if "accuracy" in row.metrics:
            spent = {} if row.epsilon is None else {"epsilon": row.epsilon}
            told({"round": row.round, "seconds": row.seconds, **row.metrics, **sent, **spent})

    return observe
