"""The loop on the hardest shapes: several asks a round, routed questions, memory, clients that were away."""

import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.core.clients import Letter, Reply
from fedveil.core.memory import Memory, Spent
from fedveil.core.message import Envelope, Refused
from fedveil.core.outcome import NoUsableAnswers
from fedveil.engines import LocalEngine
from fedveil.methods.scaffold import Control
from fedveil.runs.statistics import Repeats
from fedveil.train.vectors import Vectors
from toys import First, FourStages, LastReference, OtherProcess, Tamper, Twice, linear_task

SHAPES = [
    (Twice(), fv.CohortSampler(size=4)),
    (FourStages(), fv.CohortSampler(size=4, drop=0.2)),
    (LastReference(), fv.CohortSampler(size=2)),
    (fv.Scaffold(local=fv.LocalTraining(batch=4)), fv.CohortSampler(size=2, drop=0.1)),
    (fv.FedAvg(local=fv.LocalTraining(batch=4)), fv.CohortSampler(size=3)),
]


@pytest.mark.filterwarnings("ignore:no client answered in round")  # four stages with drop-outs leave nobody at times
@pytest.mark.parametrize(("method", "plan"), SHAPES, ids=[m.name for m, _ in SHAPES])
def test_in_this_process_and_in_another_one_the_result_is_the_same_bit_for_bit(method, plan):
    here = fv.run(linear_task(), method, rounds=6, cohort=plan, engine=LocalEngine(stack=1, workers=1))
    there = fv.run(linear_task(), method, rounds=6, cohort=plan, engine=OtherProcess())
    assert torch.equal(here.weights, there.weights)
    assert not torch.equal(here.weights, linear_task().initial)
    assert [r.up for r in here.ledger.rows] == [r.up for r in there.ledger.rows]
    assert [r.missing for r in here.ledger.rows] == [r.missing for r in there.ledger.rows]


def test_a_method_that_asks_twice_finds_what_the_client_kept():
    task = linear_task()
    result = fv.run(task, Twice(), rounds=1, cohort=4)
    # clients answer k+1, so n = 4; then (k+1)/4 summed over k = 0..3
    torch.testing.assert_close(result.weights, task.initial + 10 / 4)


@pytest.mark.filterwarnings("ignore:no client answered in round")
def test_four_stages_shrink_and_the_sum_is_of_the_survivors():
    result = fv.run(linear_task(8, 40), FourStages(), rounds=8, cohort=fv.CohortSampler(size=8, drop=0.25))
    shrinking = [[row.metrics[f"stage{s}"] for s in range(4)] for row in result.ledger.rows if "stage3" in row.metrics]
    assert all(a >= b for stages in shrinking for a, b in itertools.pairwise(stages))
    assert len({stages[s] for stages in shrinking for s in range(4)}) > 2, "nobody dropped out: the test shows nothing"


def test_a_client_that_was_away_is_caught_up():
    result = fv.run(linear_task(), LastReference(), rounds=7, cohort=1)
    away = [len(row.cohort) and row.cohort[0] for row in result.ledger.rows]
    assert any(away[i] not in away[i + 1 : i + 3] for i in range(3))
    torch.testing.assert_close(result.weights, linear_task().initial + sum(range(1, 8)))


def test_stacks_that_open_a_round_beside_each_other_lose_no_notes():
    class Slow(fv.core.clients.Clients):
        @property
        def round(self):
            seen = self.open
            time.sleep(0.02)  # long enough for the others to look too
            return seen

        @round.setter
        def round(self, number):
            self.open = number

    clients = Slow(Twice(), linear_task(), bytes(8), fv.Seed.root(0))
    question = First(torch.ones(1))
    letters = [Letter(First.kind, Envelope(bytes(8), 1, k), fv.core.message.pack(question)) for k in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda letter: clients.answer([letter]), letters))
    assert all(clients.notes[k] for k in range(4))


