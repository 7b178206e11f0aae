"""What a checkpoint or a message holds, in figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.core import message
from fedveil.core.message import KINDS, SERVER, Record, Refused, Slots
from fedveil.runs.checkpoint import Checkpoint, Snapshot, read_checkpoint


def opened(path: Path) -> tuple[dict[str, Any], list[tuple[str, Record]]]:
    """What stands on the envelope of a file, and the records inside, each with what it is. Raises `Refused`."""
    raw = path.read_bytes()
    number, where = message.envelope(raw)
    if number not in KINDS:
        raise Refused("wrong kind", f"this program knows no record of kind {number}")
    head = {"kind": KINDS[number].__name__, "run": where.run.hex(), "round": where.round}
    if number not in (Snapshot.kind, Checkpoint.kind):
        head |= {"client": "server" if where.client == SERVER else where.client, "question": where.serial}
        return head, [("record", message.unframe(raw, KINDS, len(raw))[0])]
    saved = read_checkpoint(path)
    memories = [
        (f"{part} of client {client}, round {round_}, question {serial}", record)
        for client, entries in saved.memory.items()
        for round_, serial, part, record in entries
    ]
    slots = [(f"{part} of the server", record) for part, record in saved.state.slots.items()]
    return head, [("state", saved.state), *slots, *memories]


def fields(record: Record) -> dict[str, Any]:
    return {name: _seen(getattr(record, name)) for name in record.__struct_fields__}


def _seen(value: Any) -> Any:
    """A field in figures: a tensor by its dtype, shape and extent, long things by their length."""
    if isinstance(value, Tensor):
        x = value.double()
        extent = {"min": x.min(), "max": x.max(), "mean": x.mean(), "norm": torch.linalg.vector_norm(x)}
        told = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return told | {name: float(x) for name, x in extent.items()}
    if isinstance(value, Slots):
        return ", ".join(value) or "none"
    if isinstance(value, (bytes, list)):
        return f"{len(value)} {'bytes' if isinstance(value, bytes) else 'entries'}"
    return value


def line(value: Any) -> Any:
    """A tensor's figures in a line; what is no tensor stays as it is."""
    if not isinstance(value, dict):
        return value
    extent = "  ".join(f"{name} {value[name]:.3g}" for name in ("min", "max", "mean", "norm"))
    return f"{value['dtype']} {value['shape']}  {extent}"
