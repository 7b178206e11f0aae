"""The list of hostile messages as tables: a name, what becomes of an honest frame, and the reason of the refusal.

`BYTES` fits any record, `tensor_attacks` any field of 8 floats, and the other tables one field each.
"""

from __future__ import annotations

import functools
import io
import json
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from fedveil.core import message
from fedveil.core.clients import Letter, Reply
from fedveil.core.loose import Loose
from fedveil.core.message import KINDS, PREFIX_BYTES, Refused
from fedveil.core.method import State

WEIGHTS = 8
NESTED: list[Any] = functools.reduce(lambda inner, _: [inner], range(500), [])
nan, inf = float("nan"), float("inf")


@dataclass(frozen=True)
class Scene:
    """What an attacker has at hand."""

    frame: bytes  # its own honest frame of this round
    earlier: bytes  # its own frame of the round before
    neighbour: bytes  # another client's frame of this round


Attack = Callable[[Scene], bytes]


def enveloped(**changes: Any) -> Attack:
    """The honest contents in another envelope."""

    def attack(scene: Scene) -> bytes:
        kind, where = message.envelope(scene.frame)
        return message.prefix(kind, replace(where, **changes)) + scene.frame[PREFIX_BYTES:]

    return attack


def later(rounds: int) -> Attack:
    """The honest contents as of a round before or after."""

    def attack(scene: Scene) -> bytes:
        return enveloped(round=message.envelope(scene.frame)[1].round + rounds)(scene)

    return attack


def headed(change: Callable[[list[Any]], Any]) -> Attack:
    """The honest frame with another head: `change` gets it as plain lists."""

    def attack(scene: Scene) -> bytes:
        end = PREFIX_BYTES + 4 + int.from_bytes(scene.frame[PREFIX_BYTES : PREFIX_BYTES + 4], "little")
        head = msgspec.msgpack.decode(scene.frame[PREFIX_BYTES + 4 : end])
        body = scene.frame[end + -end % 8 :]
        return scene.frame[:PREFIX_BYTES] + payload(msgspec.msgpack.encode(change(head)), body)

    return attack


