"""Hostile answers to every method that sends raw updates: refused by name, left out, and without any effect.

A run in which one client's answer of round 2 is hostile must end where a run ends in which that answer never came.
"""

import functools

import pytest
import torch

import fedveil as fv
from fedveil.codecs.raw import Update
from fedveil.core.clients import Reply
from fedveil.core.schema import fields
from hostile.attacks import BYTES, RECORDS, WEIGHT, WIRES, Scene, enveloped, field, sent, tensor_attacks
from toys import Tamper, linear_task

LOCAL = fv.LocalTraining(lr=0.5, batch=100)
METHODS = {
    "fedavg": fv.FedAvg(local=LOCAL, server=fv.ServerOptimizer(optimizer="momentum")),
    "fedprox": fv.FedProx(local=LOCAL, server=fv.ServerOptimizer(optimizer="adam")),
    "feddyn": fv.FedDyn(local=LOCAL),
    "fedsgd": fv.FedSGD(),
    "scaffold": fv.Scaffold(local=LOCAL),
    "q-fedavg": fv.QFedAvg(local=LOCAL),
}
ANSWERS = {name: method.parts.up.payloads.record for name, method in METHODS.items()}
SCALARS = {Update: RECORDS, ANSWERS["q-fedavg"]: WEIGHT}
CULPRIT = 2
TASK = linear_task()
NINES = torch.full((8,), 9.0)


def replying(method: fv.Method, change, rounds: int = 3, **options) -> fv.Result:
    """A run of four clients whose replies of round 2 pass through `change(replies, the round before's by client)`."""
    earlier: dict[int, Reply] = {}

    def tamper(round_, replies):
        changed = change(replies, dict(earlier)) if round_ == 2 else replies
        earlier.update({reply.client: reply for reply in replies})
        return changed

    options = {"cohort": 4, **options}
    return fv.run(TASK, method, rounds=rounds, engine=Tamper(tamper), **options)


@functools.cache
def honest(name: str) -> fv.Result:
    return replying(METHODS[name], lambda replies, _: replies)


@functools.cache
def silent(name: str) -> fv.Result:
    """The run in which the culprit's answer never comes."""
    return replying(METHODS[name], lambda replies, _: [r for r in replies if r.client != CULPRIT])


def attacked(method: fv.Method, attack, wire: str = "bytes") -> fv.Result:
    def change(replies, earlier):
        frames = {reply.client: reply.frame for reply in replies}
        scene = Scene(frames[CULPRIT], earlier[CULPRIT].frame, frames[CULPRIT + 1])
        return [sent(r.client, attack(scene) if r.client == CULPRIT else r.frame, wire) for r in replies]

    return replying(method, change)


def cases():
    """Every attack on every field that it fits, for every method."""
    for name in METHODS:
        tables = {"": BYTES | SCALARS.get(ANSWERS[name], {})}
        for index, tensor in enumerate(fields(ANSWERS[name])):
            tables[f"{tensor}: "] = tensor_attacks(index)
        for field_name, table in tables.items():
            for attack_name, (attack, reason) in table.items():
                yield pytest.param(name, attack, reason, id=f"{name}: {field_name}{attack_name}")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("name", "attack", "reason"), cases())
def test_a_hostile_answer_is_refused_by_name_and_changes_nothing(name, attack, reason, wire):
    result = attacked(METHODS[name], attack, wire)
    first, second, third = result.ledger.rows
    assert list(second.missing) == [str(CULPRIT)]
    assert second.missing[str(CULPRIT)].startswith(f"refused: {reason}: ")
    assert len(second.missing[str(CULPRIT)]) < 400
    assert not first.missing
    assert not third.missing
    assert not second.events
    assert torch.equal(result.weights, silent(name).weights)


RAW = {f"fedveil.methods.{module}" for module in ("fedavg", "fedprox", "feddyn", "fedsgd", "scaffold", "qfedavg")}


def test_the_methods_here_are_all_that_send_raw_updates():
    raw = {method.name for method in fv.METHODS.values() if method.__module__ in RAW}
    assert raw == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_the_culprits_honest_answer_would_have_counted(name):
    """Otherwise the equality above would show nothing."""
    assert not torch.equal(honest(name).weights, silent(name).weights)
    assert silent(name).ledger.rows[1].missing == {str(CULPRIT): "late: no answer when the question closed"}


# ---------------------------------------------------------------------------------------- more replies than asked for


def altered(reply: Reply, update: torch.Tensor = NINES) -> Reply:
    """The same client's answer with another update, well formed."""
    return Reply(reply.client, field(0, update)(Scene(reply.frame, b"", b"")))


