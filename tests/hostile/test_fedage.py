"""Hostile answers in code space: refused by name, left out, and without any effect."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

import fedveil as fv
from fedveil.codecs.fedage import Codes, FedAgeCodec, Magnitude, Magnitudes
from fedveil.core import message
from fedveil.core.clients import Reply
from hostile.attacks import BYTES, Scene, inf, nan
from toys import Tamper, linear_task

CULPRIT = 2
METHOD = fv.FedAvg(fv.LocalTraining(lr=0.5, batch=100), up=FedAgeCodec(block=4, code="linear"))
PACKED = replace(METHOD, up=FedAgeCodec(block=4, code="packed", cohort=4, scales="layers"))
OUT = "out of range"
ANOTHER = "another question of the round"


def put(value: float) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.clone().flatten()
        flat[0] = value
        return flat.view_as(tensor)

    return change


CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "a code beyond the pair's reach": (Codes.kind, {"codes": put(1.5)}, OUT),
    "a code of 1e30": (Codes.kind, {"codes": put(1e30)}, OUT),
    "a code that is NaN": (Codes.kind, {"codes": put(nan)}, "not finite"),
    "a code that is infinite": (Codes.kind, {"codes": put(-inf)}, "not finite"),
    "a block more": (Codes.kind, {"codes": lambda t: torch.cat([t, t[:, :1]], 1)}, "wrong shape"),
    "one part only": (Codes.kind, {"codes": lambda t: t[:1]}, "wrong shape"),
    "a longer code": (Codes.kind, {"codes": lambda t: torch.cat([t, t], 2)}, "wrong shape"),
    "codes in doubles": (Codes.kind, {"codes": lambda t: t.double()}, "wrong dtype"),
    "codes in bytes": (Codes.kind, {"codes": lambda t: t.to(torch.uint8)}, "wrong dtype"),
    "a share of 0": (Codes.kind, {"share": put(0)}, OUT),
    "a share below 0": (Codes.kind, {"share": put(-0.5)}, OUT),
    "a share above 1": (Codes.kind, {"share": put(1.5)}, OUT),
    "a share below that of one record": (Codes.kind, {"share": put(0.16)}, OUT),
    "a share that is NaN": (Codes.kind, {"share": put(nan)}, "not finite"),
    "two shares": (Codes.kind, {"share": lambda t: torch.cat([t, t])}, "wrong shape"),
    "a magnitude below 0": (Magnitude.kind, {"largest": lambda _: -1.0}, "wrong field"),
    "a magnitude that is NaN": (Magnitude.kind, {"largest": lambda _: nan}, "wrong field"),
    "a magnitude of 1e30": (Magnitude.kind, {"largest": lambda _: 1e30}, "wrong field"),
    "a magnitude in words": (Magnitude.kind, {"largest": lambda _: "much"}, "wrong field"),
}


OF_PACKED: dict[str, tuple[int, dict[str, Any], str]] = {
    "a packed code of a half": (Codes.kind, {"codes": put(0.5)}, OUT),
    "a packed number above s": (Codes.kind, {"codes": put(65.0)}, OUT),
    "a packed number below 0": (Codes.kind, {"codes": put(-1.0)}, OUT),
    "a packed code beyond its reach": (Codes.kind, {"codes": put(64.0 * 258 + 1)}, OUT),
    "a layer's magnitude below 0": (Magnitudes.kind, {"largest": put(-1.0)}, OUT),
    "a layer's magnitude of 1e30": (Magnitudes.kind, {"largest": put(1e30)}, OUT),
    "a layer's magnitude that is NaN": (Magnitudes.kind, {"largest": put(nan)}, "not finite"),
    "a layer more": (Magnitudes.kind, {"largest": lambda t: torch.cat([t, t])}, "wrong shape"),
}


def replying(change: Any, method: fv.Method = METHOD) -> fv.Result:
    """A run of four clients whose replies of round 2 pass through `change(kind, reply)`."""

    def tamper(round_: int, replies: list[Reply]) -> list[Reply]:
        if round_ != 2:
            return replies
        changed = [change(message.envelope(r.frame)[0], r) if r.client == CULPRIT else r for r in replies]
        return [r for r in changed if r]

    return fv.run(linear_task(), method, rounds=3, cohort=4, engine=Tamper(tamper), evaluate_every=3)


def silent(kind: int, method: fv.Method = METHOD) -> fv.Result:
    return replying(lambda found, reply: None if found == kind else reply, method)


def assert_refused(result: fv.Result, reason: str, kind: int, method: fv.Method = METHOD) -> None:
    first, second, third = result.ledger.rows
    assert list(second.missing) == [str(CULPRIT)]
    assert second.missing[str(CULPRIT)].startswith(f"refused: {reason}: ")
    assert not first.missing
    assert not third.missing
    assert torch.equal(result.weights, silent(kind, method).weights)


@pytest.mark.parametrize("what", [*CASES, *OF_PACKED])
def test_a_hostile_answer_is_refused_by_name_and_changes_nothing(what):
    kind, changes, reason = (CASES | OF_PACKED)[what]
    method = PACKED if what in OF_PACKED else METHOD

    def change(found: int, reply: Reply) -> Reply:
        if found != kind:
            return reply
        record, where = message.unframe(reply.frame, message.KINDS, len(reply.frame))
        new = {name: f(getattr(record, name)) for name, f in changes.items()}
        return replace(reply, frame=message.frame(msgspec.structs.replace(record, **new), where))

    assert_refused(replying(change, method), reason, kind, method)


@pytest.mark.parametrize(
    ("what", "kind"),  # the question that "another question" names is the second one, which codes are the answer to
    [(what, kind) for what in BYTES for kind in (Codes.kind, Magnitude.kind) if (what, kind) != (ANOTHER, Codes.kind)],
)
def test_hostile_bytes_are_refused_like_any(what, kind):
    attack, reason = BYTES[what]
    earlier: dict[int, bytes] = {}

    def tamper(round_: int, replies: list[Reply]) -> list[Reply]:
        found = message.envelope(replies[0].frame)[0]
        frames = {r.client: r.frame for r in replies}
        if found != kind:
            return replies
        if round_ != 2:
            earlier.update(frames)
            return replies
        bad = attack(Scene(frames[CULPRIT], earlier[CULPRIT], frames[CULPRIT + 1]))
        return [replace(r, frame=bad) if r.client == CULPRIT else r for r in replies]

    assert_refused(
        fv.run(linear_task(), METHOD, rounds=3, cohort=4, engine=Tamper(tamper), evaluate_every=3), reason, kind
    )


def test_the_culprits_honest_answer_would_have_counted():
    honest = replying(lambda _, reply: reply)
    for kind in (Codes.kind, Magnitude.kind):
        assert not torch.equal(honest.weights, silent(kind).weights)
