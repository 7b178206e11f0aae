"""Settings from nested tables: each value is checked against its field's type, and what is wrong is one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from fedveil.core.spelling import nearest
from fedveil.runs.unset import NONE, optional, types_of, unset

KINDS = ("name", "optimizer")  # keys on which the meaning, and so the defaults, of the others in their table depend


def typed(kind: type[Any], table: Any, path: str = "", usual: Any = None) -> Any:
    """An instance of a dataclass from a table, field by field.

    usual: the default of the whole table. Keys that are left out keep its values, unless the table is of another kind
    """
    if table is None:
        raise ValueError(f"'{path}' cannot be none; leave it out for its default")
    if not isinstance(table, Mapping):
        raise ValueError(f"'{path}' holds several keys ({', '.join(keys(kind))}); write '{path}.KEY'")
    table = dict(table)
    if hasattr(kind, "registry"):
        what = next(base for base in kind.__mro__ if "registry" in vars(base)).__name__.lower()
        registry = kind.registry
        name = str(table.pop("name", getattr(kind, "name", None)))
        if name not in registry:
            own = "; one of your own needs --import MODULE"
            raise ValueError(f"there is no {what} '{name}'{nearest(name, registry)}{own}")
        kind = registry[name]
    known, hints = keys(kind), types_of(kind)
    given: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            raise ValueError(_lacking(kind, key, where) or f"unknown key '{where}'{nearest(key, known, path)}")
        value, under = unset(value, hints[key]), section(kind, key)
        if under and not (value is None and optional(hints[key])):
            given[key] = typed(under, value, where, _default(kind, key))
            continue
        try:
            given[key] = None if value is None and optional(hints[key]) else msgspec.convert(value, hints[key])
        except msgspec.ValidationError:
            raise ValueError(
                f"'{where}' is {NONE if value is None else repr(value)}; it must be {_called(hints[key])}"
            ) from None
        if isinstance(given[key], float) and not math.isfinite(given[key]):
            raise ValueError(f"'{where}' is {value}; it must be a finite number")
    if type(usual) is kind and not any(given.get(key, same) != same for key, same in _kinds(usual)):
        return dataclasses.replace(usual, **given)
    return kind(**given)


def _default(kind: type[Any], key: str) -> Any:
    """The default of a field that is a table; None where it has none."""
    factory = next(f for f in dataclasses.fields(kind) if f.name == key).default_factory
    return None if factory is dataclasses.MISSING else factory()


def _kinds(usual: Any) -> list[tuple[str, Any]]:
    return [(key, getattr(usual, key)) for key in KINDS if hasattr(usual, key)]


def _unsupported(kind: type[Any]) -> Mapping[str, str]:
    """Why keys that others have are none of this one's."""
    why: Mapping[str, str] = getattr(kind, "unsupported", {})
    return why


def _lacking(kind: type[Any], key: str, where: str) -> str:
    """Of a key that others of the registry have: why this one has none, and whose it is."""
    others = getattr(kind, "registry", {}).items()
    having = sorted(name for name, other in others if key in keys(other) and key not in _unsupported(other))
    if not having:
        return ""
    why = _unsupported(kind).get(key)
    return f"{kind.name} has no '{where}'{f': {why}' if why else ''}; it is a key of {', '.join(having)}"


def section(kind: type[Any], key: str) -> type[Any] | None:
    """The class of a field that is a table of its own; of several possible ones that of the field's default."""
    hint = typing.get_type_hints(kind)[key]
    classes = [t for t in typing.get_args(hint) or (hint,) if isinstance(t, type)]
    for found in classes:
        if hasattr(found, "registry"):
            default = _default(kind, key)
            return found if default is None else type(default)
        if dataclasses.is_dataclass(found):
            return found
    return None


def keys(kind: type[Any]) -> list[str]:
    """What can be set in a table of this class."""
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else ["name"]


def _called(hint: Any) -> str:
    """A type in a user's words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    words |= {dict: "a table", list: "a list", tuple: "a list"}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_called(t) for t in typing.get_args(hint) if t is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(json.dumps(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) in (list, tuple) and typing.get_args(hint)[0] is int:
        return "a list of whole numbers"
    return words.get(typing.get_origin(hint) or hint, str(hint))
