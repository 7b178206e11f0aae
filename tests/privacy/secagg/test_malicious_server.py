"""A malicious server: it forges what clients are asked, keeps to no check of its own, and studies all that it gets.

Each attack has a control in which the check that stops it is switched off and the attack succeeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

import fedveil as fv
from fedveil.codecs.fedage import Send
from fedveil.core import message
from fedveil.core.clients import Clients, Letter
from fedveil.core.identity import Identities, simulated
from fedveil.core.message import Envelope, Record, Refused, Slots
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.engines import kept
from fedveil.links.down import Train, TrainFull, TrainHere
from fedveil.links.steps import CatchUp, ClientWeights, WeightsDigest
from fedveil.methods.baffle.baffle import Probe
from fedveil.methods.scaffold import Control
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg import client as summand
from fedveil.privacy.secagg import graph, masks
from fedveil.privacy.secagg import server as summing
from fedveil.privacy.secagg.client import PENDING, Summand
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.party import Party
from fedveil.privacy.secagg.records import Deal, Mask, Masked, Share, Unmasked, tensor
from fedveil.train.transforms import Residuals
from privacy.secagg.sums import LAST, Driven, Give, Only, Summed, Transport, expected, letter, rounding
from privacy.secagg.sums import given as given_by
from toys import linear_task

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rounds in which nobody answers, as they should
N, VICTIM = 6, 2
LOCAL = fv.LocalTraining(lr=0.1, batch=4)
AGE = fv.FedAgeCodec(block=16, cohort=5, code="linear")
HIDDEN = 16


def task() -> fv.Task:
    """A network with weights at which nothing can be learnt: all hidden units are off, whatever the input is."""
    draw = fv.Seed.root(5).torch()
    x, y = torch.rand(N * 8, 4, generator=draw), torch.randint(2, (N * 8,), generator=draw)
    data = from_tensors(x, y, x[:4], y[:4], classes=2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2, bias=False))
    return fv.Task(model, data, fv.split("iid", data, N, fv.Seed.root(0)))


TASK = task()
DEAD = TASK.initial.clone()
DEAD[4 * HIDDEN : 5 * HIDDEN] = -1e3  # the biases of the hidden units


# ---------------------------------------------------------------------------------------------------- the attacker


@dataclass
class Loot:
    """What the attacker got: the sum as it came out, and (for comparison) what each client encoded."""

    engine: Transport
    row: fv.core.ledger.Row
    total: np.ndarray | None
    encoded: dict[int, np.ndarray]

    @property
    def victims(self) -> np.ndarray:
        return self.encoded[VICTIM][:-2]

    @property
    def known(self) -> np.ndarray:
        """What the others add, which depends on no record: nothing was learnt, so it is a zero, or a zero's code."""
        others = [vector[:-2].view(np.int32) for k, vector in self.encoded.items() if k != VICTIM]
        assert np.ptp(others, axis=0)[:-1].max() <= 1, "but for rounding, by the public seed"
        return np.sum(others, axis=0, dtype=np.int32).view(np.uint32)

    @property
    def exposed(self) -> bool:
        """Whether the sum is the victim's vector to the last bit."""
        return self.total is not None and np.array_equal(self.total[:-2] - self.known, self.victims)

    @property
    def agreement(self) -> float:
        """How many deviations the share of the victim's bits that the sum has right is from one half."""
        assert self.total is not None
        same = np.unpackbits((self.total[:-2] ^ self.victims ^ np.uint32(2**32 - 1)).view(np.uint8))
        return float(abs(same.mean() - 0.5) / (0.5 / np.sqrt(len(same))))


@pytest.fixture
def unscrupulous(monkeypatch) -> Callable[..., Loot]:
    """Run rounds as a server that leaves out its own checks and asks each client what `ask` makes of its question."""
    seen: dict[str, Any] = {}
    encoded = Summand._encoded

    def listened(self, stack, i, *args):
        vector = encoded(self, stack, i, *args)
        seen["encoded"][stack.clients[i]] = vector.copy()
        return vector

    monkeypatch.setattr(FixedPoint, "check", lambda self, total, clients: seen.update(total=total.copy()))
    monkeypatch.setattr(Summand, "_encoded", listened)
    monkeypatch.setattr(summing._Scene, "alike", lambda self, masked: dict(masked))
    monkeypatch.setattr(summing._Scene, "connected", lambda self, alive: True)

    def attack(method, ask, rounds=1, answer=lambda client, answer: answer) -> Loot:
        seen.update(encoded={}, total=None)
        engine = Transport(ask=ask, answer=answer)
        result = fv.run(TASK, method, rounds=rounds, cohort=N, engine=engine, patience=99)
        return Loot(engine, result.ledger.rows[-1], seen["total"], dict(sorted(seen["encoded"].items())))

    return attack


