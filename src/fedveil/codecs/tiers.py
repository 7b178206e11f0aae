"""Budgets for clients of different means: the strong send more points, or fit them longer, than the weak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.codecs.fedsynth import FedSynthCodec
from fedveil.core import schema
from fedveil.core.message import Answer, Refused
from fedveil.core.seeds import Seed, is_weak
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task


@dataclass(frozen=True)
class Tiers(Codec):
    """Two settings of one codec for the way up (FedSynth, section 5.3).

    Which one a client uses is its stated resource, known to all: `share` of the clients are weak, drawn by number,
    so that a client is the same in every round and run.
    """

    name: ClassVar[str] = "tiers"
    server_can_encode: ClassVar[bool] = False

    strong: Codec = field(default_factory=FedSynthCodec)
    weak: Codec = field(default_factory=lambda: FedSynthCodec(batches=2, fits=100))
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.strong.name != self.weak.name or self.strong.name == self.name:
            raise ValueError("tiers are two settings of one codec: let strong.name and weak.name be the same")
        if not 0 <= self.share <= 1:
            raise ValueError("tiers.share is from 0 to 1")
        if bool(self.strong.replaces_training) is not bool(self.weak.replaces_training):
            fix = self.strong.replaces_training or self.weak.replaces_training
            raise ValueError(f"one tier fits its data without local training and the other does not; set {fix} in both")
        if self.strong.in_code_space:
            raise ValueError(f"tiers cannot be of {self.strong.name}, whose codes are averaged and so are of one kind")

    @property
    def payload(self) -> type[Answer]:  # type: ignore[override]
        return self.strong.payload

    @property
    def at_weights(self) -> bool:  # type: ignore[override]
        return self.strong.at_weights

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.strong.needs

    @property
    def replaces_training(self) -> str:
        return self.strong.replaces_training

    def for_client(self, client: int) -> Codec:
        return self.weak if is_weak(client, self.share) else self.strong

    def validate(self, task: Task) -> None:
        self.strong.validate(task)
        self.weak.validate(task)

    def exhibit(self, payload: Any) -> tuple[str, Tensor, Tensor] | None:
        return self.strong.exhibit(payload)

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Any]:
        assert stack, "the server has one budget"
        payloads: list[Any] = [None] * len(stack)
        for codec in (self.strong, self.weak):
            rows = [i for i, client in enumerate(stack.clients) if self.for_client(client) is codec]
            if rows:
                part = replace(stack, clients=tuple(stack.clients[i] for i in rows), passes=0)
                for i, payload in zip(
                    rows, codec.encode(task, w[rows], updates[rows], [seeds[i] for i in rows], part), strict=True
                ):
                    payloads[i] = payload
                stack.passes += part.passes
        return payloads

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Any]) -> Tensor:
        decoded = torch.empty_like(w)
        strong = [_fits(payload, self.strong, task) for payload in payloads]
        for codec, chosen in ((self.strong, True), (self.weak, False)):
            rows = [i for i, is_strong in enumerate(strong) if is_strong is chosen]
            if rows:
                decoded[rows] = codec.decode(task, w[rows], [payloads[i] for i in rows])
        return decoded


def _fits(payload: Any, codec: Codec, task: Task) -> bool:
    try:
        schema.check(payload, {**codec.sizes(task), "records": 2**31})
        codec.check(task, payload)
    except Refused:
        return False
    return True
