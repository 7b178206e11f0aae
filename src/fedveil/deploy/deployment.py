"""The folder of a deployment: its recipe, its clients' keys and its run so far."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from fedveil.core import outcome
from fedveil.core.ledger import Ledger
from fedveil.core.method import METHODS
from fedveil.methods.fedavg import FedAvg
from fedveil.runs import recipe
from fedveil.runs.recipe import Recipe


def planned(folder: Path) -> tuple[Recipe, str]:
    """The recipe of the deployment in `folder`, and its method's name; a method that only the app knows is left out."""
    path = folder / "app" / "recipe.toml"
    if not path.is_file():
        raise ValueError(f"{folder} holds no deployment; 'fedveil deploy init {folder}' writes one")
    return _read(path)


def validate_same(folder: Path, plan: Recipe) -> None:
    """Raise a ValueError if the run in `folder` began with another recipe."""
    before = folder / "run" / "recipe.toml"
    if held(folder).rows and before.is_file() and _read(before)[0].fingerprint() != plan.fingerprint():
        raise ValueError(
            f"{folder / 'run'} holds a run of another recipe than {folder / 'app' / 'recipe.toml'}; change it back, or "
            f"delete {folder / 'run'} and {folder / 'clients'} to begin anew"
        )


def _read(path: Path) -> tuple[Recipe, str]:
    table = recipe.tables(str(path))
    name = str(table.get("method", {}).get("name", FedAvg.name))
    if name not in METHODS:
        del table["method"]
    return recipe.parse(table), name


def held(folder: Path) -> Ledger:
    """The ledger of the deployment's run so far."""
    path = folder / "run" / "ledger.jsonl"
    return Ledger.read(path) if path.exists() else Ledger()


def clients(folder: Path) -> list[int]:
    """The clients whose rehearsal keys are in `folder`."""
    names = [path.stem.removeprefix("node-") for path in (folder / "keys").glob("node-*.pub")]
    return sorted(int(name) for name in names if name.isdecimal())


def lock(folder: Path) -> IO[str]:
    """Keep every other process from rehearsing or changing the deployment in `folder`, until this is closed."""
    file = open(folder / ".lock", "w")  # noqa: SIM115 - held as long as it is needed
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"{folder} is being rehearsed or changed by another process; wait for it") from None
    return file


def finished(ledger: Ledger, plan: Recipe) -> str | None:
    """Why no round is left to do; None if some are."""
    return outcome.finished(ledger, plan.rounds, plan.target, plan.early_stopping)
