"""The local engine: how it stacks, what a failing client costs, and debug mode."""

import msgspec
import pytest
import torch

import fedveil as fv
from fedveil.cli.jobs import Job
from fedveil.engines import LocalEngine
from fedveil.engines.local import HUGE, LARGE, ClientFailure
from fedveil.gpu.context import current
from fedveil.runs import recipe
from fedveil.runs.origin import Where
from toys import linear_task


class Guilty(fv.FedAvg):
    """Client 2 fails whenever it is in a stack."""

    def released(self, stack, question, w, parts=None):
        if 2 in stack.clients:
            raise ArithmeticError("client 2 divides by zero")
        return super().released(stack, question, w, parts)


def test_an_exception_is_bisected_to_the_guilty_client():
    task = linear_task(6, 36)
    result = fv.run(task, Guilty(), rounds=1, cohort=6, engine=LocalEngine(stack=6, workers=1))
    assert result.ledger.rows[0].missing == {"2": "failed: ArithmeticError: client 2 divides by zero"}
    assert set(result.ledger.rows[0].up) == {"0", "1", "3", "4", "5"}
    others = fv.run(task, Guilty(), rounds=1, cohort=6, engine=LocalEngine(stack=1, workers=1))
    torch.testing.assert_close(result.weights, others.weights, atol=1e-6, rtol=0)


def test_debug_names_the_client_the_question_and_the_shapes():
    with pytest.raises(
        ClientFailure, match=r"client 2 failed at Train in round 1 \(.*weights 8.*records 6\)"
    ) as failure:
        fv.run(linear_task(), Guilty(), rounds=1, cohort=4, engine=LocalEngine(debug=True))
    assert isinstance(failure.value.__cause__, ArithmeticError)


def test_out_of_memory_halves_the_stack_and_stays_small():
    sizes = []

    class Hungry(fv.FedAvg):
        def released(self, stack, question, w, parts=None):
            sizes.append(len(stack))
            if len(stack) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().released(stack, question, w, parts)

    result = fv.run(linear_task(8, 40), Hungry(), rounds=2, cohort=8, engine=LocalEngine(workers=1))
    assert not any(row.missing for row in result.ledger.rows)
    assert sizes == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2]


def test_clients_of_like_size_are_stacked_together():
    stacks = []

    class Watch(fv.FedAvg):
        def released(self, stack, question, w, parts=None):
            stacks.append(stack.rows.counts.tolist())
            return super().released(stack, question, w, parts)

    task = linear_task(6, 63, uneven=True)
    fv.run(task, Watch(), rounds=1, cohort=6, engine=LocalEngine(stack=2, workers=1))
    assert stacks == [[3, 6], [9, 12], [15, 18]]


@pytest.mark.parametrize(
    ("work", "options", "sizes"),
    [
        (LARGE - 1, {}, [25, 5]),  # the same on every machine
        (LARGE - 1, {"workers": 3}, [10, 10, 10]),
        (LARGE - 1, {"stack": 20}, [20, 10]),
        (LARGE, {}, [5] * 6),
        (LARGE, {"workers": 10}, [3] * 10),
        (HUGE, {}, [1] * 30),
    ],
)
def test_on_a_cpu_the_size_of_the_model_decides_how_many_clients_are_stacked(monkeypatch, work, options, sizes):
    monkeypatch.setattr("fedveil.engines.local.cores", lambda: 4)
    task, stacks = linear_task(30, 60), []
    task.work = work

    class Watch(fv.FedAvg):
        def released(self, stack, question, w, parts=None):
            stacks.append(len(stack))
            return super().released(stack, question, w, parts)

    engine = LocalEngine(**options)
    assert engine.chosen(task)[1] == options.get("workers", 4)
    fv.run(task, Watch(), rounds=1, cohort=30, engine=engine)
    assert sorted(stacks, reverse=True) == sizes


def test_what_an_engine_chose_makes_the_same_stacks_on_a_machine_with_more_cores(monkeypatch):
    task = linear_task(30, 60)
    monkeypatch.setattr("fedveil.engines.local.cores", lambda: 2)
    stack, workers = LocalEngine().chosen(task)
    monkeypatch.setattr("fedveil.engines.local.cores", lambda: 16)
    assert LocalEngine(stack, workers).chosen(task) == (stack, workers) == (25, 2)


def test_an_engine_can_be_used_again_for_a_task_of_another_size(monkeypatch):
    monkeypatch.setattr(LocalEngine, "lanes", lambda self, task: 2 if len(task.clients) == 4 else 1)
    engine = LocalEngine()
    for clients in (4, 3, 4):
        result = fv.run(linear_task(clients), fv.FedAvg(), rounds=1, cohort=2, engine=engine)
        assert not result.ledger.rows[0].missing


def test_steps_are_compiled_where_a_run_asks_for_it_and_nowhere_after_it(tmp_path):
    plan, task, seen = recipe.read("digits/fedavg"), linear_task(), []

    class Asked(fv.FedAvg):
        def released(self, stack, question, w, parts=None):
            seen.append(current().compile)
            return super().released(stack, question, w, parts)

    for compile in (True, False):
        where = Where(str(tmp_path), "cpu", None, 1, 1, False, False, compile=compile)
        with Job(tmp_path, plan, msgspec.structs.asdict(where))._engine(task) as engine:
            fv.run(task, Asked(), rounds=1, cohort=2, engine=engine)
    assert seen == [True, False]


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        LocalEngine(stack=0)
