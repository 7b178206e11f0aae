"""What `fedveil tune` searches: a range or a list of values for each key, and the budget at which runs are compared."""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.core.ledger import Row
from fedveil.runs import recipe
from fedveil.runs.recipe import Recipe

FORMS = "log:0.001..1, float:0..1, int:1..10, logint:1..1000 or a list such as qsgd,top-k"
COMBINED = 200  # combinations of lists that are tried to find one in which a key exists
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Space:
    """The values of one key: those of a list, or from low to high."""

    key: str
    kind: str  # log, float, int, logint or list
    low: float = 0.0
    high: float = 0.0
    values: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        return self.kind in ("int", "logint")

    @property
    def log(self) -> bool:
        return self.kind in ("log", "logint")

    @property
    def ends(self) -> tuple[float | str, ...]:
        """The values that show whether the key takes all of them."""
        if self.kind == "list":
            return self.values
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def suggest(self, trial: Any) -> Any:
        """Ask a trial of Optuna for a value."""
        if self.kind == "list":
            return trial.suggest_categorical(self.key, list(self.values))
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def holds(self, value: Any) -> bool:
        """Whether a number is in the range."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return self.kind != "list" and number and self.low <= value <= self.high


def parse_over(text: str) -> Space:
    """Return the space of one `--over KEY=VALUES`."""
    key, found, values = text.partition("=")
    values = values.strip()
    if not found or not key or not values:
        raise ValueError(f"--over takes KEY=VALUES, not '{text}'; VALUES is for example {FORMS}")
    if key == "seed":
        raise ValueError("--over is about the seed, which is no setting; --seeds says over how many seeds to average")
    match = re.fullmatch(r"(?:(log|float|int|logint):)?(.+?)\.\.(.+)", values)
    if not match:
        chosen = tuple(value.strip() for value in re.split(r",(?![^\[]*\])", values))
        if len(set(chosen)) < 2 or not all(chosen) or len(set(chosen)) < len(chosen) or ":" in chosen[0]:
            raise ValueError(f"--over {text} is no range and no list of different values; use for example {FORMS}")
        return Space(key, "list", values=chosen)
    kind = match[1] or "float"
    try:
        low, high = float(match[2]), float(match[3])
    except ValueError:
        raise ValueError(f"--over {text} has an end that is no number; use for example {FORMS}") from None
    if not (math.isfinite(low) and math.isfinite(high)) or low >= high:
        raise ValueError(f"--over {text} is an empty range; give a lower end below the upper end")
    if kind in ("log", "logint") and low <= 0:
        raise ValueError(f"--over {text} has a logarithmic scale, so its lower end must be above 0")
    if kind in ("int", "logint") and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"--over {text} is a range of whole numbers; give whole numbers as its ends")
    return Space(key, kind, low, high)


def changes_of(values: Mapping[str, Any]) -> list[str]:
    """Return values of keys as changes to a recipe, as for `--set`."""
    return [f"{key}={value}" for key, value in values.items()]


def validate_spaces(source: str, changes: Sequence[str], spaces: Sequence[Space]) -> None:
    """Raise the error of a recipe if a key does not exist or does not take an end of its range.

    A key may depend on a list, such as method.up.levels on method.up.name: one combination that has it is enough.
    """
    if twice := {space.key for space in spaces if sum(other.key == space.key for other in spaces) > 1}:
        raise ValueError(f"--over names {min(twice)} twice; name each key once")
    lists = [space for space in spaces if space.kind == "list"]
    for space in spaces:
        others = [each for each in lists if each is not space]
        combinations = [dict(zip((s.key for s in others), values, strict=True)) for values in itertools.islice(
            itertools.product(*(s.values for s in others)), COMBINED
        )]  # fmt: skip
        for end in space.ends:
            problems = [_problem(source, changes, {}, space.key, end)]
            problems += [_problem(source, changes, each, space.key, end) for each in combinations if problems[0]]
            if all(problems):
                raise ValueError(f"--over {space.key}: {problems[0]}")


def fits(source: str, changes: Sequence[str], chosen: Mapping[str, Any], space: Space) -> bool:
    """Return whether the key exists beside the values that are chosen already."""
    return not all(_problem(source, changes, chosen, space.key, end) for end in space.ends)


def _problem(source: str, changes: Sequence[str], chosen: Mapping[str, Any], key: str, value: Any) -> str:
    try:
        recipe.read(source, [*changes, *changes_of(chosen), f"{key}={value}"])
    except ValueError as error:
        return str(error)
    return ""


def set_by_hand(source: str, changes: Sequence[str], spaces: Sequence[Space]) -> dict[str, Any]:
    """Return the values that the recipe has itself, of the keys whose space holds them: the first trial."""
    plan = recipe.read(source, changes)
    table, found = tomllib.loads(plan.toml()), {}
    for space in spaces:
        value: Any = table
        for part in space.key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if space.kind == "list":
            same = [text for text in space.values if _same(source, changes, f"{space.key}={text}", plan)]
            if same:
                found[space.key] = same[0]
        elif space.holds(value):
            found[space.key] = value
    return found


def _same(source: str, changes: Sequence[str], change: str, plan: Recipe) -> bool:
    try:
        return recipe.read(source, [*changes, change]) == plan
    except ValueError:
        return False


@dataclass(frozen=True)
class Budget:
    """Where a run is measured: at its last round, or at the last one within so many bytes or such an ε."""

    kind: str = ""  # bytes (sent by all clients), epsilon, rounds or nothing
    most: float = math.inf

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """The rounds within the budget."""
        if not self.kind:
            return list(rows)
        spent: dict[str, Iterable[float]] = {
            "bytes": itertools.accumulate(row.bytes_up for row in rows),
            "epsilon": (row.epsilon or 0.0 for row in rows),
            "rounds": (row.round for row in rows),
        }
        return [row for row, amount in zip(rows, spent[self.kind], strict=True) if amount <= self.most]

    def spent(self, rows: Sequence[Row]) -> bool:
        """Whether the last round is beyond the budget."""
        return len(self.rows(rows)) < len(rows)


def parse_size(text: str) -> float:
    """Return a number above 0 with or without a unit of bytes, such as 100kB."""
    match = re.fullmatch(r"([\d.e+-]+) ?(B|kB|MB|GB|TB)?", text.strip())
    try:
        amount = float(match[1]) * (UNITS[match[2]] if match[2] else 1) if match else 0.0
    except ValueError:
        amount = 0.0
    if not 0 < amount < math.inf:
        raise ValueError(f"'{text}' is no size; use for example 100kB or 1MB")
    return amount


def parse_budget(text: str) -> Budget:
    """Return the budget of `--at`: bytes=1MB, epsilon=8 or rounds=10."""
    kind, _, amount = text.strip().partition("=")
    try:
        if kind not in ("bytes", "epsilon", "rounds") or (kind != "bytes" and amount.endswith("B")):
            raise ValueError
        return Budget(kind, parse_size(amount))
    except ValueError:
        raise ValueError(f"--at is '{text}'; use for example bytes=1MB, epsilon=8 or rounds=10") from None
