"""Methods, codecs, data sets and models of others: installed packages that register them, modules by name, and
functions by a reference such as "my_package.models:net".

A package registers what it brings under an entry point in its pyproject.toml:

    [project.entry-points."fedveil.methods"]
    my-method = "my_package.method:MyMethod"

Classes of methods and codecs register themselves under their `name` when their module is imported. A data set is a
function and a model a class, as in `fedveil.data.SETS` and `fedveil.models.MODELS`; both go by the entry point's name.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, MutableMapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fedveil.codecs.base import Codec
from fedveil.core.method import METHODS
from fedveil.core.spelling import nearest
from fedveil.data import SETS
from fedveil.models import MODELS

GROUPS: dict[str, tuple[str, MutableMapping[str, Any]]] = {
    "fedveil.methods": ("method", METHODS),
    "fedveil.codecs": ("codec", Codec.registry),
    "fedveil.data": ("data set", SETS),
    "fedveil.models": ("model", MODELS),
}
NAME = r"[^\W\d]\w*"
MODULE = rf"{NAME}(?:\.{NAME})*"
REFERENCE = re.compile(rf"({MODULE}):({NAME})")
imported: list[str] = []  # modules that a user asked for, in order


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Import what installed packages register, once, and return the names, as in "method my-method".

    A plugin that cannot be loaded is a warning of one sentence, and all else works.
    """
    loaded = list[str]()
    for group, (what, table) in GROUPS.items():
        for point in metadata.entry_points(group=group):
            whose = f"{what} '{point.name}' of {point.dist.name if point.dist else point.value}"
            if point.name in table:
                warnings.warn(f"the {whose} is left out: there is a {what} of this name already", stacklevel=2)
                continue
            try:
                found = point.load()
            except Exception as error:  # whatever somebody's module may raise
                told = f"{type(error).__name__}: {' '.join(str(error).split())}"
                warnings.warn(f"the {whose} cannot be loaded ({told})", stacklevel=2)
                continue
            if table in (SETS, MODELS):
                table[point.name] = found
            if point.name not in table:
                warnings.warn(f"the {whose} is not registered under this name; state it as its `name`", stacklevel=2)
                continue
            loaded.append(f"{what} {point.name}")
    return tuple(loaded)


def import_modules(modules: Iterable[str]) -> None:
    """Import modules by name, from the current directory too. One that cannot be imported is a ValueError."""
    for name in modules:
        if not re.fullmatch(MODULE, name):
            raise ValueError(f"--import takes the name of a module, such as my_method or my_package.method: '{name}'")
        _import(name, "check --import")
        if name not in imported:
            imported.append(name)


def is_reference(text: str) -> bool:
    """Whether a value of a recipe names somebody's own code, as in "package.module:function", and not a path."""
    return ":" in text and "/" not in text and "\\" not in text and not text.endswith(".npz")


def module_of(reference: str) -> str:
    """The module that a reference names; nothing is imported."""
    return reference.partition(":")[0]


def imported_object(reference: str, key: str = "the reference") -> Callable[..., Any]:
    """The function or class that "package.module:name" names, after an import that looks in the current directory too.

    A ValueError says in one sentence, beginning with the recipe's `key`, why there is none. Whoever calls this runs the
    module's code: call it for what a user has asked for, never because a file that was read says so.
    """
    told = f"{key} is '{reference}'"
    if not (found := REFERENCE.fullmatch(reference)):
        raise ValueError(f"{told}; write package.module:function, such as my_models:net")
    module, name = found[1], found[2]
    if module == "__main__":
        raise ValueError(f"{told}, but no other process can import a script that runs; move {name} to another file")
    space = _import(module, f"check {key}")
    if not hasattr(space, name):
        file = Path(getattr(space, "__file__", None) or "a built-in module")
        whose = "" if file.parent == Path.cwd() else f" ({file})"  # another one of this name may be meant
        raise ValueError(f"{told}, but module '{module}'{whose} has no '{name}'{nearest(name, public(space))}")
    thing: Any = getattr(space, name)
    if not callable(thing):
        raise ValueError(f"{told}, but that is of type {type(thing).__name__}; name a function or a class")
    return cast(Callable[..., Any], thing)


def public(module: ModuleType) -> list[str]:
    """The functions and classes of a module that may be meant."""
    return [name for name, thing in vars(module).items() if callable(thing) and not name.startswith("_")]


def _import(name: str, hint: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # at the end: a file here must not stand in for an installed package
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ValueError(
                f"there is no module '{name}', neither installed nor in {here}; {hint}, or change to the folder that "
                "holds it"
            ) from None
        raise ValueError(f"module '{name}' cannot be imported: {error}") from error
    except Exception as error:  # whatever somebody's module may raise
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"module '{name}' cannot be imported: {told}") from error
