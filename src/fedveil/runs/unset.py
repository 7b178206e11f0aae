"""Keys of a recipe that are unset: `none` in --set KEY=none, and in a file, since TOML has no word for it."""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

NONE = "none"


def unset(value: Any, hint: Any) -> Any:
    """Return the value of a key of type `hint`, with None for an optional key that is unset.

    value: None after --set KEY=none. "none" from a file unsets too, but for a key that takes text it is this text
    """
    if isinstance(value, Mapping):
        return (
            {key: each for key, each in value.items() if each is not None} if typing.get_origin(hint) is dict else value
        )
    takes_text = str in _alternatives(hint)
    if value is None and not optional(hint) and (takes_text or NONE in _alternatives(hint)):
        return NONE
    return None if value == NONE and optional(hint) and not takes_text else value


def optional(hint: Any) -> bool:
    """Return whether None is among the values of a type."""
    return type(None) in _alternatives(hint)


def types_of(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a class's fields as far as a file can hold them, which is without functions."""

    def held(hint: Any) -> Any:
        if not isinstance(hint, types.UnionType):
            return hint
        return functools.reduce(
            operator.or_, (t for t in typing.get_args(hint) if typing.get_origin(t) is not Callable)
        )

    return {key: held(hint) for key, hint in typing.get_type_hints(kind).items()}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, the values of a Literal, or the type itself."""
    return typing.get_args(hint) or (hint,)
