"""What answers cost in privacy. Clients count what they gave away, the server counts what it asked for.

Both count answers by their price, which is the noisy steps that one takes; answers of different prices are composed. A
client refuses an answer that would exceed the budget, whoever asks; the server ends the run before it comes to that.
What is asked again, because the server was killed in a round, is counted again by both.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from fedveil.core.account import AUTO, Price
from fedveil.core.message import Refused
from fedveil.privacy.accountant import ACCOUNTANTS, TIGHTENED, Noised, Skellam, Steps, epsilon, least_noise

ADD_REMOVE = "add/remove"
Journal = Callable[[Sequence[int], Steps], None]
Spending = Mapping[Steps, int]  # answers by price
SPENT = "another round would exceed the privacy budget"  # what is said of a run that ends before its last round


@dataclass(frozen=True)
class Promise:
    """The keys of every kind of differential privacy.

    noise:      σ, the deviation of the noise as a multiple of `clip`; "auto": the least with which a run stays within
                the budget
    clip:       C, the norm to which what one record, or one client, contributes is cut
    delta:      δ
    budget:     the ε beyond which no answer is given any more; None: there is no end
    accountant: "rdp" or "pld"
    """

    key: ClassVar[str]  # under which it stands in a method

    noise: float | Literal["auto"] = 1.0
    clip: float = 1.0
    delta: float = 1e-5
    budget: float | None = None
    accountant: str = "rdp"

    @property
    def sigma(self) -> float:
        """The noise as a number."""
        if self.noise == AUTO:
            raise ValueError(
                f"{self.key}.noise is auto, which is found when a run begins; here it must be a number: fedveil cost "
                "says which"
            )
        return float(self.noise)

    @property
    def relation(self) -> str:
        """For which neighbours ε holds; by default for records of which one is there or not."""
        return ADD_REMOVE

    def __post_init__(self) -> None:
        if self.noise == AUTO and self.budget is None:
            raise ValueError(
                f"{self.key}.noise is auto, which is the least that a budget allows; set {self.key}.budget"
            )
        noise = 1.0 if self.noise == AUTO else self.noise
        if isinstance(noise, str) or not (0 < noise < math.inf and 0 < self.clip < math.inf):
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

    @property
    def unit(self) -> str:
        """What ε protects, and for which neighbours; answers are composed with others of the same."""
        return f"{self.promise.key}, {self.promise.relation}"

    def spent(self, answers: int | Spending) -> float:
        """ε after so many answers at this price, or after answers at any prices."""
        counts = {self.answer: answers} if isinstance(answers, int) else answers
        return _spent(frozenset(counts.items()), self.promise.delta, self.promise.accountant)

    def exceeded(self, answers: int | Spending) -> bool:
        budget = self.promise.budget
        return budget is not None and self.spent(answers) > budget

    @property
    def price(self) -> Price:
        """The price of one answer in plain values."""
        return tuple(written(self.answer))

    def allow(self, before: Mapping[Price, int]) -> None:
        """Raise `Refused` if one more answer would cost more than the budget."""
        after = priced(before) + Counter({self.answer: 1})
        if self.exceeded(after):
            told = f"the answer would bring ε to {self.spent(after):.4g}, the budget is {self.promise.budget:g}"
            raise Refused("over budget", told)

    def least_noise(self, answers: int) -> float:
        """The least noise with which so many answers stay within the budget."""
        budget, now = self.promise.budget, self.promise.sigma
        assert budget is not None

        def cost(noise: float, accountant: str) -> float:
            return _spent(frozenset({self.answer.times(noise / now): answers}.items()), self.promise.delta, accountant)

        return least_noise(cost, budget, self.promise.accountant)

    def validate(self) -> None:
        """Raise a ValueError if already the first answer would exceed the budget."""
        if self.exceeded(1):
            key, budget = self.promise.key, self.promise.budget
            raise ValueError(
                f"{key}.budget is {budget:g}, but one answer already costs {self.spent(1):.4g}; raise it, or set "
                f'{key}.noise to {self.least_noise(1):g}, enough for one answer, or to "auto", enough for all rounds'
            )

    def tally(self, journal: Journal = lambda cohort, price: None) -> Tally:
        """A count of answers at this price."""
        return Tally(self, journal)


@functools.lru_cache(maxsize=4096)
def _spent(answers: frozenset[tuple[Steps, int]], delta: float, accountant: str) -> float:
    return epsilon([replace(price, steps=price.steps * many) for price, many in answers], delta, accountant)


def written(price: Steps) -> list[Any]:
    """A price as plain values: the mechanism's name and its numbers."""
    return [type(price).__name__.lower(), *vars(price).values()]


