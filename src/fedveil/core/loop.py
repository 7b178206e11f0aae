"""The loop: a method asks a cohort, round after round, and the ledger counts what it cost."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.core import schema
from fedveil.core.clients import Clients
from fedveil.core.cohort import BelowQuorum, Cohort, Engine, _Round
from fedveil.core.ledger import Ledger, Result, Row
from fedveil.core.message import Record, moved
from fedveil.core.method import Method, State
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.privacy.account import AUTO, Tally
from fedveil.privacy.secagg.identity import Identities
from fedveil.runs.folder import RunFolder, fingerprint, validate_same

TRIAL = 100.0  # noise from which the noise that suffices is scaled
SAMPLED = 1 << 24  # numbers of a data set that its fingerprint looks at


class NoUsableAnswers(RuntimeError):
    """Round after round without an answer that could be used: the run ends here."""

    @staticmethod
    def after(ledger: Ledger) -> NoUsableAnswers:
        rounds = sum(1 for _ in takewhile(_unanswered, reversed(ledger.rows)))
        told = f"no client answered for {rounds} round{'s' if rounds > 1 else ''}"
        return NoUsableAnswers(f"{told}; the last reasons were: {_grouped(ledger.rows[-1].missing.values())}")


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

    def __post_init__(self) -> None:
        self.clients = Clients(self.method, self.task, self.run, self.seed, self.secret, self.identities)
        self.engine.open(self.clients)

    def step(self, state: State, number: int, rounds: int) -> tuple[State, Row]:
        """Round `number` of `rounds` (from 1): draw a cohort, let the method do its round, evaluate."""
        began = time.perf_counter()
        seed, secret = self.seed.child("round", number), self._private(number)
        ids = self.drawn(number, secret)
        row = Row(round=number, cohort=list(ids))
        if self.tally:
            row.epsilon, account = self.tally.ask(ids), self.tally.account
            promise = account.promise
            row.noise, row.relation, row.colluders = promise.sigma, promise.relation, account.colluders
        who = self.clients.identities
        shared = _Round(self.task, self.method, self.engine, self.sampler, self.run, seed, row, rounds, who, secret)
        cohort, self.exhibits = Cohort(ids, shared), shared.exhibits
        try:
            if not ids and self.method.min_clients:
                raise BelowQuorum("the draw chose nobody")
            after = self.method.round(state, cohort)
            if problem := _unusable(after):
                row.events.append(f"the result was refused: {problem}; the weights stay as they were")
            else:
                state = after
        except BelowQuorum as error:
            row.events.append(f"below quorum: {error}; the weights stay as they were")
        row.events += getattr(self.engine, "events", list)()  # an engine may have some of its own
        if number % self.evaluate_every == 0 or number == rounds:
            row.metrics.update(self.task.evaluate(state.weights))
        for name in [name for name, value in row.metrics.items() if not math.isfinite(value)]:
            row.events.append(f"{name} is {row.metrics.pop(name)}: the run may have diverged")  # no such number in JSON
        row.seconds = time.perf_counter() - began
        return state, row

    def drawn(self, number: int, secret: Seed) -> tuple[int, ...]:
        """The cohort of a round: public, unless being drawn is what differential privacy hides."""
        hidden = self.tally is not None and self.tally.account.everyone
        return self.sampler.draw(self.task, (secret if hidden else self.seed.child("round", number)).child("cohort"))

    def exhausted(self, number: int) -> bool:
        """Whether this round would exceed the budget of differential privacy."""
        return self.tally is not None and self.tally.exhausted(self.drawn(number, self._private(number)))

    def _private(self, number: int) -> Seed:
        """The server's private seed of a round."""
        return Seed.private() if self.secret is None else self.secret.child("server", number)


