"""What a run folder says about a run that was started in Python: a recipe, or why there is none.

A task that a recipe built can go on from the command line. One whose model is an object cannot: its folder says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
from torch import nn

from fedveil.core.losses import LOSSES
from fedveil.core.task import Task
from fedveil.data.files import data_directory
from fedveil.runs.fingerprint import environment
from fedveil.runs.folder import RunFolder
from fedveil.runs.recipe import Origin, Recipe, SplitSpec, TaskSpec
from fedveil.runs.toml import written


class Where(msgspec.Struct, frozen=True):
    """What a run depends on besides its recipe, as far as the user decides it; `resume` reads it again."""

    data_dir: str
    device: str
    stack: int | None
    workers: int | None
    threads: int
    debug: bool
    insecure_test_noise: bool
    engine: str = "local"
    ray_address: str | None = None
    compile: bool = False
    imports: list[str] | None = None  # modules of --import
    wire: str | None = None
    keep: str | None = None  # rounds whose messages the folder keeps
    noise_seed: int | None = None  # of fixed private randomness; None: the recipe's seed


def describe(home: RunFolder, task: Task, where: Where, why: str, settings: dict[str, Any]) -> None:
    """Write `recipe.toml` and `environment.json` of a run that Python has started.

    why:      what keeps the command line from going on with it, if the caller knows of something
    settings: the keys of the recipe that `fv.run` was given, rounds, seed, cohort, method and so on
    """
    method = settings["method"]
    own = sorted({module for module in _modules(method) if module.partition(".")[0] != "fedveil"})
    why = why or _unwritable(task, own, settings)
    origin = task.origin
    built = origin.recipe if isinstance(origin, Origin) else None
    try:
        plan = dataclasses.replace(built or Recipe(), **settings)
        text = (plan if built else dataclasses.replace(plan, task=_task(task), split=_split(task))).toml()
    except (TypeError, ValueError) as error:  # a function as a setting, or a number that no recipe takes
        why = why or f"its settings cannot be written ({' '.join(str(error).split())})"
        text = written({"task": {"model": _named(task.model)}, "method": {"name": method.name}})
    if why and (home.path / "environment.json").exists():  # which is written last
        return  # what the command line has written is worth more
    data_dir = origin.data_dir if isinstance(origin, Origin) else str(data_directory(None).absolute())
    where = msgspec.structs.replace(where, data_dir=data_dir, imports=own or None)
    known = environment(command="fv.run", **msgspec.structs.asdict(where))
    if why:
        told = f"{why}; call it again with the same arguments and this folder"
        known, text = known | {"only_python": told}, f"# For people to read, not to run: {why}.\n\n{text}"
    home.describe(text, known)


def _unwritable(task: Task, modules: list[str], settings: dict[str, Any]) -> str:
    """Why no recipe says how this run is made; nothing where one does."""
    origin = task.origin
    if not isinstance(origin, Origin):
        return "its model, data and split are objects; fv.Recipe(…).build() makes a task that can be written"
    if origin.recipe.seed != settings["seed"]:
        return f"its task is built with seed {origin.recipe.seed} and run with seed {settings['seed']}"
    if "__main__" in modules:
        return "its method is defined in a script, which no other process can import"
    return ""


def _modules(thing: Any) -> Iterator[str]:
    """The modules of a method and of its parts that a registry knows."""
    if hasattr(thing, "registry"):
        yield type(thing).__module__
    for part in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        yield from _modules(getattr(thing, part.name))


def _task(task: Task) -> TaskSpec:
    """A task's objects by their names, which no recipe can use."""
    known = [name for name, function in LOSSES.items() if function is task.loss]
    loss = known[0] if known else f"python:{getattr(task.loss, '__qualname__', type(task.loss).__qualname__)}"
    return TaskSpec(data=task.data.name, model=_named(task.model), loss=loss)


def _named(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _split(task: Task) -> SplitSpec:
    return SplitSpec(kind=task.clients.kind, clients=len(task.clients), max_records=task.clients.max_records)
