"""TOFU: an update as the gradient of a few proxy points (TOFU, 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from fedveil.codecs.base import Codec
from fedveil.codecs.fit import (
    PRECISIONS,
    WIDEST,
    Rounding,
    Variable,
    adam,
    check_labels,
    check_points,
    cosine,
    derivatives,
    normal,
    simplex,
)
from fedveil.core import message, schema
from fedveil.core.capability import SECOND_DERIVATIVES, SOFT_LABELS
from fedveil.core.forecast import Compute
from fedveil.core.losses import cross_entropy
from fedveil.core.message import Answer, Count, Shape, Size
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.gpu.context import current


@message.kind
class Proxies(Answer, frozen=True):
    """Proxy points, their weights, and the norm of each layer's update."""

    images: Annotated[Tensor, Shape(("points", "proxy"), "pixels", -WIDEST, WIDEST)]
    labels: Annotated[Tensor, Shape(("points", "classes"), "pixels", 0, 255)]
    alphas: Annotated[Tensor, Shape(("points",), low=0, high=1, simplex=True)]
    scales: Annotated[Tensor, Shape(("layers",), low=0)]
    low: float  # the range of 8-bit images
    high: float
    records: Count = 1


@dataclass(frozen=True)
class TofuCodec(Codec[Proxies]):
    """Encode an update into the gradient of a few proxy points (section 3.2).

    channels, shrink: the paper's priors (section 3.4): fewer channels are replicated, smaller images upsampled
    precision:        float32 (the paper), float16 or uint8 images and labels, fitted with the rounding
    decay:            of the learning rate: steps (the paper: ×0.1 at 3/8, 5/8 and 7/8) or late, held for three quarters
                      and then falling linearly to 0, which reaches the same cosine in about half as many steps
    cautious_after:   from the round after this one the update is scaled by the cosine its proxies reach (switch₁)
    """

    name: ClassVar[str] = "tofu"
    payload: ClassVar[type[Answer]] = Proxies
    needs: ClassVar[tuple[str, ...]] = (SOFT_LABELS, SECOND_DERIVATIVES)

    points: int = 64
    steps: int = 1000
    lr: float = 0.1
    channels: int | None = None
    shrink: int = 1
    precision: str = "float32"
    decay: str = "steps"
    cautious_after: int | None = None

    def __post_init__(self) -> None:
        if self.points < 1 or self.steps < 1 or self.lr <= 0 or self.shrink < 1:
            raise ValueError("tofu needs points, steps and shrink of at least 1 and lr > 0")
        if self.precision not in PRECISIONS:
            raise ValueError(f"tofu.precision is '{self.precision}'; use {', '.join(PRECISIONS)}")
        if self.decay not in ("steps", "late"):
            raise ValueError(f"tofu.decay is '{self.decay}'; use steps or late")

    def validate(self, task: Task) -> None:
        if not task.data.x.is_floating_point():
            raise ValueError(
                "tofu fits its inputs by gradient, and tokens have none; use a codec such as qsgd or top-k"
            )
        check_labels(self.name, task)
        shape = task.data.input
        if len(shape) != 3 and (self.channels or self.shrink > 1):
            raise ValueError(f"the priors channels and shrink are for images, and inputs here have shape {shape}")
        if len(shape) == 3 and (
            shape[1] % self.shrink or shape[2] % self.shrink or (self.channels or shape[0]) not in (1, shape[0])
        ):
            raise ValueError(f"channels {self.channels} and shrink {self.shrink} do not suit images of shape {shape}")

    def sizes(self, task: Task) -> Mapping[str, Size]:
        return {**task.sizes, "points": self.points, "proxy": self._proxy(task), "pixels": PRECISIONS[self.precision]}

    def forecast_compute(self, records: int) -> Compute:
        return Compute(self.steps * self.points, vectors=5, held=2 * self.points)  # twice: for its derivative

    def check(self, task: Task, payload: Proxies) -> None:
        check_points(payload.labels, payload.low, payload.high)

    def exhibit(self, payload: Proxies) -> tuple[str, Tensor, Tensor]:
        return "proxy images", payload.images, payload.labels

    def encode(
        self, task: Task, w: Tensor, updates: Tensor, seeds: Sequence[Seed], stack: ClientStack | None
    ) -> list[Proxies]:
        images = normal(seeds, "images", (self.points, *self._proxy(task)), w.device)
        labels = normal(seeds, "labels", (self.points, task.data.classes), w.device)
        alphas = normal(seeds, "alphas", (self.points,), w.device)

        def loss(w: Tensor, updates: Tensor, images: Tensor, labels: Tensor, alphas: Tensor) -> tuple[Tensor]:
            """Of the points as the other side will see them (eq. 3)."""
            soft = labels.softmax(2)
            soft = simplex(Rounding.unit(soft, self.precision)(soft))
            pixels = Rounding.of(images, self.precision)(images)
            direction = self._direction(task, w, pixels, soft, alphas.softmax(1), create_graph=True)
            return (1 - cosine(direction, updates),)

        derive = derivatives(loss, 2)
        if current().compile:  # a trace for CPUs takes longer than it saves
            derive = task.fused("tofu", derive, replace(self, steps=1))
        variables = [Variable(v, self.lr) for v in (images, labels, alphas)]
        misfit = adam(lambda: derive(w, updates, images, labels, alphas), variables, self._rates())
        scales = torch.stack(
            [torch.linalg.vector_norm(updates[:, a.start : a.stop], dim=1) for a in task.layout.layers], 1
        )
        if stack and self.cautious_after is not None and stack.round > self.cautious_after:
            scales *= (1 - misfit)[:, None].clamp(min=0)
        pixels, soft = Rounding.of(images, self.precision), labels.softmax(2)
        rows = (pixels.shrink(images), Rounding.unit(soft, self.precision).shrink(soft), alphas.softmax(1), scales)
        if stack:
            stack.passes += self.steps * self.points * len(updates)
        return [
            Proxies(x, y, a, s, float(low), float(high))
            for x, y, a, s, low, high in zip(*(t.cpu() for t in rows), pixels.low, pixels.high, strict=True)
        ]

    def decode(self, task: Task, w: Tensor, payloads: Sequence[Proxies]) -> Tensor:
        images, labels, alphas, scales, low, high = (
            schema.stack(payloads, name).to(w.device)
            for name in ("images", "labels", "alphas", "scales", "low", "high")
        )
        soft = simplex(Rounding.unit(labels, self.precision).expand(labels))
        pixels = Rounding(self.precision, low.float(), high.float()).expand(images)
        direction = self._direction(task, w, pixels, soft, alphas)
        update = torch.empty_like(direction)
        for i, layer in enumerate(task.layout.layers):
            piece = direction[:, layer.start : layer.stop]
            norm = torch.linalg.vector_norm(piece, dim=1, keepdim=True).clamp(min=1e-12)
            update[:, layer.start : layer.stop] = piece * (scales[:, i : i + 1] / norm)
        return update

    def _direction(
        self, task: Task, w: Tensor, images: Tensor, labels: Tensor, alphas: Tensor, create_graph: bool = False
    ) -> Tensor:
        """Minus the gradient of Σ α_i L(w; x_i, y_i), eqs. 1 and 2: the way a step on the proxies goes, [C, d]."""
        w = w.detach().requires_grad_()
        losses = task.stacked(lambda w, x, y: cross_entropy(task.f(w, x), y))(w, self._shown(task, images), labels)
        (gradient,) = torch.autograd.grad((losses * alphas).sum(), w, create_graph=create_graph)
        return -gradient

    def _proxy(self, task: Task) -> tuple[int, ...]:
        """The shape in which a proxy image is sent."""
        if len(task.data.input) != 3:
            return task.data.input
        channels, height, width = task.data.input
        return self.channels or channels, height // self.shrink, width // self.shrink

    def _shown(self, task: Task, images: Tensor) -> Tensor:
        """Sent images [C, N, …] as the model takes them: channels replicated, pixels repeated."""
        if self.shrink > 1:
            images = images.repeat_interleave(self.shrink, -1).repeat_interleave(self.shrink, -2)
        return images.expand(*images.shape[:2], *task.data.input)

    def _rates(self) -> Tensor:
        """A factor on the learning rate for each step."""
        passed = torch.arange(self.steps) / self.steps
        if self.decay == "late":
            return (4 * (1 - passed)).clamp(max=1)
        return torch.pow(0.1, (passed[:, None] >= torch.tensor([3, 5, 7]) / 8).sum(1))