def payload(head: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<I", len(head)) + head + bytes(-(4 + len(head)) % 8) + body


def field(index: int, value: Any) -> Attack:
    """The honest record with another value in one field, well written."""

    def attack(scene: Scene) -> bytes:
        _kind, where = message.envelope(scene.frame)
        record, _ = message.unframe(scene.frame, KINDS, len(scene.frame))
        return message.frame(msgspec.structs.replace(record, **{record.__struct_fields__[index]: value}), where)

    return attack


def saved_by(library: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    library(file)
    return file.getvalue()


def patched(at: int, data: bytes) -> Attack:
    """The honest frame with some bytes replaced."""
    return lambda scene: scene.frame[:at] + data + scene.frame[at + len(data) :]


WIRES = ("bytes", "memory")


def loosened(frame: bytes) -> Letter | None:
    """The same message within a process: its head, and the tensors that it describes; None where it has no such form,
    because it is no frame or ends within its head."""
    try:
        kind, where = message.envelope(frame)
    except Refused:
        return None
    (length,) = struct.unpack("<I", frame[PREFIX_BYTES : PREFIX_BYTES + 4] or bytes(4))
    end = PREFIX_BYTES + 4 + length
    if end > len(frame) or len(frame) == PREFIX_BYTES:
        return None
    head, body = frame[PREFIX_BYTES + 4 : end], frame[end + -end % 8 :]
    tensors = []
    for dtype, shape in _descriptions(head):
        size = math.prod(shape) * dtype.itemsize
        if not 0 < size <= len(body):
            break
        tensors.append(torch.frombuffer(bytearray(body[:size]), dtype=dtype).view(shape))
        body = body[size + -size % 8 :]
    else:
        tensors += [torch.frombuffer(bytearray(body), dtype=torch.uint8)] if body else []
    return Letter(kind, where, Loose(head, tuple(tensors)))


def _descriptions(head: bytes) -> list[tuple[torch.dtype, list[int]]]:
    """The dtypes and shapes in a head that a tensor can have."""
    try:
        values = msgspec.msgpack.decode(head)
    except (msgspec.DecodeError, RecursionError):
        return []
    found = []
    for value in values if isinstance(values, list) else []:
        match value:
            case [int(code), [*shape]] if 0 <= code < len(message.DTYPES):
                if all(isinstance(n, int) and n > 0 for n in shape) and len(shape) <= 8:
                    found.append((message.DTYPES[code], shape))
    return found


def received(frame: bytes, wire: str) -> Letter:
    """A question as it arrives. Raises `Refused`."""
    return (loosened(frame) if wire == "memory" else None) or Letter.read(frame)


def sent(client: int, frame: bytes, wire: str) -> Reply:
    """A client's frame as it arrives."""
    letter = loosened(frame) if wire == "memory" else None
    return Reply(client, letter=letter) if letter else Reply(client, frame)


HEAD = PREFIX_BYTES
BYTES: dict[str, tuple[Attack, str]] = {
    "nothing": (lambda scene: b"", "truncated"),
    "one byte": (lambda scene: b"F", "truncated"),
    "a pickle": (lambda scene: pickle.dumps({"update": [1.0] * WEIGHTS, "records": 6}), "not a frame"),
    "a pickle behind an honest prefix": (lambda scene: scene.frame[:HEAD] + pickle.dumps([0.0] * 9), "truncated"),
    "a torch file": (lambda scene: saved_by(lambda f: torch.save(torch.ones(WEIGHTS), f)), "too large"),
    "a numpy file": (lambda scene: saved_by(lambda f: np.save(f, np.ones(WEIGHTS))), "not a frame"),
    "JSON": (lambda scene: json.dumps({"update": [1.0] * WEIGHTS}).encode(), "not a frame"),
    "cut off in the prefix": (lambda scene: scene.frame[:15], "truncated"),
    "cut off before the head": (lambda scene: scene.frame[:HEAD], "truncated"),
    "cut off in the head": (lambda scene: scene.frame[: HEAD + 7], "truncated"),
    "cut off in the body": (lambda scene: scene.frame[:-5], "truncated"),
    "a trailing byte": (lambda scene: scene.frame + b"\0", "trailing bytes"),
    "trailing tensors": (lambda scene: scene.frame + bytes(64), "trailing bytes"),
    "twice in one": (lambda scene: scene.frame + scene.frame, "trailing bytes"),
    "a megabyte too long": (lambda scene: scene.frame + bytes(1 << 20), "too large"),
    "a head of 4 GiB": (patched(HEAD, b"\xff\xff\xff\xff"), "truncated"),
    "a head of nothing": (lambda scene: scene.frame[:HEAD] + payload(b""), "malformed"),
    "a head of garbage": (lambda scene: scene.frame[:HEAD] + payload(b"\xc1" * 30), "malformed"),
    "a list of 4 billion": (lambda scene: scene.frame[:HEAD] + payload(b"\xdd\xff\xff\xff\xff"), "malformed"),
    "a field twice": (headed(lambda head: [head[0], *head]), "wrong field"),
    "the last field twice": (headed(lambda head: [*head, head[-1]]), "wrong field"),
    "a field missing": (headed(lambda head: head[:-1]), "wrong field"),
    "a field too many": (headed(lambda head: [*head, 7]), "wrong field"),
    "no fields": (headed(lambda head: []), "wrong field"),
    "fields by name": (headed(lambda head: {"update": head[0], "records": 6}), "wrong field"),
    "a past round": (later(-1), "wrong round"),
    "a future round": (later(1), "wrong round"),
    "the last round there is": (enveloped(round=2**32 - 1), "wrong round"),
    "round zero": (enveloped(round=0), "wrong round"),
    "another run": (enveloped(run=b"another!"), "wrong run"),
    "another question of the round": (enveloped(serial=1), "wrong serial"),
    "another's id": (enveloped(client=3), "wrong client"),
    "an id that nobody has": (enveloped(client=99), "wrong client"),
    "the server's id": (enveloped(client=message.SERVER), "wrong client"),
    "a neighbour's frame": (lambda scene: scene.neighbour, "wrong client"),
    "a replay": (lambda scene: scene.earlier, "wrong round"),
    "another version": (patched(2, b"\x01"), "wrong version"),
    "a kind that nobody has": (patched(3, b"\xff"), "wrong kind"),
    "a kind that nobody has, by its high bytes": (patched(22, b"\xff\xff"), "wrong kind"),
    "a state of the server": (
        lambda scene: message.frame(State(torch.ones(WEIGHTS)), message.envelope(scene.frame)[1]),
        "wrong kind",
    ),
}


def described(index: int, dtype: Any = 0, shape: Any = (WEIGHTS,)) -> Attack:
    """Another [dtype, shape] for one tensor, over the honest bytes."""
    return headed(lambda head: [*head[:index], [dtype, shape], *head[index + 1 :]])


def spiked(value: float) -> torch.Tensor:
    """An inconspicuous vector but for one number."""
    return torch.tensor([0.01] * (WEIGHTS - 1) + [value])


def tensor_attacks(index: int) -> dict[str, tuple[Attack, str]]:
    """What can be done to the tensor at `index` of a record."""
    return {
        "an object dtype": (described(index, "O"), "wrong dtype"),
        "a string dtype": (described(index, "<U8"), "wrong dtype"),
        "a complex dtype": (described(index, "c8"), "wrong dtype"),
        "a big-endian dtype": (described(index, ">f4"), "wrong dtype"),
        "a dtype code too high": (described(index, len(message.DTYPES)), "wrong dtype"),
        "a negative dtype code": (described(index, -1), "wrong dtype"),
        "a number for a tensor": (headed(lambda head: [*head[:index], 0.5, *head[index + 1 :]]), "wrong dtype"),
        "a list for a tensor": (headed(lambda head: [*head[:index], [0.5] * 8, *head[index + 1 :]]), "wrong dtype"),
        "500 nested lists for a tensor": (
            headed(lambda head: [*head[:index], NESTED, *head[index + 1 :]]),
            "wrong dtype",
        ),
        "nil for a tensor": (headed(lambda head: [*head[:index], None, *head[index + 1 :]]), "wrong dtype"),
        "integers for floats": (described(index, message.DTYPES.index(torch.int32)), "wrong dtype"),
        "doubles for floats": (field(index, torch.ones(WEIGHTS).double()), "wrong dtype"),
        "1e13 elements": (described(index, shape=[10**13]), "wrong shape"),
        "1e12 elements": (described(index, shape=[10**12]), "truncated"),
        "a shape that overflows": (described(index, shape=[2**32, 2**32]), "truncated"),
        "a shape that overflows to 8": (described(index, shape=[2**39, 2**25 + 1, 8]), "truncated"),
        "a negative shape": (described(index, shape=[-WEIGHTS]), "wrong shape"),
        "two negative dimensions": (described(index, shape=[-2, -4]), "wrong shape"),
        "a shape of size zero": (described(index, shape=[0]), "wrong shape"),
        "a shape of size zero in two dimensions": (described(index, shape=[WEIGHTS, 0]), "wrong shape"),
        "a shape with a float": (described(index, shape=[8.0]), "wrong shape"),
        "a shape of 100 dimensions": (described(index, shape=[1] * 99 + [WEIGHTS]), "wrong shape"),
        "a scalar": (field(index, torch.tensor(0.5)), "wrong shape"),
        "a broadcastable [1]": (field(index, torch.ones(1)), "wrong shape"),
        "a broadcastable [1, d]": (field(index, torch.ones(1, WEIGHTS)), "wrong shape"),
        "a broadcastable [d, 1]": (field(index, torch.ones(WEIGHTS, 1)), "wrong shape"),
        "one number too few": (field(index, torch.ones(WEIGHTS - 1)), "wrong shape"),
        "one number too many": (field(index, torch.ones(WEIGHTS + 1)), "wrong shape"),
        "NaN": (field(index, spiked(nan)), "not finite"),
        "infinity": (field(index, spiked(inf)), "not finite"),
        "minus infinity": (field(index, spiked(-inf)), "not finite"),
        "a norm of 1e38": (field(index, torch.full((WEIGHTS,), 1e38)), "out of range"),
        "one number of -1e38": (field(index, spiked(-1e38)), "out of range"),
    }


RECORDS: dict[str, tuple[Attack, str]] = {
    "negative records": (field(1, -6), "wrong field"),
    "no records": (field(1, 0), "wrong field"),
    "NaN records": (field(1, nan), "wrong field"),
    "six and a half records": (field(1, 6.5), "wrong field"),
    "1e12 records": (field(1, 10**12), "wrong field"),
    "1e12 records as a float": (field(1, 1e12), "wrong field"),
    "more records than anybody has": (field(1, 7), "out of range"),
    "true records": (field(1, True), "wrong field"),
    "records in words": (field(1, "six"), "wrong field"),
    "nil records": (field(1, None), "wrong field"),
    "a list of records": (field(1, [6]), "wrong field"),
}

WEIGHT: dict[str, tuple[Attack, str]] = {
    "a negative weight": (field(1, -1.0), "wrong field"),
    "a weight of zero": (field(1, 0.0), "wrong field"),
    "a weight of NaN": (field(1, nan), "wrong field"),
    "an infinite weight": (field(1, inf), "wrong field"),
    "a weight above 1e12": (field(1, 1.1e12), "wrong field"),
    "a weight in words": (field(1, "one"), "wrong field"),
    "a weight of nil": (field(1, None), "wrong field"),
}
