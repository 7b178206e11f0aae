"""`python -m benchmarks [NAME…] [-o FILE]`: every figure is a ratio of two things timed in turns in this process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import encoding, fedage, federation, flower, messages, probes, secagg, surrogates
from fedveil.gpu.context import using
from fedveil.runs.fingerprint import environment

BENCHMARKS: dict[str, Callable[[], dict[str, float]]] = {
    "digits": federation.digits,
    "lenet5": federation.lenet5,
    "clients": federation.many_clients,
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("-o", "--out", type=Path, help="write the figures as JSON")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(BENCHMARKS)):
        parser.error(f"there is no benchmark {unknown[0]}; use {', '.join(BENCHMARKS)}")
    if chosen.out and not chosen.out.parent.is_dir():
        parser.error(f"there is no folder {chosen.out.parent} to write {chosen.out.name} into")
    command = f"python -m benchmarks {' '.join(chosen.names)}".strip()
    where, results = environment(), {}
    for name in chosen.names or BENCHMARKS:
        print(f"{name}: {(BENCHMARKS[name].__doc__ or '').splitlines()[0]}", flush=True)
        with using(announcer=lambda what: print(f"  {what}", file=sys.stderr, flush=True)):
            results[name] = BENCHMARKS[name]()
        for key, value in results[name].items():
            print(f"  {key:<42} {value:.4g}", flush=True)
        if chosen.out:  # after each, so that what was found is kept
            chosen.out.write_text(json.dumps({"command": command, **where, "figures": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
