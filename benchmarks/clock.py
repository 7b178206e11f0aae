"""Timing in turns: what slows the machine down for a while slows both sides down."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable


def in_turns(*sides: Callable[[], object], turns: int) -> list[float]:
    """Median seconds of each side, after two calls of each to warm up."""
    for side in sides * 2:
        side()
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for side, taken in zip(sides, times, strict=True):
            began = time.perf_counter()
            side()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in times]


def commit(told: str | None = None) -> dict[str, str]:
    """The commit that is measured: what was told, or what git says."""
    if told:
        return {"commit": told}
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": asked.stdout.strip()} if asked.returncode == 0 else {}
