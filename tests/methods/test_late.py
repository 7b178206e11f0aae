"""Answers that arrive late: a server that goes on without waiting (`cohort.buffer`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.core import message, schema
from fedveil.core.clients import Reply
from fedveil.core.message import KINDS, Answer, Count, Envelope, Refused, Shape
from fedveil.core.outstanding import Outstanding, PastWeights
from fedveil.core.sampling import Fate
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.links.replay import MixedStep, Step
from fedveil.links.steps import CatchUp, WeightsDigest
from fedveil.methods.baffle.baffle import Slopes
from fedveil.runs import cost, recipe
from fedveil.testing.grid import OnFlower
from methods.baffle.probes import stack
from toys import Tamper, kept, linear_task

LOCAL = fv.LocalTraining(lr=0.5, batch=4)
ADAM = fv.ServerOptimizer("adam", 0.01, tau=1e-8)
FEDSYNTH = fv.FedSynthCodec(batches=2, batch=2, epochs=1, fits=3)
TASK = linear_task(clients=8, records=96, uneven=True)
LATE = fv.CohortSampler(size=4, buffer=2, latency=1.0, spread=1.0)
METHODS = {
    "fedavg": fv.FedAvg(LOCAL),
    "fedprox, adam": fv.FedProx(LOCAL, server=ADAM),
    "median": fv.FedAvg(LOCAL, aggregator=fv.Aggregator("median")),
    "steps down": fv.FedAvg(LOCAL, up=fv.Qsgd(), down=fv.Qsgd()),
    "feedback": fv.FedAvg(LOCAL, up=fv.TopK(share=0.3), feedback=True),
    "fedsynth": fv.FedSynth(LOCAL, up=FEDSYNTH),
    "fedsynth, both ways": fv.FedSynth(LOCAL, up=FEDSYNTH, down=FEDSYNTH),
    "baffle": fv.Baffle(directions=6, weak=4, share=0.5),
    "baffle, own seeds": fv.Baffle(directions=6, seeds="own"),
    "baffle, replay": fv.Baffle(directions=6, down="replay", centered=True),
    "baffle, epochs": fv.BaffleEpochs(directions=4),
    "private": fv.FedAvg(LOCAL, privacy=fv.DpSgd(noise=1.0, delta=1e-3)),
}


def digits(clients: int = 10) -> fv.Task:
    data = fv.load("digits")
    model = fv.models.build("digits-cnn", data.input, 10)
    return fv.Task(model, data, fv.split("iid", data, clients, fv.Seed.root(0)))


def run(method: fv.Method, plan: fv.CohortSampler, task: fv.Task = TASK, rounds: int = 8, **options: Any) -> fv.Result:
    return fv.run(task, method, rounds=rounds, cohort=plan, insecure_test_noise=1, **options)


def steps(method: fv.Method, plan: fv.CohortSampler, rounds: int, task: fv.Task = TASK, **options: Any):
    """The federation, and its states and rows, from the first state on."""
    federation = fv.Federation(task, method, LocalEngine(), plan, fv.Seed.root(0), **options)
    states, rows = [method.init_state(task)], []
    for number in range(1, rounds + 1):
        state, row = federation.step(states[-1], number, rounds)
        states.append(state)
        rows.append(row)
    return federation, states, rows


# ---------------------------------------------------------------------------------------------------- the same run


@pytest.mark.parametrize("name", METHODS)
def test_a_buffer_of_a_cohort_without_latencies_is_a_server_that_waits(name):
    waiting = run(METHODS[name], fv.CohortSampler(size=4), rounds=4)
    late = run(METHODS[name], fv.CohortSampler(size=4, buffer=4), rounds=4)
    assert torch.equal(late.weights, waiting.weights)
    for mine, other in zip(late.ledger.rows, waiting.ledger.rows, strict=True):
        assert (mine.metrics.pop("staleness"), mine.metrics.pop("staleness_most")) == (0, 0)
        assert mine.untimed() == other.untimed()


def test_running_statistics_arrive_with_the_updates():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(66, 3, generator=draw), torch.randint(0, 2, (66,), generator=draw)
    data = from_tensors(x, y, x, y, classes=2)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    task = fv.Task(model, data, fv.split("iid", data, 8, fv.Seed.root(0)))
    method = fv.FedAvg(LOCAL)
    waiting, late = (run(method, fv.CohortSampler(size=4, buffer=buffer), task) for buffer in (None, 4))
    assert torch.equal(late.weights, waiting.weights)
    assert torch.equal(late.task.norms.values, waiting.task.norms.values)
    federation, states, _ = steps(method, LATE, 8, task)
    arrivals = {n: federation.timeline.window(n).arrivals for n in range(1, 9)}
    number = next(n for n, own in arrivals.items() if all(each.asked < n for each in own))  # all were asked before
    before = {(each.round, each.client): each for each in states[number - 1].slots["outstanding"].answers}
    answers = [message.unfold(before[each.asked, each.client].frame) for each in arrivals[number]]
    records = torch.tensor([float(answer.records) for answer in answers])
    expected = records @ torch.stack([answer.statistics for answer in answers]) / records.sum()
    torch.testing.assert_close(states[number].slots["batch norm"].statistics, expected)


def test_a_sketch_is_decoded_for_each_client_and_so_rounds_otherwise():
    method = fv.FedAvg(LOCAL, up=fv.Sketch(4))
    waiting, late = (run(method, fv.CohortSampler(size=4, buffer=buffer)) for buffer in (None, 4))
    torch.testing.assert_close(late.weights, waiting.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(name, tmp_path):
    plan = replace(LATE, drop=0.1)
    run(METHODS[name], plan, folder=tmp_path / "whole", rounds=7)
    done: list[int] = []
    run(METHODS[name], plan, folder=tmp_path / "parts", rounds=7, stop=lambda: len(done) == 3,
        observer=lambda row: done.append(row.round))  # fmt: skip
    assert len(done) == 3
    run(METHODS[name], plan, folder=tmp_path / "parts", rounds=7)
    parts, whole = (kept(tmp_path / name) for name in ("parts", "whole"))
    accounts = METHODS[name].client_cost(TASK)  # they name the run, which is another one
    assert parts[:2] + parts[2 + bool(accounts) :] == whole[:2] + whole[2 + bool(accounts) :]


@pytest.mark.parametrize("name", ["fedavg", "steps down", "fedsynth", "baffle, replay"])
def test_a_run_is_the_same_on_every_engine(name):
    first = run(METHODS[name], LATE)
    assert max(row.metrics["staleness_most"] for row in first.ledger.rows) > 1
    for engine in (LocalEngine(stack=1, workers=1), LocalEngine(wire="bytes"), OnFlower()):
        other = run(METHODS[name], LATE, engine=engine)
        torch.testing.assert_close(other.weights, first.weights, rtol=1e-5, atol=1e-6)
        assert [(r.up, r.down, r.cohort, r.missing, r.simulated) for r in other.ledger.rows] == [
            (r.up, r.down, r.cohort, r.missing, r.simulated) for r in first.ledger.rows
        ]


# ---------------------------------------------------------------------------------------------------- what is averaged


@message.kind
class There(Answer, frozen=True):
    """Where local training led."""

    there: Annotated[Tensor, Shape(("weights",))]
    records: Count = 1


@dataclass(frozen=True)
class Absolute(fv.Codec[There]):
    """Sends weights, of which only a server that knows where the client began can make an update."""

    name: ClassVar[str] = "toy-absolute"
    payload: ClassVar[type[Answer]] = There

    def encode(self, task: fv.Task, w: Tensor, updates: Tensor, seeds: Any, stack: Any) -> list[There]:
        return [There(row) for row in w + updates]

    def decode(self, task: fv.Task, w: Tensor, payloads: Sequence[There]) -> Tensor:
        return schema.stack(payloads, "there") - w


del fv.Codec.registry[Absolute.name]


def alone(method: fv.Method, before: fv.State, client: int, round_: int) -> Tensor:
    """The update that a server gets of one client, which it asks in a round and waits for."""

    class Alone(fv.CohortSampler):
        def draw(self, task, seed):
            return (client,)

    federation = fv.Federation(TASK, method, LocalEngine(), Alone(), fv.Seed.root(0))
    after, _ = federation.step(fv.State(before.weights), round_, round_)
    return after.weights - before.weights


@pytest.mark.parametrize("codec", [fv.Raw(), Absolute(), FEDSYNTH, fv.Sketch(4)], ids=lambda codec: codec.name)
def test_an_update_is_that_of_the_weights_it_is_about_and_is_scaled_for_its_staleness(codec):
    method = fv.FedAvg(LOCAL, up=codec)
    federation, states, rows = steps(method, replace(LATE, staleness=1.0), 8)
    late = 0
    for number, row in enumerate(rows, 1):
        arrived = federation.timeline.window(number).arrivals
        assert row.cohort == sorted(each.client for each in arrived)
        old = torch.tensor([number - each.asked for each in arrived])
        records = torch.tensor([float(TASK.clients.sizes[each.client]) for each in arrived])
        updates = torch.stack([alone(method, states[each.asked - 1], each.client, each.asked) for each in arrived])
        expected = states[number - 1].weights + (records / (1 + old)) @ updates / records.sum()
        torch.testing.assert_close(states[number].weights, expected, rtol=1e-5, atol=1e-6)
        late = max(late, int(old.max()))
    assert late == 2


def test_a_median_is_of_all_answers_whatever_they_are_about():
    method = fv.FedAvg(LOCAL, aggregator=fv.Aggregator("median"))
    federation, states, _ = steps(method, replace(LATE, buffer=3), 6)
    for number in range(1, 7):
        arrived = federation.timeline.window(number).arrivals
        updates = [alone(method, states[each.asked - 1], each.client, each.asked) for each in arrived]
        scaled = [u / (1 + number - each.asked) ** 0.5 for u, each in zip(updates, arrived, strict=True)]
        expected = states[number - 1].weights + torch.stack(scaled).median(0).values
        torch.testing.assert_close(states[number].weights, expected, rtol=1e-5, atol=1e-6)


def test_weights_are_kept_for_codecs_that_decode_at_them_and_as_long_as_answers_are_out():
    for method, keeps in ((fv.FedAvg(LOCAL, up=Absolute()), True), (fv.FedAvg(LOCAL), False)):
        _, states, _ = steps(method, replace(LATE, max_staleness=2), 10)
        for number, state in enumerate(states[1:], 1):
            slot = state.slots["outstanding"]
            out = {each.round for each in slot.answers if each.frame}
            assert {int(name) for name in slot.versions} == (out if keeps else set())
            assert all(number - each < 2 for each in out)
            for name, version in slot.versions.items():
                assert torch.equal(version.weights, states[int(name) - 1].weights)


@pytest.mark.parametrize("chosen", [{}, {"seeds": "own"}, {"weak": 3, "share": 0.5}])
def test_slopes_of_several_versions_are_an_estimate_along_the_directions_of_each(chosen):
    """The server's step from the held messages themselves, against the sum over single slopes."""
    method = fv.Baffle(directions=5, clip=None, server=fv.ServerOptimizer(lr=0.1), **chosen)
    sent: dict[tuple[int, int], Slopes] = {}

    def look(round_, replies):
        for reply in replies:
            record, _ = message.unframe(reply.frame, KINDS, 10**6)
            sent[round_, reply.client] = record
        return replies

    federation = fv.Federation(TASK, method, Tamper(look), LATE, fv.Seed.root(0))
    state, mixed = method.init_state(TASK), 0
    for number in range(1, 7):
        before, (state, _) = state.weights, federation.step(state, number, 6)
        arrived = federation.timeline.window(number).arrivals
        total = sum(sent[each.asked, each.client].records for each in arrived)
        gradient = torch.zeros_like(before)
        for each in arrived:
            own, weight = sent[each.asked, each.client], (1 + number - each.asked) ** -0.5
            key = fv.Seed.root(0).child("round", each.asked)
            keys = [_key(method, key, each.client)]
            rows = [own.slopes * (weight * own.records / total / len(own.slopes))]
            gradient += method.prober(TASK).combine(keys, rows)
        torch.testing.assert_close(state.weights, before - 0.1 * gradient, rtol=1e-4, atol=1e-6)
        mixed += len({each.asked for each in arrived}) > 1
    assert mixed


