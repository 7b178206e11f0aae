"""What scores say, and how sure that is: against brute force, closed forms and mechanisms whose ε is known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from fedveil.attacks.roc import CONFIDENCE, Roc, chance, clopper_pearson, one_run

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=12)


def apart(distance: float, count: int, seed: int = 0) -> Roc:
    rng = np.random.default_rng(seed)
    return Roc(rng.normal(distance, 1, count), rng.normal(0, 1, count))


@given(SCORES, SCORES)
def test_the_area_is_that_of_all_pairs_ties_counted_half(members, others):
    m, n = np.array(members), np.array(others)
    pairs = (m[:, None] > n).mean() + (m[:, None] == n).mean() / 2
    roc = Roc(m, n)
    assert roc.auc == pytest.approx(pairs)
    assert roc.auc == pytest.approx(roc_auc_score([1] * len(m) + [0] * len(n), [*members, *others]))
    fpr, tpr = roc.curve()
    assert np.trapezoid(tpr, fpr) == pytest.approx(roc.auc)
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)


def test_the_interval_of_the_area_holds_as_often_as_it_says():
    truth = stats.norm.cdf(1 / math.sqrt(2))
    inside = [low <= truth <= high for low, high in (apart(1, 80, seed).interval() for seed in range(400))]
    assert 0.92 <= np.mean(inside) <= 0.98


def test_true_positives_at_few_false_ones():
    roc = Roc(np.array([5.0, 4, 3, 2, 1]), np.arange(1000) / 1000 * 4)  # one of the others is above 3.995
    found = roc.rate(0.001)
    assert (found.tpr, found.resolved) == (2 / 5, True)
    assert (found.low, found.high) == pytest.approx(tuple(map(float, clopper_pearson(np.array(2), 5))))
    assert roc.rate(0.6).tpr == 4 / 5
    few = Roc(roc.members, roc.others[-999:]).rate(0.001)  # none is allowed
    assert not few.resolved
    assert Roc(np.ones(5), np.ones(2000)).rate(0.01).tpr == 0  # a tie with too many others is no positive


@pytest.mark.parametrize(("hits", "count"), [(0, 30), (1, 30), (17, 30), (30, 30)])
def test_limits_are_where_the_binomial_tail_is_half_of_what_is_left(hits, count):
    low, high = map(float, clopper_pearson(np.array(hits), count))
    tail = (1 - CONFIDENCE) / 2
    assert stats.binom.sf(hits - 1, count, low) == pytest.approx(tail if hits else 1)
    assert stats.binom.cdf(hits, count, high) == pytest.approx(tail if hits < count else 1)


def test_accuracy_is_balanced_and_measured_where_no_threshold_was_chosen():
    assert apart(0, 4000).balanced() == pytest.approx(0.5, abs=0.03)
    assert apart(2, 4000).balanced() == pytest.approx(stats.norm.cdf(1), abs=0.02)
    uneven = Roc(np.ones(10), np.zeros(1000))
    assert uneven.balanced() == 1
    rng = np.random.default_rng(1)  # the best threshold of 20 scores, on these scores, would be right 70 times of 100
    mean = np.mean([Roc(rng.normal(size=10), rng.normal(size=10)).balanced() for _ in range(300)])
    assert mean == pytest.approx(0.5, abs=0.03)


def responses(epsilon: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Coins, and what ε-differentially private randomised response says of them."""
    rng = np.random.default_rng(seed)
    coins = rng.random(count) < 0.5
    return coins, coins ^ (rng.random(count) > 1 / (1 + math.exp(-epsilon)))


def test_a_private_mechanism_is_contradicted_no_more_often_than_it_may():
    wrong, one, found = 0, 0, []
    for seed in range(300):
        coins, said = responses(1.0, 400, seed)
        scores = said.astype(float)
        found.append(Roc(scores[coins], scores[~coins]).epsilon(0.0))
        wrong += found[-1] > 1
        one += one_run(400, 400, int((coins == said).sum()), 0.0) > 1
    assert wrong <= 0.05 * 300 + 8
    assert 4 <= one <= 0.05 * 300 + 8  # and is not so cautious that it never is
    assert np.mean(found) > 0.5


def test_a_threshold_is_chosen_on_one_half_and_measured_on_the_other():
    every_second = Roc(np.tile([1.0, 0.0], 500), np.zeros(1000))  # as if one half could be told and the other not
    assert every_second.epsilon(0.0) == 0
    assert every_second.balanced() == 0.5


def test_what_is_not_private_at_all_is_ruled_out_as_far_as_the_count_allows():
    roc = Roc(np.ones(2000), np.zeros(2000))
    most = 0.025 ** (1 / 1000)  # the lower limit of 1000 of 1000
    assert roc.epsilon(0.0) == pytest.approx(math.log(most / (1 - most)), rel=1e-3)
    assert 0 < roc.epsilon(0.5) < roc.epsilon(0.0)
    assert Roc(np.zeros(50), np.zeros(50)).epsilon(1e-5) == 0


def test_one_run_without_delta_is_a_binomial_tail():
    q = 0.05 ** (1 / 500)
    assert one_run(1000, 500, 500, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-3)
    assert one_run(1000, 100, 50, 0.0) == 0
    assert one_run(1000, 0, 0, 0.0) == 0
    assert chance(1.0, 10, 4, 3, 0.0) == pytest.approx(stats.binom.sf(2, 4, 1 / (1 + math.exp(-1))))


def test_one_run_pays_for_its_delta():
    """By hand: of 4 guesses 3 right, q = ½: P(B ≥ 3) = 5/16, and the best i is 2 with (6 + 4)/16 / 2 = 5/16, or 1 with
    6/16."""
    assert chance(0.0, 10, 4, 3, 0.01) == pytest.approx(5 / 16 + 2 * 10 * 0.01 * 6 / 16)
    bounds = [one_run(1000, 500, 500, delta) for delta in (0.0, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > 5
    assert bounds[-1] < 3.5


def test_scores_with_gaussian_noise_are_as_far_apart_as_their_means():
    assert np.mean([apart(1, 4000, seed).gaussian() for seed in range(20)]) == pytest.approx(0.88, abs=0.02)
    above = [apart(1, 400, seed).gaussian() > 1 for seed in range(200)]
    assert np.sum(above) <= 4  # both limits are cautious
    assert apart(0, 400).gaussian() == 0
    assert Roc(np.ones(100), np.zeros(100)).gaussian() > 2
