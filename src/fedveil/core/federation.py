"""The loop: a method asks a cohort, round after round, and the ledger counts what it cost.

A method is three functions over explicit records (see `Method`). The server's side of a round is `Cohort`: `ask` is the
only way to a client. The clients' side is in `clients.py`. Between the two lie bytes, carried by an engine that
knows neither.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.clients import Clients, ClientStack, Letter, Reply
from fedveil.core.forecast import Compute, Turn
from fedveil.core.ledger import Ledger, Result, Row, Stage
from fedveil.core.message import Answer, Container, Envelope, Question, Refused, Size, Weights
from fedveil.core.seeds import Seed
from fedveil.core.task import GRADIENTS, RECORD_GRADIENTS, Task
from fedveil.privacy.account import AUTO, Account, Tally
from fedveil.privacy.secagg.identity import Identities
from fedveil.privacy.secagg.protocol import SecureSum, Sum
from fedveil.runs.folder import RunFolder, fingerprint, validate_same


class State(Container, frozen=True):
    """What the server knows between rounds. A method adds fields; `weights` is what is evaluated and published."""

    weights: Weights


class Method:
    """What crosses the wire. Subclasses are frozen dataclasses of hyper-parameters with three functions.

    init_state(task)          -> state    the server's first state
    round(state, cohort)      -> state    the server: ask the cohort, merge what comes back
    handlers[type(question)]  : (stack, question) -> one answer for each client of the stack, in its order

    A subclass that states a `name` is entered in the `registry` and can be used in recipes under it.
    """

    name: ClassVar[str]
    about: ClassVar[About]
    unsupported: ClassVar[Mapping[str, str]] = {}  # why a key that other methods have is none of this one's
    registry: ClassVar[dict[str, type[Method]]] = {}

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            cls.registry[cls.name] = cls

    @property
    def min_clients(self) -> int:
        """The smallest cohort with which a round can work."""
        return 1

    @property
    def reads_rounds(self) -> bool:
        """Whether what a round does depends on how many rounds there are."""
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        """What the model has to allow, by the names in `task.WAYS_OUT`: gradients, with `privacy` those of each record,
        and what the codecs need."""
        codecs = [getattr(self, name, None) for name in ("up", "down")]
        own = (RECORD_GRADIENTS,) if getattr(self, "privacy", None) else (GRADIENTS,)
        return *own, *(need for codec in codecs if codec for need in codec.needs)

    def client_cost(self, task: Task) -> Account | None:
        """What an answer costs a client that makes it private itself; None where it does not."""
        return None

    def account(self, task: Task, cohort: CohortSampler) -> Account | None:
        """What an answer costs in differential privacy; None where none is promised."""
        return self.client_cost(task)

    def init_state(self, task: Task) -> State:
        raise NotImplementedError

    def round(self, state: Any, cohort: Cohort) -> State:
        raise NotImplementedError

    @property
    def handlers(self) -> Mapping[type[Question], Callable[[ClientStack, Any], Sequence[Answer]]]:
        raise NotImplementedError

    def reply(self, question: Question) -> type[Answer]:
        """The kind of answer to `question`; by default what the question itself states."""
        return type(question).reply

    def schema(self, task: Task, question: Question, client: int) -> Mapping[str, Size]:
        """What the dimension names in the answer to `question` stand for; by default the task's own."""
        return task.sizes

    def forecast_messages(self, task: Task, turn: Turn) -> list[Question]:
        """What a client will be asked in a turn, without values; by default every kind of question, once."""
        return [message.blank(kind, task.sizes) for kind in self.handlers]

    def forecast_compute(self, turn: Turn) -> Compute:
        """What the answers to these questions will take; by default nothing worth counting."""
        return Compute()


METHODS = Method.registry
EXHIBITED = 10  # images of a round that are shown
TRIAL = 100.0  # noise from which the noise that suffices is scaled
SAMPLED = 1 << 24  # numbers of a data set that its fingerprint looks at


SUMMED = (
    "proved",
    "with secure: a server that follows the protocol learns the sum over the clients and nothing else about any one; "
    'with secure.server = "malicious" this holds against a server that lies, too.',
)


@dataclass(frozen=True)
class About:
    """What `fedveil describe` says of a method. A privacy word comes with its kind: proved, measured or heuristic."""

    summary: str
    sends: str
    server_sees: str
    network_sees: str
    claims: tuple[tuple[str, str], ...]  # (kind, sentence)
    paper: str


# ---------------------------------------------------------------------------------------------------- the server's side


