"""Hostile payloads of every codec: refused by name, left out, and without any effect.

As for raw updates: a run in which one client's answer of round 2 is hostile must end where a run ends in which that
answer never came.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Reply
from fedveil.core.message import KINDS
from fedveil.core.schema import fields
from fedveil.data import from_tensors
from fedveil.links.steps import WeightsDigest
from hostile.attacks import BYTES, WIRES, Attack, Scene, inf, nan, sent
from toys import Tamper, linear_task

LOCAL = fv.LocalTraining(lr=0.5, batch=100)
TASK = linear_task()
CULPRIT = 2
CODECS: dict[str, fv.Codec] = {
    "half": fv.Half(),
    "half, bfloat16": fv.Half(dtype="bfloat16"),
    "qsgd": fv.Qsgd(bits=4, bucket=8),
    "top-k": fv.TopK(share=0.4),
    "sketch": fv.Sketch(4),
    **{f"tofu, {p}": fv.TofuCodec(points=2, steps=3, precision=p) for p in ("float32", "float16", "uint8")},
    **{
        f"fedsynth, {p}": fv.FedSynthCodec(batches=2, batch=2, epochs=1, fits=3, precision=p)
        for p in ("float32", "float16", "uint8")
    },
}


def changed(**changes: Callable[[Any], Any]) -> Attack:
    """The honest record with some fields changed, well written."""

    def attack(scene: Scene) -> bytes:
        _, where = message.envelope(scene.frame)
        record, _ = message.unframe(scene.frame, KINDS, len(scene.frame))
        new = {name: change(getattr(record, name)) for name, change in changes.items()}
        return message.frame(msgspec.structs.replace(record, **new), where)

    return attack


def put(value: float, place: int = 0) -> Callable[[Tensor], Tensor]:
    """One number is another."""

    def change(tensor: Tensor) -> Tensor:
        flat = tensor.clone().flatten()
        flat[place] = value
        return flat.view_as(tensor)

    return change


def anything(name: str, dtype: torch.dtype) -> dict[str, tuple[Attack, str]]:
    """What can be done to any tensor."""
    table = {
        "a row more": (changed(**{name: lambda t: torch.cat([t, t[-1:]])}), "wrong shape"),
        "a dimension more": (changed(**{name: lambda t: t[None]}), "wrong shape"),
        "one number": (changed(**{name: lambda t: t.flatten()[:1].clone().view(1, 1, 1)}), "wrong shape"),
        "doubles": (changed(**{name: lambda t: t.double()}), "wrong dtype"),
        "8-bit integers": (changed(**{name: lambda t: t.to(torch.int8)}), "wrong dtype"),
    }
    for other in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int32):
        if other != dtype:
            table[f"{other}"] = (changed(**{name: lambda t, other=other: t.to(other)}), "wrong dtype")
    if dtype.is_floating_point:
        for value in (nan, inf, -inf):
            table[f"{value}"] = (changed(**{name: put(value)}), "not finite")
    return table


OUT = "out of range"
RANGE: dict[str, tuple[Attack, str]] = {
    "low is NaN": (changed(low=lambda _: nan), "not finite"),
    "high is infinite": (changed(high=lambda _: inf), "not finite"),
    "low is huge": (changed(low=lambda _: -1e30), OUT),
    "high is huge": (changed(high=lambda _: 1e30), OUT),
    "low above high": (changed(low=lambda _: 5.0, high=lambda _: -5.0), OUT),
    "low in words": (changed(low=lambda _: "low"), "wrong field"),
    "high is nil": (changed(high=lambda _: None), "wrong field"),
}
LABELS: dict[str, tuple[Attack, str]] = {
    "labels twice as large": (changed(labels=lambda t: 2 * t), OUT),
    "labels of half the weight": (changed(labels=lambda t: t / 2), OUT),
    "a label below zero": (changed(labels=lambda t: torch.stack([t[..., 0] - 2, t[..., 1] + 2], -1)), OUT),
    "labels of zeros": (changed(labels=torch.zeros_like), OUT),
    "one row of zeros": (changed(labels=lambda t: t * (torch.arange(len(t)) > 0).view(-1, *[1] * (t.dim() - 1))), OUT),
    "a label off by a hundredth": (changed(labels=lambda t: t + 0.01), OUT),
    "images beyond a thousand": (changed(images=put(1500.0)), OUT),
}
BYTE_LABELS: dict[str, tuple[Attack, str]] = {
    "labels of zeros": (changed(labels=torch.zeros_like), OUT),
    "one row of zeros": LABELS["one row of zeros"],
}
PROXIES: dict[str, tuple[Attack, str]] = {
    "alphas twice as large": (changed(alphas=lambda t: t * 2), OUT),
    "alphas of zeros": (changed(alphas=torch.zeros_like), OUT),
    "an alpha below zero": (changed(alphas=lambda t: torch.tensor([-0.5, 1.5])), OUT),
    "a scale below zero": (changed(scales=put(-1.0)), OUT),
    "a scale of 1e30": (changed(scales=put(1e30)), OUT),
    "a point more": (
        changed(
            **{n: lambda t: torch.cat([t, t[:1]]) for n in ("images", "labels")}, alphas=lambda t: torch.ones(3) / 3
        ),
        "wrong shape",
    ),
}
SYNTHETIC: dict[str, tuple[Attack, str]] = {
    "a step of 11": (changed(steps=put(11.0)), OUT),
    "a step of -11": (changed(steps=put(-11.0)), OUT),
    "a norm below zero": (changed(norm=put(-1.0)), OUT),
    "a norm of 1e30": (changed(norm=put(1e30)), OUT),
    "a batch more": (
        changed(**{n: lambda t: torch.cat([t, t[:1]]) for n in ("images", "labels", "steps")}),
        "wrong shape",
    ),
    "a point more in every batch": (
        changed(**{n: lambda t: torch.cat([t, t[:, :1]], 1) for n in ("images", "labels")}),
        "wrong shape",
    ),
}
QUANTISED: dict[str, tuple[Attack, str]] = {
    "a scale below zero": (changed(scales=put(-1.0)), OUT),
    "a scale of 1e30": (changed(scales=put(1e30)), OUT),
    "a code above the highest level": (changed(codes=put(0x0F)), OUT),
}
SPARSE: dict[str, tuple[Attack, str]] = {
    "places that descend": (changed(places=lambda t: torch.tensor([5, 3, 1], dtype=torch.int32)), OUT),
    "a place twice": (changed(places=lambda t: torch.tensor([1, 3, 3], dtype=torch.int32)), OUT),
    "a place too high": (changed(places=lambda t: torch.tensor([1, 3, 8], dtype=torch.int32)), OUT),
    "a place below zero": (changed(places=lambda t: torch.tensor([-1, 3, 5], dtype=torch.int32)), OUT),
    "a value of 1e30": (changed(values=put(1e30)), OUT),
}
SKETCHED: dict[str, tuple[Attack, str]] = {
    "a number of 1e30": (changed(numbers=put(1e30)), OUT),
    "the key of another round": (changed(key=lambda key: bytes(8)), "out of step"),
    "a key of 9 bytes": (changed(key=lambda key: bytes(9)), "wrong field"),
    "a key that is a number": (changed(key=lambda key: 7), "wrong field"),
}
HALF: dict[str, tuple[Attack, str]] = {"bytes of half the update": (changed(update=lambda t: t[:4]), "wrong shape")}
WIDE_HALF: dict[str, tuple[Attack, str]] = {"a value of 1e30": (changed(update=put(1e30)), OUT)}
OWN = {
    "half": HALF,
    "half, bfloat16": HALF | WIDE_HALF,
    "qsgd": QUANTISED,
    "top-k": SPARSE,
    "sketch": SKETCHED,
    "tofu, float32": PROXIES | LABELS | RANGE,
    "tofu, float16": PROXIES | LABELS | RANGE,
    "tofu, uint8": PROXIES | BYTE_LABELS | RANGE,
    "fedsynth, float32": SYNTHETIC | LABELS | RANGE,
    "fedsynth, float16": SYNTHETIC | LABELS | RANGE,
    "fedsynth, uint8": SYNTHETIC | BYTE_LABELS | RANGE,
}


def cases():
    for name, codec in CODECS.items():
        table = dict(OWN[name])
        sizes = codec.sizes(TASK)
        for tensor, shape in fields(codec.payload).items():
            table |= {f"{tensor}: {what}": case for what, case in anything(tensor, shape.bind(sizes)[0]).items()}
        for what, (attack, reason) in table.items():
            yield pytest.param(name, attack, reason, id=f"{name}: {what}")


class Recalling(Tamper):
    """A client asked the same again is not trained again: its answer to each codec's question is kept."""

    answers: ClassVar[dict[tuple[Any, ...], bytes]] = {}

    def __init__(self, codec: fv.Codec, change) -> None:
        super().__init__(change)
        self.codec = codec

    def deliver(self, letters, deadline):
        known = {letter: (self.codec, letter.payload, letter.envelope.round, letter.client) for letter in letters}
        for reply in self.inner.deliver([x for x in letters if known[x] not in self.answers], deadline):
            (letter,) = (x for x in letters if x.client == reply.client)
            self.answers[known[letter]] = reply.frame[message.PREFIX_BYTES :]
        kind = self.codec.payload.kind
        replies = [Reply(x.client, message.prefix(kind, x.envelope) + self.answers[known[x]]) for x in letters]
        return self.change(letters[0].envelope.round, replies)


