"""What the tests of probes share: a stack of a small task."""

import torch

import fedveil as fv
from fedveil.core.message import Slots
from fedveil.core.stack import ClientStack
from toys import linear_task


def stack(task: fv.Task, clients=None, memory=None) -> ClientStack:
    chosen = tuple(range(len(task.clients))) if clients is None else clients
    held = memory or [Slots()] * len(chosen)
    return ClientStack(task, chosen, 1, fv.Seed.root(0), fv.Seed.root(0), held, [{} for _ in chosen])


def gradients(task: fv.Task, w: torch.Tensor) -> torch.Tensor:
    """Each client's gradient over all its records, [C, d]."""
    index, mask = (torch.from_numpy(a) for a in task.rows(range(len(task.clients))).padded())
    return task.gradient(w.expand(len(task.clients), -1), task.x[index], task.y[index], mask)[0]


__all__ = ["gradients", "linear_task", "stack"]