@dataclass(frozen=True)
class CohortSampler:
    """Who is asked each round, and what goes wrong on the way."""

    size: int = 10
    kind: str = "uniform"  # uniform, weighted (by records), or poisson (each client with probability size / clients)
    quorum: float = 1  # answers needed: a number, or below 1 a share of those asked
    drop: float = 0.0  # probability that a question goes unanswered (simulated)
    latency: float = 0.0  # mean seconds to an answer, exponentially distributed (simulated)
    deadline: float | None = None  # seconds after which an answer is late

    def __post_init__(self) -> None:
        if self.kind not in ("uniform", "weighted", "poisson"):
            raise ValueError(f"cohort.kind is '{self.kind}'; use uniform, weighted or poisson")
        if self.size < 1 or self.quorum <= 0 or not 0 <= self.drop < 1 or self.latency < 0:
            raise ValueError("a cohort needs size >= 1, quorum > 0, 0 <= drop < 1 and latency >= 0")
        if self.deadline is not None and self.deadline <= 0:
            raise ValueError(f"cohort.deadline is {self.deadline:g}; it is in seconds, above 0")

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


class BelowQuorum(Exception):
    """Too few answers: the round ends here and the state stays what it was."""


class NoUsableAnswers(RuntimeError):
    """Round after round without an answer that could be used: the run ends here."""

    @staticmethod
    def after(ledger: Ledger) -> NoUsableAnswers:
        rounds = sum(1 for _ in takewhile(_unanswered, reversed(ledger.rows)))
        told = f"no client answered for {rounds} round{'s' if rounds > 1 else ''}"
        return NoUsableAnswers(f"{told}; the last reasons were: {_grouped(ledger.rows[-1].missing.values())}")


