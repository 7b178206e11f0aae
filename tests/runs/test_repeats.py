"""Several seeds: which there are, what they decide, and what is said of their differences."""

import math
import tomllib

import numpy as np
import pytest
import torch
from scipy import stats

from fedveil.core.ledger import Ledger, Right, Row
from fedveil.core.metrics import ACCURACY, Primary
from fedveil.core.seeds import Seed
from fedveil.core.setup import init_state
from fedveil.runs import recipe
from fedveil.runs.repeats import folder_name, parse_grid, parse_held, parse_seeds, with_seed
from fedveil.runs.statistics import SAME, Repeats, crossed, note, paired, spread

TINY = ["split.clients=4", "cohort.size=2", "task.validation=0.1"]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("5", (0, 1, 2, 3, 4)), ("0-2", (0, 1, 2)), ("0,2,5-7", (0, 2, 5, 6, 7)), ("7,", (7,)), ("3,1-3", (3, 1, 2))],
)
def test_seeds_are_a_number_or_a_list(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "a", "3-1", "-1", "1..3", "0-99999", "1,,2"])
def test_other_seeds_are_an_error(text):
    with pytest.raises(ValueError, match=f"--seeds is '{text}'"):
        parse_seeds(text)


def test_only_what_there_is_can_be_held():
    assert parse_held("split, cohorts", False) == ("split", "cohorts")
    assert parse_held(None, False) == ()
    assert parse_held("noise", True) == ("noise",)
    with pytest.raises(ValueError, match="--hold has 'data'; use a list of split, weights, cohorts, noise"):
        parse_held("data", False)
    with pytest.raises(ValueError, match="noise comes from the operating system"):
        parse_held("noise", False)


def decided(plan):
    """What the seeds of a recipe decide, by stream."""
    task = plan.build()
    own = [task.clients[k] for k in range(len(task.clients))]
    return {
        "split": [*(each.tolist() for each in own), task.data.validation_y.tolist()],
        "weights": task.initial.tolist(),
        "cohorts": [plan.cohort.of_round(task, Seed.root(plan.seed), n) for n in range(1, 9)],
    }


@pytest.mark.parametrize("held", [(), ("split",), ("weights",), ("cohorts",), ("split", "weights", "cohorts")])
def test_what_is_held_stays_and_the_rest_varies(held):
    plan = recipe.read("digits/fedavg", TINY)
    first, other = (decided(with_seed(plan, seed, held, 3)) for seed in (3, 4))
    assert {stream for stream in first if first[stream] == other[stream]} == set(held)
    assert first == decided(recipe.read("digits/fedavg", [*TINY, "seed=3"]))


def test_a_seed_of_its_own_stays():
    plan = recipe.read("digits/fedavg", ["split.seed=9", "task.weights_seed=8", "cohort.seed=7"])
    held = with_seed(plan, 1, ("split", "weights", "cohorts"), 0)
    assert (held.seed, held.split.seed, held.task.weights_seed, held.cohort.seed) == (1, 9, 8, 7)
    assert recipe.parse(tomllib.loads(held.toml())) == held
    assert plan.fingerprint() != recipe.read("digits/fedavg").fingerprint()


def test_private_cohorts_cannot_be_held():
    private = ["cohort.kind=poisson", "method.user_privacy.delta=1e-3", "method.user_privacy.noise=2"]
    private += ["method.user_privacy.relation=zero-out", "cohort.seed=1"]
    plan = recipe.read("digits/fedavg", private)
    with pytest.raises(ValueError, match=r"cohort\.seed is 1, but with this differential privacy cohorts are drawn in"):
        init_state(plan.build(), plan.method, plan.cohort)


def test_the_interval_of_paired_differences_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    base, values = rng.normal(0.9, 0.02, 6), rng.normal(0.91, 0.02, 6)
    found = paired(dict(enumerate(values)), dict(enumerate(base)))
    interval = stats.ttest_rel(values, base).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.count == 6


def test_only_common_seeds_are_paired():
    found = paired({0: 0.9, 1: 0.8, 7: 0.1}, {0: 0.8, 1: 0.7, 9: 0.9})
    assert found.mean == pytest.approx(0.1)
    assert found.count == 2
    assert paired({0: 0.9, 1: 0.8}, {1: 0.7, 2: 0.9}) is None


def _right(rng, accuracy, seeds, n, by_seed=0.0, by_record=0.0):
    """Hits [S, n] whose chances have effects of the seed and of the record."""
    chance = accuracy + by_seed * rng.standard_normal((seeds, 1)) + by_record * rng.standard_normal((1, n))
    return dict(enumerate(rng.random((seeds, n)) < chance))


