"""The server's side of the secure sum: four stages on top of `Cohort.exchange`, five against a malicious server."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fedveil import message
from fedveil.message import Question, Refused
from fedveil.privacy import graph, masks, shamir
from fedveil.privacy.masks import FixedPoint
from fedveil.privacy.secagg import (
    MARK,
    SEALED,
    SIGNATURE,
    Advertise,
    Advertised,
    Agree,
    Context,
    Mask,
    SecureSum,
    Share,
    Shared,
    Sum,
    Unmask,
    rows,
    shapes,
    tensor,
)

if TYPE_CHECKING:
    from fedveil.federation import Answers, Cohort
    from fedveil.privacy.identity import Identities


def ask_sum(cohort: Cohort, identities: Identities, run: bytes, question: Question, how: SecureSum) -> Sum:
    """Ask a cohort for the sum of its answers. Raises `BelowQuorum` where too few are left, and then learns nothing."""
    from fedveil.federation import BelowQuorum

    method, task = cohort.method, cohort.task
    kind, quorum = method.reply(question), how.quorum(len(cohort))
    how.refuse(task, kind)

    def enough(left: Collection[int], stage: str) -> None:
        if len(left) < quorum:
            raise BelowQuorum(
                f"the secure sum stopped at '{stage}' and nothing of anybody was revealed: {len(left)} of "
                f"{len(cohort)} clients are left, {quorum} are needed"
            )

    enough(cohort.ids, "keys")
    keys = _honest(cohort, identities, Context(run, cohort.round), cohort.exchange(Advertise(), "keys"))
    enough(keys, "keys")
    scene = _Scene(Context.of(run, cohort.round, tuple(keys)), keys, how, quorum, cohort)

    shared = cohort.exchange(scene.routed_keys(), "shares")
    senders = scene.connected(shared)
    enough(senders, "shares")
    fixed = how.fixed_point(len(keys), task.sizes, kind)
    sizes = {**method.schema(task, question, senders[0]), **question.sizes()}
    bound = shapes(kind, sizes)
    elements = sum(math.prod(shape) for shape in bound.values()) + 2
    asked = Mask(senders, elements, fixed.wide, question.kind, tensor(message.pack(question)))
    masked = cohort.exchange(dict.fromkeys(senders, asked), "masked")
    enough(masked, "masked")
    cohort.require(len(masked), len(cohort))

    alive, signatures = list(masked), {}
    if how.server == "malicious":
        signed = cohort.exchange(dict.fromkeys(alive, Agree(alive)), "agreement")
        enough(signed, "agreement")
        signatures = {k: signed[k].signature.numpy().tobytes() for k in signed}
    unmasked = cohort.exchange(scene.routed_shares(shared, senders, alive, signatures), "unmask")
    total = _total(masked, fixed)
    scene.unmask(total, senders, set(alive), shared, unmasked)
    cohort.counted(alive)

    values, weight, clipped = fixed.decode(total, len(alive))
    if not len(alive) <= weight <= len(alive) * fixed.heaviest:
        raise BelowQuorum(
            f"the secure sum cannot be used: its weight is {weight}, and that of {len(alive)} clients is from "
            f"{len(alive)} to {len(alive) * fixed.heaviest}, so somebody masked a wrong vector"
        )
    parts = torch.from_numpy(values).split([math.prod(shape) for shape in bound.values()])
    totals = {name: part.view(shape) for (name, shape), part in zip(bound.items(), parts, strict=True)}
    error = fixed.error(len(alive), weight)
    cohort.note(clipped=clipped, quantisation=error)
    return Sum(tuple(alive), weight, totals, fixed.heaviest, clipped, error)


def _honest(cohort: Cohort, identities: Identities, context: Context, answers: Answers) -> dict[int, _Keys]:
    """Keys that no client will refuse: a single bad one would otherwise make all of them refuse the round."""
    keys, owner = dict[int, _Keys](), dict[bytes, int]()
    for client, answer in answers.items():
        own = _Keys.read(answer)
        try:
            identities.verify(client, own.signature, context.signed_keys(client, own.channel, own.mask))
            masks.exchange(bytes(range(32)), (own.channel, own.mask))  # says if one is of low order
            for key in (own.channel, own.mask):
                if key in owner:
                    raise Refused("bad key", f"client {owner[key]} has the same key")
                owner[key] = client
            keys[client] = own
        except Refused as error:
            cohort.refuse(client, error)
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

    def connected(self, shared: Answers) -> list[int]:
        """Those who shared and of whose neighbours enough did, so that what they mask can be unmasked."""
        left = set(shared)
        while few := {k for k in left if len(left.intersection(self.near[k])) < self.threshold}:
            left -= few
        for client in {*shared} - left:
            self.cohort.refuse(client, Refused("bad set", "too few of its neighbours shared"))
        return sorted(left)

    def routed_shares(
        self, shared: Mapping[int, Shared], senders: list[int], alive: list[int], signatures: Mapping[int, bytes]
    ) -> dict[int, Question]:
        """Who is left and gone, and for each client what its neighbours sealed for it."""
        there, gone = set(senders), sorted({*senders} - {*alive})
        sealed = {k: rows(shared[k].sealed) for k in senders}
        place = {k: {other: i for i, other in enumerate(o for o in self.near[k] if o != k)} for k in senders}
        signed = tensor(b"".join(signatures.values()), SIGNATURE) if signatures else None
        return {
            client: Unmask(
                alive,
                gone,
                tensor(
                    b"".join(sealed[k][place[k][client]] for k in self.near[client] if k in there and k != client),
                    SEALED,
                ),
                list(signatures),
                signed,
            )
            for client in signatures or alive
        }

    def unmask(
        self, total: masks.Vector, senders: list[int], alive: set[int], shared: Mapping[int, Shared], unmasked: Answers
    ) -> None:
        """Take away from the sum of masked vectors each b's mask and those pair masks that nobody's cancel."""
        shares = self._shares(senders, alive, shared, unmasked)
        added, subtracted = list[bytes](), list[bytes]()
        for dealer in senders:
            secret = self._recovered(dealer, shares[dealer], dealer in alive, shared[dealer])
            if dealer in alive:
                subtracted.append(self.context.own_mask(secret, dealer))
            else:
                near = [k for k in self.near[dealer] if k in alive]
                for k, met in zip(near, masks.exchange(secret, (self.keys[k].mask for k in near)), strict=True):
                    (subtracted if k < dealer else added).append(self.context.pair_mask(met, dealer, k))
        masks.mask(total, added, subtracted)

    def _shares(
        self, senders: list[int], alive: set[int], shared: Mapping[int, Shared], unmasked: Answers
    ) -> dict[int, dict[int, bytes]]:
        """Shares by dealer and holder's point, without those that are not what the dealer dealt."""
        there, point = set(senders), {k: x for x, k in enumerate(self.keys, 1)}
        marks = {k: dict(zip(self.near[k], rows(shared[k].marks), strict=True)) for k in senders}
        shares: dict[int, dict[int, bytes]] = {k: {} for k in senders}
        for holder, answer in unmasked.items():
            dealers = [k for k in self.near[holder] if k in there]
            for dealer, share in zip(dealers, rows(answer.shares), strict=True):
                mark = marks[dealer][holder][:MARK] if dealer in alive else marks[dealer][holder][MARK:]
                if self.context.mark(share, dealer, holder) == mark:
                    shares[dealer][point[holder]] = share
                else:
                    self.cohort.refuse(holder, Refused("bad share", f"it is not what client {dealer} says it dealt"))
        return shares

    def _recovered(self, dealer: int, shares: Mapping[int, bytes], alive: bool, shared: Shared) -> bytes:
        """The dealer's b if it is left, its private mask key if it is gone."""
        from fedveil.federation import BelowQuorum

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
        raise BelowQuorum(f"the secure sum cannot be unmasked: client {dealer} dealt shares of no secret of its own")
