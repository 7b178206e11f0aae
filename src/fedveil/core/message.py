"""Records and their bytes: the only place that turns numbers into bytes and bytes into numbers.

A frame is what travels or lies on disk:

    offset  0   2  b"FV"                    24  4  length of the head, little-endian
            2   1  version                  28  …  head: the record as a msgpack array, each tensor as [dtype, shape]
            3   1  kind of record, low      …   …  body: the tensors' little-endian bytes, each padded to 8
            4   8  run
           12   4  round
           16   4  client
           20   2  serial of the question within the round
           22   2  kind of record, high

No names and no types are on the wire: a kind is 24 bits of a digest of the record's name. It is looked up in a closed
table, and the reader says which kinds it expects. Nothing is allocated from a length that the frame claims; tensors are
views of the received bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from fedveil.core.loose import LENGTH, Loose
from fedveil.core.refused import Refused as Refused

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("fedveil writes tensors as they lie in memory and needs a little-endian machine")
VERSION = 2
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint32,
)
_CODE = {dtype: code for code, dtype in enumerate(DTYPES)}
_PREFIX = struct.Struct("<2sBB8sIIHH")
PREFIX_BYTES = _PREFIX.size
_HEAD_LIMIT = 1 << 16  # a head holds scalars and shapes; what is longer is not ours
_DIMS_LIMIT = 8
_FIELDS = msgspec.msgpack.Decoder(list[msgspec.Raw])
SERVER = 0xFFFFFFFF  # the client field of a frame that belongs to no client


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, eq=False):
    """A closed, typed, immutable set of numbers. Subclasses state the schema beside each field."""

    kind: ClassVar[int]
    common: ClassVar[tuple[str, ...] | None] = None  # fields of a client's memory that are the server's


class Container(Record, frozen=True):
    """A record whose head may be long because it holds other frames (a checkpoint)."""


class Answer(Record, frozen=True):
    """What a client sends to the server."""

    additive: ClassVar[bool] = False  # whether a sum of answers, tensor by tensor, is all that is needed


class Question(Record, frozen=True):
    """What the server sends to a client, with the kind of answer it expects."""

    reply: ClassVar[type[Answer]]

    def sizes(self) -> dict[str, Size]:
        """Dimension names that the question itself binds, in it and in its answer."""
        return {}


@dataclass(frozen=True)
class Shape:
    """The schema of one tensor: dimensions and dtype, each a name (bound by `Method.schema`) or itself, and range.

    A name may stand for several dimensions: "input" is (1, 28, 28) on MNIST.
    """

    dims: tuple[str | int, ...]
    dtype: torch.dtype | str = torch.float32
    low: float = -1e6  # a weight or an update beyond a million is a fault, and its square overflows a float
    high: float = 1e6
    simplex: bool = False  # the last dimension is a probability vector

    def bind(self, sizes: Mapping[str, Size]) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and the shape behind the names."""
        shape: list[int] = []
        for dim in self.dims:
            size = sizes[dim] if isinstance(dim, str) else dim
            assert not isinstance(size, torch.dtype), f"{dim} is a dimension"
            shape.extend(size if isinstance(size, tuple) else (size,))
        dtype = sizes[self.dtype] if isinstance(self.dtype, str) else self.dtype
        assert isinstance(dtype, torch.dtype), f"{self.dtype} is a dtype"
        return dtype, tuple(shape)


Size = int | tuple[int, ...] | torch.dtype
Weights = Annotated[Tensor, Shape(("weights",))]
Count = Annotated[int, Meta(ge=1, le=10**9)]
R = TypeVar("R", bound=Record)
Payload = bytes | memoryview | Loose
KINDS: dict[int, type[Record]] = {}


class Slots(Mapping[str, Record]):
    """Records by the name of the part that keeps them. On disk each is a frame of its own."""

    def __init__(self, records: Mapping[str, Record] | None = None) -> None:
        self._records = dict(records or {})

    def __getitem__(self, name: str) -> Any:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def put(self, **records: Record) -> Slots:
        """The same with other records under these names."""
        return Slots(self._records | records)

    def get(self, name: str, default: Any = None) -> Any:
        return self._records.get(name, default)


