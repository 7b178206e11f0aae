"""`python -m benchmarks.rivals [PART…] [--device cuda] [-o FILE]`: time rounds of FedAvg in turns, of fedveil,
pfl-research, FedJAX and a plain loop. An opponent that is not installed is left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.clock import commit
from benchmarks.opponents import Player, Workload
from fedveil.engines import LocalEngine
from fedveil.runs.fingerprint import environment

MODULES = {"pfl": "pfl-research", "fedjax": "FedJAX"}  # that have to be installed, and what they are called here
LOOP = "plain loop"
WARM = 2  # rounds before those that are timed
TURN = 5  # rounds of a turn: cores that have just slept are slower, and a run does not pause between its rounds


@dataclass(frozen=True)
class Part:
    """A workload and who takes part.

    share: rounds that are timed, as a share of --rounds
    alone: one opponent after the other, because together they would not fit on a device
    """

    what: str
    players: Mapping[str, Player]
    share: float = 1.0
    alone: bool = False


def engines() -> dict[str, dict[str, Any]]:
    """The engine's settings, by label. Without the option `wire` every message is bytes."""
    if "wire" not in inspect.signature(LocalEngine).parameters:
        return {"fedveil": {}}
    return {f"fedveil, wire {wire}": {"wire": wire} for wire in ("memory", "bytes")}


def everyone(work: Workload, compiled: bool = False) -> dict[str, Player]:
    """fedveil and all opponents."""
    settings = engines() | ({"fedveil, compiled": {"compile": True}} if compiled else {})
    players = {label: Player("fedveil", work, options) for label, options in settings.items()}
    players |= {MODULES["pfl"]: Player("pfl", work), LOOP: Player("loop", work)}
    if work.device == "cpu" and not work.private:
        players |= {f"{LOOP}, two processes": Player("two processes", work), MODULES["fedjax"]: Player("fedjax", work)}
    return players


def alone(*works: Workload) -> dict[str, Player]:
    """fedveil with different numbers of clients."""
    return {f"fedveil, {work.cohort:,} of {work.clients:,} clients": Player("fedveil", work) for work in works}


def saving(work: Workload) -> dict[str, Player]:
    """`fedveil.run` with a run folder and evaluation after each round, and without both."""
    labels = {"fedveil, run folder and evaluation": True, "fedveil, neither": False}
    return {label: Player("run", work, {"saved": saved}) for label, saved in labels.items()}


def parts(device: str) -> dict[str, Part]:
    """All parts for a device, by name."""
    if device == "cuda":
        cifar, wide = Workload("cifar-cnn", device), Workload("wide-cnn", device)
        more = (replace(cifar, clients=n, cohort=n) for n in (1000, 3000, 10_000))
        return {
            "cifar": Part("pfl-research's CIFAR-10 network without dropout", everyone(cifar, compiled=True)),
            "wide": Part("four normalised convolutions, 2.17 million weights", everyone(wide, compiled=True)),
            "private": Part("cifar with central differential privacy", everyone(replace(cifar, private=True))),
            "cohort": Part("cifar with 500 clients a round", everyone(replace(cifar, cohort=500)), share=0.3),
            "growth": Part("cifar with all of more and more clients", alone(*more), share=0.2, alone=True),
            "saving": Part("cifar with checkpoints and evaluation", saving(cifar), share=0.3),
        }
    small, lenet5 = Workload("small-cnn"), Workload("lenet5")
    more = (replace(small, clients=n, cohort=n) for n in (100, 1000, 10_000))
    return {
        "small": Part("a small CNN on 8 × 8 images", everyone(small, compiled=True)),
        "lenet5": Part("LeNet5 on 28 × 28 images", everyone(lenet5, compiled=True), share=0.5),
        "private": Part("small with central differential privacy", everyone(replace(small, private=True))),
        "cohort": Part("small with 200 clients a round", everyone(replace(small, cohort=200)), share=0.3),
        "growth": Part("small with all of more and more clients", alone(*more), share=0.2, alone=True),
        "clients": Part("small with 100,000 clients to draw from", alone(small, replace(small, clients=100_000))),
        "saving": Part("small with checkpoints and evaluation", saving(small), share=0.3),
    }


def race(part: Part, rounds: int) -> dict[str, Any]:
    """Time the rounds of all players, a few each in turns, after some to warm up."""
    found: dict[str, dict[str, Any]] = {}
    groups = [{label: player} for label, player in part.players.items()] if part.alone else [dict(part.players)]
    for players in groups:
        for player in players.values():
            player.start()
        try:
            found |= _turns(players, max(1, round(part.share * rounds)), warm=1 if part.alone else WARM)
        finally:
            for player in players.values():
                player.close()
    medians = {label: each["milliseconds"] for label, each in found.items() if "milliseconds" in each}
    for label, each in found.items():
        for base in (LOOP, MODULES["pfl"]):
            if base in medians and label in medians:
                each[f"/ {base}"] = medians[label] / medians[base]
    return {"what": part.what, "players": found}


