"""What forward-only clients cost beside inference and backpropagation, and how good their estimates are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import fedveil as fv
from benchmarks.clock import in_turns
from fedveil import models
from fedveil.core.directions import LAWS, Directions
from fedveil.data import from_tensors
from fedveil.gpu.context import using
from fedveil.gpu.graphs import one_thread
from fedveil.methods.baffle.memory import peak
from fedveil.methods.baffle.probing import Prober, forward_only
from fedveil.runs import recipe

BATCH = 32


def passes() -> dict[str, float]:
    """Records a second through perturbed models, and that as a share of plain batched inference of one model.

    In float16 both are, which a CPU has no fast kernels for. On a GPU the kernels of forward.py are compared with
    products of windows as well.
    """
    figures = {}
    for name in ("baffle-lenet", "wrn-10-2"):
        for precision in (torch.float32, torch.float16) if torch.cuda.is_available() else (torch.float32,):
            figures |= _passes(name, precision)
    return figures


def _passes(name: str, precision: torch.dtype) -> dict[str, float]:
    probing, inference, records = prepared(name, precision)

    def products() -> None:
        with using(kernels=False):
            probing()

    named = f"{name}, {str(precision).removeprefix('torch.')}"
    with one_thread():
        probed, plain, *other = in_turns(probing, inference, *[products] * torch.cuda.is_available(), turns=3)
    return {
        f"{named}: probing, records a second": records / probed,
        f"{named}: inference, records a second": records / plain,
        f"{named}: probing / inference": plain / probed,
    } | {f"{named}: kernels / products": each / probed for each in other}


def prepared(name: str, precision: torch.dtype) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Probing, plain inference of as many records, and how many records that is."""
    device, clients, count = ("cuda", 10, 100) if torch.cuda.is_available() else ("cpu", 1, 8)
    task, x, y = _made(name, device, clients)
    prober = dataclasses.replace(_prober(task), precision=precision)
    keys, share = torch.arange(clients, device=device), torch.full((clients, BATCH, 1), 1 / BATCH, device=device)
    weights, pictures = task.initial.expand(clients, -1), x.flatten(0, 1).to(precision)
    one = task.initial.to(precision)

    def probing() -> None:
        with forward_only(task.device):
            prober.slopes(weights, keys, x, y, share, count)
        _wait(task)

    def inference() -> None:
        with forward_only(task.device):
            for _ in range(count + 1):
                task.f(one, pictures)
        _wait(task)

    return probing, inference, clients * BATCH * (count + 1)


def memory() -> dict[str, float]:
    """Bytes of tensors a client holds: forward passes within 4 MB against backpropagation, batch 32 (goal: 0.1)."""
    figures = {}
    for name in ("baffle-lenet", "wrn-10-2"):
        task, x, y = _made(name, "cpu", 1)
        mask = torch.ones(1, BATCH)
        derived = peak(lambda t=task, a=(task.initial[None], x, y, mask): t.gradient(*a))
        share = mask[..., None] / BATCH
        for megabytes in (1, 4, None):
            prober = _prober(task, None if megabytes is None else megabytes << 20)
            arguments = task.initial[None], torch.tensor([1]), x, y, share, 4
            with forward_only(task.device):
                probed = peak(lambda p=prober, a=arguments: p.slopes(*a))
            setting = "by default" if megabytes is None else f"memory = {megabytes}"
            figures[f"{name}: probing / backpropagation, {setting}"] = probed / derived
        figures[f"{name}: backpropagation, MB"] = derived / 1e6
    return figures


def variance() -> dict[str, float]:
    """Cosine of an estimate to the true gradient at equal forward passes, digits, mean of 20 draws; beside √(K/n)."""
    task = recipe.read("digits/fedavg").build()
    index = torch.from_numpy(task.rows([0]).padded()[0])
    x, y = task.x[index], task.y[index]
    mask = torch.ones(1, x.shape[1])
    weights = task.initial
    for _ in range(20):  # a little trained, where gradients are no longer all alike
        weights = weights - 0.3 * task.gradient(weights[None], x, y, mask)[0][0]
    true = task.gradient(weights[None], x, y, mask)[0]
    figures = {}
    for budget in (32, 128, 512):
        for scheme in ("forward", "central"):
            count = budget - 1 if scheme == "forward" else budget // 2
            for law in LAWS:
                prober = Prober(task, Directions.of(law, task.layout.size, count), 1e-4, scheme)
                found = [_estimate(prober, weights, key, x, y, mask, count) for key in range(20)]
                mean = torch.stack([cosine_similarity(g, true) for g in found]).mean()
                figures[f"{budget} passes, {scheme}, {law}"] = float(mean)
            figures[f"{budget} passes, {scheme}, √(K/n)"] = (count / task.layout.size) ** 0.5
    return figures


def _estimate(prober: Prober, w: Tensor, key: int, x: Tensor, y: Tensor, mask: Tensor, count: int) -> Tensor:
    with forward_only(prober.task.device), one_thread():
        return prober.gradient(w[None], torch.tensor([key * 7919]), x, y, mask, count)


def _made(name: str, device: str, clients: int) -> tuple[fv.Task, Tensor, Tensor]:
    """A task of random pictures with a batch for each client."""
    draw = fv.Seed.root(0).torch()
    x, y = (
        torch.randn(clients * BATCH, 1, 28, 28, generator=draw),
        torch.randint(0, 10, (clients * BATCH,), generator=draw),
    )
    data = from_tensors(x, y, x[:10], y[:10])
    model = models.build(name, data.input, 10, activation="hardswish")
    task = fv.Task(model, data, fv.split("iid", data, clients, fv.Seed.root(0)), device=device)
    return task, task.x.unflatten(0, (clients, BATCH)), task.y.unflatten(0, (clients, BATCH))


def _prober(task: fv.Task, memory: int | None = None) -> Prober:
    return Prober(task, Directions.of("gaussian", task.layout.size, 100), 1e-4, "forward", memory=memory)


def _wait(task: fv.Task) -> None:
    if task.device.type == "cuda":
        torch.cuda.synchronize()
