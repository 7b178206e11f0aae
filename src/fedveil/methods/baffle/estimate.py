"""Gradients without backpropagation: settings that both levels of BAFFLE share, and a trainer that uses them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.core.capability import FORWARD_PASSES
from fedveil.core.directions import LAWS, Directions, words
from fedveil.core.forecast import Compute, Turn
from fedveil.core.seeds import Seed, is_weak
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.methods.baffle.probing import Prober, forward_only
from fedveil.privacy.account import Account
from fedveil.train.local import LocalTraining
from fedveil.train.trainers import Correction, Trained

TYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
SIGMAS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 1e-2}  # half precision swallows what a smaller one changes


@dataclass(frozen=True)
class Estimate:
    """How a gradient is estimated from the loss along random directions (BAFFLE, eqs. 6 and 7).

    directions: K, a batch
    weak:       K of weak clients, who are `share` of all, drawn by number: their capability is public; None: all can
    sigma:      σ, how far a perturbed model is away; None: 1e-4, in float16 1e-3
    precision:  "float32", or "float16": perturbed models but for their linear layers run in half precision
    law:        of the directions
    scheme:     "forward" (K + 1 passes) or "central" (2 K); the paper's "twice-FD" is forward with twice as many
    seeds:      "shared": all clients probe the same K directions, so slopes can be summed; "own": each has others
    layers:     patterns of the names of layers that are trained, such as "fc*"; none: all are
    clip:       an estimated gradient is scaled so that no entry is larger; None: it is not
    memory:     about how many megabytes a forward pass may hold; None lets the device decide
    slices:     "records": passes are split over directions and records; or "layers" (section 4.4): also one direction
                at a time, of which a layer is regrown when it runs, so no perturbed copy of all weights is held
    losses:     "float64", compared record by record; or "float32": means of a batch are compared, as in eq. 6
    """

    directions: int = 100
    weak: int | None = None
    share: float = 0.5
    sigma: float | None = None
    precision: str = "float32"
    law: str = "gaussian"
    scheme: str = "forward"
    seeds: str = "shared"
    layers: list[str] = field(default_factory=list)
    clip: float | None = 0.3
    memory: int | None = None
    slices: str = "records"
    losses: str = "float64"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("law", self.law, tuple(LAWS)),
            ("scheme", self.scheme, ("forward", "central")),
            ("seeds", self.seeds, ("shared", "own")),
            ("precision", self.precision, tuple(SIGMAS)),
            ("slices", self.slices, ("records", "layers")),
            ("losses", self.losses, ("float64", "float32")),
        ):
            if value not in known:
                raise ValueError(f"method.{name} is '{value}'; use {' or '.join(known)}")
        weak = 1 if self.weak is None else self.weak
        if self.directions < 1 or not 1 <= weak <= self.directions or not 0 <= self.share <= 1:
            raise ValueError("method.directions is at least 1, method.weak from 1 to that, method.share from 0 to 1")
        if self.scale <= 0 or (self.clip is not None and self.clip <= 0):
            raise ValueError("method.sigma and method.clip are above 0")
        if self.memory is not None and self.memory < 1:
            raise ValueError("method.memory is at least 1; leave it out to let the device decide")

    @property
    def scale(self) -> float:
        return SIGMAS[self.precision] if self.sigma is None else self.sigma

    def count(self, client: int) -> int:
        """K of a client: its public capability."""
        return self.weak if self.weak is not None and is_weak(client, self.share) else self.directions

    def passes(self, count: int) -> int:
        """Forward passes for so many directions."""
        return count + 1 if self.scheme == "forward" else 2 * count

    def clipped(self, gradient: Tensor) -> Tensor:
        """Each row scaled so that its largest entry is at most `clip`: the infinity norm's clip."""
        if self.clip is None:
            return gradient
        return gradient * (self.clip / gradient.abs().amax(-1, keepdim=True).clamp(min=self.clip))

    def prober(self, task: Task) -> Prober:
        places = self.places(task)
        size = task.layout.size if places is None else len(places)
        directions = Directions.of(self.law, size, self.directions)
        memory = None if self.memory is None else self.memory << 20
        precision, losses = TYPES[self.precision], TYPES[self.losses]
        by_layer = self.slices == "layers"
        return Prober(task, directions, self.scale, self.scheme, places, memory, precision, by_layer, losses)

    def validate(self, task: Task) -> None:
        """Raise a ValueError if the model has no such layers, or cannot be run a layer at a time."""
        self.places(task)
        if self.slices != "layers":
            return
        layers, x = task.layout.split(task.initial), task.x[:2]
        with torch.no_grad():
            whole = task.f(task.initial, x)
            try:
                alike = torch.allclose(task.by_layer(layers.__getitem__, x), whole)
            except Exception:  # whatever a layer may say that finds no weights
                alike = False
        if not alike:
            raise ValueError(
                "method.slices is 'layers', but a layer of this model uses the weights of another while that one does "
                "not run; use records"
            )

    def places(self, task: Task) -> Tensor | None:
        """Which entries of the flat weights are trained; None: all."""
        if not self.layers:
            return None
        layers = task.layout.layers
        for pattern in self.layers:
            if not any(fnmatch(layer.name, pattern) for layer in layers):
                names = ", ".join(layer.name for layer in layers)
                raise ValueError(f"method.layers has '{pattern}', which no layer is called; there are {names}")
        chosen = [layer for layer in layers if any(fnmatch(layer.name, pattern) for pattern in self.layers)]
        return torch.cat([torch.arange(layer.start, layer.stop, device=task.device) for layer in chosen])


