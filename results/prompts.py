"""Weights inside of SmolLM2-135M for SST-2: forward passes only, beside backpropagation.

    python examples/smollm2.py keep SMOLLM2 --layer 20 --precision bfloat16 --out FOLDER
    PYTHONPATH=examples python results/prompts.py FOLDER --out results/prompts.json

SMOLLM2 is written by `examples/smollm2.py prepare`. Layers 21 to 30 run on the last token of each prompt. The scales of
the four norms in the first two of them are trained, or adapters of rank 8 in all ten. `frozen.py` explains the steps.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import finetune_language_model as example
import frozen
import heads
import smollm2

import fedveil as fv
from fedveil.attacks.matrix import Case

ADAPTERS = ("*adapter*",)
folder = Path()


def read(given: Path) -> fv.Data:
    """The prompts of a folder, whose model `build` uses."""
    global folder
    folder = given
    return smollm2.data(given)


@functools.cache
def model(given: Path, lora: int) -> Any:
    return smollm2.model(given, lora=lora)


def build(data: fv.Data, clients: int, kind: str = "iid", seed: int = 0, lora: int = 0) -> fv.Task:
    """The task of training some weights of the model, on prompts that a split of some kind deals to the clients."""
    most = -(-len(data.x) // clients) if kind == "iid" else None
    split = fv.split(kind, data, clients, fv.Seed.root(seed), max_records=most)
    return fv.Task(model(folder, lora), data, split, trainable=ADAPTERS if lora else example.scales(folder))


# ---------------------------------------------------------------------------------------------------- the methods


def forward(directions: int = 16, batch: int = 32, rate: float = 0.02, **more: Any) -> fv.Baffle:
    """Slopes in bfloat16, but for the trained layers and the loss."""
    settings = {"precision": "bfloat16", "sigma": 1e-3, "memory": example.MEMORY} | more
    return heads.forward(directions, batch, rate, **settings)


def private(epsilon: float, directions: int = 16, clip: float = 1.0, rate: float = 0.02) -> fv.Baffle:
    """Slopes of records of which each is clipped and noised, with a budget for all rounds together."""
    privacy = fv.DpSgd(clip=clip, budget=epsilon, delta=1e-3, noise="auto")
    return heads.forward(directions, 32, rate, privacy=privacy, memory=example.MEMORY)


def local(rate: float, epochs: int = 1) -> fv.LocalTraining:
    return fv.LocalTraining("adam", rate, epochs=epochs, batch=32, beta2=0.99, precision="bfloat16", schedule="cosine")


def fedavg(rate: float = 0.005, **more: Any) -> fv.FedAvg:
    """Backpropagation of the same weights: an epoch of local Adam, and whole updates both ways."""
    return fv.FedAvg(local(rate), **more)


def top_k(rate: float = 0.005, share: float = 0.12) -> fv.FedAvg:
    """The same with the largest entries of an update, both ways, and error feedback."""
    return fedavg(rate, up=fv.TopK(share), down=fv.TopK(share), feedback=True)


def sketch(rate: float = 0.005, numbers: int = 400) -> fv.FedAvg:
    """The same with sketches, both ways, and error feedback."""
    return fedavg(rate, up=fv.Sketch(numbers), down=fv.Sketch(numbers), feedback=True)


# ---------------------------------------------------------------------------------------------------- the study


def one_party(data: fv.Data, rounds: int = 3, rate: float = 0.005, **changes: Any) -> dict[str, Any]:
    """One party has all training sentences, and takes an epoch in each round."""
    found = heads.train(build(data, 1, **changes), fedavg(rate), rounds, 1, every=rounds)
    return {"records": len(data.x), "accuracy": found["rounds"][-1]["accuracy"]}


def untrained(data: fv.Data) -> dict[str, Any]:
    task = build(data, 1)
    return {"records": 0, "accuracy": task.evaluate(task.initial)["accuracy"]}


def slopes(name: str, method: fv.Method, records: int = 1, rounds: int = 1) -> Case:
    """A case of messages that are attacked; those of several rounds, together."""
    return Case(name, method, records, rounds, ("slopes over rounds",) if rounds > 1 else ())


SUMMED = functools.partial(forward, secure=fv.SecureSum(clip=64))
STUDY = frozen.Study(
    "prompts.py",
    "sentences",
    sweep={
        "forward": [(forward, 200, {"rate": rate}) for rate in (0.005, 0.01, 0.02)],
        "fedavg": [(fedavg, 12, {"rate": rate}) for rate in (0.002, 0.005)],
        "top-k": [(top_k, 15, {"rate": 0.005, "share": 0.12})],
        "sketch": [(sketch, 15, {"rate": 0.005, "numbers": 400})],
        "lora": [(fedavg, 8, {"rate": rate}) for rate in (0.001, 0.002)],
        "secure": [(SUMMED, 60, {"directions": 32, "rate": 0.01})],
        "private-8": [(functools.partial(private, 8), 40, {"clip": 1.0, "rate": 0.01})],
    },
    read=read,
    build=build,
    changes={"lora": {"lora": 8}},
    alone={
        "all training sentences": one_party,
        "all training sentences, adapters": functools.partial(one_party, rate=0.001, lora=8),
        "nothing: the whole network as it is": untrained,
    },
    splits=("iid",),
    attacks=(
        slopes("4 slopes, 1 round", forward(4)),
        slopes("16 slopes, 1 round", forward(16)),
        slopes("16 slopes of 32 sentences, 1 round", forward(16), 32),
        slopes("16 slopes of 32 sentences, 5 rounds", forward(16), 32, 5),
        slopes("16 private slopes, 1 round, ε = 8", private(8, 16, 1.0)),
        slopes("16 slopes in a secure sum", SUMMED(16)),
        slopes("16 slopes of 32 sentences in a secure sum", SUMMED(16), 32),
    ),
)

if __name__ == "__main__":
    frozen.main(__doc__, STUDY)
