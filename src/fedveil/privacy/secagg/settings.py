"""How vectors are summed securely: who is protected from whom, and with how many bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedveil.core import message, schema
from fedveil.core.forecast import Turn
from fedveil.core.message import Answer, Question, Size
from fedveil.core.method import Method
from fedveil.core.task import Task
from fedveil.privacy.secagg import graph
from fedveil.privacy.secagg.masks import KEY, FixedPoint
from fedveil.privacy.secagg.records import MARK, SEALED, SIGNATURE, Advertise, Agree, Deal, Mask, Share, Unmask
from fedveil.privacy.skellam import SumNoise


@dataclass(frozen=True)
class SecureSum:
    """How vectors are summed so that the server sees their sum only.

    clip:       values beyond ±clip are cut, and counted in the ledger
    bits:       of a value in fixed point, its sign among them; elements have 32 bits, or 64 if the sum of all clients
                needs them
    server:     whom it protects from: a "curious" server that keeps to the protocol, or a "malicious" one
    min_clients: the fewest clients that a client lets itself be summed with
    neighbours: with how many others a client masks; None chooses, and is everybody in cohorts of up to 100
    """

    clip: float = 1.0
    bits: int = 20
    server: str = "curious"
    min_clients: int = 3
    neighbours: int | None = None

    def __post_init__(self) -> None:
        if self.clip <= 0 or not 2 <= self.bits <= 52:
            raise ValueError("a secure sum needs clip above 0 and from 2 to 52 bits")
        if self.server not in ("curious", "malicious"):
            raise ValueError(f"secure.server is '{self.server}'; use curious or malicious")
        if self.min_clients < 3:
            raise ValueError("secure.min_clients is at least 3: of a sum of two each knows the other's part")
        if self.neighbours is not None and (self.neighbours < 2 or self.neighbours % 2):
            raise ValueError("secure.neighbours is an even number from 2 on; leave it out to let the cohort decide")
        if self.server == "malicious" and self.neighbours is not None:
            raise ValueError("against a malicious server everybody masks with everybody; leave secure.neighbours out")

    def validate(self, task: Task, answer: type[Answer], aggregator: str = "mean") -> None:
        """Raise a ValueError if such answers cannot be summed securely, or not be merged so."""
        if not answer.additive:
            raise ValueError(
                f"a secure sum of {answer.__name__} means nothing: these messages do not add up, each has to be "
                "decoded by itself; use a codec whose messages do, such as raw"
            )
        if aggregator != "mean":
            raise ValueError(
                f"aggregator.kind is '{aggregator}', which compares clients' updates one by one, and in a secure sum "
                "the server sees none of them; use mean"
            )
        n = len(task.clients)
        self.fixed_point(n, self.quorum(n), task.sizes, answer)

    def fixed_point(self, n: int, quorum: int, sizes: Mapping[str, Size], answer: type[Answer]) -> FixedPoint:
        """The encoding of `answer` in a cohort of n, of whom a quorum is enough."""
        heaviest = sizes.get("records", 1) if "records" in answer.__struct_fields__ else 1
        assert isinstance(heaviest, int)
        return FixedPoint(n, self.clip, self.bits, heaviest)

    @property
    def noise(self) -> SumNoise | None:
        """The noise that clients add, if it is they who make the sum private."""
        return None

    def even(self) -> SecureSum:
        """The same where every client weighs 1: no bits are kept for weights."""
        return _Even(**_settings(self))

    def noised(self, noise: SumNoise) -> SecureSum:
        """The same where every client weighs 1, cuts its vector to norm `clip` and adds a share of this noise."""
        return _Noised(**_settings(self), added=noise)

    def quorum(self, n: int) -> int:
        """The fewest of n clients that are summed, and that together can recover a secret."""
        return max(self.min_clients, 2 * n // 3 + 1 if self.server == "malicious" else graph.majority(n))

    def degree(self, n: int) -> int:
        """The number of a client's neighbours among n."""
        return n - 1 if self.server == "malicious" else min(self.neighbours or graph.degree(n), n - 1)

    def threshold(self, n: int, quorum: int) -> int:
        """The number of shares that recover a secret: the quorum, or a majority of a neighbourhood."""
        k = self.degree(n)
        return quorum if k >= n - 1 else graph.majority(k + 1)

    def forecast_messages(self, method: Method, task: Task, question: Question, turn: Turn) -> list[Question]:
        """What a client is asked for a secure sum of the answers to `question`, without values, if everybody stays."""
        ids, n = list(turn.cohort), len(turn.cohort)
        if n < self.quorum(n):
            return []
        holders = self.degree(n) + 1
        fixed = self.fixed_point(n, self.quorum(n), task.sizes, method.reply(question))
        sizes = {**method.schema(task, question, turn.client), **question.sizes()}
        elements = sum(math.prod(shape) for shape in shapes(method.reply(question), sizes).values()) + 2

        def blank(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device="meta")

        payload = blank(message.size(question) - message.PREFIX_BYTES)
        malicious = self.server == "malicious"
        return [
            Advertise(),
            Share(ids, self.quorum(n), blank(holders, KEY), blank(holders, KEY), blank(holders, SIGNATURE)),
            Deal(ids, blank(holders - 1, SEALED), blank(holders - 1, 2 * MARK)),
            Mask(ids, elements, fixed.wide, question.kind, payload),
            *([Agree(ids)] if malicious else []),
            Unmask(ids, [], holders, ids, blank(n, SIGNATURE)) if malicious else Unmask(ids, [], holders),
        ]


@dataclass(frozen=True)
class _Even(SecureSum):
    def fixed_point(self, n: int, quorum: int, sizes: Mapping[str, Size], answer: type[Answer]) -> FixedPoint:
        return FixedPoint(n, self.clip, self.bits, 1)


@dataclass(frozen=True)
class _Noised(SecureSum):
    added: SumNoise = field(kw_only=True)

    @property
    def noise(self) -> SumNoise:
        return self.added

    def fixed_point(self, n: int, quorum: int, sizes: Mapping[str, Size], answer: type[Answer]) -> FixedPoint:
        fixed = FixedPoint(n, self.clip, self.bits, 1)
        return replace(fixed, variance=self.added.variance(fixed.half, quorum))


def _settings(how: SecureSum) -> dict[str, Any]:
    return {each.name: getattr(how, each.name) for each in fields(SecureSum)}


def shapes(answer: type[Answer], sizes: Mapping[str, Size]) -> dict[str, tuple[int, ...]]:
    """The shapes of an answer's tensors, which are summed one after the other."""
    return {name: shape.bind(sizes)[1] for name, shape in schema.fields(answer).items()}
