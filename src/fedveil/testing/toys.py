"""A toy task, runs on it, and an engine whose replies can be changed on their way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.cohort import Engine
from fedveil.data import from_tensors
from fedveil.engines.local import LocalEngine

SIZES = (6, 9, 12, 15, 18)  # records of each client
CLASSES = 3
HIDDEN = 12
ROUNDS = 2
Change = Callable[[Letter, Reply], Reply]


def toy_task() -> fv.Task:
    """Return a network of 243 weights on 60 images of 4 × 4 pixels and 3 classes. Five clients hold 6 to 18 of them."""
    draw = fv.Seed.root(0).child("toy").torch()
    x = torch.randn(sum(SIZES), 1, 4, 4, generator=draw)
    y = (x.flatten(1) @ torch.randn(16, CLASSES, generator=draw)).argmax(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)
    data = from_tensors(x, y, x, y, classes=CLASSES)
    starts = np.cumsum([0, *SIZES]).astype(np.int64)
    held = tuple(tuple(range(CLASSES)) for _ in SIZES)  # public, as methods with differential privacy need it
    split = fv.Split(np.arange(sum(SIZES), dtype=np.int64), starts, "toy", max(SIZES), held)
    return fv.Task(model, data, split)


class Observed(LocalEngine):
    """A local engine that shows its clients, and passes each reply through `change`."""

    def __init__(self, stack: int | None = None, change: Change | None = None, wire: str = "bytes") -> None:
        super().__init__(stack=stack, workers=1, wire=wire)
        self.change = change
        self.seen: list[Letter] = []

    def open(self, clients: Clients) -> None:
        self.clients = clients
        super().open(clients)

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Iterable[Reply]:
        self.seen += letters
        asked = {letter.client: letter for letter in letters}
        replies = super().deliver(letters, deadline)
        return [self.change(asked[reply.client], reply) for reply in replies] if self.change else replies


@dataclass(frozen=True)
class Trial:
    """What came of a run: weights [d], rows without their seconds, and the engine."""

    weights: Tensor
    rows: list[fv.Row]
    engine: Any

    def equals(self, other: Trial) -> bool:
        """Whether two runs have the same weights and rows, bit for bit."""
        return torch.equal(self.weights, other.weights) and self.rows == other.rows


def trial(
    method: fv.Method,
    task: fv.Task,
    *,
    engine: Engine | None = None,
    folder: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Trial:
    """Run a method on all clients with fixed private randomness. An exception becomes one sentence."""
    used = Observed() if engine is None else engine
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = fv.run(
                task,
                method,
                rounds=ROUNDS,
                cohort=len(task.clients),
                engine=used,
                folder=folder,
                stop=stop,
                insecure_test_noise=0,
            )
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise AssertionError(f"{label(method)}: a run on a toy task failed with {told}; fix the method") from error
    rows = [row.untimed() for row in result.ledger.rows]
    return Trial(result.weights, rows, used)


def label(thing: object) -> str:
    """What a sentence calls a method or a codec."""
    return str(getattr(thing, "name", type(thing).__name__))


def require(fine: object, sentence: str) -> None:
    """Raise an AssertionError with a sentence; unlike `assert`, also where Python is told to optimise."""
    if not fine:
        raise AssertionError(sentence)


def dropped(client: int, round_: int, serial: int) -> Change:
    """Replace one reply of one client by none."""
    return tampered(client, round_, serial, lambda reply: Reply(client, problem="failed: left out on purpose"))


def tampered(client: int, round_: int, serial: int, change: Callable[[Reply], Reply]) -> Change:
    """Change one reply of one client."""

    def apply(letter: Letter, reply: Reply) -> Reply:
        where = letter.envelope
        hit = (where.client, where.round, where.serial) == (client, round_, serial) and reply.frame
        return change(reply) if hit else reply

    return apply
