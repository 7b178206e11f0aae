"""`python -m benchmarks --floor`: how close the inner loops come to what the device's memory and arithmetic allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter

import torch
from torch.profiler import ProfilerActivity, profile

import fedveil as fv
from benchmarks import encoding, opponents, probes, surrogates
from benchmarks.count import Counter, difference
from fedveil.codecs.fedsynth import FedSynthCodec
from fedveil.codecs.tofu import TofuCodec
from fedveil.core.stack import ClientStack
from fedveil.gpu.context import current, using
from fedveil.gpu.graphs import one_thread
from fedveil.methods.surrogates.fedlap import FedLap

GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Inner:
    """An inner loop.

    run:       do so many steps of it, with what is done once before and after them
    few, many: steps of the two runs whose difference is timed
    times:     how many of these steps a figure is of
    multiply:  how the device multiplies in it: float32, tf32 or float16
    """

    run: Callable[[int], object]
    few: int
    many: int
    times: int = 1
    multiply: str = "tf32"


def measure(inner: Inner) -> dict[str, float]:
    """Count and time a step: its time, its floor, and how many times its floor that is."""
    bandwidth, speed = memory_speed(), product_speed(inner.multiply if GPU else "float32")
    with one_thread():
        with using(capture=False):  # steps are the same whether or not they are replayed
            counted = []
            for steps in (1, 2):
                with Counter() as counter:
                    inner.run(steps)
                counted.append(counter)
        taken = []
        for _ in range(3):  # the first warms up
            few, many = (_seconds(partial(inner.run, steps)) for steps in (inner.few, inner.many))
            taken.append((many - few) / (inner.many - inner.few))
    figures = {key: inner.times * value for key, value in difference(*counted[::-1], bandwidth, speed).items()}
    step = inner.times * statistics.median(taken[1:]) * 1e3
    return figures | {
        "measured, milliseconds": step,
        "measured / floor": step / figures["floor, milliseconds"],
        "memory, gigabytes a second": bandwidth / 1e9,
        "products, billion operations a second": speed / 1e9,
    }


def busiest(inner: Inner, most: int = 16) -> list[dict[str, float | str]]:
    """The kernels that take most of a step (on a CPU the operators): name, calls and milliseconds a step."""
    kind = ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU
    seen = []
    with one_thread():
        inner.run(inner.few)  # warms up
        for steps in (inner.few, inner.many):
            with profile(activities=[kind]) as profiler:
                inner.run(steps)
                _wait()
            time_of = attrgetter("self_device_time_total" if GPU else "self_cpu_time_total")
            seen.append({each.key: (each.count, time_of(each)) for each in profiler.key_averages()})
    few, many = seen
    scale = inner.times / (inner.many - inner.few)
    table = []
    for name, (calls, microseconds) in many.items():
        before = few.get(name, (0, 0.0))
        each = (calls - before[0]) * scale, (microseconds - before[1]) * scale / 1e3
        table.append({"kernel": name, "calls": each[0], "milliseconds": each[1]})
    table.sort(key=lambda row: -row["milliseconds"])
    rest = table[most:]
    left = {"kernel": f"{len(rest)} others", **{k: sum(r[k] for r in rest) for k in ("calls", "milliseconds")}}
    return [*table[:most], *[left] * bool(rest)]


@cache
def memory_speed() -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.ones(1 << (28 if GPU else 24), device=_device())
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _best(lambda: target.copy_(source))


@cache
def product_speed(multiply: str) -> float:
    """Operations a second of a large matrix product."""
    before, size = torch.get_float32_matmul_precision(), 8192 if GPU else 1024
    torch.set_float32_matmul_precision("high" if multiply == "tf32" else "highest")
    factor = torch.ones(size, size, device=_device(), dtype=torch.float16 if multiply == "float16" else torch.float32)
    try:
        with one_thread():
            return float(2 * size**3 / _best(lambda: factor @ factor))
    finally:
        torch.set_float32_matmul_precision(before)


def _best(work: Callable[[], object]) -> float:
    return min(_seconds(work) for _ in range(8))


def _seconds(work: Callable[[], object]) -> float:
    _wait()
    began = time.perf_counter()
    work()
    _wait()
    return time.perf_counter() - began


def _wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def _device() -> str:
    return "cuda" if GPU else "cpu"


# ---------------------------------------------------------------------------------------------------- the loops


def fedsynth() -> Inner:
    """A step of FedSynth's fit, 10 clients."""
    shape, name, records = ((1, 28, 28), "mcmahan-cnn", 600) if GPU else ((1, 8, 8), "digits-cnn", 140)
    codec = FedSynthCodec() if GPU else FedSynthCodec(batches=3, epochs=1)
    task, updates = encoding.cohort(name, shape, 10, records)
    return Inner(
        lambda steps: encoding.encode(replace(codec, fits=steps), task, updates), *((20, 60) if GPU else (2, 8))
    )


