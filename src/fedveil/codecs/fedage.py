"""FedAGE: the server averages codes and decodes only their mean (Zeng et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from fedveil.codecs import autoencoder
from fedveil.codecs.agreed import AgreedCodec, Tuned
from fedveil.codecs.autoencoder import Code, Pair
from fedveil.core import message, schema
from fedveil.core.cohort import Cohort
from fedveil.core.message import Answer, Question, Record, Refused, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.train.aggregators import clamped

SPREAD = 500.0  # how many times the median a magnitude may be: clients weight by their records, which differ much


@message.kind
class Magnitude(Answer, frozen=True):
    """The largest magnitude in what a client will send."""

    largest: Annotated[float, Meta(ge=0, le=1e6)]


@message.kind
class Send(Question, frozen=True):
    """Encode what you trained at this scale, with the code of this digest."""

    reply = Answer  # the codec's payload
    scale: Annotated[float, Meta(ge=0, le=1e9)]
    digest: bytes = bytes(8)


@message.kind
class Codes(Answer, frozen=True):
    """Codes of the positive and of the negative part of every block, and the weight λ that was put on the update."""

    additive: ClassVar[bool] = True

    codes: Annotated[Tensor, Shape((2, "blocks", "code"))]
    share: Annotated[Tensor, Shape((1,), low=1e-9, high=1)]


def quantise(x: Tensor, n: float, levels: int, draw: Tensor) -> Tensor:
    """Q(x; s, n): x·s/n rounded at random to one of its two whole neighbours, from 0 to s (appendix A).

    x ≥ 0 and draws from [0, 1), of one shape. Unbiased up to n: the expected (n/s)·Q is x. What is above n becomes s.
    """
    return (x * (levels / max(n, 1e-30)) + draw).floor_().clamp_(max=levels)


@dataclass(frozen=True)
class FedAgeCodec(AgreedCodec[Codes]):
    """Codes of a pair (E, D) with D(mean of codes) ≈ mean of updates; the server decodes the mean alone.

    block, code, levels: b numbers become h (half of b where left out), after rounding to whole ones from 0 to s
    cohort, width, seed: which pair: for how many clients it was trained, how wide (0: the linear code), from which seed
    permute:             shuffle the weights before they are cut into blocks, anew every round, by the public seed
    scale, decay:        a factor on n (the paper's figure 4), multiplied by `decay` every round; below 1 it clips
    max_scale:           n is at most this, whatever a client claims
    """

    name: ClassVar[str] = "fedage"
    payload: ClassVar[type[Answer]] = Codes
    offer: ClassVar[type[Answer]] = Magnitude
    agreement: ClassVar[type[Question]] = Send

    block: int = 64
    code: int | None = None
    levels: int = 64
    cohort: int = 10
    width: int = 512
    seed: int = 0
    permute: bool = True
    scale: float = 1.0
    decay: float = 1.0
    max_scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale <= 0 or not 0 < self.decay <= 1 or (self.max_scale is not None and self.max_scale <= 0):
            raise ValueError("fedage needs scale > 0, 0 < decay <= 1 and max_scale > 0")
        self.pair  # noqa: B018 - says which of its settings cannot be

    @property
    def pair(self) -> Code:
        """Which pair it uses."""
        half = self.code if self.code is not None else max(1, self.block // 2)
        return Code(self.block, half, self.levels, self.cohort, self.width, self.seed)

    @property
    def digest(self) -> bytes:
        """8 bytes that tell the pair from any other that would not decode its codes."""
        return autoencoder.digest(self.pair)

    def validate(self, task: Task) -> None:
        autoencoder.load(self.pair, task.device)

    def sizes(self, task: Task) -> Mapping[str, Size]:
        return {**task.sizes, "blocks": -(-task.layout.size // self.block), "code": self.pair.code}

    def check(self, task: Task, payload: Codes) -> None:
        furthest, reach = float(payload.codes.abs().max()), self.reach
        if furthest > reach:
            raise Refused("out of range", f"a code reaches {furthest:g}, the pair's own reach {reach:g} at most")
        share, one = float(payload.share), 1 / task.largest
        if share < one * (1 - 1e-6):  # as a float32, 1/3 may be rounded down
            raise Refused("out of range", f"share is {share:g}, that of one record is {one:g}")

    @property
    def reach(self) -> float:
        return autoencoder.load(self.pair, torch.device("cpu")).reach

    @property
    def loses_the_same(self) -> bool:
        return not self.permute

    def offers(self, stack: ClientStack, vectors: Tensor, question: object) -> list[Magnitude]:
        return [Magnitude(largest) for largest in vectors.abs().amax(1).tolist()]

    def agree(self, cohort: Cohort, offers: Mapping[int, Magnitude]) -> Send:
        told = {k: offer.largest for k, offer in offers.items()}
        largest = clamped(cohort, "magnitude", told, SPREAD, raise_low=False)
        scale = self.scale_of(torch.tensor(list(largest.values())), cohort.round)
        cohort.note(scale=scale)
        return Send(scale, self.digest)

    def scale_of(self, largest: Tensor, round_: int) -> float:
        """n, from the largest magnitude of each client [m]."""
        n = float(largest.max()) * self.scale * self.decay ** (round_ - 1)
        return n if self.max_scale is None else min(n, self.max_scale)

    def at(self, task: Task, agreed: Send, seed: Seed) -> Scaled:
        if agreed.digest != self.digest:
            raise Refused("out of step", "the server decodes with another pair; use the file that it uses")
        return Scaled(self, agreed.scale, seed)


@dataclass(frozen=True)
class Scaled(Tuned[Codes]):
    """FedAGE in one round: n is agreed and the shuffle is drawn."""

    payload: ClassVar[type[Answer]] = Codes

    of_run: FedAgeCodec
    n: float
    seed: Seed  # the public one of the round

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Codes]:
        if stack:
            stack.measure(clipped=(updates.abs() > self.n).sum(1))
        draw = torch.stack([_uniform(seed.child("rounding"), updates[0]) for seed in seeds])
        whole = quantise(updates.abs(), self.n, self.of_run.levels, draw)
        shuffled = whole.copysign_(updates)[:, self._order(task, w.device)]
        signed = F.pad(shuffled, (0, -task.layout.size % self.of_run.block))
        parts = torch.stack([signed.clamp(min=0), (-signed).clamp(min=0)], 1).view(-1, self.of_run.block)
        codes = self._pair(w.device).encode(parts).view(len(updates), 2, -1, self.of_run.pair.code)
        return [Codes(row, torch.ones(1)) for row in codes.cpu()]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Codes]) -> Tensor:
        return self._decode(task, schema.stack(payloads, "codes").to(w.device))

    def merge(self, task: Task, payloads: Sequence[Codes]) -> tuple[Tensor, Record | None]:
        return self._decode(task, schema.stack(payloads, "codes").to(task.device).mean(0, keepdim=True))[0], None

    def _decode(self, task: Task, codes: Tensor) -> Tensor:
        """(n/s)(D(g⁺) - D(g⁻)) of codes or means of codes [C, 2, blocks, h], [C, d]: algorithm 1.

        D has an offset where its inputs are far from those of its training; it is the same in both parts.
        """
        parts = self._pair(codes.device).decode(codes.flatten(0, 2)).view(len(codes), 2, -1)
        signed = (parts[:, 0] - parts[:, 1])[:, : task.layout.size] * (self.n / self.of_run.levels)
        return torch.empty_like(signed).index_copy_(1, self._order(task, codes.device), signed)

    def _pair(self, device: torch.device) -> Pair:
        return autoencoder.load(self.of_run.pair, device)

    def _order(self, task: Task, device: torch.device) -> Tensor:
        """Which weight comes where, [d]."""
        return _order(self.seed if self.of_run.permute else None, task.layout.size, device)


@lru_cache(maxsize=2)
def _order(seed: Seed | None, size: int, device: torch.device) -> Tensor:
    if seed is None:
        return torch.arange(size, device=device)
    return torch.randperm(size, generator=seed.child("order").torch()).to(device)


def _uniform(seed: Seed, like: Tensor) -> Tensor:
    """Numbers from [0, 1), drawn where they are needed: only the client that rounds has to know them."""
    draw = torch.Generator(like.device).manual_seed(seed.torch().initial_seed())
    return torch.rand(like.shape, generator=draw, device=like.device)
