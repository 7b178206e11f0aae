"""FedAGE: the server averages codes and decodes only their mean (Zeng et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from fedveil.codecs import autoencoder
from fedveil.codecs.agreed import AgreedCodec, Tuned
from fedveil.codecs.autoencoder import Code, Packed, Pair
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
class Magnitudes(Answer, frozen=True):
    """The largest magnitude in each layer of what a client will send."""

    largest: Annotated[Tensor, Shape(("layers",), low=0)]


@message.kind
class Send(Question, frozen=True):
    """Encode what you trained at this scale, with the code of this digest."""

    reply = Answer  # the codec's payload
    scale: Annotated[float, Meta(ge=0, le=1e9)]
    digest: bytes = bytes(8)


@message.kind
class SendLayers(Question, frozen=True):
    """The same with a scale for each layer."""

    reply = Answer
    scale: Annotated[Tensor, Shape(("layers",), low=0, high=1e9)]
    digest: bytes = bytes(8)


@message.kind
class Codes(Answer, frozen=True):
    """Codes of the positive and of the negative part of every block, and the weight λ that was put on the update."""

    additive: ClassVar[bool] = True

    codes: Annotated[Tensor, Shape((2, "blocks", "code"), low=-autoencoder.WHOLE, high=autoencoder.WHOLE)]
    share: Annotated[Tensor, Shape((1,), low=1e-9, high=1)]


def quantise(x: Tensor, n: float | Tensor, levels: int, draw: Tensor) -> Tensor:
    """Q(x; s, n): x·s/n rounded at random to one of its two whole neighbours, from 0 to s (appendix A).

    x ≥ 0 and draws from [0, 1), of one shape; n is a number or one for each entry of a row. Unbiased up to n: the
    expected (n/s)·Q is x. What is above n becomes s.
    """
    factor = levels / (n.clamp(min=1e-30) if isinstance(n, Tensor) else max(n, 1e-30))
    return (x * factor + draw).floor_().clamp_(max=levels)


@dataclass(frozen=True)
class FedAgeCodec(AgreedCodec[Codes]):
    """Codes of a pair (E, D) with D(mean of codes) ≈ mean of updates; the server decodes the mean alone.

    block, code_size:   b numbers become h (half of b where left out)
    levels:             s: they are rounded to whole numbers from 0 to s first
    code:               "learned" networks, a "linear" projection, or "packed": digits of one float32, without loss
    cohort:             m: for how many clients a learned pair was trained, and the most that a packed code adds up
    width, seed:        of a learned pair; the linear code is drawn from the seed too
    pretraining:        how a learned pair was trained: our "own" way, or the "paper"'s
    permute:            shuffle the weights before they are cut into blocks, anew every round, by the public seed
    scales:             n is one number for the "whole" update, or one for each of its "layers"
    scale, decay:       a factor on n (the paper's figure 4), multiplied by `decay` every round; below 1 it clips
    max_scale:          n is at most this, whatever a client claims
    """

    name: ClassVar[str] = "fedage"
    payload: ClassVar[type[Answer]] = Codes

    block: int = 64
    code_size: int | None = None
    levels: int = 64
    code: str = "learned"
    cohort: int = 10
    width: int = 512
    seed: int = 0
    pretraining: str = "own"
    permute: bool = True
    scales: str = "whole"
    scale: float = 1.0
    decay: float = 1.0
    max_scale: float | None = None

    def __post_init__(self) -> None:
        if self.scale <= 0 or not 0 < self.decay <= 1 or (self.max_scale is not None and self.max_scale <= 0):
            raise ValueError("fedage needs scale > 0, 0 < decay <= 1 and max_scale > 0")
        if self.scales not in ("whole", "layers"):
            raise ValueError(f"fedage's scales is '{self.scales}'; use whole or layers")
        self.pair  # noqa: B018 - says which of its settings cannot be

    @property
    def layered(self) -> bool:
        """Whether each layer has its own scale."""
        return self.scales == "layers"

    @property
    def offer(self) -> type[Answer]:  # type: ignore[override]
        return Magnitudes if self.layered else Magnitude

    @property
    def agreement(self) -> type[Question]:  # type: ignore[override]
        return SendLayers if self.layered else Send

    @property
    def pair(self) -> Code:
        """Which pair it uses."""
        half = self.code_size if self.code_size is not None else max(1, self.block // 2)
        key = (self.block, half, self.levels, self.cohort, self.width, self.seed)
        return Code(*key, kind=self.code, pretraining=self.pretraining)

    @property
    def digest(self) -> bytes:
        """8 bytes that tell the pair from any other that would not decode its codes."""
        return autoencoder.digest(self.pair)

    def validate(self, task: Task) -> None:
        autoencoder.load(self.pair, task.device)

    def sizes(self, task: Task) -> Mapping[str, Size]:
        blocks, layers = -(-task.layout.size // self.block), len(task.layout.layers)
        return {**task.sizes, "blocks": blocks, "code": self.pair.code, "layers": layers}

    def check(self, task: Task, payload: Codes) -> None:
        furthest, reach = float(payload.codes.abs().max()), self.reach
        if furthest > reach:
            raise Refused("out of range", f"a code reaches {furthest:g}, the pair's own reach {reach:g} at most")
        pair = autoencoder.load(self.pair, torch.device("cpu"))
        if isinstance(pair, Packed) and not pair.genuine(payload.codes):
            raise Refused("out of range", f"a packed code holds something else than whole numbers up to {self.levels}")
        share, one = float(payload.share), 1 / task.largest
        if share < one * (1 - 1e-6):  # as a float32, 1/3 may be rounded down
            raise Refused("out of range", f"share is {share:g}, that of one record is {one:g}")

    @property
    def reach(self) -> float:
        return autoencoder.load(self.pair, torch.device("cpu")).reach

    @property
    def most(self) -> int | None:
        return self.cohort if self.code == "packed" else None

    @property
    def tolerance(self) -> float | None:
        return 0.5 if self.code == "packed" else None

    @property
    def loses_the_same(self) -> bool:
        return not self.permute and self.code != "packed"

    def offers(self, stack: ClientStack, vectors: Tensor, question: object) -> list[Any]:
        largest = self.magnitudes(stack.task, vectors).cpu()
        return [Magnitudes(row) if self.layered else Magnitude(float(row)) for row in largest]

    def magnitudes(self, task: Task, vectors: Tensor) -> Tensor:
        """The largest magnitude in each of the vectors [C, d], or in each of their layers: [C, 1 or layers]."""
        parts = vectors.abs().split(_lengths(task) if self.layered else task.layout.size, 1)
        return torch.stack([part.amax(1) for part in parts], 1)

    def agree(self, cohort: Cohort, offers: Mapping[int, Any]) -> Question:
        told = {k: [x] if isinstance(x := offer.largest, float) else x.tolist() for k, offer in offers.items()}
        kept = [
            clamped(cohort, "magnitude", dict(zip(told, x, strict=True)), SPREAD, False)
            for x in zip(*told.values(), strict=True)
        ]
        scales = self.scales_of(
            torch.tensor([list(each.values()) for each in kept], dtype=torch.float64).T, cohort.round
        )
        cohort.note(scale=float(scales.max()))
        return self.sending(scales)

    def scales_of(self, largest: Tensor, round_: int) -> Tensor:
        """n, or that of each layer, from the largest magnitudes of each client [m, 1 or layers]."""
        n = largest.double().amax(0) * self.scale * self.decay ** (round_ - 1)
        return n if self.max_scale is None else n.clamp(max=self.max_scale)

    def sending(self, scales: Tensor) -> Question:
        """The agreement on these scales [1 or layers]."""
        return SendLayers(scales.float(), self.digest) if self.layered else Send(float(scales), self.digest)

    def at(self, task: Task, agreed: Any, seed: Seed) -> Scaled:
        if agreed.digest != self.digest:
            raise Refused("out of step", "the server decodes with another pair; use the file that it uses")
        return Scaled(self, agreed.scale, seed)


@dataclass(frozen=True)
class Scaled(Tuned[Codes]):
    """FedAGE in one round: n is agreed and the shuffle is drawn."""

    payload: ClassVar[type[Answer]] = Codes

    of_run: FedAgeCodec
    n: float | Tensor  # or that of each layer
    seed: Seed  # the public one of the round

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Codes]:
        n = self._scale(task, w.device)
        if stack:
            stack.measure(clipped=(updates.abs() > n).sum(1))
        draw = torch.stack([_uniform(seed.child("rounding"), updates[0]) for seed in seeds])
        whole = quantise(updates.abs(), n, self.of_run.levels, draw)
        shuffled = whole.copysign_(updates)[:, self._order(task, w.device)]
        signed = F.pad(shuffled, (0, -task.layout.size % self.of_run.block))
        parts = torch.stack([signed.clamp(min=0), (-signed).clamp(min=0)], 1).view(-1, self.of_run.block)
        codes = self._pair(w.device).encode(parts).view(len(updates), 2, -1, self.of_run.pair.code)
        return [Codes(row, torch.ones(1)) for row in codes.cpu()]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Codes]) -> Tensor:
        return self._decode(task, schema.stack(payloads, "codes").to(w.device))

    def merge(self, task: Task, payloads: Sequence[Codes], clients: int) -> tuple[Tensor, Record | None]:
        codes = schema.stack(payloads, "codes").to(task.device, self._pair(task.device).dtype)
        return self._decode(task, codes.mean(0, keepdim=True), clients)[0], None

    def _decode(self, task: Task, codes: Tensor, count: int = 1) -> Tensor:
        """(n/s)(D(g⁺) - D(g⁻)) of codes or means of `count` codes [C, 2, blocks, h], [C, d]: algorithm 1.

        D has an offset where its inputs are far from those of its training; it is the same in both parts.
        """
        parts = self._pair(codes.device).decode(codes.flatten(0, 2), count).view(len(codes), 2, -1)
        signed = (parts[:, 0] - parts[:, 1])[:, : task.layout.size]
        ordered = torch.empty_like(signed).index_copy_(1, self._order(task, codes.device), signed)
        return ordered * (self._scale(task, codes.device) / self.of_run.levels)

    def _scale(self, task: Task, device: torch.device) -> float | Tensor:
        """n, or that of the layer of each weight [d]."""
        if not isinstance(self.n, Tensor):
            return self.n
        return self.n.to(device).repeat_interleave(torch.tensor(_lengths(task), device=device))

    def _pair(self, device: torch.device) -> Pair | Packed:
        return autoencoder.load(self.of_run.pair, device)

    def _order(self, task: Task, device: torch.device) -> Tensor:
        """Which weight comes where, [d]."""
        return _order(self.seed if self.of_run.permute else None, task.layout.size, device)


def _lengths(task: Task) -> list[int]:
    return [layer.stop - layer.start for layer in task.layout.layers]


@lru_cache(maxsize=2)
def _order(seed: Seed | None, size: int, device: torch.device) -> Tensor:
    if seed is None:
        return torch.arange(size, device=device)
    return torch.randperm(size, generator=seed.child("order").torch()).to(device)


def _uniform(seed: Seed, like: Tensor) -> Tensor:
    """Numbers from [0, 1), drawn where they are needed: only the client that rounds has to know them."""
    draw = torch.Generator(like.device).manual_seed(seed.torch().initial_seed())
    return torch.rand(like.shape, generator=draw, device=like.device)
