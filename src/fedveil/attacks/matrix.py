"""One attack on many methods: the same records behind every message, so that methods and defences can be compared.

Each row is a run of its own, whose clients hold a few records each. These are the conditions that favour the attacker.
All runs begin from the same initial weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from fedveil import models
from fedveil.attacks.estimate import nothing
from fedveil.attacks.exposure import Attack, Exposure, Pictures, attempts, control, scored
from fedveil.attacks.scores import Nearness
from fedveil.attacks.seen import Seen, view
from fedveil.codecs.fedage import FedAgeCodec
from fedveil.codecs.fedsynth import FedSynthCodec
from fedveil.codecs.qsgd import Qsgd
from fedveil.codecs.tofu import TofuCodec
from fedveil.codecs.topk import TopK
from fedveil.core import ledger
from fedveil.core.data import Data, Split
from fedveil.core.loop import Federation
from fedveil.core.method import Method
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.setup import init_state, settle
from fedveil.core.task import Task
from fedveil.engines.local import LocalEngine
from fedveil.methods.baffle.baffle import Baffle
from fedveil.methods.fedavg import FedAvg
from fedveil.methods.fedsgd import FedSGD
from fedveil.methods.presets import FedAge
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.privacy.dpsgd import DpSgd
from fedveil.privacy.secagg.settings import SecureSum
from fedveil.runs.messages import MessageLog, Rounds, Truths, kept_rounds, read_round, read_truth
from fedveil.train.local import LocalTraining
from fedveil.train.optimizers import ServerOptimizer

MODEL = "digits-cnn"
CLIENTS = 10  # in every round of every row
SHARE = 32  # records of which a row's clients hold the first few
TRAINING_STEPS, BATCH, LR = 500, 32, 0.3  # of the network that is trained
DELTA = 1e-2  # below 1 / the records of a client

Tell = Callable[[str], object]
Album = Mapping[str, Pictures]


@dataclass(frozen=True)
class Case:
    """A row before it is run.

    name:    for the table
    method:  with all its settings
    records: of each client
    rounds:  all of which are kept
    kinds:   of estimates that make rows; empty for all
    trained: whether the network has been trained on other records before
    small:   whether the network is the smaller one, whose d directions can be solved for
    """

    name: str
    method: Method
    records: int = 1
    rounds: int = 1
    kinds: tuple[str, ...] = ()
    trained: bool = False
    small: bool = False


class Row(msgspec.Struct, frozen=True):
    """A row of the matrix: what a run's messages of one kind expose, at which ε and in how many bytes."""

    case: str
    records: int  # of a client
    bytes_up: int  # of a client in all rounds
    epsilon: float | None
    seconds: float
    exposure: Exposure | None  # None: no message says anything about one client
    why: str = ""


CONTROL = Case("control", FedSGD())


class Matrix(msgspec.Struct, frozen=True):
    """What `fedveil audit --matrix` writes to `matrix.json`.

    settings:    of the attack, and the seed
    environment: versions, machine and command
    """

    data: str
    model: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    control: Nearness
    rows: list[Row]


def cases() -> Iterator[Case]:
    """The rows, in the order of the table."""
    one, some = LocalTraining(lr=0.1), LocalTraining(lr=0.1, batch=2)
    for records in (1, 8):
        yield Case("raw gradient", FedSGD(), records)
    yield Case("raw gradient, trained network", FedSGD(), 1, trained=True)
    yield Case("raw gradient, trained network", FedSGD(), 8, trained=True)
    yield Case("FedAvg, 1 epoch in batches of 2", FedAvg(some), 8)
    yield Case("FedAvg, 5 epochs in batches of 2", FedAvg(replace(some, epochs=5)), 8)
    fedage = FedAge(one, up=FedAgeCodec(block=16, cohort=5, width=64), server=ServerOptimizer(lr=2.0))
    for records in (1, 8):
        yield Case("top-k, 6%", FedAvg(one, up=TopK(share=0.06)), records)
        yield Case("top-k, 1%", FedAvg(one, up=TopK(share=0.01)), records)
        yield Case("QSGD, 4 bits", FedAvg(one, up=Qsgd()), records)
        synthetic = FedSynthCodec(batches=3, batch=11, epochs=1, fits=75, best=False)
        yield Case("FedSynth", FedAvg(one, up=synthetic), records)
        yield Case("TOFU", FedAvg(one, up=TofuCodec(points=32, steps=200, lr=0.15, decay="late")), records)
        yield Case("FedAGE", fedage, records)
    yield Case("FedAGE, summed", replace(fedage, secure=SecureSum()))
    for k in (8, 100):
        for rounds in (1, 20):
            kinds = ("slopes over rounds",) if rounds > 1 else ("slopes",)
            yield Case(f"BAFFLE, K = {k}, {_rounds(rounds)}", Baffle(directions=k), 1, rounds, kinds)
    yield Case("BAFFLE, K = d = 810, small network", Baffle(directions=810), 1, 1, ("slopes",), small=True)
    lap = FedLap(images=1, batches=10, batch=8, image_lr=5.0)
    yield Case("FedLAP", lap, 8)
    yield Case("FedLAP from real records", replace(lap, init="real"), 8)
    private: dict[str, Any] = {"weighting": "equal", "region": "constant", "init": "noise", "mse": 0.0}
    yield Case("FedLAP-DP, ε = 8", replace(lap, **private, privacy=_private(8)), 8)
    for epsilon in (8, 2):
        yield Case(f"DP-FedAvg, ε = {epsilon}", FedAvg(one, privacy=_private(epsilon)))
    yield Case("secure sum", FedAvg(one, secure=SecureSum()))
    yield Case("secure sum", FedAvg(LocalTraining(lr=0.1, batch=8), secure=SecureSum()), 8)


