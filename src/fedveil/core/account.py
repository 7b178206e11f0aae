"""What `core` needs of differential privacy: a promise, the account of an answer's price, and the server's tally.

`fedveil.privacy.account` implements them. Here a price is plain values, as it is written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

AUTO: Literal["auto"] = "auto"  # noise that is found when a run begins
Price = tuple[Any, ...]  # the mechanism's name and its numbers


class Promise(Protocol):
    """The differential privacy that a method promises."""

    @property
    def key(self) -> str:
        """The method's key under which it stands."""

    @property
    def noise(self) -> float | Literal["auto"]:
        """σ, as a multiple of the clipping norm; "auto": not found yet."""

    @property
    def sigma(self) -> float:
        """The noise as a number."""

    @property
    def delta(self) -> float: ...

    @property
    def budget(self) -> float | None:
        """The ε beyond which no answer is given any more; None: there is no end."""

    @property
    def relation(self) -> str:
        """For which neighbours ε holds."""


class Account(Protocol):
    """The price of an answer."""

    @property
    def promise(self) -> Promise: ...

    @property
    def everyone(self) -> bool:
        """Whether a round is charged to every client, drawn or not."""

    @property
    def colluders(self) -> int | None:
        """Clients that may tell the server their share of the noise; None where noise is not shared."""

    @property
    def unit(self) -> str:
        """What ε protects, and for which neighbours."""

    @property
    def price(self) -> Price:
        """The price of one answer in plain values."""

    def allow(self, before: Mapping[Price, int]) -> None:
        """Raise `Refused` if one more answer would cost more than the budget."""

    def least_noise(self, answers: int) -> float:
        """The least noise with which so many answers stay within the budget."""

    def validate(self) -> None:
        """Raise a ValueError if already the first answer would exceed the budget."""

    def tally(self, journal: Callable[[Sequence[int], Any], None] = ...) -> Tally:
        """A count of answers at this price; `journal` is told of each cohort before it is asked."""


class Tally(Protocol):
    """The server's own count of what it asked for."""

    @property
    def account(self) -> Account: ...

    def recall(self, asked: Iterable[tuple[Sequence[int], Any]]) -> None:
        """Count cohorts that were asked before, each at its price."""

    def exhausted(self, cohort: Sequence[int]) -> bool:
        """Whether to ask this cohort would bring one of its clients over the budget."""

    def ask(self, cohort: Sequence[int]) -> float:
        """Count a cohort that is about to be asked; the ε of the client that has then lost most."""

    def tightened(self, charged: float) -> float | None:
        """A tighter ε of what was charged, to be shown beside it; None where there is none."""