def _turns(players: dict[str, Player], rounds: int, warm: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    there = dict(players)

    def ask(label: str, *question: Any) -> Any:
        """Ask a player; one that fails is out, with the reason."""
        if label in there:
            try:
                if question:
                    there[label].ask(*question)
                return there[label].answer()
            except (RuntimeError, OSError) as error:
                found[label]["failed"] = str(error)
                print(f"  {label} is out: {error}", file=sys.stderr, flush=True)
                del there[label]
        return None

    for label, player in players.items():
        found[label] = {"network": player.work.network, "clients": player.work.clients, "cohort": player.work.cohort}
        if ready := ask(label):
            found[label] |= {"weights": ready["weights"], "seconds to set up": ready["seconds"]}
    times: dict[str, list[float]] = {label: [] for label in players}
    first: dict[str, np.ndarray] = {}
    numbers = range(warm + 1, warm + rounds + 1)
    turns = [range(1, 2), range(2, warm + 1), *(numbers[i : i + TURN] for i in range(0, rounds, TURN))]
    for turn in filter(None, turns):
        for label in list(there):
            time.sleep(0.02)  # threads of the one before may still be waiting for work
            for number in turn:
                if (taken := ask(label, "timed", number)) is not None and number > warm:
                    times[label].append(taken * 1e3)
            if turn[0] == 1 and (weights := ask(label, "weights")) is not None:
                first[label] = weights
            if turn[-1] == warm:
                ask(label, "forget")
    for label in list(there):
        taken = times[label]
        found[label] |= {"milliseconds": statistics.median(taken), "least": min(taken), "most": max(taken)}
        found[label] |= {"rounds": rounds, "milliseconds a client": statistics.median(taken) / found[label]["cohort"]}
        found[label] |= {"MiB": ask(label, "memory"), "accuracy": ask(label, "accuracy")}
        if LOOP in first and label != LOOP:
            found[label]["apart from the loop after a round"] = float(np.abs(first[label] - first[LOOP]).max())
    return found


def _versions() -> dict[str, str]:
    names = ("pfl", "fedjax", "jax")
    return {name: metadata.version(name) for name in names if util.find_spec(name)}


def _capped(part: Part, clients: int | None, cohort: int | None) -> Part:
    """The part with at most so many clients, and at most so many a round."""

    def capped(work: Workload) -> Workload:
        return replace(
            work, clients=min(work.clients, clients or work.clients), cohort=min(work.cohort, cohort or work.cohort)
        )

    return replace(part, players={k: replace(player, work=capped(player.work)) for k, player in part.players.items()})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals", description=__doc__)
    known = list(dict.fromkeys([*parts("cuda"), *parts("cpu")]))
    parser.add_argument("names", nargs="*", metavar="PART", help=f"which of {', '.join(known)} (default: the device's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds; long parts have fewer (default: 10)")
    parser.add_argument("--clients", type=int, help="at most so many clients, for a trial")
    parser.add_argument("--cohort", type=int, help="at most so many clients a round, for a trial")
    parser.add_argument("--commit", help="the commit that is measured, where git does not know it")
    parser.add_argument("-o", "--out", type=Path, help="write the figures as JSON")
    chosen = parser.parse_args()
    here = parts(chosen.device)
    if unknown := [name for name in chosen.names if name not in here]:
        parser.error(f"there is no part {unknown[0]} on {chosen.device}; use {', '.join(here)}")
    if chosen.out and not chosen.out.parent.is_dir():
        parser.error(f"there is no folder {chosen.out.parent} to write {chosen.out.name} into")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but PyTorch finds no GPU; use cpu")
    away = {label for module, label in MODULES.items() if util.find_spec(module) is None}
    told = [a for a in sys.argv[1:] if a not in ("-o", "--out", str(chosen.out))]
    told = [a for i, a in enumerate(told) if "--commit" not in told[max(0, i - 1) : i + 1]]
    heading = {"command": " ".join(["python -m benchmarks.rivals", *told]), **environment(device=chosen.device)}
    heading |= commit(chosen.commit)
    heading |= {"opponents": _versions()}
    results: dict[str, Any] = {}
    for name in chosen.names or here:
        part = _capped(here[name], chosen.clients, chosen.cohort)
        for label in sorted(away & set(part.players)):
            print(f"{label} is not installed and is left out", flush=True)
        part = replace(part, players={label: p for label, p in part.players.items() if label not in away})
        print(f"{name}: {part.what}", flush=True)
        results[name] = race(part, chosen.rounds)
        for label, each in results[name]["players"].items():
            figures = {key: value for key, value in each.items() if isinstance(value, float)}
            print(f"  {label}: {', '.join(f'{key} {value:.4g}' for key, value in figures.items())}", flush=True)
        if chosen.out:  # after each, so that what was found is kept
            chosen.out.write_text(json.dumps({**heading, "parts": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
