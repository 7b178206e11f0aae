"""What the tests of inversion share: small tasks on digits, victims' gradients, and tasks that hold no records."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

import fedveil as fv

SEED = fv.Seed.root(0)
DATA = fv.load("digits")
SPLIT = fv.split("iid", DATA, 4, SEED)


def task(*layers: nn.Module) -> fv.Task:
    """A task on digits whose weights are drawn, with deviation 1/8."""
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=SEED.child(i).torch()) / 8)
    return fv.Task(model, DATA, SPLIT)


def dense(hidden: int = 32, act: type[nn.Module] = nn.Tanh) -> fv.Task:
    return task(nn.Flatten(), nn.Linear(64, hidden), act(), nn.Linear(hidden, 10))


def victims(task: fv.Task, count: int, n: int) -> tuple[Tensor, Tensor]:
    """The first records: x [V, n, 1, 8, 8] and y [V, n]."""
    return task.x[: count * n].unflatten(0, (count, n)), task.y[: count * n].view(count, n)


def gradients(task: fv.Task, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The weights that victims were sent and their gradients there, both [V, d]."""
    w = task.initial.expand(len(x), -1)
    return w, task.gradient(w, x, y, torch.ones(x.shape[:2]))[0]


def blind(task: fv.Task) -> fv.Task:
    """The same task without its records."""
    other, x, y = copy.copy(task), torch.zeros_like(task.x), torch.zeros_like(task.y)
    other.x, other.y = x, y
    other.test_x, other.test_y = torch.zeros_like(task.test_x), torch.zeros_like(task.test_y)
    other.data = replace(task.data, x=x, y=y, test_x=other.test_x, test_y=other.test_y)
    return other