def kind(record: type[R]) -> type[R]:
    """Enter a record in the closed table, under a number that is derived from its package and its name."""
    name = f"{record.__module__.partition('.')[0]}.{record.__name__}"
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=3).digest(), "little")
    holder = KINDS.get(number, record)
    if (holder.__module__, holder.__qualname__) != (record.__module__, record.__qualname__):
        raise ValueError(
            f"the records {holder.__module__}.{holder.__qualname__} and {record.__module__}.{record.__qualname__} have "
            f"the same kind, {number}, because of their names; rename one of them"
        )
    KINDS[number] = record
    record.kind = number
    return record


@dataclass(frozen=True)
class Envelope:
    """Which run, round, client and question of the round a frame belongs to."""

    run: bytes = bytes(8)
    round: int = 0
    client: int = SERVER
    serial: int = 0


def pack(record: Record) -> bytes:
    """The part of a frame that does not depend on who it is for: a broadcast is packed once."""
    return loose(record).payload


def frame(record: Record, envelope: Envelope) -> bytes:
    """The whole frame, copied once."""
    return b"".join(buffers(record, envelope))


def buffers(record: Record, envelope: Envelope) -> list[Any]:
    """The pieces of a frame, in order. Tensors on a CPU are not copied."""
    return [prefix(record.kind, envelope), *loose(record).parts()]


def prefix(number: int, to: Envelope) -> bytes:
    """The 24 bytes in front of the payload of a record of kind `number`."""
    return _PREFIX.pack(b"FV", VERSION, number & 0xFF, to.run, to.round, to.client, to.serial, number >> 8)


def size(record: Record) -> int:
    """The length of its frame. The tensors may be of torch's `meta` device, which have no values."""
    return PREFIX_BYTES + len(loose(record))


def loose(record: Record) -> Loose:
    """The payload of a record without a copy of its tensors."""
    tensors: list[Tensor] = []

    def hoist(value: Any) -> Any:
        if isinstance(value, Slots):
            return {name: frame(kept, Envelope()) for name, kept in value.items()}
        if not isinstance(value, Tensor):
            raise TypeError(f"a record cannot hold a {type(value).__name__}")
        if value.dtype not in _CODE or value.numel() == 0 or value.dim() > _DIMS_LIMIT:
            raise ValueError(f"{type(record).__name__}: no reader takes a {value.dtype} of shape {tuple(value.shape)}")
        tensors.append(value.detach())
        return (_CODE[value.dtype], tuple(value.shape))

    head = msgspec.msgpack.encode(record, enc_hook=hoist)
    if len(head) > _HEAD_LIMIT and not isinstance(record, Container):
        raise ValueError(f"{type(record).__name__} has {len(head)} bytes of scalars; put long lists into a tensor")
    return Loose(head, tuple(tensors))


def envelope(data: bytes | memoryview) -> tuple[int, Envelope]:
    """The kind and the envelope of a frame, without looking further."""
    if len(data) < _PREFIX.size:
        raise Refused("truncated", f"{len(data)} bytes are fewer than a frame's {_PREFIX.size}")
    magic, version, low, run, round_, client, serial, high = _PREFIX.unpack_from(data)
    number = low | high << 8
    if magic != b"FV":
        raise Refused("not a frame", "the bytes do not begin like a fedveil frame")
    if version != VERSION:
        raise Refused("wrong version", f"the frame has version {version}, this program reads {VERSION}")
    return number, Envelope(run, round_, client, serial)


def unframe(data: bytes, expected: Mapping[int, type[Record]], limit: int) -> tuple[Record, Envelope]:
    """Read a frame of one of the `expected` kinds, of at most `limit` bytes. Raises `Refused`, and nothing else."""
    if len(data) > limit:
        raise Refused("too large", f"{len(data)} bytes where at most {limit} were expected")
    number, where = envelope(data)
    return opened(memoryview(data)[_PREFIX.size :], number, expected, limit), where


def opened(payload: Payload, number: int, expected: Mapping[int, type[Record]], limit: int) -> Record:
    """Read the payload of a frame of kind `number`, as `unframe` does."""
    if PREFIX_BYTES + len(payload) > limit:
        raise Refused("too large", f"{PREFIX_BYTES + len(payload)} bytes where at most {limit} were expected")
    if number not in expected:
        names = ", ".join(t.__name__ for t in expected.values())
        raise Refused("wrong kind", f"kind {number} where {names} was expected")
    return unpack(payload, expected[number])


