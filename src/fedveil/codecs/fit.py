"""Fitting synthetic data: Adam over a stack of clients, each minimising its own loss, a captured graph a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.core.message import Refused
from fedveil.core.seeds import Seed
from fedveil.core.task import Task
from fedveil.gpu.graphs import repeat

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Variable:
    """Something to fit, [C, …], changed in place, with a learning rate of its own."""

    value: Tensor
    lr: float


def derivatives(loss: Callable[..., tuple[Tensor, ...]], fixed: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function that gives each client's loss [C], its gradients by all arguments but the first `fixed`, and what else
    `loss` gives after it."""

    def derived(*arguments: Tensor) -> tuple[Tensor, ...]:
        values = [value.detach().requires_grad_() for value in arguments[fixed:]]
        losses, *more = loss(*arguments[:fixed], *values)
        gradients = torch.autograd.grad(losses.sum(), values)
        return losses.detach(), *gradients, *(each.detach() for each in more)

    return derived


def adam(
    derive: Callable[[], Sequence[Tensor]],
    variables: Sequence[Variable],
    rates: Tensor,
    project: Callable[[], None] | None = None,
    watch: Callable[[], None] | None = None,
) -> Tensor:
    """Minimise each client's loss; returns the losses of the last step, [C].

    derive:  the present losses [C] and their gradients by the variables; client k's loss depends on row k of the
             variables alone
    rates:   a factor on the learning rates for each step, [steps]
    project: called after each step to put the variables back where they belong
    watch:   called in each step after `derive` and before the variables change
    """
    device = variables[0].value.device
    values = [v.value for v in variables]
    first, second = ([torch.zeros_like(v) for v in values] for _ in range(2))
    taken = torch.zeros(1, dtype=torch.int64, device=device)
    last = values[0].new_zeros(len(values[0]))
    time = torch.arange(1, len(rates) + 1, dtype=torch.float64, device=rates.device)
    rates = (rates / (1 - BETA1**time)).to(last)  # the corrections of Adam's bias, in double as in torch.optim
    spread = (1 - BETA2**time).sqrt().to(last)

    def step() -> None:
        losses, *gradients = derive()
        with torch.no_grad():
            last.copy_(losses)
            if watch:
                watch()
            rate, width = rates.index_select(0, taken), spread.index_select(0, taken)
            taken.add_(1)
            for variable, value, gradient, m, v in zip(variables, values, gradients, first, second, strict=True):
                m.lerp_(gradient, 1 - BETA1)
                v.lerp_(gradient.square(), 1 - BETA2)
                value.sub_(variable.lr * rate * m / (v.sqrt() / width + EPSILON))
            if project:
                project()

    repeat(step, len(rates), device)
    return last


def normal(seeds: Sequence[Seed], purpose: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Standard normal numbers [C, *shape], each client's from its own stream."""
    return torch.stack([torch.randn(shape, generator=s.child(purpose).torch()) for s in seeds]).to(device)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the rows of [C, d] and [C, d], [C]."""
    norms: Tensor = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    return (a * b).sum(1) / norms.clamp(min=1e-12)


def simplex(labels: Tensor) -> Tensor:
    """The last dimension clamped at 0 and renormalised; a row with nothing above 0 becomes uniform."""
    positive = labels.clamp(min=0)
    total = positive.sum(-1, keepdim=True)
    return torch.where(total > 1e-12, positive / total.clamp(min=1e-12), 1 / labels.shape[-1])


# ---------------------------------------------------------------------------------------------------- fewer bits

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}
WIDEST = 1e3  # the range of synthetic inputs, either way


def check_labels(codec: str, task: Task) -> None:
    """Raise a ValueError unless each record has one class label: synthetic points have soft ones."""
    if not task.data.labelled:
        held = "real numbers or bits as its target" if task.data.y.is_floating_point() else "several labels"
        raise ValueError(f"{codec} makes points with class labels, but each record has {held}; use qsgd or top-k")


def check_points(labels: Tensor, low: float, high: float) -> None:
    """Raise `Refused` where labels […, K] as sent are no probabilities or where 8-bit inputs have no range."""
    total = labels.sum(-1, dtype=torch.float32)
    if labels.is_floating_point():
        if float((total - 1).abs().max()) > 1e-3:
            raise Refused("out of range", "labels has rows that are not probabilities")
    elif float(total.min()) == 0:
        raise Refused("out of range", "labels has a row of zeros")
    if not -WIDEST <= low <= high <= WIDEST:
        raise Refused("out of range", f"low {low:g} to high {high:g} is no range within {-WIDEST:g} to {WIDEST:g}")


@dataclass(frozen=True)
class Rounding:
    """Numbers [C, …] sent in fewer bits. 8-bit ones are 256 levels between `low` [C] and `high` [C]."""

    precision: str
    low: Tensor
    high: Tensor

    @staticmethod
    def of(x: Tensor, precision: str) -> Rounding:
        """Levels over each client's own range."""
        flat = x.detach().flatten(1)
        return Rounding(precision, flat.amin(1), flat.amax(1))

    @staticmethod
    def unit(x: Tensor, precision: str) -> Rounding:
        """Levels over [0, 1]."""
        return Rounding(precision, torch.zeros_like(x.flatten(1)[:, 0]), torch.ones_like(x.flatten(1)[:, 0]))

    def shrink(self, x: Tensor) -> Tensor:
        """As it is sent."""
        if self.precision != "uint8":
            return x.to(PRECISIONS[self.precision])
        return ((x - self._wide(self.low, x)) / self._step(x)).round().clamp(0, 255).to(torch.uint8)

    def expand(self, sent: Tensor) -> Tensor:
        """As it is read, in float32."""
        return self._wide(self.low, sent) + sent * self._step(sent) if self.precision == "uint8" else sent.float()

    def __call__(self, x: Tensor) -> Tensor:
        """`x` as the other side will read it, with the gradient of `x` itself (straight-through)."""
        if self.precision == "float32":
            return x
        return x + (self.expand(self.shrink(x.detach())) - x.detach())

    def _step(self, x: Tensor) -> Tensor:
        return self._wide((self.high - self.low) / 255, x).clamp(min=1e-12)

    def _wide(self, t: Tensor, x: Tensor) -> Tensor:
        return t.view(-1, *[1] * (x.dim() - 1))
