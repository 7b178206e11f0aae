"""Who masks with whom: neighbourhoods are mutual, and as large as the stated chances need."""

import math

import numpy as np
import pytest

from fedveil.core.seeds import Seed
from fedveil.privacy.secagg import graph


@pytest.mark.parametrize(("n", "k"), [(3, 2), (7, 6), (9, 4), (150, 20)])
def test_neighbourhoods_are_mutual_and_of_one_size(n, k):
    ids = tuple(range(10, 10 + 3 * n, 3))
    near = graph.neighbourhoods(ids, k, Seed.root(1))
    assert set(near) == set(ids)
    for client, others in near.items():
        assert len(others) == len(set(others)) == k + 1
        assert others == sorted(others)
        assert client in others
        assert all(client in near[other] for other in others)


def test_everybody_draws_the_same_graph_and_every_round_another():
    ids = tuple(range(40))
    graph.neighbourhoods.cache_clear()
    first = graph.neighbourhoods(ids, 6, Seed.root(1))
    graph.neighbourhoods.cache_clear()
    assert graph.neighbourhoods(ids, 6, Seed.root(1)) == first
    assert graph.neighbourhoods(ids, 6, Seed.root(2)) != first


def test_small_cohorts_are_complete_and_large_ones_are_not():
    assert [graph.degree(n) for n in (3, 50, 100)] == [2, 49, 99]
    assert graph.degree(101) < 100
    assert graph.degree(1000) < 150
    assert graph.degree(10_000) < 1.5 * graph.degree(1000)


@pytest.mark.parametrize("n", [150, 1000])
def test_the_degree_is_the_least_that_keeps_the_stated_chances(n):
    """The three chances anew, from log-factorials instead of exact binomials."""

    def log_ways(a, b):
        return math.lgamma(a + 1) - math.lgamma(b + 1) - math.lgamma(a - b + 1)

    def tail(least, marked, drawn):
        terms = [
            log_ways(marked, i) + log_ways(n - 1 - marked, drawn - i) - log_ways(n - 1, drawn)
            for i in range(least, min(drawn, marked) + 1)
        ]
        return sum(map(math.exp, terms))

    def chances(k):
        t, corrupt, dropped = k // 2 + 1, math.ceil(graph.CORRUPT * n), math.ceil(graph.DROPPED * n)
        gap = math.exp(log_ways(corrupt + dropped, k // 2) - log_ways(n, k // 2))
        return n * (tail(t, corrupt, k) + gap), n * tail(k - t + 1, dropped, k)

    insecure, stuck = chances(graph.degree(n))
    assert insecure <= 2**-graph.SECURITY
    assert stuck <= 2**-graph.CORRECTNESS
    insecure, stuck = chances(graph.degree(n) - 2)
    assert insecure > 2**-graph.SECURITY or stuck > 2**-graph.CORRECTNESS


def test_those_who_stay_and_are_honest_stay_connected():
    """With the stated shares of corrupt and dropped clients, in drawn graphs of the chosen degree."""
    n, rng = 200, np.random.default_rng(0)
    k, ids = graph.degree(n), tuple(range(n))
    for trial in range(20):
        near = graph.neighbourhoods(ids, k, Seed.root(trial))
        left = set(rng.permutation(n)[: round(n * (1 - graph.CORRUPT - graph.DROPPED))].tolist())
        seen = ahead = {min(left)}
        while ahead:
            ahead = {other for k in ahead for other in near[k]} & left - seen
            seen = seen | ahead
        assert seen == left
