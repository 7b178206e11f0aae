"""One client in one secure sum: what it computes, and above all what it refuses to.

It works on bytes and NumPy arrays, so that clients without PyTorch share it. A client's secrets pass through its hands
as a value: each stage takes what the stage before left and returns what to keep.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedveil.core.identity import Identities
from fedveil.core.refused import Refused
from fedveil.core.seeds import Seed
from fedveil.privacy.secagg import graph, masks, shamir
from fedveil.privacy.secagg.context import NONCE, Context, Sized, digest, listed
from fedveil.privacy.secagg.masks import KEY, Vector
from fedveil.privacy.secagg.rules import Rules
from fedveil.privacy.secagg.shamir import SHARE


@dataclass(frozen=True)
class Secrets:
    """What a client keeps between the stages, until the round closes. It is no record: whoever has to carry it from one
    process to another seals it with a key that no disk and no other machine ever sees."""

    stage: str
    channel: bytes = b""  # private keys, until what they open is known
    mask: bytes = b""
    own: bytes = b""  # b, which grows the client's own mask
    ids: list[int] = field(default_factory=list)  # U1
    quorum: int = 0
    session: bytes = b""  # digest of U1 and the keys seen
    holders: list[int] = field(default_factory=list)  # the neighbours and the client itself
    channel_keys: dict[int, bytes] = field(default_factory=dict)  # to open what a neighbour sealed
    pairs: dict[int, bytes] = field(default_factory=dict)  # secrets shared with neighbours, of which masks are derived
    held: dict[int, bytes] = field(default_factory=dict)  # shares of neighbours' secrets and of the client's own
    shared: list[int] = field(default_factory=list)  # who shared, and from the masked stage on U2
    asked: bytes = b""  # digest of what the masked vector was computed from
    alive: list[int] = field(default_factory=list)  # U3, once it was signed
    number: int = 0  # sums of the round before this one

    def context(self, run: bytes, round_: int) -> Context:
        return Context.of(run, round_, self.ids, self.quorum, self.number)


@dataclass(frozen=True)
class Keys:
    """Public keys by which clients seal shares and derive masks, with their owners' signatures, a row each."""

    channel: Sequence[bytes]
    mask: Sequence[bytes]
    signatures: Sequence[bytes]


@dataclass(frozen=True)
class Listed:
    """Who advertised keys, as all clients of a question compute it once.

    threshold: how many shares recover a secret
    near:      each client with its neighbours and itself
    point:     where a client's shares are points of a polynomial
    session:   a digest of who is listed with which keys
    """

    ids: list[int]
    quorum: int
    threshold: int
    near: Mapping[int, list[int]]
    point: Mapping[int, int]
    session: bytes


