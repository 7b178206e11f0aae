"""What clients remember between rounds, and what they have spent of their privacy budget."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from fedveil.core import message
from fedveil.core.message import Record
from fedveil.privacy import account
from fedveil.privacy.account import Account
from fedveil.privacy.accountant import Steps


class Charge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Private answers of one run at one price."""

    run: bytes
    unit: str  # what ε protects, and for which neighbours
    price: list[str | int | float]
    answers: Annotated[int, Meta(ge=0, le=10**9)]


@message.kind(63)
class Spent(Record, frozen=True):
    """The private answers that a client has given, in all runs."""

    common = ()

    charges: list[Charge]


class Memory:
    """What clients remember between rounds. Keyed by round and question, so that a question asked again finds what its
    first asking found: the newest entry of an earlier round is kept beside those of the round in progress.

    What a client has spent is an entry of round 0, which is no round's: what is asked again is charged again.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[tuple[int, int, Record]]] = {}

    def before(self, client: int, round_: int, serial: int) -> Record | None:
        past = [record for r, s, record in self.entries.get(client, []) if r > 0 and (r, s) < (round_, serial)]
        return past[-1] if past else None

    def keep(self, client: int, round_: int, serial: int, record: Record) -> None:
        entries = [e for e in self.entries.get(client, []) if e[:2] < (round_, serial)]
        account = [e for e in entries if e[0] == 0]
        earlier = [e for e in entries if 0 < e[0] < round_][-1:]
        self.entries[client] = [*account, *earlier, *(e for e in entries if e[0] == round_), (round_, serial, record)]

    def account(self, client: int) -> Spent:
        """What a client has charged."""
        return next((e[2] for e in self.entries.get(client, []) if isinstance(e[2], Spent)), Spent([]))

    def open_account(self, client: int, account: Spent) -> None:
        """Put an account in the place of the client's own."""
        rest = [e for e in self.entries.get(client, []) if e[0] > 0]
        self.entries[client] = [(0, 0, account), *rest]

    def spent(self, client: int, unit: str | None = None) -> Counter[Steps]:
        """The answers that a client has charged, by price, in all runs; of one kind of promise or of all."""
        found: Counter[Steps] = Counter()
        for charge in self.account(client).charges:
            if unit in (None, charge.unit):
                found[account.read(charge.price)] += charge.answers
        return found

    def charge(self, client: int, run: bytes, price: Account) -> None:
        """Enter one more answer."""
        one = Charge(run, price.unit, account.written(price.answer), 1)
        charges = {(c.run, c.unit, tuple(c.price)): c for c in self.account(client).charges}
        key = (one.run, one.unit, tuple(one.price))
        if before := charges.get(key):
            one = replace(one, answers=before.answers + 1)
        self.open_account(client, Spent(list((charges | {key: one}).values())))
