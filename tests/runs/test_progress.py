"""A run as it goes, told where stderr is no terminal."""

import pytest
import torch
from rich import console

import fedveil as fv
from fedveil.core.ledger import Ledger, Row
from fedveil.gpu import graphs
from fedveil.gpu.context import current, using
from fedveil.runs import progress
from fedveil.runs.progress import LINE_EVERY, LONG, Watch
from toys import linear_task


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def row(number: int, accuracy: float | None = None, epsilon: float | None = None) -> Row:
    metrics = {} if accuracy is None else {"accuracy": accuracy}
    return Row(round=number, cohort=[0], up={"0": 500}, metrics=metrics, epsilon=epsilon)


def test_a_line_comes_every_few_seconds_and_no_oftener(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(100, Ledger()) as watch:
        for number in range(1, 25):
            clock[0] += 1
            watch(row(number))
    told = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert told == [f"{n}/100" for n in range(1, 25, int(LINE_EVERY))]


def test_a_line_has_what_was_measured_last_and_what_is_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Watch(12, Ledger([row(1), row(2)])) as watch:
        for number, accuracy, spent in ((3, 0.5, 1.25), (4, None, None)):
            clock[0] += 10
            watch(row(number, accuracy, spent))
    assert capsys.readouterr().err.splitlines() == [
        "round 3/12  accuracy 0.5000  ε 1.25  1.5 kB up  0:01:30 left",
        "round 4/12  accuracy 0.5000  ε 1.25  2.0 kB up  0:01:20 left",
    ]


def test_steps_are_told_of_long_rounds_only(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(2, Ledger()):
        observer = current().observer
        assert observer
        clock[0] += LONG - 0.1
        observer(1, 9)
        clock[0] += 0.2
        observer(2, 9)
        observer(3, 9)
    assert capsys.readouterr().err.splitlines() == ["round 0/2  step 2/9"]
    assert current().observer is None


def test_what_takes_long_and_has_no_steps_is_announced_at_once(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program of a step when it is made, once for each set of shapes, and of two sets at most."""
    monkeypatch.setattr(graphs, "PROGRAMS", 2)
    monkeypatch.setattr(graphs, "compiled", lambda function, *tensors: function)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    fused = graphs.Fused("gradient", lambda x: (x,))
    with Watch(2, Ledger()) as watch, using(compile=True):
        watch(row(1))
        for size in (1, 1, 2, 3, 2):
            assert fused(torch.ones(size))[0].shape == (size,)
    assert capsys.readouterr().err.splitlines() == [
        "round 1/2  500 bytes up",
        *["round 1/2  500 bytes up  compiling gradient, up to a minute"] * 2,
    ]


def test_a_run_in_python_tells_its_progress_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Row] = []
    for told in (False, True):
        result = fv.run(linear_task(), fv.FedAvg(), rounds=2, cohort=2, progress=told, observer=seen.append)
        out, err = capsys.readouterr()
        assert out == ""
        accuracy = result.ledger.rows[0].metrics["accuracy"]
        assert err.startswith(f"round 1/2  accuracy {accuracy:.4f}") is told
    assert [row.round for row in seen] == [1, 2, 1, 2]


def test_in_a_notebook_one_line_renews_itself(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    with Watch(3, Ledger()) as watch:
        for number, accuracy in ((1, 0.5), (2, None)):
            clock[0] += 10
            watch(row(number, accuracy))
            watch.announce("compiling")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    first, second, third, fourth = (line.rstrip("\n") for line in err.split("\r")[1:])
    assert first == "round 1/3  accuracy 0.5000  500 bytes up  0:00:20 left"
    assert second == f"{first}  compiling"
    assert third.rstrip() == "round 2/3  accuracy 0.5000  1.0 kB up  0:00:10 left"
    assert len(third) == len(second)  # nothing of the longer line stays
    assert fourth.endswith("compiling")


def test_a_task_without_classes_tells_its_loss() -> None:
    assert Watch(1, Ledger()).metric == ""
    watch = Watch(1, Ledger())
    watch(Row(round=1, cohort=[0], metrics={"loss": 0.25}))
    assert watch.metric == "  loss 0.2500"
