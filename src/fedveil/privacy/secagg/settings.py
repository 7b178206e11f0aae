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
from fedveil.privacy.secagg.context import MARK, SIGNATURE
from fedveil.privacy.secagg.masks import KEY, FixedPoint
from fedveil.privacy.secagg.records import SEALED, Advertise, Agree, Deal, Mask, Share, Unmask
from fedveil.privacy.secagg.rules import Rules
from fedveil.privacy.skellam import SumNoise


@dataclass(frozen=True)
class SecureSum(Rules):
    """How vectors are summed so that the server sees their sum only. `Rules` describes the settings."""

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
