"""PowerSGD: low-rank updates whose two factors are averaged (Vogels et al. 2019, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedveil.codecs.agreed import AgreedCodec, Agreement, Offer, SharedCode, Tuned
from fedveil.core import schema
from fedveil.core.cohort import Cohort
from fedveil.core.message import Record, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task


@dataclass(frozen=True)
class PowerSgd(AgreedCodec[SharedCode]):
    """A rank-r factorization of each layer [outputs, rest] by one power iteration a round. Use it with `feedback`.

    Clients send P = M Q, get orthonormal columns P̂ of the mean, and send Mᵀ P̂. The mean update is P̂ (mean Mᵀ P̂)ᵀ, and
    the mean Mᵀ P̂ is the next round's Q. Biases and norms are sent as they are.
    """

    name: ClassVar[str] = "powersgd"
    extra: ClassVar[Mapping[str, Any]] = {"basis": Annotated[Tensor, Shape(("basis",))]}

    rank: int = 2

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd.rank is {self.rank}; it is at least 1")

    def layers(self, task: Task) -> list[tuple[slice, int, int, int]]:
        """Each layer's place in the flat weights, its shape [n, m] as a matrix, and its rank; 0: not factorized."""
        shaped = [(slice(x.start, x.stop), math.prod(x.shape[:1]), math.prod(x.shape[1:])) for x in task.layout.layers]
        return [(at, n, m, min(self.rank, n, m) if m > 1 else 0) for at, n, m in shaped]

    def sizes(self, task: Task) -> Mapping[str, Size]:
        found = self.layers(task)
        left, basis = sum(n * r for _, n, _, r in found), sum(m * r for _, _, m, r in found)
        code = basis + sum(n for _, n, _, r in found if not r)
        return {**task.sizes, "offer": left, "agreed": left, "basis": basis, "code": code}

    def validate(self, task: Task) -> None:
        if not any(r for *_, r in self.layers(task)):
            raise ValueError("powersgd factorizes matrices, and this model has none; use another codec, such as qsgd")

    def factors(self, task: Task, flat: Tensor, left: bool) -> list[Tensor]:
        """The factors [..., n or m, r] of each matrix in a flat vector of them."""
        shapes = [(n if left else m, r) for _, n, m, r in self.layers(task) if r]
        return [p.unflatten(-1, s) for p, s in zip(flat.split([a * r for a, r in shapes], -1), shapes, strict=True)]

    def orthonormal(self, task: Task, flat: Tensor, left: bool) -> Tensor:
        return torch.cat([torch.linalg.qr(factor)[0].flatten() for factor in self.factors(task, flat, left)])

    def broadcast(self, task: Task, kept: Any) -> dict[str, Tensor]:
        size: Any = self.sizes(task)["basis"]
        start = torch.randn(size, generator=Seed.root(0).torch()) if kept is None else kept.code[:size].cpu()
        return {"basis": self.orthonormal(task, start, left=False).to(task.device)}

    def offers(self, stack: ClientStack, vectors: Tensor, question: Any) -> list[Offer]:
        basis = self.factors(stack.task, question.basis.to(vectors), left=False)
        matrices = [vectors[:, at].unflatten(1, (n, m)) for at, n, m, r in self.layers(stack.task) if r]
        left = torch.cat([(matrix @ q).flatten(1) for matrix, q in zip(matrices, basis, strict=True)], 1)
        return [Offer(row) for row in left.cpu()]

    def agree(self, cohort: Cohort, offers: Mapping[int, Offer]) -> Agreement:
        return Agreement(
            self.orthonormal(cohort.task, schema.stack(list(offers.values()), "vector").mean(0), left=True)
        )

    def at(self, task: Task, agreed: Agreement, seed: Seed) -> Tuned[SharedCode]:
        return Projected(self, self.factors(task, agreed.vector.to(task.device), left=True))


@dataclass(frozen=True)
class Projected(Tuned[SharedCode]):
    """PowerSGD in one round: the left factors [n, r] of each matrix are agreed."""

    of_run: PowerSgd
    left: list[Tensor]

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[SharedCode]:
        parts = [(updates[:, at].unflatten(1, (n, m)), r) for at, n, m, r in self.of_run.layers(task)]
        inside = zip((matrix for matrix, r in parts if r), self.left, strict=True)
        rows = [(matrix.mT @ p).flatten(1) for matrix, p in inside] + [x.flatten(1) for x, r in parts if not r]
        return [SharedCode(row, torch.ones(1)) for row in torch.cat(rows, 1).cpu()]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[SharedCode]) -> Tensor:
        layers, flat = self.of_run.layers(task), schema.stack(payloads, "code").to(w.device)
        inside = sum(m * r for _, _, m, r in layers)
        right = self.of_run.factors(task, flat[:, :inside], left=False)
        whole = ((p @ q.mT).flatten(1) for p, q in zip(self.left, right, strict=True))
        rest = iter(flat[:, inside:].split([n for _, n, _, r in layers if not r], 1))
        return torch.cat([next(whole if r else rest) for *_, r in layers], 1)

    def merge(self, task: Task, payloads: Sequence[SharedCode], clients: int) -> tuple[Tensor, Record]:
        mean = SharedCode(schema.stack(payloads, "code").mean(0), torch.ones(1))
        return self.decode(task, task.initial[None], [mean])[0], mean
