"""How well scores tell members from others, with confidence, and which ε that rules out.

A score is higher for what looks like a member. Every limit here holds with `CONFIDENCE`; what has a threshold to choose
chooses it on one half of the scores and measures on the other, so callers give them in an order that says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.special import ndtri

CONFIDENCE = 0.95
RATES = (0.001, 0.01)  # false-positive rates at which true-positive rates are told
POINTS = 200  # of a curve that is kept
MOST = 60.0  # an ε that no audit reaches

Scores = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Rate(msgspec.Struct, frozen=True):
    """A true-positive rate at a false-positive rate, with Clopper and Pearson's interval.

    resolved: whether there are as many others as one false positive at that rate takes; if not, none is allowed
    """

    fpr: float
    tpr: float
    low: float
    high: float
    resolved: bool


class Figures(msgspec.Struct, frozen=True):
    """What an attack reaches: of `audit.json`, one attack.

    auc, low, high: area under the ROC curve with DeLong's interval; 0.5 is guessing
    rates:          true positives at few false positives
    balanced:       accuracy on as many members as others
    epsilon:        the ε that the true and false positives rule out; 0 rules out none
    fpr, tpr:       the curve
    """

    auc: float
    low: float
    high: float
    rates: list[Rate]
    balanced: float
    epsilon: float
    fpr: list[float]
    tpr: list[float]


@dataclass(frozen=True, eq=False)
class Roc:
    """Scores of members [m] and of others [n]."""

    members: Scores
    others: Scores

    def figures(self, delta: float) -> Figures:
        """All of it; `delta` is the δ of the ε."""
        low, high = self.interval()
        rates = [self.rate(fpr) for fpr in RATES]
        fpr, tpr = self.curve()
        kept = np.unique(np.linspace(0, len(fpr) - 1, POINTS).round().astype(int))
        first = np.unique(np.geomspace(1, len(fpr), POINTS).round().astype(int)) - 1  # where the axes are logarithms
        kept = np.union1d(kept, first)
        curve = fpr[kept].tolist(), tpr[kept].tolist()
        return Figures(self.auc, low, high, rates, self.balanced(), self.epsilon(delta), *curve)

    @cached_property
    def bars(self) -> Scores:
        """Every threshold there is, from the highest."""
        return np.unique(np.concatenate([self.members, self.others]))[::-1]

    def positives(self, bars: Scores) -> tuple[Counts, Counts]:
        """How many members and how many others score at least each of `bars`."""
        hits, false = (len(s) - np.searchsorted(np.sort(s), bars, "left") for s in (self.members, self.others))
        return hits, false

    def curve(self) -> tuple[Scores, Scores]:
        """False- and true-positive rates at every threshold, from none to all."""
        hits, false = self.positives(self.bars)
        return np.append(0.0, false / len(self.others)), np.append(0.0, hits / len(self.members))

    @property
    def auc(self) -> float:
        """P(a member scores above another) + ½ P(they tie)."""
        return float(self._placed()[0].mean())

    def _placed(self) -> tuple[Scores, Scores]:
        """For each member the share of others below it [m], for each other the share of members above it [n]."""

        def below(scores: Scores, of: Scores) -> Scores:
            ordered = np.sort(of)
            both = np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")
            return both / (2 * len(of))

        return below(self.members, self.others), 1 - below(self.others, self.members)

    def interval(self) -> tuple[float, float]:
        """Of the AUC (DeLong, DeLong and Clarke-Pearson 1988); of no width where the scores are apart."""
        members, others = self._placed()
        spread = math.sqrt(members.var(ddof=1) / len(members) + others.var(ddof=1) / len(others))
        away = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * spread
        return max(0.0, self.auc - away), min(1.0, self.auc + away)

    def rate(self, fpr: float) -> Rate:
        """True positives where at most `fpr` of the others are taken for members."""
        allowed = math.floor(fpr * len(self.others))
        hits, count = int((self.members > np.sort(self.others)[::-1][allowed]).sum()), len(self.members)
        low, high = clopper_pearson(np.array(hits), count)
        return Rate(fpr, hits / count, float(low), float(high), allowed >= 1)

    def halves(self) -> tuple[Roc, Roc]:
        """One to choose a threshold on, one to measure on."""
        return Roc(self.members[::2], self.others[::2]), Roc(self.members[1::2], self.others[1::2])

    def balanced(self) -> float:
        """Mean of true-positive and true-negative rate."""
        choice, test = self.halves()
        hits, false = choice.positives(choice.bars)
        best = np.argmax(hits / len(choice.members) - false / len(choice.others))
        (hits,), (false,) = test.positives(choice.bars[best : best + 1])
        return float(hits / len(test.members) + 1 - false / len(test.others)) / 2

    def epsilon(self, delta: float) -> float:
        """ε ≥ ln((TPR - δ) / FPR), which differential privacy keeps, at the lower limit of one rate and the upper limit
        of the other. Members and others are taken for independent draws."""
        choice, test = self.halves()
        best = np.argmax(choice._ruled_out(choice.bars, delta))
        return max(0.0, float(test._ruled_out(choice.bars[best : best + 1], delta)[0]))

    def gaussian(self) -> float:
        """The μ of Gaussian differential privacy that is ruled out: μ ≥ Φ⁻¹(TPR) - Φ⁻¹(FPR), at limits as for `epsilon`
        (Nasr et al. 2023, "Tight auditing of differentially private machine learning", section 4). The threshold is
        half-way between the medians: of Gaussian scores each is as good, and there the limits are closest."""
        choice, test = self.halves()
        bar = (np.median(choice.members) + np.median(choice.others)) / 2
        (hits,), (false,) = test.positives(np.array([bar]))
        low, high = clopper_pearson(hits, len(test.members))[0], clopper_pearson(false, len(test.others))[1]
        return max(0.0, float(ndtri(low) - ndtri(high)))

    def _ruled_out(self, bars: Scores, delta: float) -> Scores:
        hits, false = self.positives(bars)
        above = np.maximum(clopper_pearson(hits, len(self.members))[0] - delta, 1e-300)
        ruled_out: Scores = np.log(above / clopper_pearson(false, len(self.others))[1])
        return ruled_out


def clopper_pearson(hits: Counts, count: int | Counts) -> tuple[Scores, Scores]:
    """Limits of a probability of which `hits` of `count` independent trials came out."""
    tail = (1 - CONFIDENCE) / 2
    low = np.where(hits == 0, 0.0, stats.beta.ppf(tail, np.maximum(hits, 1), count - hits + 1))
    return low, np.where(hits == count, 1.0, stats.beta.ppf(1 - tail, hits + 1, np.maximum(count - hits, 1)))


# ---------------------------------------------------------------------------------------------------- one run


def one_run(canaries: int, guesses: int, right: int, delta: float) -> float:
    """The ε that so many right guesses rule out, about which canaries a mechanism was given, each by a fair coin
    (Steinke, Nasr and Jagielski 2023, section 5). Nothing but the coins needs to be independent."""
    low, high = 0.0, MOST
    if not right or chance(low, canaries, guesses, right, delta) > 1 - CONFIDENCE:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        ruled_out = chance(middle, canaries, guesses, right, delta) <= 1 - CONFIDENCE
        low, high = (middle, high) if ruled_out else (low, middle)
    return low


def chance(epsilon: float, canaries: int, guesses: int, right: int, delta: float) -> float:
    """The probability, at most, of so many right guesses about a mechanism that is (ε, δ)-differentially private."""
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(right - 1, guesses, q))
    below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, q))  # P(right > B ≥ right - i), [right]
    return min(1.0, tail + 2 * canaries * delta * float((below / np.arange(1, right + 1)).max()))