@pytest.fixture
def unbound(monkeypatch) -> None:
    """The control: masks and signatures do not depend on what was asked."""
    monkeypatch.setattr(Context, "asked", lambda self, basis, question: bytes(32))


def inside(question: Mask, kind: type, **changes: Any) -> Mask:
    """The same stage with another question of the method in it."""
    inner = message.unpack(question.question.numpy().data, kind)
    return replace(question, question=tensor(message.pack(replace(inner, **changes))))


def dead_inside(kind: type) -> Callable[[int, Any], Any]:
    """Everybody but the victim computes from dead weights, sent with the question that is summed."""

    def ask(client: int, question: Any) -> Any:
        if client == VICTIM or not isinstance(question, Mask) or question.asked != kind.kind:
            return question
        return inside(question, kind, weights=DEAD)

    return ask


def dead_before(kind: type, **changes: Any) -> Callable[[int, Any], Any]:
    """The same, with a question before it."""
    return lambda k, q: replace(q, weights=DEAD, **changes) if k != VICTIM and isinstance(q, kind) else q


def in_step(client: int, answer: Any) -> Any:
    """The server does not mind what its clients say they hold."""
    return replace(answer, digest=IN_STEP[0]) if isinstance(answer, WeightsDigest) else answer


IN_STEP: list[bytes] = []


@pytest.fixture
def indifferent(monkeypatch) -> None:
    """Let the server take every client for one that is in step."""
    from fedveil.links import steps

    true = steps._digest

    def told(now):
        IN_STEP[:] = [true(now)]
        return IN_STEP[0]

    monkeypatch.setattr(steps, "_digest", lambda now: IN_STEP[0] if IN_STEP else told(now))
    yield
    IN_STEP.clear()


MOMENTS = {"first": torch.zeros_like(DEAD), "second": torch.zeros_like(DEAD)}
SCAFFOLD = fv.Scaffold(LOCAL, secure=SecureSum())
FACTORS = fv.FedAvg(LOCAL, fv.PowerSgd(rank=1), secure=SecureSum())
BAFFLE = fv.Baffle(directions=40, secure=SecureSum(clip=16.0))
# What is summed, and how clients are told apart: each by another way on which weights reach them.
SUMS: dict[str, tuple[fv.Method, Callable[[int, Any], Any]]] = {
    "updates": (fv.FedAvg(LOCAL, secure=SecureSum()), dead_inside(Train)),
    "updates, with steps down": (fv.FedAvg(LOCAL, down=fv.Qsgd(bits=8), secure=SecureSum()), dead_before(CatchUp)),
    "full rounds": (fv.Tofu(LOCAL, fv.TofuCodec(points=2), full_rounds=1, secure=SecureSum()), dead_inside(TrainFull)),
    "codes": (fv.FedAge(LOCAL, AGE, secure=SecureSum()), dead_before(Train)),
    "codes, with steps down": (
        fv.FedAge(LOCAL, AGE, down=fv.Qsgd(bits=8), secure=SecureSum()),
        dead_before(CatchUp),
    ),
    "slopes": (BAFFLE, dead_inside(Probe)),
    "slopes, with replay": (dataclasses.replace(BAFFLE, down="replay"), dead_before(CatchUp, **MOMENTS)),
    "forward-only updates": (
        fv.BaffleEpochs(directions=40, local=LOCAL, secure=SecureSum(clip=16.0)),
        dead_inside(Train),
    ),
    "updates and controls": (SCAFFOLD, dead_inside(SCAFFOLD.parts.down.question)),
    "two sums of factors": (FACTORS, dead_inside(FACTORS.parts.down.question)),
}


def against(method: fv.Method, server: str) -> fv.Method:
    return dataclasses.replace(method, secure=dataclasses.replace(method.secure, server=server))  # type: ignore


