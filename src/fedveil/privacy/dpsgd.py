"""DP-SGD (Abadi et al. 2016): gradients that are differentially private for each record, and what they cost.

A step draws each record by itself with probability q (Poisson sampling, which is what the accountant assumes), clips
each record's gradient to norm C, adds noise of deviation σC to their sum, once, and divides by the expected batch size.
An empty draw is a step like any other. Draws and noise are from the client's private root.

Norms, sums and noise are float64; the result is rounded to float32 after the noise. One record therefore moves the sum
by C at most: in float32 long sums are off by more than a margin could allow, and a GPU multiplies float32 in TF32.
Gaussian noise in floats is Gaussian up to rounding only. Skellam noise is whole numbers, and so is what it is added to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedveil.core.account import AUTO
from fedveil.core.directions import words
from fedveil.core.seeds import Seed
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.gpu.context import current
from fedveil.gpu.graphs import Loop
from fedveil.privacy import draws
from fedveil.privacy.account import Account, Promise
from fedveil.privacy.accountant import Noised, Skellam, Steps
from fedveil.privacy.draws import GRID, WITHIN, even

NOISE = 1 << 22  # numbers of noise that are held at once, a client
AHEAD = {"cpu": 1, "cuda": 8}  # clients whose streams are made before they are moved, which waits for a busy GPU
HELD = {"cpu": 1 << 22, "cuda": 1 << 28}  # numbers in the gradients that are held at once
PIECE = 64  # records at once, or less, where the step is compiled: for one shape, however many are drawn
Piece = tuple[int, Sequence[Seed]]
MECHANISMS = ("gaussian", "skellam")
MOST_SKELLAM = 1e5  # deviations of noise, in clips, with which those sums are exact too


@dataclass(frozen=True)
class DpSgd(Promise):
    """Record-level differential privacy of what a client computes from its records.

    clip:      C, the norm to which each record's gradient is clipped
    delta:     δ, below 1 / the number of a client's records
    mechanism: the noise is "gaussian", in floats; or "skellam", whole numbers added to whole numbers
    """

    key: ClassVar[str] = "privacy"

    mechanism: str = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mechanism not in MECHANISMS:
            raise ValueError(f"privacy.mechanism is '{self.mechanism}'; use {' or '.join(MECHANISMS)}")
        if self.mechanism == "skellam" and self.accountant == "pld":
            raise ValueError('privacy.accountant is pld, but privacy.mechanism "skellam" is accounted by "rdp" only')
        if self.mechanism == "skellam" and self.noise != AUTO and self.sigma > MOST_SKELLAM:
            raise ValueError(f'privacy.noise is {self.noise:g}, too much for "skellam"; {MOST_SKELLAM:g} is the most')

    def account(self, task: Task, batch: int, steps: int, size: int | None = None) -> Account:
        """The price of an answer of so many steps. The most records a client may hold are public; how many it has is
        not. `size` is how many numbers a record adds to a sum; None: as many as there are weights."""
        if task.clients.max_records is None:
            raise ValueError(
                "method.privacy needs split.max_records, a public bound on how many records a client may hold: without "
                f"it the sampling rate would tell the largest client's number; set it, for instance to {task.largest}"
            )
        if self.delta >= 1 / task.largest:
            raise ValueError(
                f"privacy.delta is {self.delta:g}, but a client may hold {task.largest} records; set it below "
                f"{1 / task.largest:.2g}"
            )
        return Account(self._step(size or task.layout.size, self.rate(task, batch), steps), self)

    def _step(self, size: int, rate: float, steps: int) -> Steps:
        """The price of steps at gradients of `size` numbers."""
        if self.mechanism == "gaussian":
            return Noised(self.sigma, rate, steps)
        return Skellam((self.sigma * GRID) ** 2, GRID, GRID * min(math.sqrt(size), GRID), steps, rate)

    @property
    def grid(self) -> float | None:
        """How many units of whole numbers C is; None where numbers are not whole."""
        return None if self.mechanism == "gaussian" else GRID

    @property
    def unit(self) -> float:
        """What 1 stands for in the sum of clipped gradients and in the noise."""
        return self.clip / self.grid if self.grid else 1.0

    def stream(self, secret: Seed, count: int) -> Tensor:
        """What noise for `count` numbers is made of, on the CPU: [count, or one more] in int64."""
        if self.mechanism == "gaussian":
            return _words(secret, even(count))
        return torch.from_numpy(draws.whole_noise(secret.key, self.sigma, count))

    def drawn(self, stream: Tensor, count: int) -> Tensor:
        """The noise itself, in units: [count] in float64."""
        if self.mechanism == "gaussian":
            return _normal(stream)[:count] * (self.sigma * self.clip)
        return stream.double()

    def rate(self, task: Task, batch: int) -> float:
        """q, at which the client with the most records draws `batch` of them on average."""
        return min(1.0, batch / task.largest)

    def descend(
        self, stack: ClientStack, weights: Tensor, batch: int, steps: int, take: Callable[[Tensor], None]
    ) -> None:
        """Call `take` with the private gradient of each client at the present `weights` [C, d], [C, d], `steps` times.

        A piece at a time, since noise for all of them may be too much to hold; how many are in one does not depend on
        the stack.
        """
        at_once, own = max(1, NOISE // weights.shape[1]), stack.secrets("gradients")
        pieces = [
            (min(at_once, steps - first), [secret.child(first) for secret in own]) for first in range(0, steps, at_once)
        ]
        gradient = self.gradients(stack, weights, batch, pieces, training=True)
        descent = Loop(lambda: take(gradient()), steps, weights.device, (0, steps))
        for piece, (many, _) in enumerate(pieces):
            gradient.begin(piece)
            descent.run(many)
            stack.passes += many * gradient.records

    def gradients(
        self,
        stack: ClientStack,
        weights: Tensor,
        batch: int,
        pieces: Sequence[Piece],
        change: Callable[[Tensor], Tensor] | None = None,
        training: bool = False,
    ) -> Gradients:
        """The private gradients of each client at `weights` [C, d], one after the other."""
        return Gradients(self, stack, weights, batch, pieces, change, training)


# ---------------------------------------------------------------------------------------------------- gradients


class Gradients:
    """Private gradients of C clients: each call gives those at the present `weights` [C, d], [C, d].

    A call works on tensors that stay, so that it can be captured as a graph. It gives as many as the piece that has
    begun has steps; `begin` goes on to another, whose noise is drawn then.

    pieces: how many steps, and private seeds, one a client, that are used for nothing else
    change: what is done to the records [C, B, …] before, to each by itself
    training: whether dropout is active. The masks of a record depend on its index and not on the other records of the
            batch, so that a record moves a sum by one clip at most
    """

    listener: Callable[[Tensor], object] | None = None  # gets what each call gives

    def __init__(
        self,
        how: DpSgd,
        stack: ClientStack,
        weights: Tensor,
        batch: int,
        pieces: Sequence[Piece],
        change: Callable[[Tensor], Tensor] | None = None,
        training: bool = False,
    ) -> None:
        self._how, self._crowd, self._weights, self._batch = how, stack, weights, batch
        self._pieces, self._change, device = pieces, change, weights.device
        rate = how.rate(stack.task, batch)
        drawn = [
            [rows for steps, secrets in pieces for rows in poisson(secrets[k].child("draw"), own, rate, steps)]
            for k, own in enumerate(stack.rows.indices)
        ]
        rows = padded(drawn, _at_once(weights) if current().compile else 1)
        self._index, self._mask = (torch.from_numpy(each).to(device) for each in rows)  # [steps, C, B]
        self._noise = weights.new_empty(max(steps for steps, _ in pieces), *weights.shape, dtype=torch.float64)
        self._step, self._within = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._keys: Tensor | None = None
        if training:
            self._keys = torch.tensor([secret.child("dropout").word for secret in pieces[0][1]], device=device)
        self.records = int(np.minimum(batch, stack.rows.counts).sum())  # of a step; how many were drawn is private
        self._piece = -1
        self.begin(0)

    def begin(self, piece: int) -> None:
        """Go to a later piece, or stay at this one."""
        if piece == self._piece:
            return
        if piece < self._piece:
            raise RuntimeError(f"piece {piece} is over and its noise serves once")
        (steps, secrets), how, size = self._pieces[piece], self._how, self._weights.shape[1]
        device = self._weights.device
        for first in range(0, len(secrets), ahead := AHEAD[device.type]):
            streams = [how.stream(one.child("noise"), steps * size) for one in secrets[first : first + ahead]]
            for k, stream in enumerate(streams, first):
                self._noise[:steps, k] = how.drawn(stream.to(device), steps * size).view(steps, size)
        self._noise[steps:] = math.nan  # or one call too many would have an old one
        self._step.fill_(sum(steps for steps, _ in self._pieces[:piece]))
        self._within.zero_()
        self._piece = piece

    def __call__(self) -> Tensor:
        task = self._crowd.task
        rows, counted = (t.index_select(0, self._step)[0] for t in (self._index, self._mask))
        added = self._noise.index_select(0, self._within)[0]
        key = None if self._keys is None else words(words(self._keys, self._step)[:, None], rows)
        self._step.add_(1)
        self._within.add_(1)
        x = self._change(task.x[rows]) if self._change else task.x[rows]
        how, y = self._how, task.y[rows]
        total = clipped_sum(task, self._weights, x, y, counted, how.clip, how.grid, key)
        released = ((total + added) * (how.unit / self._batch)).to(self._weights.dtype)
        if self.listener:
            self.listener(released)
        return released


def clipped(gradients: Tensor, clip: float) -> Tensor:
    """Each row of [B, d] clipped to norm `clip`; one that holds a number that is not finite becomes 0."""
    factors = shrinking(gradients, clip)
    return torch.where(factors > 0, gradients * factors, 0).to(gradients.dtype)


def shrinking(gradients: Tensor, clip: float) -> Tensor:
    """The factor by which each row of [B, d] is clipped to norm `clip`, [B, 1] in float64; 0 for one without a norm."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1, keepdim=True, dtype=torch.float64)
    return torch.where(norms.isfinite(), WITHIN * clip / norms.clamp(min=WITHIN * clip), 0)


