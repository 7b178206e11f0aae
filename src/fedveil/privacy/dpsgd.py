"""DP-SGD (Abadi et al. 2016): gradients that are differentially private for each record, and what they cost.

A step draws each record by itself with probability q (Poisson sampling, which is what the accountant assumes), cuts
each record's gradient to norm C, adds Gaussian noise of deviation σC to their sum, once, and divides by the expected
batch size. An empty draw is a step like any other. Draws and noise are from the client's private root. Numbers are
floats, so the noise is Gaussian up to rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedveil.clients import Crowd
from fedveil.message import Refused
from fedveil.privacy.accountant import ACCOUNTANTS, Noised, epsilon
from fedveil.privacy.masks import derive, key_stream
from fedveil.seeds import Seed
from fedveil.task import Task, stacked

HELD = {"cpu": 1 << 24, "cuda": 1 << 29}  # numbers in the gradients that are held at once
WITHIN = 1 - 1e-5  # of C is what a gradient is cut to, so that rounding does not lift it above


@dataclass(frozen=True)
class DpSgd:
    """Record-level differential privacy of what a client computes from its records.

    noise:      σ, the deviation of the noise as a multiple of `clip`
    clip:       C, the norm to which each record's gradient is cut
    delta:      δ, below 1 / the number of a client's records
    budget:     the ε beyond which a client answers no more; None: it goes on
    accountant: "rdp" or "pld"
    """

    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-5
    budget: float | None = None
    accountant: str = "rdp"

    def __post_init__(self) -> None:
        if not (0 < self.noise < math.inf and 0 < self.clip < math.inf):
            raise ValueError("privacy.noise and privacy.clip are above 0; without noise there is no ε to promise")
        if not 0 < self.delta < 1:
            raise ValueError(f"privacy.delta is {self.delta:g}; it is above 0 and below 1 / a client's records")
        if self.budget is not None and self.budget <= 0:
            raise ValueError(f"privacy.budget is {self.budget:g}; it is an ε above 0")
        if self.accountant not in ACCOUNTANTS:
            raise ValueError(f"privacy.accountant is '{self.accountant}'; use {' or '.join(ACCOUNTANTS)}")

    def refuse(self, task: Task, rate: float, steps: int) -> None:
        """Say what of a task does not suit, of which an answer takes so many steps. The most records a client may hold
        are public; how many it has is not."""
        if self.delta >= 1 / task.largest:
            raise ValueError(
                f"privacy.delta is {self.delta:g}, but a client may hold {task.largest} records; set it below "
                f"{1 / task.largest:.2g}"
            )
        if self.budget is not None and (cost := self.spent(rate, steps)) > self.budget:
            raise ValueError(f"privacy.budget is {self.budget:g}, but one answer already costs {cost:.4g}; raise it")

    def rate(self, task: Task, batch: int) -> float:
        """q, at which the client with the most records draws `batch` of them on average."""
        return min(1.0, batch / task.largest)

    def spent(self, rate: float, steps: int) -> float:
        """ε after so many steps."""
        return epsilon([Noised(self.noise, rate, steps)], self.delta, self.accountant)

    def allow(self, rate: float, steps: int) -> None:
        """Raise `Refused` if so many steps would cost more than the budget."""
        if self.budget is not None and (cost := self.spent(rate, steps)) > self.budget:
            raise Refused("over budget", f"the answer would bring ε to {cost:.4g}, the budget is {self.budget:g}")

    def gradients(
        self, crowd: Crowd, weights: Tensor, batch: int, steps: int, secrets: Sequence[Seed]
    ) -> Callable[[], Tensor]:
        """A function that gives the private gradient of each client at `weights` [C, d], [C, d], `steps` times.

        `secrets` are private seeds, one a client, that are used for nothing else.
        """
        task, device = crowd.task, crowd.task.device
        drawn = [
            poisson(secret.child("draw"), own, self.rate(task, batch), steps)
            for secret, own in zip(secrets, crowd.rows.indices, strict=True)
        ]
        index, mask = _padded(drawn)
        crowd.passes += steps * int(np.minimum(batch, crowd.rows.counts).sum())  # how many were drawn is private
        size = weights.shape[1]
        noise = torch.stack([normal(secret.child("noise"), steps * size).view(steps, size) for secret in secrets], 1)
        index_, mask_ = torch.from_numpy(index).to(device), torch.from_numpy(mask).to(device)
        noise = (noise * (self.noise * self.clip)).to(device, weights.dtype)  # [steps, C, d]
        cursor = torch.zeros(1, dtype=torch.int64, device=device)

        def gradient() -> Tensor:
            rows, counted, added = (t.index_select(0, cursor)[0] for t in (index_, mask_, noise))
            cursor.add_(1)
            return (clipped_sum(task, weights, task.x[rows], task.y[rows], counted, self.clip) + added) / batch

        return gradient


# ---------------------------------------------------------------------------------------------------- gradients


def clipped(gradients: Tensor, clip: float) -> Tensor:
    """Each row of [B, d] cut to norm `clip`; one that holds no finite numbers, or has no finite norm, becomes 0."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    cut = gradients * (WITHIN * clip / norms.clamp(min=WITHIN * clip))
    return torch.where(norms.isfinite(), cut, 0)


def clipped_sum(task: Task, weights: Tensor, x: Tensor, y: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Σ of the clipped gradients of the records with mask 1: weights [C, d], records [C, B, …], mask [C, B] -> [C, d].

    Each record's gradient is derived by itself, as many at a time as `HELD` allows.
    """
    one = grad(lambda w, x, y: task.losses(w, x[None], y[None])[0])

    def total(w: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return mask @ clipped(vmap(one, in_dims=(None, 0, 0))(w, x, y), clip)

    at_once = max(1, HELD[weights.device.type] // weights.numel())
    parts = zip(x.split(at_once, 1), y.split(at_once, 1), mask.split(at_once, 1), strict=True)
    return torch.stack([stacked(total)(weights, *part) for part in parts]).sum(0)


# ---------------------------------------------------------------------------------------------------- draws


def poisson(secret: Seed, own: np.ndarray, rate: float, steps: int) -> list[np.ndarray]:
    """For each step the records of `own` [n] that are drawn, each by itself with probability `rate`."""
    chosen = uniform(secret, steps * len(own)).numpy().reshape(steps, len(own)) < rate
    return [own[row] for row in chosen]


def normal(secret: Seed, count: int) -> Tensor:
    """Standard normal numbers, [count] in float64 (Box and Muller)."""
    half = -(-count // 2)
    u = uniform(secret, 2 * half)
    radius, angle = (-2 * torch.log1p(-u[:half])).sqrt(), (2 * math.pi) * u[half:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def uniform(secret: Seed, count: int) -> Tensor:
    """Numbers from 0 to below 1 in float64, [count], of 53 bits each from a ChaCha20 stream."""
    stream = key_stream(derive(secret.key, b"fedveil differential privacy")).update(bytes(8 * count))
    bits = np.frombuffer(stream, "<u8") >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def _padded(drawn: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Draws of C clients in S steps as indices [S, C, B] and mask [S, C, B]; B is at least 1, under mask 0."""
    steps = len(drawn[0])
    width = max(1, max(len(rows) for own in drawn for rows in own))
    index = np.zeros((steps, len(drawn), width), np.int64)
    mask = np.zeros((steps, len(drawn), width), np.float32)
    for k, own in enumerate(drawn):
        for t, rows in enumerate(own):
            index[t, k, : len(rows)], mask[t, k, : len(rows)] = rows, 1
    return index, mask