def test_notes_are_gone_when_the_round_closes():
    task, method = linear_task(), Twice()
    clients = fv.core.clients.Clients(method, task, bytes(8), fv.Seed.root(0))

    def letter(question, round_, serial):
        where = fv.core.message.Envelope(bytes(8), round_, 0, serial)
        return fv.core.clients.Letter.read(fv.core.message.frame(question, where))

    from toys import First, Second

    clients.answer([letter(First(torch.ones(1)), 1, 0)])
    clients.answer([letter(Second(torch.ones(1)), 1, 1)])
    with pytest.raises(Refused, match="lost state"):
        clients.answer([letter(Second(torch.ones(1)), 2, 1)])
    with pytest.raises(Refused, match="wrong round"):
        clients.answer([letter(First(torch.ones(1)), 1, 0)])


def test_memory_asked_again_for_a_round_gives_what_was_there_before_it():
    memory, a, b, c = Memory(), *(Control(torch.full((2,), float(i))) for i in range(3))
    assert not memory.before(7, 1, 0)
    memory.keep(7, 1, 0, {"part": a})
    memory.keep(7, 3, 0, {"part": b})
    assert memory.before(7, 3, 0)["part"] is a
    assert memory.before(7, 3, 1)["part"] is b
    memory.keep(7, 3, 0, {"part": c})  # the round is run again
    assert memory.before(7, 4, 0)["part"] is c
    assert memory.before(7, 3, 0)["part"] is a
    memory.keep(7, 5, 0, {"part": b})
    assert len(memory.entries[7]) == 2


def test_each_part_finds_what_it_kept_last_whatever_others_keep():
    memory, a, b, c, d = Memory(), *(Control(torch.full((2,), float(i))) for i in range(4))
    memory.keep(7, 1, 0, {"one": a, "two": b})
    memory.keep(7, 2, 1, {"two": c})
    assert dict(memory.before(7, 2, 1)) == {"one": a, "two": b}
    assert dict(memory.before(7, 3, 0)) == {"one": a, "two": c}
    memory.keep(7, 4, 0, {"two": d})
    assert memory.entries[7] == [(1, 0, "one", a), (2, 1, "two", c), (4, 0, "two", d)]
    assert dict(memory.before(7, 4, 0)) == {"one": a, "two": c}
    assert not memory.before(8, 4, 0)


def test_a_question_asked_again_voids_what_later_ones_left_in_every_part():
    memory, a, b, c, d = Memory(), *(Control(torch.full((2,), float(i))) for i in range(4))
    memory.open_account(7, Spent([]))
    memory.keep(7, 1, 0, {"one": a})
    memory.keep(7, 2, 0, {"one": b})
    memory.keep(7, 2, 1, {"one": c, "two": c})
    memory.keep(7, 2, 2, {"two": d})
    memory.keep(7, 2, 0, {"one": d})  # the server was killed and repeats the round
    assert [entry[:3] for entry in memory.entries[7]] == [(0, 0, "account"), (1, 0, "one"), (2, 0, "one")]
    assert dict(memory.before(7, 2, 1)) == {"one": d}
    assert dict(memory.before(7, 2, 0)) == {"one": a}


def test_drop_outs_are_counted_down_but_not_up():
    result = fv.run(linear_task(10, 60), fv.FedAvg(), rounds=10, cohort=fv.CohortSampler(size=10, drop=0.3))
    dropped = [k for row in result.ledger.rows for k, why in row.missing.items() if why == "dropped"]
    assert 10 < len(dropped) < 50
    for row in result.ledger.rows:
        assert set(row.down) == {str(k) for k in row.cohort}
        assert set(row.up) == set(row.down) - set(row.missing)


def test_late_answers_are_missing():
    plan = fv.CohortSampler(size=10, latency=2.0, deadline=1.0)
    result = fv.run(linear_task(10, 60), fv.FedAvg(), rounds=5, cohort=plan)
    late = sum(why.startswith("late") for row in result.ledger.rows for why in row.missing.values())
    assert 15 < late < 45  # P(exponential(2) > 1) = 0.61 of 50


