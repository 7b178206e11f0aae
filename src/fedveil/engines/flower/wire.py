"""Our frames in Flower's messages, both ways. What comes out of one was written by others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto

from fedveil.core import message as frames
from fedveil.core.clients import Reply
from fedveil.core.message import Refused
from fedveil.core.version import __version__

OURS = "fedveil"  # the record that holds a question or an answer
KEPT = "fedveil-kept"  # in a simulation, the record that holds what the client keeps
FIGURES = 1000  # of a reply; a method measures a few a layer
WORDS = 400  # characters of a name or a reason


def content(values: Mapping[str, Any], kept: bytes = b"") -> RecordDict:
    records = RecordDict({OURS: ConfigRecord(dict(values))})
    if kept:
        records[KEPT] = ConfigRecord({"frame": kept})
    return records


def take(message: Message, name: str, kind: type, default: Any = None, record: str = OURS) -> Any:
    """One value of a message from outside, if it is of exactly this type. Raises `Refused`."""
    found = message.content.config_records.get(record) if message.has_content() else None
    value = default if found is None else found.get(name, default)
    if type(value) is not kind:
        raise Refused("malformed", f"the Flower message has no '{name}' of type {kind.__name__}")
    return value


def versions() -> dict[str, Any]:
    """What a party says of its program in every question and when it says which client it is."""
    return {"version": __version__, "format": frames.VERSION}


def agree(message: Message, sender: str, here: str) -> None:
    """Refuse a party whose program is of another version than this one. Raises `Refused`."""
    theirs = {"version": take(message, "version", str, ""), "format": take(message, "format", int, 0)}
    if theirs != (ours := versions()):
        told = f"{sender} runs {_program(**theirs)}, {here} runs {_program(**ours)}"
        raise Refused("wrong version", f"{told}; install the same version of fedveil on both")


def _program(version: str, format: int) -> str:
    known = f"fedveil {_words(version)[:40]} (message format {format})"
    return known if version else "a fedveil too old to say its version"


def claimed(message: Message) -> int:
    """Which client a node says it is. A fedveil without a version says it as `partition`. Raises `Refused`."""
    number: int = take(message, "client" if take(message, "version", str, "") else "partition", int)
    return number


def size(message: Message) -> int:
    """Bytes of a message in Flower's own encoding (protobuf), without what only a simulation carries."""
    kept = message.content.pop(KEPT, None) if message.has_content() else None
    try:
        return int(message_to_proto(message).ByteSize())
    finally:
        if kept is not None:
            message.content[KEPT] = kept


def answer(reply: Reply, figures: bool) -> dict[str, Any]:
    """A reply as the values of a record; what a client measured leaves it in a simulation only."""
    values: dict[str, Any] = {"frame": reply.frame, "problem": reply.problem}
    if figures:
        finite = {name: float(value) for name, value in reply.figures.items() if math.isfinite(value)}
        values |= {"passes": reply.passes, "names": list(finite), "values": list(finite.values())}
    return values


def read_answer(message: Message, client: int, figures: bool) -> Reply:
    """The reply in a message from a client's node. Whatever is wrong with it is the reply's problem."""
    if message.has_error():
        return Reply(client, problem=f"failed: Flower's error {message.error.code}: {_words(message.error.reason)}")
    try:
        frame, problem = take(message, "frame", bytes, b""), take(message, "problem", str, "")
        passes, measured = _figures(message) if figures else (0, {})
        return Reply(client, frame, _words(problem), passes, measured)
    except Refused as error:
        return Reply(client, problem=f"refused: {error}")


def _figures(message: Message) -> tuple[int, dict[str, float]]:
    passes = take(message, "passes", int, 0)
    names, values = take(message, "names", list, []), take(message, "values", list, [])
    if not 0 <= passes < 2**40 or len(names) != len(values) or len(names) > FIGURES:
        raise Refused("malformed", "the figures beside the answer cannot be right")
    for name, value in zip(names, values, strict=True):
        if type(name) is not str or len(name) > WORDS or type(value) is not float or not math.isfinite(value):
            raise Refused("malformed", "a figure beside the answer is not a finite number with a name")
    return passes, dict(zip(names, values, strict=True))


def _words(text: str | None) -> str:
    """What a client says, fit for a terminal: without line ends or control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))[:WORDS]
