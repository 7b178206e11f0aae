"""Schemas of records: which tensors a record holds, and checks against them.

A schema stands beside the field it describes, as `Annotated[Tensor, Shape(...)]`.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from fedveil.core.message import PREFIX_BYTES, R, Record, Refused, Shape, Size


@functools.cache
def fields(record: type[Record]) -> dict[str, Shape]:
    """The tensors of a record by name, in order, with their schemas."""
    hints = typing.get_type_hints(record, include_extras=True)
    found: dict[str, Shape] = {}
    for name in record.__struct_fields__:
        options = typing.get_args(hints[name])
        candidates = [hints[name], *(a for a in options if typing.get_origin(a) is Annotated)]
        for candidate in candidates:
            if typing.get_origin(candidate) is Annotated:
                shapes = [m for m in candidate.__metadata__ if isinstance(m, Shape)]
                if shapes:
                    found[name] = shapes[0]
    return found


def check(record: Record, sizes: Mapping[str, Size]) -> None:
    """Hold a record against its schema: dtypes, exact shapes, finite, in range. Raises `Refused`."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Tensor):
                _check_tensor(name, item, fields(type(record))[name], sizes)
            elif isinstance(item, Record):
                check(item, sizes)
            elif isinstance(item, float) and not math.isfinite(item):
                raise Refused("not finite", f"{name} is {item}")
    records = getattr(record, "records", None)
    largest = sizes.get("records")
    if isinstance(records, int) and isinstance(largest, int) and records > largest:
        raise Refused("out of range", f"records is {records}, the largest client has {largest}")


def _check_tensor(name: str, tensor: Tensor, schema: Shape, sizes: Mapping[str, Size]) -> None:
    dtype, shape = schema.bind(sizes)
    if tensor.dtype != dtype:
        raise Refused("wrong dtype", f"{name} is {tensor.dtype}, expected {dtype}")
    if tuple(tensor.shape) != shape:
        raise Refused("wrong shape", f"{name} is {tuple(tensor.shape)}, expected {shape}")
    ordered = tensor.long() if tensor.dtype == torch.uint32 else tensor  # torch does not order uint32
    low, high = (float(v) for v in torch.aminmax(ordered))  # one pass; NaN comes through
    if not (math.isfinite(low) and math.isfinite(high)):
        raise Refused("not finite", f"{name} holds a value that is not a finite number")
    if low < schema.low or high > schema.high:
        raise Refused(
            "out of range", f"{name} reaches from {low:g} to {high:g}, allowed is {schema.low:g} to {schema.high:g}"
        )
    if schema.simplex and (low < 0 or float((tensor.sum(-1) - 1).abs().max()) > 1e-4):
        raise Refused("out of range", f"{name} has rows that are not probabilities")


def blank(record: type[R], sizes: Mapping[str, Size]) -> R:
    """A record of the right shapes without values: tensors on torch's `meta` device, numbers 0 or their default, and
    "bytes" of what varies in length."""
    hints, known = typing.get_type_hints(record), dict[str, Any]()
    for each in msgspec.structs.fields(record):
        if schema := fields(record).get(each.name):
            dtype, shape = schema.bind(sizes)
            known[each.name] = torch.empty(shape, dtype=dtype, device="meta")
        elif each.required:
            known[each.name] = bytes(_most(sizes)) if hints[each.name] is bytes else hints[each.name]()
    return record(**known)


def size_limit(record: type[Record], sizes: Mapping[str, Size]) -> int:
    """The most bytes a frame of this kind can have: tensors, a few scalars, and "bytes" for what varies in length."""
    total = PREFIX_BYTES + 1024 + _most(sizes)
    for schema in fields(record).values():
        dtype, shape = schema.bind(sizes)
        total += math.prod(shape) * dtype.itemsize + 8
    return total


def _most(sizes: Mapping[str, Size]) -> int:
    """How long at most a field is that varies in length."""
    most = sizes.get("bytes", 0)
    assert isinstance(most, int)
    return most


def stack(records: Sequence[Record], name: str) -> Tensor:
    """One tensor field (or number) of several records, stacked: [C, …]."""
    values = [getattr(record, name) for record in records]
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor(values)