def replying(method: fv.FedAvg, change, task: fv.Task = TASK) -> fv.Result:
    """A run of four clients whose replies of round 2 pass through `change`."""
    earlier: dict[int, Reply] = {}

    def tamper(round_, replies):
        received = change(replies, dict(earlier)) if round_ == 2 else replies
        earlier.update({reply.client: reply for reply in replies})
        return received

    plain = task is TASK and method.down is None
    engine = Recalling(method.up, tamper) if plain else Tamper(tamper)
    return fv.run(task, method, rounds=3, cohort=4, engine=engine, evaluate_every=3)


def by(attack: Attack, wire: str = "bytes"):
    """The culprit's answer is `attack`'s."""

    def change(replies, earlier):
        frames = {reply.client: reply.frame for reply in replies}
        scene = Scene(frames[CULPRIT], earlier[CULPRIT].frame, frames[CULPRIT + 1])
        return [sent(r.client, attack(scene) if r.client == CULPRIT else r.frame, wire) for r in replies]

    return change


def absent(replies, _):
    return [r for r in replies if r.client != CULPRIT]


def method_of(name: str) -> fv.FedAvg:
    return fv.FedAvg(local=LOCAL, up=CODECS[name])


@functools.cache
def silent(name: str) -> fv.Result:
    return replying(method_of(name), absent)


