"""Who holds which records: ways to deal them to clients.

Every record belongs to at most one client and every client holds at least one. Nothing here loops over clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedveil.core.data import Data, Ints, Split
from fedveil.core.seeds import Seed
from fedveil.core.spelling import check_options, unknown


@dataclass(frozen=True, eq=False, repr=False)
class Share(Split):
    """A split as one party of a deployment knows it: how many clients there are, the most records that any holds, and
    its own ones. Sizes of the others are unknown and read 0."""

    @staticmethod
    def of(
        client: int | None,
        clients: int,
        records: int,
        max_records: int,
        held: tuple[tuple[int, ...], ...] | None = None,
    ) -> Share:
        """Client `client` of `clients` holds all `records` records of its data set; None is the server, with none."""
        if client is not None and not 0 <= client < clients:
            raise ValueError(f"There is no client {client}; there are {clients}, from 0.")
        starts = np.zeros(clients + 1, np.int64)
        if client is not None:
            starts[client + 1 :] = records
        return Share(np.arange(starts[-1]), starts, "held", max_records, held)

    def __post_init__(self) -> None:
        self._check_max_records()

    def __getitem__(self, k: int) -> Ints:
        own = super().__getitem__(k)
        if not len(own):
            raise IndexError(f"The records of client {k} are not held here.")
        return own


def split(
    kind: str, data: Data, clients: int | None, seed: Seed, *, max_records: int | None = None, **options: Any
) -> Split:
    """The split of `kind` (`SPLITS`); `options` are the keyword-only parameters of its function.

    A 'natural' split has as many clients as the data have groups: `clients` is then None or that number.

    max_records: the public bound on how many records a client may hold; differential privacy of records needs one
    """
    return replace(_split(kind, data, clients, seed, **options), max_records=max_records)


def _split(kind: str, data: Data, clients: int | None, seed: Seed, **options: Any) -> Split:
    if kind not in SPLITS:
        raise unknown("split", kind, SPLITS)
    check_options(f"split {kind!r}", SPLITS[kind], options)
    if kind == "natural":
        made = natural(data)
        if clients not in (None, len(made)):
            raise ValueError(f"{data.name!r} has {len(made)} groups, not {clients}; leave clients out.")
        return made
    if clients is None:
        raise ValueError(f"A {kind!r} split needs a number of clients; give clients=.")
    return SPLITS[kind](data, clients, seed, **options)


def iid(data: Data, clients: int, seed: Seed) -> Split:
    """Records shuffled and dealt out in parts whose sizes differ by one at most."""
    _check_clients("iid", data, clients)
    order = seed.child("split").numpy().permutation(len(data.y))
    return Split(order, _even(len(order), clients), "iid")


def dirichlet(data: Data, clients: int, seed: Seed, *, alpha: float = 0.3, min_records: int = 1) -> Split:
    """Each class is divided over the clients in proportions drawn from a symmetric Dirichlet(alpha).

    Small alpha: few clients hold most of a class; large alpha: like IID. Clients that come out with fewer than
    `min_records` records are then filled up with records drawn at random from those that hold most.
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha}, but a Dirichlet split needs a number above 0.")
    _check_clients("dirichlet", data, clients, min_records)
    rng = seed.child("split").numpy()
    records = rng.permutation(len(data.y))
    y = _labels("dirichlet", data)[records]
    owner = np.empty(len(y), np.int64)
    for label in np.unique(y):
        mine = rng.permutation(np.flatnonzero(y == label))
        shares = rng.dirichlet(np.full(clients, alpha)).cumsum()
        owner[mine] = np.searchsorted(shares[:-1], (np.arange(len(mine)) + rng.random()) / len(mine))
    return _grouped(records, _filled_up(owner, clients, min_records), clients, "dirichlet")


def by_classes(data: Data, clients: int, seed: Seed, *, classes: int = 2) -> Split:
    """Each client holds `classes` classes; a class's records are divided evenly over its holders.

    Classes are dealt like cards, from a freshly shuffled deck each time one runs out, so they have equally many
    holders, give or take one; with 5 clients of 2 out of 10 classes they are disjoint. The records of a class that
    nobody holds stay out.
    """
    _check_clients("classes", data, clients)
    y = _labels("classes", data)
    present = np.unique(y)
    if not 1 <= classes <= len(present):
        raise ValueError(f"classes is {classes}, but {data.name!r} holds {len(present)} classes; use no more.")
    rng = seed.child("split").numpy()
    hands = present[_deal(clients, classes, len(present), rng)]
    records, owners = [], []
    for label in present:
        holders = np.flatnonzero((hands == label).any(1))
        mine = rng.permutation(np.flatnonzero(y == label))
        if len(mine) < len(holders):
            raise ValueError(
                f"Class {label} of {data.name!r} has {len(mine):,} records for {len(holders):,} clients; "
                f"use fewer clients or classes."
            )
        if len(holders):
            records.append(mine)
            owners.append(np.repeat(holders, np.diff(_even(len(mine), len(holders)))))
    held = tuple(map(tuple, np.sort(hands, axis=1).tolist()))
    return replace(_grouped(np.concatenate(records), np.concatenate(owners), clients, "classes"), held=held)


