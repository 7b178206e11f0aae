"""Changes to BAFFLE that were measured and did not help, for `results/ablations/baffle-steps*.toml`.

They are methods of their own and no part of the library.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import fedveil as fv
from fedveil.core.exchange import Handler
from fedveil.gpu.graphs import one_thread
from fedveil.links.steps import SLOT as HELD
from fedveil.methods.baffle.probing import Prober, forward_only
from fedveil.methods.baffle.questions import ProbeHere
from fedveil.train.optimizers import SLOT, Moments, moments

FLOOR = 1e-4  # of an entry's second moment, as a share of their mean


@dataclass(frozen=True)
class ScaledProber(Prober):
    """Directions whose entries are multiplied by `scales` [n]."""

    scales: Tensor | None = None

    def _rows(self, keys: Tensor, first: int, count: int, span: tuple[int, int] | None = None) -> Tensor:
        assert self.scales is not None
        return super()._rows(keys, first, count, span) * self.scales[slice(*(span or (None,)))]

    def combine(self, keys: Sequence[int], coefficients: Sequence[Tensor]) -> Tensor:
        assert self.scales is not None
        return super().combine(keys, coefficients) * self.spread(self.scales)


@dataclass(frozen=True)
class Preconditioned(fv.Baffle):
    """Directions of covariance H^-1/2, where H is the diagonal second moment of past steps (HiSo, Li et al. 2025).

    H is the optimizer's second moment, which clients hold with `replay`. The estimate along such directions is scaled
    by H^-1/2 already, so the step is its first moment, over the root mean square of H.
    """

    name: ClassVar[str] = "baffle-preconditioned"

    down: str = "replay"

    def take(
        self, task: fv.Task, now: fv.State, keys: Sequence[int], coefficients: Sequence[Tensor], number: int
    ) -> fv.State:
        server = self.server
        first, second = moments(now)
        assert first is not None
        assert second is not None
        with forward_only(task.device), one_thread():
            delta = -self.clipped(self.scaled(second).prober(task).combine(keys, coefficients))
            first = server.momentum * first + (1 - server.momentum) * delta
            second = server.beta2 * second + (1 - server.beta2) * delta**2
            step = server.lr * server.factor(number) * first / second.mean().sqrt().clamp(min=server.tau)
            return replace_weights(now, now.weights + step).put(SLOT, Moments(first, second))

    def scaled(self, second: Tensor) -> Preconditioned:
        """The same method with directions scaled by `second` [d]; by 1 before the first step."""
        scaled = copy.copy(self)
        object.__setattr__(scaled, "second", second)
        return scaled

    def prober(self, task: fv.Task) -> Prober:
        plain, places = super().prober(task), self.places(task)
        second: Tensor = getattr(self, "second", torch.ones(()))
        own = second.to(task.device).expand(task.layout.size)
        own = own if places is None else own[places]
        scales = scales_of(own)
        return ScaledProber(**{**vars(plain), "scales": scales})

    @property
    def handlers(self) -> Mapping[type[fv.Question], Handler]:
        def answer(stack: fv.ClientStack, question: Any) -> list[Any]:
            w = self.steps.held(stack, question.version)
            return self.scaled(stack.slot(HELD)[0].second).probe(stack, w, question)

        return {**super().handlers, ProbeHere: answer}


def scales_of(second: Tensor) -> Tensor:
    """Factors p = H^-1/4 of directions, with a mean square of 1."""
    mean = second.mean()
    if not mean > 0:
        return torch.ones_like(second)
    p = second.clamp(min=FLOOR * float(mean)) ** -0.25
    return p / p.square().mean().sqrt()


def replace_weights(state: fv.State, weights: Tensor) -> fv.State:
    return fv.State(weights, state.slots)


@dataclass(frozen=True)
class Varied(fv.Baffle):
    """A number of directions that goes linearly from `first` to `last` over the rounds of a run."""

    name: ClassVar[str] = "baffle-varied"

    first: int = 25
    last: int = 75

    def probed(self, now: fv.State, cohort: fv.Cohort) -> tuple[list[int], list[Tensor]]:
        done = (cohort.round - 1) / max(1, cohort.round - 1 + cohort.rounds_left)
        count = round(self.first + (self.last - self.first) * done)
        plain = fv.Baffle(**{each.name: getattr(self, each.name) for each in fields(fv.Baffle)})
        return replace(plain, directions=count).probed(now, cohort)
