"""What a well-formed hostile answer does to the model: no more than an honest client could, or the docs name it.

A round with a hostile answer is compared with the round in which that client says nothing (`silent`) and with the
rounds in which a single honest client answers (`alone`). In these rounds
- the result is away from the silent one by at most `ROOM` times the longest step that an honest client takes alone;
- a number beside the update, such as a radius, leaves at least 1/ROOM of the silent round's step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.codecs.fedage import SPREAD, FedAgeCodec
from fedveil.core import message
from fedveil.core.clients import Reply
from fedveil.core.message import KINDS
from fedveil.data import from_tensors
from fedveil.methods.surrogates.feddm import FedDm
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.methods.surrogates.sets import Surrogate
from fedveil.runs import recipe
from fedveil.runs.checkpoint import newest
from fedveil.train.aggregators import ROOM, clamped
from hostile.test_codecs import CODECS
from methods.surrogates.small import task_of
from toys import Tamper, linear_task

CULPRIT, CLIENTS = 2, 4
MOST = 1e6  # the largest number in an update that a schema allows
LOCAL = fv.LocalTraining(lr=0.5, batch=100)
EXACT = FedAgeCodec(block=4, code_size=4, code="linear", levels=1 << 15)
FEDLAP = FedLap(images=1, passes=1, batches=1, batch=8, steps=10, lr=0.3, image_lr=1.0, region="min")
FEDDM = FedDm(images=1, draws=2, batches=1, batch=8, steps=10, lr=0.3, region="min")
PROBING = {"directions": 16, "clip": None, "server": fv.ServerOptimizer()}
METHODS: dict[str, fv.Method] = {
    "fedavg": fv.FedAvg(LOCAL),
    "fedavg, fedage": fv.FedAvg(LOCAL, up=EXACT),
    "q-fedavg": fv.QFedAvg(LOCAL),
    "q-fedavg, fedage": fv.QFedAvg(LOCAL, up=EXACT),
    "scaffold": fv.Scaffold(LOCAL),
    "baffle": fv.Baffle(**PROBING),
    "baffle, own seeds": fv.Baffle(seeds="own", **PROBING),
    "baffle, epoch": fv.BaffleEpochs(local=fv.LocalTraining(lr=0.1, batch=100), **PROBING),
    "fedlap, min": FEDLAP,
    "fedlap, max": replace(FEDLAP, region="max"),
    "feddm, min": FEDDM,
}


@dataclass(frozen=True)
class Round:
    """How far the weights went, [d], and what the first round's events tell."""

    step: Tensor
    events: list[str]


Change = Callable[[Reply], Reply | None]


def played(method: fv.Method, change: Change = lambda reply: reply, rounds: int = 1) -> Round:
    """The answers of the first round pass through `change`, which leaves out those that become None."""
    task = task_of() if isinstance(method, FedLap | FedDm) else linear_task(CLIENTS)

    def tamper(round_: int, replies: list[Reply]) -> list[Reply]:
        return [r for r in map(change, replies) if r] if round_ == 1 else replies

    result = fv.run(task, method, rounds=rounds, cohort=CLIENTS, engine=Tamper(tamper), evaluate_every=9)
    return Round(result.weights - task.initial, result.ledger.rows[0].events)


def hostile(**fields: Any) -> Change:
    """The culprit's answers with other values in these fields, where they have them."""

    def change(reply: Reply) -> Reply:
        record, where = message.unframe(reply.frame, KINDS, len(reply.frame))
        new = {k: v(getattr(record, k)) if callable(v) else v for k, v in fields.items() if hasattr(record, k)}
        if reply.client != CULPRIT or not new:
            return reply
        return replace(reply, frame=message.frame(msgspec.structs.replace(record, **new), where))

    return change


def only(*clients: int) -> Change:
    return lambda reply: reply if reply.client in clients else None


OTHERS = only(*(k for k in range(CLIENTS) if k != CULPRIT))


@functools.cache
def silent(name: str, rounds: int = 1) -> Tensor:
    return played(METHODS[name], OTHERS, rounds).step


