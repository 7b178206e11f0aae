"""Updates that are merged as stacks of clients come in, so that a round needs the memory of one stack."""

import weakref

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.core import stack as stacks
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.methods import rules
from toys import linear_task

CLIENTS, AT_ONCE = 11, 3
LOCAL = fv.LocalTraining(lr=0.5, batch=4)
TASK = linear_task(CLIENTS, 121, uneven=True)


def normed_task() -> fv.Task:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(66, 3, generator=draw), torch.randint(0, 2, (66,), generator=draw)
    data = from_tensors(x, y, x, y, classes=2)
    return fv.Task(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), data,
                   fv.split("iid", data, CLIENTS, fv.Seed.root(0)))  # fmt: skip


class Watching(LocalEngine):
    """Counts the answers that are alive whenever another one is handed over."""

    def __init__(self, **options) -> None:
        super().__init__(workers=1, **options)
        self.most, self._sent = 0, []

    def deliver(self, letters, deadline):
        for reply in super().deliver(letters, deadline):
            self._sent.append(weakref.ref(reply.letter.contents))
            yield reply
            self.most = max(self.most, sum(sent() is not None for sent in self._sent))


METHODS = {
    "mean": fv.FedAvg(LOCAL),
    "clipped mean": fv.FedAvg(LOCAL, aggregator=fv.Aggregator("clip", clip=0.3)),
    "equal weights": fv.FedAvg(LOCAL, privacy=fv.DpSgd(noise=1.0, clip=1.0)),
    "half": fv.FedAvg(LOCAL, up=fv.Half()),
    "fair": fv.QFedAvg(LOCAL),
    "trusted server": fv.FedAvg(LOCAL, user_privacy=fv.UserLevel(clip=0.3, noise=0.1, delta=1e-3)),
}


def run(method: fv.Method, task: fv.Task = TASK, **options) -> tuple[fv.Result, Watching]:
    engine = Watching(**options)
    result = fv.run(task, method, rounds=2, cohort=CLIENTS, engine=engine, insecure_test_noise=1)
    return result, engine


@pytest.fixture
def few(monkeypatch):
    """Room for the weights of 3 clients."""

    def limited(task: fv.Task = TASK) -> None:
        monkeypatch.setattr(stacks, "AT_ONCE", AT_ONCE * 4 * task.layout.size)

    return limited


@pytest.mark.parametrize("name", METHODS)
def test_batches_give_what_the_whole_cohort_gives(name, few):
    whole, _ = run(METHODS[name])
    few()
    found, engine = run(METHODS[name])
    assert [row.missing for row in found.ledger.rows] == [{}, {}]
    torch.testing.assert_close(found.weights, whole.weights, rtol=1e-5, atol=1e-6)
    assert [row.up for row in found.ledger.rows] == [row.up for row in whole.ledger.rows]
    assert [row.passes for row in found.ledger.rows] == [row.passes for row in whole.ledger.rows]
    if not METHODS[name].needs_all:
        assert engine.most <= 2 * AT_ONCE  # a batch that is merged, and the stack that comes in


def test_running_statistics_are_merged_in_batches_too(few):
    task = normed_task()
    whole, _ = run(fv.FedAvg(LOCAL), task)
    few(task)
    found, _ = run(fv.FedAvg(LOCAL), task)
    torch.testing.assert_close(found.task.norms.values, whole.task.norms.values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.weights, whole.weights, rtol=1e-5, atol=1e-5)


def test_batches_are_the_same_in_every_run_and_on_both_wires(few):
    few()
    first, *others = (run(fv.FedAvg(LOCAL))[0].weights for _ in range(2))
    by_bytes = fv.run(TASK, fv.FedAvg(LOCAL), rounds=2, cohort=CLIENTS, engine=LocalEngine(wire="bytes"))
    assert all(torch.equal(first, other) for other in (*others, by_bytes.weights))


def test_who_fails_is_left_out_of_its_batch_alone(few):
    few()

    class Losing(Watching):
        def deliver(self, letters, deadline):
            return super().deliver([letter for letter in letters if letter.client != 7], deadline)

    result = fv.run(TASK, fv.FedAvg(LOCAL), rounds=1, cohort=CLIENTS, engine=Losing())
    (row,) = result.ledger.rows
    assert row.missing == {"7": "late: no answer when the question closed"}
    expected = fv.run(TASK, fv.FedAvg(LOCAL), rounds=1, cohort=CLIENTS, engine=Losing(stack=CLIENTS))
    torch.testing.assert_close(result.weights, expected.weights)


def test_a_quorum_counts_all_batches(few):
    few()

    class Silent(Watching):
        def deliver(self, letters, deadline):
            return super().deliver([letter for letter in letters if letter.client < 5], deadline)

    cohort = fv.CohortSampler(size=CLIENTS, quorum=6)
    with pytest.warns(RuntimeWarning, match="nothing was learned"):
        result = fv.run(TASK, fv.FedAvg(LOCAL), rounds=1, cohort=cohort, engine=Silent())
    (event,) = result.ledger.rows[0].events
    assert event.startswith("below quorum: 5 of 11 answers can be used, 6 are needed")
    assert torch.equal(result.weights, TASK.initial)


def test_an_aggregator_that_needs_all_updates_says_how_much_memory_that_takes(monkeypatch):
    monkeypatch.setattr(rules, "free_memory", lambda device: 1000)
    method = fv.FedAvg(LOCAL, aggregator=fv.Aggregator("median"))
    with pytest.raises(ValueError, match=r"median needs the vectors of all 11 clients .* about .* GB, and .* are free"):
        fv.run(TASK, method, rounds=1, cohort=CLIENTS)
    fv.run(TASK, fv.FedAvg(LOCAL), rounds=1, cohort=CLIENTS)
