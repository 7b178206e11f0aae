"""How a learning rate changes over rounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Self

from fedveil.core.version import ADDED

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A learning rate that is multiplied by `factor(round)`.

    schedule:        "constant"; "cosine", from 1 towards 0 along half a cosine; or a function round -> factor above 0
    schedule_rounds: the number of rounds of the cosine, warm-up included; None: the rounds of the run
    warmup:          the number of first rounds in which the rate rises linearly to its full value
    """

    key: ClassVar[str]  # the recipe's section

    schedule: str | Callable[[int], float] = field(default="constant", metadata=ADDED)
    schedule_rounds: int | None = field(default=None, metadata=ADDED)
    warmup: int = field(default=0, metadata=ADDED)

    def __post_init__(self) -> None:
        if not callable(self.schedule) and self.schedule not in SCHEDULES:
            raise ValueError(
                f"{self.key}.schedule is {self.schedule!r}; use {' or '.join(SCHEDULES)}, or in Python a function of "
                "the round"
            )
        if self.warmup < 0:
            raise ValueError(f"{self.key}.warmup is {self.warmup}; it must be 0 or more")
        if self.schedule_rounds is not None and self.schedule != "cosine":
            raise ValueError(
                f"{self.key}.schedule_rounds is {self.schedule_rounds}, but only the schedule cosine has a length; "
                "leave it out"
            )
        if self.schedule_rounds is not None and self.schedule_rounds <= self.warmup:
            raise ValueError(
                f"{self.key}.schedule_rounds is {self.schedule_rounds}, but the warm-up alone has {self.warmup} "
                "rounds; raise it"
            )

    @property
    def constant(self) -> bool:
        """Return whether the factor is 1 in every round."""
        return self.schedule == "constant" and not self.warmup

    def over(self, rounds: int) -> Self:
        """Return the same for a run of so many rounds: a cosine without a length takes that many."""
        if self.schedule != "cosine" or self.schedule_rounds is not None:
            return self
        return dataclasses.replace(self, schedule_rounds=rounds)

    def factor(self, round_: int) -> float:
        """Return the factor on the learning rate in a round, counted from 1. After a cosine's last round it stays."""
        warm = min(1.0, round_ / (self.warmup + 1))
        if callable(self.schedule):
            given = float(self.schedule(round_))
            if not 0 < given < math.inf:
                raise ValueError(f"{self.key}.schedule gives {given:g} in round {round_}; it must be above 0")
            return warm * given
        if self.schedule == "constant":
            return warm
        if self.schedule_rounds is None:
            raise ValueError(
                f"{self.key}.schedule is cosine, and a client does not know how many rounds there are; set "
                f"{self.key}.schedule_rounds"
            )
        done = min(round_, self.schedule_rounds) - 1 - self.warmup
        return warm * (1 + math.cos(math.pi * max(0, done) / (self.schedule_rounds - self.warmup))) / 2