class TestOtherWeightsForEverybodyButTheVictim:
    """Model inconsistency (Pasquini et al. 2022): what the others add is zero, so the sum is the victim's vector."""

    @pytest.mark.parametrize("name", SUMS)
    def test_control_without_binding_the_sum_is_the_victims_vector(self, name, unscrupulous, unbound, indifferent):
        for server in ("curious", "malicious"):
            method, ask = SUMS[name]
            loot = unscrupulous(against(method, server), ask, answer=in_step)
            assert np.abs(loot.victims.view(np.int32) - loot.known.view(np.int32) / (N - 1)).max() > 20
            assert loot.exposed

    @pytest.mark.parametrize("name", SUMS)
    def test_masks_of_clients_who_were_asked_different_things_do_not_cancel(self, name, unscrupulous, indifferent):
        method, ask = SUMS[name]
        loot = unscrupulous(method, ask, answer=in_step)
        assert loot.row.secure[-1].answered == N, "a curious server's clients do not see it"
        assert loot.agreement < 5, "not a bit of the victim's vector is in the sum"

    @pytest.mark.parametrize("name", SUMS)
    def test_against_a_malicious_server_nobody_reveals_anything(self, name, unscrupulous, indifferent):
        method, ask = SUMS[name]
        loot = unscrupulous(against(method, "malicious"), ask, answer=in_step)
        assert loot.total is None
        assert not loot.engine.heard(Unmasked)
        assert len(loot.engine.heard(Masked)) == N
        assert len(loot.row.missing) == N
        assert all("bad signature: client" in why for why in loot.row.missing.values()), loot.row.missing

    @pytest.mark.parametrize("name", SUMS)
    def test_an_honest_round_is_summed(self, name, unscrupulous):
        method, _ = SUMS[name]
        loot = unscrupulous(against(method, "malicious"), lambda k, q: q)
        assert not loot.row.missing
        total = sum(vector.astype(object) for vector in loot.encoded.values())
        assert np.array_equal(loot.total.astype(object), total % 2**32)

    def test_an_honest_server_names_a_client_that_is_out_of_step_and_sums_the_others(self):
        """What an attack looks like from the other side: one client that computed from other weights."""

        def other(k, q):
            return inside(q, Train, weights=DEAD) if k == VICTIM and isinstance(q, Mask) else q

        result = fv.run(TASK, fv.FedAvg(LOCAL, secure=SecureSum()), rounds=1, cohort=N, engine=Transport(ask=other))
        (row,) = result.ledger.rows
        assert row.missing == {"2": "refused: out of step: it computed from something else than most clients did"}
        assert not row.events
        assert not torch.equal(result.weights, TASK.initial)


# Each field that is to be the same for all, with another value for the victim that it does not refuse by itself.
FIELDS: dict[str, tuple[type, Callable[[Any], dict[str, Any]]]] = {
    "the scale of codes": (Mask, lambda q: {"question": tensor(message.pack(Send(1e-3, AGE.digest)))}),
    "who dealt": (Mask, lambda q: {"ids": [k for k in q.ids if k != 5]}),
    "the quorum": (Share, lambda q: {"quorum": q.quorum + 1}),
    "who shared": (
        Deal,
        lambda q: {"ids": [k for k in q.ids if k != 5], "sealed": q.sealed[:-1], "marks": q.marks[:-1]},
    ),
}


class TestOtherFields:
    """Every other field that must be equal for all is bound too."""

    @pytest.mark.parametrize("name", FIELDS)
    @pytest.mark.parametrize("server", ["curious", "malicious"])
    def test_a_client_that_is_told_something_else_is_in_no_sum(self, name, server, unscrupulous):
        kind, changes = FIELDS[name]
        method = fv.FedAge(LOCAL, AGE, secure=SecureSum(server=server))
        told = lambda k, q: replace(q, **changes(q)) if k == VICTIM and isinstance(q, kind) else q  # noqa: E731
        loot = unscrupulous(method, told)
        if str(VICTIM) in loot.row.missing:
            assert VICTIM not in loot.engine.heard(Masked) or VICTIM not in loot.engine.heard(Unmasked)
        else:
            assert loot.agreement < 5

    def test_control_a_scale_that_is_not_bound_singles_out_a_client(self, unscrupulous, unbound):
        """At a scale of almost 0 every code is cut to its largest level: the others' codes are then signs only."""
        method = fv.FedAge(LOCAL, AGE, secure=SecureSum())
        kind, changes = FIELDS["the scale of codes"]
        loot = unscrupulous(method, lambda k, q: replace(q, **changes(q)) if k == VICTIM and type(q) is kind else q)
        total = sum(vector.astype(object) for vector in loot.encoded.values())
        assert np.array_equal(loot.total.astype(object), total % 2**32), "the sum comes out"


