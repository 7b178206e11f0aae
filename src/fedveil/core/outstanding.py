"""Answers that are still on their way when the server takes a step, and what the server keeps until they arrive.

In a simulation a client computes its answer when it is asked. The answer is held here until the timeline says that it
arrives, so that clients never go back to an earlier round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from fedveil.core import message
from fedveil.core.ledger import Row
from fedveil.core.message import Answer, Container, Envelope, Record, Slots, Weights
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.timeline import Window

SLOT = "outstanding"  # of the server's state
NOT_ASKED = "failed: it could not be asked"


@dataclass(frozen=True)
class Asked:
    """What an answer is about.

    round, seed: the round in which the client was asked, and the public seed of that round
    at:          the weights that it was asked about [d], where the server keeps them; None: those of this round, or the
                 server needs none
    weight:      what the answer counts for its staleness
    """

    round: int
    seed: Seed
    at: Tensor | None = None
    weight: float = 1.0


class Held(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An answer that was read when it was computed, or the reason why there is none."""

    round: int
    client: int
    size: int  # bytes that the client sent
    why: str
    frame: bytes


@message.kind
class PastWeights(Record, frozen=True):
    """Weights that clients were asked about."""

    weights: Weights


@message.kind
class Outstanding(Container, frozen=True):
    """The server's slot: answers on their way, and by round the weights that they are about."""

    answers: list[Held]
    versions: Slots


@dataclass
class Desk:
    """What a server that does not wait takes in during one round."""

    number: int
    window: Window
    sampler: CohortSampler
    run: Seed  # the root of the public seeds
    held: dict[tuple[int, int], Held] = field(default_factory=dict)  # by round and client
    versions: dict[int, Tensor] = field(default_factory=dict)
    taken: bool = False

    @staticmethod
    def opened(number: int, window: Window, sampler: CohortSampler, run: Seed, before: object) -> Desk:
        """The desk of a round, with what the slot of the round `before` holds."""
        desk = Desk(number, window, sampler, run)
        if isinstance(before, Outstanding):
            desk.held = {(each.round, each.client): each for each in before.answers}
            desk.versions = {int(name): before.versions[name].weights for name in before.versions}
        return desk

    def hold(self, client: int, size: int, answer: Answer | None, why: str) -> None:
        """Keep what a client that was asked in this round will have sent when it arrives."""
        frame = b"" if answer is None else message.frame(answer, Envelope())
        self.held[self.number, client] = Held(self.number, client, size, why, frame)

    def take(self, row: Row, kind: type[Answer]) -> dict[int, dict[int, Answer]]:
        """The answers that arrive in this round, by the round in which they were asked, and by client."""
        self.taken, found = True, dict[int, dict[int, Answer]]()
        for arrival in sorted(self.window.arrivals, key=lambda each: (each.asked, each.client)):
            held = self.held.pop((arrival.asked, arrival.client), None)
            why = arrival.why or (held.why if held else NOT_ASKED)
            if held and held.size:
                row.count_up(arrival.client, held.size)
            if why or held is None:
                row.missing[str(arrival.client)] = why
                continue
            answer, _ = message.unframe(held.frame, {kind.kind: kind}, len(held.frame))
            assert isinstance(answer, Answer)
            found.setdefault(arrival.asked, {})[arrival.client] = answer
        old = [self.number - asked for asked, answers in found.items() for _ in answers]
        if old:
            row.metrics.update(staleness=sum(old) / len(old), staleness_most=max(old))
        return found

    def about(self, asked: int) -> Asked:
        """What the answers of a round are about."""
        weight = self.sampler.weight(self.number - asked)
        return Asked(asked, self.run.child("round", asked), self.versions.get(asked), weight)

    def record(self) -> Outstanding:
        """What the next round needs. An answer that would be too old by then is kept without its contents."""
        oldest = self.number + 1 - self.sampler.max_staleness
        ended = {(each.asked, each.client) for each in self.window.arrivals}
        left = [each for place, each in sorted(self.held.items()) if place not in ended]
        left = [each if each.round >= oldest else msgspec.structs.replace(each, frame=b"") for each in left]
        needed = {each.round for each in left if each.frame}
        versions: Mapping[str, Record] = {str(n): PastWeights(w) for n, w in self.versions.items() if n in needed}
        return Outstanding(left, Slots(versions))
