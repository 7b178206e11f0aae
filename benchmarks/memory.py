"""What a round writes where clients remember vectors as large as the model."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch

import fedveil as fv
from fedveil import models
from fedveil.data import from_tensors

CLIENTS, ROUNDS, COHORTS = 1000, 5, (10, 40)


def client_memory() -> dict[str, float]:
    """What a round writes: 1,000 clients of 1.66 million weights with error feedback, and with SCAFFOLD"""
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(2 * CLIENTS, 1, 28, 28, generator=draw), torch.randint(0, 10, (2 * CLIENTS,), generator=draw)
    data = from_tensors(x, y, x[:10], y[:10], classes=10)
    split = fv.split("iid", data, CLIENTS, fv.Seed.root(0))
    task = fv.Task(models.build("mcmahan-cnn", (1, 28, 28), 10), data, split)
    local, found = fv.LocalTraining(lr=0.1, batch=2), dict[str, float]()
    for name, method in (
        ("feedback", fv.FedAvg(local, up=fv.TopK(share=0.01), feedback=True)),
        ("scaffold", fv.Scaffold(local)),
    ):
        for cohort in COHORTS:
            written, saving = _written(task, method, cohort)
            found[f"{name}, {cohort} clients a round, MB written a round"] = written / 1e6
            found[f"{name}, {cohort} clients a round, seconds of saving"] = saving
        found[f"{name}, {COHORTS[1]} / {COHORTS[0]} clients a round, bytes"] = (
            found[f"{name}, {COHORTS[1]} clients a round, MB written a round"]
            / found[f"{name}, {COHORTS[0]} clients a round, MB written a round"]
        )
    return found


def _written(task: fv.Task, method: fv.Method, cohort: int) -> tuple[float, float]:
    """Bytes by which the clients' memories grow in a round, and the median seconds of saving."""
    saving: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fv.run(
            task,
            method,
            rounds=ROUNDS,
            cohort=cohort,
            folder=folder,
            evaluate_every=ROUNDS,
            observer=lambda row: saving.append(row.saving),
        )
        grown = sum(file.stat().st_size for file in Path(folder).glob("memory-*.fv"))
    return grown / ROUNDS, statistics.median(saving[1:])