def assert_refused(result: fv.Result, reason: str) -> None:
    first, second, third = result.ledger.rows
    assert list(second.missing) == [str(CULPRIT)]
    assert second.missing[str(CULPRIT)].startswith(f"refused: {reason}: ")
    assert not first.missing
    assert not third.missing
    assert not second.events


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("name", "attack", "reason"), cases())
def test_a_hostile_payload_is_refused_by_name_and_changes_nothing(name, attack, reason, wire):
    result = replying(method_of(name), by(attack, wire))
    assert_refused(result, reason)
    assert torch.equal(result.weights, silent(name).weights)


@pytest.mark.parametrize("name", CODECS)
def test_the_culprits_honest_payload_would_have_counted(name):
    """Otherwise the equality above would show nothing."""
    honest = replying(method_of(name), lambda replies, _: replies)
    assert not any(row.missing for row in honest.ledger.rows)
    assert not torch.equal(honest.weights, silent(name).weights)


@pytest.mark.parametrize("what", BYTES)
def test_hostile_bytes_in_the_place_of_a_payload_are_refused_like_any(what):
    attack, reason = BYTES[what]
    result = replying(method_of("top-k"), by(attack))
    assert_refused(result, reason)
    assert torch.equal(result.weights, silent("top-k").weights)


@pytest.mark.parametrize("name", CODECS)
def test_a_payload_cannot_claim_more_records_than_anybody_has(name):
    for records, reason in [(7, OUT), *((n, "wrong field") for n in (0, -6, 10**12, 6.5, nan, "six", None))]:
        assert_refused(replying(method_of(name), by(changed(records=lambda _, n=records: n))), reason)


def test_the_codecs_here_are_all_that_are_not_raw():
    modules = {f"fedveil.codecs.{name}" for name in ("half", "qsgd", "topk", "sketch", "tofu", "fedsynth")}
    known = {name for name, codec in fv.Codec.registry.items() if codec.__module__ in modules}
    assert {codec.name for codec in CODECS.values()} == known


# -------------------------------------------------------------------------------- what only decoding shows


class Exploding(nn.Module):
    """Finite on honest inputs, infinite on inputs that are merely large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() @ self.weight.T


@pytest.mark.parametrize("name", ["tofu, float32", "fedsynth, float32", "tofu, float16", "fedsynth, float16"])
def test_an_update_that_decodes_to_something_not_finite_is_refused_by_name(name):
    data = from_tensors(TASK.x, TASK.y, TASK.x, TASK.y, classes=2)
    task = fv.Task(Exploding(), data, fv.split("iid", data, 4, fv.Seed.root(0)))
    method = fv.FedAvg(local=fv.LocalTraining(lr=0.01, batch=100), up=CODECS[name])
    result = replying(method, by(changed(images=lambda t: torch.full_like(t, 900.0))), task)
    assert_refused(result, "not finite")
    torch.testing.assert_close(result.weights, replying(method, absent, task).weights)


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_a_round_in_which_nothing_can_be_decoded_leaves_the_weights_as_they_were():
    def all_of_them(replies, _):
        zeros = changed(labels=torch.zeros_like)
        return [Reply(r.client, zeros(Scene(r.frame, b"", b""))) for r in replies]

    method = method_of("tofu, float32")
    result = replying(method, all_of_them)
    assert result.ledger.rows[1].events == [
        "below quorum: 0 of 4 answers can be used, 1 are needed; the weights stay as they were"
    ]
    assert len(result.ledger.rows[1].missing) == 4


def test_a_client_that_lies_about_the_weights_it_holds_is_refused_by_name():
    method = fv.FedAvg(local=LOCAL, down=fv.Half())

    def lie(replies, _):
        wrong = changed(digest=lambda _: b"whatever")
        mine = [r for r in replies if r.client == CULPRIT and message.envelope(r.frame)[0] == WeightsDigest.kind]
        return [Reply(r.client, wrong(Scene(r.frame, b"", b""))) if r in mine else r for r in replies]

    result = replying(method, lie)
    assert_refused(result, "out of step")
    assert result.ledger.rows[1].metrics["resynced"] == 1
    assert torch.equal(result.weights, replying(method, absent).weights)
