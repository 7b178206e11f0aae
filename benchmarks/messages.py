"""What it costs to turn an update into checked bytes and back."""

from __future__ import annotations

import torch

from benchmarks.clock import in_turns
from fedveil.codecs.raw import Update
from fedveil.core import message, schema
from fedveil.core.message import Envelope


def million_floats() -> dict[str, float]:
    """Encode, decode and check an update of 1,000,000 floats, against one memcpy of its bytes (goal: at most 3)."""
    torch.set_num_threads(1)
    update, where = Update(torch.randn(1_000_000), 100), Envelope()
    frame = message.frame(update, where)
    sizes: dict[str, message.Size] = {"weights": 1_000_000, "records": 1000}

    def read() -> None:
        record, _ = message.unframe(frame, {Update.kind: Update}, len(frame))
        schema.check(record, sizes)

    view = memoryview(frame)
    copy, encode, decode = in_turns(lambda: bytes(view), lambda: message.frame(update, where), read, turns=200)
    return {
        "memcpy, microseconds": copy * 1e6,
        "encode / memcpy": encode / copy,
        "decode and check / memcpy": decode / copy,
        "all / memcpy": (encode + decode) / copy,
        "overhead, bytes": len(frame) - 4e6,
    }