def claiming(client: int, reply: Reply) -> Reply:
    """A well-formed answer in the name of `client`."""
    return Reply(client, enveloped(client=client)(Scene(reply.frame, b"", b"")))


DUPLICATE = "client 2: refused: duplicate: the first answer counts"
EXTRA = {
    "the same answer twice": (lambda r, _: [*r, r[CULPRIT]], [DUPLICATE]),
    "the same answer a hundred times": (lambda r, _: [*r, *[r[CULPRIT]] * 99], [DUPLICATE] * 99),
    "a second answer that differs": (lambda r, _: [*r, altered(r[CULPRIT])], [DUPLICATE]),
    "a second answer that is broken": (lambda r, _: [*r, Reply(CULPRIT, b"?")], [DUPLICATE]),
    "a replay behind the answer": (lambda r, earlier: [*r, earlier[CULPRIT]], [DUPLICATE]),
    "a failure behind the answer": (lambda r, _: [*r, Reply(CULPRIT, problem="failed: disk")], [DUPLICATE]),
    "a replay before the answer": (
        lambda r, earlier: [earlier[CULPRIT], *r],
        ["client 2: refused: wrong round: 1 where 2 was expected, then it answered"],
    ),
    "an answer of a client that does not exist": (
        lambda r, _: [claiming(99, r[CULPRIT]), *r],
        ["client 99: refused: unknown client: it was not asked"],
    ),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("change", "events"), EXTRA.values(), ids=EXTRA)
def test_more_replies_than_asked_for_are_told_and_change_nothing(name, change, events):
    result = replying(METHODS[name], change)
    assert result.ledger.rows[1].events == events
    assert not any(row.missing for row in result.ledger.rows)
    assert torch.equal(result.weights, honest(name).weights)


@pytest.mark.parametrize("name", METHODS)
def test_of_two_answers_that_differ_the_first_counts(name):
    swapped = replying(METHODS[name], lambda r, _: [altered(r[CULPRIT]), *r])
    alone = replying(METHODS[name], lambda r, _: [altered(x) if x.client == CULPRIT else x for x in r])
    assert torch.equal(swapped.weights, alone.weights)
    assert not torch.equal(swapped.weights, honest(name).weights)


@pytest.mark.parametrize("name", METHODS)
def test_a_client_that_was_not_drawn_has_no_say(name):
    def plain(replies, _):
        return replies

    def uninvited(replies, _):
        (absent,) = set(range(4)) - {reply.client for reply in replies}
        return [claiming(absent, replies[0]), *replies]

    quiet, disturbed = (replying(METHODS[name], change, cohort=3) for change in (plain, uninvited))
    (event,) = disturbed.ledger.rows[1].events
    assert event.endswith("refused: unknown client: it was not asked")
    assert torch.equal(quiet.weights, disturbed.weights)


def test_two_clients_that_swap_their_answers_are_both_refused():
    def swap(replies, _):
        frames = [r.frame for r in replies]
        return [Reply(r.client, frames[{2: 3, 3: 2}.get(r.client, r.client)]) for r in replies]

    row = replying(METHODS["fedavg"], swap).ledger.rows[1]
    assert row.missing == {
        "2": "refused: wrong client: 3 where 2 was expected",
        "3": "refused: wrong client: 2 where 3 was expected",
    }


def test_bytes_that_were_refused_are_still_counted():
    row = attacked(METHODS["fedavg"], lambda scene: b"x" * 1000).ledger.rows[1]
    assert row.up[str(CULPRIT)] == 1000


def test_too_many_hostile_answers_leave_the_weights_as_they_were():
    def two(replies, _):
        return [Reply(r.client, b"?") if r.client in (1, CULPRIT) else r for r in replies]

    before = replying(METHODS["fedsgd"], two, rounds=1, cohort=fv.CohortSampler(size=4, quorum=3))
    after = replying(METHODS["fedsgd"], two, rounds=2, cohort=fv.CohortSampler(size=4, quorum=3))
    assert torch.equal(before.weights, after.weights)
    assert after.ledger.rows[1].events == [
        "below quorum: 2 of 4 answers can be used, 3 are needed; the weights stay as they were"
    ]


def test_answers_within_range_that_drive_the_weights_out_of_it_leave_the_weights_as_they_were():
    def shove(replies, _):
        return [altered(r, torch.full((8,), 1e6)) for r in replies]

    first, second, third = (replying(fv.FedAvg(local=LOCAL), shove, rounds) for rounds in (1, 2, 3))
    (told,) = second.ledger.rows[1].events
    assert told.startswith("the result was refused: weights reaches from ")
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(second.weights, third.weights)
