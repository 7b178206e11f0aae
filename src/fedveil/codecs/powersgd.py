"""PowerSGD: low-rank updates whose two factors are averaged (Vogels et al. 2019, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedveil.codecs.agreed import AgreedCodec, Tuned
from fedveil.core import message, schema
from fedveil.core.cohort import Cohort
from fedveil.core.message import Answer, Question, Record, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task

Left = Annotated[Tensor, Shape(("left",))]
Basis = Annotated[Tensor, Shape(("basis",))]


@message.kind
class LeftFactors(Answer, frozen=True):
    """P = M Q of every matrix M."""

    additive = True
    left: Left


@message.kind
class Project(Question, frozen=True):
    """Project onto these orthonormal columns P̂."""

    reply = Answer
    left: Left


@message.kind
class RightFactors(Answer, frozen=True):
    """Mᵀ P̂ of every matrix, then the weights that are in none as they are; and the weight put on all of it."""

    additive = True
    right: Annotated[Tensor, Shape(("right",))]
    share: Annotated[Tensor, Shape((1,), low=1e-9, high=1)]


@message.kind
class RightBasis(Record, frozen=True):
    """The server's slot: the mean right factors, from which the next power iteration starts."""

    basis: Basis


@dataclass(frozen=True)
class PowerSgd(AgreedCodec):
    """A rank-r factorization of each layer by one power iteration a round. Use it with `feedback`.

    Layers are matrices [outputs, rest]. Clients send P = M Q, are told orthonormal columns P̂ of the mean, and send
    Mᵀ P̂; the mean update is P̂ (mean Mᵀ P̂)ᵀ. Biases and norms are sent as they are.
    """

    name: ClassVar[str] = "powersgd"
    payload: ClassVar[type[Answer]] = RightFactors
    offer: ClassVar[type[Answer]] = LeftFactors
    agreement: ClassVar[type[Question]] = Project
    extra: ClassVar[Mapping[str, Any]] = {"basis": Basis}

    rank: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd.rank is {self.rank}; it is at least 1")

    def matrices(self, task: Task) -> Iterator[tuple[slice, int, int, int]]:
        """Where each matrix lies in the flat weights, its shape [n, m] and its rank."""
        for layer in task.layout.layers:
            if len(layer.shape) > 1:
                n, m = layer.shape[0], math.prod(layer.shape[1:])
                yield slice(layer.start, layer.stop), n, m, min(self.rank, n, m)

    def sizes(self, task: Task) -> Mapping[str, Size]:
        left, basis, inside = (sum(x) for x in zip(*((n * r, m * r, n * m) for _, n, m, r in self.matrices(task))))
        return {**task.sizes, "left": left, "basis": basis, "right": basis + task.layout.size - inside}

    def validate(self, task: Task) -> None:
        if not list(self.matrices(task)):
            raise ValueError("powersgd factorizes matrices, and this model has none; use another codec, such as qsgd")

    def split(self, task: Task, flat: Tensor, left: bool) -> list[Tensor]:
        """The factors [..., n or m, r] of each matrix in flat ones [..., all of them]; what is left comes last."""
        shapes = [(n if left else m, r) for _, n, m, r in self.matrices(task)]
        widths = [rows * r for rows, r in shapes]
        parts = flat.split([*widths, flat.shape[-1] - sum(widths)], -1)
        return [*(p.unflatten(-1, s) for p, s in zip(parts, shapes, strict=False)), parts[-1]]

    def orthonormal(self, task: Task, flat: Tensor, left: bool) -> Tensor:
        return torch.cat([torch.linalg.qr(part)[0].flatten() for part in self.split(task, flat, left)[:-1]])

    def broadcast(self, task: Task, kept: Any) -> dict[str, Tensor]:
        size: Any = self.sizes(task)["basis"]
        basis = torch.randn(size, generator=Seed.root(0).torch()) if kept is None else kept.basis
        return {"basis": self.orthonormal(task, basis, left=False).to(task.device)}

    def offers(self, stack: ClientStack, vectors: Tensor, question: Any) -> list[LeftFactors]:
        basis = self.split(stack.task, question.basis.to(vectors), left=False)
        found = zip(self.matrices(stack.task), basis, strict=False)
        left = [(vectors[:, at].view(-1, n, m) @ q).flatten(1) for (at, n, m, _), q in found]
        return [LeftFactors(row) for row in torch.cat(left, 1).cpu()]

    def agree(self, cohort: Cohort, offers: Mapping[int, LeftFactors]) -> Project:
        mean = schema.stack(list(offers.values()), "left").mean(0)
        return Project(self.orthonormal(cohort.task, mean, left=True))

    def at(self, task: Task, agreed: Project, seed: Seed) -> Tuned:
        return Projected(self, self.split(task, agreed.left.to(task.device), left=True))


@dataclass(frozen=True)
class Projected(Tuned):
    """PowerSGD in one round: the left factors [n, r] of each matrix are agreed."""

    payload: ClassVar[type[Answer]] = RightFactors

    of_run: PowerSgd
    left: list[Tensor]

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[RightFactors]:
        found = zip(self.of_run.matrices(task), self.left, strict=False)
        right = [(updates[:, at].view(-1, n, m).mT @ p).flatten(1) for (at, n, m, _), p in found]
        return [RightFactors(row, torch.ones(1)) for row in torch.cat([*right, updates[:, self._rest(task)]], 1).cpu()]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[RightFactors]) -> Tensor:
        *right, rest = self.of_run.split(task, schema.stack(payloads, "right").to(w.device), left=False)
        updates = w.new_empty(len(payloads), task.layout.size)
        updates[:, self._rest(task)] = rest
        for (at, *_), p, q in zip(self.of_run.matrices(task), self.left, right, strict=False):
            updates[:, at] = (p @ q.mT).flatten(1)
        return updates

    def merge(self, task: Task, payloads: Sequence[RightFactors]) -> tuple[Tensor, Record]:
        mean = schema.stack(payloads, "right").mean(0)
        size: Any = self.of_run.sizes(task)["basis"]
        return self.decode(task, task.initial[None], [RightFactors(mean, mean[:1])])[0], RightBasis(mean[:size].clone())

    def _rest(self, task: Task) -> Tensor:
        """Which of the flat weights are in no matrix."""
        inside = [torch.arange(at.start, at.stop) for at, *_ in self.of_run.matrices(task)]
        rest = torch.ones(task.layout.size, dtype=torch.bool).index_fill(0, torch.cat(inside), False)
        return rest.nonzero()[:, 0].to(task.device)
