"""A client without PyTorch: NumPy and ONNX Runtime answer the question that BAFFLE asks at the batch level.

`fedveil export` copies this file and `directions.py` beside the exported model, so it imports nothing else of fedveil.
It reads and writes the frames of `fedveil/core/message.py`, of the two kinds it needs.

    python -m fedveil_edge.edge --client 3 records.npz < question > answer
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.core.directions import Directions, order, words

PROBE, SLOPES = 0xDC52B0, 0x7EEB17  # kinds of record
VERSION, FLOAT32 = 2, 0
PREFIX = struct.Struct("<2sBB8sIIHH")
LARGEST = 1e6  # of a weight; what is beyond is a fault
Floats = NDArray[np.float32]


class Refused(ValueError):
    """A question that must not be answered."""


# ---------------------------------------------------------------------------------------------------- frames


def read(frame: bytes, size: int, max_directions: int) -> tuple[tuple[bytes, int, int, int], Floats, int, int]:
    """A `Probe` of `size` weights -> (run, round, client, serial), weights [d], key, number of directions."""
    if len(frame) < PREFIX.size + 4:
        raise Refused("truncated: the frame ends before its head")
    magic, version, low, run, round_, client, serial, high = PREFIX.unpack_from(frame)
    if (magic, version, low | high << 8) != (b"FV", VERSION, PROBE):
        raise Refused(f"wrong kind: the frame is no question of kind {PROBE} in version {VERSION}")
    (length,) = struct.unpack_from("<I", frame, PREFIX.size)
    start = PREFIX.size + 4
    body = start + length + -(4 + length) % 8
    if len(frame) != body + 4 * size + -4 * size % 8:
        raise Refused(f"wrong length: {len(frame)} bytes are no question about {size} weights")
    head, end = _value(frame[start : start + length], 0)
    match head:
        case [[0, [int(d)]], int(key), int(count)] if d == size and end == length and 1 <= count <= max_directions:
            weights = np.frombuffer(frame, "<f4", size, body).astype(np.float32)
        case _:
            raise Refused(f"wrong field: the question is not of {size} weights and 1 to {max_directions} directions")
    if not bool((np.abs(weights) <= LARGEST).all()):  # NaN is not
        raise Refused("out of range: a weight is not a finite number below a million")
    return (run, round_, client, serial), weights, key - 2**64 * (key >= 2**63), count


def write(where: tuple[bytes, int, int, int], slopes: Floats, records: int) -> bytes:
    """The frame of a `Slopes`."""
    head = b"\x92\x92" + _int(FLOAT32) + b"\x91" + _int(len(slopes)) + _int(records)
    body = slopes.astype("<f4").tobytes()
    prefix = PREFIX.pack(b"FV", VERSION, SLOPES & 0xFF, *where, SLOPES >> 8)
    return b"".join(
        [prefix, struct.pack("<I", len(head)), head, bytes(-(4 + len(head)) % 8), body, bytes(-len(body) % 8)]
    )


_INTS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


def _value(data: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
    """The MessagePack value at `at` and where it ends: an integer, or a short array of such values."""
    try:
        tag = data[at]
        if tag < 0x80 or tag >= 0xE0:
            return (tag if tag < 0x80 else tag - 256), at + 1
        if tag in _INTS:
            (number,) = struct.unpack_from(_INTS[tag], data, at + 1)
            return number, at + 1 + struct.calcsize(_INTS[tag])
        if 0x90 <= tag < 0xA0 and depth < 3:
            items, at = [], at + 1
            for _ in range(tag - 0x90):
                item, at = _value(data, at, depth + 1)
                items.append(item)
            return items, at
    except (IndexError, struct.error):
        raise Refused("malformed: the head of the question ends too early") from None
    raise Refused("malformed: the head of the question holds more than numbers")


def _int(number: int) -> bytes:
    """A number from 0 on in as few bytes as MessagePack allows."""
    if number < 0x80:
        return bytes([number])
    for tag, form in ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q")):
        if number < 1 << 8 * struct.calcsize(form):
            return bytes([tag]) + struct.pack(form, number)
    raise ValueError(f"{number} does not fit 64 bits")


# ---------------------------------------------------------------------------------------------------- the client


class Edge:
    """One client: an exported model, its records x [n, *input] and labels y [n], and its number."""

    def __init__(self, folder: Path, x: Floats, y: NDArray[np.int64], client: int) -> None:
        import onnxruntime

        self.x, self.y, self.client = x.astype(np.float32), y.astype(np.int64), client
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        if list(x.shape[1:]) != self.settings["input"] or len(x) != len(y) or not len(x):
            raise ValueError(f"the records have shape {x.shape}; the model takes {self.settings['input']} each")
        if y.min() < 0 or y.max() >= self.settings["classes"]:
            raise ValueError(f"a label is not from 0 to {self.settings['classes'] - 1}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options, ["CPUExecutionProvider"])
        trained = [np.arange(start, stop) for _, _, start, stop, is_trained in self.settings["layers"] if is_trained]
        self.places = np.concatenate(trained)
        self.directions = Directions.of(self.settings["law"], len(self.places), self.settings["directions"])

    def answer(self, question: bytes) -> bytes:
        """The frame of the answer. Raises `Refused`, a `ValueError` of one sentence."""
        size = self.settings["layers"][-1][3]
        where, weights, key, count = read(question, size, self.settings["directions"])
        if where[2] != self.client:
            raise Refused(f"unknown client: this is client {self.client}, not {where[2]}")
        return write(where, self.slopes(weights, key, count), len(self.x))

    def slopes(self, weights: Floats, key: int, count: int) -> Floats:
        """How the mean loss changes along each of `count` directions, [count]."""
        sigma, central = self.settings["sigma"], self.settings["scheme"] == "central"
        shared = np.array([key], dtype=np.int64)
        own = words(shared, np.array([self.client], dtype=np.int64))
        x, y = self.x, self.y
        if self.settings["batch"] is not None and self.settings["batch"] < len(x):
            chosen = order(np, own, len(x))[0, : self.settings["batch"]]
            x, y = x[chosen], y[chosen]
        keys = own if self.settings["seeds"] == "own" else shared
        before, found = np.zeros(0) if central else self._losses(weights, x, y), np.empty(count, np.float32)
        for k in range(count):
            step = np.float32(sigma) * self.directions.rows(np, keys, k, 1)[0, 0]
            if central:
                before = self._losses(self._moved(weights, -step), x, y)
            change = self._losses(self._moved(weights, step), x, y) - before
            found[k] = change.mean() / (2 * sigma if central else sigma)
        return found

    def _moved(self, weights: Floats, step: Floats) -> Floats:
        moved = weights.copy()
        moved[self.places] += step
        return moved

    def _losses(self, weights: Floats, x: Floats, y: NDArray[np.int64]) -> NDArray[np.float64]:
        """The cross-entropy of each record, [n]."""
        feeds = {
            name: weights[start:stop].reshape(shape)
            for name, shape, start, stop, is_trained in self.settings["layers"]
            if is_trained
        }
        at_once = self.settings["at_once"]
        parts = [x[i : i + at_once] for i in range(0, len(x), at_once)]
        logits = np.concatenate([self.session.run(None, {"x": part, **feeds})[0] for part in parts]).astype(np.float64)
        logits -= logits.max(1, keepdims=True)
        losses: NDArray[np.float64] = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
        return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer one question, from stdin to stdout.")
    parser.add_argument("records", type=Path, metavar="RECORDS", help="an .npz file with x [n, *input] and y [n]")
    parser.add_argument("--client", type=int, required=True, metavar="N", help="the number of this client")
    chosen = parser.parse_args()
    with np.load(chosen.records, allow_pickle=False) as records:
        edge = Edge(Path(__file__).resolve().parents[1], records["x"], records["y"], chosen.client)
    try:
        sys.stdout.buffer.write(edge.answer(sys.stdin.buffer.read()))
    except Refused as error:
        sys.exit(f"refused: {error}")


if __name__ == "__main__":
    main()