class Answers(Mapping[int, Any]):
    """Answers by client, in the cohort's order, and who is missing and why."""

    def __init__(self, answers: Mapping[int, Answer], missing: Mapping[int, str]) -> None:
        self._answers, self.missing = dict(sorted(answers.items())), dict(sorted(missing.items()))

    def __getitem__(self, client: int) -> Any:
        return self._answers[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def stack(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One field of every answer, stacked: [answers, …]."""
        return message.stack(list(self._answers.values()), name).to(device)


class Engine(Protocol):
    """Where clients live. It carries letters to them and replies back, and knows nothing of methods."""

    def open(self, clients: Clients) -> None: ...

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]: ...

    def close(self) -> None: ...


@dataclass
class _Round:
    """What the asks of one round share."""

    task: Task
    method: Method
    engine: Engine
    sampler: CohortSampler
    run: bytes
    seed: Seed
    row: Row
    rounds: int
    identities: Identities
    secret: Seed
    serial: int = 0
    exhibits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # images, real ones of the same classes


class Cohort:
    """The clients of this round, and the only way to reach them."""

    def __init__(self, ids: tuple[int, ...], shared: _Round) -> None:
        self.ids, self._shared = ids, shared

    @property
    def task(self) -> Task:
        return self._shared.task

    @property
    def method(self) -> Method:
        return self._shared.method

    @property
    def round(self) -> int:
        """The number of this round, from 1."""
        return self._shared.row.round

    @property
    def seed(self) -> Seed:
        """The public seed of this round."""
        return self._shared.seed

    @property
    def secret(self) -> Seed:
        """A private seed of the server for this round."""
        return self._shared.secret

    @property
    def expected(self) -> int:
        """How many clients a round is meant to have: a public number, however many there are."""
        return min(self._shared.sampler.size, len(self.task.clients))

    def __len__(self) -> int:
        return len(self.ids)

    def only(self, ids: Iterable[int]) -> Cohort:
        """The same round with fewer clients."""
        chosen = set(ids)
        if not chosen <= set(self.ids):
            raise ValueError(f"clients {sorted(chosen - set(self.ids))} are not in this cohort")
        return Cohort(tuple(k for k in self.ids if k in chosen), self._shared)

    @property
    def rounds_left(self) -> int:
        """How many rounds come after this one."""
        return self._shared.rounds - self.round

    def reject(self, client: int, why: Refused) -> None:
        """Note that a client's answer, though well formed, cannot be used."""
        self._shared.row.missing[str(client)] = f"refused: {why}"

    def tell(self, sentence: str) -> None:
        """Put what happened into this round's row of the ledger."""
        self._shared.row.events.append(sentence)

    def note(self, **figures: float) -> None:
        """Put figures of the method's own (a cosine, a norm) into this round's row of the ledger."""
        self._shared.row.metrics.update(figures)

    def exhibit(self, name: str, images: Tensor, labels: Tensor) -> None:
        """Let people look at some images [N, channels, height, width] with labels [N, K] beside real ones of the same
        classes, from the test set: in rounds 1, 2, 5, 10, 20, 50 and so on, and the last. Whatever is no image is left
        out."""
        task, first = self.task, images[:EXHIBITED].cpu().float()
        chosen = str(self.round).rstrip("0") in ("1", "2", "5") or not self.rounds_left
        if first.dim() == 4 and len(task.data.input) == 3 and chosen:
            alike = [torch.where(task.test_y == k)[0] for k in labels[:EXHIBITED].argmax(1).tolist()]
            real = [task.test_x[own[i % len(own)]] for i, own in enumerate(alike) if len(own)]
            self._shared.exhibits[name] = first, torch.stack(real or [task.test_x[0]]).cpu()

    def ask(self, question: Question | Mapping[int, Question]) -> Answers:
        """Ask every client, or each client something else. Returns the answers and, by name and reason, who is missing.

        Raises `BelowQuorum` if fewer than the quorum answered.
        """
        answers = self.exchange(question)
        self.require(len(answers), len(answers) + len(answers.missing))
        return answers

    def ask_sum(self, question: Question, how: SecureSum) -> Sum:
        """Ask every client and learn the weighted sum of their answers, and nothing else of them.

        The method enters the question in its `handlers` through `how.stages`. Raises `BelowQuorum` if too few are left.
        """
        from fedveil.privacy.secagg.server import ask_sum

        return ask_sum(self, self._shared.identities, self._shared.run, question, how)

    def counted(self, clients: Iterable[int]) -> None:
        """Note that these clients, of whom some did not answer to the end, are in the round's result all the same."""
        row = self._shared.row
        for client in clients:
            if why := row.missing.pop(str(client), ""):
                row.events.append(f"client {client}: {why}, after what it sent was counted")

    def exchange(self, question: Question | Mapping[int, Question], stage: str = "") -> Answers:
        """What `ask` does, without a quorum; a `stage` of a protocol is counted by itself in the ledger."""
        row = self._shared.row
        before = row.bytes_up, row.bytes_down
        answers = self._exchange(question)
        if stage:
            up, down = row.bytes_up - before[0], row.bytes_down - before[1]
            row.secure.append(Stage(stage, len(answers) + len(answers.missing), len(answers), up, down))
        return answers

    def _exchange(self, question: Question | Mapping[int, Question]) -> Answers:
        shared, task = self._shared, self.task
        questions = question if isinstance(question, Mapping) else dict.fromkeys(self.ids, question)
        if not set(questions) <= set(self.ids):
            raise ValueError(f"clients {sorted(set(questions) - set(self.ids))} are not in this cohort")
        serial, shared.serial = shared.serial, shared.serial + 1
        payloads: dict[int, bytes] = {}
        letters: list[Letter] = []
        missing: dict[int, str] = {}
        for client, q in sorted(questions.items()):
            if id(q) not in payloads:
                message.check(q, {**task.sizes, **q.sizes()})
                payloads[id(q)] = message.pack(q)
            where = Envelope(shared.run, self.round, client, serial)
            letter = Letter(q.kind, where, payloads[id(q)])
            shared.row.count_down(client, len(letter))
            fate = self._fate(client, serial)
            if fate:
                missing[client] = fate
            else:
                letters.append(letter)
        replies = shared.engine.deliver(letters, shared.sampler.deadline) if letters else ()
        answers = self._receive(replies, questions, serial, missing)
        for letter in letters:
            if letter.client not in answers:
                missing.setdefault(letter.client, "late: no answer when the question closed")
        shared.row.missing.update({str(k): reason for k, reason in missing.items()})
        return Answers(answers, missing)

    def require(self, usable: int, asked: int) -> None:
        """Raise `BelowQuorum` if of the clients asked too few gave an answer that can be used."""
        needed = min(self._shared.sampler.needed(len(self._shared.row.cohort)), asked)
        if usable < needed:
            raise BelowQuorum(f"{usable} of {asked} answers can be used, {needed} are needed")

    def _fate(self, client: int, serial: int) -> str:
        """Simulated drop-outs and latency: part of the public randomness, so the same on every engine."""
        sampler = self._shared.sampler
        if not sampler.drop and not sampler.latency:
            return ""
        rng = self.seed.child("client", client, "fate", serial).numpy()
        if rng.random() < sampler.drop:
            return "dropped"
        wait = rng.exponential(sampler.latency) if sampler.latency else 0.0
        return f"late: {wait:.3g} s" if sampler.deadline is not None and wait > sampler.deadline else ""

    def _receive(
        self, replies: Iterable[Reply], questions: Mapping[int, Question], serial: int, missing: dict[int, str]
    ) -> dict[int, Answer]:
        """Check every reply; the first valid one of a client counts, and nothing else changes anything."""
        shared = self._shared
        answers: dict[int, Answer] = {}
        figures: dict[str, list[float]] = {}
        for reply in replies:
            shared.row.passes += reply.passes
            shared.row.wire_up += reply.wire_up
            shared.row.wire_down += reply.wire_down
            for name, value in reply.figures.items():
                figures.setdefault(name, []).append(value)
            if reply.client not in questions:
                shared.row.events.append(f"client {reply.client}: refused: unknown client: it was not asked")
                continue
            if reply.frame:
                shared.row.count_up(reply.client, len(reply.frame))
            if reply.client in answers:
                shared.row.events.append(f"client {reply.client}: refused: duplicate: the first answer counts")
                continue
            if reply.problem:
                missing[reply.client] = reply.problem
                continue
            question = questions[reply.client]
            expected = Envelope(shared.run, self.round, reply.client, serial)
            try:
                sizes = {**shared.method.schema(self.task, question, reply.client), **question.sizes()}
                answers[reply.client] = read_answer(reply.frame, shared.method.reply(question), sizes, expected)
                if reply.client in missing:
                    shared.row.events.append(f"client {reply.client}: {missing.pop(reply.client)}, then it answered")
            except Refused as error:
                missing[reply.client] = f"refused: {error}"
        self.note(**{name: sum(values) / len(values) for name, values in figures.items()})
        return answers


def read_answer(frame: bytes, kind: type[Answer], sizes: Mapping[str, Size], expected: Envelope) -> Answer:
    """A frame from outside -> an answer that may be used. Raises `Refused`."""
    answer, where = message.unframe(frame, {kind.kind: kind}, message.size_limit(kind, sizes))
    for part in ("run", "client", "round", "serial"):
        found, wanted = getattr(where, part), getattr(expected, part)
        if found != wanted:
            raise Refused(f"wrong {part}", f"{found!r} where {wanted!r} was expected")
    message.check(answer, sizes)
    assert isinstance(answer, Answer)
    return answer


# ---------------------------------------------------------------------------------------------------- the loop


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
            state, done = _onto(saved.state, task.device), saved.round
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
    for key in ("privacy", "user_privacy"):
        promise = getattr(method, key, None)
        if promise is not None and promise.noise == AUTO:
            account: Account = _with_noise(method, key, TRIAL).account(task, sampler)
            answers = rounds if account.everyone else _most_asked(task, sampler, rounds, Seed.root(seed))
            settled: Method = _with_noise(method, key, account.least_noise(answers))
            return settled
    return method


def settled_like(method: Method, other: Method) -> Method:
    """The method with the noise of `other` in place of "auto"."""
    for key in ("privacy", "user_privacy"):
        ours, theirs = (getattr(each, key, None) for each in (method, other))
        if ours is not None and theirs is not None and ours.noise == AUTO:
            alike: Method = _with_noise(method, key, theirs.noise)
            return alike
    return method


def _with_noise(method: Any, key: str, noise: float) -> Any:
    return replace(method, **{key: replace(getattr(method, key), noise=noise)})


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


def _unusable(state: State) -> str:
    """What in a state no later round could use: a number that is not finite or out of its field's range."""
    for name, schema in message.fields(type(state)).items():
        if isinstance(value := getattr(state, name), Tensor):
            low, high = (float(v) for v in torch.aminmax(value))
            if not (schema.low <= low and high <= schema.high):  # NaN is in no range
                return f"{name} reaches from {low:g} to {high:g}, allowed is {schema.low:g} to {schema.high:g}"
    return ""


def _skipped(row: Row) -> bool:
    """Whether a round had nobody to ask, or ended without a result."""
    return not row.cohort or any(event.endswith(STAYED) for event in row.events)


def _behind(row: Row) -> bool:
    """Whether most clients are ahead of a server that had to go back to an older checkpoint."""
    ahead = ("refused: wrong round", "refused: wrong stage")
    return 2 * sum(why.startswith(ahead) for why in row.missing.values()) > len(row.cohort)


def _reached(row: Row, target: float | None) -> bool:
    return target is not None and row.metrics.get("accuracy", 0) >= target


def _onto(record: State, device: torch.device) -> State:
    """The same record with its tensors on `device`."""
    moved = {n: v.to(device).clone() for n in record.__struct_fields__ if isinstance(v := getattr(record, n), Tensor)}
    return msgspec.structs.replace(record, **moved)