def _key(method: fv.Baffle, seed: fv.Seed, client: int) -> int:
    from fedveil.core.directions import words
    from fedveil.methods.baffle.estimate import key_of

    key = key_of(seed)
    return int(words(torch.tensor([key]), torch.tensor([client]))) if method.seeds == "own" else key


# ---------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("server", [ADAM, replace(ADAM, ema=0.9), fv.ServerOptimizer("momentum", 0.05)])
def test_with_replay_clients_hold_the_very_weights_that_the_server_has(server):
    task = digits()
    plan = fv.CohortSampler(size=6, buffer=3, latency=1.0, spread=1.0)
    method = fv.Baffle(directions=20, batch=8, down="replay", server=server)
    federation = fv.Federation(task, method, LocalEngine(), plan, fv.Seed.root(0))
    state, rows = method.init_state(task), []
    for number in range(1, 9):
        live = method.server.training(state).weights
        state, row = federation.step(state, number, 8)
        rows.append(row)
        for client in federation.timeline.window(number).asked:
            held = federation.clients.memory.entries[client][-1][3]
            assert held.version == number - 1
            assert torch.equal(held.weights, live)
    assert not any(row.metrics["resynced"] for row in rows)
    assert any(row.metrics["caught_up"] for row in rows)
    history = [message.unfold(each) for each in state.slots["down"].history]
    assert {type(each) for each in history} == {Step, MixedStep}
    assert torch.equal(run(replace(method, down="weights"), plan, task).weights, state.weights)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (MixedStep([1, 2], torch.zeros(3, 4)), "wrong shape"),
        (MixedStep([1, 2], torch.zeros(2, 5)), "wrong shape"),
        (MixedStep([1, 2], torch.zeros(8)), "wrong shape"),
        (MixedStep([1, 2], torch.full((2, 4), torch.nan)), "not finite"),
        (MixedStep([1] * 102, torch.zeros(102, 4)), "wrong field"),
        (MixedStep([], torch.zeros(1, 4)), "wrong field"),
        (MixedStep([1, 2**63], torch.zeros(2, 4)), "wrong field"),
        (MixedStep([1, 2], torch.zeros(2, 10**6)), "too large"),
    ],
)
def test_a_hostile_mixed_step_is_refused_by_name(step, reason):
    chosen = fv.Baffle(directions=4, down="replay")
    with pytest.raises(Refused, match=f"^{reason}"):
        chosen.steps.follow(stack(linear_task()), CatchUp(1, [message.frame(step, Envelope())]))


