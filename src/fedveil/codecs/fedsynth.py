"""FedSynth: an update as a few training steps on synthetic batches (Goetz & Tewari, 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedveil.codecs.base import Codec
from fedveil.codecs.factored import Batches, Factored, large
from fedveil.codecs.fit import (
    PRECISIONS,
    WIDEST,
    Rounding,
    Variable,
    adam,
    check_labels,
    check_points,
    derivatives,
    normal,
    simplex,
)
from fedveil.core import message, schema
from fedveil.core.capability import FORWARD_PASSES, SECOND_DERIVATIVES, SOFT_LABELS
from fedveil.core.forecast import Compute
from fedveil.core.losses import cross_entropy
from fedveil.core.message import Answer, Count, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.gpu.context import current

LONGEST = 10.0  # a step size, either way


@message.kind
class Synthetic(Answer, frozen=True):
    """Synthetic batches, the step sizes on them, and the norm of the update they stand for."""

    images: Annotated[Tensor, Shape(("batches", "batch", "input"), "pixels", -WIDEST, WIDEST)]
    labels: Annotated[Tensor, Shape(("batches", "batch", "classes"), "pixels", 0, 255)]
    steps: Annotated[Tensor, Shape(("unrolled",), low=-LONGEST, high=LONGEST)]  # η, one a step
    norm: Annotated[Tensor, Shape((1,), low=0)]  # H
    low: float  # the range of 8-bit images
    high: float
    records: Count = 1


@dataclass(frozen=True)
class FedSynthCodec(Codec[Synthetic]):
    """Encode an update into synthetic batches that, trained on, reproduce it (algorithms 2 and 3).

    batches, batch, epochs: M = batches × epochs unrolled steps; a batch is used once an epoch and sent once
    objective:              l2 (default) fits the update; kl fits the updated net's predictions on the client's data;
                            data minimises the loss on the client's data itself, without a local update: then
                            H = ‖Σ η_m ĝ_m‖ (section 5.4)
    lr, lr_steps:           α for the points and labels, and for η; the paper has 0.2 for both (algorithm 2)
    labels:                 project (clamp and renormalise after each step) or softmax
    best:                   of all steps keep the set whose induced weights have the lowest loss on the client's own
                            data; otherwise, and on the server, the set with the lowest objective
    drift:                  fit over weights drawn from a ball of this radius around w, so that a late answer still
                            decodes well (section 5.1)
    restarts:               fits from different starts, the best of which is sent; they run as one stack
    """

    name: ClassVar[str] = "fedsynth"
    payload: ClassVar[type[Answer]] = Synthetic
    reference: ClassVar[str] = "init"
    needs: ClassVar[tuple[str, ...]] = (SOFT_LABELS, SECOND_DERIVATIVES, FORWARD_PASSES)

    batches: int = 5
    batch: int = 10
    epochs: int = 5
    fits: int = 300
    lr: float = 0.2
    lr_steps: float = 0.01
    decay: float = 0.995
    step: float = 0.02
    objective: str = "l2"
    labels: str = "project"
    best: bool = True
    drift: float = 0.0
    restarts: int = 1
    precision: str = "float32"

    def __post_init__(self) -> None:
        if min(self.batches, self.batch, self.epochs, self.fits, self.restarts) < 1 or self.lr <= 0 or self.drift < 0:
            raise ValueError(
                "fedsynth needs batches, batch, epochs, fits and restarts of at least 1, lr > 0, drift >= 0"
            )
        if self.step <= 0 or self.lr_steps < 0 or not 0 < self.decay <= 1:
            raise ValueError("fedsynth needs step > 0, lr_steps >= 0 and 0 < decay <= 1")
        if self.objective not in ("l2", "kl", "data") or self.labels not in ("project", "softmax"):
            raise ValueError("fedsynth's objective is l2, kl or data, and its labels are project or softmax")
        if self.precision not in PRECISIONS:
            raise ValueError(f"fedsynth.precision is '{self.precision}'; use {', '.join(PRECISIONS)}")

    def validate(self, task: Task) -> None:
        if not task.data.x.is_floating_point():
            raise ValueError("fedsynth fits its inputs by gradient, and tokens have none; use qsgd or top-k")
        check_labels(self.name, task)

    @property
    def reads_records(self) -> str:
        return 'objective="l2" and best=false' if self.objective != "l2" else "best=false" if self.best else ""

    @property
    def replaces_training(self) -> str:
        return 'objective="l2"' if self.objective == "data" else ""

    def sizes(self, task: Task) -> Mapping[str, Size]:
        return {
            **task.sizes,
            "batches": self.batches,
            "batch": self.batch,
            "unrolled": self.batches * self.epochs,
            "pixels": PRECISIONS[self.precision],
        }

    def forecast_compute(self, records: int) -> Compute:
        graph = self.batches * self.epochs * self.restarts  # every step's gradient is differentiated, so all are held
        own = 0 if self.objective == "l2" else records * self.restarts
        passes = self.fits * (graph * self.batch + own)
        return Compute(passes, vectors=3 + 4 * graph, held=2 * graph * self.batch + own)

    def check(self, task: Task, payload: Synthetic) -> None:
        check_points(payload.labels, payload.low, payload.high)

    def exhibit(self, payload: Synthetic) -> tuple[str, Tensor, Tensor]:
        return "synthetic images", payload.images.flatten(0, 1), payload.labels.flatten(0, 1)

    # ------------------------------------------------------------------------------------------------ decode

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Synthetic]) -> Tensor:
        images, labels, steps, norm, low, high = (
            schema.stack(payloads, name).to(w.device) for name in ("images", "labels", "steps", "norm", "low", "high")
        )
        pixels = Rounding(self.precision, low.float(), high.float()).expand(images)
        soft = simplex(Rounding.unit(labels, self.precision).expand(labels))
        return -self.induced(task, w, pixels, soft, steps, norm[:, 0])

    def induced(
        self,
        task: Task,
        w: Tensor,
        images: Tensor,
        labels: Tensor,
        steps: Tensor,
        norm: Tensor | None,
        fit: bool = False,
        factored: Sequence[str] = (),
    ) -> Tensor:
        """Algorithm 3: M normalised steps from `w` [C, d] over the batches [C, B, n, …]; H g̃/‖g̃‖, [C, d].

        Without `norm` it is g̃ itself. The paper's θ is what is subtracted from the weights, so an update is minus it.
        With `fit` the result can be differentiated with respect to images, labels and step sizes. The
        layers of the names in `factored` are held as factors.
        """
        unrolled = range(self.batches * self.epochs)
        batches = ((images[:, m % self.batches], labels[:, m % self.batches], steps[:, m]) for m in unrolled)
        total = Factored(task, w, factored)(batches) if factored else _descended(task, w, batches, fit)
        if norm is None:
            return total
        induced: Tensor = total * (norm / torch.linalg.vector_norm(total, dim=1).clamp(min=1e-12))[:, None]
        return induced

    # ------------------------------------------------------------------------------------------------ encode

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Synthetic]:
        """Algorithm 2. With restarts, each client is `restarts` rows of the stack and the best row is kept."""
        tries = [seed.child("restart", r) for seed in seeds for r in range(self.restarts)]
        clients = len(updates)
        w, theta = (t.repeat_interleave(self.restarts, 0) if self.restarts > 1 else t for t in (w, -updates))
        norm, free = torch.linalg.vector_norm(theta, dim=1), bool(stack and self.replaces_training)
        images = normal(tries, "images", (self.batches, self.batch, *task.data.input), w.device)
        labels = normal(tries, "labels", (self.batches, self.batch, task.data.classes), w.device)
        if self.labels == "project":
            labels = labels.softmax(-1)
        steps = torch.full((len(w), self.batches * self.epochs), self.step, device=w.device)
        own = _own_data(stack, self.restarts) if stack and (self.best or self.objective != "l2") else None
        objective = self._objective(task, w, theta, own)
        drifts = self._drifts(tries, w)
        factored: tuple[str, ...] = ()  # a CPU's results stay as they were
        if w.is_cuda and current().kernels and not self.drift and task.stackable and len(w) > 1:
            factored = large(task, self.batches * self.epochs * self.batch)
        induced, present = torch.empty_like(w), torch.empty_like(norm)
        kept = [t.clone() for t in (images, labels, steps, norm)]
        lowest = torch.full_like(norm, math.inf)

        def loss(w: Tensor, norm: Tensor, images: Tensor, labels: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
            """Of the batches as the other side will see them, and what they induce."""
            soft = labels if self.labels == "project" else labels.softmax(-1)
            soft = simplex(Rounding.unit(soft, self.precision)(soft))
            pixels = Rounding.of(images, self.precision)(images)
            g = self.induced(task, w, pixels, soft, steps, None if free else norm, True, factored)
            return objective(g), g

        fitted = derivatives(loss, 2)  # its thousands of operators take longer to compile than a run takes

        def derive() -> Sequence[Tensor]:
            losses, *gradients, g = fitted(drifts(), norm, images, labels, steps)
            if free:
                norm.copy_(torch.linalg.vector_norm(g, dim=1))
            induced.copy_(g)
            present.copy_(losses)
            return losses, *gradients

        def watch() -> None:
            score = own.loss(task, w - induced) if own and self.best else present
            better = score < lowest
            lowest.copy_(torch.where(better, score, lowest))
            for best, now in zip(kept, (images, labels, steps, norm), strict=True):
                best.copy_(torch.where(better.view(-1, *[1] * (now.dim() - 1)), now, best))

        def project() -> None:
            steps.clamp_(-LONGEST, LONGEST)
            if self.labels == "project":
                labels.copy_(simplex(labels))

        variables = [Variable(images, self.lr), Variable(labels, self.lr), Variable(steps, self.lr_steps)]
        adam(derive, variables, self.decay ** torch.arange(self.fits), project, watch)
        best = lowest.view(clients, self.restarts).argmin(1) + torch.arange(clients, device=w.device) * self.restarts
        images, labels, steps, norm = (t[best] for t in kept)
        soft = labels if self.labels == "project" else labels.softmax(-1)
        pixels = Rounding.of(images, self.precision)
        rows = (pixels.shrink(images), Rounding.unit(soft, self.precision).shrink(soft), steps, norm[:, None])
        if stack:
            stack.passes += sum(self.forecast_compute(int(n)).passes for n in stack.rows.counts)
        return [
            Synthetic(x, y, eta, h, float(low), float(high))
            for x, y, eta, h, low, high in zip(*(t.cpu() for t in rows), pixels.low, pixels.high, strict=True)
        ]

    def _objective(self, task: Task, w: Tensor, theta: Tensor, own: _Own | None) -> Callable[[Tensor], Tensor]:
        """What is minimised, as a function of the induced update [C, d]: [C]."""
        if self.objective == "l2" or own is None:
            return lambda g: (theta - g).square().sum(1)
        if self.objective == "data":
            return lambda g: own.loss(task, w - g)
        predictions = own.logits(task, w - theta).softmax(-1)
        return lambda g: own.mean(
            F.kl_div(own.logits(task, w - g).log_softmax(-1), predictions, reduction="none").sum(-1)
        )

    def _drifts(self, tries: Sequence[Seed], w: Tensor) -> Callable[[], Tensor]:
        """The weights a step is fitted at: `w`, or with `drift` the next of a few draws from the ball around it."""
        if not self.drift:
            return lambda: w
        draws = torch.stack([normal(tries, f"drift {i}", (w.shape[1],), w.device) for i in range(8)])
        draws *= self.drift / torch.linalg.vector_norm(draws, dim=2, keepdim=True)
        turn = torch.zeros(1, dtype=torch.int64, device=w.device)

        def drifted() -> Tensor:
            moved = w + draws.index_select(0, turn)[0]
            turn.copy_((turn + 1) % len(draws))
            return moved

        return drifted


def _descended(task: Task, w: Tensor, batches: Batches, fit: bool) -> Tensor:
    """Σ η_m ĝ_m over normalised steps from `w` [C, d], [C, d]; with `fit` it can be differentiated."""
    losses = task.stacked(lambda w, x, y: cross_entropy(task.f(w, x), y))
    start = w.detach()
    here = start.clone().requires_grad_()
    for x, y, eta in batches:
        (g,) = torch.autograd.grad(losses(here, x, y).mean(1).sum(), here, create_graph=fit)
        there: Tensor = _Step.apply(here, g, eta)  # type: ignore[no-untyped-call]
        here = there if fit else there.detach().requires_grad_()
    return start - (here if fit else here.detach())


class _Step(torch.autograd.Function):
    """w - η g/‖g‖ for w, g [C, d] and η [C], with a derivative that reads each [C, d] as few times as it can.

    An unrolled fit does little else than read and write such vectors. With ĝ = g/‖g‖ and v̄ the derivative of what
    follows by the result: w̄ = v̄, η̄ = -⟨v̄, ĝ⟩, ḡ = -(η/‖g‖)(v̄ - ⟨v̄, ĝ⟩ ĝ).
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, g: Tensor, eta: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(g, dim=1).clamp(min=1e-12)
        ctx.save_for_backward(g, eta, length)
        return torch.addcmul(w, g, -(eta / length)[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g, eta, length = ctx.saved_tensors
        along = torch.linalg.vecdot(after, g) / length
        g_ = (after * -(eta / length)[:, None]).addcmul_(g, (eta * along / length.square())[:, None])
        return after, g_, -along


@dataclass(frozen=True)
class _Own:
    """The clients' own records, padded: x [C, n, …], y [C, n], mask [C, n]."""

    x: Tensor
    y: Tensor
    mask: Tensor

    def logits(self, task: Task, w: Tensor) -> Tensor:
        if w.is_cuda and not torch.is_grad_enabled():  # so many records keep a GPU busy a client at a time
            return torch.stack([task.f(row, x) for row, x in zip(w, self.x, strict=True)])
        logits: Tensor = task.stacked(task.f)(w, self.x)
        return logits

    def mean(self, losses: Tensor) -> Tensor:
        return (losses * self.mask).sum(1) / self.mask.sum(1)

    def loss(self, task: Task, w: Tensor) -> Tensor:
        """Mean loss of each client's data at weights [C, d]: [C]."""
        return self.mean(task.loss(self.logits(task, w).flatten(0, 1), self.y.flatten(0, 1)).view(self.y.shape[:2]))


def _own_data(stack: ClientStack, restarts: int) -> _Own:
    index, mask = (torch.from_numpy(a).to(stack.task.device) for a in stack.rows.padded())
    rows = index.repeat_interleave(restarts, 0)
    return _Own(stack.task.x[rows], stack.task.y[rows], mask.repeat_interleave(restarts, 0))
