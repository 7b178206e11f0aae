"""Repeats and sweeps: the same recipe with several seeds, and with several values of some keys."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from fedveil.runs.recipe import Recipe

STREAMS = ("split", "weights", "cohorts", "noise")
MANY = 1000  # seeds, or combinations of a grid: more are a slip of the pen


def parse_seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """Return the seeds of an option: "5" is 0 to 4; "0-4", "7," and "0,2,5-7" are lists."""
    if re.fullmatch(r"\d+", text.strip()):
        chosen = [range(int(text))]
    else:
        parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in text.removesuffix(",").split(",")]
        if not all(parts):
            raise ValueError(f"{option} is '{text}'; use a number of seeds such as 5, or a list such as 0-4 or 0,2,5-7")
        chosen = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if not all(chosen) or sum(map(len, chosen)) > MANY:
        raise ValueError(f"{option} is '{text}', which is no seed or more than {MANY:,}; use for example 5 or 0-4")
    return tuple(dict.fromkeys(itertools.chain(*chosen)))


def parse_held(text: str | None, fixed_noise: bool) -> tuple[str, ...]:
    """Return what `--hold` keeps as the first seed decides it."""
    held = tuple(part.strip() for part in text.split(",")) if text else ()
    if strange := [part for part in held if part not in STREAMS]:
        raise ValueError(f"--hold has '{strange[0]}'; use a list of {', '.join(STREAMS)}")
    if "noise" in held and not fixed_noise:
        raise ValueError(
            "--hold has 'noise', but noise comes from the operating system; leave it out, or fix it for a test with "
            "--insecure-test-noise"
        )
    return held


def with_seed(plan: Recipe, seed: int, hold: Sequence[str], first: int) -> Recipe:
    """Return the recipe with another seed, and the streams in `hold` as the seed `first` decides them.

    A stream that has a seed of its own in the recipe keeps it.
    """
    task, split, cohort = plan.task, plan.split, plan.cohort
    if "weights" in hold and task.weights_seed is None:
        task = dataclasses.replace(task, weights_seed=first)
    if "split" in hold and split.seed is None:
        split = dataclasses.replace(split, seed=first)
    if "cohorts" in hold and cohort.seed is None:
        cohort = dataclasses.replace(cohort, seed=first)
    return dataclasses.replace(plan, seed=seed, task=task, split=split, cohort=cohort)


def parse_grid(grids: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the combinations of `--grid KEY=A,B,C`: changes as for `--set`, one of each key. Without a grid, one
    combination without changes."""
    axes: dict[str, list[str]] = {}
    for text in grids:
        key, found, values = text.partition("=")
        chosen = [value.strip() for value in re.split(r",(?![^\[]*\])", values)]  # a comma within [...] belongs to it
        if not found or not key or not all(chosen):
            raise ValueError(f"--grid takes KEY=A,B,C, not '{text}'")
        if key in axes or len(set(chosen)) < len(chosen):
            raise ValueError(f"--grid '{text}' names a key or a value twice; name each once")
        if key == "seed":
            raise ValueError(f"--grid '{text}' is about the seed; use --seeds {values}")
        axes[key] = [f"{key}={value}" for value in chosen]
    found_all = list(itertools.islice(itertools.product(*axes.values()), MANY + 1))
    if len(found_all) > MANY:
        raise ValueError(f"the grids have more than {MANY:,} combinations; give fewer values, or use fedveil tune")
    return found_all


def source_name(source: str) -> str:
    """Return the folder of a recipe, which is a built-in name or a TOML file."""
    return Path(source).stem if source.endswith(".toml") else source.replace("/", "-")


def folder_name(changes: Sequence[str]) -> str:
    """Return the folder of a combination, such as "method.local.lr=0.1,method.local.epochs=2"."""
    return re.sub(r"[^\w.,=+-]", "-", ",".join(changes))
