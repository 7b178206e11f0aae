"""Batch norm: statistics of a client's own records, what travels, what stays, and what is evaluated."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedveil as fv
from fedveil.core.batchnorm import SLOT, Norms
from fedveil.core.message import Slots
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine

SIZES = (1, 3, 9, 6)  # batches of 4 leave rests of 1, 3, 1 and 2
LOCAL = fv.LocalTraining(lr=0.1, batch=4, epochs=2)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers)


def task_of(model=None, **options):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(sum(SIZES), 2, 4, 4, generator=draw), torch.randint(0, 3, (sum(SIZES),), generator=draw)
    data = from_tensors(x, y, x, y, classes=3)
    order = np.random.default_rng(0).permutation(len(x))
    split = fv.Split(order, np.cumsum([0, *SIZES]), "ragged")
    return fv.Task(model or network(), data, split, **options)


def stack_of(task, clients=(0, 1, 2, 3)):
    blank = [Slots() for _ in clients]
    return fv.ClientStack(task, clients, 1, fv.Seed.root(0), fv.Seed.root(9), blank, [{} for _ in clients])


def alone(task, client):
    """One client's model after training, by PyTorch alone, one unpadded batch at a time."""
    model = copy.deepcopy(task.model).train().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), LOCAL.lr)
    index, size = LOCAL.plan(stack_of(task, (client,)))
    for rows, count in zip(index[:, 0], size[:, 0], strict=True):
        own = torch.from_numpy(rows[:count])
        optimizer.zero_grad()
        F.cross_entropy(model(task.x[own]), task.y[own]).backward()
        optimizer.step()
    return model


def statistics(model):
    return torch.cat([model[1].running_mean, model[1].running_var])


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_padding_is_in_no_statistic_of_a_ragged_stack():
    task = task_of()
    stack = stack_of(task)
    weights, _ = LOCAL.train(stack, task.initial)
    for client in range(4):
        expected = alone(task, client)
        torch.testing.assert_close(weights[client], flat(expected), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stack.norms[client], statistics(expected), rtol=1e-5, atol=1e-6)


def test_statistics_travel_beside_the_update_and_are_averaged_by_records():
    task = task_of()
    result = fv.run(task, fv.FedAvg(local=LOCAL), rounds=1, cohort=4)
    share = torch.tensor(SIZES) / sum(SIZES)
    seed = fv.Seed.root(0).child("round", 1)
    stack = stack_of(task)
    stack.seed = seed
    LOCAL.train(stack, task.initial)
    torch.testing.assert_close(result.task.norms.values, share @ stack.norms)
    plain = fv.run(task_of(batch_norm="frozen"), fv.FedAvg(local=LOCAL), rounds=1, cohort=4)
    more = 4 * 8  # bytes of four means and four variances
    assert result.ledger.rows[0].bytes_up - plain.ledger.rows[0].bytes_up in range(4 * more, 4 * more + 40)
    assert result.ledger.rows[0].bytes_down - plain.ledger.rows[0].bytes_down in range(4 * more, 4 * more + 40)