# ---------------------------------------------------------------------------------------------------- the ledger


@pytest.mark.parametrize("name", ["fedavg", "baffle", "baffle, replay"])
def test_bytes_are_counted_down_when_they_are_asked_and_up_when_they_arrive(name):
    plan = replace(LATE, drop=0.2, max_staleness=3)
    federation, states, rows = steps(METHODS[name], plan, 12)
    up = sum(row.bytes_up for row in rows)
    seen = []

    def look(round_, replies):
        seen.extend(len(reply) for reply in replies)
        return replies

    run(METHODS[name], plan, rounds=12, engine=Tamper(look))
    out = sum(each.size for each in states[-1].slots["outstanding"].answers)
    assert up + out == sum(seen)
    assert out > 0
    for row in rows:
        window = federation.timeline.window(row.round)
        assert set(row.down) == {str(k) for k in window.asked}
        assert row.missing == {str(each.client): each.why for each in window.arrivals if each.why}
        old = [row.round - each.asked for each in window.arrivals if not each.why]
        assert row.metrics["staleness"] == sum(old) / len(old)
        assert row.metrics["staleness_most"] == max(old)
        assert row.simulated == window.seconds
    assert {why.split(":")[0] for row in rows for why in row.missing.values()} == {"dropped", "stale"}


