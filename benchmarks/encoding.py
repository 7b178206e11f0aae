"""Fits of synthetic updates, FedSynth's and TOFU's: a cohort stacked and graphed, against one client at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fedveil as fv
from fedveil import models
from fedveil.codecs.base import Codec
from fedveil.codecs.fedsynth import FedSynthCodec
from fedveil.codecs.tofu import TofuCodec
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.gpu.context import using
from fedveil.gpu.graphs import one_thread


def fedsynth() -> dict[str, float]:
    """FedSynth's fit, 10 clients: one stack (on a GPU a graph a step) against a client at a time in eager mode."""
    gpu = torch.cuda.is_available()
    shape, name, records = ((1, 28, 28), "mcmahan-cnn", 600) if gpu else ((1, 8, 8), "digits-cnn", 140)
    codec = FedSynthCodec() if gpu else FedSynthCodec(batches=3, epochs=1, fits=20)
    task, updates = cohort(name, shape, 10, records)
    with one_thread():
        together = _seconds(codec, task, updates)
        one = replace(codec, fits=8) if gpu else codec
        with using(capture=False):
            alone = sum(_seconds(one, task, updates[k : k + 1], [k]) for k in range(2)) * 5 * codec.fits / one.fits
    return {
        "weights": task.layout.size,
        "one stack, milliseconds a step": together / codec.fits * 1e3,
        "one after another, milliseconds a step": alone / codec.fits * 1e3,
        "one after another / one stack": alone / together,
    }


def tofu() -> dict[str, float]:
    """TOFU's fit of 64 points, LeNet5, 10 clients: one stack (on a GPU compiled) against a client at a time.

    A round with proxies both ways has two fits of 1,000 steps: the server's, of one update, and the clients'.
    """
    return _tofu("lenet5", (1, 28, 28), 10, 300 if torch.cuda.is_available() else 5)


def tofu_vgg13() -> dict[str, float]:
    """TOFU's fit of 64 points, VGG13, 5 clients."""
    return _tofu("vgg13", (3, 32, 32), 5, 40)


def _tofu(name: str, shape: tuple[int, ...], clients: int, steps: int) -> dict[str, float]:
    codec = TofuCodec(steps=steps)
    task, updates = cohort(name, shape, clients, 64)
    with one_thread():
        with using(compile=torch.cuda.is_available()):
            up, down = (_step(codec, task, updates[:rows]) for rows in (clients, 1))
        with using(capture=False):
            alone = clients * _step(replace(codec, steps=6), task, updates[:1])
    return {
        f"{name}: weights": task.layout.size,
        f"{name}: {clients} clients in one stack, milliseconds a step": up * 1e3,
        f"{name}: the server's update, milliseconds a step": down * 1e3,
        f"{name}: one after another, milliseconds a step": alone * 1e3,
        f"{name}: one after another / one stack": alone / up,
        f"{name}: fits of a round both ways, seconds": (up + down) * TofuCodec.steps,
    }


def _step(codec: TofuCodec, task: fv.Task, updates: Tensor) -> float:
    """Seconds a step, without the start of a fit."""
    short = replace(codec, steps=max(1, codec.steps // 3))
    few, many = (_seconds(one, task, updates) for one in (short, codec))
    return (many - few) / (codec.steps - short.steps)


def cohort(name: str, shape: tuple[int, ...], clients: int, records: int) -> tuple[fv.Task, Tensor]:
    """A task of random records, so many a client, and random updates [C, d] to fit."""
    gpu, draw = torch.cuda.is_available(), fv.Seed.root(0).torch()
    total = clients * records
    x, y = torch.randn(total, *shape, generator=draw), torch.randint(0, 10, (total,), generator=draw)
    data = from_tensors(x, y, x[:10], y[:10])
    split = fv.split("iid", data, clients, fv.Seed.root(0))
    task = fv.Task(models.build(name, data.input, 10), data, split, device="cuda" if gpu else "cpu")
    torch.set_float32_matmul_precision("high")  # as the engine has it
    return task, 0.01 * torch.randn(clients, task.layout.size, generator=draw).to(task.device)


def encode(codec: Codec[Any], task: fv.Task, updates: Tensor, clients: Sequence[int] = ()) -> None:
    """Encode updates [C, d] of these clients, by default of the first C."""
    own = tuple(clients) or tuple(range(len(updates)))
    stack = ClientStack(task, own, 1, fv.Seed.root(0), fv.Seed.root(0), [], [])
    codec.encode(task, task.initial.expand(len(own), -1), updates, [fv.Seed.root(k) for k in own], stack)


def _seconds(codec: Codec[Any], task: fv.Task, updates: Tensor, clients: Sequence[int] = ()) -> float:
    for _ in range(2):  # the first call warms up
        began = time.perf_counter()
        encode(codec, task, updates, clients)
        if task.device.type == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    return taken
