"""Code of one's own in a deployment's app: a file of the current folder is copied, a package becomes a requirement."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fedveil.runs import recipe
from fedveil.runs.own import references
from fedveil.runs.plugins import module_of
from fedveil.runs.recipe import Recipe

TAKEN = ("__init__", "client", "data", "server")  # modules that every app has


@dataclass
class Carried:
    """What the app must have besides fedveil."""

    files: dict[str, Path] = field(default_factory=dict)  # by their names in app/
    packages: list[str] = field(default_factory=list)  # to be installed by every party

    @property
    def sentences(self) -> list[str]:
        """What was done about code of one's own."""
        told = [f"{file.name} is copied to app/{name}" for name, file in self.files.items()]
        return told + [f"every party must install {package}" for package in self.packages]


def carry(plan: Recipe) -> tuple[Recipe, Carried]:
    """The recipe with the names that its code has inside the app, and what the app must have.

    The code has been imported. A module that is one file of the current folder is copied into the app. One of an
    installed package stays where it is, and every party installs the package.
    """
    table, carried, names = tomllib.loads(plan.toml()), Carried(), dict[str, str]()
    for reference, key in references(table).items():
        module = module_of(reference)
        if (file := _single(module)) is not None:
            _validate_alone(file, key)
            name = f"own_{module}" if module in TAKEN else module
            carried.files[f"{name}.py"] = file
            names[reference] = f"app.{name}:{reference.partition(':')[2]}"
        elif (package := _package(module)) not in (None, *carried.packages):
            carried.packages.append(str(package))
        elif package is None:
            raise ValueError(
                f"{key} is '{reference}', but module '{module}' is neither one file of the current folder nor part of "
                "an installed package; move the function to a file of its own here, or install the package"
            )
    return recipe.parse(_renamed(table, names)) if names else plan, carried


def _single(module: str) -> Path | None:
    """The file of a module that lies in the current folder and belongs to no package."""
    file = Path(getattr(sys.modules[module], "__file__", None) or "")
    return file.absolute() if "." not in module and file.absolute() == Path.cwd() / f"{module}.py" else None


def _validate_alone(file: Path, key: str) -> None:
    """Raise a ValueError if a file that is to be copied imports another one of its folder."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        found = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        found += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in (each.partition(".")[0] for each in found):
            spec = importlib.util.find_spec(name)
            if spec and spec.origin in (f"{file.with_name(name)}.py", f"{file.with_name(name) / '__init__.py'}"):
                raise ValueError(
                    f"{key} is in {file.name}, which imports {name} from the same folder, and the app gets one file; "
                    "put both into one file, or install them as a package"
                )


def _package(module: str) -> str | None:
    """The installed distribution that a module is part of, with its version."""
    top = module.partition(".")[0]
    found = metadata.packages_distributions().get(top) or [top]
    try:
        return f"{found[0]}=={metadata.version(found[0]).partition('+')[0]}"
    except metadata.PackageNotFoundError:
        return None


def _renamed(table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The tables with other names for code; options are somebody's own and stay."""

    def other(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _renamed(value, names)
        return [other(each) for each in value] if isinstance(value, list) else names.get(str(value), value)

    return {key: value if key.endswith("_options") else other(value) for key, value in table.items()}
