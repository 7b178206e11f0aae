"""Codes that are averaged as they are and decoded once: the cohort agrees on a scale, then sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedveil.codecs.base import Codec, decodable
from fedveil.core import message, schema
from fedveil.core.cohort import Answers, Cohort
from fedveil.core.message import Answer, Question, Refused
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.privacy.secagg.protocol import SecureSum
from fedveil.train.aggregators import clamped

SPREAD = 500.0  # how many times the median a magnitude may be: clients weight by their records, which differ much


@message.kind(24)
class Magnitude(Answer, frozen=True):
    """The largest magnitude in what a client will send."""

    largest: Annotated[float, Meta(ge=0, le=1e6)]


@message.kind(25)
class Send(Question, frozen=True):
    """Encode what you trained at this scale, with the code of this digest."""

    reply = Answer  # the codec's payload
    scale: Annotated[float, Meta(ge=0, le=1e9)]
    digest: bytes = bytes(8)


class CodeSpace(Codec):
    """A codec whose payloads are averaged as they are and decoded once, at a scale that the cohort agrees on first.

    agree(largest, round) -> scale    the server: from the largest magnitude of each client [m]
    at(scale, seed)       -> Tuned    both sides: the codec of this round

    A payload has a field `share` [1]: the weight that was put on its vector, which the mean is divided by afterwards.
    All its tensors add up, so their sum over the clients is all that a server needs.
    """

    server_can_encode: ClassVar[bool] = False  # a mean of one is no mean

    @property
    def digest(self) -> bytes:
        """8 bytes that tell the code from any other that would not decode it."""
        raise NotImplementedError

    @property
    def reach(self) -> float:
        """The largest magnitude in a payload."""
        raise NotImplementedError

    def agree(self, largest: Tensor, round_: int) -> float:
        raise NotImplementedError

    def at(self, scale: float, seed: Seed) -> Tuned:
        raise NotImplementedError

    @property
    def fixed(self) -> bool:
        """Whether it loses the same directions in every round, so that error feedback would only pile them up."""
        return False


class Tuned(Codec):
    """A codec in code space with the scale of one round. Its codes do not depend on the weights `w`."""

    def merge(self, task: Task, payloads: Sequence[Any]) -> Tensor:
        """The mean of the vectors behind the payloads, decoded from the mean of the codes, [d]."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- the server


def in_code_space(
    up: CodeSpace, told: Answers, cohort: Cohort, secure: SecureSum | None = None
) -> tuple[Tensor, float, Sequence[int]]:
    """Agree on a scale, collect codes and decode their mean: the mean vector [d], the mean share, and whose it is."""
    largest = clamped(cohort, "magnitude", {k: each.largest for k, each in told.items()}, SPREAD, raise_low=False)
    scale = up.agree(torch.tensor(list(largest.values())), cohort.round)
    asked, question = cohort.only(told), Send(scale, up.digest)
    cohort.note(scale=scale)
    clients: Sequence[int]
    if secure:
        total = asked.ask_sum(question, secure)
        clients, payloads = total.clients, [up.payload(**{name: total.mean(name) for name in total.totals})]
    else:
        usable = decodable(up, asked.ask(question), asked)
        asked.require(len(usable), len(asked))
        clients, payloads = list(usable), list(usable.values())
    mean = up.at(scale, cohort.seed).merge(cohort.task, payloads)
    return mean, float(schema.stack(payloads, "share").mean()), clients


# ---------------------------------------------------------------------------------------------------- the clients


def shares(stack: ClientStack) -> Tensor:
    """λ_k: each client's records by the public maximum, [C, 1]."""
    return torch.from_numpy(stack.rows.counts / stack.task.largest).float()[:, None]


def noted(stack: ClientStack, vectors: Tensor) -> list[float]:
    """Keep what each client will send, [C, d], until the scale is known; the largest magnitude of each."""
    for note, vector in zip(stack.notes, vectors, strict=True):
        note["vector"] = vector
    largest: list[float] = vectors.abs().amax(1).tolist()
    return largest


def recalled(stack: ClientStack) -> Tensor:
    """What was noted, [C, d]."""
    return torch.stack(stack.recall("vector"))


def tuned(up: Codec, stack: ClientStack, question: Send) -> Tuned:
    """The codec of this round; a client with another code than the server's would send what nobody can decode."""
    if not isinstance(up, CodeSpace):
        raise Refused("wrong kind", f"{up.name} agrees on no scale")
    if question.digest != up.digest:
        raise Refused("out of step", "the server decodes with another pair; use the file that it uses")
    return up.at(question.scale, stack.seed)