def run(
    task: Task,
    method: Method,
    *,
    rounds: int = 20,
    cohort: CohortSampler | int = 10,
    seed: int = 0,
    engine: Engine | None = None,
    evaluate_every: int = 1,
    target: float | None = None,
    patience: int = 5,
    folder: RunFolder | Path | str | None = None,
    observer: Callable[[Row], object] | None = None,
    stop: Callable[[], bool] = lambda: False,
    insecure_test_noise: int | None = None,
    identities: Identities | None = None,
) -> Result:
    """Train `task` with `method` and return what came of it and what it cost.

    Where the method's noise is "auto", it is what `settle` finds for these rounds.

    cohort:   how many clients a round, or a `CohortSampler`
    target:   stop when test accuracy reaches it
    patience: stop when so many rounds in a row had no answer that could be used
    folder:   where ledger and checkpoints go; a folder that holds a checkpoint is continued from it
    observer: called with each round's `Row` as it is written
    stop:     asked after each round; True ends the run there
    identities: whose signatures a secure sum accepts; by default those of simulated clients, which prove nothing
    """
    from fedveil.engines.local import LocalEngine

    sampler = cohort if isinstance(cohort, CohortSampler) else CohortSampler(size=cohort)
    engine = LocalEngine() if engine is None else engine
    method = settle(task, method, sampler, rounds, seed)
    if target is not None and not task.scores:
        raise ValueError(
            f"target is {target:g}, but the model's outputs are not class scores, so there is no accuracy; leave it out"
        )
    home = RunFolder(folder) if isinstance(folder, (str, Path)) else folder
    with contextlib.ExitStack() as at_the_end:
        if home:
            at_the_end.callback(home.close)
        saved = home.load() if home else None
        secret = None if insecure_test_noise is None else private_root(insecure_test_noise)
        options: dict[str, Any] = {"run": saved.run} if saved else {}
        options |= {"secret": secret, "identities": identities}
        federation = Federation(task, method, engine, sampler, Seed.root(seed), evaluate_every, **options)
        at_the_end.callback(engine.close)
        state, done = init_state(task, method, sampler), 0
        if home:
            home.decided |= decided(task, method, sampler, seed, rounds, insecure_test_noise)
        if home and saved:
            validate_same(home.path, saved.decided, home.decided)
            state, done = moved(saved.state, task.device), saved.round
            federation.clients.memory.entries = saved.memory
        ledger = home.ledger(done) if home else Ledger()
        if account := method.account(task, sampler):
            federation.tally = Tally(account, home.asking) if home else Tally(account)
            federation.tally.recall(home.asked(done) if home else [])
            ledger.tally = federation.tally
            if home and account.everyone:  # who was drawn is what its ε counts on
                home.hide()
        failed = sum(1 for _ in takewhile(_unanswered, reversed(ledger.rows))) % patience
        stopped = "target" if any(_reached(row, target) for row in ledger.rows[-1:]) else ""
        for number in range(done + 1, rounds + 1):
            stopped = stopped or ("budget" if federation.exhausted(number) else "")
            if stopped:
                break
            state, row = federation.step(state, number, rounds)
            if saved and saved.damaged and number == done + 1:
                told = "; ".join(saved.damaged)
                row.events.append(f"{told} cannot be read: the run goes on from the checkpoint of round {done}")
            if behind := _behind(row):
                row.events.append(f"clients have seen round {number} before; the run goes on with the next one")
            ledger.append(row)
            if home:
                for name, pictures in federation.exhibits.items():
                    home.exhibit(name, number, *pictures)
                home.save(federation.run, number, state, federation.clients.memory.entries)
            if observer:
                observer(row)
            failed = failed + 1 if _unanswered(row) and not behind else 0
            if failed:
                why = _grouped(row.missing.values())
                warnings.warn(f"no client answered in round {number}: {why}", RuntimeWarning, stacklevel=2)
            if failed >= patience:
                raise NoUsableAnswers.after(ledger)
            stopped = "target" if _reached(row, target) else "interrupt" if stop() else ""
        if learned_nothing(ledger):
            warnings.warn(nothing_learned(ledger), RuntimeWarning, stacklevel=2)
        return Result(method.name, state.weights.cpu(), ledger, task, stopped or "rounds")


def settle(task: Task, method: Method, cohort: CohortSampler | int, rounds: int, seed: int = 0) -> Method:
    """The method with a number in place of noise "auto": the least with which all rounds stay within the budget.

    It depends on how often the client that is drawn most often will be asked, which the seed decides.
    """
    sampler = cohort if isinstance(cohort, CohortSampler) else CohortSampler(size=cohort)
    if method.promise is None or method.promise.noise != AUTO:
        return method
    account = method.with_noise(TRIAL).account(task, sampler)
    assert account
    answers = rounds if account.everyone else _most_asked(task, sampler, rounds, Seed.root(seed))
    return method.with_noise(account.least_noise(answers))


def settled_like(method: Method, other: Method) -> Method:
    """The method with the noise of `other` in place of "auto"."""
    ours, theirs = method.promise, other.promise
    if ours is None or theirs is None or ours.key != theirs.key or ours.noise != AUTO:
        return method
    return method.with_noise(theirs.noise)


