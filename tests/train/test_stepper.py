"""A stepper that serves many stacks, as on a GPU, takes the steps of one that is made for each."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.core.message import Slots
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.gpu import graphs
from fedveil.gpu.graphs import Captured, Loop
from fedveil.train.stepper import Pull, Stepper

SIZES = (5, 17, 9, 12)
MODELS = {
    "plain": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Dropout(0.3), nn.Linear(6, 3)),
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
}
WAYS = {
    "sgd": fv.LocalTraining(lr=0.1, batch=4, decay=0.7),
    "momentum": fv.LocalTraining("momentum", 0.1, batch=4, decay=0.7),
    "adam": fv.LocalTraining("adam", 0.01, batch=4, decay=0.7),
    "adamw": fv.LocalTraining("adamw", 0.01, batch=4, weight_decay=0.1, decay=0.7),
    "accumulated": fv.LocalTraining(lr=0.1, batch=2, accumulate=3),
}


def task_of(name: str) -> fv.Task:
    draw = torch.Generator().manual_seed(0)
    x, n = torch.randn(sum(SIZES), 1, 4, 4, generator=draw), sum(SIZES)
    data = from_tensors(x, torch.randint(0, 3, (n,), generator=draw), x[:6], torch.arange(6) % 3, classes=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fv.Task(MODELS[name](), data, fv.Split(np.arange(n), np.cumsum([0, *SIZES]), "ragged"))


def stack_of(task: fv.Task, clients: tuple[int, ...], round_: int) -> ClientStack:
    root, memory = fv.Seed.root(2).child(round_), [Slots()] * len(clients)
    return ClientStack(task, clients, round_, root, fv.Seed.root(3), memory, [{} for _ in clients])


def pull_of(strength: float, offset: bool, w: torch.Tensor, round_: int) -> Pull:
    draw = torch.Generator().manual_seed(round_)
    return Pull(w, strength, torch.randn(2, len(w), generator=draw) if offset else None)


@pytest.mark.parametrize(
    ("model", "way", "pull"),
    [
        *((model, way, None) for model in MODELS for way in WAYS),
        *((model, "sgd", pull) for model in MODELS for pull in ((0.3, False), (0.3, True), (0.0, True))),
        *(("plain", way, (0.3, True)) for way in WAYS),
    ],
    ids=str,
)
def test_what_one_stack_leaves_does_not_reach_the_next(model, way, pull):
    task, how = task_of(model), WAYS[way]
    first = pull_of(*pull, task.initial, 0) if pull else None
    shared = Stepper(how, task, (8, 2, how.step_size), torch.zeros(()), first, None)
    for round_, clients in ((1, (1, 3)), (3, (0, 2)), (2, (2, 3))):
        w = task.initial * round_
        correction = pull_of(*pull, w, round_) if pull else None
        alone, together = stack_of(task, clients, round_), stack_of(task, clients, round_)
        expected, _ = how.train(alone, w, correction)
        index, size = how.plan(together)
        shared.load(together, w, np.pad(index, ((0, 0), (0, 0), (0, how.step_size - index.shape[2]))), size, correction)
        shared.run(size)
        torch.testing.assert_close(shared.weights[:, : len(w)], expected, rtol=1e-5, atol=1e-6)
        found = torch.cat([shared.weights[:, len(w) :], shared.statistics], 1)
        torch.testing.assert_close(found, alone.norms, rtol=1e-5, atol=1e-6)


def test_a_correction_is_what_its_formula_says():
    w, v, offset = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 5.0]]), torch.tensor([[0.25, -1.0]])
    assert torch.equal(Pull(w, 0.5)(v), torch.tensor([[1.0, 1.5]]))
    assert torch.equal(Pull(w, 0.5, offset)(v), torch.tensor([[1.25, 0.5]]))
    assert torch.equal(Pull(w, offset=offset)(v), offset)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_graph_serves_rounds_with_other_rates_and_corrections():
    whole = task_of("batch norm")
    task = fv.Task(whole.model, whole.data, whole.clients, device="cuda")
    for method in (fv.FedAvg(WAYS["momentum"]), fv.FedProx(WAYS["sgd"], mu=0.5), fv.Scaffold(WAYS["sgd"])):
        on_gpu = fv.run(task, method, rounds=6, cohort=3).weights
        torch.testing.assert_close(on_gpu, fv.run(whole, method, rounds=6, cohort=3).weights, rtol=1e-3, atol=1e-4)
    assert 0 < len(task.steppers) <= 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_is_replayed_by_later_loops():
    count, calls = torch.zeros(1, device="cuda"), []

    def step() -> None:
        calls.append(1)
        count.add_(1)

    captured, device = Captured(step), torch.device("cuda")
    for _ in range(5):
        Loop(captured, 2, device).run(2)
    assert float(count) == 10
    assert len(calls) == graphs.WARM_UP + 1  # the last one was the capture


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_has_no_other_graphs_in_it():
    total, one, calls = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda"), []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return 2 * x

    inner = graphs.Replayed(double)
    captured = Captured(lambda: total.add_(inner(one)))
    for _ in range(graphs.WARM_UP + 3):
        captured.run(True)
    assert float(total) == 2 * (graphs.WARM_UP + 3)
    assert len(calls) == graphs.WARM_UP + 1
    for _ in range(graphs.WARM_UP + 3):  # outside, the function has a graph of its own
        assert float(inner(one)) == 2
    assert len(calls) == 2 * (graphs.WARM_UP + 1)


def test_without_a_gpu_a_captured_step_is_taken_as_it_is():
    calls = []
    Loop(Captured(lambda: calls.append(1)), 9, torch.device("cpu")).run(9)
    assert len(calls) == 9


def test_settings_that_differ_have_steppers_of_their_own():
    """Or a graph with another momentum would be replayed."""
    assert hash(WAYS["sgd"]) != hash(replace(WAYS["sgd"], momentum=0.5))
