"""Budgets under arbitrary sequences of questions: over rounds, runs, restarts, failures and forged bytes, a client
gives no private answer beyond its budget, and never counts fewer than it gave."""

import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedveil as fv
from fedveil.core.clients import Clients, Letter, Unanswered
from fedveil.core.message import Envelope, Refused, pack
from fedveil.engines import kept
from fedveil.links.down import Train, TrainFull
from fedveil.privacy.accountant import Noised, epsilon
from toys import linear_task

TASK, CLIENT = linear_task(), 2
STEP = Noised(1.0, 2 / 6, 1)
BUDGETS = [epsilon([Noised(1.0, 2 / 6, n)], 1e-3) * 1.0001 for n in (1, 2, 4)]


class Fickle(fv.FedAvg):
    """Training that fails, or gives what no answer may hold, when the question's first weight says so."""

    def trained(self, stack, question, w, trained):
        if float(w[0]) == 7:
            raise MemoryError("out of memory")
        change = torch.full_like(w, 1e9 if float(w[0]) == 8 else 0.0)
        return super().trained(stack, question, w, trained).map(lambda _, update: update + change)


def method(budget: float) -> fv.FedAvg:
    return Fickle(fv.LocalTraining(lr=0.1, steps=1, batch=2), privacy=fv.DpSgd(delta=1e-3, budget=budget))


# (run, round, serial, what is asked), or a restart of the client's process
QUESTION = st.tuples(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from(["train", "train", "train", "full", "fails", "wild", "malformed", "unknown", "another client"]),
)
SEQUENCE = st.lists(st.one_of(QUESTION, st.just("restart")), max_size=14)


def letter(run: int, round_: int, serial: int, what: str) -> Letter:
    weights = TASK.initial.clone()
    weights[0] = {"fails": 7.0, "wild": 8.0}.get(what, float(weights[0]))
    question = TrainFull(weights) if what == "full" else Train(weights)
    payload = pack(question)[:-8] if what == "malformed" else pack(question)
    client = CLIENT + 90 if what == "another client" else CLIENT
    return Letter(
        200 if what == "unknown" else question.kind, Envelope(bytes([run]) * 8, round_, client, serial), payload
    )


def obeys(budget: float, sequence: list) -> int:
    """Play a sequence against a deployed client, and check it after each question; how many answers it gave."""
    plan, given_ = method(budget), 0
    folder = Path(tempfile.mkdtemp(prefix="fedveil-budget-"))
    key = bytes(32)
    try:
        for asked in sequence:
            if asked == "restart":
                key = os.urandom(32)
                continue
            here = Clients(plan, TASK, bytes([asked[0]]) * 8, fv.Seed.root(0))
            here.discreet = True
            with kept.Home(folder, CLIENT) as home:
                home.load(here, key)
                before = here.memory.spent(CLIENT).total()
                here.persist = lambda home=home, here=here: home.save_account(here)
                with contextlib.suppress(Refused, Unanswered):
                    replies = here.answer([letter(*asked)])
                    given_ += sum(bool(reply.frame) for reply in replies)
                    home.save(here, key)
            with kept.Home(folder, CLIENT) as home:
                again = Clients(plan, TASK, bytes([asked[0]]) * 8, fv.Seed.root(0))
                home.load(again, key)
                spent = again.memory.spent(CLIENT)
            assert before <= spent.total() <= before + 1
            assert given_ <= spent.total()
            assert epsilon([Noised(1.0, 2 / 6, spent.total())], 1e-3) <= budget
    finally:
        shutil.rmtree(folder)
    return given_


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No test of the disk: what is written is read back by the same machine."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=60, deadline=None, suppress_health_check=CHECKS)
@given(st.sampled_from(BUDGETS), SEQUENCE)
def test_no_sequence_of_questions_gets_more_than_the_budget(budget, sequence):
    obeys(budget, sequence)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=CHECKS)
@given(st.sampled_from(BUDGETS), SEQUENCE)
def test_no_sequence_of_ten_thousand_gets_more_than_the_budget(budget, sequence):
    obeys(budget, sequence)


def test_the_budget_is_given_away_to_the_last_answer():
    """The property above is not kept by a client that answers nothing."""
    asked = [(run, round_, 0, "train") for run, round_ in itertools.product(range(3), (1, 2))]
    assert [obeys(budget, asked) for budget in BUDGETS] == [1, 2, 4]
    assert obeys(BUDGETS[2], [(0, 1, 0, "fails"), (0, 1, 0, "wild"), "restart", *asked]) == 2, "failures cost too"
    assert obeys(BUDGETS[2], [(0, 1, 0, "malformed"), (0, 1, 0, "unknown"), *asked]) == 4, "but not what is no question"
