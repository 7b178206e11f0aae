"""`python -m benchmarks [--floor [--profile]] [NAME…] [-o FILE]`: ratios of two things timed in turns in this process.

With `--floor`, inner loops against the time that their bytes and operations take at the device's measured peak, and
with `--profile` the kernels that take most of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import encoding, fedage, federation, flower, memory, messages, probes, secagg, surrogates
from benchmarks.clock import commit
from benchmarks.floor import FLOORS, GPU, busiest, measure
from fedveil.gpu.context import using
from fedveil.runs.fingerprint import environment

BENCHMARKS: dict[str, Callable[[], dict[str, float]]] = {
    "digits": federation.digits,
    "lenet5": federation.lenet5,
    "clients": federation.many_clients,
    "memory": memory.client_memory,
    "messages": messages.million_floats,
    "fedsynth": encoding.fedsynth,
    "tofu": encoding.tofu,
    "fedage": fedage.fedage,
    "fedlap": surrogates.fifty,
    "fedlap-10": surrogates.ten,
    "per-example": surrogates.per_example,
    "probes": probes.passes,
    "probes-memory": probes.memory,
    "probes-variance": probes.variance,
    "secagg": secagg.million,
    "secagg-keys": secagg.hundred,
    "flower": flower.ten,
    "flower-100": flower.hundred,
    "ray": federation.ray,
} | ({"tofu-vgg13": encoding.tofu_vgg13} if GPU else {})  # minutes on a CPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"which of {', '.join(BENCHMARKS)}; with --floor which of {', '.join(FLOORS)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("-o", "--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--floor", action="store_true", help="time inner loops and compute what the device allows")
    parser.add_argument("--profile", action="store_true", help="with --floor: list the kernels that take most time")
    parser.add_argument("--commit", help="the commit that is measured, where git does not know it")
    chosen = parser.parse_args()
    if chosen.profile and not chosen.floor:
        parser.error("--profile needs --floor: it looks into inner loops")
    known: Mapping[str, Callable[[], Any]] = FLOORS if chosen.floor else BENCHMARKS
    if unknown := sorted(set(chosen.names) - set(known)):
        kind = "floor" if chosen.floor else "benchmark"
        parser.error(f"there is no {kind} {unknown[0]}; use {', '.join(known)}")
    if chosen.out and not chosen.out.parent.is_dir():
        parser.error(f"there is no folder {chosen.out.parent} to write {chosen.out.name} into")
    command = " ".join(["python -m benchmarks", *["--floor"] * chosen.floor, *["--profile"] * chosen.profile])
    command = " ".join([command, *chosen.names])
    where, results, kernels = environment(**commit(chosen.commit)), dict[str, Any](), dict[str, Any]()
    for name in chosen.names or known:
        made = known[name]
        print(f"{name}: {(getattr(made, 'func', made).__doc__ or '').splitlines()[0]}", flush=True)
        with using(announcer=lambda what: print(f"  {what}", file=sys.stderr, flush=True)):
            results[name] = measure(made()) if chosen.floor else made()
        for key, value in results[name].items():
            print(f"  {key:<42} {value:.4g}", flush=True)
        if chosen.profile:
            kernels[name] = busiest(made())
            for row in kernels[name]:
                print(f"  {row['milliseconds']:8.3f} ms {row['calls']:7.1f} × {row['kernel'][:90]}", flush=True)
        if chosen.out:  # after each, so that what was found is kept
            found = {"figures": results, **({"kernels": kernels} if kernels else {})}
            chosen.out.write_text(json.dumps({"command": command, **where, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