# ---------------------------------------------------------------------------------------------------- questions before


class TestQuestionsBefore:
    """What a client noted in a round binds the questions that left the notes, in whatever order they are asked."""

    WEIGHTS = (TASK.initial, DEAD, DEAD / 2)

    def asked(self, sequence: list[int]) -> tuple[bytes, torch.Tensor]:
        """The basis of a sum of codes after these questions, and the vector whose code would be masked."""
        clients = Clients(fv.FedAge(LOCAL, AGE), TASK, bytes(8), fv.Seed.root(0))
        for serial, each in enumerate(sequence):
            clients.answer([letter(Train(self.WEIGHTS[each]), 0, bytes(8), serial=serial)])
        stack = ClientStack(TASK, (0,), 1, fv.Seed.root(0), fv.Seed.root(0), [Slots()], [clients.notes[0]])
        (basis,) = stack.basis(Send.kind, message.pack(Send(1.0, AGE.digest)))
        return basis, clients.notes[0]["vector"]

    @settings(max_examples=60, deadline=None)
    @given(*[st.lists(st.integers(0, 2), min_size=1, max_size=5)] * 2)
    def test_where_the_basis_is_the_same_so_is_the_last_question(self, one, other):
        (basis, vector), (others, another) = self.asked(one), self.asked(other)
        assert basis != others or torch.equal(vector, another)
        assert (basis == others) >= (one == other)

    def test_a_question_that_is_asked_again_takes_a_client_back(self):
        """A server that was killed asks its round again, and its clients are then like those it had not yet asked."""
        assert self.asked([0])[0] == self.asked([0, 0])[0] == self.asked([0, 1, 0])[0]
        assert self.asked([0, 1])[0] == self.asked([0, 1, 0, 1])[0] != self.asked([1])[0]

    def test_notes_that_came_after_are_forgotten_with_it(self):
        """Or a note of a question that is no longer bound would still be there to be summed."""
        stack = ClientStack(TASK, (0,), 1, fv.Seed.root(0), fv.Seed.root(0), [Slots()], [{}])
        for payload, name in ((b"a", "first"), (b"b", "second")):
            with stack.followed(Letter(200, Envelope(), payload)):
                stack.notes[0][name] = payload
        with stack.followed(Letter(200, Envelope(), b"a")):
            assert "second" not in stack.notes[0]
            stack.notes[0]["first"] = b"a again"
        assert set(stack.notes[0]) == {"first", "asked"}

    def test_a_note_of_a_question_that_failed_is_bound_too(self):
        bases = []
        for payload in (b"a", b"b"):
            stack = ClientStack(TASK, (0,), 1, fv.Seed.root(0), fv.Seed.root(0), [Slots()], [{}])
            with contextlib.suppress(RuntimeError), stack.followed(Letter(200, Envelope(), payload)):
                stack.notes[0]["vector"] = torch.ones(1)
                raise RuntimeError
            bases += stack.basis(201, b"")
        assert bases[0] != bases[1]

    def test_what_a_client_holds_is_bound_and_what_is_its_own_is_not(self):
        def basis(memory):
            stack = ClientStack(TASK, (0,), 1, fv.Seed.root(0), fv.Seed.root(0), [Slots(memory)], [{}])
            return stack.basis(TrainHere.kind, b"")[0]

        def down(*held):
            return {"down": ClientWeights(*held)}

        owns = [{}, *({"feedback": Residuals([each]), "scaffold": Control(each)} for each in (DEAD, TASK.initial))]
        same = [basis(down(3, DEAD) | own) for own in owns]
        assert len(set(same)) == 1
        others = [down(4, DEAD), down(3, TASK.initial), down(3, DEAD, DEAD), down(3, DEAD, None, DEAD), {}]
        assert len({*same, *map(basis, others)}) == 6
        assert len({basis(slots | own) for slots in ({}, down()) for own in owns}) == 1

    def test_the_same_weights_in_another_slot_are_another_basis(self):
        bases = [
            ClientStack(TASK, (0,), 1, fv.Seed.root(0), fv.Seed.root(0), [Slots(memory)], [{}]).basis(1, b"")[0]
            for memory in ({"down": ClientWeights(3, DEAD)}, {"other": ClientWeights(3, DEAD)})
        ]
        assert bases[0] != bases[1]

    def test_memory_that_does_not_say_what_is_the_servers_is_not_summed_with(self):
        @message.kind
        class Unsaid(Record, frozen=True):
            weights: message.Weights

        class Remembering(Summed):
            def give(self, stack, question):
                stack.remember("toy", [Unsaid(question.weights)] * len(stack))
                return super().give(stack, question)

        toy = linear_task(4)
        result = fv.run(toy, Remembering(), rounds=2, cohort=4)
        assert not result.ledger.rows[0].missing
        assert all("set `common` to their names" in why for why in result.ledger.rows[1].missing.values())
        assert len(result.ledger.rows[1].missing) == 4


