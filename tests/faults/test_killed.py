"""A server that is killed, at any moment, and started again ends where an undisturbed one ends, bit for bit."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fedveil as fv
from fedveil.engines import LocalEngine
from fedveil.runs import log
from toys import kept, linear_task

LOCAL = fv.LocalTraining(batch=4)
METHODS = {
    "fedavg": fv.FedAvg(local=LOCAL, server=fv.ServerOptimizer(optimizer="momentum")),
    "scaffold": fv.Scaffold(local=LOCAL),
}
FORK = multiprocessing.get_context("fork")


def train(folder: Path, name: str, rounds: int, pause: float = 0.0) -> None:
    fv.run(
        linear_task(),
        METHODS[name],
        rounds=rounds,
        cohort=fv.CohortSampler(size=3, drop=0.1),
        engine=LocalEngine(stack=1, workers=1),
        folder=folder,
        observer=lambda row: time.sleep(pause),
    )


def child(task: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=task, args=args)
    process.start()
    return process


@pytest.fixture(scope="module", params=METHODS)
def name(request):
    return request.param


# ------------------------------------------------------------------------------------------------- at every step


class Die:
    """Lets the first `calls` of fsync, replace and unlink pass and kills the process at the next one."""

    def __init__(self, calls: int, how: str) -> None:
        self.left, self.how = calls, how

    def instead_of(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: object) -> None:
            self.left -= 1
            if self.left >= 0:
                return call(*args)
            if self.how == "after":
                call(*args)
            if self.how == "torn" and call is FSYNC and os.path.isfile(args[0]):
                os.ftruncate(args[0], max(0, os.fstat(args[0]).st_size - 10))  # what did not reach the disk
            return os.kill(os.getpid(), signal.SIGKILL)

        return counted


FSYNC = os.fsync
STEPS = {
    # recipe, environment and, at the end, right.json; the ledger; three rounds of ledger, file, name and folder; one
    # old checkpoint to remove
    "fedavg": 3 * 3 + 3 + 3 * 4 + 1,
    # and three rounds of memory and index; in the first, the names of both
    "scaffold": 3 * 3 + 3 + 3 * 4 + 1 + 3 * 2 + 1,
}


def train_and_die(folder: Path, name: str, rounds: int, calls: int, how: str) -> None:
    die = Die(calls, how)
    for function in ("fsync", "replace", "unlink"):
        setattr(os, function, die.instead_of(getattr(os, function)))
    train(folder, name, rounds)


@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_killed_at_any_step_of_writing_a_run_goes_on_as_if_nothing_had_happened(how, name, tmp_path):
    train(tmp_path / "undisturbed", name, 3)
    undisturbed = kept(tmp_path / "undisturbed")
    for calls in range(STEPS[name]):
        folder = tmp_path / str(calls)
        killed = child(train_and_die, folder, name, 3, calls, how)
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        train(folder, name, 3)
        assert kept(folder) == undisturbed, f"killed at step {calls}"
        assert not list(folder.glob("*.new"))
    alive = child(train_and_die, tmp_path / "alive", name, 3, STEPS[name], how)
    alive.join()
    assert alive.exitcode == 0, "there are more steps than were tried"


def test_killed_while_files_of_memory_are_begun_compacted_and_deleted_a_run_goes_on(tmp_path, monkeypatch):
    moved, move = [], log.Log._moved
    monkeypatch.setattr(log.Log, "_moved", lambda *args: moved.append(args) or move(*args))
    monkeypatch.setattr(log, "FULL", 250)  # bytes; a client's control variate has 72
    monkeypatch.setattr(log, "WASTE", 0)
    monkeypatch.setattr(log, "BLOCKS", 1)
    train(tmp_path / "undisturbed", "scaffold", 8)
    assert moved
    undisturbed = kept(tmp_path / "undisturbed")
    numbers = {path.stem for path in (tmp_path / "undisturbed").iterdir()}
    assert not {"memory-00000001", "index-00000002"} & numbers
    for calls in range(STEPS["scaffold"], 1000):
        folder, how = tmp_path / str(calls), ("before", "torn", "after")[calls % 3]
        process = child(train_and_die, folder, "scaffold", 8, calls, how)
        process.join()
        train(folder, "scaffold", 8)
        assert kept(folder) == undisturbed, f"killed at step {calls}"
        assert len(list(folder.glob("memory-*"))) <= len(list((tmp_path / "undisturbed").glob("memory-*"))) + 2
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert calls > 60


# ------------------------------------------------------------------------------------------------- at random moments


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_at_random_moments_a_run_ends_as_if_nothing_had_happened(seed, name, tmp_path):
    rounds, pause = 40, 0.002  # no run takes less than 80 ms, so the first is killed for certain
    train(tmp_path / "undisturbed", name, rounds)
    rng, ends = random.Random(seed), []
    for attempt in range(1, 7):
        process = child(train, tmp_path / "killed", name, rounds, pause)
        process.join(rng.uniform(0, 0.05 * attempt))
        process.kill()
        process.join()
        ends.append(process.exitcode)
    assert -signal.SIGKILL in ends
    train(tmp_path / "killed", name, rounds)
    assert kept(tmp_path / "killed") == kept(tmp_path / "undisturbed")


SCRIPT = "import sys; sys.path[:0] = {path}; import test_killed as t; t.train({folder!r}, {name!r}, 6, {pause})"


def test_a_run_goes_on_in_a_fresh_interpreter(name, tmp_path):
    folder, ledger = tmp_path / "killed", tmp_path / "killed" / "ledger.jsonl"
    path = [str(Path(__file__).parent), *sys.path]

    def command(pause: float) -> list[str]:
        return [sys.executable, "-c", SCRIPT.format(path=path, folder=str(folder), name=name, pause=pause)]

    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command(pause=0.5), env=one) as process:
        while not ledger.exists() or ledger.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    subprocess.run(command(pause=0), env=one, check=True)
    train(tmp_path / "undisturbed", name, 6)
    assert kept(folder) == kept(tmp_path / "undisturbed")