def test_a_forecast_is_of_all_who_are_asked():
    plan = recipe.read("digits/fedavg", ["rounds=6", "cohort.size=4", "cohort.buffer=2", "cohort.latency=1.0"])
    task = plan.build()
    figures = cost.cost(task, plan)
    _, states, rows = steps(plan.method, plan.cohort, 6, task)
    out = sum(each.size for each in states[-1].slots["outstanding"].answers)
    assert figures["up"]["total"] == sum(row.bytes_up for row in rows) + out
    assert figures["down"]["total"] == sum(row.bytes_down for row in rows)
    assert any("does not wait" in note for note in figures["notes"])


def test_a_server_that_waits_has_simulated_seconds_too():
    @dataclass(frozen=True)
    class Fixed(fv.CohortSampler):
        def fate(self, seed, client, serial=0):
            return Fate(3.0, "late: 9 s") if client == 5 else Fate(float(client) / 4)

    rows = run(fv.FedAvg(LOCAL), Fixed(size=8, latency=1.0)).ledger.rows
    assert {row.simulated for row in rows} == {3.0}
    assert all(row.missing == {"5": "late: 9 s"} for row in rows)
    plain = run(fv.FedAvg(LOCAL), fv.CohortSampler(size=8), rounds=2)
    assert {row.simulated for row in plain.ledger.rows} == {msgspec.UNSET}
    assert b"simulated" not in msgspec.json.encode(plain.ledger.rows[0])
    assert plain.summary()["simulated"] is None
    late = run(fv.FedAvg(LOCAL), LATE)
    assert late.summary()["simulated"] == pytest.approx(sum(row.simulated for row in late.ledger.rows))