@functools.cache
def alone(name: str, rounds: int = 1) -> float:
    """The longest way that an honest client leads by itself."""
    return max(float(played(METHODS[name], only(k), rounds).step.norm()) for k in range(CLIENTS))


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


WEIGHTS = {f"a weight of {h:g}": {"weight": h} for h in (1e-300, 1e-9, 1e9, 0.99e12)}
MAGNITUDES = {f"a magnitude of {n:g}": {"largest": n} for n in (0.0, 1e-9, 1e3, 1e6)}
SHARES = {f"a share of {s:g}": {"share": filled(s)} for s in (1 / 6, 1.0)}
RECORDS = {f"{n} records": {"records": n} for n in (1, 6)}
NUMBERS: dict[str, dict[str, dict[str, Any]]] = {
    "fedavg": RECORDS,
    "fedavg, fedage": MAGNITUDES | SHARES,
    "q-fedavg": WEIGHTS,
    "q-fedavg, fedage": WEIGHTS | MAGNITUDES | SHARES,
    "baffle": RECORDS,
    "baffle, own seeds": RECORDS,
    "baffle, epoch": RECORDS,
    **{
        name: {f"a radius of {r:g}": {"radius": r} for r in (0.0, 1e-9, 1.0, METHODS[name].radius)}
        | {f"{n} records": {"records": n} for n in (1, 12)}
        for name in METHODS
        if name.startswith(("fedlap", "feddm"))
    },
}
VECTORS: dict[str, dict[str, dict[str, Any]]] = {
    "q-fedavg": {f"an update of {v:g}": {"update": filled(v)} for v in (MOST, -MOST)},
    "scaffold": {
        f"{what} of {v:g}": {field: filled(v)}
        for what, field in (("an update", "update"), ("a control variate", "control"))
        for v in (MOST, -MOST)
    },
    "baffle": {f"slopes of {v:g}": {"slopes": filled(v)} for v in (MOST, -MOST)},
    "baffle, own seeds": {f"slopes of {v:g}": {"slopes": filled(v)} for v in (MOST, -MOST)},
    "baffle, epoch": {f"an update of {v:g}": {"update": filled(v)} for v in (MOST, -MOST)},
    "fedavg, fedage": {"codes at their reach": {"codes": filled(EXACT.reach)}},
    "q-fedavg, fedage": {"codes at their reach": {"codes": filled(EXACT.reach)}},
}


