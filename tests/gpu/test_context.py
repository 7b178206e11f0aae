"""Settings of one run, which another run in the same process does not see."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import fedveil as fv
from fedveil.engines import LocalEngine
from fedveil.gpu import graphs
from fedveil.gpu.context import DEFAULT, Context, current, using
from toys import linear_task


def test_settings_hold_within_a_block_and_in_its_thread_only() -> None:
    with using(compile=True) as outer:
        assert current() is outer
        with using(capture=False):
            assert current() == Context(compile=True, capture=False)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(current).result() is DEFAULT
        assert current() is outer
    assert current() is DEFAULT


def test_two_runs_beside_each_other_have_settings_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "compiled", lambda function, *tensors: function)  # which takes long
    both = threading.Barrier(2, timeout=60)

    def trained(compile: bool) -> tuple[set[bool], set[int]]:
        seen: set[bool] = set()
        told: set[int] = set()

        class Asked(fv.FedAvg):
            def released(self, stack, question, w, parts=None):  # type: ignore[no-untyped-def]
                seen.add(current().compile)
                return super().released(stack, question, w, parts)

            def round(self, state, cohort):  # type: ignore[no-untyped-def]
                both.wait()  # the other run is in its round, too
                seen.add(current().compile)
                return super().round(state, cohort)

        method = Asked(fv.LocalTraining(epochs=3 if compile else 5, batch=4))
        with using(observer=lambda done, total: told.add(total)):
            fv.run(linear_task(), method, rounds=2, cohort=2, engine=LocalEngine(1, 2, compile=compile))
        return seen, told

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(trained, (True, False))
    assert (first[0], second[0]) == ({True}, {False})
    assert first[1].isdisjoint(second[1])
    assert first[1]
    assert second[1]
