"""Minibatch steps of a stack of clients, on tensors that outlive a stack, so that one CUDA graph serves many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.core.directions import words
from fedveil.core.lengths import trimmed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.gpu.graphs import Captured, repeat

Gradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # weights [C, d], x, y, mask [C, B] -> [C, d]


class Settings(Protocol):
    """What `LocalTraining` says of the steps."""

    @property
    def batch(self) -> int: ...

    @property
    def accumulate(self) -> int: ...

    @property
    def precision(self) -> str: ...

    def rate(self, round_: int) -> float: ...

    def descent(
        self, weights: Tensor, rate: float | Tensor, correction: Callable[[Tensor], Tensor] | None
    ) -> tuple[Callable[[Tensor, Tensor], None], list[Tensor]]: ...


@dataclass(frozen=True)
class Pull:
    """What is added to each gradient [C, d] at weights v [C, d]: strength (v - w) + offset.

    w:      the weights [d] that clients began with
    offset: [C, d]; None: 0
    """

    w: Tensor
    strength: float = 0.0
    offset: Tensor | None = None

    def __call__(self, v: Tensor) -> Tensor:
        if self.offset is None:
            return self.strength * (v - self.w)
        return self.strength * (v - self.w) + self.offset if self.strength else self.offset


class Stepper:
    """Takes the steps of a schedule [S, C, B]: S minibatches of at most B records of each of C clients.

    weights:    [C, d + p], the clients' weights and those that batch norm layers keep to themselves
    statistics: [C, s], running statistics of batch norm layers
    rate:       the learning rate; in a tensor [] it is that of the round that is loaded
    """

    def __init__(
        self,
        local: Settings,
        task: Task,
        shape: tuple[int, ...],
        rate: float | Tensor,
        correction: Callable[[Tensor], Tensor] | None,
        gradient_of: Gradient | None,
    ) -> None:
        self.local, self.task, self.rate = local, task, rate
        clients, trained = shape[1], task.layout.size + task.norms.trained

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=task.device)

        self.weights = zeros(clients, trained, dtype=torch.float32)
        self.statistics = zeros(clients, len(task.norms) - task.norms.trained, dtype=torch.float32)
        self._index, self._size = zeros(*shape), zeros(*shape[:2])
        self._cursor, self._drawn, self._keys = zeros(1), zeros(1), zeros(clients)
        self._pull = correction
        if isinstance(correction, Pull) and isinstance(rate, Tensor):  # copies, which `load` fills
            offset = None if correction.offset is None else torch.empty_like(correction.offset)
            self._pull = Pull(torch.empty_like(correction.w), correction.strength, offset)
        added = self._pull and partial(_padded, self._pull, task.layout.size)
        self._derive = self._accumulated(gradient_of or self._gradient())
        self._descend, self._held = local.descent(self.weights, rate, added)
        self._steps: dict[int, Captured] = {}

    def load(
        self,
        stack: ClientStack,
        w: Tensor,
        index: np.ndarray,
        size: np.ndarray,
        correction: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """Begin with the weights `w` [d] and a schedule: indices of records [S, C, B] and how many count, [S, C]."""
        task = self.task
        norms = task.norms.values.expand(len(stack), -1) if stack.norms is None else stack.norms.to(task.device)
        own, statistics = norms.tensor_split([task.norms.trained], 1)
        self.weights[:, : len(w)] = w
        self.weights[:, len(w) :] = own
        self.statistics.copy_(statistics)
        self._index[: len(index)] = torch.from_numpy(index)
        self._size[: len(size)] = torch.from_numpy(size)
        if task.has_training_mode:
            self._keys.copy_(stack.keys("noise"))
        for tensor in (self._cursor, self._drawn, *self._held):
            tensor.zero_()
        if isinstance(self.rate, Tensor):
            self.rate.fill_(self.local.rate(stack.round))
        if self._pull is not correction:
            assert isinstance(self._pull, Pull)
            assert isinstance(correction, Pull)
            self._pull.w.copy_(correction.w)
            if self._pull.offset is not None and correction.offset is not None:
                self._pull.offset.copy_(correction.offset)

    def run(self, size: np.ndarray) -> None:
        """Take the steps of the schedule that was loaded, whose sizes [S, C] are these."""
        done = 0
        for width, times in _widths(size, self.task.device, self._index.shape[2]):
            if width not in self._steps:
                self._steps[width] = Captured(partial(self._step, width))
            repeat(self._steps[width], times, self.task.device, (done, len(size)))
            done += times

    def _step(self, width: int) -> None:
        rows, count = self._index[self._cursor, :, :width][0], self._size[self._cursor][0]
        mask = (torch.arange(width, device=rows.device) < count[:, None]).float()
        gradient = self._derive(self.weights, self._cut(self.task.x[rows]), self.task.y[rows], mask)
        self._descend(gradient, (count > 0).float()[:, None])
        self._cursor.add_(1)

    def _cut(self, x: Tensor) -> Tensor:
        """Records [C, B, …] without needless padding; on a GPU, a graph has one shape."""
        padding = self.task.data.padding
        return x if padding is None or x.is_cuda else trimmed(x, padding)

    def _gradient(self) -> Gradient:
        """The gradient of a minibatch in the precision of local training. Running statistics are replaced by new."""
        task, precision = self.task, self.local.precision
        plain = task.fused("gradient", partial(task.gradient, precision=precision), precision)
        if not task.has_training_mode:
            return lambda *batch: plain(*batch)[0]
        fused = task.fused("train gradient", partial(task.train_gradient, precision=precision), precision)

        def in_training(*batch: Tensor) -> Tensor:
            weights, x, y, mask = batch
            gradient, _, new = fused(weights, self.statistics, x, y, mask, words(self._keys, self._drawn))
            self.statistics.copy_(new)
            self._drawn.add_(1)
            return gradient

        return in_training

    def _accumulated(self, derive: Gradient) -> Gradient:
        """The gradient of the mean over all records of a step, of which `derive` is given one minibatch at a time."""
        if self.local.accumulate == 1:
            return derive

        def gradient(weights: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            total, count = torch.zeros_like(weights), mask.sum(1, keepdim=True).clamp(min=1)
            for part in zip(*(t.split(self.local.batch, 1) for t in (x, y, mask)), strict=True):
                total += derive(weights, *part) * (part[-1].sum(1, keepdim=True) / count)
            return total

        return gradient


def _padded(correction: Callable[[Tensor], Tensor], shared: int, weights: Tensor) -> Tensor:
    """A correction of the weights that are shared [C, d], with zeros for what clients keep: [C, d + p]."""
    return F.pad(correction(weights[:, :shared]), (0, weights.shape[1] - shared))


def _widths(size: np.ndarray, device: torch.device, widest: int) -> Iterator[tuple[int, int]]:
    """How wide the batches of a schedule are, and for how many steps: on a GPU one width is one graph for all of them,
    on a CPU what is not computed is time saved."""
    if device.type == "cuda":
        yield widest, len(size)
    else:
        for width, steps in groupby(size.max(axis=1).tolist()):
            yield width, len(list(steps))