def clipped_sum(
    task: Task,
    weights: Tensor,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    clip: float,
    grid: float | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """Σ of the clipped gradients of the records with mask 1: weights [C, d], records [C, B, …], mask [C, B] -> [C, d]
    in float64.

    Each record is given weights of its own, as if it were a client, as many at a time as `HELD` allows. With a `grid`
    each clipped gradient becomes whole multiples of clip / grid, rounded towards zero, and the sum counts these. With
    keys [C, B] a model with dropout draws the masks of each record from the record's key.
    """
    summed = task.fused("private gradient", partial(_clipped_sum, task, clip, grid=grid), clip, grid)
    total = torch.zeros_like(weights, dtype=torch.float64)
    tensors = [x, y, mask]
    if key is not None and task.noisy:
        tensors.append(key)
    for piece in zip(*(t.split(_at_once(weights), 1) for t in tensors), strict=True):
        total += summed(weights, *piece)[0]
    return total


def _clipped_sum(
    task: Task,
    clip: float,
    weights: Tensor,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    key: Tensor | None = None,
    grid: float | None = None,
) -> tuple[Tensor]:
    """The same of so few records that all their gradients can be held, with a key of each [C, B]."""
    own = weights[:, None].expand(-1, mask.shape[1], -1).flatten(0, 1)  # [C·B, d]
    records = [t.flatten(0, 1)[:, None] for t in (x, y, torch.ones_like(mask))]
    x, y, ones = records
    each = task.gradient(own, x, y, ones, None if key is None else key.flatten())[0].double()
    factors = shrinking(each, clip)
    each.masked_fill_(factors == 0, 0)  # or 0 times infinity would be in the sum
    if grid:
        each.mul_(factors * (grid / clip)).trunc_()
        factors = torch.ones_like(factors)
    return (((mask * factors.view(mask.shape))[:, None] @ each.unflatten(0, mask.shape))[:, 0],)


def _at_once(weights: Tensor) -> int:
    """Of how many records of each client the gradients are held at once."""
    room = max(1, HELD[weights.device.type] // weights.numel())
    return min(room, PIECE) if current().compile else room


# ---------------------------------------------------------------------------------------------------- draws


def poisson(secret: Seed, own: np.ndarray, rate: float, steps: int) -> list[np.ndarray]:
    """For each step the records of `own` [n] that are drawn, each by itself with probability `rate`."""
    chosen = uniform(secret, steps * len(own)).numpy().reshape(steps, len(own)) < rate
    return [own[row] for row in chosen]


def normal(secret: Seed, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal numbers, [count] in float64."""
    return _normal(_words(secret, even(count)).to(device))[:count]


def uniform(secret: Seed, count: int) -> Tensor:
    """Numbers from 0 to below 1 in float64, [count]."""
    drawn: Tensor = draws.uniform(torch, _words(secret, count))
    return drawn


def _normal(words: Tensor) -> Tensor:
    drawn: Tensor = draws.normal(torch, words)
    return drawn


def _words(secret: Seed, count: int) -> Tensor:
    """64 bits each from a ChaCha20 stream, [count] in int64."""
    return torch.from_numpy(draws.words(secret.key, count))


def padded(drawn: Sequence[Sequence[np.ndarray]], multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws of C clients in S steps as indices [S, C, B] and mask [S, C, B]; B is at least 1, under mask 0, and a
    multiple of `multiple`."""
    steps = len(drawn[0])
    width = max(1, max(len(rows) for own in drawn for rows in own))
    width = -(-width // multiple) * multiple
    index = np.zeros((steps, len(drawn), width), np.int64)
    mask = np.zeros((steps, len(drawn), width), np.float32)
    for k, own in enumerate(drawn):
        for t, rows in enumerate(own):
            index[t, k, : len(rows)], mask[t, k, : len(rows)] = rows, 1
    return index, mask