# ---------------------------------------------------------------------------------------------------- memory


class TestPlantedMemory:
    """An inconsistent round that nobody unmasks, then a consistent one at dead weights: its sum is what the first one
    left in the victim's memory."""

    def method(self) -> fv.Method:
        return fv.FedAge(LOCAL, AGE, feedback=True, secure=SecureSum(server="malicious"))

    def planted(self, unscrupulous) -> Loot:
        loot = unscrupulous(self.method(), _Rounds(dead_before(Train), _all_dead), rounds=2)
        assert not loot.row.missing, "the second round is consistent, and is summed"
        return loot

    def test_what_was_not_unmasked_is_not_remembered(self, unscrupulous):
        loot = self.planted(unscrupulous)
        assert np.abs(loot.victims.view(np.int32) - loot.known.view(np.int32) / (N - 1))[:-1].max() <= 1

    def test_control_memory_that_is_written_at_the_masked_stage_comes_out_in_the_next_sum(
        self, unscrupulous, monkeypatch
    ):
        true = Summand.mask

        def hasty(self, stack, question):
            answers = true(self, stack, question)
            stack.remember("feedback", [note.pop(PENDING, Slots()).get("feedback") for note in stack.notes])
            return answers

        monkeypatch.setattr(Summand, "mask", hasty)
        loot = self.planted(unscrupulous)
        assert np.abs(loot.victims.view(np.int32) - loot.known.view(np.int32) / (N - 1))[:-1].max() > 20
        assert loot.exposed

    def test_what_was_unmasked_is_remembered(self):
        engine = Transport()
        fv.run(TASK, self.method(), rounds=1, cohort=N, engine=engine)
        memory = engine._clients.memory
        assert all(memory.before(k, 2, 0)["feedback"].lost[0].any() for k in range(N))


def _all_dead(client: int, question: Any) -> Any:
    return replace(question, weights=DEAD) if isinstance(question, Train) else question


@dataclass
class _Rounds:
    """Ask one way until the masked vectors of the first round have come, and another way from the second one on."""

    ask_first: Callable[[int, Any], Any]
    ask_later: Callable[[int, Any], Any]
    masked: set[int] = field(default_factory=set)
    begun: int = 0

    def __call__(self, client: int, question: Any) -> Any:
        if isinstance(question, Train) and len(self.masked) == N:
            self.begun = 1
        self.masked |= {client} if isinstance(question, Mask) else set()
        return (self.ask_later if self.begun else self.ask_first)(client, question)


# ---------------------------------------------------------------------------------------------------- refusals


class Limited(Summed):
    """A client whose vector is no number, or whose training fails, if a record is above what the question says."""

    fault = "nan"

    def give(self, stack, question):
        answers = super().give(stack, question)
        if CEILING[0] <= float(question.weights[0]):
            return answers
        if self.fault == "raise":
            raise RuntimeError(f"a record is above {float(question.weights[0])}")
        return [replace(a, update=torch.full_like(a.update, float("nan"))) for a in answers]


class Raising(Limited):
    fault = "raise"


CEILING = [0.0]  # the largest value among the victim's records


