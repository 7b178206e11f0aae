"""Settings as TOML, every value spelled out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from fedveil.runs.unset import NONE


def written(thing: Any) -> str:
    """A table or a dataclass of settings as TOML; None is left out, and a part of a registry has its name."""
    return _toml(thing if isinstance(thing, Mapping) else _table(thing))


def _table(thing: Any) -> dict[str, Any]:
    table: dict[str, Any] = {"name": thing.name} if hasattr(thing, "registry") else {}
    for f in dataclasses.fields(thing):
        value = getattr(thing, f.name)
        value = NONE if value is None and f.default is not None else value  # or it would be the default again
        table[f.name] = _table(value) if dataclasses.is_dataclass(value) else value
    return table


def _toml(table: Mapping[str, Any], path: str = "") -> str:
    lines = [f"[{path}]"] if path else []
    lines += [f"{k} = {_literal(v)}" for k, v in table.items() if v is not None and not isinstance(v, dict)]
    parts = ["\n".join(lines)] if len(lines) > bool(path) else []
    parts += [_toml(v, f"{path}.{k}" if path else k) for k, v in table.items() if isinstance(v, dict) and v]
    return "\n\n".join(p.rstrip("\n") for p in parts) + "\n"


def _literal(value: Any) -> str:
    """A value in TOML, which reads JSON's except for one character and for pairs of surrogates."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
