"""The audit of DP-SGD as a run does it: can what a client releases be told apart with and without one record?

The client answers once more, with its own records and canaries: records whose gradient is one coordinate, ten times as
long as the clip. Each canary is among its records or not by a fair coin. The method's own round runs, from the question
to the answer and the ε that is charged, while every private gradient is overheard at the canaries' coordinates. From
these it is guessed which canaries are in.

More right guesses than (ε, δ) allows contradict the ε (Steinke, Nasr and Jagielski 2023). Fewer are enough to
contradict the trade-off curve of the noise, which says more than one pair (ε, δ) does (see `tradeoff`). The deviation
of what is overheard is the noise that was really there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from fedveil.attacks.guesses import bound, curve_bound
from fedveil.core.loop import Federation
from fedveil.core.method import Method
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.setup import init_state
from fedveil.core.stack import ClientStack
from fedveil.core.task import Task
from fedveil.data import Split
from fedveil.engines.local import LocalEngine
from fedveil.methods.baffle.baffle import Baffle
from fedveil.privacy.accountant import Noised
from fedveil.privacy.dpsgd import DpSgd, Gradients, Piece

LENGTH = 10.0  # a canary's gradient in clips: what is not clipped shows
FIRST = 2.0**20  # a canary's input is -(FIRST + its number) everywhere, which no record's is
LISTENED = 32  # records whose gradients say where it is quiet
SILENT = 1e-9  # the noise of the control
SLACK = 0.01  # 2mδ of the audit at most, so that the bound does not pay for its δ
SURE = 4.0  # deviations that a noise must be off before it counts: one audit of 30,000
HALF = 0.67449  # deviations within which half of a normal variable lies
BLUR = 1.1664  # √n × the relative deviation of a deviation estimated from the median of n
ENDLESS = 10**6  # rounds of which the audited ones are the first


class Mechanism(msgspec.Struct, frozen=True):
    """What the audit of a private gradient found.

    canaries, answers, steps: how many there were, and how many steps were overheard
    delta, epsilon: what the client charges for these answers (proved), at a δ that suits the audit
    lower:          the ε that the guesses rule out by (ε, δ) alone (measured); above `epsilon` the promise is broken
    guesses, right: about the half of the canaries that chose no threshold
    noise:          the recipe's, in clips
    found, most:    the noise that was there, in what a canary adds, and the most that it can have been
    reused:         whether one private seed served twice
    control:        `lower` of the same audit without noise; it, or `curve_control`, must be above `epsilon`, or the
                    audit is too weak
    curve, curve_guesses, curve_right, curve_control: the same by the trade-off curve of Gaussian noise, with as many
                    guesses as suit it; None in files of older versions
    """

    canaries: int
    answers: int
    steps: int
    delta: float
    epsilon: float
    lower: float
    guesses: int
    right: int
    noise: float
    found: float
    most: float
    reused: bool
    control: float
    curve: float | None = None
    curve_guesses: int = 0
    curve_right: int = 0
    curve_control: float = 0.0

    @property
    def best(self) -> float:
        """The larger of the two bounds."""
        return max(self.lower, self.curve or 0.0)

    @property
    def best_control(self) -> float:
        """The larger of the two controls."""
        return max(self.control, self.curve_control)

    def broken(self) -> Iterator[str]:
        """A sentence for each promise that does not hold."""
        if self.best > self.epsilon:
            yield (
                f"canaries rule out every ε below {self.best:.4g} at δ = {self.delta:.2g}, "
                f"but {self.epsilon:.4g} is charged"
            )
        if self.most < self.noise:
            yield f"the noise is {self.most:.4g} clips at most, but the recipe's is {self.noise:g}"
        if self.reused:
            yield "one private seed served for the noise of several steps, which cancels out"


# ---------------------------------------------------------------------------------------------------- canaries


class Planted(Task):
    """A task whose client 0 holds a client's records and those canaries that are `included` [m], with weights to begin
    from. Canary i's loss is `length` × the weight at `places[i]`."""

    def __init__(
        self, task: Task, clients: Sequence[int], w: Tensor, places: Tensor, included: np.ndarray, length: float
    ) -> None:
        vars(self).update(vars(task), largest=task.largest, initial=w, _fused={})  # q and the bytes are the run's
        self.places, self.length, count = places, length, len(task.x)
        first, *others = task.rows(clients).indices
        parts = [np.concatenate([first, count + np.flatnonzero(included)]), *others]
        starts = np.cumsum([0, *map(len, parts)])
        self.clients = Split(np.concatenate(parts), starts, "planted", int(starts[-1]), self._held(task, clients))
        numbers = -(FIRST + torch.arange(len(places), device=task.device))
        x = task.x if task.x.is_floating_point() else task.x.long()
        planted = numbers.to(x.dtype).view(-1, *[1] * len(task.data.input)).expand(-1, *task.data.input)
        label = task.y[int(first[0])].expand(len(places), *task.y.shape[1:])
        self.x, self.y = torch.cat([x, planted]), torch.cat([task.y, label])
        blank = torch.cat([task.data.x, torch.zeros_like(planted, dtype=task.data.x.dtype, device="cpu")])
        self.data = replace(task.data, x=blank, y=self.y.cpu(), groups=None)

    @staticmethod
    def _held(task: Task, clients: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
        held = task.clients.held
        return held and tuple(held[k] for k in clients)

    def stacked_losses(self, w: Tensor, x: Tensor, y: Tensor, key: Tensor | None = None) -> Tensor:
        planted, number = canary(x, 2), -x.flatten(2)[..., 0] - FIRST
        usual = super().stacked_losses(w, x.masked_fill(planted, 0), y, key)
        own = self.length * w.gather(1, self.places[number.long().clamp(min=0)])
        return torch.where(planted.flatten(1), own, usual)

    def losses(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.stacked_losses(w[None], x[None], y[None])[0]


def canary(x: Tensor, dims: int) -> Tensor:
    """Whether each of some records, whose shape follows after `dims` dimensions, is a canary: [..., 1, …]."""
    first: Tensor = x.flatten(dims)[..., 0] <= -FIRST
    return first.reshape(*x.shape[:dims], *[1] * (x.dim() - dims))


def quiet(task: Task, client: int, w: Tensor, count: int) -> Tensor:
    """The `count` places in the weights where gradients of the client's records, of a few of them, are smallest."""
    rows = torch.from_numpy(task.clients[client][:LISTENED]).to(task.device)
    ones = torch.ones(len(rows), 1, device=task.device)
    slopes: Tensor = task.gradient(w.expand(len(rows), -1), task.x[rows][:, None], task.y[rows][:, None], ones)[0]
    return slopes.abs().sum(0).argsort(stable=True)[:count]


# ---------------------------------------------------------------------------------------------------- the wire


@dataclass
class Heard:
    """What was overheard of client 0: at each step the canaries' coordinates, in clips [S, m]."""

    places: Tensor
    rate: float = 0.0
    seeds: list[Seed] = field(default_factory=list)
    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # places for steps [T, m], how many were taken

    @property
    def steps(self) -> np.ndarray:
        taken = [part[: int(done)] for part, done in self.parts]
        return torch.cat(taken).double().cpu().numpy()


@dataclass(frozen=True)
class Tapped(DpSgd):
    """DP-SGD that is listened to. With `silent` it claims what it claims and adds no noise: what a bug would do."""

    heard: Heard | None = field(default=None, compare=False)
    silent: bool = False

    def gradients(
        self,
        stack: ClientStack,
        weights: Tensor,
        batch: int,
        pieces: Sequence[Piece],
        change: Callable[[Tensor], Tensor] | None = None,
        training: bool = False,
    ) -> Gradients:
        heard, noise = self.heard, SILENT if self.silent else self.sigma
        source = DpSgd(noise=noise, clip=self.clip, mechanism=self.mechanism)
        assert heard
        changed = change and (lambda x: torch.where(canary(x, 2), x, change(x)))
        private = source.gradients(stack, weights, batch, pieces, changed, training)
        heard.seeds += [secret for _, secrets in pieces for secret in secrets]
        if 0 not in stack.clients:
            return private
        heard.rate, at = self.rate(stack.task, batch), stack.clients.index(0)
        kept = torch.zeros(sum(steps for steps, _ in pieces), len(heard.places), device=weights.device)
        cursor = torch.zeros(1, dtype=torch.int64, device=weights.device)
        heard.parts.append((kept, cursor))

        def listen(released: Tensor) -> None:
            kept.index_copy_(0, cursor, (released[at, heard.places] * (batch / self.clip))[None])
            cursor.add_(1)

        private.listener = listen
        return private


# ---------------------------------------------------------------------------------------------------- the audit


def unsupported(method: Method) -> str:
    """Why the private answers of a method cannot be audited; empty if they can."""
    if isinstance(method, Baffle):
        return f"canaries are planted in gradients, so the private slopes of {method.name} cannot be audited yet"
    return ""


def audit(
    task: Task,
    method: Method,
    w: Tensor,
    seed: Seed,
    secret: Seed | None = None,
    canaries: int = 4000,
    answers: int = 1,
    tell: Callable[[str], object] = lambda _: None,
) -> Mechanism:
    """Audit `answers` answers of client 0 at weights `w` [d] with at most `canaries` canaries.

    secret: fixes the client's private randomness, for tests
    """
    if method.promise is None or method.promise.key != DpSgd.key:
        raise ValueError(f"{method.name} promises no privacy for each record, so there is nothing to audit")
    if why := unsupported(method):
        raise ValueError(why)
    privacy = cast(DpSgd, method.promise)
    m = min(canaries, task.layout.size // 4)
    if m < 100:
        raise ValueError(f"{m} canaries tell nothing; there must be 100, and 4 weights for each")
    clients = range(min(len(task.clients), max(1, method.min_clients)))
    places = quiet(task, 0, w, m)
    included = seed.child("coins").numpy().random(m) < 0.5
    planted = Planted(task, clients, w, places, included, LENGTH * privacy.clip)
    delta = min(privacy.delta, SLACK / (2 * m))

    def heard(silent: bool) -> tuple[Heard, float]:
        tap = Heard(places)
        how = Tapped(
            noise=privacy.sigma,
            clip=privacy.clip,
            delta=delta,
            accountant=privacy.accountant,
            mechanism=privacy.mechanism,
            heard=tap,
            silent=silent,
        )
        epsilon = _play(planted, replace(method, privacy=how), seed, secret, answers)  # type: ignore[type-var]
        return tap, epsilon

    tell("control: canaries without noise")
    silent, _ = heard(silent=True)
    tell("canaries in the private gradients")
    tap, epsilon = heard(silent=False)
    lower = bound(tap.steps, included, delta)
    tell("the trade-off curve of the private gradients")
    charged = Noised(privacy.sigma, tap.rate, len(tap.steps))  # Skellam noise on the grid of DP-SGD is Gaussian to 1e-9
    curve = curve_bound(tap.steps, included, delta, charged)
    found, most = noise(tap.steps, silent.steps, included, tap.rate)
    reused = len({each.key for each in tap.seeds}) < len(tap.seeds)
    return Mechanism(
        m, answers, len(tap.steps), delta, epsilon, *lower, privacy.sigma, found, most, reused,
        control=bound(silent.steps, included, delta).epsilon,
        curve=curve.epsilon, curve_guesses=curve.guesses, curve_right=curve.right,
        curve_control=curve_bound(silent.steps, included, delta, charged).epsilon,
    )  # fmt: skip


def _play(planted: Planted, method: Method, seed: Seed, secret: Seed | None, answers: int) -> float:
    """Rounds of the method on the planted task, and the ε that they charge. Canaries may well spoil what is made of the
    gradients, so that the answer is refused; released they are."""
    sampler, engine = CohortSampler(size=len(planted.clients)), LocalEngine(stack=1, workers=1)
    account = method.account(planted, sampler)
    tally = account.tally() if account else None
    federation = Federation(planted, method, engine, sampler, seed, ENDLESS, secret=secret, tally=tally)
    try:
        state = init_state(planted, method, sampler)
        for number in range(1, answers + 1):
            state, row = federation.step(state, number, ENDLESS)
    finally:
        engine.close()
    if row.epsilon is None or not method.privacy.heard.parts:  # type: ignore[attr-defined]
        why = "; ".join([*row.missing.values(), *row.events]) or f"{method.name} charged no ε"
        raise ValueError(f"a client with canaries released no private gradient to audit: {why}")
    return row.epsilon


def noise(steps: np.ndarray, silent: np.ndarray, included: np.ndarray, rate: float) -> tuple[float, float]:
    """The deviation of the noise in what one drawn canary adds, which is a clip, and the most that it can have been.

    The noise is how canaries that are out differ between two steps, at the median, so that noise that is now and then
    another one does not pass for fresh. What a canary adds is the difference that being in makes without noise, over
    the rate at which it is drawn.
    """
    out, even = steps[:, ~included], len(steps) // 2 * 2
    pairs = out[0:even:2] - out[1:even:2] if even else out[:, 0::2][:, : out.shape[1] // 2] - out[:, 1::2]
    deviation = np.median(np.abs(pairs)) / (HALF * math.sqrt(2))
    ours, others = silent[:, included].mean(0), silent[:, ~included].mean(0)
    adds = (ours.mean() - others.mean()) / rate
    if adds < 0.5:
        raise ValueError(f"without noise a canary adds {adds:.3g} clips instead of 1; an audit with them says nothing")
    unsure = math.sqrt(ours.var(ddof=1) / len(ours) + others.var(ddof=1) / len(others)) / rate
    least = max(adds - SURE * unsure, 1e-6)
    return float(deviation / adds), float(deviation * (1 + SURE * BLUR / math.sqrt(pairs.size)) / least)