def test_an_interval_can_cover_seeds_and_test_records():
    """Its limits by hand, for two seeds and three records."""
    a = {0: np.array([1, 1, 0], bool), 1: np.array([1, 0, 1], bool)}
    b = {0: np.array([0, 1, 0], bool), 1: np.array([0, 0, 0], bool), 9: np.zeros(3, bool)}
    found = crossed(a, b)  # differences 1 0 0 and 1 0 1
    seeds, records, rest = 1 / 6, 2 * 0.25, 1 / 6
    freedom = (seeds + records - rest) ** 2 / (seeds**2 / 1 + records**2 / 2 + rest**2 / 2)
    half = stats.t.ppf(0.975, max(1, freedom)) * math.sqrt((seeds + records - rest) / 6)
    assert (found.mean, found.count, found.records) == (pytest.approx(0.5), 2, 3)
    assert (found.low, found.high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert crossed(a, {0: b[0]}) is None


@pytest.mark.parametrize(("by_seed", "by_record"), [(0.0, 0.0), (0.03, 0.0), (0.0, 0.25), (0.03, 0.25)])
def test_that_interval_holds_the_difference_in_95_of_100_worlds(by_seed, by_record):
    """Both methods depend on the seed and the record, in ways of their own; the difference of their chances is 0."""
    rng, held, alone, worlds = np.random.default_rng(5), 0, 0, 400
    for _ in range(worlds):
        a, b = (_right(rng, 0.5, 5, 200, by_seed, by_record) for _ in range(2))
        found = crossed(a, b)
        of_seeds = paired(*({seed: float(hits.mean()) for seed, hits in each.items()} for each in (a, b)))
        held += found.low <= 0 <= found.high
        alone += of_seeds.low <= 0 <= of_seeds.high
        assert found.mean == pytest.approx(of_seeds.mean)
    assert held >= 0.925 * worlds
    if by_record:
        assert alone < held
    if by_record and not by_seed:
        assert alone < 0.9 * worlds  # the interval of the seeds alone is too short


def test_runs_that_tell_their_hits_are_compared_by_record():
    def ledger(*right):
        metrics = {"accuracy": sum(right) / len(right)}
        told = Right.of(1, torch.tensor(right).bool())
        return Ledger([Row(round=1, cohort=[], metrics=metrics)], right=told)

    a = Repeats("a", {0: ledger(1, 1, 0, 1, 1, 1, 1, 0, 1), 1: ledger(1, 1, 1, 1, 1, 1, 1, 0, 1)})
    b = Repeats("b", {0: ledger(1, 0, 0, 1, 1, 1, 0, 0, 1), 1: ledger(1, 0, 1, 1, 1, 0, 1, 0, 1)})
    assert a.right()[0].tolist() == [True, True, False, True, True, True, True, False, True]
    assert b.difference(a) == crossed(b.right(), a.right())
    assert b.difference(a).records == 9
    assert note([a, b]).endswith("which covers seeds and the choice of the test records.")
    b.ledgers[1].right = None
    assert b.difference(a) == paired(b.values(), a.values())
    assert note([a, b]).endswith("which does not cover the choice of the test records.")


def test_a_difference_is_told_in_words():
    same = paired({0: 0.9, 1: 0.8, 2: 0.7}, {0: 0.8, 1: 0.9, 2: 0.7})
    assert same.show(ACCURACY) == "no difference seen: +0.00 points [-24.84, 24.84]"
    assert paired({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}).show(ACCURACY).startswith(SAME)
    better = paired({0: 0.90, 1: 0.91, 2: 0.92}, {0: 0.80, 1: 0.80, 2: 0.83})
    assert better.show(ACCURACY) == "+10.00 points [7.52, 12.48]"
    assert paired({0: 1.0, 1: 1.1}, {0: 2.0, 1: 2.1}).show(Primary("rmse", maximise=False)) == "-1 [-1, -1]"


def test_a_spread_is_a_mean_and_a_sample_deviation():
    assert spread([0.9, 0.8]).show(ACCURACY) == "85.00% ± 7.07"
    assert spread([0.9]).show(ACCURACY) == "90.00%"
    assert spread([1.0, 2.0, 3.0]).deviation == pytest.approx(1)
    assert math.isclose(spread([1.0, 2.0, 3.0]).mean, 2)


def test_a_grid_is_every_combination():
    found = parse_grid(["a.b=1,2", 'c=x,["y", "z"]'])
    assert found == [("a.b=1", "c=x"), ("a.b=1", 'c=["y", "z"]'), ("a.b=2", "c=x"), ("a.b=2", 'c=["y", "z"]')]
    assert parse_grid([]) == [()]
    assert folder_name(("a.b=1e-3", "c=x/y z")) == "a.b=1e-3,c=x-y-z"
    for grid, told in (
        (["a"], "--grid takes KEY=A,B,C, not 'a'"),
        (["a=1,,2"], "takes KEY=A,B,C"),
        (["a=1,1"], "twice"),
        (["a=1", "a=2"], "twice"),
        (["seed=1,2"], "use --seeds 1,2"),
        (["a=" + ",".join(map(str, range(1001)))], "more than 1,000 combinations"),
    ):
        with pytest.raises(ValueError, match=told):
            parse_grid(grid)


def test_older_recipes_keep_their_randomness():
    plan = recipe.read("digits/fedavg")
    task, run = plan.build(), Seed.root(plan.seed)
    assert plan.cohort.of_round(task, run, 3) == plan.cohort.draw(task, run.child("round", 3, "cohort"))
    assert torch.equal(task.initial, recipe.read("digits/fedavg", ["task.weights_seed=0"]).build().initial)