def test_evaluation_uses_the_averaged_statistics_and_so_does_the_model_that_is_saved():
    task, model = task_of(), network()
    result = fv.run(task, fv.FedAvg(local=LOCAL), rounds=2, cohort=4)
    model.load_state_dict(result.state_dict())
    torch.testing.assert_close(statistics(model), result.task.norms.values)
    assert not torch.equal(statistics(model), task.norms.values)
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(task.test_x), task.test_y)
    assert result.summary()["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("policy", ["federated", "local"])
def test_a_resumed_run_is_the_run(policy, tmp_path):
    method = fv.FedAvg(local=LOCAL)
    options = {"cohort": 2, "engine": None}
    whole = fv.run(task_of(batch_norm=policy), method, rounds=4, **options)
    fv.run(task_of(batch_norm=policy), method, rounds=2, folder=tmp_path / "run", **options)
    resumed = fv.run(task_of(batch_norm=policy), method, rounds=4, folder=tmp_path / "run", **options)
    assert torch.equal(whole.weights, resumed.weights)
    assert [row.metrics for row in whole.ledger.rows] == [row.metrics for row in resumed.ledger.rows]


@pytest.mark.parametrize("policy", ["federated", "local"])
def test_any_stack_gives_the_same_run(policy):
    runs = [
        fv.run(task_of(batch_norm=policy), fv.FedAvg(local=LOCAL), rounds=2, engine=LocalEngine(stack=n))
        for n in (1, 4)
    ]
    torch.testing.assert_close(runs[0].weights, runs[1].weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(runs[0].task.norms.values, runs[1].task.norms.values, rtol=1e-5, atol=1e-6)


def test_local_layers_stay_with_the_client_and_go_on_from_where_they_were():
    task = task_of(batch_norm="local")
    assert task.layout.size == flat(task.model).numel() - 8
    assert not any(layer.name.startswith("1.") for layer in task.layout.layers)
    stack = stack_of(task)
    method = fv.FedAvg(local=LOCAL)
    question = method.parts.down.question(weights=task.initial)
    method.given(method.parts, stack, question)
    first = [record.statistics for record in stack.kept[SLOT]]
    for client in range(4):
        expected = alone(task, client)
        found = torch.cat([p.detach() for p in (expected[1].weight, expected[1].bias)] + [statistics(expected)])
        torch.testing.assert_close(first[client], found, rtol=1e-4, atol=1e-5)
    later = stack_of(task)
    later.memory = [Slots({SLOT: Norms(row)}) for row in first]
    method.given(method.parts, later, question)
    assert not torch.allclose(later.kept[SLOT][2].statistics, first[2])


def test_local_layers_are_evaluated_client_by_client():
    task = task_of(batch_norm="local")
    seen = []
    federation = fv.Federation(task, fv.FedAvg(local=LOCAL), LocalEngine(), fv.CohortSampler(size=4), fv.Seed.root(0))
    state, row = federation.step(federation.method.init_state(task), 1, 1)
    for entries in federation.clients.memory.entries.values():
        seen.append(task.at(entries[-1][3].statistics).evaluate(state.weights)["loss"])
    assert len(seen) == 4
    assert row.metrics["loss"] == pytest.approx(sum(seen) / 4)


def test_layers_in_eval_mode_or_without_trained_weights_are_constants():
    model = network()
    model[1].eval()
    assert task_of(model).norms.policy == ""
    model = network()
    model[1].requires_grad_(False)
    task = task_of(model)
    assert task.norms.policy == ""
    result = fv.run(task, fv.FedAvg(local=LOCAL), rounds=1, cohort=4)
    assert result.task is task
    assert task_of(model, batch_norm="federated").norms.policy == "federated"


def test_a_batch_with_one_value_a_channel_uses_the_running_statistics():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(32), nn.Linear(32, 3))
    with torch.no_grad():
        model[1].running_mean.fill_(0.5)
        model[1].running_var.fill_(4.0)
    task = task_of(model)
    x, mask, key = task.x[:2], torch.tensor([1.0, 0.0]), torch.tensor(0)
    logits, after = task.train_f(task.initial, task.norms.values, x, mask, key)
    torch.testing.assert_close(after, task.norms.values)
    torch.testing.assert_close(logits, task.f(task.initial, x), rtol=1e-5, atol=1e-6)


def test_group_norm_takes_the_place_of_batch_norm():
    model = fv.group_norm(network(), groups=3)
    assert isinstance(model[1], nn.GroupNorm)
    assert model[1].num_groups == 2, "four channels do not go into three groups"
    task = task_of(model)
    assert not task.norms.policy
    assert fv.run(task, fv.Tofu(up=fv.TofuCodec(points=2, steps=2)), rounds=1, cohort=2).ledger.rows[0].missing == {}


METHODS = [
    (fv.Tofu(), "tofu fits gradients of single records"),
    (fv.FedSynth(), "fedsynth fits gradients of single records"),
    (fv.FedAvg(secure=fv.SecureSum()), "outside the secure sum"),
    (fv.FedAvg(user_privacy=fv.UserLevel(noise=1.0)), "no clip bounds"),
    (fv.Baffle(), "fixed running statistics"),
    (fv.BaffleEpochs(), "fixed running statistics"),
    (fv.FedLap(), "fixed running statistics"),
    (fv.QFedAvg(), "weights clients by a loss"),
    (fv.FedSGD(), "one gradient over all records"),
    (fv.FedAvg(up=fv.PowerSgd()), "no room for running statistics"),
]


@pytest.mark.parametrize(("method", "reason"), METHODS, ids=[m.name + r[:12] for m, r in METHODS])
def test_methods_that_cannot_train_such_layers_say_why(method, reason):
    with pytest.raises(ValueError, match=f"batch norm.*{reason}.*frozen.*group_norm"):
        fv.run(task_of(), method, rounds=1, cohort=4)


def test_wrong_policies_are_one_sentence():
    with pytest.raises(ValueError, match="batch_norm is 'shared'; use federated, local or frozen"):
        task_of(batch_norm="shared")
    model = network()
    model[1].momentum = None
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm2d\) has momentum=None"):
        task_of(model)


def test_the_best_round_keeps_its_statistics(tmp_path):
    task = task_of()
    held = from_tensors(task.x, task.y, task.x, task.y, classes=3, validation=(task.x[:9], task.y[:9]))
    task = fv.Task(network(), held, task.clients)
    result = fv.run(task, fv.FedAvg(local=LOCAL), rounds=3, cohort=4, folder=tmp_path / "run")
    best = result.best
    row = result.ledger.rows[best.round - 1]
    assert best.task.evaluate(best.weights)["validation_accuracy"] == row.metrics["validation_accuracy"] == best.value
    again = fv.run(task, fv.FedAvg(local=LOCAL), rounds=3, cohort=4, folder=tmp_path / "run").best
    assert torch.equal(again.task.norms.values, best.task.norms.values)


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (lambda s: s.fill_(torch.nan), "not finite"),
        (lambda s: s.fill_(1e13), "out of range"),
        (lambda s: s[4:].fill_(-1.0), "out of range: a running variance is negative"),
    ],
    ids=["nan", "huge", "negative variance"],
)
def test_statistics_of_a_hostile_client_are_refused_by_name(forged, reason):
    class Hostile(fv.FedAvg):
        def given(self, parts, stack, question):
            w, x = super().given(parts, stack, question)
            if 2 in stack.clients:
                forged(x.statistics[stack.clients.index(2)])
            return w, x

    task = task_of()
    result = fv.run(task, Hostile(local=LOCAL), rounds=2, cohort=4, engine=LocalEngine(stack=1))
    assert all(set(row.missing) == {"2"} and reason in row.missing["2"] for row in result.ledger.rows)
    assert result.task.norms.values.isfinite().all()