def tofu() -> Inner:
    """A step of TOFU's fit of 64 points, LeNet5, 10 clients; on a GPU compiled."""
    task, updates = encoding.cohort("lenet5", (1, 28, 28), 10 if GPU else 2, 64)

    def run(steps: int) -> None:
        with using(compile=GPU and current().capture):
            encoding.encode(TofuCodec(steps=steps), task, updates)

    return Inner(run, *((100, 400) if GPU else (1, 4)))


def tofu_vgg13() -> Inner:
    """A step of TOFU's fit of 64 points, VGG13, 5 clients; on a CPU one client and 4 points."""
    task, updates = encoding.cohort("vgg13", (3, 32, 32), 5 if GPU else 1, 64)
    codec = TofuCodec(points=64 if GPU else 4)
    return Inner(
        lambda steps: encoding.encode(replace(codec, steps=steps), task, updates), *((10, 40) if GPU else (1, 3))
    )


def fedlap(images: int = 50) -> Inner:
    """A round of FedLAP, 5 clients, with 50 images a class unless its name says 10; on a GPU compiled."""
    task = surrogates.made(400) if GPU else surrogates.made(200, small=True)
    method, parts = FedLap(images=images, passes=1), 20 if GPU else 10
    clients, widths = [tuple(range(surrogates.CLIENTS))], (2, 5) if GPU else (1, 2)

    def run(steps: int) -> None:
        batches, descents = (steps * width for width in widths)
        with using(compile=GPU and current().capture):
            surrogates.round_of(replace(method, batches=batches, steps=descents), task, clients)

    return Inner(run, *((5, 15) if GPU else (1, 3)), times=parts)


def probing(name: str, precision: torch.dtype = torch.float32) -> Inner:
    """Losses of 100 perturbed models a client, 10 clients with 32 records; on a CPU 8 and 1."""
    run = probes.prepared(name, precision)[0]

    def repeated(steps: int) -> None:
        for _ in range(steps):
            run()

    return Inner(repeated, 1, 3, multiply=str(precision).removeprefix("torch."))


def fedavg() -> Inner:
    """A training step in batches of 10: 50 clients, pfl-research's CIFAR-10 network; on a CPU 25 and a small CNN."""
    network, clients = ("cifar-cnn", 50) if GPU else ("small-cnn", 25)
    work = opponents.Workload(network, _device(), clients, clients)
    task, root = work.task, fv.Seed.root(0)

    def run(steps: int) -> None:
        blank = [fv.Slots()] * clients
        stack = ClientStack(task, tuple(range(clients)), 1, root, root, blank, [{} for _ in range(clients)])
        fv.LocalTraining(lr=opponents.LR, steps=steps, batch=opponents.BATCH).train(stack, task.initial)

    torch.set_float32_matmul_precision("high")  # as the engine has it
    return Inner(run, *((20, 100) if GPU else (200, 600)))


FLOORS: dict[str, Callable[[], Inner]] = {
    "fedsynth": fedsynth,
    "tofu": tofu,
    "tofu-vgg13": tofu_vgg13,
    "fedlap": fedlap,
    "fedlap-10": partial(fedlap, 10),
    "lenet-probes": partial(probing, "baffle-lenet"),
    "wrn-probes": partial(probing, "wrn-10-2"),
    "fedavg": fedavg,
}
if GPU:  # a CPU has no fast kernels for float16
    FLOORS |= {
        "lenet-probes-half": partial(probing, "baffle-lenet", torch.float16),
        "wrn-probes-half": partial(probing, "wrn-10-2", torch.float16),
    }