def _most_asked(task: Task, cohort: CohortSampler, rounds: int, seed: Seed) -> int:
    """How often the client that is drawn most often is asked."""
    drawn = Counter(k for n in range(1, rounds + 1) for k in cohort.draw(task, seed.child("round", n, "cohort")))
    return max(drawn.values(), default=1)


def decided(
    task: Task, method: Method, cohort: CohortSampler, seed: int, rounds: int, noise: int | None
) -> dict[str, bytes]:
    """Fingerprints of what decides a run, by name: one that is resumed must share them."""
    data, sample = task.data, max(1, task.data.x.numel() // SAMPLED)
    records = [data.x.reshape(-1)[::sample], data.y, list(data.x.shape)]
    return {
        "method": fingerprint(method),
        "model": fingerprint([(layer.name, layer.start, layer.stop) for layer in task.layout.layers]),
        "data": fingerprint(*records, data.classes, task.loss),
        "split": fingerprint(task.clients.sizes, task.largest),
        "cohort": fingerprint(cohort),
        "seed": fingerprint(seed, noise),
    } | ({"number of rounds": fingerprint(rounds)} if method.reads_rounds else {})


def private_root(number: int) -> Seed:
    """The root of what should be private, fixed for a test."""
    return Seed.root(number).child("insecure test noise")


def _grouped(reasons: Iterable[str]) -> str:
    """Reasons in one sentence; of those that differ in their numbers only, the first and how many there are."""
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        alike.setdefault(re.sub(r"-?\d[\d.e+-]*", "#", reason), []).append(reason)
    return ", ".join(same[0] if len(same) == 1 else f"{len(same)} × {same[0]}" for same in alike.values())


def init_state(task: Task, method: Method, cohort: CohortSampler) -> State:
    """The state before the first round. A ValueError says what does not suit the task or the cohort."""
    largest = len(task.clients) if cohort.kind == "poisson" else min(cohort.size, len(task.clients))
    if largest < method.min_clients:
        raise ValueError(
            f"{method.name} with these settings needs at least {method.min_clients} clients per round, but a round has "
            f"at most {largest}; raise cohort.size"
        )
    if account := method.account(task, cohort):
        account.validate()
    state = method.init_state(task)
    for operation in method.needs:
        task.require(operation, method.name)
    return state


def learned_nothing(ledger: Ledger) -> bool:
    """Whether there were rounds and no answer could be used in any of them."""
    return bool(ledger.rows) and all(_unanswered(row) or _skipped(row) for row in ledger.rows)


NOTHING = "nothing was learned"
STAYED = "the weights stay as they were"  # the last words of the event of a round without a result


def nothing_learned(ledger: Ledger) -> str:
    """The sentence about such a run."""
    rounds, last = len(ledger.rows), ledger.rows[-1]
    why = _grouped(last.missing.values()) or "; ".join(last.events)
    return f"{NOTHING}: no answer could be used in {rounds} round{'s' if rounds > 1 else ''}; the last reasons: {why}"


def _unanswered(row: Row) -> bool:
    return bool(row.cohort) and len(row.missing) == len(row.cohort)


def _unusable(state: Record) -> str:
    """What in a state no later round could use: a number that is not finite or out of its field's range."""
    for name, shape in schema.fields(type(state)).items():
        if isinstance(value := getattr(state, name), Tensor):
            low, high = (float(v) for v in torch.aminmax(value))
            if not (shape.low <= low and high <= shape.high):  # NaN is in no range
                return f"{name} reaches from {low:g} to {high:g}, allowed is {shape.low:g} to {shape.high:g}"
    slots = state.slots.values() if isinstance(state, State) else ()
    return next((problem for slot in slots if (problem := _unusable(slot))), "")


def _skipped(row: Row) -> bool:
    """Whether a round had nobody to ask, or ended without a result."""
    return not row.cohort or any(event.endswith(STAYED) for event in row.events)


def _behind(row: Row) -> bool:
    """Whether most clients are ahead of a server that had to go back to an older checkpoint."""
    ahead = ("refused: wrong round", "refused: wrong stage")
    return 2 * sum(why.startswith(ahead) for why in row.missing.values()) > len(row.cohort)


def _reached(row: Row, target: float | None) -> bool:
    return target is not None and row.metrics.get("accuracy", 0) >= target