class TestRefusalsThatTell:
    """40 questions in one round once bisected the largest pixel of a client: it refused what overflowed."""

    def views(self, method: fv.Method, ceiling: float) -> list[tuple[str, int]]:
        """What a server sees that asks for another bound each time, beginning the round anew before each."""
        CEILING[:] = [ceiling]
        toy, run = linear_task(4), bytes(8)
        clients, seen = Clients(method, toy, run, fv.Seed.root(0)), []
        for bound in np.linspace(0, 1, 40):
            weights = toy.initial.clone()
            weights[0] = float(bound)
            asked = Mask([0, 1, 2, 3], 10, False, Give.kind, tensor(message.pack(Give(weights))))
            seen += [answered(clients, asked, run)]
            seen += [one(clients, asked, 0, run)]  # and once more, without beginning anew
        return seen

    @pytest.mark.parametrize("method", [Limited(), Raising()], ids=["not a number", "an exception"])
    def test_what_the_server_sees_does_not_depend_on_the_records(self, method):
        views = [self.views(method, ceiling) for ceiling in (0.2, 0.7, 2.0)]
        assert views[0] == views[1] == views[2]
        assert views[0][0] == ("", 112), "the first question is answered,"
        told = {sentence for sentence, _ in views[0][1:]}
        assert len(told) == 2
        assert all("refused: wrong stage" in sentence for sentence in told), "no other is"

    @pytest.mark.parametrize("method", [Limited(), Raising()], ids=["not a number", "an exception"])
    def test_control_a_client_that_refuses_tells(self, method, monkeypatch):
        def refuse(self, stack, i, why):
            raise why

        monkeypatch.setattr(Summand, "_zeroed", refuse)
        monkeypatch.setattr(summand, "BASIS", "another note every time")  # and it answers every question
        true = ClientStack.basis
        monkeypatch.setattr(ClientStack, "basis", lambda self, *question: [b"" for _ in true(self, *question)])
        views = [self.views(method, ceiling) for ceiling in (0.2, 0.7)]
        answered_ = [[not sentence for sentence, _ in view[::2]] for view in views]
        assert [each.index(True) for each in answered_] == [8, 28], "of 40 bounds the least that is not refused"

    def test_after_a_restart_the_same_question_is_answered_and_no_other(self):
        toy, run = linear_task(4), bytes(8)
        first = Clients(Summed(), toy, run, fv.Seed.root(0))
        asked = [
            Mask([0, 1, 2, 3], 10, False, Give.kind, tensor(message.pack(Give(toy.initial + i)))) for i in range(2)
        ]
        assert answered(first, asked[0], run) == ("", 112)
        second = Clients(Summed(), toy, run, fv.Seed.root(0))
        kept.unpack(kept.pack(first, 0, b"k" * 32), second, 0, b"x" * 32)  # a key that is lost
        told, _ = answered(second, asked[1], run)
        assert told == "refused: wrong stage: client 0 has masked the answer to another question in round 1"
        assert answered(second, asked[0], run) == ("", 112)


def one(clients: Clients, question: Any, client: int, run: bytes) -> tuple[str, int]:
    """What is seen of an answer: why there is none, and its length."""
    try:
        return "", len(clients.answer([letter(question, client, run)])[0].frame)
    except Exception as error:
        return Clients.problem(error), 0


def answered(clients: Clients, asked: Mask, run: bytes) -> tuple[str, int]:
    """Begin a sum anew and ask its question of client 0; the others are honest and of the attacker's making."""
    others = Clients(Summed(), clients.task, run, fv.Seed.root(0))
    Driven({k: clients if k == 0 else others for k in range(4)}, run).deal()
    return one(clients, asked, 0, run)


# ---------------------------------------------------------------------------------------------------- secrets


