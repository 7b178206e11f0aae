"""Schemas of records: which tensors a record holds, and checks against them.

A schema stands beside the field it describes, as `Annotated[Tensor, Shape(...)]`.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
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
    for problem in check_all([record], [sizes]):
        if problem:
            raise problem


def check_all(records: Sequence[Record], sizes: Sequence[Mapping[str, Size]]) -> list[Refused | None]:
    """What is wrong with each record, held against its schema as by `check`; None: nothing.

    The values of one field of all records are looked at together, on their device.
    """
    found: list[Refused | None] = [None] * len(records)
    columns: dict[tuple[int, Shape], list[tuple[int, str, Tensor]]] = {}  # by place in the record
    for i, (record, own) in enumerate(zip(records, sizes, strict=True)):
        try:
            for place, (name, tensor, shape) in enumerate(_tensors(record, own)):
                columns.setdefault((place, shape), []).append((i, name, tensor))
        except Refused as error:
            found[i] = error
    for (_, shape), column in columns.items():  # places come in order, so what is told of a record is its first fault
        held = [(i, name, tensor) for i, name, tensor in column if found[i] is None]
        for (i, name, tensor), low, high in zip(held, *extremes([tensor for *_, tensor in held]), strict=True):
            found[i] = _problem(name, tensor, shape, low, high)
    return found


def _tensors(record: Record, sizes: Mapping[str, Size]) -> Iterator[tuple[str, Tensor, Shape]]:
    """The tensors of a record, with their names and schemas. Raises `Refused` for all but their values."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Tensor):
                shape = fields(type(record))[name]
                _check_form(name, item, shape, sizes)
                yield name, item, shape
            elif isinstance(item, Record):
                yield from _tensors(item, sizes)
            elif isinstance(item, float) and not math.isfinite(item):
                raise Refused("not finite", f"{name} is {item}")
    records = getattr(record, "records", None)
    largest = sizes.get("records")
    if isinstance(records, int) and isinstance(largest, int) and records > largest:
        raise Refused("out of range", f"records is {records}, the largest client has {largest}")


def _check_form(name: str, tensor: Tensor, schema: Shape, sizes: Mapping[str, Size]) -> None:
    dtype, shape = schema.bind(sizes)
    if tensor.dtype != dtype:
        raise Refused("wrong dtype", f"{name} is {tensor.dtype}, expected {dtype}")
    if tuple(tensor.shape) != shape:
        raise Refused("wrong shape", f"{name} is {tuple(tensor.shape)}, expected {shape}")


def _problem(name: str, tensor: Tensor, schema: Shape, low: float, high: float) -> Refused | None:
    """What is wrong with the values of a tensor, which reach from `low` to `high`."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return Refused("not finite", f"{name} holds a value that is not a finite number")
    if low < schema.low or high > schema.high:
        allowed = f"{schema.low:g} to {schema.high:g}"
        return Refused("out of range", f"{name} reaches from {low:g} to {high:g}, allowed is {allowed}")
    if schema.simplex and (low < 0 or float((tensor.sum(-1) - 1).abs().max()) > 1e-4):
        return Refused("out of range", f"{name} has rows that are not probabilities")
    return None


def extremes(tensors: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """The least and the largest value of each tensor; NaN if it holds one. Of rows of one stack in one pass."""
    rows = _rows(tensors)
    if rows is None and tensors and tensors[0].is_cuda and len({(t.shape, t.dtype, t.device) for t in tensors}) == 1:
        rows = torch.stack(list(tensors))  # a copy costs less than to wait for each
    if rows is None:
        pairs = [torch.aminmax(_ordered(tensor)) for tensor in tensors]
        return [float(low) for low, _ in pairs], [float(high) for _, high in pairs]
    rows = _ordered(rows).flatten(1)
    least, largest = torch.stack([rows.amin(1), rows.amax(1)]).tolist()  # on a CPU far faster than aminmax by rows
    return least, largest


def _ordered(tensor: Tensor) -> Tensor:
    return tensor.long() if tensor.dtype == torch.uint32 else tensor  # torch does not order uint32


def _rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """The stack [C, …] whose rows, in order, these tensors are; None if they are not."""
    if len(tensors) < 2 or tensors[0].dim() == 0 or not all(t.is_contiguous() for t in tensors):
        return None
    first = tensors[0]
    begin, apart = first.storage_offset(), first.numel()
    same = (first.shape, first.dtype, first.untyped_storage().data_ptr())
    for i, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype, tensor.untyped_storage().data_ptr()) != same:
            return None
        if tensor.storage_offset() != begin + i * apart:
            return None
    return first.as_strided((len(tensors), *first.shape), (apart, *first.stride()))


def blank(record: type[R], sizes: Mapping[str, Size]) -> R:
    """A record of the right shapes without values: tensors on torch's `meta` device, numbers 0 or their default, and
    "bytes" of what varies in length."""
    hints, known = typing.get_type_hints(record, include_extras=True), dict[str, Any]()
    for each in msgspec.structs.fields(record):
        if schema := fields(record).get(each.name):
            dtype, shape = schema.bind(sizes)
            known[each.name] = torch.empty(shape, dtype=dtype, device="meta")
        elif each.required:
            known[each.name] = _empty(hints[each.name], sizes)
    return record(**known)


def _empty(hint: Any, sizes: Mapping[str, Size]) -> Any:
    """A number 0, or bytes: as many as their type states, else the most of what varies in length."""
    kind, *meta = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if kind is not bytes:
        return kind()
    stated: list[int] = [m.max_length for m in meta if isinstance(m, msgspec.Meta) and m.max_length is not None]
    return bytes(stated[0] if stated else _most(sizes))


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
    """One tensor field (or number) of several records, stacked: [C, …]. Rows of one stack are not copied."""
    values = [getattr(record, name) for record in records]
    if isinstance(values[0], Tensor):
        rows = _rows(values)
        return torch.stack(values) if rows is None else rows
    return torch.tensor(values)
