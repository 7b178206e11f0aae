"""Hostile questions: a client refuses by name, and is afterwards what it was before."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Clients, Letter
from fedveil.core.message import Envelope, Refused
from fedveil.core.schema import fields
from fedveil.engines import LocalEngine
from hostile.attacks import BYTES, WIRES, Scene, received, tensor_attacks
from toys import linear_task

RUN, CLIENT, ROUND = b"this run", 2, 3
TASK = linear_task()
METHODS = {
    method: method.parts.down.question
    for method in (fv.FedAvg(), fv.FedProx(), fv.FedDyn(), fv.FedSGD(), fv.Scaffold(), fv.QFedAvg())
}

# What a client cannot know to be wrong: it may be asked later, something else, or stand for another client too.
HONEST = {"a future round", "the last round there is", "another question of the round", "another's id"}
HONEST |= {"a neighbour's frame"}
# What a client notices under another name: it reads no further than it must, and has no limit that it knows beforehand.
NOTICED = {
    "a torch file": "not a frame",
    "a megabyte too long": "trailing bytes",
    "an id that nobody has": "unknown client",
    "the server's id": "unknown client",
}


def question_of(method: fv.Method, value: float = 0.1) -> message.Question:
    kind = METHODS[method]
    return kind(*[torch.full((8,), value) for _ in fields(kind)])


def asking(method: fv.Method, round_: int, client: int = CLIENT) -> bytes:
    return message.frame(question_of(method, round_ / 10), Envelope(RUN, round_, client))


def cases():
    for method in METHODS:
        table = {name: (attack, NOTICED.get(name, reason)) for name, (attack, reason) in BYTES.items()}
        for index, name in enumerate(fields(type(question_of(method)))):
            table |= {f"{name}: {attack}": case for attack, case in tensor_attacks(index).items()}
        for name, (attack, reason) in table.items():
            if name not in HONEST:
                yield pytest.param(method, attack, reason, id=f"{method.name}: {name}")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("method", "attack", "reason"), cases())
def test_a_hostile_question_is_refused_by_name_and_changes_nothing(method, attack, reason, wire):
    clients = Clients(method, TASK, RUN, fv.Seed.root(0))
    for round_ in range(1, ROUND + 1):
        (before,) = clients.answer([Letter.read(asking(method, round_))])
    memory = {k: list(entries) for k, entries in clients.memory.entries.items()}
    scene = Scene(asking(method, ROUND), asking(method, ROUND - 1), asking(method, ROUND, CLIENT + 1))
    with pytest.raises(Refused) as caught:
        clients.answer([received(attack(scene), wire)])
    assert caught.value.reason == reason
    assert clients.memory.entries == memory
    assert clients.answer([Letter.read(asking(method, ROUND))]) == [before]


def test_a_letter_of_another_run_is_refused_wherever_it_lies_in_the_stack():
    clients = Clients(fv.FedAvg(), TASK, RUN, fv.Seed.root(0))
    good = Letter.read(asking(fv.FedAvg(), 1))
    bad = replace(good, envelope=Envelope(b"another!", 1, 3))
    with pytest.raises(Refused, match="wrong run"):
        clients.answer([good, bad])


class Garbling(LocalEngine):
    """Damages the question to one client on its way."""

    def deliver(self, letters: Sequence[Letter], deadline: float | None):
        nan = fv.core.message.pack(question_of(fv.FedAvg(), float("nan")))
        return super().deliver([replace(x, contents=nan) if x.client == CLIENT else x for x in letters], deadline)


def test_the_ledger_says_that_and_why_a_client_refused_its_question():
    result = fv.run(TASK, fv.FedAvg(), rounds=1, cohort=4, engine=Garbling(workers=1))
    (row,) = result.ledger.rows
    assert row.missing == {str(CLIENT): "refused: not finite: weights holds a value that is not a finite number"}