def _private(epsilon: float) -> DpSgd:
    return DpSgd(noise="auto", clip=1.0, delta=DELTA, budget=epsilon)


def _rounds(count: int) -> str:
    return f"{count} round{'s' if count > 1 else ''}"


# ---------------------------------------------------------------------------------------------------- a row


def task_of(case: Case, data: Data, seed: Seed, device: str = "cpu") -> Task:
    """The task of a row. Whatever the number of records, client k holds the first ones of the same shuffled share."""
    n, order = case.records, seed.child("records").numpy().permutation(len(data.x))
    rows = order.reshape(-1)[: CLIENTS * SHARE].reshape(CLIENTS, SHARE)[:, :n].astype(np.int64)
    held = tuple(tuple(sorted(set(data.y[own].tolist()))) for own in rows)
    model = small_network(data) if case.small else models.build(MODEL, data.input, data.classes)
    models.initialise(model, seed.child("weights"))
    task = Task(model, data, Split(rows.flatten(), np.arange(CLIENTS + 1) * n, "victims", n, held), device=device)
    if case.trained:
        task.initial = _trained(task, torch.from_numpy(order[CLIENTS * SHARE :].copy()), seed.child("training"))
    return task


def small_network(data: Data) -> nn.Module:
    """A smooth convolutional network; on the digits it has 810 weights."""
    channels, height, width = data.input
    return nn.Sequential(
        *(nn.Conv2d(channels, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        nn.Linear(8 * ((height - 2) // 2) * ((width - 2) // 2), data.classes),
    )


def _trained(task: Task, others: Tensor, seed: Seed) -> Tensor:
    """Weights [d] after some steps on records that no client holds."""
    w, rng = task.initial[None], seed.numpy()
    for _ in range(TRAINING_STEPS):
        rows = others[torch.from_numpy(rng.choice(len(others), BATCH, replace=False))].to(task.device)
        ones = torch.ones(1, BATCH, device=task.device)
        w = w - LR * task.gradient(w, task.x[rows][None], task.y[rows][None], ones)[0]
    return w[0]


def played(case: Case, task: Task, seed: Seed, folder: Path) -> tuple[Seen, Truths, list[ledger.Row]]:
    """Run a row's method. Returns what the server has of all rounds, the truth and the ledger."""
    sampler = CohortSampler(size=CLIENTS)
    method = settle(task, case.method, sampler, case.rounds)
    federation = Federation(task, method, LocalEngine(), sampler, seed, evaluate_every=case.rounds)
    log = federation.witness = MessageLog(folder, Rounds("all"))
    federation.clients.witnessed = True
    if account := method.account(task, sampler):
        federation.tally = account.tally()
    state, rows = init_state(task, method, sampler), list[ledger.Row]()
    for number in range(1, case.rounds + 1):
        log.begin(number, state)
        state, row = federation.step(state, number, case.rounds)
        log.end(number, state)
        rows.append(row)
    federation.engine.close()
    numbers = kept_rounds(folder)
    seen = view("server", task, method, seed, [read_round(folder, n, method) for n in numbers])
    return seen, {n: read_truth(folder, n) for n in numbers}, rows


def attacked(
    case: Case, task: Task, seed: Seed, how: Attack, checked: Nearness | None, tell: Tell
) -> tuple[list[Row], Album]:
    """The rows of a case, one for each kind of estimate, and pictures of victims by kind."""
    began = time.monotonic()
    tell(f"{case.name}: training {_rounds(case.rounds)}")
    with TemporaryDirectory() as folder:
        seen, truths, rounds = played(case, task, seed, Path(folder))
        made = attempts(seen, how, lambda said: tell(f"{case.name}: {said}"), case.kinds)
        found, pictures = scored(task, seen, made, truths, checked)
    sent, spent = sum(row.bytes_up for row in rounds) // CLIENTS, rounds[-1].epsilon
    seconds = time.monotonic() - began
    if not found:
        return [Row(case.name, case.records, sent, spent, seconds, None, nothing(seen.method))], {}
    return [Row(case.name, case.records, sent, spent, seconds, each) for each in found], pictures


def checked(data: Data, seed: Seed, how: Attack, tell: Tell, device: str = "cpu") -> Nearness:
    """The control of all rows."""
    return control(task_of(CONTROL, data, seed, device), how.inversion, seed.child("control"), tell)