@dataclass(frozen=True)
class Party:
    """The clients of one place in one round. Refusals concern the client named in them, or the question.

    seed: the public seed of the round
    """

    how: Rules
    run: bytes
    round: int
    seed: Seed
    identities: Identities

    def advertise(self, client: int, number: int) -> tuple[Secrets, Keys]:
        """Fresh keys for a sum, signed; each as a single row."""
        channel_key, mask_key, own = (secrets.token_bytes(KEY) for _ in range(3))
        channel, mask = masks.public_key(channel_key), masks.public_key(mask_key)
        context = Context(self.run, self.round, number=number)
        signature = self.identities.sign(client, context.signed_keys(client, channel, mask))
        return Secrets("keys", channel_key, mask_key, own, number=number), Keys([channel], [mask], [signature])

    def listed(self, ids: list[int], quorum: int, channel: bytes, mask: bytes) -> Listed:
        """Check who advertised keys; the keys are those of all of `ids` one after the other, or of a neighbourhood."""
        n = len(ids)
        if not self.how.quorum(n) <= quorum <= n:
            raise Refused("bad set", f"{quorum} of {n} clients are to be enough; that protects too little")
        if ids != sorted(set(ids)):
            raise Refused("bad set", "the clients are not listed once each, in ascending order")
        near = graph.neighbourhoods(tuple(ids), self.how.degree(n), self.seed)
        point = {k: x for x, k in enumerate(ids, 1)}
        session = digest(listed(ids), channel, mask)
        return Listed(ids, quorum, self.how.threshold(n, quorum), near, point, session)

    def share(
        self, client: int, kept: Secrets, all_: Listed, keys: Keys
    ) -> tuple[Secrets, list[bytes], list[bytes], bytes]:
        """What to keep, the sealed shares for each neighbour, a mark of each share, and one of b."""
        if client not in all_.near:
            raise Refused("bad set", f"client {client} advertised keys and is not listed")
        holders, context = all_.near[client], Context.of(self.run, self.round, all_.ids, all_.quorum, kept.number)
        known = self._checked(context, client, kept, holders, keys)
        points = [all_.point[k] for k in holders]
        shares = [shamir.share(secret, all_.threshold, points) for secret in (kept.own, kept.mask)]
        both = {k: own + mask for k, own, mask in zip(holders, *shares, strict=True)}
        others = [k for k in holders if k != client]
        met = masks.exchange(kept.mask, (known[k][1] for k in others))
        opening, sealed = {}, []
        for other, secret in zip(others, masks.exchange(kept.channel, (known[k][0] for k in others)), strict=True):
            opening[other] = context.seal_key(secret, other, client)
            key, about = context.seal_key(secret, client, other), context.sealed_about(client, other)
            sealed.append(masks.seal(key, secrets.token_bytes(NONCE), both[other], about))
        after = replace(
            kept,
            stage="shares",
            channel=b"",
            mask=b"",
            ids=all_.ids,
            quorum=all_.quorum,
            session=all_.session,
            holders=holders,
            channel_keys=opening,
            pairs=dict(zip(others, met, strict=True)),
            held={client: both[client]},
        )
        return after, sealed, [context.marks(both[k], client, k) for k in holders], context.mark(kept.own, client)

    def _checked(
        self, context: Context, client: int, kept: Secrets, holders: Sequence[int], keys: Keys
    ) -> dict[int, tuple[bytes, bytes]]:
        """The public keys of each neighbour, signed by it, all different, and the client's own as it sent them."""
        if len(keys.channel) != len(holders):
            raise Refused("bad set", f"{len(keys.channel)} keys came for {len(holders)} clients")
        if len({*keys.channel, *keys.mask}) < 2 * len(holders):
            raise Refused("bad key", "a key is listed twice")
        for other, *signed, signature in zip(holders, keys.channel, keys.mask, keys.signatures, strict=True):
            self.identities.verify(other, signature, context.signed_keys(other, *signed))
        found = dict(zip(holders, zip(keys.channel, keys.mask, strict=True), strict=True))
        if found[client] != (masks.public_key(kept.channel), masks.public_key(kept.mask)):
            raise Refused("bad key", f"the keys listed for client {client} are not those it made")
        return found

    def deal(
        self, client: int, kept: Secrets, ids: list[int], all_sealed: Sequence[bytes], all_marks: Sequence[bytes]
    ) -> tuple[Secrets, list[int]]:
        """What to keep, and whose shares cannot be opened, or are not what their dealer says it dealt."""
        if ids != sorted({*ids} & {*kept.ids}) or client not in ids:
            raise Refused("bad set", "who shared is not among who advertised keys, each once, or this client is not")
        dealers = [k for k in kept.holders if k in {*ids} and k != client]
        if len(all_sealed) != len(dealers):
            raise Refused("bad share", f"{len(all_sealed)} sealed shares came from {len(dealers)} neighbours")
        context, held = kept.context(self.run, self.round), dict(kept.held)
        for dealer, sealed, marks in zip(dealers, all_sealed, all_marks, strict=True):
            both = masks.unseal(kept.channel_keys[dealer], sealed, context.sealed_about(dealer, client))
            if both and context.marks(both, dealer, client) == marks:
                held[dealer] = both
        after = replace(kept, stage="dealt", channel_keys={}, held=held, shared=ids)
        return after, [k for k in dealers if k not in held]

    def check_dealt(self, client: int, kept: Secrets, ids: list[int]) -> None:
        """Check who dealt, before anything is masked."""
        there = set(ids)
        t = self.how.threshold(len(kept.ids), kept.quorum)
        if ids != sorted(there & {*kept.shared}) or client not in there:
            raise Refused("bad set", "who dealt is not among who shared, each once, or this client is not")
        if len(there) < kept.quorum or len(there.intersection(kept.holders)) < t:
            raise Refused("bad set", f"{len(there)} clients shared, {kept.quorum} are needed")

    def mask(self, client: int, kept: Secrets, basis: bytes, question: Sized, vector: Vector) -> Secrets:
        """Mask a vector in place; what to keep, in which `asked` is the digest that the masks are made of."""
        context, there = kept.context(self.run, self.round), set(question.ids)
        asked = context.asked(basis, question)
        pairs = {k: context.pair_mask(s, asked, client, k) for k, s in kept.pairs.items() if k in there}
        added = [context.own_mask(kept.own, client), *(key for k, key in pairs.items() if k > client)]
        masks.mask(vector, added, [key for k, key in pairs.items() if k < client])
        return replace(kept, stage="masked", shared=list(question.ids), asked=asked)

    def agree(self, client: int, kept: Secrets, alive: list[int]) -> tuple[Secrets, bytes]:
        """What to keep, and a signature of who is left."""
        self._check_alive(client, kept, alive)
        signed = kept.context(self.run, self.round).signed_set(kept.session, kept.asked, alive)
        return replace(kept, stage="agreement", alive=alive), self.identities.sign(client, signed)

    def unmask(
        self,
        client: int,
        kept: Secrets,
        alive: list[int],
        gone: list[int],
        holders: int,
        signers: list[int],
        signatures: Sequence[bytes] | None,
    ) -> list[bytes]:
        """A share of b of each who is left and of the mask key of each who is gone: never both of one client."""
        self._check_alive(client, kept, alive)
        left, lost = set(alive), set(gone)
        if left & lost or len(lost) < len(gone):
            raise Refused("bad set", "a client is named as left and as gone, or twice")
        if sorted(left | lost) != kept.shared:
            raise Refused("bad set", "who is left and who is gone are not those who shared")
        if self.how.server == "malicious":
            self._check_agreement(kept, alive, signers, signatures)
        dealers = [k for k in kept.holders if k in {*kept.shared}]
        both = {k: kept.held.get(k, bytes(2 * SHARE)) for k in dealers}  # of whom it complained it has nothing
        shares = [both[k][:SHARE] if k in left else both[k][SHARE:] for k in dealers]
        if len(shares) != holders:
            raise Refused("bad set", f"{holders} shares are asked for, of {len(shares)} neighbours")
        return shares

    def _check_alive(self, client: int, kept: Secrets, alive: list[int]) -> None:
        if alive != sorted({*alive} & {*kept.shared}) or client not in alive:
            raise Refused("bad set", "who is left is not among who shared, each once, or this client is not")
        if len(alive) < kept.quorum:
            raise Refused("bad set", f"{len(alive)} clients are left, {kept.quorum} are needed")
        if not graph.connected(tuple(kept.ids), self.how.degree(len(kept.ids)), self.seed, tuple(alive)):
            raise Refused("bad set", "the masks of those who are left fall into parts, of which each has its own sum")

    def _check_agreement(
        self, kept: Secrets, alive: list[int], signers: list[int], signatures: Sequence[bytes] | None
    ) -> None:
        """Enough of those who are left have signed the very set that this client signed, and were asked the same."""
        if alive != kept.alive:
            raise Refused("bad set", "who is left is not what this client signed")
        if signatures is None or signers != sorted({*signers} & {*alive}):
            raise Refused("bad set", "signatures are missing or not of clients who are left, each once")
        if len(signers) < kept.quorum:
            raise Refused("bad set", f"{len(signers)} clients signed who is left, {kept.quorum} are needed")
        signed = kept.context(self.run, self.round).signed_set(kept.session, kept.asked, alive)
        for signer, signature in zip(signers, signatures, strict=True):
            self.identities.verify(signer, signature, signed)
