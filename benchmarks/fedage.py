"""What FedAGE's codes cost a client beside its training, for an update of 1.66 million weights."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import fedveil as fv
from fedveil import models
from fedveil.codecs.autoencoder import Code, Pair, linear
from fedveil.codecs.fedage import Send
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors


def fedage() -> dict[str, float]:
    """Encoding 1,663,370 weights against 5 epochs of 600 records (goal on a GPU: at most 0.1), and decoding a mean."""
    gpu = torch.cuda.is_available()
    device, clients = ("cuda", 10) if gpu else ("cpu", 1)
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(600 * clients, 1, 28, 28, generator=draw), torch.randint(0, 10, (600 * clients,), generator=draw)
    data = from_tensors(x, y, x[:10], y[:10])
    model = models.build("fedage-mnist", data.input, 10)
    task = fv.Task(model, data, fv.split("iid", data, clients, fv.Seed.root(0)), device=device)
    stack = ClientStack(task, tuple(range(clients)), 1, fv.Seed.root(0), fv.Seed.root(0), [], [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fv.LocalTraining(lr=0.1, steps=8, batch=100).train(stack, task.initial)
        training = (
            _seconds(lambda: fv.LocalTraining(lr=0.1, epochs=5, batch=100).train(stack, task.initial), task) / clients
        )
        figures = {"weights": float(task.layout.size), "training, seconds a client": training}
        for name, code, share in (
            ("linear, b = 64", Code(kind="linear"), 1),
            ("b = 16, width 64", Code(16, 8, width=64), 1),
            ("b = 64, width 512", Code(), 1 if gpu else 64),  # of the blocks, and the rest is as fast
        ):
            pair = (linear(code) if code.kind == "linear" else Pair(code).requires_grad_(False)).to(
                device
            )  # speed is all
            blocks = clients * -(-task.layout.size // code.block) // share
            parts = torch.randint(0, code.levels + 1, (2 * blocks, code.block)).float().to(device)
            codes = pair.encode(parts)
            encoding = share / clients * _seconds(lambda p=pair, q=parts: p.encode(q), task)
            decoding = share / clients * _seconds(lambda p=pair, q=codes: p.decode(q), task)
            figures |= {f"{name}: encoding / training": encoding / training, f"{name}: decoding, seconds": decoding}
        updates = 0.01 * torch.randn(clients, task.layout.size, generator=draw).to(device)
        codec = fv.FedAgeCodec(code="linear")
        tuned = codec.at(task, Send(0.05, codec.digest), fv.Seed.root(0))
        whole = _seconds(lambda: tuned.encode(task, updates, updates, stack.seeds("encoding"), None), task) / clients
        figures["rounding, shuffling and the linear code / training"] = whole / training
        return figures
    finally:
        torch.set_num_threads(threads)


def _seconds(what: Callable[[], object], task: fv.Task) -> float:
    """Of one call, the better of two."""
    taken = []
    for _ in range(2):
        began = time.perf_counter()
        what()
        if task.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken)
