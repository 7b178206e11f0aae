"""Runs of the same recipe with several seeds, as one group."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.core.metrics import Primary
from fedveil.report.folder import Run, end_of
from fedveil.runs.statistics import Repeats

SEEDS = ("seed", "task.weights_seed", "split.seed", "cohort.seed")
SHOWN = 3  # settings by which groups of one method are told apart in their names
TRIALS = "trials"  # the folder of a search's trials, which are no results


@dataclass(frozen=True)
class Group:
    """The runs of one recipe; a run that was not repeated is a group of its own.

    settings: the recipe without its seeds, by key
    """

    name: str
    runs: tuple[Run, ...]
    settings: Mapping[str, Any]

    def repeats(self, metric: Primary | None = None) -> Repeats:
        """The ledgers by seed; by default with the primary metric of all runs of the report."""
        return Repeats(
            self.name, {_seed(r): r.ledger for r in self.runs if r.ledger.rows}, metric or self.runs[0].primary
        )


def expand(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders among `folders` and below those that hold no run themselves. Trials of a search are left
    out, and its last best run counts."""
    found: list[Path] = []
    for folder in folders:
        below = [] if (folder / "recipe.toml").is_file() else [path.parent for path in folder.rglob("recipe.toml")]
        found += sorted(path for path in below if TRIALS not in path.relative_to(folder).parts) or [folder]
    return found


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Return the groups in the order of their first runs: runs in one folder whose recipes differ in their seeds."""
    alike: dict[str, list[Run]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        found = dict(_flat(run.recipe))
        for table in ("method.privacy", "method.user_privacy"):
            if f"{table}.budget" in found:  # noise "auto" became what the draws of the seed need
                found.pop(f"{table}.noise", None)
        seed = found.get("seed")
        found = {key: value for key, value in found.items() if key not in SEEDS}
        key = json.dumps([found, str(run.folder.resolve().parent)], sort_keys=True, default=str)
        if not isinstance(seed, int) or any(_seed(other) == seed for other in alike.get(key, ())):
            key = f"{key} {run.folder}"
        settings[key] = found
        alike.setdefault(key, []).append(run)
    names = _names({key: members[0] for key, members in alike.items()}, settings, alike)
    return [Group(names[key], tuple(members), settings[key]) for key, members in alike.items()]


def varied(groups: Sequence[Group]) -> list[str]:
    """Return the keys in which the recipes of groups differ."""
    keys = dict.fromkeys(itertools.chain(*(group.settings for group in groups)))
    return [key for key in keys if len({json.dumps(group.settings.get(key), default=str) for group in groups}) > 1]


def _names(
    firsts: Mapping[str, Run], settings: Mapping[str, dict[str, Any]], alike: Mapping[str, Sequence[Run]]
) -> dict[str, str]:
    """A group of one run has its name; one of several has its method, and what sets it apart from others of it."""
    names = {key: run.name if len(alike[key]) == 1 else run.title for key, run in firsts.items()}
    folders = {key: run.folder.resolve() for key, run in firsts.items()}
    folders = {key: folder if len(alike[key]) == 1 else folder.parent for key, folder in folders.items()}
    for title, count in Counter(names.values()).items():
        same = [key for key, name in names.items() if name == title]
        if count == 1:
            continue
        keys = varied([Group(title, (), settings[key]) for key in same])
        own = {key: ", ".join(f"{k.removeprefix('method.')}={settings[key].get(k)}" for k in keys) for key in same}
        if len(keys) > SHOWN or len(set(own.values())) < count:
            own = {key: end_of(folders[key], [folders[other] for other in same]) for key in same}
        names |= {key: f"{title} ({own[key]})" for key in same}
    return {key: "".join(c if c.isprintable() else "?" for c in name) for key, name in names.items()}


def _seed(run: Run) -> int:
    seed = run.recipe.get("seed")
    return seed if isinstance(seed, int) else 0


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _flat(value, where)
        else:
            yield where, int(value) if isinstance(value, float) and value.is_integer() else value
