"""The clients' side of the secure sum: what a client gives away, and above all what it refuses to.

Its secrets are made anew for every round by the operating system and forgotten with it. Each stage is answered once, in
order. Only a client that has not unmasked in this round begins anew when asked to (a server that was killed comes back
and asks again), with other secrets.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from fedveil import message
from fedveil.message import Answer, Question, Refused
from fedveil.privacy import graph, masks, shamir
from fedveil.privacy.masks import KEY
from fedveil.privacy.secagg import (
    NONCE,
    SEALED,
    Advertise,
    Advertised,
    Agree,
    Agreed,
    Context,
    Mask,
    Masked,
    Secrets,
    SecureSum,
    Share,
    Shared,
    Unmask,
    Unmasked,
    digest,
    listed,
    rows,
    tensor,
)
from fedveil.privacy.shamir import SHARE

if TYPE_CHECKING:
    from fedveil.clients import Crowd

NOTE = "secure sum"
OVER = "unmasked"  # a note of its own: a client that restarts loses its secrets and must not unmask twice all the same


@dataclass(frozen=True)
class Summand:
    """Answers to the protocol's questions; `table` has the method's own, asked at the third stage."""

    how: SecureSum
    table: Mapping[type[Question], Callable[[Crowd, Any], Sequence[Answer]]]

    def advertise(self, crowd: Crowd, question: Advertise) -> list[Advertised]:
        context = Context(crowd.run, crowd.round)
        answers, notes = [], []
        for client, note in zip(crowd.clients, crowd.notes, strict=True):
            if OVER in note:
                raise Refused("wrong stage", f"client {client} has unmasked a sum in round {crowd.round}")
            channel_key, mask_key, own = (secrets.token_bytes(KEY) for _ in range(3))
            kept = Secrets("keys", channel_key, mask_key, own)
            channel, mask = masks.public_key(channel_key), masks.public_key(mask_key)
            signature = crowd.identities.sign(client, context.signed_keys(client, channel, mask))
            answers.append(Advertised(tensor(channel), tensor(mask), tensor(signature)))
            notes.append(kept)
        return self._noted(crowd, notes, answers)

    def share(self, crowd: Crowd, question: Share) -> list[Shared]:
        ids, n = question.ids, len(question.ids)
        if not self.how.quorum(n) <= question.quorum <= n:
            raise Refused("bad set", f"{question.quorum} of {n} clients are to be enough; that protects too little")
        if ids != sorted(set(ids)):
            raise Refused("bad set", "the clients are not listed once each, in ascending order")
        context, t = Context.of(crowd.run, crowd.round, ids), self.how.threshold(n, question.quorum)
        near = graph.neighbourhoods(tuple(ids), self.how.degree(n), crowd.seed)
        point = {k: x for x, k in enumerate(ids, 1)}
        session = digest(listed(ids), *(tensor_.numpy().tobytes() for tensor_ in (question.channel, question.mask)))
        answers, notes = [], []
        for client, kept in zip(crowd.clients, self._kept(crowd, "keys"), strict=True):
            if client not in near:
                raise Refused("bad set", f"client {client} advertised keys and is not listed")
            holders = near[client]
            keys = self._keys(crowd, context, client, kept, holders, question)
            points = [point[k] for k in holders]
            shares = [shamir.share(secret, t, points) for secret in (kept.own, kept.mask)]
            both = {k: own + mask for k, own, mask in zip(holders, *shares, strict=True)}
            others = [k for k in holders if k != client]
            met = masks.exchange(kept.mask, (keys[k][1] for k in others))
            opening, sealed = {}, []
            for other, secret in zip(others, masks.exchange(kept.channel, (keys[k][0] for k in others)), strict=True):
                opening[other] = context.seal_key(secret, other, client)
                key, about = context.seal_key(secret, client, other), context.sealed_about(client, other)
                sealed.append(masks.seal(key, secrets.token_bytes(NONCE), both[other], about))
            marks = [
                context.mark(both[k][:SHARE], client, k) + context.mark(both[k][SHARE:], client, k) for k in holders
            ]
            mark = context.mark(kept.own, client)
            answers.append(
                Shared(tensor(b"".join(sealed), SEALED), tensor(b"".join(marks), len(marks[0])), tensor(mark))
            )
            notes.append(
                replace(
                    kept,
                    stage="shares",
                    channel=b"",
                    mask=b"",
                    ids=ids,
                    quorum=question.quorum,
                    session=session,
                    holders=holders,
                    channel_keys=opening,
                    pair_masks={k: context.pair_mask(s, client, k) for k, s in zip(others, met, strict=True)},
                    kept=both[client],
                )
            )
        return self._noted(crowd, notes, answers)

    def _keys(
        self, crowd: Crowd, context: Context, client: int, kept: Secrets, holders: Sequence[int], question: Share
    ) -> dict[int, tuple[bytes, bytes]]:
        """The public keys of each neighbour, signed by it, all different, and the client's own as it sent them."""
        if len(question.channel) != len(holders):
            raise Refused("bad set", f"{len(question.channel)} keys came for {len(holders)} clients")
        channel, mask, signatures = (rows(part) for part in (question.channel, question.mask, question.signatures))
        if len({*channel, *mask}) < 2 * len(holders):
            raise Refused("bad key", "a key is listed twice")
        for other, *signed, signature in zip(holders, channel, mask, signatures, strict=True):
            crowd.identities.verify(other, signature, context.signed_keys(other, *signed))
        keys = dict(zip(holders, zip(channel, mask, strict=True), strict=True))
        if keys[client] != (masks.public_key(kept.channel), masks.public_key(kept.mask)):
            raise Refused("bad key", f"the keys listed for client {client} are not those it made")
        return keys

    def mask(self, crowd: Crowd, question: Mask) -> list[Masked]:
        table = {kind.kind: kind for kind in self.table}
        if question.asked not in table:
            raise Refused("wrong kind", f"answers to questions of kind {question.asked} are not summed")
        all_kept, ids = self._kept(crowd, "shares"), set(question.ids)
        for client, kept in zip(crowd.clients, all_kept, strict=True):
            t = self.how.threshold(len(kept.ids), kept.quorum)
            if len(ids) < len(question.ids) or not ids <= set(kept.ids) or client not in ids:
                raise Refused(
                    "bad set", "who shared is not among who advertised keys, each once, or this client is not"
                )
            if len(ids) < kept.quorum or len(ids.intersection(kept.holders)) < t:
                raise Refused("bad set", f"{len(ids)} clients shared, {kept.quorum} are needed")
        inner = message.unpack(question.question.numpy().data, table[question.asked])
        message.check(inner, {**crowd.task.sizes, **inner.sizes()})
        answers, notes = [], []
        for client, kept, answer in zip(crowd.clients, all_kept, self.table[type(inner)](crowd, inner), strict=True):
            fixed, values = self.how.fixed_point(len(kept.ids), crowd.task.sizes, type(answer)), flat(answer)
            if (len(values) + 2, fixed.wide) != (question.elements, question.wide):
                raise Refused(
                    "wrong shape", f"{question.elements} elements were asked for, there are {len(values) + 2}"
                )
            vector = fixed.encode(values, getattr(answer, "records", 1))
            context = Context.of(crowd.run, crowd.round, kept.ids)
            pairs = {k: key for k, key in kept.pair_masks.items() if k in ids}
            added = [context.own_mask(kept.own, client), *(key for k, key in pairs.items() if k > client)]
            masks.mask(vector, added, [key for k, key in pairs.items() if k < client])
            answers.append(Masked(torch.from_numpy(vector.view(np.dtype(f"i{vector.itemsize}")))))
            notes.append(replace(kept, stage="masked", shared=sorted(ids)))
        return self._noted(crowd, notes, answers)

    def agree(self, crowd: Crowd, question: Agree) -> list[Agreed]:
        answers, notes = [], []
        for client, kept in zip(crowd.clients, self._kept(crowd, "masked"), strict=True):
            self._check_alive(client, kept, question.alive)
            context = Context.of(crowd.run, crowd.round, kept.ids)
            signature = crowd.identities.sign(client, context.signed_set(kept.session, question.alive))
            answers.append(Agreed(tensor(signature)))
            notes.append(replace(kept, stage="agreement", alive=question.alive))
        return self._noted(crowd, notes, answers)

    def unmask(self, crowd: Crowd, question: Unmask) -> list[Unmasked]:
        malicious = self.how.server == "malicious"
        alive, gone = set(question.alive), set(question.gone)
        answers = []
        for client, kept in zip(crowd.clients, self._kept(crowd, "agreement" if malicious else "masked"), strict=True):
            self._check_alive(client, kept, question.alive)
            if alive & gone or len(gone) < len(question.gone):
                raise Refused("bad set", "a client is named as left and as gone, or twice")
            if sorted(alive | gone) != kept.shared:
                raise Refused("bad set", "who is left and who is gone are not those who shared")
            context = Context.of(crowd.run, crowd.round, kept.ids)
            if malicious:
                self._check_agreement(crowd, context, kept, question)
            answers.append(Unmasked(tensor(b"".join(self._reveal(context, client, kept, alive, question)), SHARE)))
        for note in crowd.notes:
            note[OVER] = True
        return self._noted(crowd, [Secrets("unmask") for _ in answers], answers)

    def _check_alive(self, client: int, kept: Secrets, alive: Sequence[int]) -> None:
        if list(alive) != sorted({*alive} & {*kept.shared}) or client not in alive:
            raise Refused("bad set", "who is left is not among who shared, each once, or this client is not")
        if len(alive) < kept.quorum:
            raise Refused("bad set", f"{len(alive)} clients are left, {kept.quorum} are needed")

    def _check_agreement(self, crowd: Crowd, context: Context, kept: Secrets, question: Unmask) -> None:
        """Enough of those who are left have signed the very set that this client signed."""
        if question.alive != kept.alive:
            raise Refused("bad set", "who is left is not what this client signed")
        signers = question.signers
        if question.signatures is None or signers != sorted({*signers} & {*question.alive}):
            raise Refused("bad set", "signatures are missing or not of clients who are left, each once")
        if len(signers) < kept.quorum:
            raise Refused("bad set", f"{len(signers)} clients signed who is left, {kept.quorum} are needed")
        for signer, signature in zip(signers, rows(question.signatures), strict=True):
            crowd.identities.verify(signer, signature, context.signed_set(kept.session, question.alive))

    def _reveal(self, context: Context, client: int, kept: Secrets, alive: set[int], question: Unmask) -> list[bytes]:
        """A share of b of each who is left and of the mask key of each who is gone: never both of one client."""
        dealers = [k for k in kept.holders if k in {*kept.shared}]
        if len(question.sealed) != len(dealers) - 1:
            raise Refused("bad share", f"{len(question.sealed)} sealed shares came for {len(dealers) - 1} neighbours")
        sealed = dict(zip([k for k in dealers if k != client], rows(question.sealed), strict=True))
        shares = []
        for dealer in dealers:
            both: bytes | None = kept.kept
            if dealer != client:
                both = masks.unseal(kept.channel_keys[dealer], sealed[dealer], context.sealed_about(dealer, client))
            if both is None:
                raise Refused("bad share", f"the share of client {dealer} was not sealed by it for client {client}")
            shares.append(both[:SHARE] if dealer in alive else both[SHARE:])
        return shares

    def _kept(self, crowd: Crowd, stage: str) -> list[Secrets]:
        """What each client keeps after `stage`, which must be the last one it answered."""
        kept: list[Secrets] = crowd.recall(NOTE)
        for client, secret in zip(crowd.clients, kept, strict=True):
            if secret.stage != stage:
                raise Refused("wrong stage", f"client {client} is at '{secret.stage}', the question follows '{stage}'")
        return kept

    def _noted(self, crowd: Crowd, notes: Sequence[Secrets], answers: list[Any]) -> list[Any]:
        """Keep notes once the whole crowd has answered: of a crowd that fails, each client is asked again."""
        for note, secret in zip(crowd.notes, notes, strict=True):
            note[NOTE] = secret
        return answers


def fewest(crowd: Crowd) -> list[int]:
    """Of each client in a secure sum: without how many others, itself among them, it unmasks nothing in this round."""
    kept: list[Secrets] = crowd.recall(NOTE)
    return [secret.quorum for secret in kept]


def flat(answer: Answer) -> NDArray[np.float32]:
    """All tensors of an answer as one vector."""
    parts = [getattr(answer, name).reshape(-1) for name in message.fields(type(answer))]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).detach().cpu().float().numpy()
