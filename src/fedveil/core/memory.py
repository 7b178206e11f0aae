"""What clients remember between rounds, and what they have spent of their privacy budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from fedveil.core import message
from fedveil.core.account import Account, Price
from fedveil.core.message import Record, Slots
from fedveil.core.moving import mapped


class Charge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Private answers of one run at one price."""

    run: bytes
    unit: str  # what ε protects, and for which neighbours
    price: list[str | int | float]
    answers: Annotated[int, Meta(ge=0, le=10**9)]


@message.kind
class Spent(Record, frozen=True):
    """The private answers that a client has given, in all runs."""

    common = ()

    charges: list[Charge]


Entry = tuple[int, int, str, Record]  # round, serial of the question, part, what it keeps


class Memory:
    """What clients remember between rounds: a slot for each part of the method that keeps something.

    Slots are keyed by round and question, so that a question asked again finds what its first asking found: the newest
    entry of an earlier round is kept beside those of the round in progress.

    What a client has spent is an entry of round 0, which is no round's: what is asked again is charged again.

    entries: by client; all of them in this process's memory, or on a disk (`runs.store.Store`)
    """

    def __init__(self) -> None:
        self.entries: MutableMapping[int, list[Entry]] = {}

    def before(self, client: int, round_: int, serial: int) -> Slots:
        """What a client remembered when a question was asked for the first time."""
        past = [entry for entry in self.entries.get(client, []) if entry[0] > 0 and entry[:2] < (round_, serial)]
        return Slots({part: record for _, _, part, record in past})

    def keep(self, client: int, round_: int, serial: int, slots: Mapping[str, Record]) -> None:
        """Put records into slots. What later questions of the round left is void: the round is being repeated."""
        entries = [e for e in self.entries.get(client, []) if e[:2] < (round_, serial)]
        newest = {e[2]: e for e in entries if 0 < e[0] < round_}  # the last one of each part
        kept = [e for e in entries if e[0] in (0, round_) or e is newest[e[2]]]
        self.entries[client] = kept + [(round_, serial, part, _own(record)) for part, record in slots.items()]

    def account(self, client: int) -> Spent:
        """What a client has charged."""
        return next((e[3] for e in self.entries.get(client, []) if isinstance(e[3], Spent)), Spent([]))

    def open_account(self, client: int, account: Spent) -> None:
        """Put an account in the place of the client's own."""
        rest = [e for e in self.entries.get(client, []) if e[0] > 0]
        self.entries[client] = [(0, 0, "account", account), *rest]

    def spent(self, client: int, unit: str | None = None) -> Counter[Price]:
        """The answers that a client has charged, by price, in all runs; of one kind of promise or of all."""
        found: Counter[Price] = Counter()
        for charge in self.account(client).charges:
            if unit in (None, charge.unit):
                found[tuple(charge.price)] += charge.answers
        return found

    def charge(self, client: int, run: bytes, price: Account) -> None:
        """Enter one more answer."""
        one = Charge(run, price.unit, list(price.price), 1)
        charges = {(c.run, c.unit, tuple(c.price)): c for c in self.account(client).charges}
        key = (one.run, one.unit, tuple(one.price))
        if before := charges.get(key):
            one = replace(one, answers=before.answers + 1)
        self.open_account(client, Spent(list((charges | {key: one}).values())))


def _own(record: Record) -> Record:
    """The record, with a copy of each tensor that is a part of a larger one: a row would keep its whole stack alive."""
    parts = 0

    def own(tensor: Tensor) -> Tensor:
        nonlocal parts
        if tensor.untyped_storage().nbytes() <= tensor.nbytes:
            return tensor
        parts += 1
        return tensor.clone()

    copy = mapped(record, own)
    return copy if parts else record