def cases(table: dict[str, dict[str, dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(name, fields, id=f"{name}: {what}")
        for name, attacks in table.items()
        for what, fields in attacks.items()
    ]


@pytest.mark.parametrize(("name", "fields"), cases(NUMBERS))
def test_a_number_beside_the_update_neither_stops_nor_drowns_the_others(name, fields):
    found = played(METHODS[name], hostile(**fields)).step
    assert float((found - silent(name)).norm()) <= ROOM * alone(name)
    assert float(found.norm()) >= float(silent(name).norm()) / ROOM


@pytest.mark.parametrize(("name", "fields"), cases(VECTORS))
def test_a_vector_where_there_is_no_robust_merge_pulls_no_more_than_room_allows(name, fields):
    """In two rounds, because SCAFFOLD's control variates act in the second."""
    found = played(METHODS[name], hostile(**fields), rounds=2).step
    assert float((found - silent(name, 2)).norm()) <= ROOM * alone(name, 2)


def test_these_are_all_methods_with_answers_of_their_own():
    """FedProx, FedDyn, FedSGD, FedSynth, TOFU and FedAGE are FedAvg with another training, step or codec."""
    others = {"fedprox", "feddyn", "fedsgd", "fedsynth", "tofu", "fedage"}
    registered = {m.name for m in fv.METHODS.values() if m.__module__.startswith("fedveil.")}
    assert {method.name for method in METHODS.values()} | others == registered


# -------------------------------------------------------------------------------- updates, with and without merge

LARGEST: dict[str, dict[str, Any]] = {
    "half": {"update": filled(6e4)},
    "half, bfloat16": {"update": filled(9e5)},
    "qsgd": {"scales": filled(MOST)},
    "top-k": {"values": filled(MOST)},
    "tofu": {"scales": filled(MOST)},
    "fedsynth": {"norm": filled(MOST)},
}
MERGES = {
    "clip": fv.Aggregator("clip", clip=1.0),
    "median": fv.Aggregator("median"),
    "trimmed": fv.Aggregator("trimmed", trim=0.25),
    "krum": fv.Aggregator("krum", byzantine=1),
}


@pytest.mark.parametrize("name", ["half", "half, bfloat16", "qsgd", "top-k", "tofu, uint8", "fedsynth, uint8"])
def test_the_largest_update_of_a_codec_is_bounded_by_every_robust_merge_and_by_no_mean(name):
    attack = hostile(**LARGEST[name.split(", uint8")[0]])
    plain = fv.FedAvg(LOCAL, up=CODECS[name])
    honest = [float(played(plain, only(k)).step.norm()) for k in range(CLIENTS)]
    for kind, merge in MERGES.items():
        method = replace(plain, aggregator=merge)
        away = played(method, attack).step - played(method, OTHERS).step
        assert float(away.norm()) <= 2 * max(honest), kind
    assert float(played(plain, attack).step.norm()) > ROOM * max(honest)  # docs/how-to/robust-aggregators.md


# ------------------------------------------------------------------------------------------------ how it is clamped


class Telling:
    """A cohort that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, sentence: str) -> None:
        self.told.append(sentence)


def test_numbers_are_clamped_around_the_median_and_the_ledger_tells_whose():
    cohort: Any = Telling()
    assert clamped(cohort, "radius", {1: 0.0, 2: 3.0, 5: 2.0, 7: 99.0, 8: 2.5}) == {
        1: 0.25,
        2: 3,
        5: 2,
        7: 25.0,
        8: 2.5,
    }
    assert cohort.told == [
        "client 1: radius of 0 counts as 0.25: the median is 2.5",
        "client 7: radius of 99 counts as 25: the median is 2.5",
    ]
    assert clamped(cohort, "radius", {1: 0.0, 2: 3.0, 3: 2.0}, raise_low=False) == {1: 0.0, 2: 3.0, 3: 2.0}
    assert len(cohort.told) == 2


def test_what_is_within_room_is_not_touched_and_two_clients_are_taken_at_their_word():
    cohort: Any = Telling()
    for told in ({1: 0.1, 2: 1.0, 3: 10.0}, {1: 0.0, 2: 1e9}, {4: 1e-300}, {}):
        assert clamped(cohort, "weight", told) == told
    assert not cohort.told


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("fedlap, min", {"radius": 0.0}),
        ("q-fedavg", {"weight": 0.99e12}),
        ("q-fedavg, fedage", {"weight": 0.99e12}),
        ("q-fedavg, fedage", {"largest": 1e6}),
        ("fedavg, fedage", {"largest": 1e6}),
        ("scaffold", {"control": filled(MOST)}),
        ("baffle", {"slopes": filled(MOST)}),
    ],
)
def test_a_clamped_number_is_told_by_client_and_an_honest_round_tells_nothing(name, fields):
    told = played(METHODS[name], hostile(**fields)).events
    assert [sentence.split(":")[0] for sentence in told] == [f"client {CULPRIT}"]
    assert "counts as" in told[0]
    assert not played(METHODS[name]).events


# ------------------------------------------------------------------------------------------------ the digits


def test_on_the_digits_one_magnitude_does_not_drown_the_codes():
    """Without a clamp the accuracy is that of guessing."""
    settings = recipe.read("digits/fedage", ["method.local.epochs=4"])
    honest, boasting = (
        fv.run(settings.build(), settings.method, rounds=4, cohort=10, engine=engine, evaluate_every=4)
        for engine in (None, Tamper(lambda _, replies: map(hostile(largest=1e6), replies)))
    )
    assert boasting.ledger.rows[0].metrics["scale"] > honest.ledger.rows[0].metrics["scale"] * SPREAD / ROOM
    assert honest.accuracy > 0.8
    assert boasting.accuracy > honest.accuracy - 0.1


# ------------------------------------------------------------------------------------------------ what is not finite


@pytest.mark.parametrize("name", ["q-fedavg", "q-fedavg, fedage"])
@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_weights_so_small_that_the_step_would_not_be_finite_change_nothing(name, clients, tmp_path):
    """All clients lie, or the only one does, so that there is nobody to compare them with."""

    def lie(round_, replies):
        tiny = [replace(hostile(weight=1e-300)(replace(r, client=CULPRIT)), client=r.client) for r in replies]
        return tiny if round_ == 2 else replies

    task = linear_task(clients)
    result = fv.run(task, METHODS[name], rounds=2, cohort=clients, engine=Tamper(lie), folder=tmp_path)
    before = fv.run(task, METHODS[name], rounds=1, cohort=clients, engine=Tamper(lambda _, replies: replies))
    (told,) = result.ledger.rows[1].events
    assert told.startswith("the result was refused: weights reaches from ")
    assert torch.equal(result.weights, before.weights)
    saved = newest(tmp_path)
    assert saved
    assert saved.round == 2
    assert torch.equal(saved.state.weights, before.weights)


class Diverging(fv.FedAvg):
    """A server whose second step goes wrong in one field of the state."""

    name = "toy-diverging"
    wrong: str = "weights"
    value: float = float("nan")

    def round(self, state, cohort):
        after = super().round(state, cohort)
        if cohort.round != 2:
            return after
        part = after if self.wrong == "weights" else after.slots["server"]
        bad = getattr(part, self.wrong).clone()
        bad[3] = self.value
        changed = msgspec.structs.replace(part, **{self.wrong: bad})
        return changed if self.wrong == "weights" else after.put("server", changed)


@pytest.mark.parametrize("wrong", ["weights", "first", "second"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e7])
def test_a_state_that_is_not_finite_or_out_of_range_is_neither_taken_nor_saved(wrong, value, tmp_path):
    method = Diverging(LOCAL, server=fv.ServerOptimizer(optimizer="adam", lr=0.1))
    object.__setattr__(method, "wrong", wrong)
    object.__setattr__(method, "value", value)
    found = fv.run(linear_task(), method, rounds=2, cohort=4, folder=tmp_path)
    before = fv.run(linear_task(), replace(method), rounds=1, cohort=4)
    assert torch.equal(found.weights, before.weights)
    (told,) = found.ledger.rows[1].events
    assert told.startswith(f"the result was refused: {wrong} reaches from ")
    assert told.endswith("allowed is -1e+06 to 1e+06; the weights stay as they were")
    saved = newest(tmp_path)
    assert saved
    moments = saved.state.slots["server"]
    assert all(bool(each.isfinite().all()) for each in (saved.state.weights, moments.first, moments.second))


class Exploding(nn.Module):
    """Finite on honest inputs, infinite on inputs that are merely large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4) / 100)

    def forward(self, x: Tensor) -> Tensor:
        return (x / 4).exp() @ self.weight.T


def test_a_set_whose_gradient_is_not_finite_is_refused_and_does_not_stop_the_others():
    small = task_of()
    data = from_tensors(small.x, small.y, small.x, small.y, classes=3)
    task = fv.Task(Exploding(), data, small.clients)

    def playing(change: Change) -> fv.Result:
        return fv.run(task, FEDLAP, rounds=1, cohort=4, engine=Tamper(lambda _, r: [x for x in map(change, r) if x]))

    def absent(reply: Reply) -> Reply | None:
        sent = message.envelope(reply.frame)[0] == Surrogate.kind
        return None if sent and reply.client == CULPRIT else reply

    found, without = playing(hostile(images=filled(999.0))), playing(absent)
    told = "refused: not finite: the set's gradient holds a value that is not a number"
    assert found.ledger.rows[0].missing == {str(CULPRIT): told}
    assert torch.equal(found.weights, without.weights)
    assert not torch.equal(found.weights, task.initial)
