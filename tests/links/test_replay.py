"""Replay: clients take the server's steps themselves and hold what it holds, or are sent it."""

import dataclasses

import msgspec
import pytest
import torch

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Reply
from fedveil.core.message import Envelope, Refused, Slots
from fedveil.links.replay import Step
from fedveil.links.steps import CatchUp, ClientWeights, WeightsDigest
from methods.baffle.probes import stack
from toys import Tamper, linear_task

SGD = fv.ServerOptimizer("plain", 0.1)
ADAM = fv.ServerOptimizer("adam", 0.01, tau=1e-8)
COSINE = dataclasses.replace(ADAM, schedule="cosine", schedule_rounds=5, warmup=1)


def digits(clients=10):
    data = fv.load("digits")
    model = fv.models.build("digits-cnn", data.input, 10)
    return fv.Task(model, data, fv.split("iid", data, clients, fv.Seed.root(0)))


def method(server=ADAM, **more):
    return fv.Baffle(directions=20, batch=8, down="replay", server=server, **more)


class Away(fv.CohortSampler):
    """Client 0 takes part in the first round and then again in round 5; all others always."""

    def draw(self, task, seed):
        rounds = {fv.Seed.root(0).child("round", n, "cohort"): n for n in range(1, 9)}
        everyone = range(len(task.clients))
        return tuple(everyone if rounds[seed] in (1, 5) else everyone[1:])


def federation(task, chosen, plan=None):
    return fv.Federation(
        task, chosen, fv.engines.LocalEngine(), plan or fv.CohortSampler(size=len(task.clients)), fv.Seed.root(0)
    )


@pytest.mark.parametrize(
    "server",
    [SGD, fv.ServerOptimizer("momentum", 0.05), ADAM, COSINE],
    ids=lambda s: f"{s.optimizer}-{s.schedule}",
)
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_client_that_was_away_three_rounds_ends_with_the_same_weights(server, ema):
    task = digits()
    run = federation(task, method(dataclasses.replace(server, ema=ema)), Away())
    state, rows = run.method.init_state(task), []
    for number in range(1, 6):
        before = state
        state, row = run.step(state, number, 5)
        rows.append(row)
    live = before.slots["average"].live if ema else before.weights
    assert torch.equal(live, before.weights) == (not ema)
    stands = {k: entries[-1][3] for k, entries in run.clients.memory.entries.items()}
    assert {stand.version for stand in stands.values()} == {4}
    assert all(torch.equal(stand.weights, live) for stand in stands.values())
    assert rows[-1].metrics["caught_up"] == 1
    assert not any(row.metrics["resynced"] for row in rows)
    four = rows[-1].down["0"] - rows[-1].down["1"]  # three steps more than the others got
    assert 3 * 4 * 20 < four < 3 * (4 * 20 + 64)


@pytest.mark.parametrize("more", [{}, {"server": COSINE, "centered": True}], ids=["constant", "cosine, centered"])
def test_a_run_is_the_same_with_weights_sent_down(more):
    sent, replayed = (
        fv.run(digits(), fv.Baffle(directions=20, batch=8, down=down, **more), rounds=4, cohort=10)
        for down in ("weights", "replay")
    )
    assert torch.equal(sent.weights, replayed.weights)
    assert sent.summary()["bytes_down"] > 50 * replayed.summary()["bytes_down"]


def test_a_round_costs_four_bytes_a_direction_both_ways():
    result = fv.run(digits(), fv.Baffle(directions=100, batch=4, down="replay"), rounds=3, cohort=10)
    for row in result.ledger.rows[1:]:
        for client in row.up:
            assert 400 < row.up[client] < 400 + 100
            assert 400 < row.down[client] < 400 + 150


