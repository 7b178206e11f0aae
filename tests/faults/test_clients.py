"""Clients that die, answer late, twice or not at all, or fail in their training: the others count, and nothing else."""

import dataclasses
import time

import pytest
import torch

import fedveil as fv
from fedveil.codecs.raw import Update
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.message import Envelope, Refused, frame
from fedveil.core.receiver import read_answer
from fedveil.engines import LocalEngine
from toys import Tamper, Twice, linear_task

LOCAL = fv.LocalTraining(lr=0.5, batch=4)
METHODS = {
    "fedavg": fv.FedAvg(local=LOCAL, server=fv.ServerOptimizer(optimizer="momentum")),
    "scaffold": fv.Scaffold(local=LOCAL),
}
TrainControlled = METHODS["scaffold"].parts.down.question  # weights and the mean control variate
CULPRIT = 2
LATE = "late: no answer when the question closed"


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def between(method, change, rounds=3, clients=4, **options):
    """A run whose replies pass through `change(round, replies)`."""
    return fv.run(linear_task(clients), method, rounds=rounds, engine=Tamper(change), **{"cohort": clients, **options})


def without(culprit, in_round=None):
    """Replies as they are when one client never answers."""
    return lambda round_, replies: [r for r in replies if r.client != culprit or in_round not in (None, round_)]


# ------------------------------------------------------------------------------------------------- on the way


def test_an_upload_that_breaks_off_counts_as_no_answer_wherever_it_breaks_off(method):
    silent = between(method, without(CULPRIT, in_round=2))
    for cut in (0, 1, 24, 30, 40, -9, -1):

        def break_off(round_, replies, cut=cut):
            return [Reply(CULPRIT, r.frame[:cut]) if (r.client, round_) == (CULPRIT, 2) else r for r in replies]

        broken = between(method, break_off)
        assert broken.ledger.rows[1].missing[str(CULPRIT)].startswith("refused: truncated: ")
        assert torch.equal(broken.weights, silent.weights)


def test_every_beginning_of_an_answer_is_refused():
    where = Envelope(bytes(8), 1, CULPRIT)
    whole = frame(Update(torch.ones(8), 6), where)
    sizes = linear_task().sizes
    assert read_answer(Reply(0, whole), Update, sizes, where).records == 6
    for cut in range(len(whole)):
        with pytest.raises(Refused, match="truncated"):
            read_answer(Reply(0, whole[:cut]), Update, sizes, where)


def test_a_straggler_is_late_in_its_round_and_refused_in_the_next(method):
    held = []

    def hold_back(round_, replies):
        if round_ == 1:
            held.extend(r for r in replies if r.client == CULPRIT)
            return [r for r in replies if r.client != CULPRIT]
        return [*held, *replies] if round_ == 2 else replies

    result = between(method, hold_back)
    first, second, _ = result.ledger.rows
    assert first.missing == {str(CULPRIT): LATE}
    assert second.missing == {}
    assert second.events == ["client 2: refused: wrong round: 1 where 2 was expected, then it answered"]
    assert torch.equal(result.weights, between(method, without(CULPRIT, in_round=1)).weights)


def test_a_straggler_that_is_not_in_the_next_cohort_is_a_stranger_there(method):
    held = []

    def hold_back(round_, replies):
        if not held:
            held.append(replies[0])
            return replies[1:]
        return [*([] if held[0].client in {r.client for r in replies} else held), *replies]

    result = between(method, hold_back, rounds=8, cohort=2)
    strangers = [event for row in result.ledger.rows for event in row.events]
    assert strangers
    assert set(strangers) == {f"client {held[0].client}: refused: unknown client: it was not asked"}
    assert torch.equal(result.weights, between(method, without(held[0].client, in_round=1), rounds=8, cohort=2).weights)


def test_an_answer_that_is_sent_again_because_nobody_confirmed_it_counts_once(method):
    result = between(method, lambda round_, replies: [r for r in replies for _ in range(2)])
    once = between(method, lambda round_, replies: replies)
    assert torch.equal(result.weights, once.weights)
    for row, single in zip(result.ledger.rows, once.ledger.rows, strict=True):
        assert len(row.events) == 4
        assert row.bytes_up == 2 * single.bytes_up, "both were sent, so both are counted as bytes"


def test_the_order_in_which_answers_come_does_not_matter(method):
    result = between(method, lambda round_, replies: replies[::-1])
    assert torch.equal(result.weights, between(method, lambda round_, replies: replies).weights)


