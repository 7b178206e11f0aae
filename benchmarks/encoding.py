"""FedSynth's encoding of a whole cohort: stacked and graphed, against the same mathematics one client after another."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

import fedveil as fv
from fedveil import models
from fedveil.codecs.fedsynth import FedSynthCodec
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.gpu.context import using


def fedsynth() -> dict[str, float]:
    """FedSynth's fit, 10 clients: one stack (on a GPU a graph a step) against a client at a time in eager mode."""
    gpu = torch.cuda.is_available()
    shape, name, records = ((1, 28, 28), "mcmahan-cnn", 600) if gpu else ((1, 8, 8), "digits-cnn", 140)
    codec = FedSynthCodec() if gpu else FedSynthCodec(batches=3, epochs=1, fits=20)
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(10 * records, *shape, generator=draw), torch.randint(0, 10, (10 * records,), generator=draw)
    data = from_tensors(x, y, x[:10], y[:10])
    model = models.build(name, data.input, 10)
    task = fv.Task(model, data, fv.split("iid", data, 10, fv.Seed.root(0)), device="cuda" if gpu else "cpu")
    updates = 0.01 * torch.randn(10, task.layout.size, generator=draw).to(task.device)
    torch.set_float32_matmul_precision("high")  # as the engine has it, for both
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        together = _seconds(codec, task, updates, range(10))
        one = replace(codec, fits=8) if gpu else codec
        with using(capture=False):
            alone = sum(_seconds(one, task, updates[k : k + 1], [k]) for k in range(2)) * 5 * codec.fits / one.fits
    finally:
        torch.set_num_threads(threads)
    return {
        "weights": task.layout.size,
        "one stack, milliseconds a step": together / codec.fits * 1e3,
        "one after another, milliseconds a step": alone / codec.fits * 1e3,
        "one after another / one stack": alone / together,
    }


def _seconds(codec: FedSynthCodec, task: fv.Task, updates: torch.Tensor, clients: range | list[int]) -> float:
    seeds = [fv.Seed.root(k) for k in clients]
    taken = []
    for _ in range(2):  # the first call warms up
        stack = ClientStack(task, tuple(clients), 1, fv.Seed.root(0), fv.Seed.root(0), [], [])
        began = time.perf_counter()
        codec.encode(task, task.initial.expand(len(updates), -1), updates, seeds, stack)
        if task.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return taken[-1]
