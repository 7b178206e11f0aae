"""What the tests of attacks share: a run whose messages are kept, seen by an adversary."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import fedveil as fv
from fedveil.attacks.seen import Seen, view
from fedveil.runs.messages import kept_rounds, read_round, read_truth

Truths = dict[int, dict[int, dict[str, Tensor]]]
FULL = fv.LocalTraining(lr=0.1, batch=100)  # one step on all records


def run(
    folder: Path,
    task: fv.Task,
    method: fv.Method,
    rounds: int = 2,
    cohort: int | fv.CohortSampler = 4,
    keep: str = "all",
) -> fv.Result:
    """Run with messages kept in `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fv.run(task, method, rounds=rounds, cohort=cohort, folder=folder, keep=keep)


def seen_in(folder: Path, task: fv.Task, method: fv.Method, adversary: str = "server", rounds: int = 2) -> Seen:
    """What an adversary has of the messages in a folder."""
    method = method.over(rounds)
    kept = [read_round(folder, n, method) for n in kept_rounds(folder)]
    return view(adversary, task, method, fv.Seed.root(0), kept)


def truths_in(folder: Path) -> Truths:
    return {n: read_truth(folder, n) for n in kept_rounds(folder)}


def attacked(
    folder: Path, task: fv.Task, method: fv.Method, adversary: str = "server", **options
) -> tuple[Seen, Truths]:
    """Run, and return what the adversary has and what it has to find."""
    run(folder, task, method, **options)
    return seen_in(folder, task, method, adversary, options.get("rounds", 2)), truths_in(folder)


def without_records(task: fv.Task) -> fv.Task:
    """The task with zeros in place of everyone's records and labels."""
    other = copy.copy(task)
    other.data = replace(task.data, x=torch.zeros_like(task.data.x), y=torch.zeros_like(task.data.y))
    other.x, other.y, other._fused, other.steppers = torch.zeros_like(task.x), torch.zeros_like(task.y), {}, {}
    return other