class TestSecrets:
    """Both secrets of a client give its vector away, so no way must lead to both."""

    TOY = linear_task(N, 60, uneven=True)
    OTHERS = tuple(k for k in range(N) if k != VICTIM)

    def driven(self, identities: Identities | None = None, quorum: int | None = None) -> Driven:
        here, own = (Clients(Summed(), self.TOY, bytes(8), fv.Seed.root(0), None, who) for who in (identities, None))
        return Driven({k: own if k == VICTIM else here for k in range(N)}, quorum=quorum)

    def true(self, client: int = VICTIM) -> np.ndarray:
        """What a client encodes."""
        sizes = self.TOY.clients.sizes
        fixed = FixedPoint(N, 1.0, 20, int(sizes.max()))
        return fixed.encode(given_by(client).numpy(), int(sizes[client]), rounding(client))

    def test_a_second_unmasking_is_refused(self):
        driven = self.driven().deal().mask(Give(self.TOY.initial))
        for k in self.OTHERS:
            driven.unmask(k)
            with pytest.raises(Refused, match="wrong stage"):
                driven.unmask(k, gone=(VICTIM,))

    def test_control_a_second_unmasking_gives_the_vector_away(self, monkeypatch):
        true = Summand._noted

        def forgetful(self, stack, notes, answers):
            return answers if notes[0].stage == "unmask" else true(self, stack, notes, answers)

        monkeypatch.setattr(Summand, "_noted", forgetful)
        driven = self.driven().deal().mask(Give(self.TOY.initial))
        own = driven.recovered({k: driven.unmask(k)[VICTIM] for k in self.OTHERS[:4]})
        mask = driven.recovered({k: driven.unmask(k, gone=(VICTIM,))[VICTIM] for k in self.OTHERS[:4]})
        assert np.array_equal(driven.vector(VICTIM, own, mask), self.true())

    def test_a_threshold_with_which_two_halves_could_recover_one_secret_each_is_refused(self):
        with pytest.raises(Refused, match="bad set: 2 of 6 clients are to be enough"):
            self.driven(quorum=2).deal()

    def test_control_with_such_a_threshold_two_halves_give_the_vector_away(self, monkeypatch):
        monkeypatch.setattr(SecureSum, "quorum", lambda self, n: 2)
        driven = self.driven(quorum=2).deal().mask(Give(self.TOY.initial))
        own = driven.recovered({k: driven.unmask(k)[VICTIM] for k in self.OTHERS[:2]})
        mask = driven.recovered({k: driven.unmask(k, gone=(VICTIM,))[VICTIM] for k in self.OTHERS[2:4]})
        assert np.array_equal(driven.vector(VICTIM, own, mask), self.true())

    def test_fewer_than_the_threshold_are_not_unmasked(self):
        driven = self.driven().deal().mask(Give(self.TOY.initial))
        with pytest.raises(Refused, match="bad set: 1 clients are left, 4 are needed"):
            driven.unmask(VICTIM, gone=self.OTHERS)

    def test_control_without_a_floor_the_sum_of_one_comes_out(self, monkeypatch):
        """Everybody else is called gone, and reveals the others' mask keys before it is asked for the victim's b."""
        monkeypatch.setattr(Party, "_check_alive", lambda *args: None)
        driven = self.driven().deal().mask(Give(self.TOY.initial))
        shares = {k: driven.unmask(k, gone=self.OTHERS) for k in range(N)}
        own = driven.recovered({k: shares[k][VICTIM] for k in range(4)})
        keys = {o: driven.recovered({k: shares[k][o] for k in range(4)}) for o in self.OTHERS}
        vector, public = driven.masked[VICTIM].vector.clone().numpy().view(np.uint32), driven.keys[VICTIM].mask
        context = Context.of(driven.run, 1, driven.ids, driven.quorum)
        asked = driven.masked[VICTIM].asked.numpy().tobytes()
        pairs = {
            o: context.pair_mask(masks.exchange(key, [public.numpy().tobytes()])[0], asked, VICTIM, o)
            for o, key in keys.items()
        }
        added = [context.own_mask(own, VICTIM), *(key for o, key in pairs.items() if o > VICTIM)]
        masks.mask(vector, [key for o, key in pairs.items() if o < VICTIM], added)
        assert np.array_equal(vector, self.true())

    def test_clients_of_the_servers_making_are_refused(self):
        """The server answers for all others itself: the sum minus what it made up is the victim's vector."""
        with pytest.raises(Refused, match="bad signature: client 0 did not sign this"):
            self.driven(FORGED).deal()

    def test_control_where_signatures_are_not_checked_they_are_not(self, monkeypatch):
        monkeypatch.setattr(Identities, "verify", lambda *args: None)
        driven = self.driven(FORGED).deal().mask(Give(self.TOY.initial))
        shares = {k: driven.unmask(k) for k in range(N)}
        owns = {o: driven.recovered({k: shares[k][o] for k in range(4)}) for o in range(N)}
        context = Context.of(driven.run, 1, driven.ids, driven.quorum)
        total = np.sum([each.vector.numpy().view(np.uint32) for each in driven.masked.values()], 0, dtype=np.uint32)
        masks.mask(total, [], [context.own_mask(secret, k) for k, secret in owns.items()])
        made_up = np.sum([self.true(k) for k in self.OTHERS], 0, dtype=np.uint32)
        assert np.array_equal(total - made_up, self.true())


class Lenient(Identities):
    """Signs with keys of the attacker's making, and takes every signature for good."""

    def verify(self, client, signature, data):
        pass


FORGED = Lenient(simulated(fv.Seed.root(99)).own, {})


# ---------------------------------------------------------------------------------------------------- parts and range


