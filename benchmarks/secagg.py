"""The secure sum beside the functions of Flower's SecAgg+, on the same vectors."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import fedveil as fv
from benchmarks.clock import in_turns
from fedveil.core import identity, message
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.message import Answer, Count, Question, Weights
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.privacy import SecureSum, skellam
from fedveil.privacy.secagg import shamir
from fedveil.privacy.secagg.client import stages
from fedveil.privacy.secagg.records import Advertise, Deal, Mask, Share, Unmask
from fedveil.privacy.secagg.server import ask_sum
from fedveil.privacy.skellam import SumNoise


@message.kind
class _Vector(Answer, frozen=True):
    additive = True
    update: Weights
    records: Count = 1


@message.kind
class _Give(Question, frozen=True):
    reply = _Vector


@dataclass(frozen=True)
class _Given(fv.Method):
    """Clients hold their vectors already, so that only the protocol takes time."""

    name: ClassVar[str] = "benchmark-sum"
    vectors: Sequence[Tensor] = ()
    secure: SecureSum = field(default_factory=SecureSum)

    def init_state(self, task: fv.Task) -> fv.State:
        return fv.State(task.initial)

    def round(self, state: Any, cohort: fv.Cohort) -> fv.State:
        return fv.State(state.weights + ask_sum(cohort, _Give(), self.secure).mean("update"))

    @property
    def handlers(self) -> Mapping[type[Question], Callable[..., Sequence[Answer]]]:
        return stages(self.secure, ({_Give: self.give}, _Vector))

    def give(self, stack: fv.ClientStack, question: _Give) -> list[_Vector]:
        return [_Vector(self.vectors[k]) for k in stack.clients]


del fv.METHODS[_Given.name]


class _Recorder(LocalEngine):
    """Keeps each client's letters, and what it held in its notes before each."""

    def __init__(self) -> None:
        super().__init__(stack=1, workers=1, wire="bytes")
        self.kept: dict[tuple[int, int], tuple[Letter, dict[str, Any]]] = {}

    def deliver(self, letters: Sequence[Letter], deadline: float | None) -> Any:
        assert self._clients
        for letter in letters:
            self.kept[letter.kind, letter.client] = letter, dict(self._clients.notes.get(letter.client, {}))
        return super().deliver(letters, deadline)

    def again(self, kind: type[Question], client: int = 0) -> Reply:
        """A client's answer to a stage, once more, from what it held then; no signature was seen before."""
        assert isinstance(self._clients, Clients)
        letter, notes = self.kept[kind.kind, client]
        self._clients.notes[client] = dict(notes)
        identity._valid.cache_clear()
        return self._clients.answer([letter])[0]