def read(values: Sequence[Any]) -> Steps:
    """The price that was `written`. Raises ValueError for anything else."""
    for kind in (Noised, Skellam):
        names = list(kind.__dataclass_fields__)
        least = len(names) - (kind is Skellam)  # one that was written before sums were sampled has no rate
        if values and values[0] == kind.__name__.lower() and least < len(values) <= 1 + len(names):
            numbers: dict[str, Any] = dict(zip(names, map(float, values[1:]), strict=False))
            price: Steps = kind(**{**numbers, "steps": int(numbers["steps"])})
            return price
    raise ValueError(f"{values!r} is not the price of a private answer")


def priced(answers: Mapping[Price, int]) -> Counter[Steps]:
    """Answers by their prices, of answers by prices in plain values."""
    found: Counter[Steps] = Counter()
    for price, many in answers.items():
        found[read(price)] += many
    return found


@dataclass
class Tally:
    """The server's own count. Who was asked may have answered, even if nothing of it arrived.

    journal: told of each cohort and its price before it is asked, so that a server that is killed knows it afterwards
    """

    account: Account
    journal: Journal = lambda cohort, price: None
    rounds: Counter[Steps] = field(default_factory=Counter)
    clients: dict[int, Counter[Steps]] = field(default_factory=dict)

    def recall(self, asked: Iterable[tuple[Sequence[int], Steps]]) -> None:
        """Count cohorts that were asked before, each at its price."""
        for cohort, price in asked:
            self.rounds[price] += 1
            for client in cohort:
                self.clients.setdefault(client, Counter())[price] += 1

    def exhausted(self, cohort: Sequence[int]) -> bool:
        """Whether to ask this cohort would bring one of its clients over the budget."""
        one = Counter({self.account.answer: 1})
        if self.account.everyone:
            return self.account.exceeded(self.rounds + one)
        return any(self.account.exceeded(each) for each in self._different(cohort, one))

    def ask(self, cohort: Sequence[int]) -> float:
        """Count a cohort that is about to be asked; the ε of the client that has then lost most."""
        self.journal(cohort, self.account.answer)
        self.recall([(cohort, self.account.answer)])
        if self.account.everyone:
            return self.account.spent(self.rounds)
        return max((self.account.spent(each) for each in self._different(self.clients, Counter())), default=0.0)

    def tightened(self, charged: float) -> float | None:
        """The tighter ε, by privacy loss distributions, of what the Rényi accountant has `charged`. It is shown beside
        that one, and nothing depends on it. None for noise that is not Gaussian, and where privacy is lost anyway."""
        price = next(iter(self.rounds), None)
        if charged > TIGHTENED or len(self.rounds) != 1 or not isinstance(price, Noised):
            return None
        for many in (self.rounds[price], max((spent[price] for spent in self.clients.values()), default=0)):
            if math.isclose(self._by("rdp", price, many), charged, rel_tol=1e-6):  # everybody's rounds, or a client's
                return self._by("pld", price, many)
        return None

    def _by(self, accountant: str, price: Noised, answers: int) -> float:
        return _spent(frozenset({price: answers}.items()), self.account.promise.delta, accountant)

    def _different(self, clients: Iterable[int], more: Counter[Steps]) -> list[Counter[Steps]]:
        """What some clients have spent and `more`, each amount once."""
        amounts = {frozenset((self.clients.get(k, Counter()) + more).items()) for k in clients}
        return [Counter(dict(each)) for each in amounts]
