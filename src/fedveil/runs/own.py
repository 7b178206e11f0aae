"""Models, data and losses of a recipe: built-in ones by name, one's own by reference, as in "my_models:net".

A function of one's own runs while PyTorch's global generator stands at the recipe's seed, so that a run repeats.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fedveil import data, models
from fedveil.core.losses import Loss, loss_by_name
from fedveil.core.metrics import Metric
from fedveil.core.seeds import Seed
from fedveil.data import Data
from fedveil.data.files import data_directory
from fedveil.runs.plugins import REFERENCE, imported_object, is_reference, module_of

T = TypeVar("T")


def make_model(name: str, options: Mapping[str, Any], input: tuple[int, ...], classes: int, seed: Seed) -> nn.Module:
    """The model of a recipe, with the weights that `seed` draws.

    A built-in model is redrawn by `models.initialise`. A model of one's own keeps the weights that its function gave
    it, so that pretrained ones stay as they are. The function is given `input`, the shape of a record, and `classes`
    where it takes parameters of these names.
    """
    if is_reference(name):
        offered = {"input": input, "classes": classes}
        return _made("task.model", name, imported_object(name, "task.model"), offered, options, nn.Module, seed)
    model = models.build(name, input, classes, **options)
    models.initialise(model, seed)
    return model


def load_data(
    name: str, options: Mapping[str, Any], directory: str | Path | None, fetch: bool, clients: int, seed: Seed
) -> Data:
    """The records of a recipe: a named set, a path, or what a function of one's own returns.

    The function is given `directory`, the folder of the data sets, where it takes a parameter of this name. A function
    with a parameter `partition` returns the records of one party, as in a deployment: it is called for each client,
    whose number becomes its records' group, and with None for the test records.
    """
    if not is_reference(name):
        return data.load(name, directory, fetch, **options)
    if not by_party(name):
        offered = {"directory": data_directory(directory)}
        return _made("task.data", name, imported_object(name, "task.data"), offered, options, Data, seed)
    parts = [load_part(name, options, directory, k, clients, seed) for k in range(clients)]
    x, y = torch.cat([own.x for own in parts]), torch.cat([own.y for own in parts])
    groups = torch.cat([torch.full((len(own.x),), k) for k, own in enumerate(parts)])
    test = load_part(name, options, directory, None, clients, seed)
    return dataclasses.replace(test, x=x, y=y, groups=groups)


def by_party(name: str) -> bool:
    """Whether a recipe's data are a function of one's own that returns the records of one party."""
    return is_reference(name) and "partition" in _parameters(imported_object(name, "task.data"))


def load_part(
    name: str, options: Mapping[str, Any], directory: str | Path | None, partition: int | None, clients: int, seed: Seed
) -> Data:
    """The records of client `partition`, or of the server (None), of a function that returns those of one party."""
    offered = {"directory": data_directory(directory), "partition": partition, "partitions": clients}
    return _made("task.data", name, imported_object(name, "task.data"), offered, options, Data, seed)


def find_loss(name: str, options: Mapping[str, Any] | None = None) -> Loss:
    """The loss of a recipe, by its name or a function of one's own, with its options."""
    if not is_reference(name):
        return loss_by_name(name, options)
    loss = imported_object(name, "task.loss")
    return partial(loss, **options) if options else loss


def find_metrics(names: Sequence[str]) -> list[str | Metric]:
    """The metrics of a recipe: names, and what references name: a function (outputs, y) -> a number a record, or a
    class of objects with `update` and `compute`. Where more is worse, it has `higher_is_better = False`."""
    found = list[str | Metric]()
    for name in names:
        if not is_reference(name):
            found.append(name)
            continue
        thing: Any = imported_object(name, "task.metrics")
        found.append(Metric(thing() if isinstance(thing, type) else thing, name.partition(":")[2]))
    return found


def references(value: Any, key: str = "") -> dict[str, str]:
    """The code that a recipe's tables name, and the key that names it, as in {"my_models:net": "task.model"}.

    Nothing is imported. Options are left out, since a function of one's own reads them; so are paths of weights.
    """
    if isinstance(value, str):
        return {value: key} if REFERENCE.fullmatch(value) and key != "task.weights" else {}
    found = dict[str, str]()
    for name, part in value.items() if isinstance(value, Mapping) else ():
        if key != "task" or not name.endswith("_options"):
            found |= references(part, f"{key}.{name}" if key else name)
    for part in value if isinstance(value, list) else ():
        found |= references(part, key)
    return found


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # some built-in functions have none
        return {}


def _made(
    key: str,
    name: str,
    function: Callable[..., Any],
    offered: Mapping[str, Any],
    options: Mapping[str, Any],
    kind: type[T],
    seed: Seed,
) -> T:
    """What the function returns, which must be a `kind`. A ValueError says in one sentence why there is nothing."""
    told, known = f"{key} is '{name}'", _parameters(function)
    given = {each: value for each, value in offered.items() if each in known} | dict(options)
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        names = " and ".join(offered)
        raise ValueError(f"{told}: {error}; it is given {names} where it takes them, and {key}_options") from None
    except ValueError:  # no signature
        pass
    try:
        with models.drawing_from(seed):
            made = function(**given)
    except Exception as error:  # whatever somebody's function may raise
        frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is this one
        file = getattr(sys.modules[module_of(name)], "__file__", None)
        theirs = [frame for frame in frames if frame.filename == file] or frames
        where = f" in {Path(theirs[-1].filename).name}, line {theirs[-1].lineno}" if theirs else ""
        raise ValueError(f"{told}, which raised {type(error).__name__}{where}: {_line(error)}") from error
    if not isinstance(made, kind):
        wanted = "an nn.Module" if kind is nn.Module else "a fedveil.Data"
        raise ValueError(f"{told}, which returned {type(made).__name__}; it must return {wanted}")
    return made


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"
