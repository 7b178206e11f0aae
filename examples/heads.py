"""Train a new layer on features from a frozen network, with forward passes only or by backpropagation.

`finetune_images.py` and `finetune_sentences.py` are programs that use this module.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traffic import Traffic, recorded

import fedveil as fv
from fedveil.data import from_folder, from_tensors, hold_out

HELD = 0.1  # of the training records, to choose settings on, where the file has none for that
ROUNDS = {"fedavg": 40, "top-k": 40, "sketch": 40}


# ---------------------------------------------------------------------------------------------------- the task


def read(path: Path, width: int | None = None) -> fv.Data:
    """Features of a file by examples/efficientnet.py, in `width` coordinates, or those of any file that fedveil reads.

    Coordinates are along the first directions of the basis, which follows from the published weights. Each record's are
    then standardised by themselves, so a client needs to know nothing of anybody else's records.
    """
    with np.load(path, allow_pickle=False) as held:
        if "basis" in held:
            basis = torch.from_numpy(held["basis"])[:, :width]
            x, test_x = (shortened(torch.from_numpy(held[f"{part}_x"]), basis) for part in ("train", "test"))
            y, test_y, labels = held["train_y"], held["test_y"], tuple(map(str, held["labels"]))
            data = from_tensors(x, y, test_x, test_y, labels=labels, name=str(held["data"]))
        else:
            data = from_folder(path)
    return data if data.validation_x is not None else hold_out(data, HELD, fv.Seed.root(0))


def shortened(features: Tensor, basis: Tensor) -> Tensor:
    """Features [n, F] along a basis [F, width], each row standardised."""
    return torch.cat([F.layer_norm(part.float() @ basis, basis.shape[1:]) for part in features.split(4096)])


def head(input: Sequence[int], classes: int) -> nn.Linear:
    """The layer that is trained. It starts with zeros, so that all classes are equally likely."""
    layer = nn.Linear(*input, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def build(data: fv.Data, clients: int, kind: str = "iid", seed: int = 0) -> fv.Task:
    """The task of training a new layer on features, which a split of some kind deals to the clients.

    The greatest number of records that a client may hold is public: differential privacy needs it.
    """
    most = -(-len(data.x) // clients) if kind == "iid" else None
    split = fv.split(kind, data, clients, fv.Seed.root(seed), max_records=most)
    return fv.Task(head(data.input, data.classes), data, split)


# ---------------------------------------------------------------------------------------------------- the methods


def forward(directions: int = 64, batch: int = 128, rate: float = 0.01, **more: Any) -> fv.Baffle:
    """Slopes along `directions`, of `batch` records a client, with Adam and replay."""
    server = {"optimizer": "adam", "lr": rate, "tau": 1e-8, "schedule": "cosine"} | more.pop("server", {})
    settings: dict[str, Any] = {"clip": None, "down": "replay", "centered": True}
    return fv.Baffle(directions=directions, batch=batch, **settings | more, server=fv.ServerOptimizer(**server))


def fedavg(rate: float = 0.1, epochs: int = 1, batch: int = 32, **more: Any) -> fv.FedAvg:
    """Backpropagation of the same layer: local SGD, and whole updates both ways."""
    return fv.FedAvg(fv.LocalTraining("sgd", rate, epochs=epochs, batch=batch, schedule="cosine"), **more)


def top_k(share: float = 0.02, **more: Any) -> fv.FedAvg:
    """The same with the largest entries of an update, both ways, and error feedback."""
    return fedavg(**{"up": fv.TopK(share), "down": fv.TopK(share), "feedback": True} | more)


def sketch(numbers: int = 100, **more: Any) -> fv.FedAvg:
    """The same with sketches, both ways, and error feedback."""
    return fedavg(**{"up": fv.Sketch(numbers), "down": fv.Sketch(numbers), "feedback": True} | more)


METHODS: dict[str, Callable[..., fv.Method]] = {
    "forward": forward,
    "fedavg": fedavg,
    "top-k": top_k,
    "sketch": sketch,
}


def train(
    task: fv.Task,
    method: fv.Method,
    rounds: int,
    cohort: int,
    seed: int = 0,
    every: int = 10,
    tell: Callable[[dict[str, float]], object] = lambda row: None,
) -> dict[str, Any]:
    """Train, and return what was reached before and after, by round, and the mean bytes of a client in a round."""
    rows: list[dict[str, float]] = []
    traffic = Traffic()

    def told(row: dict[str, float]) -> None:
        rows.append(row)
        tell(row)

    observer = recorded(told, traffic)
    fv.run(task, method, rounds=rounds, cohort=cohort, seed=seed, evaluate_every=every, observer=observer)
    before = task.evaluate(task.initial)
    return {"weights": task.layout.size, "before": before, "rounds": rows, **traffic.a_round}


def shown(row: dict[str, float]) -> str:
    """A line on a round."""
    held = f", validation {100 * row['validation_accuracy']:.1f}%" if "validation_accuracy" in row else ""
    sent = f"bytes a client: {row['up']:,.0f} up, {row['down']:,.0f} down"
    return f"round {row['round']:.0f}: test {100 * row['accuracy']:.1f}%{held}, {sent}"


def main(told: str | None, forward_rounds: int, width: int | None = None, argv: Sequence[str] | None = None) -> None:
    """The command line of a program that trains a head, with its text and its defaults."""
    rounds = ROUNDS | {"forward": forward_rounds}
    parser = argparse.ArgumentParser(description=told, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="the file of features")
    parser.add_argument("--method", choices=METHODS, default="forward", help="default forward")
    parser.add_argument("--directions", type=int, help="K of the forward method (default 64)")
    parser.add_argument("--batch", type=int, help="records of a question, or of a local step (default 128, or 32)")
    parser.add_argument("--rate", type=float, help="learning rate of the server's Adam, or of local SGD")
    parser.add_argument(
        "--rounds", type=int, help=f"default {forward_rounds}, or {ROUNDS['fedavg']} with backpropagation"
    )
    parser.add_argument("--split", default="iid", help="iid (default), dirichlet, shards or classes")
    parser.add_argument("--clients", type=int, default=32, help="default 32")
    parser.add_argument("--cohort", type=int, default=8, help="clients a round (default 8)")
    if width:
        parser.add_argument("--width", type=int, default=width, help=f"features that the layer sees (default {width})")
    parser.add_argument("--evaluate-every", type=int, default=10, help="rounds (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    options = parser.parse_args(argv)
    if options.directions is not None and options.method != "forward":
        parser.error(f"--directions is for --method forward, not {options.method}; leave it out")
    task = build(read(options.features, options.width if width else None), options.clients, options.split, options.seed)
    given = {name: getattr(options, name) for name in ("directions", "batch", "rate")}
    method = METHODS[options.method](**{name: value for name, value in given.items() if value is not None})
    print(f"{task.layout.size:,} trained weights, {len(task.clients)} clients")
    count = options.rounds or rounds[options.method]
    found = train(
        task, method, count, options.cohort, options.seed, options.evaluate_every, lambda row: print(shown(row))
    )
    print(f"bytes a client and round: {found['up_a_round']:,.0f} up, {found['down_a_round']:,.0f} down")
    if options.out:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.out.write_text(json.dumps({"settings": settings} | found, indent=1) + "\n", encoding="utf-8")
