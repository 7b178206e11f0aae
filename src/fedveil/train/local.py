"""Local training: what every client of a stack does with its own records before it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedveil.core.directions import words
from fedveil.core.forecast import Compute
from fedveil.core.stack import ClientStack
from fedveil.core.version import ADDED
from fedveil.gpu.context import current
from fedveil.privacy.dpsgd import DpSgd
from fedveil.train.schedules import Scheduled
from fedveil.train.stepper import Gradient, Pull, Stepper

MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # vectors that an optimizer holds
PRECISIONS = ("float32", "bfloat16")
GRADIENT_CHUNK = 256
KEPT = 4  # steppers with their graphs


@dataclass(frozen=True)
class LocalTraining(Scheduled):
    """Minibatch training on a client's own records, reshuffled every epoch."""

    key: ClassVar[str] = "local"

    optimizer: str = "sgd"  # sgd, momentum, adam or adamw
    lr: float = 0.1
    epochs: int = 1
    steps: int | None = None  # of the optimizer, instead of epochs
    batch: int = 32
    momentum: float = 0.9  # also Adam's first moment
    beta2: float = 0.999
    weight_decay: float = 0.0  # AdamW shrinks the weights by it, the others add it to the gradient
    decay: float = 1.0  # lr is multiplied by it after every round
    decay_after: tuple[int, ...] = ()  # or after these rounds only
    accumulate: int = field(default=1, metadata=ADDED)  # minibatches of a step
    precision: str = field(default="float32", metadata=ADDED)  # of the model's layers; weights and steps are float32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in MOMENTS:
            raise ValueError(f"local.optimizer is '{self.optimizer}'; use sgd, momentum, adam or adamw")
        if self.precision not in PRECISIONS:
            raise ValueError(f"local.precision is '{self.precision}'; use {' or '.join(PRECISIONS)}")
        if self.accumulate < 1:
            raise ValueError(f"local.accumulate is {self.accumulate}; it must be at least 1")
        if self.lr <= 0 or self.batch < 1 or self.epochs < 1 or (self.steps is not None and self.steps < 1):
            raise ValueError("local training needs lr > 0 and batch, epochs and steps of at least 1")
        if not (0 <= self.momentum < 1 and 0 <= self.beta2 < 1 and self.weight_decay >= 0 and self.decay > 0):
            raise ValueError(
                "local.momentum and local.beta2 are from 0 to below 1, local.weight_decay is at least 0 and "
                "local.decay above 0"
            )
        if self.decay_after and (self.decay == 1 or [*self.decay_after] != sorted({0, *self.decay_after})[1:]):
            raise ValueError(
                f"local.decay_after is {[*self.decay_after]}, with local.decay {self.decay:g}; it lists rounds from 1 "
                "in increasing order, and local.decay is the factor after each, so other than 1"
            )

    def rate(self, round_: int) -> float:
        """The learning rate of a round, counted from 1."""
        lowered = sum(round_ > after for after in self.decay_after) if self.decay_after else round_ - 1
        return self.lr * self.decay**lowered * self.factor(round_)

    @property
    def step_size(self) -> int:
        """The records of a step, in one minibatch or several."""
        return self.batch * self.accumulate

    def forecast_compute(self, records: int) -> Compute:
        """What `train` takes of a client with so many records."""
        per_epoch = -(-records // self.step_size)
        epochs, steps = divmod(self.steps or self.epochs * per_epoch, per_epoch)
        vectors = 3 + MOMENTS[self.optimizer] + (self.accumulate > 1)
        return Compute(epochs * records + steps * self.step_size, vectors, min(self.batch, records))

    def train(
        self,
        stack: ClientStack,
        w: Tensor,
        correction: Callable[[Tensor], Tensor] | None = None,
        gradient_of: Gradient | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Train each client from `w` [d]. Returns weights [C, d] and steps taken [C].

        `correction` maps the present weights [C, d] to what is added to each minibatch gradient [C, d]: FedProx's pull
        to `w`, SCAFFOLD's control variates. A client whose steps are done stays as it is while others go on.
        `gradient_of` takes the place of `task.gradient` where gradients are not derived but estimated. On a GPU the
        weights hold until the next stack of the same shape is trained.
        """
        index, size = self.plan(stack)
        stack.passes += int(size.sum())
        stepper = self._stepper(stack, index.shape, correction, gradient_of)
        stepper.load(stack, w, index, size, correction)
        stepper.run(size)
        stack.norms = torch.cat([stepper.weights[:, len(w) :], stepper.statistics], 1)
        return stepper.weights[:, : len(w)], torch.from_numpy((size > 0).sum(0)).to(w.device)

    def _stepper(
        self,
        stack: ClientStack,
        shape: tuple[int, ...],
        correction: Callable[[Tensor], Tensor] | None,
        gradient_of: Gradient | None,
    ) -> Stepper:
        """What takes the steps of a schedule of this shape, [S, C, B]. On a GPU one is kept for each of the last few
        shapes, because its graph takes longer to capture than to replay."""
        task, kept = stack.task, stack.task.steppers
        if task.device.type == "cpu" or gradient_of or not (correction is None or isinstance(correction, Pull)):
            return Stepper(self, task, shape, self.rate(stack.round), correction, gradient_of)
        room = 1 << (shape[0] - 1).bit_length()  # for schedules that are somewhat longer
        kind = correction and (correction.strength, correction.offset is not None)
        key = (self, room, *shape[1:], kind, current().compile, current().kernels, threading.get_ident())
        if key not in kept:
            while len(kept) >= KEPT:
                del kept[next(iter(kept))]
            rate = torch.zeros((), device=task.device)
            kept[key] = Stepper(self, task, (room, *shape[1:]), rate, correction, None)
        stepper: Stepper = kept.pop(key)
        kept[key] = stepper  # the newest comes last
        return stepper

    def train_privately(
        self, stack: ClientStack, w: Tensor, how: DpSgd, correction: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Train each client from `w` [d] by private gradients, weights [C, d]: all that they tell of its records.

        Every client takes as many steps, however many records it has. Weight decay and `correction` look at weights
        only, and come after the noise.
        """
        weights = w.to(stack.task.device).expand(len(stack), -1).clone()
        descend, _ = self.descent(weights, self.rate(stack.round), correction)
        everyone = weights.new_ones(len(stack), 1)
        steps = self.private_steps(stack.task.largest)
        how.descend(stack, weights, self.batch, steps, lambda gradient: descend(gradient, everyone))
        return weights

    def private_steps(self, largest: int) -> int:
        """The steps of private training, where `largest` records are the most a client may have."""
        return self.steps or self.epochs * -(-largest // self.batch)

    def forecast_private_compute(self, records: int, largest: int) -> Compute:
        """What `train_privately` takes of a client with so many records."""
        size = min(self.batch, records)
        return Compute(self.private_steps(largest) * size, 4 + MOMENTS[self.optimizer] + size, size)

    def plan(self, stack: ClientStack) -> tuple[np.ndarray, np.ndarray]:
        """Which records each step uses: indices [S, C, B] and how many of the B count, [S, C] (0 when done)."""
        plans = []
        for own, seed in zip(stack.rows.indices, stack.seeds("shuffle"), strict=True):
            rng, per_epoch = seed.numpy(), -(-len(own) // self.step_size)
            total = self.steps or self.epochs * per_epoch
            epochs = [_batches(rng.permutation(own), self.step_size) for _ in range(-(-total // per_epoch))]
            plans.append(
                (np.concatenate([b for b, _ in epochs])[:total], np.concatenate([n for _, n in epochs])[:total])
            )
        longest = max(len(n) for _, n in plans)
        width = min(self.step_size, int(stack.rows.counts.max()))
        index = np.zeros((longest, len(stack), width), np.int64)
        size = np.zeros((longest, len(stack)), np.int64)
        for k, (batches, counts) in enumerate(plans):
            index[:, k] = stack.rows.indices[k][0]
            index[: len(counts), k] = batches[:, :width]
            size[: len(counts), k] = counts
        return index, size

    def descent(
        self, weights: Tensor, rate: float | Tensor, correction: Callable[[Tensor], Tensor] | None
    ) -> tuple[Callable[[Tensor, Tensor], None], list[Tensor]]:
        """A step in place of `weights` [C, d] along a gradient [C, d], for the clients with `active` [C, 1] = 1, and
        the tensors that the optimizer holds, which begin at 0. A rate in a tensor [] may change between steps."""
        update, held = self._optimizer(weights, rate)
        decoupled = self.optimizer == "adamw"

        def step(gradient: Tensor, active: Tensor) -> None:
            if self.weight_decay and decoupled:
                weights.mul_(1 - rate * self.weight_decay * active)
            elif self.weight_decay:
                gradient += self.weight_decay * weights
            if correction:
                gradient += correction(weights)
            update(gradient, active)

        return step, held

    def _optimizer(self, weights: Tensor, lr: float | Tensor) -> tuple[Callable[[Tensor, Tensor], None], list[Tensor]]:
        """The update in place of `weights` [C, d] by a gradient [C, d], for the clients with `active` [C, 1] = 1, and
        what it holds."""

        def descend(step: Tensor) -> None:
            if isinstance(lr, Tensor):
                weights.addcmul_(step, lr, value=-1)
            else:
                weights.sub_(step, alpha=lr)

        if self.optimizer == "sgd":
            return lambda gradient, active: descend(gradient.mul_(active)), []
        first = torch.zeros_like(weights)
        if self.optimizer == "momentum":

            def momentum(gradient: Tensor, active: Tensor) -> None:
                first.mul_(self.momentum).add_(gradient)
                descend(first * active)

            return momentum, [first]
        second = torch.zeros_like(weights)
        taken = torch.zeros((), device=weights.device)
        exact = self.optimizer == "adamw"  # PyTorch's ε, where Adam's is that of Kingma and Ba's section 2

        def adam(gradient: Tensor, active: Tensor) -> None:
            taken.add_(1)
            first.lerp_(gradient, 1 - self.momentum)
            second.lerp_(gradient.square(), 1 - self.beta2)
            unbiased = (1 - self.beta2**taken).sqrt()
            scale, epsilon = unbiased / (1 - self.momentum**taken), 1e-8 * unbiased if exact else 1e-8
            descend(scale * first / (second.sqrt() + epsilon) * active)

        return adam, [first, second, taken]


def _batches(order: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut one epoch's order [n] into batches [steps, batch], the last padded, and their sizes [steps]."""
    steps = -(-len(order) // batch)
    padded = np.full(steps * batch, order[0])
    padded[: len(order)] = order
    return padded.reshape(steps, batch), np.minimum(batch, len(order) - batch * np.arange(steps))


def full_gradient_compute(records: int) -> Compute:
    """What `full_gradient` takes of a client with so many records."""
    return Compute(records, held=min(GRADIENT_CHUNK, records))


def full_gradient(stack: ClientStack, w: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's gradient over all its records at `w` [d], and its mean loss there: [C, d], [C]."""
    task, device = stack.task, stack.task.device
    index, mask = (torch.from_numpy(a).to(device) for a in stack.rows.padded())
    stack.passes += int(stack.rows.counts.sum())
    weights = w.to(device).expand(len(stack), -1)
    gradient = torch.zeros_like(weights)
    loss = torch.zeros(len(stack), device=device)
    total, keys, number = mask.sum(1), stack.keys("noise"), torch.zeros(1, dtype=torch.int64, device=device)
    for rows, part in zip(index.split(GRADIENT_CHUNK, 1), mask.split(GRADIENT_CHUNK, 1), strict=True):
        share = part.sum(1) / total
        piece, mean = task.gradient(weights, task.x[rows], task.y[rows], part, words(keys, number))
        number += 1
        gradient += piece * share[:, None]
        loss += mean * share
    return gradient, loss
