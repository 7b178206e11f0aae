"""Local training: what every client of a stack does with its own records before it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.core.directions import words
from fedveil.core.forecast import Compute
from fedveil.core.stack import ClientStack
from fedveil.core.version import ADDED
from fedveil.gpu.graphs import repeat
from fedveil.privacy.dpsgd import DpSgd
from fedveil.train.schedules import Scheduled

MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}  # vectors that an optimizer holds
PRECISIONS = ("float32", "bfloat16")
GRADIENT_CHUNK = 256
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # weights [C, d], x, y, mask [C, B] -> [C, d]


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
        `gradient_of` takes the place of `task.gradient` where gradients are not derived but estimated.
        """
        task, device = stack.task, stack.task.device
        index, size = self.plan(stack)
        stack.passes += int(size.sum())
        steps = (size > 0).sum(0)
        index_, size_ = torch.from_numpy(index).to(device), torch.from_numpy(size).to(device)
        norms = task.norms.values.expand(len(stack), -1) if stack.norms is None else stack.norms.to(device)
        own, statistics = (t.clone() for t in norms.tensor_split([task.norms.trained], 1))
        weights = torch.cat([w.to(device).expand(len(stack), -1), own], 1)  # and the batch norm layers' own
        cursor = torch.zeros(1, dtype=torch.int64, device=device)
        derive = self._accumulated(gradient_of or self._gradient(stack, statistics))
        descend = self._descent(weights, stack.round, correction and partial(_padded, correction, len(w)))

        def step(width: int) -> None:
            rows, count = index_[cursor, :, :width][0], size_[cursor][0]
            mask = (torch.arange(width, device=device) < count[:, None]).float()
            descend(derive(weights, task.x[rows], task.y[rows], mask), (count > 0).float()[:, None])
            cursor.add_(1)

        done = 0
        for width, times in _widths(size, device):
            repeat(partial(step, width), times, device, (done, len(size)))
            done += times
        stack.norms = torch.cat([weights[:, len(w) :], statistics], 1)
        return weights[:, : len(w)], torch.from_numpy(steps).to(device)

    def train_privately(
        self, stack: ClientStack, w: Tensor, how: DpSgd, correction: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Train each client from `w` [d] by private gradients, weights [C, d]: all that they tell of its records.

        Every client takes as many steps, however many records it has. Weight decay and `correction` look at weights
        only, and come after the noise.
        """
        weights = w.to(stack.task.device).expand(len(stack), -1).clone()
        descend, everyone = self._descent(weights, stack.round, correction), weights.new_ones(len(stack), 1)
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

    def _gradient(self, stack: ClientStack, statistics: Tensor) -> Gradient:
        """The gradient of a minibatch in this precision. Running `statistics` [C, s] are replaced by new ones."""
        task = stack.task
        plain = task.fused("gradient", partial(task.gradient, precision=self.precision), self.precision)
        if not task.has_training_mode:
            return lambda *batch: plain(*batch)[0]
        fused = task.fused("train gradient", partial(task.train_gradient, precision=self.precision), self.precision)
        keys, drawn = stack.keys("noise"), torch.zeros(1, dtype=torch.int64, device=task.device)

        def in_training(*batch: Tensor) -> Tensor:
            weights, x, y, mask = batch
            gradient, _, new = fused(weights, statistics, x, y, mask, words(keys, drawn))
            statistics.copy_(new)
            drawn.add_(1)
            return gradient

        return in_training

    def _accumulated(self, derive: Gradient) -> Gradient:
        """The gradient of the mean over all records of a step, of which `derive` is given one minibatch at a time."""
        if self.accumulate == 1:
            return derive

        def gradient(weights: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            total, count = torch.zeros_like(weights), mask.sum(1, keepdim=True).clamp(min=1)
            for part in zip(*(t.split(self.batch, 1) for t in (x, y, mask)), strict=True):
                total += derive(weights, *part) * (part[-1].sum(1, keepdim=True) / count)
            return total

        return gradient

    def _descent(
        self, weights: Tensor, round_: int, correction: Callable[[Tensor], Tensor] | None
    ) -> Callable[[Tensor, Tensor], None]:
        """A step in place of `weights` [C, d] along a gradient [C, d], for the clients with `active` [C, 1] = 1."""
        rate = self.rate(round_)
        update, decoupled = self._optimizer(weights, rate), self.optimizer == "adamw"

        def step(gradient: Tensor, active: Tensor) -> None:
            if self.weight_decay and decoupled:
                weights.mul_(1 - rate * self.weight_decay * active)
            elif self.weight_decay:
                gradient += self.weight_decay * weights
            if correction:
                gradient += correction(weights)
            update(gradient, active)

        return step

    def _optimizer(self, weights: Tensor, lr: float) -> Callable[[Tensor, Tensor], None]:
        """The update in place of `weights` [C, d] by a gradient [C, d], for the clients with `active` [C, 1] = 1."""
        if self.optimizer == "sgd":

            def sgd(gradient: Tensor, active: Tensor) -> None:
                weights.sub_(gradient.mul_(active), alpha=lr)

            return sgd
        first = torch.zeros_like(weights)
        if self.optimizer == "momentum":

            def momentum(gradient: Tensor, active: Tensor) -> None:
                first.mul_(self.momentum).add_(gradient)
                weights.sub_(first * active, alpha=lr)

            return momentum
        second = torch.zeros_like(weights)
        taken = torch.zeros((), device=weights.device)
        exact = self.optimizer == "adamw"  # PyTorch's ε, where Adam's is that of Kingma and Ba's section 2

        def adam(gradient: Tensor, active: Tensor) -> None:
            taken.add_(1)
            first.lerp_(gradient, 1 - self.momentum)
            second.lerp_(gradient.square(), 1 - self.beta2)
            unbiased = (1 - self.beta2**taken).sqrt()
            scale, epsilon = unbiased / (1 - self.momentum**taken), 1e-8 * unbiased if exact else 1e-8
            weights.sub_(scale * first / (second.sqrt() + epsilon) * active, alpha=lr)

        return adam


def _padded(correction: Callable[[Tensor], Tensor], shared: int, weights: Tensor) -> Tensor:
    """A correction of the weights that are shared [C, d], with zeros for what clients keep: [C, d + p]."""
    return F.pad(correction(weights[:, :shared]), (0, weights.shape[1] - shared))


def _batches(order: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut one epoch's order [n] into batches [steps, batch], the last padded, and their sizes [steps]."""
    steps = -(-len(order) // batch)
    padded = np.full(steps * batch, order[0])
    padded[: len(order)] = order
    return padded.reshape(steps, batch), np.minimum(batch, len(order) - batch * np.arange(steps))


def _widths(size: np.ndarray, device: torch.device) -> Iterator[tuple[int, int]]:
    """How wide the batches of a schedule are, and for how many steps: on a GPU one width is one graph for all of them,
    on a CPU what is not computed is time saved."""
    widest = size.max(axis=1).tolist()
    if device.type == "cuda":
        yield max(widest), len(widest)
    else:
        for width, steps in groupby(widest):
            yield width, len(list(steps))


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
