"""Methods, codecs, data sets and models of others: installed packages that register them, and modules by name.

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
from collections.abc import Iterable, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from fedveil.codecs.base import Codec
from fedveil.core.method import METHODS
from fedveil.data import SETS
from fedveil.models import MODELS

GROUPS: dict[str, tuple[str, MutableMapping[str, Any]]] = {
    "fedveil.methods": ("method", METHODS),
    "fedveil.codecs": ("codec", Codec.registry),
    "fedveil.data": ("data set", SETS),
    "fedveil.models": ("model", MODELS),
}
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
    here = str(Path.cwd())
    for name in modules:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name):
            raise ValueError(f"--import takes the name of a module, such as my_method or my_package.method: '{name}'")
        if here not in sys.path:
            sys.path.append(here)  # at the end: a file here must not stand in for an installed package
        importlib.invalidate_caches()
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                raise ValueError(
                    f"there is no module '{name}', neither installed nor in {here}; check --import, or change to the "
                    "folder that holds it"
                ) from None
            raise ValueError(f"module '{name}' cannot be imported: {error}") from error
        except Exception as error:  # whatever somebody's module may raise
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ValueError(f"module '{name}' cannot be imported: {told}") from error
        if name not in imported:
            imported.append(name)
