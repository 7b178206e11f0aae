"""The clients' side of the secure sum: what a client gives away, and above all what it refuses to.

Its secrets are made anew for every round by the operating system and forgotten with it. Each stage is answered once, in
order. Only a client that has not unmasked in this round begins anew when asked to (a server that was killed comes back
and asks again), with other secrets, and then masks the answer to the same question only.

Nothing that a client does at the masked stage depends on its records in a way that the server can see. Where there is
no vector to mask, because training failed or gave a value that is no number, it masks zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedveil.core import message, schema
from fedveil.core.exchange import Handler
from fedveil.core.message import Answer, Question, Refused, Slots
from fedveil.core.refused import ABOUT_QUESTIONS
from fedveil.core.stack import ClientStack
from fedveil.privacy import skellam
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.checks import check_memory
from fedveil.privacy.secagg.kept import BASIS, NOTE, OVER, PENDING
from fedveil.privacy.secagg.masks import FixedPoint, Vector
from fedveil.privacy.secagg.party import Keys, Party, Secrets
from fedveil.privacy.secagg.records import (
    SEALED,
    Advertise,
    Advertised,
    Agree,
    Agreed,
    Deal,
    Dealt,
    Mask,
    Masked,
    Share,
    Shared,
    Unmask,
    Unmasked,
    rows,
    tensor,
)
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.privacy.secagg.shamir import SHARE

_log = logging.getLogger("fedveil")


@dataclass(frozen=True)
class Summand:
    """Answers to the protocol's questions.

    sums: for each sum of a round, in order, the method's questions asked at the masked stage, and the type of answers
    """

    how: SecureSum
    sums: Sequence[tuple[Mapping[type[Question], Handler], type[Answer]]]

    def _sum(self, stack: ClientStack) -> tuple[Mapping[type[Question], Handler], type[Answer]]:
        """The sum that the stack is at."""
        done: set[int] = {note.get(OVER, 0) for note in stack.notes}
        if len(done) > 1:  # each client is asked again by itself
            raise Refused("wrong stage", f"clients {list(stack.clients)} are not at the same sum of the round")
        return self.sums[min(done.pop(), len(self.sums) - 1)]

    def _basis(self, note: Mapping[str, Any]) -> str:
        """The note of what was masked in the sum that a client is at."""
        done = note.get(OVER, 0)
        return f"{BASIS} {done}" if done else BASIS

    def _party(self, stack: ClientStack) -> Party:
        return Party(self.how, stack.run, stack.round, stack.seed, stack.identities)

    def advertise(self, stack: ClientStack, question: Advertise) -> list[Advertised]:
        answers, notes = [], []
        for client, note in zip(stack.clients, stack.notes, strict=True):
            number: int = note.get(OVER, 0)
            if number >= len(self.sums) or question.number < number:
                raise Refused("wrong stage", f"client {client} has unmasked a sum in round {stack.round}")
            if question.number > number:
                raise Refused("wrong stage", f"client {client} is at sum {number} of the round, not {question.number}")
            note.pop(PENDING, None)
            kept, keys = self._party(stack).advertise(client, number)
            answers.append(Advertised(*(tensor(part[0]) for part in (keys.channel, keys.mask, keys.signatures))))
            notes.append(kept)
        return self._noted(stack, notes, answers)

    def share(self, stack: ClientStack, question: Share) -> list[Shared]:
        party, flat_keys = self._party(stack), [t.numpy().tobytes() for t in (question.channel, question.mask)]
        listed = party.listed(question.ids, question.quorum, *flat_keys)
        keys = Keys(rows(question.channel), rows(question.mask), rows(question.signatures))
        answers, notes = [], []
        for client, kept in zip(stack.clients, self._kept(stack, "keys"), strict=True):
            after, sealed, marks, mark = party.share(client, kept, listed, keys)
            answers.append(
                Shared(tensor(b"".join(sealed), SEALED), tensor(b"".join(marks), len(marks[0])), tensor(mark))
            )
            notes.append(after)
        return self._noted(stack, notes, answers)

    def deal(self, stack: ClientStack, question: Deal) -> list[Dealt]:
        """Open what neighbours sealed. Who cannot open a share says so before anybody masks, and has none to reveal."""
        party, sealed, marks = self._party(stack), rows(question.sealed), rows(question.marks)
        answers, notes = [], []
        for client, kept in zip(stack.clients, self._kept(stack, "shares"), strict=True):
            after, complaints = party.deal(client, kept, question.ids, sealed, marks)
            answers.append(Dealt(complaints))
            notes.append(after)
        return self._noted(stack, notes, answers)

    def mask(self, stack: ClientStack, question: Mask) -> list[Masked]:
        handlers, answer = self._sum(stack)
        table = {kind.kind: kind for kind in handlers}
        if question.asked not in table:
            if any(question.asked == kind.kind for others, _ in self.sums for kind in others):
                told = f"questions of kind {question.asked} belong to another sum of round {stack.round}"
                raise Refused("wrong stage", told)
            raise Refused("wrong kind", f"answers to questions of kind {question.asked} are not summed")
        party, all_kept = self._party(stack), self._kept(stack, "dealt")
        for client, kept in zip(stack.clients, all_kept, strict=True):
            party.check_dealt(client, kept, question.ids)
        payload = question.question.numpy().data
        inner = message.unpack(payload, table[question.asked])
        schema.check(inner, {**stack.sizes, **inner.sizes()})
        check_memory(stack)
        bases = stack.basis(inner.kind, payload)
        for client, note, basis in zip(stack.clients, stack.notes, bases, strict=True):
            if note.get(self._basis(note), basis) != basis:
                told = f"client {client} has masked the answer to another question in round {stack.round}"
                raise Refused("wrong stage", told)
        given, answers, notes = self._given(stack, handlers[type(inner)], inner), [], []
        for i, (client, kept) in enumerate(zip(stack.clients, all_kept, strict=True)):
            fixed = self.how.fixed_point(len(kept.ids), kept.quorum, stack.task.sizes, answer)
            size = len(flat(given[i])) if given else question.elements - 2
            if (size + 2, fixed.wide) != (question.elements, question.wide):
                raise Refused("wrong shape", f"{question.elements} elements were asked for, there are {size + 2}")
            vector = self._encoded(stack, i, fixed, given[i] if given else None, size)
            after = party.mask(client, kept, bases[i], question, vector)
            answers.append(Masked(torch.from_numpy(vector.view(np.dtype(f"i{vector.itemsize}"))), tensor(after.asked)))
            notes.append(after)
        for i, (note, basis) in enumerate(zip(stack.notes, bases, strict=True)):
            note[self._basis(note)] = basis
            note.update({PENDING: Slots(slots)} if (slots := stack.kept_by(i)) else {})
        stack.kept = {}
        return self._noted(stack, notes, answers)

    def _given(self, stack: ClientStack, handler: Handler, inner: Question) -> Sequence[Answer]:
        """The clients' own answers; nothing where they fail, which is nobody else's business."""
        try:
            return handler(stack, inner)
        except Exception as error:
            told = isinstance(error, Refused) and error.reason in ABOUT_QUESTIONS
            if told or stack.debug or len(stack) > 1:  # of a stack that fails, each client is asked again
                raise
            stack.kept = {}
            self._zeroed(stack, 0, error)
            return ()

    def _encoded(self, stack: ClientStack, i: int, fixed: FixedPoint, answer: Answer | None, size: int) -> Vector:
        """A client's elements before they are masked, with its share of the noise."""
        weight = 1 if fixed.heaviest == 1 else min(int(stack.rows.counts[i]), fixed.heaviest)
        noise, vector = self.how.noise, fixed.zeros(size, weight)
        if answer is not None:
            norm = skellam.rounded(fixed.half, size) if noise else None
            draw = stack.seeds("rounding")[i].numpy()
            try:
                vector = fixed.encode(flat(answer), getattr(answer, "records", 1), draw, norm)
            except Refused as error:
                self._zeroed(stack, i, error)
        if noise:
            key = masks.derive(stack.secrets("sum noise")[i].key, b"fedveil sum noise")
            vector[:-2] += skellam.draw(key, fixed.variance, size).astype(fixed.dtype)
        return vector

    def _zeroed(self, stack: ClientStack, i: int, why: Exception) -> None:
        """Tell whoever runs this client, and a simulation's ledger."""
        told = f"client {stack.clients[i]} masks zeros in round {stack.round}: {type(why).__name__}: {why}"
        _log.warning(told, exc_info=why if not isinstance(why, Refused) else None)
        masked = stack.figures.get("zeroed", [0.0] * len(stack))
        stack.figures["zeroed"] = [1.0 if k == i else value for k, value in enumerate(masked)]

    def agree(self, stack: ClientStack, question: Agree) -> list[Agreed]:
        party, answers, notes = self._party(stack), [], []
        for client, kept in zip(stack.clients, self._kept(stack, "masked"), strict=True):
            after, signature = party.agree(client, kept, question.alive)
            answers.append(Agreed(tensor(signature)))
            notes.append(after)
        return self._noted(stack, notes, answers)

    def unmask(self, stack: ClientStack, question: Unmask) -> list[Unmasked]:
        """Reveal shares, and remember what the masked vector left to remember: of a sum that is never unmasked nothing
        stays."""
        last = "agreement" if self.how.server == "malicious" else "masked"
        party, signatures, answers = self._party(stack), question.signatures, []
        said = question.alive, question.gone, question.holders, question.signers
        for client, kept in zip(stack.clients, self._kept(stack, last), strict=True):
            shares = party.unmask(client, kept, *said, None if signatures is None else rows(signatures))
            answers.append(Unmasked(tensor(b"".join(shares), SHARE)))
        pending = [note.pop(PENDING, Slots()) for note in stack.notes]
        for part in {part for slots in pending for part in slots}:
            stack.remember(part, [slots.get(part) for slots in pending])
        for note in stack.notes:
            note[OVER] = note.get(OVER, 0) + 1
        return self._noted(stack, [Secrets("unmask") for _ in answers], answers)

    def _kept(self, stack: ClientStack, stage: str) -> list[Secrets]:
        """What each client keeps after `stage`, which must be the last one it answered."""
        kept: list[Secrets] = stack.recall(NOTE)
        for client, secret in zip(stack.clients, kept, strict=True):
            if secret.stage != stage:
                raise Refused("wrong stage", f"client {client} is at '{secret.stage}', the question follows '{stage}'")
        return kept

    def _noted(self, stack: ClientStack, notes: Sequence[Secrets], answers: list[Any]) -> list[Any]:
        """Keep notes once the whole stack has answered: of a stack that fails, each client is asked again."""
        for note, secret in zip(stack.notes, notes, strict=True):
            note[NOTE] = secret
        return answers


def flat(answer: Answer) -> NDArray[np.float32]:
    """All tensors of an answer as one vector."""
    parts = [getattr(answer, name).reshape(-1) for name in schema.fields(type(answer))]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).detach().cpu().float().numpy()


def stages(
    how: SecureSum, *sums: tuple[Mapping[type[Question], Handler], type[Answer]]
) -> dict[type[Question], Handler]:
    """A client's answers to the protocol's questions.

    sums: for each sum of a round, in order, the method's questions whose answers are summed, and the answers' type

    They are answered within the secure sum only, so a server cannot ask them in the clear.
    """
    summand = Summand(how, sums)
    return {
        Advertise: summand.advertise,
        Share: summand.share,
        Deal: summand.deal,
        Mask: summand.mask,
        Agree: summand.agree,
        Unmask: summand.unmask,
    }
