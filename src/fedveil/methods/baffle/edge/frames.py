"""Frames of `fedveil/core/message.py`, of the kinds that this client reads and writes, without PyTorch and msgspec.

Questions come from outside. Each is read against the table below, and whatever does not fit is refused before anything
is computed from it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.core.refused import Refused

VERSION = 2
PREFIX = struct.Struct("<2sBB8sIIHH")
LENGTH = struct.Struct("<I")  # of the head, in front of it
CODES = {"<f4": 0, "|u1": 4, "<i4": 7, "<i8": 8}
LARGEST = 1e6  # of a weight; what is beyond is a fault
SERVER = 0xFFFFFFFF  # no client has this number
HEAD, DEPTH = 1 << 16, 3  # bytes of a head that holds no frames; arrays within arrays


@dataclass(frozen=True)
class Array:
    """A tensor of these dimensions: numbers, or names that the reader or the question itself binds."""

    dims: tuple[str | int, ...]
    dtype: str = "<f4"
    optional: bool = False


@dataclass(frozen=True)
class Whole:
    """A whole number within bounds."""

    low: int = 0
    high: int = SERVER - 1


BOOL, IDS, FRAMES = object(), object(), object()  # a truth value, numbers of clients, frames
KEY, VERSIONS, COUNT = Whole(-(2**63), 2**63 - 1), Whole(0, 2**40), Whole(1, 10**6)
STATE = Array(("weights",), optional=True)
QUESTIONS: dict[str, dict[str, Any]] = {
    "Probe": {"weights": Array(("weights",)), "key": KEY, "directions": COUNT},
    "ProbeHere": {"version": VERSIONS, "key": KEY, "directions": COUNT},
    "CatchUp": {"version": VERSIONS, "frames": FRAMES, "weights": STATE, "first": STATE, "second": STATE},
    "Step": {"key": KEY, "coefficients": Array(("coefficients",))},
    "Advertise": {"number": Whole(0, 255)},
    "Share": {
        "ids": IDS,
        "quorum": Whole(-(2**63), 2**63 - 1),
        "channel": Array(("holders", 32), "|u1"),
        "mask": Array(("holders", 32), "|u1"),
        "signatures": Array(("holders", 64), "|u1"),
    },
    "Deal": {"ids": IDS, "sealed": Array(("peers", 94), "|u1"), "marks": Array(("peers", 32), "|u1")},
    "Mask": {
        "ids": IDS,
        "elements": Whole(3, 2**40 - 1),
        "wide": BOOL,
        "asked": Whole(0, 2**24 - 1),
        "question": Array(("bytes",), "|u1"),
    },
    "Agree": {"alive": IDS},
    "Unmask": {
        "alive": IDS,
        "gone": IDS,
        "holders": Whole(1),
        "signers": IDS,
        "signatures": Array(("signatures", 64), "|u1", optional=True),
    },
}


@dataclass(frozen=True)
class Where:
    """Which run, round, client and question of the round a frame belongs to."""

    run: bytes
    round: int
    client: int
    serial: int


def kind(name: str) -> int:
    """The number of a kind of record."""
    return int.from_bytes(hashlib.blake2b(f"fedveil.{name}".encode(), digest_size=3).digest(), "little")


NAMES = {kind(name): name for name in QUESTIONS}


# ---------------------------------------------------------------------------------------------------- reading


def opened(frame: bytes) -> tuple[str, Where, memoryview]:
    """The kind of a question, where it belongs, and its payload."""
    if len(frame) < PREFIX.size:
        raise Refused("truncated", f"{len(frame)} bytes are fewer than a frame's {PREFIX.size}")
    magic, version, low, run, round_, client, serial, high = PREFIX.unpack_from(frame)
    if magic != b"FV":
        raise Refused("malformed", "the bytes do not begin like a fedveil frame")
    if version != VERSION:
        raise Refused("wrong version", f"the frame has version {version}, this client reads {VERSION}")
    number = low | high << 8
    if number not in NAMES:
        raise Refused("wrong kind", f"this client has no question of kind {number}")
    return NAMES[number], Where(run, round_, client, serial), memoryview(frame)[PREFIX.size :]


def read(payload: bytes | memoryview, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a payload by name. Tensors are copies with the dimensions of `sizes`, where it has them."""
    view = memoryview(payload)
    if len(view) < LENGTH.size:
        raise Refused("truncated", "the frame ends before its head")
    (length,) = LENGTH.unpack_from(view)
    end = LENGTH.size + length
    at = end + -end % 8
    fields = QUESTIONS[name]
    if at > len(view) or any(view[end:at]):
        raise Refused("truncated", f"a head of {length} bytes does not fit the frame")
    if length > HEAD and FRAMES not in fields.values():
        raise Refused("too large", f"a head of {length} bytes; at most {HEAD} are read")
    values, stop = _value(view[LENGTH.size : end], 0)
    if not isinstance(values, list) or len(values) != len(fields) or stop != length:
        raise Refused("wrong field", f"{name} has {len(fields)} fields, and nothing behind them")
    found, bound = dict[str, Any](), dict(sizes)
    for (label, field), value in zip(fields.items(), values, strict=True):
        if not isinstance(field, Array):
            found[label] = _checked(label, field, value)
        elif value is None and field.optional:
            found[label] = None
        else:
            shape = _shape(label, field, value, bound)
            size = math.prod(shape) * np.dtype(field.dtype).itemsize
            if at + size + -size % 8 > len(view) or any(view[at + size : at + size + -size % 8]):
                raise Refused("truncated", f"{label} of shape {shape} does not fit the frame")
            found[label] = np.frombuffer(view[at : at + size], field.dtype).reshape(shape).copy()
            if field.dtype == "<f4" and not bool((np.abs(found[label]) <= LARGEST).all()):  # NaN is not
                raise Refused("out of range", f"{label} holds a value that is no finite number up to a million")
            at += size + -size % 8
    if at != len(view):
        raise Refused("trailing bytes", f"{len(view)} bytes where {at} belong")
    return found