def test_private_answers_are_charged_when_they_are_asked():
    method = fv.FedAvg(LOCAL, privacy=fv.DpSgd(noise=1.0, delta=1e-3))
    result = run(method, LATE, rounds=12)
    asked = [0] * 8
    for row in result.ledger.rows:
        for client in row.down:
            asked[int(client)] += 1
        account = method.account(TASK, LATE)
        assert account
        assert row.epsilon == pytest.approx(account.spent(max(asked)))


# ---------------------------------------------------------------------------------------------------- hostile answers


def honest_but(attack, client: int = 2):
    """An engine in which one client's first answer that may be attacked is."""
    before: list[Reply] = []

    def change(round_, replies):
        for reply in replies:
            if reply.client == client:
                before.append(reply)
                if len(before) > 1:
                    reply = Reply(client, attack(before[0].frame, reply.frame))
            yield reply

    return Tamper(change)


def changed(frame: bytes, **fields: Any) -> bytes:
    number, where = message.envelope(frame)
    return message.prefix(number, replace(where, **fields)) + frame[message.PREFIX_BYTES :]


ATTACKS: Mapping[str, Any] = {
    "wrong round: 1 where": lambda old, new: old,
    "wrong round": lambda old, new: changed(new, round=message.envelope(new)[1].round - 1),
    "wrong serial": lambda old, new: changed(new, serial=9),
    "wrong run": lambda old, new: changed(new, run=b"another!"),
    "truncated": lambda old, new: new[:-8],
    "not a frame": lambda old, new: b"?" * len(new),
}


