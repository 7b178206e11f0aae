"""The folders of runs as a report needs them. They may be of any origin, so nothing in them is trusted."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fedveil.core.ledger import Ledger
from fedveil.core.metrics import ACCURACY, Primary
from fedveil.core.outcome import finished
from fedveil.report.figures import points, primary_among
from fedveil.runs.folder import tallied

if TYPE_CHECKING:
    from fedveil.attacks.audit import Audit
    from fedveil.privacy.account import Tally


class Attack(msgspec.Struct):
    """`attack.json`: cosines of a client each, and the spread of the attack's errors."""

    round: int
    clients: list[int]
    control: list[float]
    direct: list[float]
    differential: list[float]
    baseline: list[float]
    own: list[float]
    spread: list[float]


@dataclass
class Run:
    """One run, finished or not."""

    folder: Path
    name: str
    text: str  # recipe.toml as it is
    recipe: dict[str, Any]
    environment: dict[str, Any]
    ledger: Ledger
    attack: Attack | None = None
    audit: Audit | None = None
    primary: Primary = ACCURACY  # by which it is compared with other runs

    @property
    def title(self) -> str:
        """Its method and codec, which other runs may share."""
        return _title(self.recipe["method"])

    @cached_property
    def summary(self) -> dict[str, Any]:
        return self.ledger.summary(self.name)

    @property
    def values(self) -> list[float]:
        """The primary metric each time it was measured."""
        return self.ledger.series(self.primary.name)[1]

    @property
    def fixed_noise(self) -> bool:
        """Whether what should have been private randomness was that of a test."""
        return bool(self.environment.get("insecure_test_noise"))

    @property
    def privacy(self) -> tuple[str, dict[str, Any]] | None:
        """What is private, a record or a user, and how the recipe says so; None: nothing is."""
        return _privacy(self.recipe["method"])

    @property
    def setting(self) -> tuple[Any, Any]:
        """What runs must share to be comparable."""
        task, split = self.recipe.get("task"), self.recipe.get("split")
        return _without(task, "weights_seed"), _without(split, "seed")

    @property
    def rounds(self) -> str:
        """Rounds done, and of how many if some are left."""
        done, planned = len(self.ledger.rows), self.recipe.get("rounds")
        return f"{done} of {planned}" if isinstance(planned, int) and done < planned else str(done)

    @property
    def unfinished(self) -> bool:
        """Whether rounds are left, and neither a target nor early stopping has ended the run."""
        return " of " in self.rounds and not self.ended

    @property
    def ended(self) -> str | None:
        """What has ended the run before the last of its rounds: "target", "early" or nothing."""
        target, early = self.recipe.get("target"), self.recipe.get("early_stopping")
        target = float(target) if isinstance(target, (int, float)) else None
        early = early if isinstance(early, int) and early > 0 else None
        return finished(self.ledger, sys.maxsize, target, early)

    @property
    def where(self) -> dict[str, str]:
        """The environment as it can be shown to others: paths of this machine by their last part only."""
        shown = {key: str(value) for key, value in self.environment.items() if key != "data_dir" and value is not None}
        return {key: _command(value) if key == "command" else _short(value) for key, value in shown.items()}

    def bytes_to(self, level: float) -> int:
        """Bytes sent by all clients when the primary metric first reached `level`, which it must have."""
        found = points(self.ledger, "bytes", self.primary.name)
        return next(int(sent) for sent, value in found if self.primary.reached(value, level))


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs, named by their methods, and by their folders too where several have the same method."""
    runs = [_read(folder) for folder in {folder.resolve(): folder for folder in folders}.values()]
    if not runs:
        raise ValueError("no run was given to report on; name at least one run folder")
    primary = primary_among(run.ledger for run in runs)
    methods = Counter(run.name for run in runs)
    folders = [run.folder.resolve() for run in runs]
    for run in runs:
        run.primary = primary
        if methods[run.name] > 1:
            run.name += f" ({end_of(run.folder.resolve(), folders)})"
        run.name = "".join(c if c.isprintable() else "?" for c in run.name)
    return runs


def _without(table: Any, key: str) -> Any:
    return {k: v for k, v in table.items() if k != key} if isinstance(table, dict) else table


def _command(line: str) -> str:
    """A command line with absolute paths cut to their last part."""
    try:
        return shlex.join(_short(word) for word in shlex.split(line))
    except ValueError:  # a quotation without its end
        return " ".join(_short(word) for word in line.split())


def _short(word: str) -> str:
    return re.sub(r"(^|=)[/~].*/(?=.)", r"\1", word)


def end_of(folder: Path, folders: Sequence[Path]) -> str:
    """As few of the last parts of a path as tell it from the others."""
    for n in range(1, len(folder.parts)):
        if sum(other.parts[-n:] == folder.parts[-n:] for other in folders) == 1:
            return "/".join(folder.parts[-n:])
    return folder.name


def _read(folder: Path) -> Run:
    recipe, environment, ledger = (folder / name for name in ("recipe.toml", "environment.json", "ledger.jsonl"))
    if not recipe.is_file():
        raise ValueError(f"{folder} holds no recipe.toml; give a folder that a run was written to")
    path = recipe
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
        path = environment
        where = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
        path = ledger
        rows = Ledger.read(path) if path.is_file() else Ledger()
        path = folder / "attack.json"
        attack = msgspec.json.decode(path.read_bytes(), type=Attack) if path.is_file() else None
        path = folder / "audit.json"
        audit = _audit(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it or leave this run out") from None
    method = table.get("method")
    if not isinstance(method, dict) or not isinstance(method.get("name"), str):
        raise ValueError(f'{recipe} names no method; put name = "..." under its [method]')
    rows.tally = _tally(folder, method)
    return Run(folder, _title(method), text, table, where, rows, attack, audit)


def _tally(folder: Path, method: dict[str, Any]) -> Tally | None:
    """What was charged, from which a tighter ε follows."""
    found = _privacy(method)
    delta = found[1].get("delta") if found else None
    return tallied(folder, delta) if isinstance(delta, float) else None


def _audit(data: bytes) -> Audit:
    from fedveil.attacks.audit import Audit

    found = msgspec.json.decode(data, type=Audit)
    for each in found.on_members.values():
        if len(each.fpr) != len(each.tpr):
            raise ValueError("a curve has more rates of one kind than of the other")
        if not all(rate == 0 or 1e-9 < rate <= 1 for rate in (*each.fpr, *each.tpr)):
            raise ValueError("a curve has a rate that is no share of records")
    return found


def _title(method: dict[str, Any]) -> str:
    """The method's name, the codec's where it is not the method's own, and whether it is private."""
    up = method.get("up")
    codec = up.get("name") if isinstance(up, dict) else None
    parts = [method["name"]]
    if isinstance(codec, str) and codec not in ("raw", method["name"]):
        parts.append(codec)
    return " + ".join([*parts, "DP"] if _privacy(method) else parts)


def _privacy(method: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    for unit, key in (("record", "privacy"), ("user", "user_privacy")):
        if isinstance(table := method.get(key), dict):
            return unit, table
    return None
