"""`check_codec`: what every codec must do, tried on a toy task."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import fedveil as fv
from fedveil.core import message, schema
from fedveil.core.message import PREFIX_BYTES, Envelope, Size
from fedveil.runs import recipe
from fedveil.testing import methods
from fedveil.testing.attacks import values
from fedveil.testing.toys import label, require, toy_task, trial

LENGTH = 0.1  # of the updates that are encoded
CLOSE = 1e-4  # relative: how far a row in a stack may be from the row alone, because of rounding
SMALL = 1e-3  # the most that may be decoded of an update of zeros
FLIPS = 64  # bits of a payload that are flipped, one at a time
REPEATS = 4  # rounds of error feedback


@dataclass
class Case:
    """A codec, the toy task, and updates [C, d] with the payloads that it makes of them."""

    codec: fv.Codec
    task: fv.Task

    @cached_property
    def updates(self) -> Tensor:
        """What an epoch of training changes in the weights of each client, scaled to one length, [C, d]."""
        stack = self.stack(range(len(self.task.clients)))
        found = fv.LocalTraining().train(stack, self.task.initial)[0] - self.task.initial
        scaled: Tensor = LENGTH * found / torch.linalg.vector_norm(found, dim=1, keepdim=True)
        return scaled

    @cached_property
    def payloads(self) -> list[Any]:
        return self.encode(self.updates)

    @cached_property
    def decoded(self) -> Tensor:
        return self.decode(self.payloads)

    def stack(self, clients: Sequence[int], round_: int = 1) -> fv.ClientStack:
        """Clients as a handler sees them."""
        seed, none = fv.Seed.root(0).child("round", round_), [fv.Slots() for _ in clients]
        return fv.ClientStack(self.task, tuple(clients), round_, seed, fv.Seed.root(1), none, [{} for _ in clients])

    def encode(self, updates: Tensor, clients: Sequence[int] | None = None, round_: int = 1) -> list[Any]:
        """Payloads of updates [C, d] of these clients; None: all."""
        stack = self.stack(range(len(updates)) if clients is None else clients, round_)
        at = self.task.initial.expand(len(updates), -1)
        seeds = stack.seeds("encoding")
        found: list[Any] = self._tried("encode", lambda: self.codec.encode(self.task, at, updates, seeds, stack))
        return found

    def decode(self, payloads: Sequence[Any]) -> Tensor:
        at = self.task.initial.expand(len(payloads), -1)
        found: Tensor = self._tried("decode", lambda: self.codec.decode(self.task, at, payloads))
        return found

    def _tried(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except fv.Refused:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise AssertionError(f"{label(self.codec)}: {what} failed on a toy task with {told}") from error

    def sizes(self, client: int) -> dict[str, Size]:
        """What the names in the payload of a client stand for."""
        return {**self.codec.for_client(client).sizes(self.task), "records": self.task.largest}

    def read(self, frame: bytes, client: int) -> Any:
        """A payload as the server reads it. Raises `Refused`."""
        kind, sizes = self.codec.payload, self.sizes(client)
        received, _ = message.unframe(frame, {kind.kind: kind}, schema.size_limit(kind, sizes))
        schema.check(received, sizes)
        self.codec.for_client(client).check(self.task, received)
        return received


def check_codec(codec: fv.Codec) -> None:
    """Raise an AssertionError with one sentence if a codec breaks a rule that every codec must keep.

    The checks run in seconds on a toy task, with the settings that the codec has. `CODEC_CHECKS` lists what is checked,
    in order. A codec in code space has no payload of one update; it is checked by runs of FedAvg.
    """
    require(isinstance(codec, fv.Codec), f"check_codec takes a codec, not {methods.called(codec)}; give it an instance")
    case = Case(codec, toy_task())
    try:
        codec.validate(case.task)
    except ValueError as error:
        raise AssertionError(f"{label(codec)} with these settings refuses the toy task: {error}") from error
    for check in CODEC_CHECKS.values():
        check(case)


def check_registered(case: Case) -> None:
    """A codec is registered under its name, its payload is a kind of message, and recipes can hold it."""
    codec, kind = case.codec, type(case.codec)
    require(
        getattr(kind, "name", None) and fv.Codec.registry.get(kind.name) is kind,
        f"{kind.__name__} is not registered under a name of its own; state `name: ClassVar[str]` in the class",
    )
    words = (kind.__doc__ or "").strip()
    require(
        words and not words.startswith(f"{kind.__name__}("),  # which is what @dataclass writes
        f"{kind.__name__} has no docstring; say in its first line what it sends, for `fedveil describe`",
    )
    try:
        method = fv.FedAvg(up=codec)
        found: Any = recipe.parse(tomllib.loads(fv.Recipe(method=method).toml())).method
    except Exception as error:
        raise AssertionError(f"{label(codec)} cannot be used in FedAvg(up={kind.__name__}(...)): {error}") from error
    require(
        found == method,
        f"{label(codec)}: its recipe gives {found.up} in place of {codec}; let its fields be numbers, text, lists of "
        "these, and dataclasses",
    )


def check_code_space(case: Case) -> None:
    """A codec in code space works in runs of FedAvg."""
    if case.codec.in_code_space:
        method = methods.Case(fv.FedAvg(up=case.codec), case.task)
        for name in ("run", "stacks", "memory", "resume", "hostile", "cost", "secure"):
            methods.METHOD_CHECKS[name](method)


def check_secure(case: Case) -> None:
    """Payloads that say they add up give, in a secure sum, the weights that they give in the clear."""
    if case.codec.payload.additive:
        methods.check_secure(methods.Case(fv.FedAvg(up=case.codec), case.task))


def check_shapes(case: Case) -> None:
    """`encode` gives a payload a row that fits its schema, `decode` gives finite float32 updates [C, d]."""
    codec, updates, before = case.codec, case.updates, case.updates.clone()
    require(
        len(case.payloads) == len(updates),
        f"{label(codec)}: encode makes {len(case.payloads)} payloads of {len(updates)} updates; return one a row",
    )
    for client, payload in enumerate(case.payloads):
        require(
            type(payload) is codec.payload,
            f"{label(codec)}: encode returns a {type(payload).__name__}, but `payload` is {codec.payload.__name__}",
        )
        try:
            schema.check(payload, case.sizes(client))
            codec.for_client(client).check(case.task, payload)
        except (fv.Refused, KeyError) as error:
            raise AssertionError(
                f"{label(codec)}: an honest {type(payload).__name__} is refused ({error}); state each dimension in "
                "`sizes`, and let `check` take what `encode` makes"
            ) from error
    found = case.decoded
    require(
        found.shape == updates.shape and found.dtype == torch.float32,
        f"{label(codec)}: decode gives {found.dtype} of shape {list(found.shape)}, not [C, d]",
    )
    require(torch.isfinite(found).all(), f"{label(codec)}: decode gives values that are not finite")
    require(torch.equal(updates, before), f"{label(codec)}: encode changes the updates that it is given; copy them")


def check_determinism(case: Case) -> None:
    """Equal seeds give equal payloads, and what was read from a frame is decoded as what was written."""
    again, codec = case.encode(case.updates), case.codec
    same = all(message.pack(a) == message.pack(b) for a, b in zip(case.payloads, again, strict=True))
    require(same, f"{label(codec)}: encode makes other payloads of the same updates and seeds; draw from `seeds` only")
    received = [case.read(frame, client) for client, frame in enumerate(_frames(case))]
    require(
        torch.equal(case.decode(received), case.decoded),
        f"{label(codec)}: decode gives another update for a payload that went through bytes; let it read the payload "
        "and nothing else",
    )


def check_sizes(case: Case) -> None:
    """`sizes` gives the length of a frame before there is one."""
    for client, frame in enumerate(_frames(case)):
        sizes = case.sizes(client)
        expected = message.size(schema.blank(case.codec.payload, sizes))
        fits = len(frame) <= expected if "bytes" in sizes else len(frame) == expected
        require(
            fits,
            f"{label(case.codec)}: client {client}'s frame has {len(frame)} bytes, but `sizes` makes it {expected}; "
            'state exact dimensions, or the most bytes of a payload as "bytes"',
        )


def check_zero(case: Case) -> None:
    """An update of zeros is decoded as almost nothing."""
    if case.codec.replaces_training:
        return
    found = case.decode(case.encode(torch.zeros_like(case.updates)))
    largest = float(found.abs().max())
    require(
        largest <= SMALL,  # false for NaN
        f"{label(case.codec)}: an update of zeros is decoded as {largest:g}; let it be below {SMALL:g}",
    )


def check_lossless(case: Case) -> None:
    """A codec that says it is not lossy gives back what it was given."""
    if not case.codec.lossy:
        apart = float((case.decoded - case.updates).abs().max())
        require(
            apart == 0,
            f"{label(case.codec)} states lossy = False, but decoded updates are off by {apart:.2g}; leave it at True",
        )


def check_rows(case: Case) -> None:
    """A row of a stack is encoded and decoded as if it were alone."""
    alone = [case.decode(case.encode(row[None], [k]))[0] for k, row in enumerate(case.updates)]
    apart = float((torch.stack(alone) - case.decoded).norm() / case.decoded.norm().clamp(min=1e-12))
    require(
        apart <= CLOSE,
        f"{label(case.codec)}: updates are decoded {apart:.2g} apart, relative to their length, if clients are encoded "
        f"in one stack and not one by one, where {CLOSE:g} is rounding; let payload k depend on row k alone",
    )


def check_hostile(case: Case) -> None:
    """A hostile payload is refused, or decoded to finite values."""
    codec = case.codec
    for name, frame in _hostile(case):
        try:
            found = codec.decode(case.task, case.task.initial[None], [case.read(frame, 0)])
        except fv.Refused:
            continue
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise AssertionError(
                f"{label(codec)}: a payload with {name} makes the server fail with {told}; let `check` raise Refused"
            ) from error
        require(
            torch.isfinite(found).all(),
            f"{label(codec)}: a payload with {name} is decoded to values that are not finite; bound its fields with "
            "Shape(low, high), or let `check` raise Refused",
        )


def _hostile(case: Case) -> Iterator[tuple[str, bytes]]:
    """What an attacker may send as client 0."""
    for name, changed in values(case.payloads[0]):
        yield name, message.frame(changed, Envelope())
    frame, draw = _frames(case)[0], fv.Seed.root(0).child("flips").torch()
    for bit in torch.randint(8 * PREFIX_BYTES, 8 * len(frame), (FLIPS,), generator=draw).tolist():
        data = bytearray(frame)
        data[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(data)


def check_down(case: Case) -> None:
    """A codec that the server can use goes down as well as up."""
    codec, task = case.codec, case.task
    if not codec.server_can_encode:
        return
    try:
        payloads = codec.encode(task, task.initial[None], case.updates[:1], [fv.Seed.root(0)], None)
    except Exception as error:
        raise AssertionError(
            f"{label(codec)}: encode failed without a stack, as the server calls it ({type(error).__name__}: {error}); "
            "let it work where `stack` is None, or state server_can_encode = False"
        ) from error
    require(len(payloads) == 1, f"{label(codec)}: encode without a stack makes {len(payloads)} payloads of one update")
    found = trial(fv.FedAvg(down=codec), task)
    missing = [f"client {client}: {why}" for row in found.rows for client, why in row.missing.items()]
    require(
        not missing and torch.isfinite(found.weights).all(),
        f"{label(codec)}: as `down` of FedAvg clients do not answer ({'; '.join(missing[:1])}); let both sides decode "
        "one payload alike",
    )


def check_feedback(case: Case) -> None:
    """With error feedback, what is lost of an update that stays the same does not grow without bound.

    A codec that loses less than it is given adds at most one update a round to what is not yet sent.
    """
    codec = case.codec
    if not codec.lossy or codec.loses_the_same or codec.replaces_training:
        return
    lost = torch.zeros_like(case.updates)
    for round_ in range(1, REPEATS + 1):
        owed = case.updates + lost
        lost = owed - case.decode(case.encode(owed, round_=round_))
        most = float(torch.linalg.vector_norm(lost, dim=1).max()) / LENGTH
        require(
            most <= round_ * (1 + 1e-3),  # false for NaN
            f"{label(codec)}: in round {round_} of error feedback {most:.3g} updates are lost, more than were encoded; "
            "let it lose less than it is given, or state loses_the_same",
        )


def _frames(case: Case) -> list[bytes]:
    return [message.frame(payload, Envelope(client=k)) for k, payload in enumerate(case.payloads)]


def _with_payloads(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """A check of single payloads, which codecs in code space do not have."""

    def run(case: Case) -> None:
        if not case.codec.in_code_space:
            check(case)

    run.__doc__ = check.__doc__
    return run


CODEC_CHECKS: dict[str, Callable[[Case], None]] = {
    "registered": check_registered,
    "code space": check_code_space,
    "shapes": _with_payloads(check_shapes),
    "determinism": _with_payloads(check_determinism),
    "sizes": _with_payloads(check_sizes),
    "zero": _with_payloads(check_zero),
    "lossless": _with_payloads(check_lossless),
    "rows": _with_payloads(check_rows),
    "hostile": _with_payloads(check_hostile),
    "down": check_down,
    "feedback": _with_payloads(check_feedback),
    "secure": _with_payloads(check_secure),
}