def shards(data: Data, clients: int, seed: Seed, *, shards: int = 2) -> Split:
    """Records sorted by label and cut into clients × `shards` even parts, of which each client is dealt `shards`.

    The pathological split of McMahan et al. (2017). Where classes are larger than a shard, a shard holds records of
    at most two.
    """
    if shards < 1:
        raise ValueError(f"shards is {shards}, but a client needs at least one.")
    _check_clients("shards", data, clients, shards)
    rng = seed.child("split").numpy()
    records = rng.permutation(len(data.y))
    records = records[np.argsort(_labels("shards", data)[records], kind="stable")]
    holder = rng.permutation(np.repeat(np.arange(clients), shards))
    owner = np.repeat(holder, np.diff(_even(len(records), len(holder))))
    return _grouped(records, owner, clients, "shards")


def natural(data: Data) -> Split:
    """A client for each of the data's own groups, in the order of their numbers."""
    if data.groups is None:
        raise ValueError(f"{data.name!r} has no natural groups; give groups=, or use another split.")
    groups, owner = np.unique(data.groups.numpy(), return_inverse=True)
    return _grouped(np.arange(len(owner)), owner, len(groups), "natural")


SPLITS: dict[str, Callable[..., Split]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "classes": by_classes,
    "shards": shards,
    "natural": natural,
}


def _check_clients(kind: str, data: Data, clients: int, each: int = 1) -> None:
    if clients < 1 or each < 1:
        raise ValueError(f"A {kind!r} split has {clients} clients with at least {each} records; use 1 or more of each.")
    if clients * each > len(data.y):
        raise ValueError(
            f"{data.name!r} has {len(data.y):,} records, too few for {clients:,} clients with {each} each; "
            f"use at most {len(data.y) // each:,} clients."
        )


def _labels(kind: str, data: Data) -> Ints:
    if not data.labelled:
        kept = "real numbers " if data.y.is_floating_point() else ""
        raise ValueError(
            f"A {kind!r} split needs one label a record, but y of {data.name!r} is {kept}{list(data.y.shape)}; "
            f"use 'iid' or 'natural'."
        )
    y: Ints = data.y.numpy()
    return y


def _even(n: int, parts: int) -> Ints:
    """Where each of `parts` parts of n starts, and n: [parts + 1]; sizes differ by one at most."""
    return np.arange(parts + 1) * n // parts


def _grouped(records: Ints, owner: Ints, clients: int, kind: str) -> Split:
    """The split in which records[i] belongs to owner[i]."""
    starts = np.zeros(clients + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=clients), out=starts[1:])
    return Split(records[np.argsort(owner, kind="stable")], starts, kind)


def _filled_up(owner: Ints, clients: int, min_records: int) -> Ints:
    """`owner` [N], changed so that each client has `min_records`; those with most give, down to a common level."""
    sizes = np.bincount(owner, minlength=clients)
    lacking = np.maximum(min_records - sizes, 0)
    needed = int(lacking.sum())
    if needed == 0:
        return owner
    falling = -np.sort(-sizes)
    # With the m largest cut down to the size of the next, `spare[m - 1]` records are free.
    spare = np.cumsum(falling) - np.arange(1, clients + 1) * np.append(falling[1:], 0)
    m = int(np.searchsorted(spare, needed)) + 1
    total = int(falling[:m].sum()) - needed
    level, extra = divmod(total, m)
    largest = np.argsort(-sizes, kind="stable")[:m]
    kept = sizes.copy()
    kept[largest] = level
    kept[largest[:extra]] += 1
    # The records at hand are in random order, so the last of a client's are any of its records.
    order = np.argsort(owner, kind="stable")
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    given = order[rank >= kept[owner[order]]]
    owner = owner.copy()
    owner[given] = np.repeat(np.arange(clients), lacking)
    return owner


def _deal(clients: int, hand: int, cards: int, rng: np.random.Generator) -> Ints:
    """[clients, hand] cards out of `cards`, no two alike in a hand, each dealt equally often, give or take one.

    Decks are dealt one after the other. Where a hand takes the tail of one deck and the head of the next, the next
    is ordered so that the tail's cards come after its head. This repeats after `cycle` decks, so all cycles are
    made at once, deck by deck.
    """
    cycle = hand // math.gcd(hand, cards)
    cycles = -(-clients * hand // (cycle * cards))
    decks = rng.permuted(np.tile(np.arange(cards), (cycles, cycle, 1)), axis=2)
    for i in range(1, cycle):
        tail = decks[:, i - 1, cards - i * cards % hand :]
        late = (decks[:, i, :, None] == tail[:, None, :]).any(2)
        decks[:, i] = np.take_along_axis(decks[:, i], np.argsort(late, axis=1, kind="stable"), axis=1)
    return decks.reshape(-1)[: clients * hand].reshape(clients, hand)
