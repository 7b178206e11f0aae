"""Small tasks for surrogate methods, and stacks of their clients."""

import numpy as np
import torch
from torch import nn

import fedveil as fv
from fedveil.core.message import Slots
from fedveil.data import from_tensors


def task_of(sizes=(12, 12, 12, 12), hands=((0, 1), (1, 2), (0, 2), (0, 1)), seed=0) -> fv.Task:
    """A tanh net on 4 features and 3 classes; client k has sizes[k] records of the classes hands[k], in turn."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.tensor(hand).repeat(-(-n // len(hand)))[:n] for n, hand in zip(sizes, hands, strict=True)])
    x = torch.randn(len(y), 4, generator=draw) + 2 * torch.eye(4)[y]
    data = from_tensors(x, y, x, y, classes=3)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2)
    held = tuple(tuple(sorted({*hand})) for hand in hands)
    return fv.Task(model, data, fv.Split(np.arange(len(y)), starts, "by hand", max(sizes), held))


def stack_of(task, clients=None, round_=1, memory=None, notes=None) -> fv.ClientStack:
    clients = tuple(range(len(task.clients))) if clients is None else clients
    blank = [Slots()] * len(clients)
    seed, secret = fv.Seed.root(0).child("round", round_), fv.Seed.root(9)
    return fv.ClientStack(task, clients, round_, seed, secret, memory or blank, notes or [{} for _ in clients])


def images_task(convolutions=2) -> fv.Task:
    """The layers of FedLAP's network on 6×6 pictures: convolutions, a group for each channel, ReLU, average pooling."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(2).repeat(16)
    x = torch.randn(len(y), 1, 6, 6, generator=draw) + y[:, None, None, None]
    data = from_tensors(x, y, x, y, classes=2)
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.ReLU(), nn.AvgPool2d(2)]
    layers += [nn.Conv2d(3, 3, 3, padding=1)] * (convolutions - 1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(27, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)
    return fv.Task(model, data, fv.Split(np.arange(32), np.array([0, 16, 32]), "by hand", 16, ((0, 1), (0, 1))))
