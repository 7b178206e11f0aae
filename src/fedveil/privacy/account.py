"""What answers cost in privacy. Clients count what they gave away, the server counts what it asked for.

Both count answers. A client refuses one that would exceed the budget, whoever asks; the server ends the run before it
comes to that. What is asked again, because the server was killed in a round, is counted again by both.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fedveil.message import Refused
from fedveil.privacy.accountant import ACCOUNTANTS, Steps, epsilon

ADD_REMOVE = "add/remove"
SPENT = "another round would exceed the privacy budget"  # what is said of a run that ends before its last round


@dataclass(frozen=True)
class Promise:
    """The keys of every kind of differential privacy.

    noise:      σ, the deviation of the noise as a multiple of `clip`
    clip:       C, the norm to which what one record, or one client, contributes is cut
    delta:      δ
    budget:     the ε beyond which no answer is given any more; None: there is no end
    accountant: "rdp" or "pld"
    """

    key: ClassVar[str]  # under which it stands in a method

    noise: float = 1.0
    clip: float = 1.0
    delta: float = 1e-5
    budget: float | None = None
    accountant: str = "rdp"

    @property
    def relation(self) -> str:
        """For which neighbours ε holds; by default for records of which one is there or not."""
        return ADD_REMOVE

    def __post_init__(self) -> None:
        if not (0 < self.noise < math.inf and 0 < self.clip < math.inf):
            raise ValueError(
                f"{self.key}.noise and {self.key}.clip are above 0; without noise there is no ε to promise"
            )
        if not 0 < self.delta < 1:
            raise ValueError(f"{self.key}.delta is {self.delta:g}; it is above 0 and below 1 / those it protects")
        if self.budget is not None and self.budget <= 0:
            raise ValueError(f"{self.key}.budget is {self.budget:g}; it is an ε above 0")
        if self.accountant not in ACCOUNTANTS:
            raise ValueError(f"{self.key}.accountant is '{self.accountant}'; use {' or '.join(ACCOUNTANTS)}")


@dataclass(frozen=True)
class Account:
    """The price of an answer.

    answer:    the steps of one answer
    promise:   of which δ, budget, accountant and relation are used
    everyone:  a round is charged to every client, drawn or not, because the answer's sample rate is that of being drawn
    colluders: clients that may tell the server their share of the noise; None where noise is not shared
    """

    answer: Steps
    promise: Promise
    everyone: bool = False
    colluders: int | None = None

    def spent(self, answers: int) -> float:
        """ε after so many answers."""
        return _spent(self, answers)

    def exceeded(self, answers: int) -> bool:
        budget = self.promise.budget
        return budget is not None and self.spent(answers) > budget

    def allow(self, answers: int) -> None:
        """Raise `Refused` if so many answers cost more than the budget."""
        if self.exceeded(answers):
            told = f"the answer would bring ε to {self.spent(answers):.4g}, the budget is {self.promise.budget:g}"
            raise Refused("over budget", told)

    def refuse(self) -> None:
        """Raise a ValueError if already the first answer would exceed the budget."""
        if self.exceeded(1):
            key, budget = self.promise.key, self.promise.budget
            raise ValueError(f"{key}.budget is {budget:g}, but one answer already costs {self.spent(1):.4g}; raise it")


@functools.lru_cache(maxsize=4096)
def _spent(account: Account, answers: int) -> float:
    steps = replace(account.answer, steps=account.answer.steps * answers)
    return epsilon([steps], account.promise.delta, account.promise.accountant)


@dataclass
class Tally:
    """The server's own count. Who was asked may have answered, even if nothing of it arrived.

    journal: told of each cohort before it is asked, so that a server that is killed knows it afterwards
    """

    account: Account
    journal: Callable[[Sequence[int]], None] = lambda cohort: None
    rounds: int = 0
    times: Counter[int] = field(default_factory=Counter)

    def recall(self, cohorts: Iterable[Sequence[int]]) -> None:
        """Count cohorts that were asked before."""
        for cohort in cohorts:
            self.rounds += 1
            self.times.update(cohort)

    def exhausted(self, cohort: Sequence[int]) -> bool:
        """Whether to ask this cohort would bring one of its clients over the budget."""
        most = self.rounds if self.account.everyone else max((self.times[k] for k in cohort), default=-1)
        return self.account.exceeded(most + 1)

    def ask(self, cohort: Sequence[int]) -> float:
        """Count a cohort that is about to be asked; the ε of the client that has then lost most."""
        self.journal(cohort)
        self.recall([cohort])
        return self.account.spent(self.rounds if self.account.everyone else max(self.times.values(), default=0))
