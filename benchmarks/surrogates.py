"""FedLAP: a round of a whole cohort against one client after another, and per-example gradients against hooks."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedveil as fv
from benchmarks.clock import in_turns
from fedveil import models
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.gpu.context import using
from fedveil.gpu.graphs import one_thread
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.methods.surrogates.sets import Distil
from fedveil.privacy.dpsgd import clipped, clipped_sum

CLIENTS = 5


def fifty() -> dict[str, float]:
    """A round of FedLAP, 5 clients × 2 classes × 50 images: one stack against a client at a time in eager mode."""
    return _fedlap(50)


def ten() -> dict[str, float]:
    """A round of FedLAP with 10 images a class instead of 50."""
    return _fedlap(10)


def _fedlap(images: int) -> dict[str, float]:
    """Of a round, fit to server. On a GPU the stack's steps are graphs, and compiled ones."""
    task = made(400) if torch.cuda.is_available() else made(200, small=True)
    gpu = task.device.type == "cuda"
    method = FedLap(images=images, passes=1, batches=40 if gpu else 10, steps=100 if gpu else 20)
    with one_thread():
        taken = {"one stack": _seconds(method, task, [tuple(range(CLIENTS))])}
        if gpu:
            with using(compile=True):
                taken["one stack, compiled"] = _seconds(method, task, [tuple(range(CLIENTS))])
        with using(capture=False):
            alone = _seconds(method, task, [(k,) for k in range(CLIENTS)])
    figures = {"weights": float(task.layout.size), "one after another: seconds": alone}
    for name, seconds in taken.items():
        figures[f"{name}: seconds"] = seconds
        figures[f"one after another / {name}"] = alone / seconds
    return figures


def _seconds(method: FedLap, task: fv.Task, stacks: list[tuple[int, ...]]) -> float:
    """What a round of these stacks takes, after one of few steps."""
    for one in (replace(method, batches=2, steps=8), method):
        began = time.perf_counter()
        round_of(one, task, stacks)
        _wait(task.device)
        taken = time.perf_counter() - began
    return taken


def round_of(method: FedLap, task: fv.Task, stacks: list[tuple[int, ...]]) -> None:
    """Fit the sets of these stacks of clients, then train the server on them."""
    answers = []
    for clients in stacks:
        blank = [fv.Slots()] * len(clients)
        stack = ClientStack(task, clients, 1, fv.Seed.root(0), fv.Seed.root(0), blank, [{} for _ in clients])
        answers += method.distil(stack, Distil(task.initial, 2 * method.images))
    method.optimise(task, task.initial, answers)


def per_example() -> dict[str, float]:
    """Clipped sums of per-example gradients, 5 clients: stacked as DP-SGD does it here, against hooks on a module.

    The hooks are what Opacus installs, written out: each layer's input and the gradient of its output give the
    gradient of every example by one product. A module has one client's weights, so clients come one after another.
    """
    task = made(200)
    batch = 256 if task.device.type == "cuda" else 32
    draw = torch.Generator().manual_seed(0)
    own = torch.stack([torch.from_numpy(task.clients[k]) for k in range(CLIENTS)])
    rows = own[:, torch.randint(0, own.shape[1], (batch,), generator=draw)].to(task.device)
    weights = task.initial.expand(CLIENTS, -1).clone()
    mask = torch.ones(CLIENTS, batch, device=task.device)
    hooked = Hooked(task)

    def ours() -> Tensor:
        total = clipped_sum(task, weights, task.x[rows], task.y[rows], mask, 1.0)
        _wait(task.device)
        return total

    def theirs() -> Tensor:
        sums = [clipped(hooked(w, task.x[r], task.y[r]), 1.0).sum(0) for w, r in zip(weights, rows, strict=True)]
        _wait(task.device)
        return torch.stack(sums)

    with one_thread():
        apart = float((ours() - theirs()).abs().max())
        fast, slow = in_turns(ours, theirs, turns=5)
    return {
        "examples": CLIENTS * batch,
        "hooks, milliseconds": slow * 1e3,
        "fedveil, milliseconds": fast * 1e3,
        "hooks / fedveil": slow / fast,
        "largest difference of the sums": apart,
    }


class Hooked:
    """Per-example gradients of convolutions, linear layers and group norms by hooks."""

    def __init__(self, task: fv.Task) -> None:
        self.task, self.model = task, copy.deepcopy(task.model)
        self.found: dict[str, Tensor] = {}
        for name, layer in self.model.named_modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_hook(partial(self._passed, name))

    def __call__(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """[d], [B, …], [B] -> [B, d]."""
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.task.layout.split(w).values(), strict=True):
                parameter.copy_(value)
        F.cross_entropy(self.model(x), y, reduction="sum").backward()
        self.model.zero_grad()
        return torch.cat([self.found[layer.name].flatten(1) for layer in self.task.layout.layers], 1)

    def _passed(self, name: str, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.register_hook(partial(self._back, name, layer, args[0].detach()))

    def _back(self, name: str, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        """The gradient of each example from a layer's input and the gradient of its output."""
        if isinstance(layer, nn.Linear):
            weight, bias = torch.einsum("bo,bi->boi", y, x), y
        elif isinstance(layer, nn.Conv2d):
            windows = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)  # type: ignore[arg-type]
            weight = torch.einsum("bon,bin->boi", y.flatten(2), windows)
            bias = y.sum((2, 3))
        else:
            assert isinstance(layer, nn.GroupNorm)
            weight, bias = (F.group_norm(x, layer.num_groups, eps=layer.eps) * y).sum((2, 3)), y.sum((2, 3))
        self.found[f"{name}.weight"], self.found[f"{name}.bias"] = weight, bias


def made(records: int, small: bool = False) -> fv.Task:
    """5 clients with 2 classes each, FedLAP's network or the digits'."""
    gpu = torch.cuda.is_available()
    shape, name = ((1, 8, 8), "digits-cnn") if small else ((1, 28, 28), "convnet")
    draw = fv.Seed.root(0).torch()
    y = torch.arange(10).repeat(records // 2)
    x = torch.randn(len(y), *shape, generator=draw) + torch.randn(10, *shape, generator=draw)[y]
    data = from_tensors(x, y, x[:10], y[:10])
    split = fv.split("classes", data, CLIENTS, fv.Seed.root(0), classes=2)
    torch.set_float32_matmul_precision("high")  # as the engine has it
    return fv.Task(models.build(name, shape, 10), data, split, device="cuda" if gpu else "cpu")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
