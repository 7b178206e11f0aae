"""One round after the other: a method asks a cohort, and the ledger counts what it cost."""

from __future__ import annotations

import math
import secrets
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedveil.core import schema
from fedveil.core.account import Tally
from fedveil.core.batchnorm import SLOT, Norms
from fedveil.core.clients import Clients
from fedveil.core.cohort import BelowQuorum, Cohort, Engine, Witness, _Round
from fedveil.core.forecast import Turn
from fedveil.core.identity import Identities
from fedveil.core.ledger import Row
from fedveil.core.message import Record
from fedveil.core.method import Method, State
from fedveil.core.metrics import ACCURACY, LOSS, VALIDATION
from fedveil.core.outstanding import SLOT as OUTSTANDING
from fedveil.core.outstanding import Desk
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.core.timeline import Timeline


@dataclass
class Federation:
    """A run in progress. `fedveil.run` builds one; `step` is one round."""

    task: Task
    method: Method
    engine: Engine
    sampler: CohortSampler
    seed: Seed
    evaluate_every: int = 1
    run: bytes = field(default_factory=lambda: secrets.token_bytes(8))
    secret: Seed | None = None
    identities: Identities | None = None
    tally: Tally | None = None
    witness: Witness | None = None

    def __post_init__(self) -> None:
        self.clients = Clients(self.method, self.task, self.run, self.seed, self.secret, self.identities)
        self.timeline = None if self.sampler.buffer is None else Timeline(self.sampler, self.task, self.seed)
        if self.timeline and not getattr(self.engine, "simulated", True):
            raise ValueError(
                f"cohort.buffer is {self.sampler.buffer}, which simulates when answers arrive, but the clients of "
                f"{type(self.engine).__name__} are deployed; leave it out"
            )
        self.engine.open(self.clients)
        names = [metric.name for metric in self.task.metrics]
        self._measured = {*names, *(VALIDATION + name for name in names)}

    def step(self, state: State, number: int, rounds: int) -> tuple[State, Row]:
        """Round `number` of `rounds` (from 1): draw a cohort, let the method do its round, evaluate."""
        began = time.perf_counter()
        seed, secret = self.seed.child("round", number), self._private(number)
        ids = self.drawn(number, secret)
        desk = self._desk(state, number)
        due = sorted(each.client for each in desk.window.arrivals) if desk else list(ids)
        row = Row(round=number, cohort=due, batch_norm=self.task.norms.policy or None)
        if desk and self.sampler.latency:
            row.simulated = desk.window.seconds
        largest = Turn(max(ids, default=0), self.task.largest, number, rounds, 1, ids, self.task.largest)
        row.memory = self.method.forecast_compute(largest).memory(self.task.layout.size, self.task.activations)
        if self.tally:
            row.epsilon, account = self.tally.ask(ids), self.tally.account
            promise = account.promise
            row.noise, row.relation, row.colluders = promise.sigma, promise.relation, account.colluders
        who = self.clients.identities
        shared = _Round(
            self.task,
            self.method,
            self.engine,
            self.sampler,
            self.run,
            seed,
            row,
            rounds,
            who,
            secret,
            self.witness,
            desk,
        )
        cohort, self.exhibits = Cohort(ids, shared), shared.exhibits
        try:
            if not due and self.method.min_clients:
                raise BelowQuorum("the draw chose nobody")
            with getattr(self.engine, "launching", nullcontext)():  # an engine may launch steps in a way of its own
                after = self.method.round(state, cohort)
            if problem := _unusable(after):
                row.events.append(f"the result was refused: {problem}; the weights stay as they were")
            else:
                state = after
        except BelowQuorum as error:
            row.events.append(f"below quorum: {error}; the weights stay as they were")
        if desk:
            state = state.put(OUTSTANDING, desk.record())
        row.events += getattr(self.engine, "events", list)()  # an engine may have some of its own
        if number % self.evaluate_every == 0 or number == rounds:
            trained = time.perf_counter()
            row.metrics.update(self.evaluated(state))
            row.evaluating = time.perf_counter() - trained
            if not row.metrics:
                row.events.append("nothing was measured: batch norm layers stay with clients that are elsewhere")
            if self.task.metrics and self.task.primary != ACCURACY:
                row.primary = self.task.primary
        diverged = not math.isfinite(row.metrics.get(LOSS.name, 0))
        for name in [name for name, value in row.metrics.items() if not math.isfinite(value)]:
            value = row.metrics.pop(name)  # no such number in JSON
            undefined = math.isnan(value) and not diverged and name in self._measured
            why = "it is not defined on these records" if undefined else "the run may have diverged"
            row.events.append(f"{name} is {value}: {why}")
        row.seconds = time.perf_counter() - began
        return state, row

    def _desk(self, state: State, number: int) -> Desk | None:
        """What a round takes in where the server does not wait; None where it does."""
        if self.timeline is None:
            return None
        window = self.timeline.window(number)
        return Desk.opened(number, window, self.sampler, self.seed, state.slots.get(OUTSTANDING))

    def evaluated(self, state: State) -> dict[str, float]:
        """The metrics of a state; where batch norm layers stay with the clients, their means over those who have some,
        as far as this process holds the clients' memory."""
        if self.task.norms.policy != "local":
            return trained_task(self.task, state).evaluate(state.weights)
        held = self.clients.memory.entries.values()
        own = [next((e[3] for e in reversed(entries) if e[2] == SLOT), None) for entries in held]
        each = [self.task.at(norms.statistics).evaluate(state.weights) for norms in own if isinstance(norms, Norms)]
        if not each:
            return {}
        return {name: math.fsum(metrics[name] for metrics in each) / len(each) for name in each[0]}

    def drawn(self, number: int, secret: Seed) -> tuple[int, ...]:
        """Who is asked in a round: public, unless being drawn is what differential privacy hides."""
        hidden = self.tally is not None and self.tally.account.everyone
        if hidden:
            return self.sampler.draw(self.task, secret.child("cohort"))
        if self.timeline:
            return self.timeline.window(number).asked
        return self.sampler.of_round(self.task, self.seed, number)

    def exhausted(self, number: int) -> bool:
        """Whether this round would exceed the budget of differential privacy."""
        return self.tally is not None and self.tally.exhausted(self.drawn(number, self._private(number)))

    def _private(self, number: int) -> Seed:
        """The server's private seed of a round."""
        return Seed.private() if self.secret is None else self.secret.child("server", number)


def trained_task(task: Task, state: State) -> Task:
    """The task with the running statistics of a state."""
    norms = state.slots.get(SLOT)
    return task.at(norms.statistics) if isinstance(norms, Norms) else task


def _unusable(state: Record) -> str:
    """What in a state no later round could use: a number that is not finite or out of its field's range."""
    for name, shape in schema.fields(type(state)).items():
        if isinstance(value := getattr(state, name), Tensor):
            low, high = (float(v) for v in torch.aminmax(value))
            if not (shape.low <= low and high <= shape.high):  # NaN is in no range
                return f"{name} reaches from {low:g} to {high:g}, allowed is {shape.low:g} to {shape.high:g}"
    slots = state.slots.values() if isinstance(state, State) else ()
    return next((problem for slot in slots if (problem := _unusable(slot))), "")