def test_a_share_of_the_cohort_is_not_rounded_up_by_a_hair():
    assert [fv.CohortSampler(quorum=q).needed(100) for q in (0.07, 0.28, 0.285, 1e-12, 1, 5)] == [7, 28, 29, 1, 1, 5]
    with pytest.raises(ValueError, match=r"cohort\.deadline is -1; it is in seconds, above 0"):
        fv.CohortSampler(deadline=-1)


def test_below_quorum_the_weights_stay():
    task = linear_task(10, 60)
    told = r"^nothing was learned: no answer could be used in 3 rounds; the last reasons: \d × dropped$"
    with pytest.warns(RuntimeWarning, match=told):
        result = fv.run(task, fv.FedAvg(), rounds=3, cohort=fv.CohortSampler(size=10, quorum=0.9, drop=0.6))
    assert torch.equal(result.weights, task.initial)
    assert all("below quorum" in row.events[0] for row in result.ledger.rows)


def test_all_clients_failing_stops_with_the_reason():
    def lose(round_, replies):
        return [Reply(r.client, problem="failed: battery empty") for r in replies]

    with (
        pytest.warns(RuntimeWarning) as told,
        pytest.raises(NoUsableAnswers, match=r"no client answered for 5 rounds.*: 2 × failed: battery empty$"),
    ):
        fv.run(linear_task(), fv.FedAvg(), rounds=20, cohort=2, engine=Tamper(lose))
    sentences = [f"no client answered in round {number}: 2 × failed: battery empty" for number in range(1, 6)]
    assert [str(each.message) for each in told] == sentences
    assert {each.filename for each in told} == {__file__}  # the caller's line


def test_a_run_that_never_learned_anything_warns_at_its_end():
    """20 of 20 answers of a private run failed: it charged an ε of 6, never moved a weight and returned normally."""

    class Failing(fv.FedAvg):
        def trained(self, stack, question, w, trained):
            raise ArithmeticError("no layer for this")

    with pytest.warns(RuntimeWarning) as told:
        fv.run(linear_task(), Failing(), rounds=4, cohort=2)
    *rounds, last = [str(each.message) for each in told]
    assert rounds == [
        f"no client answered in round {n}: 2 × failed: ArithmeticError: no layer for this" for n in (1, 2, 3, 4)
    ]
    assert last == (
        "nothing was learned: no answer could be used in 4 rounds; "
        "the last reasons: 2 × failed: ArithmeticError: no layer for this"
    )


def test_one_round_with_an_answer_is_enough_to_learn():
    def lose(round_, replies):
        return [Reply(r.client, problem="failed: no power") for r in replies] if round_ < 3 else replies

    with pytest.warns(RuntimeWarning) as told:
        fv.run(linear_task(), fv.FedAvg(), rounds=3, cohort=2, engine=Tamper(lose))
    assert [str(each.message)[:32] for each in told] == [
        "no client answered in round 1: 2",
        "no client answered in round 2: 2",
    ]


@pytest.mark.filterwarnings("ignore:no client answered in round")
def test_reasons_that_differ_in_numbers_only_are_told_once():
    def lose(round_, replies):
        far = [f"refused: out of range: update reaches from -{r.client}e+06 to {r.client}.5" for r in replies]
        return [Reply(r.client, problem=why) for r, why in zip(replies, ["failed: no power", *far[1:]], strict=True)]

    told = "failed: no power, 3 × refused: out of range: update reaches from -1e+06 to 1.5"
    with pytest.raises(NoUsableAnswers, match=re.escape(told) + "$"):
        fv.run(linear_task(), fv.FedAvg(), rounds=20, cohort=4, engine=Tamper(lose))


def test_early_stop_on_a_target():
    result = fv.run(linear_task(), fv.FedAvg(local=fv.LocalTraining(lr=1.0, epochs=5)), rounds=50, cohort=4, target=0.9)
    assert len(result.ledger.rows) < 50
    assert result.accuracy >= 0.9


def test_evaluation_every_n_rounds_and_always_at_the_end():
    result = fv.run(linear_task(), fv.FedAvg(), rounds=7, cohort=2, evaluate_every=3)
    assert result.ledger.series("accuracy")[0] == [3, 6, 7]


