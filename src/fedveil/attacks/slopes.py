"""From slopes to a gradient: K scalars with known directions are K linear measurements (BAFFLE, eq. 6).

A client answers with s_k = (L(w + σ z_k) - L(w)) / σ ≈ z_kᵀ g. Everyone who knows the round's key regrows Z [K, n], and
the smallest g with Z g = s is Zᵀ (Z Zᵀ)⁻¹ s, the projection of the client's gradient onto the directions. Of n numbers
drawn at random it keeps K/n of the energy, so its cosine to the gradient is about √(K/n), and 1 from K = n on. The
orthogonal law is an exception: its blocks overlap unless n is a power of 2, so K = n slopes are not quite enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks.seen import Estimate, Seen
from fedveil.core.directions import words
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.baffle.estimate import key_of
from fedveil.methods.baffle.probing import Prober
from fedveil.methods.baffle.questions import Probe, ProbeHere, Slopes
from fedveil.runs.messages import KeptRound

RIDGE = 16 * 2.0**-52  # a row, of the mean of the diagonal: what keeps a singular system solvable in float64
ROWS, COLUMNS = 256, 4096  # directions that are regrown at a time, and entries that are multiplied in float64 at a time
Probes = tuple[tuple[int, int], ...]  # keys, and how many directions of each


@dataclass(frozen=True)
class Measured:
    """The slopes of one client in one round."""

    round: int
    client: int
    weights: Tensor  # [d]
    key: int  # of its directions
    slopes: Tensor  # [K]
    records: int


def measured(seen: Seen, kept: KeptRound) -> list[Measured]:
    """Return the slopes that clients sent in a round. A client with fewer resources sent fewer (`weak`)."""
    method, found = seen.method, list[Measured]()
    assert isinstance(method, Baffle)
    for each in kept.messages:
        asked, answer = each.question, each.answer
        if (
            isinstance(asked, (Probe, ProbeHere))
            and isinstance(answer, Slopes)
            and bool(answer.slopes.isfinite().all())
        ):
            w = asked.weights if isinstance(asked, Probe) else method.server.training(kept.state).weights
            key = asked.key
            if method.seeds == "own":
                key = int(words(torch.tensor([key]), torch.tensor([each.client])))
            w, s = w.to(seen.task.device), answer.slopes.to(seen.task.device, torch.float64)
            found.append(Measured(kept.round, each.client, w, key, s, answer.records))
    return found


def slopes(seen: Seen, kept: KeptRound) -> list[Estimate]:
    """Return the smallest gradient that has the slopes of a round, for each client."""
    own = measured(seen, kept)
    return _solved(seen, [[each] for each in own], "slopes")


def slopes_over_rounds(seen: Seen) -> list[Estimate]:
    """Return the smallest gradient that has all slopes a client sent in two rounds or more.

    The weights move between rounds, so this is an estimate of the gradient at the weights of its last round. It is
    exact where they stand still and the directions of all rounds span the whole space.
    """
    if not isinstance(seen.method, Baffle):
        return []
    by_client: dict[int, list[Measured]] = {}
    for kept in seen.rounds:
        for each in measured(seen, kept):
            by_client.setdefault(each.client, []).append(each)
    return _solved(seen, [own for own in by_client.values() if len(own) > 1], "slopes over rounds")


def _solved(seen: Seen, clients: Sequence[Sequence[Measured]], kind: str) -> list[Estimate]:
    """Solve for each client; those who measured along the same directions are solved together, in their order."""
    method = seen.method
    assert isinstance(method, Baffle)
    prober, found = method.prober(seen.task), dict[int, Tensor]()
    groups: dict[Probes, list[int]] = {}
    for i, own in enumerate(clients):
        groups.setdefault(tuple((each.key, len(each.slopes)) for each in own), []).append(i)
    for probes, members in groups.items():
        s = torch.stack([torch.cat([each.slopes for each in clients[i]]) for i in members], 1)
        vectors = prober.spread(smallest(regrown(prober, probes), s).T.to(torch.float32))
        found.update(zip(members, vectors, strict=True))
    lasts = [own[-1] for own in clients]
    return [
        Estimate(last.round, (last.client,), last.weights, found[i], "gradient", kind, last.records)
        for i, last in enumerate(lasts)
    ]


def regrown(prober: Prober, probes: Probes) -> Tensor:
    """Return the directions of these keys, one below the other: [M, n] in float32, with M the sum of the counts."""
    device, size = prober.task.device, prober.directions.size
    rows = torch.empty(sum(count for _, count in probes), size, device=device)
    at = 0
    for key, count in probes:
        keys = torch.tensor([key], device=device)
        for first in range(0, count, ROWS):
            some = min(ROWS, count - first)
            rows[at : at + some] = prober.directions.rows(torch, keys, first, some)[0]
            at += some
    return rows


def smallest(z: Tensor, s: Tensor) -> Tensor:
    """Return the smallest g [n, C] with Z g = s, for directions Z [M, n] and slopes s [M, C], in float64.

    With M > n no g may fit, and it is the one nearest to fitting: g = (Zᵀ Z)⁻¹ Zᵀ s.
    """
    if len(z) <= z.shape[1]:
        return _wide(z.mT, _solve(_gram(z), s))
    return _solve(_gram(z.mT), _wide(z.mT, s))


def _gram(z: Tensor) -> Tensor:
    """Z Zᵀ of [M, n] in float64, a piece of the columns at a time."""
    total = torch.zeros(len(z), len(z), dtype=torch.float64, device=z.device)
    for part in z.split(COLUMNS, 1):
        wide = part.double()
        total.addmm_(wide, wide.mT)
    return total


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """A b of [n, M] and [M, C] in float64, a piece of the rows at a time."""
    return torch.cat([part.double() @ b for part in a.split(COLUMNS)])


def _solve(gram: Tensor, s: Tensor) -> Tensor:
    gram.diagonal().add_(RIDGE * len(gram) * gram.diagonal().mean())
    return torch.cholesky_solve(s, torch.linalg.cholesky(gram))


def of_the_mean(seen: Seen, number: int, descent: Tensor) -> Tensor:
    """Return the smallest gradient [d] that has the clients' mean slopes, from the gradient [d] that the server used.

    The server used Zᵀ c with c_k = Σ_c (n_c / N) s_ck / K_c (eq. 7), and c solves Z Zᵀ c = Z (Zᵀ c). Directions that
    only some clients probed are left out. If the server clipped its gradient, the estimate is shorter by that factor.
    """
    method = seen.method
    assert isinstance(method, Baffle)
    prober = method.prober(seen.task)
    n, count, fewest = prober.directions.size, method.directions, method.fewest
    if method.seeds == "own" or count > n:  # how slopes went into the sum cannot be told from it
        return descent
    places = method.places(seen.task)
    inside = (descent if places is None else descent[places]).double()
    z = regrown(prober, ((key_of(seen.round_seed(number)), count),))
    coefficients = _solve(_gram(z), _wide(z, inside[:, None]))[:fewest]
    each = method.share / fewest + (1 - method.share) / count  # the mean of 1 / K_c, as public resources have it
    return prober.spread(smallest(z[:fewest], coefficients / each)[:, 0].to(torch.float32))
