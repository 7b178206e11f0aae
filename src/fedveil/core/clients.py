"""The clients' side: a stack answers one question together, and what each client remembers.

Every engine uses `Clients`: in simulation it holds all of them, in a deployment a stack of one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedveil.core import message, schema
from fedveil.core.account import Account
from fedveil.core.exchange import Exchange
from fedveil.core.identity import Identities, simulated
from fedveil.core.loose import Loose
from fedveil.core.memory import Memory
from fedveil.core.message import Envelope, Refused
from fedveil.core.refused import ABOUT_QUESTIONS
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task

_log = logging.getLogger("fedveil")


@dataclass(frozen=True)
class Letter:
    """A record on its way to or from one client: as bytes or, within a process, as it is (`Loose`).

    Letters that share their contents are one broadcast.
    """

    kind: int
    envelope: Envelope
    contents: bytes | Loose

    @property
    def client(self) -> int:
        return self.envelope.client

    @property
    def payload(self) -> bytes:
        """The contents as bytes."""
        return self.contents.payload if isinstance(self.contents, Loose) else self.contents

    @property
    def frame(self) -> bytes:
        """The bytes that travel."""
        return message.prefix(self.kind, self.envelope) + self.payload

    @staticmethod
    def read(frame: bytes) -> Letter:
        """A letter from the bytes that travelled. Raises `Refused`."""
        return Letter(*message.envelope(frame), frame[message.PREFIX_BYTES :])

    def __len__(self) -> int:
        return message.PREFIX_BYTES + len(self.contents)


@dataclass(frozen=True)
class Reply:
    """What came back from (or of) a client: an answer, as a frame or within a process as a letter, or the reason why
    there is none."""

    client: int
    frame: bytes = b""
    problem: str = ""
    passes: int = 0  # records run forward and backward for this reply's stack, known in simulation only
    figures: Mapping[str, float] = field(default_factory=dict)  # what the client measured, known in simulation only
    wire_up: int = 0  # bytes of the engine's own message around the frame
    wire_down: int = 0  # and of the one around the question
    truth: Mapping[str, Tensor] = field(default_factory=dict)  # what it is made from, where an audit asks for it
    letter: Letter | None = None  # of a client that was asked by a letter without bytes

    def __len__(self) -> int:
        """The bytes of the answer."""
        return len(self.frame) if self.letter is None else len(self.letter)


class Unanswered(Exception):
    """There is no answer, for a reason that may depend on records and is therefore in the client's own log only."""

    def __init__(self) -> None:
        super().__init__("the client gives no answer; its own log says why")


def _about_question(error: Exception) -> bool:
    return isinstance(error, Refused) and error.reason in ABOUT_QUESTIONS