def test_a_run_says_which_test_records_it_classifies_correctly(tmp_path):
    task = linear_task()
    some = torch.cat([1 - task.data.test_y[:5], task.data.test_y[5:]])
    task = fv.Task(task.model, replace(task.data, test_y=some), task.clients)
    result = fv.run(task, fv.FedAvg(), rounds=2, cohort=2, folder=tmp_path)
    right = task.f(result.weights, task.test_x).argmax(-1) == task.test_y
    assert Repeats("a", {0: result.ledger}).right()[0].tolist() == right.tolist()
    assert float(right.double().mean()) == pytest.approx(result.accuracy)
    assert 0 < result.accuracy < 1
    path = tmp_path / "ledger.jsonl"
    assert fv.Ledger.read(path).right == result.ledger.right
    (tmp_path / "right.json").unlink()
    fv.run(task, fv.FedAvg(), rounds=2, cohort=2, folder=tmp_path)  # a kill between the last row and this file
    assert fv.Ledger.read(path).right == result.ledger.right
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert fv.Ledger.read(path).right is None  # it is of another round
    for damaged in ('{"round": 1, "records": 9, "bits": "f"}', '{"round": 1, "records": 9, "bits": "ff"}', "{"):
        (tmp_path / "right.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"right\.json does not say which test records are right: .*; delete it"):
            fv.Ledger.read(path)
    squared = fv.Task(task.model, task.data, task.clients, metrics=["balanced_accuracy"])
    assert fv.run(squared, fv.FedAvg(), rounds=1, cohort=2).ledger.right is None


@pytest.mark.parametrize("kind", ["uniform", "weighted", "poisson"])
def test_cohorts_are_repeatable_and_of_the_right_size(kind):
    task = linear_task(20, 400, uneven=True)
    plan = fv.CohortSampler(size=5, kind=kind)
    draws = [plan.draw(task, fv.Seed.root(0).child(i)) for i in range(400)]
    assert draws == [plan.draw(task, fv.Seed.root(0).child(i)) for i in range(400)]
    assert all(len(set(d)) == len(d) for d in draws)
    sizes = np.array([len(d) for d in draws])
    assert abs(sizes.mean() - 5) < 0.4
    assert (sizes.std() > 0) == (kind == "poisson")
    often = np.bincount([k for d in draws for k in d], minlength=20)
    assert (often[-1] > 2 * often[0]) == (kind == "weighted")


def test_only_narrows_and_never_widens():
    task = linear_task()
    seen = []

    class Narrow(fv.FedAvg):
        def round(self, state, cohort):
            with pytest.raises(ValueError, match="not in this cohort"):
                cohort.only([*cohort.ids, 99])
            narrowed = cohort.only(cohort.ids[:1])
            with pytest.raises(ValueError, match="not in this cohort"):
                narrowed.ask(dict.fromkeys(cohort.ids))
            seen.append(narrowed.ids)
            return super().round(state, narrowed)

    result = fv.run(task, Narrow(), rounds=2, cohort=3)
    assert [tuple(map(int, row.up)) for row in result.ledger.rows] == seen


def test_the_cosine_of_each_layer_is_in_the_ledger():
    class Known(fv.FedAvg):
        def trained(self, stack, question, w, trained):
            own = torch.tensor([[3.0, 0, 0, 4.0, 0, 0, 0, 1.0]])  # weight [2, 3], bias [2]
            return Vectors({"update": own.expand(len(stack), -1)})

    metrics = fv.run(linear_task(), Known(up=fv.TopK(share=1 / 8)), rounds=1, cohort=2).ledger.rows[0].metrics
    assert metrics["cosine/weight"] == pytest.approx(4 / 5)
    assert metrics["cosine/bias"] == 0
    assert metrics["cosine"] == pytest.approx(4 / 26**0.5)
    assert "cosine" not in fv.run(linear_task(), fv.FedAvg(), rounds=1, cohort=2).ledger.rows[0].metrics
