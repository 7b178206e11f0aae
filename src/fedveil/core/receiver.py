"""The server's side of an answer: what came from outside becomes a record that may be used, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedveil.core import message, schema
from fedveil.core.clients import Reply
from fedveil.core.exchange import Exchange
from fedveil.core.ledger import Row
from fedveil.core.message import Answer, Envelope, Question, Refused, Size
from fedveil.core.task import Task


@dataclass
class Receiver:
    """Takes the replies to a question. The first valid one of a client counts, and nothing else changes anything.

    missing: why there is no answer of a client, so far
    """

    method: Exchange
    task: Task
    row: Row
    run: bytes
    questions: Mapping[int, Question]
    serial: int
    missing: dict[int, str]
    answered: set[int] = field(default_factory=set)
    figures: dict[str, list[float]] = field(default_factory=dict)  # what clients measured
    _read: dict[int, tuple[Answer, Mapping[str, Size]]] = field(default_factory=dict)  # with values yet to be checked
    _usable: dict[int, Answer] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many answers wait."""
        return len(self._read) + len(self._usable)

    def take(self, reply: Reply) -> None:
        """Count a reply and read its answer."""
        client = reply.client
        self.row.passes += reply.passes
        self.row.wire_up += reply.wire_up
        self.row.wire_down += reply.wire_down
        for name, value in reply.figures.items():
            self.figures.setdefault(name, []).append(value)
        if client not in self.questions:
            self.row.events.append(f"client {client}: refused: unknown client: it was not asked")
            return
        if size := len(reply):
            self.row.count_up(client, size)
        if client in self._read:
            self._check()
        if client in self.answered:
            self.row.events.append(f"client {client}: refused: duplicate: the first answer counts")
        elif reply.problem:
            self.missing[client] = reply.problem
        else:
            question = self.questions[client]
            sizes = {**self.method.schema(self.task, question, client), **question.sizes()}
            expected = Envelope(self.run, self.row.round, client, self.serial)
            try:
                self._read[client] = read_answer(reply, self.method.reply(question), sizes, expected), sizes
            except Refused as error:
                self.missing[client] = f"refused: {error}"

    def usable(self) -> dict[int, Answer]:
        """Hand over the answers that wait and can be used."""
        self._check()
        usable, self._usable = self._usable, {}
        return usable

    def _check(self) -> None:
        """Hold the values of all answers that were read against their schemas, together."""
        read, self._read = self._read, {}
        problems = schema.check_all([answer for answer, _ in read.values()], [sizes for _, sizes in read.values()])
        for (client, (answer, _)), problem in zip(read.items(), problems, strict=True):
            if problem:
                self.missing[client] = f"refused: {problem}"
                continue
            self._usable[client] = answer
            self.answered.add(client)
            if why := self.missing.pop(client, ""):
                self.row.events.append(f"client {client}: {why}, then it answered")


def read_answer(reply: Reply, kind: type[Answer], sizes: Mapping[str, Size], expected: Envelope) -> Answer:
    """The answer in a reply from outside, of which all but the values is checked. Raises `Refused`."""
    limit, letter = schema.size_limit(kind, sizes), reply.letter
    if letter is None:
        answer, where = message.unframe(reply.frame, {kind.kind: kind}, limit)
    else:
        answer, where = message.opened(letter.contents, letter.kind, {kind.kind: kind}, limit), letter.envelope
    for part in ("run", "client", "round", "serial"):
        found, wanted = getattr(where, part), getattr(expected, part)
        if found != wanted:
            raise Refused(f"wrong {part}", f"{found!r} where {wanted!r} was expected")
    assert isinstance(answer, Answer)
    return answer