def _recorded(weights: int, clients: int) -> tuple[_Recorder, list[Tensor], dict[str, float]]:
    """One secure sum, recorded: its engine, the vectors, and its bytes up by stage and client."""
    x, y = torch.zeros(clients, weights // 2 - 1), torch.arange(clients) % 2
    data = from_tensors(x, y, x[:2], y[:2], classes=2)
    task = fv.Task(nn.Linear(weights // 2 - 1, 2), data, fv.split("iid", data, clients, fv.Seed.root(0)))
    draw = fv.Seed.root(1).torch()
    vectors = [0.1 * torch.randn(weights, generator=draw) for _ in range(clients)]
    engine = _Recorder()
    result = fv.run(task, _Given(vectors), rounds=1, cohort=clients, engine=engine)
    (row,) = result.ledger.rows
    assert not row.missing
    return engine, vectors, {each.stage: each.up / each.answered for each in row.secure}


def million() -> dict[str, float]:
    """A client of 20 masks 1,000,000 floats, against Flower's stage on the same (goals: 25 ms, 4.2 MB, a quarter).

    The noise of user-level differential privacy, which Flower's stage does not have, is measured apart.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        engine, vectors, sent = _recorded(1_000_000, 20)
        theirs = _flower(20, 11)
        parameters = [vector.numpy() for vector in vectors[:1]]
        ours, flowers = in_turns(lambda: engine.again(Mask), lambda: theirs.masked(parameters), turns=15)
        share = SumNoise(sigma=1.0).variance(2**19 - 1, 11)
        (noise,) = in_turns(lambda: skellam.draw(bytes(32), share, 1_000_000), turns=5)
    finally:
        torch.set_num_threads(threads)
    return {
        "masked input, milliseconds": ours * 1e3,
        "Flower's, milliseconds": flowers * 1e3,
        "Flower's / ours": flowers / ours,
        "masked input, bytes": sent["masked"],
        "Flower's, bytes": theirs.masked(parameters),
        "Skellam noise, milliseconds": noise * 1e3,
    }


def hundred() -> dict[str, float]:
    """Keys and shares of a client of 100 that masks with all others, against Flower's (goal: 5 ms)."""
    engine, _, sent = _recorded(1_000, 100)
    theirs = _flower(100, 51)
    secret = bytes(range(32))
    advertise, share, deal, unmask, split, flowers, flower_split = in_turns(
        lambda: engine.again(Advertise),
        lambda: engine.again(Share),
        lambda: engine.again(Deal),
        lambda: engine.again(Unmask),
        lambda: shamir.share(secret, 51, range(1, 101)),
        theirs.shared,
        theirs.split,
        turns=5,
    )
    return {
        "Shamir shares of one secret, milliseconds": split * 1e3,
        "keys, milliseconds": advertise * 1e3,
        "shares, milliseconds": share * 1e3,
        "dealt, milliseconds": deal * 1e3,
        "unmask, milliseconds": unmask * 1e3,
        "Flower's Shamir shares, milliseconds": flower_split * 1e3,
        "Flower's shares stage, milliseconds": flowers * 1e3,
        "Flower's shares stage / ours": flowers / share,
        "keys, shares, dealt and unmask, bytes up": sum(sent[stage] for stage in sent if stage != "masked"),
    }


@dataclass
class _Flower:
    """Nodes of Flower's SecAgg+ after the key exchange; the first is timed."""

    states: list[Any]
    keys: Any
    threshold: int

    @cached_property
    def ciphertexts(self) -> dict[str, Any]:
        """What the other nodes dealt to the first."""
        from flwr.common.secure_aggregation.secaggplus_constants import Key

        dealt = [_mod()._share_keys(state, self.keys) for state in self.states]
        first = [d[Key.CIPHERTEXT_LIST][d[Key.DESTINATION_LIST].index(0)] for d in dealt[1:]]
        return {Key.CIPHERTEXT_LIST: first, Key.SOURCE_LIST: list(range(1, len(dealt)))}

    def masked(self, parameters: list[np.ndarray[Any, Any]]) -> int:
        from flwr.common import ndarrays_to_parameters

        given = ndarrays_to_parameters(parameters)
        found = _mod()._collect_masked_vectors(self.states[0], self.ciphertexts, 1, given)
        return sum(map(len, next(iter(found.values()))))

    def shared(self) -> object:
        return _mod()._share_keys(self.states[0], self.keys)

    def split(self) -> object:
        from flwr.common.secure_aggregation.crypto.shamir import create_shares

        return create_shares(bytes(range(32)), self.threshold, len(self.keys))


def _mod() -> Any:
    """Flower's module, which a function of the same name hides in its package."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    return importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")


def _flower(nodes: int, threshold: int) -> _Flower:
    """So many nodes that are all neighbours."""
    from flwr.app import ConfigRecord
    from flwr.common.secure_aggregation.secaggplus_constants import Key

    setup: dict[str, Any] = {
        Key.SAMPLE_NUMBER: nodes,
        Key.SHARE_NUMBER: nodes,
        Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: 1.0,
        Key.TARGET_RANGE: 1 << 20,
        Key.MOD_RANGE: 1 << 32,
        Key.MAX_WEIGHT: 1.0,
    }
    flower = _mod()
    states = [flower.SecAggPlusState(nid=k) for k in range(nodes)]
    advertised = [flower._setup(state, ConfigRecord(dict(setup))) for state in states]
    keys: Any = {str(k): tuple(pair.values()) for k, pair in enumerate(advertised)}
    return _Flower(states, keys, threshold)
