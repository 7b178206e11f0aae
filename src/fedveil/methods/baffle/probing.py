"""Forward-only gradients: run perturbed models on a batch, many at once, and see how the loss changes.

Nothing here is differentiated. A slope s_k = (ℓ(w + σ z_k) - ℓ(w)) / σ is one number a direction; the estimate of the
gradient is the mean of s_k z_k (BAFFLE, eq. 6), because E[z zᵀ] = I.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedveil.core import regrown
from fedveil.core.directions import Directions
from fedveil.core.lengths import lengths, trimmed
from fedveil.core.task import Task
from fedveil.gpu.context import current
from fedveil.gpu.graphs import GRAPHS, Replayed
from fedveil.gpu.products import Products

CPU_MEMORY = 16 << 20  # bytes: more is no faster, because caches are smaller
SHAPES = 8  # of weights and records, for each of which a GPU keeps a graph with copies of them
LAYER_WORDS = 1 << 11  # of directions, drawn at a time where little memory is the point
PARTS, SHORTEST = 4, 16  # of records of different lengths: into how many parts they are cut, of how many at least
Rows = Iterable[tuple[slice, Tensor]]  # entries of directions: which, and their values [G, k, stop - start]


@dataclass(frozen=True)
class Prober:
    """Probes of one task. G groups of records, each with weights and directions of its own, run as one stack.

    places: which entries of the flat weights are perturbed, int64 [n]; None is all of them
    memory: about how many bytes a pass may hold; None lets the device decide
    precision: in which models are run: float32, float64, float16 but for linear layers, or bfloat16 but for layers that
               are trained; with a σ that half precision does not swallow
    by_layer: whether one direction runs at a time, and a layer is perturbed only while it runs
    losses: float64, where losses are compared record by record; or float32, where their means are, as in eq. 6
    """

    task: Task
    directions: Directions
    sigma: float
    scheme: str  # forward: one pass a direction and one more; central: two passes a direction
    places: Tensor | None = None
    memory: int | None = None
    precision: torch.dtype = torch.float32
    by_layer: bool = False
    losses: torch.dtype = torch.float64

    def slopes(self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, share: Tensor, count: int) -> Tensor:
        """Slopes along the first `count` directions of each key.

        w [G, d], keys int64 [G], x [G, B, …], y [G, B, …], share [G, B, S]: what each record counts in each of S means
        -> [G, S, count]
        """
        return torch.cat(list(map(itemgetter(1), self._walk(w, keys, x, y, share, count))), -1)

    def each(self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, count: int) -> Tensor:
        """Slopes of each record's own loss along the first `count` directions of each key, float64 [G, B, count]."""
        return torch.cat(list(map(itemgetter(1), self._walk(w, keys, x, y, None, count))), -1)

    def gradient(self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, mask: Tensor, count: int) -> Tensor:
        """The estimate of each client's gradient of its mean loss, [G, d] (eq. 6); `mask` [G, B] is 0 for padding."""
        return self.along(w, keys, x, y, mask, 0, count)[1]

    def along(
        self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, mask: Tensor, first: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Slopes of each client's mean loss along directions first … first + count - 1, [G, count], and the estimate of
        its gradient that they make, [G, d]."""
        share = (mask / mask.sum(1, keepdim=True).clamp(min=1))[..., None]
        total, slopes = w.new_zeros(len(w), self.directions.size), list[Tensor]()
        for rows, slope in self._walk(w, keys, x, y, share, count, first):
            slopes.append(slope[:, 0])
            for span, z in rows:
                along = z.mul_(slope) if self.by_layer else slope @ z  # of one direction: in its place
                total[:, span].add_(along[:, 0], alpha=1 / count)
                del z, along  # before the next is regrown
            del rows
        return torch.cat(slopes, -1), self.spread(total)

    def combine(self, keys: Sequence[int], coefficients: Sequence[Tensor]) -> Tensor:
        """Σ_j Σ_k c_jk z_jk, [d]: the server's side of `slopes`, for keys j with coefficients c_j [K_j] each."""
        device = self.task.device
        if len(keys) == 1:  # what all have along the same directions: clients may have to hold the same bits
            shared, piece = torch.tensor(list(keys), device=device), None if device.type == "cuda" else regrown.WORDS
            return self.spread(self.directions.combined(torch, shared, coefficients[0].tolist(), piece))
        total = torch.zeros(self.directions.size, device=device)
        step = max(1, self._memory // self._regrown)
        for key, own in zip(keys, coefficients, strict=True):
            total += regrown.combine(self.directions, key, own.to(device)[None], step)[0]
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
        many = self.task.stackable and not self.by_layer
        return (max(1, room // (regrown + at_once * pass_)) if many else 1), at_once

    @property
    def _regrown(self) -> int:
        """Bytes held for a direction, or a layer of it, while it is regrown and added to the weights."""
        sizes = [layer.stop - layer.start for layer in self.task.layout.layers]
        return (32 if self.task.device.type == "cuda" else 8) * (max(sizes) if self.by_layer else sum(sizes))

    @cached_property
    def _memory(self) -> int:
        if self.memory is not None or self.task.device.type != "cuda":
            return self.memory or CPU_MEMORY
        return int(torch.cuda.get_device_properties(self.task.device).total_memory) // 6

    def _rows(self, keys: Tensor, first: int, count: int, span: tuple[int, int] | None = None) -> Tensor:
        return regrown.rows(self.directions, keys, first, count, span, LAYER_WORDS if self.by_layer else regrown.WORDS)

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """From which entry of a direction to which each trained layer is, by name."""
        spans, at = {}, 0
        trained = None if self.places is None else set(self.places.tolist())
        for layer in self.task.layout.layers:
            if trained is None or layer.start in trained:
                spans[layer.name] = at, at + layer.stop - layer.start
                at = spans[layer.name][1]
        return spans

    def _walk(
        self, w: Tensor, keys: Tensor, x: Tensor, y: Tensor, share: Tensor | None, count: int, start: int = 0
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Directions from number `start` on and slopes [G, S, k] along them, a chunk at a time; without shares
        [G, B, k], of each record."""
        padding, back = self.task.data.padding, None
        if padding is None:
            at_once, records = self.chunk(*x.shape[:2])
            xs = x.split(records, 1)
        else:  # records of like length together, each part cut to its longest
            order = lengths(x, padding).argsort(dim=1, stable=True)
            place, back = torch.arange(len(x), device=x.device)[:, None], order.argsort(1)
            x, y, share = x[place, order], y[place, order], None if share is None else share[place, order]
            at_once, records = self.chunk(len(x), max(min(SHORTEST, x.shape[1]), -(-x.shape[1] // PARTS)))
            at_once = -(-count // -(-count // at_once))  # chunks of like size, so that few shapes occur
            xs = tuple(trimmed(u, padding) for u in x.split(records, 1))
        ys = y.split(records, 1)
        parts = list(zip(xs, ys, [None] * len(xs) if share is None else share.split(records, 1), strict=True))
        base = [self._losses(w[:, None], u, v) for u, v, _ in parts] if self.scheme == "forward" else []
        for first in range(start, start + count, at_once):
            k = min(at_once, start + count - first)
            rows: Rows = [(slice(None), self._rows(keys, first, k))] if not self.by_layer else self._again(keys, first)
            losses = partial(self._layered, w, keys, first) if self.by_layer else partial(self._copied, w, rows)
            changes = []
            for i, (u, v, part) in enumerate(parts):
                before = base[i] if base else losses(-self.sigma, u, v)
                changes.append(self._change(losses(self.sigma, u, v), before, part))
            slope = torch.cat(changes, 1) if share is None else w.new_zeros(len(w), share.shape[-1], k)
            if share is None and back is not None:
                slope = slope[place, back]
            for change in changes if share is not None else []:
                slope += change
            slope /= self.sigma if base else 2 * self.sigma
            del losses
            yield rows, slope
            del rows  # before the next is regrown

    def _again(self, keys: Tensor, number: int) -> Rows:
        """One direction, regrown a layer at a time."""
        for span in self._spans.values():
            yield slice(*span), self._rows(keys, number, 1, span)

    def _change(self, ahead: Tensor, before: Tensor, share: Tensor | None) -> Tensor:
        """Losses [G, k, B] and shares [G, B, S] -> changes of each mean, [G, S, k]; or of each loss, [G, B, k]."""
        if share is None:
            return (ahead.double() - before.double()).mT
        if self.losses == torch.float64:
            return ((ahead - before) @ share.double()).mT  # a record at a time: a mean of losses would hide it
        return (ahead @ share - before @ share).mT

    def _copied(self, w: Tensor, rows: Rows, step: float, x: Tensor, y: Tensor) -> Tensor:
        """Losses of models that are moved by `step` along each direction, with a copy of the weights for each."""
        ((_, z),) = rows
        return self._losses(torch.add(w[:, None], self.spread(z), alpha=step), x, y)

    def _layered(self, w: Tensor, keys: Tensor, number: int, step: float, x: Tensor, y: Tensor) -> Tensor:
        """The same for one direction, without a copy: a layer's weights are made when it runs."""
        layers = {layer.name: layer for layer in self.task.layout.layers}

        def moved(group: int, name: str) -> Tensor:
            layer = layers[name]
            own = w[group, layer.start : layer.stop]
            if name in self._spans:
                z = self._rows(keys[group : group + 1], number, 1, self._spans[name])[0, 0]
                own = torch.add(own, z, alpha=step, out=z)
            return own.view(layer.shape).to(self._held)

        x = x.to(self._held) if x.is_floating_point() else x
        with self._modes():
            logits = torch.stack([self.task.by_layer(partial(moved, group), own) for group, own in enumerate(x)])
        return self._lost(logits[:, None], y)

    def _losses(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Weights [G, k, d] on each group's own records [G, B, …] -> losses [G, k, B]."""
        if not self.task.stackable:
            return self._passed(weights, x, y)
        key = ("probes", self.precision, self.losses, current().kernels, threading.get_ident())
        most = SHAPES if self.task.data.padding is None else GRAPHS  # records of different lengths make many
        replayed: Replayed = self.task.steppers.setdefault(key, Replayed(self._passed, most))
        return replayed(weights, x, y)

    def _passed(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        groups, k = weights.shape[:2]
        weights, x = weights.to(self._held), x.to(self._held) if x.is_floating_point() else x
        with self._modes():
            if groups == k == 1 or not self.task.stackable:
                each = [[self.task.f(w, u) for w in own] for own, u in zip(weights, x, strict=True)]
                logits = torch.stack([torch.stack(own) for own in each])
            elif groups == 1:
                logits = vmap(self.task.f, (0, None))(weights[0], x[0])[None]
            else:
                logits = vmap(vmap(self.task.f, (0, None)))(weights, x)
        return self._lost(logits, y)

    @property
    def _held(self) -> torch.dtype:
        """The type of weights and inputs; to bfloat16 layers convert them when they run."""
        return torch.float32 if self.precision == torch.bfloat16 else self.precision

    def _modes(self) -> ExitStack:
        """How models are run: on a GPU by products. Linear layers run in float32 instead of float16, and those that are
        trained in float32 instead of bfloat16."""
        modes = ExitStack()
        if self.precision == torch.bfloat16:
            modes.enter_context(self.task.autocast("bfloat16"))
            modes.enter_context(_WideLinear(frozen=False))
            return modes
        if self.task.device.type == "cuda":
            modes.enter_context(Products())
        if self.precision.itemsize < 4:
            modes.enter_context(_WideLinear())
        return modes

    def _lost(self, logits: Tensor, y: Tensor) -> Tensor:
        """Logits [G, k, B, …] and labels [G, B, …] -> losses [G, k, B].

        By default in float64, whatever the weights are: what a loss of 2 changes by is near the last place of its
        float32.
        """
        groups, k = logits.shape[:2]
        labels = y[:, None].expand(-1, k, *y.shape[1:])
        return self.task.loss(logits.to(self.losses).flatten(0, 2), labels.flatten(0, 2)).view(groups, k, -1)


class _WideLinear(TorchFunctionMode):
    """While active, linear layers work in float32: what they give is what the loss is made of.

    frozen: whether this holds for layers with constant weights, too
    """

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self._frozen = frozen

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or not (self._frozen or not isinstance(args[1], nn.Parameter)):
            return func(*args, **(kwargs or {}))
        args = [a.float() if isinstance(a, Tensor) else a for a in args]
        with torch.autocast(args[0].device.type, enabled=False):
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
