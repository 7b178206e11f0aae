"""Forward-only gradients: run perturbed models on a batch, many at once, and see how the loss changes.

Nothing here is differentiated. A slope s_k = (ℓ(w + σ z_k) - ℓ(w)) / σ is one number a direction; the estimate of the
gradient is the mean of s_k z_k (BAFFLE, eq. 6), because E[z zᵀ] = I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedveil.codecs.directions import Directions
from fedveil.core.task import Task
from fedveil.gpu.products import Products

CPU_MEMORY = 16 << 20  # bytes: more is no faster, because caches are smaller
CPU_WORDS = 1 << 14  # of directions, drawn at a time for the same reason


@dataclass(frozen=True)
class Prober:
    """Probes of one task. G groups of records, each with weights and directions of its own, run as one stack.

    places: which entries of the flat weights are perturbed, int64 [n]; None is all of them
    memory: about how many bytes a pass may hold; None lets the device decide
    precision: in which models are run, but for their linear layers: float32, or float16 with a σ it does not swallow
    """

    task: Task
    directions: Directions
    sigma: float
    scheme: str  # forward: one pass a direction and one more; central: two passes a direction
    places: Tensor | None = None
    memory: int | None = None
    precision: torch.dtype = torch.float32

    def slopes(self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, share: Tensor, count: int) -> Tensor:
        """Slopes along the first `count` directions of each key.

        w [G, d], keys int64 [G], x [G, B, …], y [G, B, …], share [G, B, S]: what each record counts in each of S means
        -> [G, S, count]
        """
        return torch.cat(list(map(itemgetter(1), self._walk(w, keys, x, y, share, count))), -1)

    def gradient(self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, mask: Tensor, count: int) -> Tensor:
        """The estimate of each client's gradient of its mean loss, [G, d] (eq. 6); `mask` [G, B] is 0 for padding."""
        share = (mask / mask.sum(1, keepdim=True).clamp(min=1))[..., None]
        total = w.new_zeros(len(w), self.directions.size)
        for z, slope in self._walk(w, keys, x, y, share, count):
            total.add_((slope @ z)[:, 0], alpha=1 / count)
            del z  # before the next is regrown
        return self.spread(total)

    def combine(self, keys: Sequence[int], coefficients: Sequence[Tensor]) -> Tensor:
        """Σ_j Σ_k c_jk z_jk, [d]: the server's side of `slopes`, for keys j with coefficients c_j [K_j] each."""
        device = self.task.device
        total = torch.zeros(self.directions.size, device=device)
        step = max(1, self._memory // self._regrown)
        for key, own in zip(keys, coefficients, strict=True):
            for first in range(0, len(own), step):
                part = own[first : first + step].to(device)
                z = self._rows(torch.tensor([key], device=device), first, len(part))[0]
                total += part @ z
        return self.spread(total)

    def spread(self, z: Tensor) -> Tensor:
        """[…, n] in the trained places -> […, d]."""
        if self.places is None:
            return z
        full = z.new_zeros(*z.shape[:-1], self.task.layout.size)
        full[..., self.places] = z
        return full

    def chunk(self, groups: int, records: int) -> tuple[int, int]:
        """How many directions and how many records are run at once: as many as memory allows."""
        windows = 3 if self.task.device.type == "cuda" else 1  # convolutions are products of windows there
        regrown, pass_ = self._regrown, self.precision.itemsize * windows * self.task.activations
        room = self._memory // groups
        at_once = min(records, max(1, (room - regrown) // pass_))
        return (max(1, room // (regrown + at_once * pass_)) if self.task.stackable else 1), at_once

    @property
    def _regrown(self) -> int:
        """Bytes held for a direction while it is regrown and added to the weights."""
        return (32 if self.task.device.type == "cuda" else 8) * self.task.layout.size

    @cached_property
    def _memory(self) -> int:
        if self.memory is not None or self.task.device.type != "cuda":
            return self.memory or CPU_MEMORY
        return int(torch.cuda.get_device_properties(self.task.device).total_memory) // 6

    def _rows(self, keys: Tensor, first: int, count: int) -> Tensor:
        piece = None if keys.is_cuda else max(1024, CPU_WORDS // (len(keys) * count))
        rows: Tensor = self.directions.rows(torch, keys, first, count, piece)
        return rows

    def _walk(
        self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, share: Tensor, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Directions [G, k, n] and slopes [G, S, k] along them, a chunk at a time."""
        at_once, records = self.chunk(*x.shape[:2])
        parts = list(zip(x.split(records, 1), y.split(records, 1), share.split(records, 1), strict=True))
        base = [self._losses(w[:, None], u, v) for u, v, _ in parts] if self.scheme == "forward" else []
        for first in range(0, count, at_once):
            z = self._rows(keys, first, min(at_once, count - first))
            ahead = torch.add(w[:, None], self.spread(z), alpha=self.sigma)
            behind = None if base else torch.add(w[:, None], self.spread(z), alpha=-self.sigma)
            slope = z.new_zeros(len(w), share.shape[-1], z.shape[1])
            for i, (u, v, part) in enumerate(parts):
                before = base[i] if behind is None else self._losses(behind, u, v)
                change = self._losses(ahead, u, v) - before  # a record at a time: a mean of losses would hide it
                slope += (change @ part.double()).mT
            slope /= self.sigma if behind is None else 2 * self.sigma
            del ahead, behind
            yield z, slope
            del z  # before the next is regrown

    def _losses(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Weights [G, k, d] on each group's own records [G, B, …] -> losses [G, k, B].

        In float64, whatever the weights are: what a loss of 2 changes by is near the last place of its float32.
        """
        groups, k = weights.shape[:2]
        weights, x = weights.to(self.precision), x.to(self.precision) if x.is_floating_point() else x
        with ExitStack() as modes:
            if weights.is_cuda:
                modes.enter_context(Products())
            if self.precision != torch.float32:
                modes.enter_context(_WideLinear())
            if groups == k == 1 or not self.task.stackable:
                each = [[self.task.f(w, u) for w in own] for own, u in zip(weights, x, strict=True)]
                logits = torch.stack([torch.stack(own) for own in each])
            elif groups == 1:
                logits = vmap(self.task.f, (0, None))(weights[0], x[0])[None]
            else:
                logits = vmap(vmap(self.task.f, (0, None)))(weights, x)
        labels = y[:, None].expand(-1, k, *y.shape[1:])
        return self.task.loss(logits.double().flatten(0, 2), labels.flatten(0, 2)).view(groups, k, -1)


class _WideLinear(TorchFunctionMode):
    """While active, linear layers work in float32: what they give is what the loss is made of."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            args = [a.float() if isinstance(a, Tensor) else a for a in args]
        return func(*args, **(kwargs or {}))


@contextmanager
def forward_only(device: torch.device) -> Iterator[None]:
    """No gradients, and on a GPU no TensorFloat-32 and no sums in half precision: such rounding is larger than what
    σ = 1e-4 changes."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    precision, reduced = torch.get_float32_matmul_precision(), matmul.allow_fp16_reduced_precision_reduction
    convolutions = cudnn.allow_tf32
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
        matmul.allow_fp16_reduced_precision_reduction = cudnn.allow_tf32 = False
    try:
        with torch.no_grad():
            yield
    finally:
        if device.type == "cuda":
            torch.set_float32_matmul_precision(precision)
            matmul.allow_fp16_reduced_precision_reduction, cudnn.allow_tf32 = reduced, convolutions
