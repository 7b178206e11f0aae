"""Who masks with whom. In a small cohort everybody with everybody; in a large one each with k neighbours.

The graph is that of Bell et al. 2020 ("Secure Single-Server Aggregation with (Poly)Logarithmic Overhead"): clients on a
circle in an order that the public seed draws, each joined to the k/2 next ones on either side (a Harary graph).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np

from fedveil.core.seeds import Seed

COMPLETE = 100  # up to so many clients everybody masks with everybody, and nothing below is left to chance
SECURITY = 40  # the chance that an unlucky graph protects somebody less than a complete one is at most 2^-40,
CORRECTNESS = 30  # and that of a sum that cannot be unmasked at most 2^-30, as long as at most
CORRUPT = 0.2  # this share of the clients work for the server, chosen without regard to the graph, and
DROPPED = 0.2  # this share of them drop out after the key exchange


@functools.lru_cache(256)
def degree(n: int) -> int:
    """The fewest neighbours k (even) that keep both promises above among n clients; n - 1 where all are neighbours.

    Three things can go wrong, each bounded over all clients: enough of somebody's neighbours are corrupt to recover a
    secret; those who are neither corrupt nor gone fall apart, for which k/2 others in a row are needed; fewer of
    somebody's neighbours stay than are needed to recover a secret.
    """
    corrupt, dropped = math.ceil(CORRUPT * n), math.ceil(DROPPED * n)
    for k in range(2, n - 1, 2) if n > COMPLETE else ():
        t = majority(k + 1)
        seen = n * _at_least(t, n - 1, corrupt, k)
        apart = n * math.prod((corrupt + dropped - i) / (n - i) for i in range(k // 2))
        stuck = n * _at_least(k - t + 1, n - 1, dropped, k)
        if seen + apart <= 2**-SECURITY and stuck <= 2**-CORRECTNESS:
            return k
    return n - 1


def majority(n: int) -> int:
    """The fewest that are more than half of n."""
    return n // 2 + 1


def _at_least(minimum: int, n: int, marked: int, drawn: int) -> float:
    """The probability that of `drawn` out of n at least `minimum` are among the `marked` (hypergeometric tail)."""
    ways = range(max(minimum, drawn - (n - marked), 0), min(drawn, marked) + 1)
    return sum(math.comb(marked, i) * math.comb(n - marked, drawn - i) for i in ways) / math.comb(n, drawn)


@functools.lru_cache(8)
def neighbourhoods(ids: tuple[int, ...], k: int, seed: Seed) -> Mapping[int, list[int]]:
    """Each client with its neighbours and itself, in ascending order; `ids` are so too."""
    n = len(ids)
    if k >= n - 1:
        everybody = list(ids)
        return dict.fromkeys(ids, everybody)  # one list, by which a broadcast is told
    circle = np.array(ids)[seed.child("secure sum").numpy().permutation(n)]
    reach = np.arange(-(k // 2), k // 2 + 1)
    near = np.sort(circle[(np.arange(n)[:, None] + reach) % n], axis=1)
    return dict(zip(circle.tolist(), near.tolist(), strict=True))


@functools.lru_cache(8)
def connected(ids: tuple[int, ...], k: int, seed: Seed, left: tuple[int, ...]) -> bool:
    """Whether those of `ids` who are `left` are joined by pair masks, over each other. Each part of a graph that falls
    apart would give away a sum of its own."""
    near, unseen = neighbourhoods(ids, k, seed), set(left)
    found = [unseen.pop()] if unseen else []
    while found and unseen:
        met = unseen.intersection(near[found.pop()])
        unseen -= met
        found += met
    return not unseen