class Clients:
    """Clients in one place: reads letters, lets the method answer them, writes replies. Every engine uses it."""

    def __init__(
        self,
        method: Exchange,
        task: Task,
        run: bytes,
        seed: Seed,
        secret: Seed | None = None,
        identities: Identities | None = None,
    ) -> None:
        self.method, self.task, self.run, self.seed = method, task, run, seed
        self.secret = secret  # fixed in tests only; otherwise every question has a fresh one
        self.identities = identities or simulated(seed)
        self.memory = Memory()
        self.notes: dict[int, dict[str, Any]] = {}
        self.round = 0
        self.debug = False
        self.witnessed = False  # whether replies tell what they are made from; in this process only
        self.discreet = False  # whether a failure that may depend on records is told in one constant sentence
        self.persist: Callable[[], object] = lambda: None  # called when something was charged; where there is a disk
        self._charged: dict[tuple[int, int, int], int] = {}  # of the deliveries in progress
        self._opening = threading.Lock()  # stacks are answered beside each other, and one of them is the first

    def answer(self, letters: Sequence[Letter], again: bool = False) -> list[Reply]:
        """Answer letters that share one payload, as one stack. An exception concerns the stack, not one client.

        again: these letters were part of a stack that failed
        """
        first = letters[0]
        if not again:
            for letter in letters:
                self._charged.pop((letter.client, letter.envelope.round, letter.envelope.serial), None)
        table = {q.kind: q for q in self.method.handlers}
        for letter in letters:
            if letter.envelope.run != self.run:
                raise Refused("wrong run", "the question is of another run")
            if letter.client >= len(self.task.clients):
                raise Refused("unknown client", f"there is no client {letter.client} here")
        if first.kind not in table:
            raise Refused("wrong kind", f"{self.method.name} has no question of kind {first.kind}")
        question = message.unpack(first.contents, table[first.kind])
        sizes = self.method.question_sizes(self.task)
        schema.check(question, {**sizes, **question.sizes()})
        self._open_round(first.envelope.round)
        round_, serial = first.envelope.round, first.envelope.serial
        ids = tuple(letter.client for letter in letters)
        stack = ClientStack(
            self.task,
            ids,
            round_,
            self.seed.child("round", round_),
            Seed.private() if self.secret is None else self.secret.child(round_, serial),
            [self.memory.before(k, round_, serial) for k in ids],
            [self.notes.setdefault(k, {}) for k in ids],
            till=lambda account, number: self._charge(ids, (round_, serial), account, number),
            run=self.run,
            identities=self.identities,
            debug=self.debug,
            sizes=sizes,
            witnessed=self.witnessed,
        )
        try:
            with stack.followed(first):
                answers = self.method.handlers[type(question)](stack, question)
            own = [{**self.method.schema(self.task, question, k), **question.sizes()} for k in ids]
            for problem in filter(None, schema.check_all(answers, own)):
                raise problem
        except Exception as error:
            if len(letters) > 1 or self.debug or not (self.discreet or stack.charged) or _about_question(error):
                raise
            _log.warning("client %s gives no answer in round %s", ids[0], round_, exc_info=error)
            raise Unanswered from None
        if self.witnessed and "rows" in vars(stack):  # somebody looked at records
            stack.truth.setdefault("records", [torch.from_numpy(own) for own in stack.rows.indices])
        replies = []
        for i, (letter, answer) in enumerate(zip(letters, answers, strict=True)):
            figures = {name: values[i] for name, values in stack.figures.items()}
            told: dict[str, Any] = {"passes": stack.passes if i == 0 else 0, "figures": figures}
            if self.witnessed:
                told["truth"] = {name: rows[i].detach().cpu().clone() for name, rows in stack.truth.items()}
            if isinstance(first.contents, Loose):  # asked without bytes, it answers without
                told["letter"] = Letter(answer.kind, letter.envelope, message.loose(answer))
            else:
                told["frame"] = message.frame(answer, letter.envelope)
            replies.append(Reply(letter.client, **told))
        for i, client in enumerate(ids):
            if slots := stack.kept_by(i):
                self.memory.keep(client, round_, serial, slots)
        return replies

    def _charge(self, ids: Sequence[int], question: tuple[int, int], account: Account, number: int) -> None:
        """Enter the n-th charge of a question for each client. A stack that failed is asked again in halves: that is
        the same delivery, and costs nothing more."""
        with self._opening:
            due = [k for k in ids if self._charged.get((k, *question), 0) < number]
            for k in due:
                account.allow(self.memory.spent(k, account.unit))
            for k in due:
                self.memory.charge(k, self.run, account)
                self._charged[k, *question] = number
        if due:
            self.persist()

    @staticmethod
    def problem(error: Exception) -> str:
        """What the ledger says of a client whose answer raised `error`."""
        sentence = " ".join(str(error).split())[:300]
        if isinstance(error, Unanswered):
            return f"failed: {sentence}"
        return f"refused: {sentence}" if isinstance(error, Refused) else f"failed: {type(error).__name__}: {sentence}"

    def _open_round(self, round_: int) -> None:
        with self._opening:
            if round_ < self.round:
                raise Refused("wrong round", f"round {round_} is over, round {self.round} has begun")
            if round_ > self.round:
                self.notes, self.round, self._charged = {}, round_, {}