def test_below_the_quorum_the_state_stays_and_the_next_round_goes_on():
    def two_die(round_, replies):
        return replies[2:] if round_ == 2 else replies

    plan = fv.CohortSampler(size=4, quorum=0.75)
    weights = [between(fv.FedSGD(), two_die, rounds=n, cohort=plan).weights for n in (1, 2, 3)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    event = between(fv.FedSGD(), two_die, rounds=2, cohort=plan).ledger.rows[1].events
    assert event == ["below quorum: 2 of 4 answers can be used, 3 are needed; the weights stay as they were"]


# ------------------------------------------------------------------------------------------------- in training


@dataclasses.dataclass(frozen=True)
class Failing(fv.LocalTraining):
    """Local training in which a stack with a guilty client fails, and a stack that is too large."""

    error: type[BaseException] = RuntimeError
    guilty: tuple[int, ...] = (CULPRIT,)
    largest: int = 10**9
    from_round: int = 1
    stacks: list[int] = dataclasses.field(default_factory=list)  # the sizes of the stacks that were tried

    def train(self, stack, w, correction=None):
        self.stacks.append(len(stack))
        guilty = set(self.guilty) & set(stack.clients)
        if stack.round >= self.from_round and (guilty or len(stack) > self.largest):
            raise self.error("this went wrong")
        return super().train(stack, w, correction)


ENGINES = {
    "one stack": lambda: LocalEngine(workers=1),
    "stacks of three": lambda: LocalEngine(stack=3, workers=1),
    "two workers": lambda: LocalEngine(workers=2),
    "one at a time": lambda: LocalEngine(stack=1, workers=1),
}
ERRORS = [RuntimeError, torch.OutOfMemoryError, MemoryError, KeyError, AssertionError, StopIteration]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("error", ERRORS)
def test_a_failure_is_traced_to_the_guilty_client_and_the_others_are_right(error, engine):
    result = fv.run(linear_task(8), fv.FedAvg(Failing(error=error)), rounds=2, cohort=8, engine=engine())
    for row in result.ledger.rows:
        assert list(row.missing) == [str(CULPRIT)]
        assert row.missing[str(CULPRIT)].startswith(f"failed: {error.__name__}: ")
        assert set(row.up) == set(row.down) - {str(CULPRIT)}
    others = between(fv.FedAvg(), without(CULPRIT), rounds=2, clients=8)
    torch.testing.assert_close(result.weights, others.weights, atol=1e-6, rtol=0)
    if engine is ENGINES["one at a time"]:
        assert torch.equal(result.weights, others.weights)


def test_the_guilty_client_is_found_by_halving():
    local = Failing()
    fv.run(linear_task(8), fv.FedAvg(local), rounds=1, cohort=8, engine=LocalEngine(workers=1))
    assert sorted(local.stacks, reverse=True) == [8, 4, 4, 2, 2, 1, 1]


def test_two_guilty_clients_are_both_found():
    result = fv.run(
        linear_task(8), fv.FedAvg(Failing(guilty=(1, 6))), rounds=1, cohort=8, engine=LocalEngine(workers=1)
    )
    assert set(result.ledger.rows[0].missing) == {"1", "6"}


def test_stacks_that_do_not_fit_into_memory_become_smaller_and_stay_so():
    local = Failing(error=torch.OutOfMemoryError, guilty=(), largest=2)
    result = fv.run(linear_task(8), fv.FedAvg(local), rounds=2, cohort=8, engine=LocalEngine(workers=1))
    assert local.stacks == [8, 4, 2, 2, 4, 2, 2, 2, 2, 2, 2]
    assert not any(row.missing for row in result.ledger.rows)
    whole = fv.run(linear_task(8), fv.FedAvg(), rounds=2, cohort=8, engine=LocalEngine(workers=1))
    torch.testing.assert_close(result.weights, whole.weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("client", [3, "the owner of record 0"])
def test_a_record_that_makes_training_diverge_costs_its_client_alone(client, value, method):
    """Finished clients of a stack are padded with record 0, so its owner must not spoil them."""
    task = linear_task(4, uneven=True)
    owner = next(k for k in range(4) if 0 in task.clients[k])
    culprit, record = (owner, 0) if isinstance(client, str) else (client, task.clients[client][0])
    task.x = task.x.clone()
    task.x[record] = value
    result = fv.run(task, method, rounds=2, cohort=4, engine=LocalEngine(workers=1))
    for row in result.ledger.rows:
        assert list(row.missing) == [str(culprit)]
        assert row.missing[str(culprit)].startswith("refused: not finite: update holds a value")
    others = fv.run(linear_task(4, uneven=True), method, rounds=2, cohort=4, engine=Tamper(without(culprit)))
    torch.testing.assert_close(result.weights, others.weights, atol=1e-5, rtol=0)


def test_a_client_that_restarts_between_two_questions_of_a_round_is_left_out():
    class Restarting(LocalEngine):
        def deliver(self, letters, deadline):
            if letters[0].envelope.serial == 1:
                self._clients.notes[CULPRIT].clear()
            return super().deliver(letters, deadline)

    result = fv.run(linear_task(), Twice(), rounds=1, cohort=4, engine=Restarting(workers=1))
    (row,) = result.ledger.rows
    assert list(row.missing) == [str(CULPRIT)]
    assert row.missing[str(CULPRIT)].startswith("refused: lost state: 'own' of round 1 is gone")
    torch.testing.assert_close(result.weights, linear_task().initial + (1 + 2 + 4) / 4)


def test_an_interrupt_in_training_ends_the_run_and_leaves_a_folder_that_goes_on(tmp_path, monkeypatch):
    true = fv.LocalTraining.train

    def interrupted(self, stack, *given):
        if stack.round == 3:
            raise KeyboardInterrupt
        return true(self, stack, *given)

    options = {"rounds": 4, "cohort": 4, "folder": tmp_path}
    monkeypatch.setattr(fv.LocalTraining, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fv.run(linear_task(), fv.FedAvg(), engine=LocalEngine(1, 1), **options)
    monkeypatch.undo()
    resumed = fv.run(linear_task(), fv.FedAvg(), engine=LocalEngine(1, 1), **options)
    whole = fv.run(linear_task(), fv.FedAvg(), rounds=4, cohort=4, engine=LocalEngine(1, 1))
    assert torch.equal(resumed.weights, whole.weights)


# ------------------------------------------------------------------------------------------------- asked again


def ask(clients, question, round_):
    return clients.answer([Letter.read(frame(question, Envelope(bytes(8), round_, CULPRIT)))])[0].frame


def test_a_client_that_is_asked_again_gives_the_same_answer_and_remembers_it_once():
    """The server was killed in a round, or lost the answer, and asks again: SCAFFOLD's c_k must not move twice."""
    clients = Clients(METHODS["scaffold"], linear_task(), bytes(8), fv.Seed.root(0))
    questions = [TrainControlled(torch.full((8,), 0.1 * r), torch.full((8,), 0.01 * r)) for r in range(4)]
    ask(clients, questions[1], 1)
    first = ask(clients, questions[2], 2)
    assert ask(clients, questions[2], 2) == first
    assert [entry[:3] for entry in clients.memory.entries[CULPRIT]] == [(1, 0, "scaffold"), (2, 0, "scaffold")]
    third = ask(clients, questions[3], 3)
    undisturbed = Clients(METHODS["scaffold"], linear_task(), bytes(8), fv.Seed.root(0))
    assert [ask(undisturbed, questions[r], r) for r in (1, 2, 3)][1:] == [first, third]


def test_a_client_whose_question_comes_again_with_other_contents_starts_from_the_memory_before_it():
    clients, other = (Clients(METHODS["scaffold"], linear_task(), bytes(8), fv.Seed.root(0)) for _ in range(2))
    begin, wrong, right = (TrainControlled(torch.full((8,), v), torch.zeros(8)) for v in (0.1, 0.2, 0.3))
    for question in (begin, wrong):
        ask(clients, question, 1 if question is begin else 2)
    ask(other, begin, 1)
    assert ask(clients, right, 2) == ask(other, right, 2)


def test_a_question_that_fails_leaves_the_memory_alone():
    clients = Clients(METHODS["scaffold"], linear_task(), bytes(8), fv.Seed.root(0))
    ask(clients, TrainControlled(torch.ones(8), torch.zeros(8)), 1)
    before = list(clients.memory.entries[CULPRIT])
    with pytest.raises(Refused, match="out of range"):
        ask(clients, TrainControlled(torch.full((8,), -1e6), torch.full((8,), 1e6)), 2)
    assert clients.memory.entries[CULPRIT] == before


# ------------------------------------------------------------------------------------------------- clocks


def test_a_clock_that_runs_backwards_changes_nothing_but_the_seconds(method, tmp_path, monkeypatch):
    def rows(folder):
        fv.run(linear_task(), method, rounds=3, cohort=4, engine=LocalEngine(1, 1), folder=folder)
        return [row.untimed() for row in fv.Ledger.read(folder / "ledger.jsonl").rows]

    right = rows(tmp_path / "right")
    ticks = iter(range(10**6, 0, -1))
    for clock in ("time", "perf_counter", "time_ns"):
        monkeypatch.setattr(time, clock, lambda: next(ticks))
    assert rows(tmp_path / "wrong") == right
