"""When answers arrive at a server that does not wait."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedveil as fv
from fedveil.core.sampling import Fate
from fedveil.core.timeline import Arrival, Timeline, asked_each_round
from toys import linear_task

TASK = linear_task(clients=6)
ROOT = fv.Seed.root(0)


@dataclass(frozen=True)
class Fixed(fv.CohortSampler):
    """Clients answer after as many seconds as is said; others after 100. The lowest numbers are asked first."""

    after: dict[int, float] = field(default_factory=dict, hash=False)
    lost: tuple[int, ...] = ()

    def drawn(self, task, size, seed, without=()):
        return tuple(k for k in range(len(task.clients)) if k not in without)[:size]

    def fate(self, seed, client, serial=0):
        return Fate(self.after.get(client, 100.0), "dropped" if client in self.lost else "")


def windows(sampler: fv.CohortSampler, count: int, task: fv.Task = TASK):
    timeline = Timeline(sampler, task, ROOT)
    return [timeline.window(n) for n in range(1, count + 1)]


def test_a_timeline_by_hand():
    # 0 is done at 1 s, and 3 is asked in its place. 1 and 3 are done at 4 s, and only then 0 and 1 are asked again.
    first, second, third = windows(Fixed(size=3, buffer=2, after={0: 1.0, 1: 4.0, 2: 9.0, 3: 3.0, 4: 2.0}), 3)
    assert (first.asked, first.seconds) == ((0, 1, 2, 3), 4.0)
    assert first.arrivals == (Arrival(0, 1), Arrival(1, 1))
    assert (second.asked, second.seconds) == ((0, 1), 1.0)  # 3 is taken before anybody is asked
    assert second.arrivals == (Arrival(3, 1), Arrival(0, 2))
    assert (third.asked, third.seconds) == ((0, 3), 3.0)
    assert third.arrivals == (Arrival(0, 3), Arrival(1, 2))


def test_a_turn_without_an_answer_fills_no_buffer_and_its_place_is_given_away():
    (first,) = windows(Fixed(size=2, buffer=2, after={0: 1.0, 1: 2.0, 2: 3.0}, lost=(0,)), 1)
    assert first.arrivals == (Arrival(0, 1, "dropped"), Arrival(1, 1), Arrival(2, 1))
    assert first.asked == (0, 1, 2, 3)


def test_an_answer_that_is_too_old_is_discarded_and_the_server_waits_for_another():
    plan = Fixed(size=2, buffer=1, max_staleness=2, after={0: 3.5, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0})
    *_, last = windows(plan, 4)
    assert last.arrivals == (Arrival(0, 1, "stale: asked 3 steps ago, 2 are allowed"), Arrival(1, 4))
    *_, allowed = windows(replace(plan, max_staleness=3), 4)
    assert allowed.arrivals == (Arrival(0, 1),)


def test_a_round_ends_when_every_client_was_in_it():
    first, second = windows(Fixed(size=6, buffer=6, after=dict.fromkeys(range(6), 1.0), lost=(4,)), 2)
    assert len(first.arrivals) == 6
    assert first.asked == second.asked == tuple(range(6))


def test_without_latencies_the_cohorts_are_those_of_a_server_that_waits():
    for kind in ("uniform", "weighted"):
        task = linear_task(clients=8, records=80, uneven=True)
        plain = fv.CohortSampler(size=3, kind=kind)
        late = replace(plain, buffer=3)
        assert list(asked_each_round(late, task, ROOT, 6)) == list(asked_each_round(plain, task, ROOT, 6))
        for window in windows(late, 6, task):
            assert tuple(each.client for each in window.arrivals) == window.asked
            assert window.seconds == 0


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 8),
    buffer=st.integers(1, 6),
    drop=st.sampled_from([0.0, 0.3]),
    spread=st.sampled_from([0.0, 2.0]),
    limit=st.sampled_from([None, 0.5]),
    allowed=st.integers(0, 4),
    seed=st.integers(0, 50),
)
def test_what_holds_in_every_timeline(size, buffer, drop, spread, limit, allowed, seed):
    sampler = fv.CohortSampler(
        size=size, buffer=buffer, drop=drop, latency=1.0, spread=spread, deadline=limit, max_staleness=allowed
    )
    timeline, busy = Timeline(sampler, TASK, fv.Seed.root(seed)), {}
    for number in range(1, 12):
        window = timeline.window(number)
        assert not set(window.asked) & set(busy)  # nobody is asked while busy
        busy |= dict.fromkeys(window.asked, number)
        done = [each.client for each in window.arrivals]
        assert len(set(done)) == len(done)
        for each in window.arrivals:
            assert busy.pop(each.client) == each.asked
            stale = number - each.asked > allowed
            assert each.why.startswith(("dropped", "late: ", "stale: ") if stale else ("dropped", "late: ")) == bool(
                each.why
            )
            assert each.why or not stale
        usable = sum(not each.why for each in window.arrivals)
        assert usable == buffer or (usable < buffer and not busy)
        assert len(busy) <= size
        assert window.seconds >= 0
    again = Timeline(sampler, TASK, fv.Seed.root(seed))
    assert again.window(7) == timeline.window(7)  # whatever was looked at before


@pytest.mark.parametrize("kind", ["uniform", "weighted"])
def test_whoever_is_left_is_drawn_and_nobody_else(kind):
    task = linear_task(clients=8, records=80, uneven=True)
    sampler = fv.CohortSampler(kind=kind)
    drawn = [sampler.drawn(task, 2, fv.Seed.root(n), {0, 3, 7}) for n in range(200)]
    assert {k for each in drawn for k in each} == {1, 2, 4, 5, 6}
    assert {len(set(each)) for each in drawn} == {2}
    assert sampler.drawn(task, 9, fv.Seed.root(0), {0, 3, 7}) == (1, 2, 4, 5, 6)
    often = [sum(k in each for each in drawn) for k in (1, 6)]
    assert (often[1] > 1.5 * often[0]) == (kind == "weighted")  # client 6 has 3.5 times the records of client 1


def test_slow_clients_are_the_same_in_every_run_and_the_mean_is_that_of_all():
    sampler = fv.CohortSampler(latency=2.0, spread=1.0)
    waits = [[sampler.fate(fv.Seed.root(s), k).seconds for s in range(400)] for k in (0, 1)]
    means = [sum(each) / len(each) for each in waits]
    expected = [2.0 * sampler._slowness(k) for k in (0, 1)]
    assert means == pytest.approx(expected, rel=0.2)
    assert expected[0] != expected[1]
    every = [sampler._slowness(k) for k in range(4000)]
    assert sum(every) / len(every) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"buffer": 0}, "cohort.buffer is 0; use 1 answer or more"),
        ({"buffer": 2, "kind": "poisson"}, "cohort.kind is poisson"),
        ({"staleness": -1.0}, "cohort.staleness is -1"),
        ({"max_staleness": 101}, "cohort.max_staleness is 101"),
        ({"spread": -0.1}, r"cohort.spread is -0.1"),
    ],
)
def test_settings_without_a_meaning_are_one_sentence(options, told):
    with pytest.raises(ValueError, match=told):
        fv.CohortSampler(**options)


def test_weights_of_late_answers():
    assert [fv.CohortSampler().weight(n) for n in (0, 1, 3)] == pytest.approx([1, 0.70710678, 0.5])
    assert [fv.CohortSampler(staleness=1.0).weight(n) for n in (0, 1, 3)] == [1, 0.5, 0.25]
    assert [fv.CohortSampler(staleness=0.0).weight(n) for n in (0, 9)] == [1, 1]
