"""Steps repeated, and told to an observer without holding them up."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fedveil as fv
from fedveil.gpu import graphs
from fedveil.gpu.context import current, using
from fedveil.gpu.graphs import repeat
from toys import linear_task

CPU = torch.device("cpu")


@pytest.fixture
def told() -> Iterator[list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    with using(observer=lambda *step: seen.append(step)):
        yield seen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a step sets."""
    now = [0.0]
    monkeypatch.setattr(graphs.time, "monotonic", lambda: now[0])
    return now


def steps(clock: list[float], seconds: float, times: int, part: tuple[int, int] | None = None) -> None:
    def step() -> None:
        clock[0] += seconds

    repeat(step, times, CPU, part)


def test_without_an_observer_steps_are_taken_and_nothing_else() -> None:
    assert current().observer is None
    cursor = torch.zeros(1)
    repeat(lambda: cursor.add_(1), 7, CPU)
    assert cursor == 7


def test_slow_steps_are_all_told(told: list[tuple[int, int]], clock: list[float]) -> None:
    steps(clock, 2.0, 4)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_of_fast_steps_ever_fewer_are_told(told: list[tuple[int, int]], clock: list[float]) -> None:
    steps(clock, 0.001, 2000)
    assert [done for done, _ in told] == [2**n - 1 for n in range(1, 10)] + [1023, 1535]


def test_a_gpu_is_waited_for_where_it_is_told_and_nowhere_else(
    told: list[tuple[int, int]], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []

    class Stream:
        def synchronize(self) -> None:
            waits.append(len(told))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    with using(capture=False):
        repeat(lambda: None, 15, torch.device("cuda"))
        assert waits == []
        repeat(lambda: None, 1000, torch.device("cuda"))
        assert told == [(16 * (2**n - 1), 1000) for n in range(1, 6)]
        assert waits == list(range(5))
        with using(observer=None):
            repeat(lambda: None, 1000, torch.device("cuda"))
        assert len(waits) == 5


def test_a_part_is_told_as_that(told: list[tuple[int, int]], clock: list[float]) -> None:
    steps(clock, 2.0, 2, (10, 20))
    assert told == [(11, 20), (12, 20)]


@pytest.mark.parametrize(
    ("method", "total"),
    [
        (fv.FedAvg(local=fv.LocalTraining(epochs=3, batch=4)), 6),
        (fv.BaffleEpochs(directions=2, local=fv.LocalTraining(epochs=3, batch=4)), 6),
        (fv.FedAvg(up=fv.TofuCodec(points=2, steps=5), local=fv.LocalTraining(steps=1)), 5),
    ],
)
def test_whatever_trains_is_told_from_its_first_step_on(
    method: fv.Method, total: int, told: list[tuple[int, int]]
) -> None:
    task = linear_task()
    fv.run(task, method, rounds=1, cohort=2)
    assert any(of == total and done > total / 2 for done, of in told), told
    assert all(1 <= done <= of for done, of in told)


def test_threads_tell_the_same_observer(told: list[tuple[int, int]]) -> None:
    ready = threading.Barrier(4)

    def work(own: int) -> None:
        ready.wait()
        repeat(lambda: None, 3, CPU, (0, own))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda context, own: context.run(work, own), [copy_context() for _ in range(4)], range(10, 14)))
    assert {of for _, of in told} == {10, 11, 12, 13}


def joined(function: Callable[..., Tensor], *given: Tensor) -> tuple[list[object], Tensor]:
    """What is left of a function's stacked products and sums, and its result."""
    program = make_fx(function, tracing_mode="fake")(*given)
    graphs.join(program)
    kept = (torch.ops.aten.bmm.default, torch.ops.aten.add.Tensor)
    return [node.target for node in program.graph.nodes if node.target in kept], program(*given)


def test_a_sum_of_two_large_products_is_one_product() -> None:
    a, c, b, d = torch.randn(3, 40, 2), torch.randn(3, 40, 3), torch.randn(3, 2, 50), torch.randn(3, 3, 50)
    left, result = joined(lambda a, b, c, d: (a @ b + c @ d).sin(), a, b, c, d)
    assert left == [torch.ops.aten.bmm.default]
    torch.testing.assert_close(result, (a @ b + c @ d).sin())


def test_a_thread_compiles_what_it_has_not_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda operations, dynamic: operations)
    task = linear_task()
    rows = torch.arange(8).view(2, 4)
    given = task.initial.expand(2, -1), task.x[rows], task.y[rows], torch.ones(2, 4)
    with ThreadPoolExecutor(1) as pool:  # a warning, that the step runs uncompiled, would be an error here
        program = pool.submit(graphs.compiled, task.gradient, *given).result()
    for found, expected in zip(program(*given), task.gradient(*given), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_is_compiled_is_joined_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch, "compile", lambda operations, dynamic: seen.append(operations) or operations)
    a, b = torch.randn(3, 40, 2), torch.randn(3, 2, 50)
    (found,) = graphs.compiled(lambda a, b: (a @ b + (2 * a) @ b,), a, b)(a, b)
    assert len(seen[0].graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)) == 1
    torch.testing.assert_close(found, 3 * (a @ b))


def test_of_three_products_two_are_joined() -> None:
    a, b = torch.randn(3, 40, 2), torch.randn(3, 2, 50)
    left, result = joined(lambda a, b: a @ b + (2 * a) @ b + (3 * a) @ b, a, b)
    assert sorted(map(str, left)) == ["aten.add.Tensor", "aten.bmm.default", "aten.bmm.default"]
    torch.testing.assert_close(result, 6 * (a @ b))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a @ b) + (a @ b).sum(0),  # no product, and of another shape
        lambda a, b: (p := a @ b) + p @ b.mT @ b,  # needed elsewhere
        lambda a, b: a.mT @ a + b @ b.mT,  # smaller than its factors
        lambda a, b: (a @ b).view(-1) + (a @ b).view(-1),  # of another shape than what is added
        lambda a, b: a @ b + 1,
        lambda a, b: torch.add(a @ b, (2 * a) @ b, alpha=3),
        lambda a, b: a[:1] @ b[:1] + (2 * a) @ b,
        lambda a, b: (c := 1 * a) @ b + (c.mul_(2)) @ b,  # changed in place after the first product
    ],
)
def test_other_sums_stay_as_they_are(function: Callable[..., Tensor]) -> None:
    a, b = torch.randn(3, 40, 2), torch.randn(3, 2, 40)
    plain = make_fx(function)(a, b)
    kept = [n.target for n in plain.graph.nodes if n.target in (torch.ops.aten.bmm.default, torch.ops.aten.add.Tensor)]
    left, result = joined(function, a, b)
    assert left == kept
    torch.testing.assert_close(result, function(a, b))
