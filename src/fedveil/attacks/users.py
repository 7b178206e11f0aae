"""The audit of user-level privacy under the secure sum: does the noised sum tell one client's update from another?

Many sums are made of the fewest clients that may be summed, as clients encode and noise their updates. One client's
update is the worst there is, of norm C, in one place or spread over all; or it is that update's neighbour. The others
send zeros. A threshold on the sum, along what the two differ by, tells one from the other. More right answers than
(ε, δ) allows contradict the ε that is charged.

The two rates of that threshold are a point that the trade-off curve must allow, so that no bound for one run is needed
here. A second bound compares them with the curves of Gaussian noise (μ-GDP), which are tight for it. Sums of Skellam
noise over many units of fixed point are nearly Gaussian. The accountant's own curve would be looser, because it knows
Skellam noise by a bound on its Rényi divergence only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedveil.attacks.roc import Roc
from fedveil.attacks.tradeoff import gaussian_epsilon
from fedveil.codecs.raw import Update
from fedveil.core.seeds import Seed
from fedveil.privacy import skellam
from fedveil.privacy.accountant import epsilon
from fedveil.privacy.draws import WITHIN
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.privacy.users import UserLevel

PLACES = 8  # entries of the audited updates; elsewhere they would be zero, and noise there tells nothing

Updates = NDArray[np.float32]
Integers = NDArray[np.int64]
Summands = Callable[[Updates, bytes, np.random.Generator], Integers]  # updates [trials, d], key, rounding -> integers


class SumAudit(msgspec.Struct, frozen=True):
    """What the audit of a noised sum found.

    trials:   how many sums were made of each of two updates
    clients:  whose noise was in a sum: the fewest that may be summed, without colluders
    relation: by which the two updates are neighbours
    delta, epsilon: what one round is charged (proved)
    lower:    the ε that the sums rule out (measured); above `epsilon` the promise is broken
    control:  `lower` of the same audit without noise; it must be above `epsilon`, or the audit is too weak
    curve:    the ε that they rule out for noise that is nearly Gaussian; None in files of older versions
    """

    trials: int
    clients: int
    relation: str
    delta: float
    epsilon: float
    lower: float
    control: float
    curve: float | None = None

    @property
    def best(self) -> float:
        """The larger of the two bounds."""
        return max(self.lower, self.curve or 0.0)

    def broken(self) -> Iterator[str]:
        """A sentence if the promise does not hold."""
        if self.best > self.epsilon:
            yield (
                f"noised sums rule out every ε below {self.best:.4g} at δ = {self.delta:.2g} ({self.relation}), but "
                f"{self.epsilon:.4g} is charged for one"
            )


def audit(how: UserLevel, secure: SecureSum, size: int, clients: int, seed: Seed, trials: int = 20_000) -> SumAudit:
    """Audit one round of so many clients, whose updates have `size` entries."""
    quorum = secure.quorum(clients)
    kind = dataclasses.replace(secure, clip=how.clip).noised(how.sum_noise)
    fixed = kind.fixed_point(clients, quorum, {}, Update)
    pairs = neighbours(how, min(size, PLACES))

    def lower(fixed: FixedPoint, honest: int, name: str) -> tuple[float, float]:
        return ruled_out(encoded(fixed), pairs, honest, trials, how.delta, seed.child(name))

    found, curve = lower(fixed, quorum - how.colluders, "sums")
    return SumAudit(
        trials,
        quorum - how.colluders,
        how.relation,
        how.delta,
        epsilon([how.step(secure.bits, size)], how.delta),
        lower=found,
        control=lower(dataclasses.replace(fixed, variance=0.0), 1, "control")[0],
        curve=curve,
    )


def neighbours(how: UserLevel, size: int) -> list[tuple[Updates, Updates]]:
    """Updates of norm C, in one place and spread over all, and their neighbours that lie furthest away."""
    one, all_ = np.zeros(size, np.float32), np.full(size, size**-0.5, np.float32)
    one[0] = 1
    back = np.float32(-1 if how.relation == "replacement" else 0)
    return [(u, back * u) for u in (WITHIN * how.clip * one, WITHIN * how.clip * all_)]


def encoded(fixed: FixedPoint) -> Summands:
    """What clients give to the sum: updates rounded to fixed point, and noise."""

    def summands(updates: Updates, key: bytes, draw: np.random.Generator) -> Integers:
        norm, whole = skellam.rounded(fixed.half, updates.shape[1]), np.zeros(updates.shape, np.int64)
        for i in np.flatnonzero(updates.any(1)):
            elements = fixed.encode(updates[i], 1, draw, norm)[:-2]
            whole[i] = elements.view(np.dtype(f"i{elements.itemsize}"))
        if fixed.variance:
            whole += skellam.draw(key, fixed.variance, whole.size).reshape(whole.shape)
        return whole

    return summands


def ruled_out(
    summands: Summands,
    pairs: Sequence[tuple[Updates, Updates]],
    clients: int,
    trials: int,
    delta: float,
    seed: Seed,
    others: Updates | None = None,
) -> tuple[float, float]:
    """The ε that sums of so many clients rule out, with 95% confidence: by (ε, δ) alone, and for Gaussian noise.

    Which pair of neighbours, which of the two is looked for, and the threshold are chosen on every second trial; the
    rest measure.

    others: what each other client sends, [d]; by default zeros
    """
    found = []
    for number, pair in enumerate(pairs):
        scores = []
        for side, update in enumerate(pair):
            own, total = seed.child(number, side), np.zeros((trials, len(update)))
            for client in range(clients):
                given = update if client == 0 else np.zeros_like(update) if others is None else others
                key = masks.derive(own.child(client).key, b"fedveil audit")
                total += summands(np.tile(given, (trials, 1)), key, own.child(client, "rounding").numpy())
            scores.append(total @ (pair[0] - pair[1]).astype(np.float64))
        found += [Roc(scores[0], scores[1]), Roc(-scores[1], -scores[0])]
    best = max(found, key=lambda roc: roc.halves()[0].epsilon(delta))
    apart = max(found, key=lambda roc: roc.halves()[0].gaussian())
    return best.epsilon(delta), gaussian_epsilon(apart.gaussian(), delta)
