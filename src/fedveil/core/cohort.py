"""The server's side of a round: `Cohort.ask` is the only way to a client.

The clients' side is in `clients.py`. Between the two lie bytes, carried by an engine that knows neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from msgspec.structs import replace as with_fields
from torch import Tensor

from fedveil.core import message, schema
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.exchange import Exchange
from fedveil.core.identity import Identities
from fedveil.core.ledger import Row, Stage
from fedveil.core.loose import Loose
from fedveil.core.message import Answer, Envelope, Question, Refused
from fedveil.core.outstanding import Asked, Desk
from fedveil.core.receiver import Receiver
from fedveil.core.sampling import CohortSampler, Fate
from fedveil.core.seeds import Seed
from fedveil.core.task import Task

EXHIBITED = 10  # images of a round that are shown


class BelowQuorum(Exception):
    """Too few answers: the round ends here and the state stays what it was."""


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
        return schema.stack(list(self._answers.values()), name).to(device)


class Engine(Protocol):
    """Where clients live. It carries letters to them and replies back, and knows nothing of methods."""

    def open(self, clients: Clients) -> None: ...

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]: ...

    def close(self) -> None: ...


class Witness(Protocol):
    """Keeps messages of a round, both ways."""

    def overhear(self, letters: Sequence[Letter], replies: Iterable[Reply]) -> Iterable[Reply]:
        """The same replies, after they and the letters that they answer have been noted."""


@dataclass
class _Round:
    """What the asks of one round share."""

    task: Task
    method: Exchange
    engine: Engine
    sampler: CohortSampler
    run: bytes
    seed: Seed
    row: Row
    rounds: int
    identities: Identities
    secret: Seed
    witness: Witness | None = None
    desk: Desk | None = None  # of a server that does not wait
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
    def method(self) -> Exchange:
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
    def run(self) -> bytes:
        """The number of the run, to which signatures are bound."""
        return self._shared.run

    @property
    def identities(self) -> Identities:
        """Whose signatures count."""
        return self._shared.identities

    @property
    def expected(self) -> int:
        """How many clients a round is meant to have: a public number, however many there are."""
        return min(self._shared.sampler.size, len(self.task.clients))

    @property
    def buffered(self) -> bool:
        """Whether the server does not wait: the answers of a round (`arrivals`) may be to questions of earlier ones."""
        return self._shared.desk is not None

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
        desk = self._shared.desk
        if desk and not desk.taken:  # it was asked just now, and its turn is over when its answer would have come
            desk.hold(client, 0, None, f"refused: {why}")
        else:
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

        Raises `BelowQuorum` if fewer than the quorum answered; not where the server does not wait, whose quorum is of
        the answers that arrive.
        """
        answers, desk = self.exchange(question), self._shared.desk
        if desk is None:
            self.require(len(answers), len(answers) + len(answers.missing))
            return answers
        for client, why in answers.missing.items():
            desk.hold(client, 0, None, why)
        return answers

    def arrivals(
        self,
        question: Question | Mapping[int, Question],
        kind: type[Answer],
        at: Tensor | None = None,
        most: int | None = None,
    ) -> Iterator[tuple[Asked, Answers]]:
        """Ask, and take this round's answers of a kind, in batches of at most `most`, each with what it is about.

        Where the server waits for its cohort, they are the answers to this question. Where it does not, they are those
        that arrive in this round, oldest first, and the server keeps the weights `at` [d] that this question is about
        until the answers to it have arrived.
        """
        desk = self._shared.desk
        if desk is None:
            for answers in self.batches(question, most):
                yield Asked(self.round, self.seed), answers
            return
        self._post(desk, question)
        if at is not None:
            desk.versions[self.round] = at
        for asked, found in desk.take(self._shared.row, kind).items():
            ids = list(found)
            for chosen in (ids[i : i + (most or len(ids))] for i in range(0, len(ids), most or len(ids))):
                yield desk.about(asked), Answers({k: found[k] for k in chosen}, {})

    def _post(self, desk: Desk, question: Question | Mapping[int, Question]) -> None:
        """Ask, and hold the answers. What clients send, and why they fail, is counted when it arrives."""
        row = self._shared.row
        own = replace(self._shared, row=with_fields(row, up={}, missing={}))
        (answers,) = Cohort(self.ids, own).batches(question)
        self._shared.serial = own.serial
        row.passes, row.wire_up, row.wire_down = own.row.passes, own.row.wire_up, own.row.wire_down
        for client, answer in [*answers.items(), *dict.fromkeys(answers.missing).items()]:
            desk.hold(client, own.row.up.get(str(client), 0), answer, answers.missing.get(client, ""))

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
        (answers,) = self.batches(question)
        if stage:
            up, down = row.bytes_up - before[0], row.bytes_down - before[1]
            row.secure.append(Stage(stage, len(answers) + len(answers.missing), len(answers), up, down))
        return answers

    def batches(self, question: Question | Mapping[int, Question], most: int | None = None) -> Iterator[Answers]:
        """Ask as `exchange` does. The answers come in batches of at most `most`, as the engine gives them; without
        `most` they are one batch. Who is missing is known with the last batch."""
        shared = self._shared
        questions = question if isinstance(question, Mapping) else dict.fromkeys(self.ids, question)
        if not set(questions) <= set(self.ids):
            raise ValueError(f"clients {sorted(set(questions) - set(self.ids))} are not in this cohort")
        serial, shared.serial = shared.serial, shared.serial + 1
        missing: dict[int, str] = {}
        letters = self._letters(questions, serial, missing)
        replies: Iterable[Reply] = shared.engine.deliver(letters, shared.sampler.deadline) if letters else ()
        if shared.witness:
            replies = shared.witness.overhear(letters, replies)
        if most is None or len(letters) <= most:
            replies, most = sorted(replies, key=lambda reply: reply.client), len(questions) + 1
        receiver = Receiver(shared.method, self.task, shared.row, shared.run, questions, serial, missing)
        for reply in replies:
            receiver.take(reply)
            if len(receiver) >= most:
                yield Answers(receiver.usable(), {})
        rest = receiver.usable()
        for letter in letters:
            if letter.client not in receiver.answered:
                missing.setdefault(letter.client, "late: no answer when the question closed")
        if shared.desk is None:
            shared.row.missing.update({str(k): reason for k, reason in missing.items()})
        self.note(**{name: sum(values) / len(values) for name, values in receiver.figures.items()})
        yield Answers(rest, missing)

    def _letters(self, questions: Mapping[int, Question], serial: int, missing: dict[int, str]) -> list[Letter]:
        """The questions on their way, without those of clients that drop out."""
        shared, letters, waited = self._shared, list[Letter](), 0.0
        packed: dict[int, bytes | Loose] = {}
        loose = getattr(shared.engine, "wire", "bytes") == "memory"
        for client, q in sorted(questions.items()):
            if id(q) not in packed:
                schema.check(q, {**shared.method.question_sizes(self.task), **q.sizes()})
                packed[id(q)] = message.loose(q) if loose else message.pack(q)
            letter = Letter(q.kind, Envelope(shared.run, self.round, client, serial), packed[id(q)])
            shared.row.count_down(client, len(letter))
            fate = self._fate(client, serial)
            waited = max(waited, fate.seconds)
            if fate.why:
                missing[client] = fate.why
            else:
                letters.append(letter)
        if shared.sampler.latency and shared.desk is None:
            shared.row.simulated = (shared.row.simulated or 0.0) + waited
        return letters

    def require(self, usable: int, asked: int) -> None:
        """Raise `BelowQuorum` if of the clients asked too few gave an answer that can be used."""
        due = len(self._shared.row.cohort)
        asked = due if self.buffered else asked
        needed = min(self._shared.sampler.needed(due), asked)
        if usable < needed:
            raise BelowQuorum(f"{usable} of {asked} answers can be used, {needed} are needed")

    def _fate(self, client: int, serial: int) -> Fate:
        """Simulated drop-outs and latency: part of the public randomness, so the same on every engine. Where the server
        does not wait, all questions of a turn share one fate."""
        return self._shared.sampler.fate(self.seed, client, 0 if self.buffered else serial)
