"""What an audit found, as it lies in `audit.json`, and its verdict in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from scipy import stats

from fedveil.attacks.exposure import FOUND, INCONCLUSIVE, NOT_FOUND, Exposure
from fedveil.attacks.mechanism import Mechanism
from fedveil.attacks.membership import SUCCESS
from fedveil.attacks.roc import CONFIDENCE, Figures
from fedveil.attacks.sets import SetExposure
from fedveil.attacks.users import SumAudit

PARTS = ("inversion", "images", "membership", "dp")  # the attacks that can be chosen


class Verdict(msgspec.Struct, frozen=True):
    """What a part of an audit comes to: "found", "not found" or "inconclusive", and a sentence."""

    part: str
    verdict: str
    sentence: str


class Audit(msgspec.Struct, frozen=True):
    """What `fedveil audit` writes to `audit.json`.

    round:     of the checkpoint that was attacked
    records:   members, and as many others; 0 where membership was left out
    others:    "validation" where others were held out of the training records, "test" where they are test records
    shadows:   models that the attack "lira" trained; 0: it was left out
    delta:     the δ of every ε among `attacks`
    epsilon:   what the run has charged by that round, at this δ; None if it promises nothing
    attacks:   on membership by name, each on the run's weights
    control:   the loss attack on weights that learnt some members by heart; it must succeed
    baseline:  the loss attack on the initial weights, which know no member; where it succeeds, members and others
               differ in themselves
    mechanism: of a run with `method.privacy`
    broken:    a sentence for each promise that a lower bound contradicts
    relation:  the neighbours for which `epsilon` holds
    sums:      of a run whose clients noise a secure sum
    messages:  what kept messages expose, by kind
    sets:      what synthetic sets among them give away as data
    left_out:  why parts of the audit were left out, by part
    """

    round: int
    records: int
    delta: float
    epsilon: float | None
    attacks: dict[str, Figures]
    control: Figures | None
    baseline: Figures | None
    mechanism: Mechanism | None
    broken: list[str]
    relation: str | None = None
    sums: SumAudit | None = None
    others: str = "test"
    shadows: int = 0
    messages: list[Exposure] = []
    sets: list[SetExposure] = []
    left_out: dict[str, str] = {}

    @property
    def on_members(self) -> dict[str, Figures]:
        """The attacks on membership with their baseline and their control; empty where they were left out."""
        if self.control is None or self.baseline is None:
            return {}
        return {**self.attacks, "baseline": self.baseline, "control": self.control}

    @property
    def curves(self) -> dict[str, Figures]:
        """The attacks on membership whose ROC curves are drawn."""
        return {name: each for name, each in self.on_members.items() if name != "baseline"}


def verdicts(found: Audit) -> list[Verdict]:
    """The verdict on each part that was attacked. "Not found" is said of an attack whose control works."""
    parts = [*_messages(found), *_sets(found), *_members(found), *_promises(found)]
    order = {FOUND: 0, INCONCLUSIVE: 1, NOT_FOUND: 2}
    return sorted(parts, key=lambda each: order[each.verdict])


def _messages(found: Audit) -> Iterator[Verdict]:
    if not found.messages:
        return
    by_verdict = {each.verdict: each for each in reversed(found.messages)}
    if worst := by_verdict.get(FOUND):
        how = "picked from a list by" if worst.picked and not worst.reached else "rebuilt from"
        told = f"records of clients can be {how} their messages ({worst.kind}): {worst.why}"
        yield Verdict("inversion", FOUND, told)
    elif unsure := by_verdict.get(INCONCLUSIVE):
        yield Verdict("inversion", INCONCLUSIVE, f"nothing is known about records in messages: {unsure.why}")
    else:
        how = "rebuilt from messages" if any(each.reached for each in found.messages) else "picked from a list"
        told = f"no record was {how} by an attack that works elsewhere; a better attack may do it"
        yield Verdict("inversion", NOT_FOUND, told)


def _sets(found: Audit) -> Iterator[Verdict]:
    if not found.sets:
        return
    if any(each.found.found for each in found.sets):
        yield Verdict("images", FOUND, "synthetic sets show which records a client holds: they are nearer to them")
    elif not all(each.control.found for each in found.sets):
        yield Verdict("images", INCONCLUSIVE, "the control failed: not even real records give a client away here")
    else:
        told = "synthetic sets are no nearer to the records of their client than to others"
        yield Verdict("images", NOT_FOUND, told)


def _members(found: Audit) -> Iterator[Verdict]:
    if found.control is None or found.baseline is None:
        return
    name, best = max(found.attacks.items(), key=lambda each: each[1].low)
    reached = f"AUC {best.auc:.2f}, 95% from {best.low:.2f} to {best.high:.2f}, by {name}"
    if found.baseline.low > 0.5 or found.baseline.high < 0.5:
        told = "members and others differ in themselves (see the baseline), so nothing is known about membership"
        yield Verdict("membership", INCONCLUSIVE, told)
    elif above_chance(list(found.attacks.values())):
        yield Verdict("membership", FOUND, f"the weights tell who was trained on ({reached})")
    elif found.control.auc < SUCCESS:
        yield Verdict("membership", INCONCLUSIVE, "the control failed: too few records to tell members from others")
    else:
        yield Verdict("membership", NOT_FOUND, f"the weights do not tell members from others ({reached})")


def above_chance(attacks: Sequence[Figures]) -> bool:
    """Whether one of several attacks is better than guessing, at 95% for all of them together (Bonferroni)."""
    single, all_together = (float(stats.norm.ppf(1 - (1 - CONFIDENCE) / 2 / k)) for k in (1, len(attacks)))
    return any(each.auc - (each.auc - each.low) * all_together / single > 0.5 for each in attacks)


def _promises(found: Audit) -> Iterator[Verdict]:
    if found.broken:
        yield Verdict("dp", FOUND, f"a privacy promise is broken: {found.broken[0]}")
    elif found.mechanism or found.sums:
        weak = [each for each in (found.mechanism, found.sums) if each and each.control <= each.epsilon]
        if weak:
            yield Verdict("dp", INCONCLUSIVE, "the audit of ε is too weak: its control does not contradict ε either")
        else:
            yield Verdict("dp", NOT_FOUND, "ε is not contradicted, by an audit that notices missing noise")
