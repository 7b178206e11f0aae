"""`python -m benchmarks [--floor] [NAME…] [-o FILE]`: ratios of two things timed in turns in this process.

With `--floor`, inner loops against the time that their bytes and operations take at the device's measured peak.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import encoding, fedage, federation, flower, memory, messages, probes, secagg, surrogates
from benchmarks.floor import FLOORS, measure
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"which of {', '.join(BENCHMARKS)}; with --floor which of {', '.join(FLOORS)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("-o", "--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--floor", action="store_true", help="time inner loops and compute what the device allows")
    chosen = parser.parse_args()
    known: Mapping[str, Callable[[], Any]] = FLOORS if chosen.floor else BENCHMARKS
    if unknown := sorted(set(chosen.names) - set(known)):
        kind = "floor" if chosen.floor else "benchmark"
        parser.error(f"there is no {kind} {unknown[0]}; use {', '.join(known)}")
    if chosen.out and not chosen.out.parent.is_dir():
        parser.error(f"there is no folder {chosen.out.parent} to write {chosen.out.name} into")
    command = " ".join(["python -m benchmarks", *["--floor"] * chosen.floor, *chosen.names])
    where, results = environment(), {}
    for name in chosen.names or known:
        made = known[name]
        print(f"{name}: {(getattr(made, 'func', made).__doc__ or '').splitlines()[0]}", flush=True)
        with using(announcer=lambda what: print(f"  {what}", file=sys.stderr, flush=True)):
            results[name] = measure(made()) if chosen.floor else made()
        for key, value in results[name].items():
            print(f"  {key:<42} {value:.4g}", flush=True)
        if chosen.out:  # after each, so that what was found is kept
            chosen.out.write_text(json.dumps({"command": command, **where, "figures": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
