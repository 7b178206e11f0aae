"""The server's side of the secure sum: five stages on top of `Cohort.exchange`, six against a malicious server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fedveil.core import message
from fedveil.core.cohort import Answers, BelowQuorum, Cohort
from fedveil.core.message import Question, Refused
from fedveil.privacy.secagg import graph, masks, shamir
from fedveil.privacy.secagg.context import MARK, SIGNATURE, Context
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.records import (
    SEALED,
    Advertise,
    Advertised,
    Agree,
    Deal,
    Mask,
    Share,
    Shared,
    Unmask,
    rows,
    tensor,
)
from fedveil.privacy.secagg.settings import SecureSum, shapes
from fedveil.privacy.secagg.total import Sum


def ask_sum(cohort: Cohort, question: Question, how: SecureSum, number: int = 0) -> Sum:
    """Ask every client of a cohort and learn the weighted sum of their answers, and nothing else of them.

    The method enters the question in its `handlers` through `client.stages`. Raises `BelowQuorum` where too few are
    left, and then learns nothing.

    number: sums of this round before this one, to which keys and masks are bound
    """
    method, task, run = cohort.method, cohort.task, cohort.run
    kind, quorum = method.reply(question), how.quorum(len(cohort))
    how.validate(task, kind)

    def enough(left: Collection[int], stage: str) -> None:
        if len(left) < quorum:
            raise BelowQuorum(
                f"the secure sum stopped at '{stage}' and nothing of anybody was revealed: {len(left)} of "
                f"{len(cohort)} clients are left, {quorum} are needed"
            )

    enough(cohort.ids, "keys")
    keys = _honest(cohort, Context(run, cohort.round, number=number), cohort.exchange(Advertise(number), "keys"))
    enough(keys, "keys")
    scene = _Scene(Context.of(run, cohort.round, tuple(keys), quorum, number), keys, how, quorum, cohort)

    shared = cohort.exchange(scene.routed_keys(), "shares")
    sharers = scene.reachable(shared, {})
    enough(sharers, "shares")
    dealt = cohort.exchange(scene.routed_shares(shared, sharers), "dealt")
    complaints = scene.complaints(dealt, sharers)
    senders = scene.reachable(dealt, complaints)
    enough(senders, "dealt")

    fixed = how.fixed_point(len(keys), quorum, task.sizes, kind)
    sizes = {**method.schema(task, question, senders[0]), **question.sizes()}
    bound = shapes(kind, sizes)
    elements = sum(math.prod(shape) for shape in bound.values()) + 2
    asked = Mask(senders, elements, fixed.wide, question.kind, tensor(message.pack(question)))
    masked = scene.alike(cohort.exchange(dict.fromkeys(senders, asked), "masked"))
    enough(masked, "masked")
    cohort.require(len(masked), len(cohort))
    alive, signatures = list(masked), {}
    if not scene.connected(alive):
        raise BelowQuorum(
            "the secure sum stopped at 'masked' and nothing of anybody was revealed: the neighbourhoods of those who "
            "are left fall apart; set method.secure.neighbours higher, or leave it out"
        )

    if how.server == "malicious":
        signed = cohort.exchange(dict.fromkeys(alive, Agree(alive)), "agreement")
        enough(signed, "agreement")
        signatures = {k: signed[k].signature.numpy().tobytes() for k in signed}
    unmasked = cohort.exchange(scene.last_questions(senders, alive, signatures), "unmask")
    total = _total(masked, fixed)
    digest = next(iter(masked.values())).asked.numpy().tobytes()
    scene.unmask(total, senders, set(alive), shared, scene.shares(senders, alive, shared, unmasked, complaints), digest)
    cohort.counted(alive)

    try:
        fixed.check(total, len(alive))
    except Refused as error:
        raise BelowQuorum(f"the secure sum cannot be used: {error.detail}, so somebody masked a wrong vector") from None
    values, weight, clipped = fixed.decode(total)
    if not values.any():
        cohort.tell("the secure sum is 0 in every element: clients may have failed and masked zeros; see their logs")
    parts = torch.from_numpy(values).split([math.prod(shape) for shape in bound.values()])
    totals = {name: part.view(shape) for (name, shape), part in zip(bound.items(), parts, strict=True)}
    furthest = fixed.error(len(alive), weight)
    cohort.note(clipped=clipped, quantisation=furthest)
    return Sum(tuple(alive), weight, totals, fixed.heaviest, clipped, furthest)


def _honest(cohort: Cohort, context: Context, answers: Answers) -> dict[int, _Keys]:
    """Keys that no client will refuse: a single bad one would otherwise make all of them refuse the round."""
    keys, owner = dict[int, _Keys](), dict[bytes, int]()
    for client, answer in answers.items():
        own = _Keys.read(answer)
        try:
            cohort.identities.verify(client, own.signature, context.signed_keys(client, own.channel, own.mask))
            masks.exchange(bytes(range(32)), (own.channel, own.mask))  # says if one is of low order
            for key in (own.channel, own.mask):
                if key in owner:
                    raise Refused("bad key", f"client {owner[key]} has the same key")
                owner[key] = client
            keys[client] = own
        except Refused as error:
            cohort.reject(client, error)
    return keys


def _total(masked: Mapping[int, Any], fixed: FixedPoint) -> masks.Vector:
    vectors = [answer.vector.numpy().view(fixed.dtype) for answer in masked.values()]
    total: masks.Vector = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


@dataclass(frozen=True)
class _Keys:
    channel: bytes
    mask: bytes
    signature: bytes

    @staticmethod
    def read(answer: Advertised) -> _Keys:
        return _Keys(*(part.numpy().tobytes() for part in (answer.channel, answer.mask, answer.signature)))


@dataclass(frozen=True)
class _Scene:
    """Who has which keys and which neighbours."""

    context: Context
    keys: Mapping[int, _Keys]  # of U1, in ascending order
    how: SecureSum
    quorum: int
    cohort: Cohort

    @cached_property
    def near(self) -> Mapping[int, list[int]]:
        """Each client with its neighbours and itself."""
        return graph.neighbourhoods(tuple(self.keys), self.how.degree(len(self.keys)), self.cohort.seed)

    @property
    def threshold(self) -> int:
        return self.how.threshold(len(self.keys), self.quorum)

    def routed_keys(self) -> dict[int, Question]:
        """The keys of each client's neighbours; where all are neighbours this is one broadcast."""
        ids, made = list(self.keys), dict[int, Question]()
        for holders in self.near.values():
            if id(holders) not in made:
                own = [self.keys[k] for k in holders]
                parts = (b"".join(getattr(k, name) for k in own) for name in ("channel", "mask", "signature"))
                widths = (masks.KEY, masks.KEY, SIGNATURE)
                made[id(holders)] = Share(ids, self.quorum, *map(tensor, parts, widths))
        return {client: made[id(holders)] for client, holders in self.near.items()}

    def reachable(self, answers: Answers, complaints: Mapping[int, Collection[int]]) -> list[int]:
        """Those who answered and whose secrets enough others can help to recover: neighbours who are there too and do
        not complain of them."""
        left = set(answers)

        def helpers(dealer: int) -> int:
            return len(left.intersection(self.near[dealer]).difference(complaints.get(dealer, ())))

        while few := {k for k in left if helpers(k) < self.threshold}:
            left -= few
        for client in {*answers} - left if left else ():  # if nobody is left there were too few, and none is to blame
            why, near = Refused("bad set", "too few of its neighbours are there"), len(self.near[client])
            if len(those := complaints.get(client, ())) > near - self.threshold:
                told = f"{len(those)} of {near - 1} neighbours say that they cannot open what it dealt"
                why = Refused("bad share", told)
            self.cohort.reject(client, why)
        return sorted(left)

    def routed_shares(self, shared: Mapping[int, Shared], sharers: list[int]) -> dict[int, Question]:
        """For each client what its neighbours sealed for it, and the marks of that."""
        there = set(sharers)
        sealed = {k: dict(zip((o for o in self.near[k] if o != k), rows(shared[k].sealed), strict=True)) for k in there}
        marks = {k: dict(zip(self.near[k], rows(shared[k].marks), strict=True)) for k in there}

        def routed(client: int) -> Question:
            near = [k for k in self.near[client] if k in there and k != client]
            parts = (b"".join(part[k][client] for k in near) for part in (sealed, marks))
            return Deal(sharers, *map(tensor, parts, (SEALED, 2 * MARK)))

        return {client: routed(client) for client in sharers}

    def complaints(self, dealt: Answers, sharers: list[int]) -> dict[int, set[int]]:
        """By dealer, who says that it cannot open what that one dealt. One of them lies, and nobody knows which: a
        dealer is left out if so many complain that its secrets could not be recovered."""
        found: dict[int, set[int]] = {}
        for holder, answer in dealt.items():
            for dealer in {*answer.complaints}.intersection(self.near[holder], sharers) - {holder}:
                found.setdefault(dealer, set()).add(holder)
        for dealer, holders in sorted(found.items()):
            who = ", ".join(map(str, sorted(holders)))
            self.cohort.tell(f"client {dealer} dealt shares that cannot be opened, or so say clients {who}")
        return found

    def alike(self, masked: Answers) -> dict[int, Any]:
        """The vectors of those who were asked the same as most: masks of others do not cancel against theirs."""
        digests = {k: answer.asked.numpy().tobytes() for k, answer in masked.items()}
        most = Counter(digests.values()).most_common(1)
        for client in (k for k, digest in digests.items() if digest != most[0][0]):
            self.cohort.reject(client, Refused("out of step", "it computed from something else than most clients did"))
        return {k: answer for k, answer in masked.items() if digests[k] == most[0][0]}

    def connected(self, alive: list[int]) -> bool:
        return graph.connected(tuple(self.keys), self.how.degree(len(self.keys)), self.cohort.seed, tuple(alive))

    def last_questions(
        self, senders: list[int], alive: list[int], signatures: Mapping[int, bytes]
    ) -> dict[int, Question]:
        """Who is left and gone; where all are neighbours this is one broadcast."""
        there, gone = set(senders), sorted({*senders} - {*alive})
        signed = tensor(b"".join(signatures.values()), SIGNATURE) if signatures else None
        made: dict[int, Question] = {}
        asked = signatures or alive
        holders = {client: len(there.intersection(self.near[client])) for client in asked}
        for count in holders.values():
            made.setdefault(count, Unmask(alive, gone, count, list(signatures), signed))
        return {client: made[holders[client]] for client in asked}

    def unmask(
        self,
        total: masks.Vector,
        senders: list[int],
        alive: set[int],
        shared: Mapping[int, Shared],
        shares: Mapping[int, Mapping[int, bytes]],
        asked: bytes,
    ) -> None:
        """Take away from the sum of masked vectors each b's mask and those pair masks that nobody's cancel."""
        added, subtracted = list[bytes](), list[bytes]()
        for dealer in senders:
            secret = self._recovered(dealer, shares[dealer], dealer in alive, shared[dealer])
            if dealer in alive:
                subtracted.append(self.context.own_mask(secret, dealer))
            else:
                near = [k for k in self.near[dealer] if k in alive]
                for k, met in zip(near, masks.exchange(secret, (self.keys[k].mask for k in near)), strict=True):
                    (subtracted if k < dealer else added).append(self.context.pair_mask(met, asked, dealer, k))
        masks.mask(total, added, subtracted)

    def shares(
        self,
        senders: list[int],
        alive: list[int],
        shared: Mapping[int, Shared],
        unmasked: Answers,
        complaints: Mapping[int, Collection[int]],
    ) -> dict[int, dict[int, bytes]]:
        """Shares by dealer and holder's point, without those that are not what the dealer dealt."""
        there, left, point = set(senders), set(alive), {k: x for x, k in enumerate(self.keys, 1)}
        marks = {k: dict(zip(self.near[k], rows(shared[k].marks), strict=True)) for k in senders}
        shares: dict[int, dict[int, bytes]] = {k: {} for k in senders}
        for holder, answer in unmasked.items():
            dealers = [k for k in self.near[holder] if k in there]
            for dealer, share in zip(dealers, rows(answer.shares), strict=True):
                if holder in complaints.get(dealer, ()):
                    continue
                mark = marks[dealer][holder][:MARK] if dealer in left else marks[dealer][holder][MARK:]
                if self.context.mark(share, dealer, holder) == mark:
                    shares[dealer][point[holder]] = share
                else:
                    self.cohort.reject(holder, Refused("bad share", f"it is not what client {dealer} dealt to it"))
        return shares

    def _recovered(self, dealer: int, shares: Mapping[int, bytes], alive: bool, shared: Shared) -> bytes:
        """The dealer's b if it is left, its private mask key if it is gone."""
        if len(shares) < self.threshold:
            raise BelowQuorum(
                f"the secure sum stopped at 'unmask' and reveals nothing: of the secret of client {dealer} there are "
                f"{len(shares)} shares, {self.threshold} are needed"
            )
        secret = shamir.recover(dict(sorted(shares.items())[: self.threshold]))
        if secret and alive and self.context.mark(secret, dealer) == shared.mark.numpy().tobytes():
            return secret
        if secret and not alive and masks.public_key(secret) == self.keys[dealer].mask:
            return secret
        self.cohort.reject(dealer, Refused("bad share", "what it dealt are shares of no secret of its own"))
        raise BelowQuorum(f"the secure sum cannot be unmasked: client {dealer} dealt shares of no secret of its own")