@pytest.mark.parametrize("reason", ATTACKS)
def test_a_hostile_answer_is_refused_by_name_when_it_arrives(reason):
    method, plan = fv.FedAvg(LOCAL), replace(LATE, max_staleness=100)
    result = run(method, plan, rounds=16, engine=honest_but(ATTACKS[reason]))
    told = [row.missing["2"] for row in result.ledger.rows if "2" in row.missing]
    asked = [row.round for row in result.ledger.rows if "2" in row.down]
    assert told
    assert all(why.startswith(f"refused: {reason}") for why in told)
    arrived = [row for row in result.ledger.rows if 2 in row.cohort]
    assert "2" not in arrived[0].missing
    assert asked[1] <= next(row.round for row in arrived if "2" in row.missing)
    assert all("2" in row.up for row in arrived)


def test_an_answer_with_the_codes_of_another_round_is_refused():
    def old_key(old: bytes, new: bytes) -> bytes:
        (number, where), first = message.envelope(new), message.unframe(old, KINDS, len(old))[0]
        return message.frame(msgspec.structs.replace(message.unframe(new, {number: KINDS[number]}, len(new))[0],
                                                     key=first.key), where)  # fmt: skip

    result = run(fv.FedAvg(LOCAL, up=fv.Sketch(4)), LATE, rounds=12, engine=honest_but(old_key))
    told = [row.missing["2"] for row in result.ledger.rows if "2" in row.missing]
    assert told
    assert all(why.startswith("refused: out of step: the key of the message is not that of the round") for why in told)


def test_a_second_answer_does_not_count_and_who_fails_ends_its_turn():
    def twice(round_, replies):
        for reply in replies:
            yield from (Reply(0, problem="failed: it broke"),) if reply.client == 0 else (reply, reply)

    single = run(fv.FedAvg(LOCAL), LATE, engine=Tamper(lambda _, replies: [r for r in replies if r.client]))
    double = run(fv.FedAvg(LOCAL), LATE, engine=Tamper(twice))
    assert torch.equal(single.weights, double.weights)
    assert {row.missing["0"] for row in double.ledger.rows if 0 in row.cohort} == {"failed: it broke"}
    assert {row.missing["0"] for row in single.ledger.rows if 0 in row.cohort} == {
        "late: no answer when the question closed"
    }
    assert any("duplicate" in event for row in double.ledger.rows for event in row.events)


def test_a_client_that_could_not_catch_up_is_told_of_when_its_turn_ends():
    def silent(round_, replies):
        return [reply for reply in replies if reply.client != 3]

    method = fv.Baffle(directions=6, down="replay")
    result = run(method, LATE, rounds=12, engine=Tamper(silent))
    turns = [row.missing["3"] for row in result.ledger.rows if 3 in row.cohort]
    assert turns
    assert set(turns) == {"late: no answer when the question closed"}
    assert all(set(row.missing) <= {str(k) for k in row.cohort} for row in result.ledger.rows)


def test_a_client_that_lies_about_what_it_holds_is_refused_when_its_turn_ends():
    def lie(_, replies):
        for reply in replies:
            number, where = message.envelope(reply.frame)
            lies = reply.client == 3 and number == WeightsDigest.kind
            yield Reply(3, message.frame(WeightsDigest(), where)) if lies else reply

    result = run(fv.Baffle(directions=6, down="replay"), LATE, rounds=12, engine=Tamper(lie))
    turns = [row.missing["3"] for row in result.ledger.rows if 3 in row.cohort]
    assert turns
    assert all(why.startswith("refused: out of step: it was sent the whole state") for why in turns)
    assert all(set(row.missing) <= {str(k) for k in row.cohort} for row in result.ledger.rows)


