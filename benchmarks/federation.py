"""A round of FedAvg, 10 of 100 clients, one local epoch, against a plain PyTorch loop that takes the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

import torch
import torch.nn.functional as F

import fedveil as fv
from benchmarks.clock import in_turns
from fedveil import models
from fedveil.core.loop import Federation
from fedveil.core.sampling import CohortSampler
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine, RayEngine


class Loop:
    """FedAvg as one writes it by hand: one thread, one client after another, one module, `torch.optim.SGD`.

    Cohorts and shuffles are drawn as fedveil draws them, so both train on the same batches.
    """

    def __init__(self, task: fv.Task, model: torch.nn.Module, batch: int, lr: float, cohort: int = 10) -> None:
        self.task, self.batch, self.lr, self.cohort = task, batch, lr, cohort
        self.model = model.to(task.device)
        self.weights = [p.detach().clone() for p in self.model.parameters()]

    def round(self, number: int, seed: fv.Seed) -> None:
        cohort = CohortSampler(size=self.cohort).draw(self.task, seed.child("round", number, "cohort"))
        self.weights = self.merged(*self.summed(cohort, number, seed))

    def summed(self, cohort: Sequence[int], number: int, seed: fv.Seed) -> tuple[list[torch.Tensor], int]:
        """Train each client of a cohort; return the sum of what `add` makes of them, and their records."""
        total = [torch.zeros_like(p) for p in self.weights]
        records = 0
        for client in cohort:
            with torch.no_grad():
                for p, q in zip(self.model.parameters(), self.weights, strict=True):
                    p.copy_(q)
            optimizer = torch.optim.SGD(self.model.parameters(), self.lr)
            rng = seed.child("round", number, "client", client, "shuffle").numpy()
            order = torch.from_numpy(rng.permutation(self.task.clients[client])).to(self.task.device)
            for rows in order.split(self.batch):
                optimizer.zero_grad()
                F.cross_entropy(self.model(self.task.x[rows]), self.task.y[rows]).backward()
                optimizer.step()
            self.add(total, len(order))
            records += len(order)
        return total, records

    @torch.no_grad()
    def add(self, total: list[torch.Tensor], records: int) -> None:
        """Add the trained weights of one client."""
        for t, p in zip(total, self.model.parameters(), strict=True):
            t.add_(p, alpha=records)

    def merged(self, total: list[torch.Tensor], records: int) -> list[torch.Tensor]:
        """The weights after the round."""
        return [t / records for t in total]

    def flat(self) -> torch.Tensor:
        """The weights as one vector, [d]."""
        return torch.cat([p.reshape(-1) for p in self.weights])


def digits() -> dict[str, float]:
    """digits CNN, batch 10: dispatch-bound, so stacking pays (goal: at most 0.5 of the loop)."""
    return _race(fv.load("digits"), "digits-cnn", batch=10, lr=0.3, turns=40, learn=250)


def lenet5() -> dict[str, float]:
    """LeNet5 on MNIST-shaped data, batch 32: arithmetic-bound, so cores pay (goal: at most 0.7 of the loop)."""
    return _race(_blobs(60_000, (1, 28, 28)), "lenet5", batch=32, lr=0.05, turns=4, learn=6)


def _race(data: fv.Data, model_name: str, batch: int, lr: float, turns: int, learn: int) -> dict[str, float]:
    seed = fv.Seed.root(0)
    model = models.build(model_name, data.input, data.classes)
    models.initialise(model, seed.child("weights"))
    task = fv.Task(model, data, fv.split("iid", data, 100, seed))
    method = fv.FedAvg(local=fv.LocalTraining(lr=lr, epochs=1, batch=batch))
    ours = Federation(task, method, LocalEngine(), CohortSampler(size=10), seed, evaluate_every=10**8)
    loop = Loop(task, model, batch, lr)
    state, done = method.init_state(task), 0

    def our_round() -> None:
        nonlocal state, done
        done += 1
        state, _ = ours.step(state, done, 10**9)

    def their_round() -> None:
        loop.round(done, seed)

    threads = torch.get_num_threads()
    try:
        apart = 0.0
        for _ in range(learn):
            our_round()
            torch.set_num_threads(1)
            their_round()
            torch.set_num_threads(threads)
            apart = apart or float((state.weights - loop.flat()).abs().max())  # later on, rounding is amplified
        accuracy = task.evaluate(state.weights)["accuracy"], task.evaluate(loop.flat())["accuracy"]

        def single() -> None:
            torch.set_num_threads(1)
            their_round()
            torch.set_num_threads(threads)

        fast, slow = in_turns(our_round, single, turns=turns)
    finally:
        ours.engine.close()
    return {
        "loop, milliseconds a round": slow * 1e3,
        "fedveil, milliseconds a round": fast * 1e3,
        "fedveil / loop": fast / slow,
        "largest difference of weights after a round": apart,
        f"accuracy of the loop after {learn} rounds": accuracy[1],
        f"accuracy of fedveil after {learn} rounds": accuracy[0],
    }


def many_clients() -> dict[str, float]:
    """Set-up of 100,000 clients (goal: 2 s) and a round with them against one with 100 of the same size."""
    data = _blobs(1_000_000, (1, 8, 8))
    seed = fv.Seed.root(0)
    model = models.build("digits-cnn", data.input, data.classes)
    small = from_tensors(data.x[:1000], data.y[:1000], data.test_x, data.test_y)
    began = time.perf_counter()
    task = fv.Task(model, data, fv.split("iid", data, 100_000, seed))
    many = _stepper(task, seed)
    taken = time.perf_counter() - began
    few = _stepper(fv.Task(model, small, fv.split("iid", small, 100, seed)), seed)
    with_many, with_few = in_turns(many, few, turns=40)
    return {
        "set-up of 100,000 clients, seconds": taken,
        "100 clients, milliseconds a round": with_few * 1e3,
        "100,000 clients / 100 clients, a round": with_many / with_few,
    }


def ray() -> dict[str, float]:
    """FedAvg, 10 of 100 clients, digits CNN and LeNet5: the Ray engine against the local one, two workers each."""
    seed, found = fv.Seed.root(0), dict[str, float]()
    cases = {"digits": ("digits-cnn", fv.load("digits"), 10), "lenet5": ("lenet5", _blobs(60_000, (1, 28, 28)), 32)}
    for name, (model, data, batch) in cases.items():
        task = fv.Task(models.build(model, data.input, data.classes), data, fv.split("iid", data, 100, seed))
        with closing(RayEngine(workers=2)) as actors, closing(LocalEngine(workers=2)) as threads:
            began = time.perf_counter()
            on_ray, local = (_stepper(task, seed, engine, batch) for engine in (actors, threads))
            on_ray()
            found[f"{name}, first round on Ray, seconds"] = time.perf_counter() - began
            slow, fast = in_turns(on_ray, local, turns=20)
        found[f"{name}, local, milliseconds a round"] = fast * 1e3
        found[f"{name}, Ray, milliseconds a round"] = slow * 1e3
        found[f"{name}, Ray / local"] = slow / fast
    return found


def _stepper(task: fv.Task, seed: fv.Seed, engine: LocalEngine | None = None, batch: int = 10) -> Callable[[], None]:
    method = fv.FedAvg(local=fv.LocalTraining(batch=batch))
    engine = engine or LocalEngine()
    federation = Federation(task, method, engine, CohortSampler(size=10), seed, evaluate_every=10**8)
    state, done = method.init_state(task), 0

    def step() -> None:
        nonlocal state, done
        done += 1
        state, _ = federation.step(state, done, 10**9)

    return step


def _blobs(records: int, shape: tuple[int, ...]) -> fv.Data:
    """Ten noisy patterns: data of a given shape that can be learned, made and not downloaded."""
    draw = fv.Seed.root(0).torch()
    y = torch.randint(0, 10, (records,), generator=draw)
    patterns = torch.randn(10, *shape, generator=draw)
    x = torch.randn(records, *shape, generator=draw).mul_(2).add_(patterns[y])
    cut = max(1000, records // 100)
    return from_tensors(x, y, x[:cut], y[:cut], name="blobs")
