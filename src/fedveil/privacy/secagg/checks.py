"""What a client checks of what the server says, before it goes on with a secure sum."""

from __future__ import annotations

from collections.abc import Sequence

from fedveil.core.message import Refused
from fedveil.core.stack import ClientStack
from fedveil.privacy.secagg import masks
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.kept import Secrets
from fedveil.privacy.secagg.records import Share, Unmask, rows


def checked_keys(
    stack: ClientStack, context: Context, client: int, kept: Secrets, holders: Sequence[int], question: Share
) -> dict[int, tuple[bytes, bytes]]:
    """The public keys of each neighbour, signed by it, all different, and the client's own as it sent them."""
    if len(question.channel) != len(holders):
        raise Refused("bad set", f"{len(question.channel)} keys came for {len(holders)} clients")
    channel, mask, signatures = (rows(part) for part in (question.channel, question.mask, question.signatures))
    if len({*channel, *mask}) < 2 * len(holders):
        raise Refused("bad key", "a key is listed twice")
    for other, *signed, signature in zip(holders, channel, mask, signatures, strict=True):
        stack.identities.verify(other, signature, context.signed_keys(other, *signed))
    keys = dict(zip(holders, zip(channel, mask, strict=True), strict=True))
    if keys[client] != (masks.public_key(kept.channel), masks.public_key(kept.mask)):
        raise Refused("bad key", f"the keys listed for client {client} are not those it made")
    return keys


def check_agreement(stack: ClientStack, kept: Secrets, question: Unmask) -> None:
    """Enough of those who are left have signed the very set that this client signed, and were asked the same."""
    if question.alive != kept.alive:
        raise Refused("bad set", "who is left is not what this client signed")
    signers = question.signers
    if question.signatures is None or signers != sorted({*signers} & {*question.alive}):
        raise Refused("bad set", "signatures are missing or not of clients who are left, each once")
    if len(signers) < kept.quorum:
        raise Refused("bad set", f"{len(signers)} clients signed who is left, {kept.quorum} are needed")
    signed = kept.context(stack.run, stack.round).signed_set(kept.session, kept.asked, question.alive)
    for signer, signature in zip(signers, rows(question.signatures), strict=True):
        stack.identities.verify(signer, signature, signed)


def check_memory(stack: ClientStack) -> None:
    """What a client remembers must say what of it is the server's, or that would not be bound into the masks."""
    for record in (record for memory in stack.memory for record in memory.values()):
        if record.common is None:
            raise TypeError(
                f"{type(record).__name__}, which clients remember, does not say which of its fields hold what the "
                "server supplied; for secure sums set `common` to their names, or to () if there are none"
            )