@pytest.mark.parametrize("latency", [0.0, 1.0])
def test_a_round_below_its_quorum_leaves_the_weights_and_the_answers_that_are_out(latency):
    def broken(round_, replies):
        return [Reply(reply.client, problem="failed: it broke") for reply in replies] if round_ < 3 else replies

    plan = fv.CohortSampler(
        size=4, buffer=2, latency=latency, quorum=0.9
    )  # without latencies nobody is asked in round 2
    federation = fv.Federation(TASK, fv.FedAvg(LOCAL), Tamper(broken), plan, fv.Seed.root(0))
    state, rows = fv.FedAvg(LOCAL).init_state(TASK), []
    for number in range(1, 9):
        before = state
        state, row = federation.step(state, number, 8)
        rows.append(row)
        told = f"below quorum: {2 - len(row.missing)} of 2 answers can be used, 2 are needed"
        assert [event.startswith(told) for event in row.events] == [True] * bool(row.missing)
        assert torch.equal(state.weights, before.weights) == bool(row.missing)
    assert rows[1].missing
    assert not rows[-1].missing


def test_state_records_are_read_back_as_they_were():
    _, states, _ = steps(fv.FedAvg(LOCAL, up=Absolute()), LATE, 3)
    slot = states[-1].slots["outstanding"]
    again = message.unfold(message.frame(slot, Envelope()))
    assert isinstance(again, Outstanding)
    assert again.answers == slot.answers
    for name, version in again.versions.items():
        assert isinstance(version, PastWeights)
        assert torch.equal(version.weights, slot.versions[name].weights)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            fv.FedAvg(secure=fv.SecureSum()),
            "fedavg cannot use late answers: method.secure sums the answers of one cohort",
        ),
        (
            fv.Baffle(secure=fv.SecureSum()),
            "baffle cannot use late answers: method.secure sums the answers of one cohort",
        ),
        (fv.FedAvg(user_privacy=fv.UserLevel(delta=1e-3)), "the ε of method.user_privacy is of cohorts"),
        (fv.FedAvg(up=fv.FedAgeCodec(code="linear")), "the server averages fedage's codes unseen"),
        (fv.FedAvg(up=fv.PowerSgd()), "the server averages powersgd's codes unseen"),
        (fv.Tofu(full_rounds=2), "would arrive in method.full_rounds"),
        (fv.Scaffold(), "scaffold's server step takes updates of one version"),
        (fv.FedDyn(), "feddyn's server step takes updates of one version"),
        (fv.QFedAvg(), "q-fedavg's server step takes updates of one version"),
        (fv.FedLap(), "fedlap cannot use late answers: it asks a cohort and waits for it"),
        (fv.FedDm(), "feddm cannot use late answers: it asks a cohort and waits for it"),
    ],
)
def test_methods_that_need_their_cohort_are_refused_in_one_sentence(method, told):
    with pytest.raises(ValueError, match=told):
        run(method, replace(LATE, buffer=4))


def test_noise_of_each_client_and_a_robust_aggregator_are_no_reason_to_wait():
    for method in (
        fv.FedAvg(LOCAL, user_privacy=fv.UserLevel(where="client", delta=1e-3)),
        fv.FedAvg(LOCAL, aggregator=fv.Aggregator("krum")),
    ):
        assert any(row.metrics["staleness"] for row in run(method, LATE).ledger.rows)


def test_a_buffer_larger_than_all_clients_is_refused():
    with pytest.raises(ValueError, match=r"cohort.buffer is 9, but a buffer holds one answer of each client at most"):
        run(fv.FedAvg(), replace(LATE, buffer=9))


def test_a_deployment_refuses_a_buffer():
    class Deployed(Tamper):
        simulated = False

    with pytest.raises(ValueError, match=r"cohort.buffer is 2, .* the clients of Deployed are deployed"):
        run(fv.FedAvg(), LATE, engine=Deployed(lambda _, replies: replies))
    plan = recipe.read("digits/fedavg", ["cohort.buffer=2", "split.max_records=200"])
    with pytest.raises(ValueError, match=r"cohort.buffer is 2, .* a deployed server waits for its cohort"):
        plan.party(plan.part(None), None)
