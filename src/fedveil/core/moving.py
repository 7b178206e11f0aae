"""Records with other tensors: on another device, or copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from fedveil.core.message import R, Slots


def moved(record: R, device: torch.device | str) -> R:
    """The same record with its tensors, and those of its slots, on `device`."""
    return mapped(record, lambda tensor: tensor.to(device).clone())


def mapped(record: R, change: Callable[[Tensor], Tensor]) -> R:
    """Return a copy in which `change` has replaced every tensor, also those in lists and slots."""

    def other(value: Any) -> Any:
        if isinstance(value, Slots):
            return Slots({part: mapped(kept, change) for part, kept in value.items()})
        if isinstance(value, list):
            return [other(each) for each in value]
        return change(value) if isinstance(value, Tensor) else value

    return replace(record, **{name: other(getattr(record, name)) for name in record.__struct_fields__})
