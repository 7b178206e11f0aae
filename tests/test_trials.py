"""The changes to BAFFLE that results/baffle_trials.py measures are what it says they are."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.core.directions import Directions
from fedveil.methods.baffle.questions import Probe
from fedveil.train.optimizers import Moments
from methods.baffle.probes import gradients, stack
from toys import linear_task

RESULTS = Path(__file__).resolve().parents[1] / "results"
SERVER = fv.ServerOptimizer("adam", 0.05, tau=1e-8)


@pytest.fixture
def trials(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    return importlib.import_module("baffle_trials")


def directions(key: int, count: int) -> np.ndarray:
    return Directions.of("gaussian", 8, count).rows(np, np.array([key]), 0, count)[0].astype(np.float64)


def scales(second: np.ndarray) -> np.ndarray:
    p = second**-0.25
    return p / np.sqrt((p**2).mean())


def test_preconditioned_steps_are_those_of_the_formula_in_float64(trials):
    task = linear_task()
    method = trials.Preconditioned(directions=6, server=SERVER, clip=None)
    state, c = method.server.init_state(task.initial), np.linspace(-1, 2, 6)
    w, first, second, p = task.initial.double().numpy(), np.zeros(8), np.zeros(8), np.ones(8)
    for number in (1, 2, 3):
        state = method.take(task, state, [number], [torch.tensor(c, dtype=torch.float32)], number)
        delta = -(c @ (directions(number, 6) * p))
        first, second = 0.9 * first + 0.1 * delta, 0.99 * second + 0.01 * delta**2
        w, p = w + 0.05 * first / np.sqrt(second.mean()), scales(second)
        assert np.allclose(state.weights.numpy(), w, atol=1e-5)
    assert p.max() > 1.2 * p.min()


def test_clients_probe_along_the_preconditioned_directions(trials):
    task = linear_task()
    second = torch.linspace(0.1, 2.0, 8) ** 2
    method = trials.Preconditioned(directions=6, scheme="central", sigma=1e-3).scaled(second)
    z = directions(5, 6) * scales(second.double().numpy())
    expected = gradients(task, task.initial).double().numpy() @ z.T
    found = method.probe(stack(task), task.initial, Probe(task.initial, 5, 6))
    assert np.allclose(np.stack([answer.slopes.numpy() for answer in found]), expected, atol=2e-3)


def test_preconditioned_clients_hold_the_server_s_weights_bit_for_bit(trials):
    task, method = linear_task(), trials.Preconditioned(directions=6, server=SERVER)
    run = fv.Federation(task, method, fv.engines.LocalEngine(), fv.CohortSampler(size=4), fv.Seed.root(0))
    state = method.init_state(task)
    for number in range(1, 5):
        before = state
        state, row = run.step(state, number, 4)
        assert row.metrics["resynced"] == 0
        assert not row.missing
    held = {k: next(e[3] for e in reversed(v) if e[2] == "down") for k, v in run.clients.memory.entries.items()}
    assert len(held) == 4
    assert all(torch.equal(own.weights, before.weights) for own in held.values())
    assert isinstance(before.slots["server"], Moments)
    assert all(torch.equal(own.second, before.slots["server"].second) for own in held.values())


def test_the_number_of_directions_goes_from_the_first_to_the_last(trials):
    result = fv.run(linear_task(), trials.Varied(directions=8, first=2, last=8), rounds=4, cohort=4)
    ups = [max(row.up.values()) for row in result.ledger.rows]
    assert [up - ups[0] for up in ups] == [0, 8, 16, 24]