def _checked(label: str, field: Any, value: Any) -> Any:
    """A number, a truth value, or a list."""
    if field is BOOL and isinstance(value, bool):
        return value
    if isinstance(field, Whole) and type(value) is int and field.low <= value <= field.high:
        return value
    if field is IDS and isinstance(value, list) and all(type(k) is int and 0 <= k < SERVER for k in value):
        return value
    if field is FRAMES and isinstance(value, list) and all(isinstance(each, bytes) for each in value):
        return value
    raise Refused("wrong field", f"{label} is not what belongs there")


def _shape(label: str, field: Array, value: Any, bound: dict[str, int]) -> tuple[int, ...]:
    """The shape that a tensor's description tells, which must be that of its field."""
    match value:
        case [int(code), [*shape]] if code == CODES[field.dtype] and len(shape) == len(field.dims):
            if all(type(n) is int and 0 < n < 2**40 for n in shape):
                dims = zip(field.dims, shape, strict=True)
                wanted = [bound.setdefault(d, n) if isinstance(d, str) else d for d, n in dims]
                if wanted == shape:
                    return tuple(shape)
    raise Refused("wrong shape", f"{label} has another type or shape than expected")


_INTS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_LISTS, _BYTES = {0xDC: ">H", 0xDD: ">I"}, {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}


def _value(data: memoryview, at: int, depth: int = 0) -> tuple[Any, int]:
    """The MessagePack value at `at` and where it ends."""
    try:
        tag = data[at]
        at += 1
        if tag < 0x80 or tag >= 0xE0:
            return (tag if tag < 0x80 else tag - 256), at
        if tag in _PLAIN:
            return _PLAIN[tag], at
        if tag in _INTS:
            return struct.unpack_from(_INTS[tag], data, at)[0], at + struct.calcsize(_INTS[tag])
        if tag in _BYTES:
            (count,) = struct.unpack_from(_BYTES[tag], data, at)
            at += struct.calcsize(_BYTES[tag])
            if count <= len(data) - at:
                return bytes(data[at : at + count]), at + count
        elif (0x90 <= tag < 0xA0 or tag in _LISTS) and depth < DEPTH:
            count = tag - 0x90
            if tag in _LISTS:
                (count,) = struct.unpack_from(_LISTS[tag], data, at)
                at += struct.calcsize(_LISTS[tag])
            items = []
            for _ in range(min(count, len(data) - at + 1)):  # each takes a byte
                item, at = _value(data, at, depth + 1)
                items.append(item)
            return items, at
    except (IndexError, struct.error):
        raise Refused("truncated", "the head of the question ends too early") from None
    raise Refused("malformed", "the head of the question holds what no question has")


# ---------------------------------------------------------------------------------------------------- writing


def write(name: str, where: Where, fields: Sequence[int | bytes | Sequence[int] | NDArray[Any]]) -> bytes:
    """The frame of an answer."""
    head, body = [packed(len(fields), 0x90, 0xDC)], list[bytes]()
    for value in fields:
        if isinstance(value, np.ndarray):
            shape = b"".join(packed(n) for n in value.shape)
            head.append(b"\x92" + packed(CODES[value.dtype.str]) + packed(value.ndim, 0x90, 0xDC) + shape)
            raw = value.tobytes()
            body += [raw, bytes(-len(raw) % 8)]
        elif isinstance(value, bytes):
            head.append(bytes([0xC4, len(value)]) + value)
        elif isinstance(value, int):
            head.append(packed(value))
        else:
            head += [packed(len(value), 0x90, 0xDC), *map(packed, value)]
    joined, number = b"".join(head), kind(name)
    prefix = PREFIX.pack(b"FV", VERSION, number & 0xFF, where.run, where.round, where.client, where.serial, number >> 8)
    return b"".join([prefix, LENGTH.pack(len(joined)), joined, bytes(-(LENGTH.size + len(joined)) % 8), *body])


def packed(number: int, short: int | None = None, long: int = 0) -> bytes:
    """A number from 0 on in as few bytes as MessagePack allows; or the head of a list of so many values."""
    if short is not None:
        return bytes([short + number]) if number < 16 else bytes([long]) + struct.pack(">H", number)
    if number < 0x80:
        return bytes([number])
    for tag, form in ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q")):
        if number < 1 << 8 * struct.calcsize(form):
            return bytes([tag]) + struct.pack(form, number)
    raise ValueError(f"{number} does not fit 64 bits")