def unpack(payload: Payload, record: type[R]) -> R:
    """The record of a payload (a frame without its prefix). Tensors are views of the payload, or its own."""
    if isinstance(payload, Loose):
        return _gathered(payload, record)
    view = memoryview(payload)
    if len(view) < LENGTH.size:
        raise Refused("truncated", "the frame ends before its head")
    (length,) = LENGTH.unpack_from(view)
    if length > len(view) - LENGTH.size:
        raise Refused("truncated", f"a head of {length} bytes in a frame with {len(view) - LENGTH.size} left")
    end = LENGTH.size + length
    at = body = end + -end % 8

    def settle(expected: type, value: Any) -> Any:
        nonlocal at
        if expected is Slots:
            return _slots(value)
        dtype, shape = _described(value)
        start, size = at, math.prod(shape) * dtype.itemsize
        at += size + -size % 8
        if at > len(view):
            left = max(len(view) - start, 0)
            raise Refused("truncated", f"a tensor of shape {shape} in a frame with {left} bytes left")
        if any(view[start + size : at]):
            raise Refused("malformed", "the padding behind a tensor is not zero bytes")
        return torch.frombuffer(view[start : start + size], dtype=dtype).view(shape)

    result = _decoded(view[LENGTH.size : end], record, settle)
    if any(view[end:body]):
        raise Refused("malformed", "the padding behind the head is not zero bytes")
    if at != len(view):
        raise Refused("trailing bytes" if at < len(view) else "truncated", f"{len(view)} bytes where {at} belong")
    return result


def _gathered(payload: Loose, record: type[R]) -> R:
    """The record of a payload in memory, read like any other but for its tensors."""
    left = list(payload.tensors)

    def settle(expected: type, value: Any) -> Any:
        if expected is Slots:
            return _slots(value)
        dtype, shape = _described(value)
        if not left:
            raise Refused("truncated", f"a tensor of shape {shape} in a message that has no more of them")
        tensor = left.pop(0)
        if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
            raise Refused("malformed", f"a tensor of shape {tuple(tensor.shape)} is described as one of {shape}")
        return tensor

    result = _decoded(payload.head, record, settle)
    if left:
        raise Refused("trailing bytes", f"{len(left)} tensors are more than {record.__name__} has")
    return result


def _decoded(head: bytes | memoryview, record: type[R], settle: Callable[[type, Any], Any]) -> R:
    """The record of a head, in which `settle` puts tensors and slots in the place of their descriptions."""
    if len(head) > _HEAD_LIMIT and not issubclass(record, Container):
        raise Refused("too large", f"a head of {len(head)} bytes; at most {_HEAD_LIMIT} are read")
    try:
        found, wanted = len(_FIELDS.decode(head)), len(record.__struct_fields__)
        if found != wanted:  # msgspec would fill a missing field with its default
            raise Refused("wrong field", f"{record.__name__} has {wanted} fields, not {found}")
        return msgspec.msgpack.decode(head, type=record, dec_hook=settle)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, MemoryError) as error:
        reason = "wrong field" if isinstance(error, msgspec.ValidationError) else "malformed"
        raise Refused(reason, f"{record.__name__}: {' '.join(str(error).split())[:200]}") from None


def _slots(value: Any) -> Slots:
    """Read slots from a map of names to frames."""
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, bytes) for k, v in value.items()):
        raise Refused("wrong field", "slots are a map of names to frames")
    return Slots({name: unfold(kept) for name, kept in value.items()})


def _described(value: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Check a tensor's [dtype, shape] before anything is computed from it."""
    match value:
        case [code, [*shape]] if type(code) is int and 0 <= code < len(DTYPES):
            if len(shape) <= _DIMS_LIMIT and all(type(n) is int and 0 < n < 2**40 for n in shape):
                return DTYPES[code], tuple(shape)
            raise Refused("wrong shape", f"{shape} is not a shape")
    raise Refused("wrong dtype", f"a tensor is a dtype code below {len(DTYPES)} and a shape")


with warnings.catch_warnings():  # torch says once that bytes are read-only; so, by convention, is every record
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)


def unfold(data: bytes) -> Record:
    """A record of any known kind from its frame on a disk. Raises `Refused`."""
    return unframe(data, KINDS, len(data))[0]