@pytest.mark.parametrize(("server", "parts"), [(SGD, 1), (ADAM, 3)])
def test_a_newcomer_gets_the_state_where_the_steps_are_more_bytes(server, parts):
    task = linear_task()  # 8 weights: any step is longer than they are
    run = federation(task, fv.Baffle(directions=4, down="replay", server=server))
    state = run.method.init_state(task)
    for number in (1, 2):
        state, row = run.step(state, number, 2)
    asked = run.method.steps.missed(state, 0)
    assert [part is not None for part in (asked.weights, asked.first, asked.second)] == [True, parts > 1, parts > 2]
    assert not asked.frames
    assert row.down["0"] > parts * 8 * 4
    assert state.slots["down"].history[0] == b""  # what is never sent is not kept


def test_a_client_that_strayed_is_sent_the_state_and_counted():
    task = digits()
    run = federation(task, method())
    state, _ = run.step(run.method.init_state(task), 1, 3)
    entries = run.clients.memory.entries[3]
    round_, serial, part, stand = entries[-1]
    entries[-1] = round_, serial, part, msgspec.structs.replace(stand, weights=stand.weights + 1e-3)
    state, row = run.step(state, 2, 3)
    assert row.metrics["resynced"] == 1
    assert row.down["3"] > row.down["4"] + 3 * 4 * task.layout.size
    live = run.clients.memory.entries[3][-1][3].weights
    assert torch.equal(live, run.clients.memory.entries[4][-1][3].weights)


def test_a_client_that_says_it_holds_something_else_twice_is_left_out():
    def lie(_, replies):
        for reply in replies:
            lies = reply.client == 1 and message.envelope(reply.frame)[0] == WeightsDigest.kind
            yield (
                Reply(reply.client, message.frame(WeightsDigest(), message.envelope(reply.frame)[1])) if lies else reply
            )

    result = fv.run(linear_task(), fv.Baffle(directions=4, down="replay"), rounds=2, cohort=4, engine=Tamper(lie))
    for row in result.ledger.rows:
        assert row.missing == {"1": "refused: out of step: it was sent the whole state and says that it holds another"}


def test_a_lost_answer_does_not_make_a_client_take_a_step_twice():
    task = linear_task(clients=1)
    halves = dataclasses.replace(SGD, schedule=lambda number: 0.5**number)  # each step has a rate of its own
    chosen = fv.Baffle(directions=4, down="replay", server=halves)
    steps = [Step(n, torch.full((4,), 0.1)) for n in (1, 2)]
    frames = [message.frame(step, Envelope()) for step in steps]
    first = stack(task)
    chosen.steps.follow(first, CatchUp(1, frames[:1]))
    both = stack(task, memory=[Slots({"down": first.kept["down"][0]})])
    chosen.steps.follow(both, CatchUp(2, frames))  # the server does not know that the first arrived
    expected = SGD.init_state(task.initial)
    for number, step in enumerate(steps, 1):
        expected = chosen.take(task, expected, [step.key], [step.coefficients], number)
    assert torch.equal(both.kept["down"][0].weights, expected.weights)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "truncated"),
        (message.frame(ClientWeights(1, torch.zeros(8)), Envelope()), "wrong kind"),
        (message.frame(Step(1, torch.full((4,), torch.nan)), Envelope()), "not finite"),
        (message.frame(Step(1, torch.zeros(5)), Envelope()), "wrong shape"),
        (message.frame(Step(1, torch.zeros(4, dtype=torch.float64)), Envelope()), "wrong dtype"),
        (message.frame(Step(1, torch.zeros(2, 2)), Envelope()), "wrong shape"),
        (message.frame(Step(1, torch.zeros(10**6)), Envelope()), "too large"),
    ],
)
def test_a_hostile_step_is_refused_by_name(frame, reason):
    chosen = fv.Baffle(directions=4, down="replay")
    with pytest.raises(Refused, match=f"^{reason}"):
        chosen.steps.follow(stack(linear_task()), CatchUp(1, [frame]))


def test_a_question_about_weights_that_are_not_held_is_lost_state():
    with pytest.raises(Refused, match="lost state: the weights of version 3 are not held"):
        fv.Baffle(down="replay").steps.held(stack(linear_task()), 3)
