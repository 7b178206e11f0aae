"""When answers arrive at a server that does not wait. In a simulation this follows from the public seed alone.

It depends on no answer, so a run repeats bit for bit on every engine, and one that is resumed needs no other record of
who is busy: the timeline is computed anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.task import Task


@dataclass(frozen=True)
class Arrival:
    """The end of a client's turn: the round in which it was asked, and why there is no answer, if so."""

    client: int
    asked: int
    why: str = ""


@dataclass(frozen=True)
class Window:
    """The time between two steps of the server.

    asked:    clients that are asked, in ascending order; all get the same weights
    arrivals: turns that end, in order of time
    seconds:  of the simulated clock
    """

    asked: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    seconds: float


class Timeline:
    """The windows of a run, one for each round.

    A client that is done is replaced at once by another one that is free. Answers that arrive together are taken
    together, before anybody is asked. A client is asked once in a window, and at most one of its turns ends in it.
    """

    def __init__(self, sampler: CohortSampler, task: Task, run: Seed) -> None:
        assert sampler.buffer is not None
        self.sampler, self.task, self.run, self.buffer = sampler, task, run, sampler.buffer
        self._draws = run if sampler.seed is None else Seed.root(sampler.seed)
        self._clock = 0.0
        self._busy: list[tuple[float, int, int, str]] = []  # a heap: end of the turn, round, client, why no answer
        self._windows: list[Window] = []

    def window(self, number: int) -> Window:
        """The window that ends with the step of round `number` (from 1)."""
        while len(self._windows) < number:
            self._windows.append(self._next(len(self._windows) + 1))
        return self._windows[number - 1]

    def _next(self, number: int) -> Window:
        began, draws = self._clock, self._draws.child("round", number, "cohort")
        asked, arrivals = list[int](), list[Arrival]()
        usable = refilled = 0
        while usable < self.buffer:
            if not self._busy or self._busy[0][0] > self._clock:
                seen = {*asked, *(each.client for each in arrivals), *(client for _, _, client, _ in self._busy)}
                asked += self._ask(number, seen, draws.child("refill", refilled) if refilled else draws)
                refilled += 1
            if not self._busy:
                break  # every client is in this window already
            self._clock, before, client, why = heapq.heappop(self._busy)
            if number - before > self.sampler.max_staleness:
                why = why or f"stale: asked {number - before} steps ago, {self.sampler.max_staleness} are allowed"
            arrivals.append(Arrival(client, before, why))
            usable += not why
        return Window(tuple(sorted(asked)), tuple(arrivals), self._clock - began)

    def _ask(self, number: int, seen: set[int], seed: Seed) -> tuple[int, ...]:
        """Ask as many clients as may be busy, of those not yet seen in this window."""
        room = min(self.sampler.size - len(self._busy), len(self.task.clients) - len(seen))
        chosen = self.sampler.drawn(self.task, room, seed, seen) if room > 0 else ()
        for client in chosen:
            fate = self.sampler.fate(self.run.child("round", number), client)
            heapq.heappush(self._busy, (self._clock + fate.seconds, number, client, fate.why))
        return chosen


def asked_each_round(sampler: CohortSampler, task: Task, run: Seed, rounds: int) -> Iterator[tuple[int, ...]]:
    """The clients that are asked in each round of a run with the public seed `run`."""
    timeline = Timeline(sampler, task, run) if sampler.buffer is not None else None
    for number in range(1, rounds + 1):
        yield timeline.window(number).asked if timeline else sampler.of_round(task, run, number)
