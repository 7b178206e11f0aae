"""Opponents of `benchmarks.rivals` that need nothing else installed take the same steps."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def opponents(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.opponents")


@pytest.mark.parametrize("private", [False, True])
def test_fedveil_and_the_loop_take_the_same_steps(opponents, monkeypatch, private):
    monkeypatch.setattr(opponents, "NOISE", 1e-7)
    work = opponents.Workload("small-cnn", clients=6, cohort=3, private=private)
    ours, loop = opponents.Fedveil(work, {}), opponents.PlainLoop(work, {})
    for number in (1, 2):
        assert ours.timed(number) > 0
        loop.round(number)
    moved = (loop.flat() - ours.task.initial).abs().max()
    assert moved > 1e-3
    torch.testing.assert_close(ours.flat(), loop.flat(), rtol=0, atol=1e-6)


def test_the_networks_have_the_weights_that_they_say(opponents):
    sizes = {name: sum(p.numel() for p in make().parameters()) for name, (make, _) in opponents.NETWORKS.items()}
    assert sizes == {"cifar-cnn": 1_626_442, "wide-cnn": 2_168_746, "small-cnn": 24_195, "lenet5": 61_706}


def test_clients_beyond_a_thousand_share_records(opponents):
    task = opponents.Workload("small-cnn", clients=1002, cohort=2).task
    assert len(task.x) == 50_000
    assert (task.clients[1000] == task.clients[0]).all()