def key_of(seed: Seed) -> int:
    """The key of a round's directions: 64 bits of its public seed."""
    return seed.child("directions").word


def signal(slopes: Tensor, records: Tensor) -> float:
    """Return which share of the mean square of a cohort's mean slopes is signal, from 0 to 1.

    The rest is noise of the draw of clients and records. It is estimated from how clients differ, so more clients or
    larger batches lower it, and more directions do not.

    slopes [C, K], of each client along the same directions; records [C], by which clients count
    """
    share = (records.double() / records.sum())[:, None]
    own = slopes.double() - slopes.double().mean(1, keepdim=True)  # forward differences share half the curvature
    mean, repeated = (share * own).sum(0), float(share.square().sum())
    variance = (share * (own - mean).square()).sum(0) / (1 - repeated)  # of one client
    return max(0.0, float(1 - repeated * variance.mean() / mean.square().mean().clamp(min=1e-300)))


@dataclass(frozen=True)
class ForwardTraining:
    """Local training whose gradients are estimated, each along directions of its own step."""

    needs: ClassVar[tuple[str, ...]] = (FORWARD_PASSES,)
    no_norms: ClassVar[str] = "it compares models at fixed running statistics"

    local: LocalTraining
    how: Estimate

    def train(self, stack: ClientStack, w: Tensor, correction: Correction | None) -> Trained:
        """Clients of different K cannot be one stack of gradients, so each K trains by itself."""
        counts = [self.how.count(client) for client in stack.clients]
        update, steps = w.new_empty(len(stack), len(w)), torch.empty(len(stack), dtype=torch.int64, device=w.device)
        for count in sorted(set(counts)):
            rows = [i for i, own in enumerate(counts) if own == count]
            part = stack if len(rows) == len(stack) else stack.part(rows)
            trained = self._train(part, w, correction, count)
            update[rows], steps[rows] = trained.update, trained.steps
            if part is not stack:
                stack.passes += part.passes
        return Trained(update, steps)

    def _train(self, stack: ClientStack, w: Tensor, correction: Correction | None, count: int) -> Trained:
        task, how = stack.task, self.how
        prober, taken = how.prober(task), torch.zeros(1, dtype=torch.int64, device=task.device)
        keys = torch.tensor([key_of(stack.seed)], device=task.device).expand(len(stack))
        if how.seeds == "own":
            keys = words(keys, torch.tensor(stack.clients, device=task.device))

        def estimate(weights: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            gradient = prober.gradient(weights, words(keys, taken), x, y, mask, count)
            taken.add_(1)
            return how.clipped(gradient)

        local, added, before = self.local, correction, stack.passes
        if how.layers and local.weight_decay:  # what is not trained does not decay
            decayed = local.weight_decay * prober.spread(w.new_ones(prober.directions.size))
            local = dataclasses.replace(local, weight_decay=0)
            added = lambda v: decayed * v + (correction(v) if correction else 0)  # noqa: E731
        with forward_only(task.device):
            weights, steps = local.train(stack, w, added, estimate)
        stack.passes += (stack.passes - before) * (how.passes(count) - 1)
        return Trained(weights - w, steps)

    def client_cost(self, task: Task) -> Account | None:
        return None

    def forecast_compute(self, turn: Turn) -> Compute:
        local = self.local.forecast_compute(turn.records)
        return Compute(local.passes * self.how.passes(self.how.count(turn.client)), local.vectors + 1, local.held)
