"""Hostile frames: an honest one, changed so that no reader may use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import KINDS, Record

HUGE = 1e30
OVERSIZE = 1 << 21  # bytes, more than a toy's message can have


def attacks(frame: bytes) -> dict[str, bytes]:
    """Return the bytes of each attack on an honest frame, by name."""
    kind, where = message.envelope(frame)
    record, _ = message.unframe(frame, KINDS, len(frame))
    found = {name: message.frame(changed, where) for name, changed in values(record)}
    return found | {
        "a wrong kind": message.prefix(kind ^ 0x155555, where) + frame[message.PREFIX_BYTES :],
        "a truncated frame": frame[:-8],
        "an oversized frame": frame + bytes(OVERSIZE),
    }


def values(record: Record) -> Iterator[tuple[str, Any]]:
    """Yield the record with a value that is not finite, far too large, or of a wrong shape in each of its fields."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, Tensor):
            yield f"a wrong shape of {name}", replace(record, **{name: torch.cat([value, value[-1:]])})
            if value.is_floating_point():
                yield f"NaN in {name}", replace(record, **{name: _put(value, float("nan"))})
                yield f"{HUGE:g} in {name}", replace(record, **{name: _put(value, HUGE)})
        elif isinstance(value, float):
            yield f"NaN as {name}", replace(record, **{name: float("nan")})


def _put(tensor: Tensor, value: float) -> Tensor:
    flat = tensor.clone().flatten()
    flat[0] = value
    return flat.view_as(tensor)
