"""Fine-tune a language model to tell good reviews from bad ones, with clients that only run it forward.

    python examples/smollm2.py toy --out toy                    a tiny random model, to try this program
    python examples/finetune_language_model.py toy --rounds 2 --clients 4 --directions 4

    python examples/smollm2.py prepare --gguf … --sst2 … --out smollm2      SmolLM2-135M and SST-2, see there
    python examples/finetune_language_model.py smollm2 --device cuda --precision bfloat16 --out language.json

    python examples/smollm2.py keep smollm2 --layer 20 --precision bfloat16 --out kept      for a CPU, see below
    python examples/finetune_language_model.py kept --precision bfloat16 --directions 16 --batch 64 --rate 0.02

Each client holds some training sentences. In a round, 8 clients measure how the loss of some of their sentences changes
along K random directions of the trained weights, and send K numbers. The server takes a step and sends K numbers, from
which every client repeats the step (`method.down = "replay"`). Nothing else is sent, and nothing is differentiated.

By default the scales of the norms in front of attention in the middle layers are trained.

With a folder that `keep` wrote, only the layers after the 20th are trained, and only what they do with a prompt's last
token. A client runs the frozen model once on each of its sentences. It keeps the keys and values that these layers need
of the tokens before, 250 kB for a sentence. A pass then runs 1 token through 10 layers instead of 34 tokens through 30.
By default the scales of all norms in the first two of these layers are trained.

The JSON file has, by round, the accuracy on test and validation sentences and the bytes that a client has sent and
received so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import smollm2
import torch
from traffic import recorded

import fedveil as fv
from fedveil.methods.baffle.probing import forward_only

MEMORY = 128  # megabytes of a pass at last tokens on a CPU, so that all directions run at once


def scales(folder: Path) -> tuple[str, ...]:
    """The names of the scales that are trained by default."""
    return ("layers.[01].*_norm.scale",) if smollm2.is_kept(folder) else middle(folder)


def middle(folder: Path, kind: str = "scale") -> tuple[str, ...]:
    """The names of the scales, or gains, of the norms before attention in the middle layers: 12 to 21 of 30."""
    layers = smollm2.described(folder)["config"]["layers"]
    return tuple(f"layers.{i}.attention_norm.{kind}" for i in range(2 * layers // 5, -(-11 * layers // 15)))


def build(
    folder: Path,
    trainable: Sequence[str],
    clients: int = 32,
    device: str = "cpu",
    seed: int = 0,
    held: int | None = None,
    **changes: Any,
) -> fv.Task:
    """The task of a prepared folder.

    trainable: patterns of the names of trained weights
    held:      so many test and validation sentences; None: all
    changes:   to the model's configuration, such as lora=8
    """
    data = smollm2.data(folder)
    parts = {name: getattr(data, name)[:held] for name in ("test_x", "test_y", "validation_x", "validation_y")}
    data = dataclasses.replace(data, **parts)
    split = fv.split("iid", data, clients, fv.Seed.root(seed))
    return fv.Task(smollm2.model(folder, **changes), data, split, trainable=trainable, device=device)


def probing(directions: int, batch: int, rate: float, **more: Any) -> fv.Baffle:
    """Slopes along `directions`, of `batch` sentences a client, with Adam and replay."""
    server = {"optimizer": "adam", "lr": rate, "tau": 1e-8} | more.pop("server", {})
    settings: dict[str, Any] = {"clip": None, "down": "replay", "server": fv.ServerOptimizer(**server)}
    return fv.Baffle(directions=directions, batch=batch, **(settings | more))


def milliseconds(task: fv.Task, method: fv.Baffle, sentences: int = 128) -> float:
    """The time of one forward pass of so many sentences, in a question of all the method's directions."""
    prober, w, device = method.prober(task), task.initial[None], task.device
    x, y = task.x[:sentences][None], task.y[:sentences][None]
    share = torch.full((1, x.shape[1], 1), 1 / x.shape[1], device=device)
    keys, best = torch.tensor([1], device=device), float("inf")
    with forward_only(device):
        for _ in range(8 if device.type == "cuda" else 1):  # the first ones choose kernels and capture graphs
            began = time.perf_counter()
            prober.slopes(w, keys, x, y, share, method.directions).sum().item()
            best = min(best, time.perf_counter() - began)
    return 1000 * best / method.passes(method.directions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder written by examples/smollm2.py")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--precision", default="float32", help="float32 (default) or bfloat16, for GPUs")
    parser.add_argument("--train", nargs="+", help="patterns of trained weights (default: some norm scales)")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters, for --train '*adapter*' (default 0)")
    parser.add_argument("--rounds", type=int, default=200, help="default 200")
    parser.add_argument("--clients", type=int, default=32, help="default 32")
    parser.add_argument("--cohort", type=int, default=8, help="clients a round (default 8)")
    parser.add_argument("--directions", type=int, default=32, help="K (default 32)")
    parser.add_argument("--batch", type=int, default=32, help="sentences a client and question (default 32)")
    parser.add_argument("--rate", type=float, default=0.003, help="Adam's learning rate (default 0.003)")
    parser.add_argument("--schedule", default="cosine", help="cosine (default) or constant")
    parser.add_argument("--evaluate-every", type=int, default=10, help="rounds (default 10)")
    parser.add_argument("--held", type=int, help="evaluate on so many test and validation sentences (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    patterns = options.train or scales(options.folder)
    task = build(
        options.folder, patterns, options.clients, options.device, options.seed, options.held, lora=options.lora
    )
    server = {"schedule": options.schedule}
    memory = MEMORY if smollm2.is_kept(options.folder) and options.device == "cpu" else None
    more = {"precision": options.precision, "server": server, "memory": memory}
    method = probing(options.directions, options.batch, options.rate, **more)
    zero_shot = task.evaluate(task.initial)
    print(f"{task.layout.size:,} trained weights; before training {100 * zero_shot['accuracy']:.1f}% of test sentences")
    pass_ = milliseconds(task, method)
    print(f"a forward pass of 128 sentences takes {pass_:.1f} ms")
    rounds: list[dict[str, float]] = []

    def told(row: dict[str, float]) -> None:
        rounds.append(row)
        accuracies = f"test {100 * row['accuracy']:.1f}%, validation {100 * row['validation_accuracy']:.1f}%"
        print(f"round {row['round']}: {accuracies}, bytes a client: {row['up']:,.0f} up, {row['down']:,.0f} down")

    fv.run(
        task,
        method,
        rounds=options.rounds,
        cohort=options.cohort,
        seed=options.seed,
        evaluate_every=options.evaluate_every,
        observer=recorded(told),
    )
    if options.out:
        found = {"before": zero_shot, "milliseconds": pass_, "weights": task.layout.size, "rounds": rounds}
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.out.write_text(json.dumps({"settings": settings} | found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