class TestParts:
    """With few neighbours, two clients who are gone cut the circle: each part then has a sum of its own."""

    TASK = linear_task(12, 120, uneven=True)
    HOW = SecureSum(neighbours=2)
    CIRCLE = fv.Seed.root(0).child("round", 1, "secure sum").numpy().permutation(12).tolist()
    PART = CIRCLE[1:4]

    @pytest.fixture
    def parts(self, monkeypatch) -> list[torch.Tensor]:
        """A server that has no check of its own, and sums a part of three clients."""
        found: list[torch.Tensor] = []
        true = summing._Scene.unmask

        def partial(scene, total, senders, alive, shared, shares, asked):
            fixed, part = FixedPoint(12, 1.0, 20, int(self.TASK.clients.sizes.max())), set(self.PART)
            masked = [MASKED[k].vector.numpy().view(np.uint32) for k in self.PART]
            own = np.sum(masked, axis=0, dtype=np.uint32)
            true(scene, own, [k for k in senders if k in part or k not in alive], part, shared, shares, asked)
            found.append(torch.from_numpy(fixed.decode(own)[0]))
            true(scene, total, senders, alive, shared, shares, asked)

        monkeypatch.setattr(summing._Scene, "unmask", partial)
        monkeypatch.setattr(summing._Scene, "connected", lambda scene, alive: True)
        return found

    def run(self) -> fv.core.ledger.Row:
        cut = {Mask: (self.CIRCLE[0], self.CIRCLE[4])}
        hear = lambda k, answer: MASKED.update({k: answer} if isinstance(answer, Masked) else {}) or answer  # noqa: E731
        LAST.clear()
        method = Summed(self.HOW)
        engine = Transport(cut, answer=hear)
        return fv.run(self.TASK, method, rounds=1, cohort=Only(size=12), engine=engine).ledger.rows[0]

    def test_clients_do_not_unmask_parts(self, parts):
        row = self.run()
        assert not parts
        assert row.secure[-1].stage == "unmask"
        assert row.secure[-1].answered == 0
        assert sum("the masks of those who are left fall into parts" in why for why in row.missing.values()) == 10

    def test_control_where_they_do_a_part_has_its_own_sum(self, parts, monkeypatch):
        monkeypatch.setattr(graph, "connected", lambda *args: True)
        self.run()
        assert torch.equal(parts[0], expected(self.TASK, self.PART, self.HOW, 12)[0])

    def test_an_honest_server_stops_before_it_asks_for_shares(self):
        row = self.run()
        assert row.secure[-1].stage == "masked"
        assert "fall apart; set method.secure.neighbours higher" in row.events[-1]


MASKED: dict[int, Masked] = {}


class TestRange:
    """A client that masks something else than it should: 2^31 in one element once moved a weight by 821."""

    def run(self) -> tuple[fv.core.ledger.Row, float]:
        toy = linear_task(5)

        def add(client, answer):
            if client != VICTIM or not isinstance(answer, Masked):
                return answer
            vector = answer.vector.clone()
            vector[0] ^= -(2**31)
            return replace(answer, vector=vector)

        result = fv.run(toy, Summed(), rounds=1, cohort=Only(size=5), engine=Transport(answer=add))
        return result.ledger.rows[0], float((result.weights - toy.initial).abs().max())

    def test_a_sum_out_of_range_is_not_used(self):
        row, moved = self.run()
        assert moved == 0
        assert "the secure sum cannot be used: an element of it is 2,147" in row.events[0]
        assert "so somebody masked a wrong vector" in row.events[0]

    def test_control_where_it_is_one_client_moves_a_weight_by_hundreds(self, monkeypatch):
        monkeypatch.setattr(FixedPoint, "check", lambda self, total, clients: None)
        assert self.run()[1] > 500


def test_rounding_is_that_of_the_public_seed():
    """The tests above know what clients encode."""
    fixed = FixedPoint(3, 1.0, 8, 1)
    values = torch.rand(50).numpy()
    assert np.array_equal(fixed.encode(values, 1, rounding(3)), fixed.encode(values, 1, rounding(3)))
    assert not np.array_equal(fixed.encode(values, 1, rounding(3)), fixed.encode(values, 1, rounding(4)))


def test_refused_reasons_that_pass_the_masked_stage_are_about_questions():
    """A handler's own refusal may be about records, so only these are told."""
    assert not {"not finite", "out of range", "wrong shape", "wrong dtype"} & summand.ABOUT_QUESTIONS

    class Picky(Summed):
        reason = "not finite"

        def give(self, stack, question):
            raise Refused(self.reason, "why")

    class Lost(Picky):
        reason = "lost state"

    toy = linear_task(4)
    assert not fv.run(toy, Picky(), rounds=1, cohort=4).ledger.rows[0].missing
    assert len(fv.run(toy, Lost(), rounds=1, cohort=4).ledger.rows[0].missing) == 4
