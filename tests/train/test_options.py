"""Options of local training and of the server's step: PyTorch's own optimizers and schedules are the references."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fedveil as fv
from fedveil.core.losses import cross_entropy
from fedveil.core.message import Slots
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from fedveil.runs.fingerprint import fingerprint
from toys import linear_task

SIZES = (5, 17, 9)


def task_of(model):
    draw = torch.Generator().manual_seed(0)
    x, n = torch.randn(sum(SIZES), 1, 4, 4, generator=draw), sum(SIZES)
    y = torch.randint(0, 3, (n,), generator=draw)
    data = from_tensors(x, y, x, y, classes=3, mean=(0,), std=(1,))
    return fv.Task(model, data, fv.Split(np.arange(n), np.cumsum([0, *SIZES]), "ragged"))


@pytest.fixture(scope="module")
def task():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return task_of(nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)))


def stack_of(task, *clients, round_=1):
    clients = clients or tuple(range(len(SIZES)))
    root, memory = fv.Seed.root(2), [Slots()] * len(clients)
    return ClientStack(task, clients, round_, root, fv.Seed.root(3), memory, [{} for _ in clients])


# ---------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("name", "optimizer"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam)], ids=["adamw", "adam"]
)
def test_a_client_steps_as_pytorch_s_optimizer_does(task, name, optimizer):
    how = fv.LocalTraining(name, 0.01, epochs=4, batch=4, beta2=0.99, weight_decay=0.3)
    trained, _ = how.train(stack_of(task), task.initial)
    for k in range(len(SIZES)):
        w = task.initial.clone().requires_grad_()
        steps = optimizer([w], 0.01, (0.9, 0.99), weight_decay=0.3)
        index, sizes = how.plan(stack_of(task, k))
        for rows, n in zip(index[:, 0], sizes[:, 0], strict=True):
            steps.zero_grad()
            task.losses(w, task.x[rows[:n]], task.y[rows[:n]]).mean().backward()
            steps.step()
        torch.testing.assert_close(trained[k], w.detach(), atol=2e-6, rtol=1e-5)
    plain = replace(how, weight_decay=0.0)
    assert (trained - plain.train(stack_of(task), task.initial)[0]).abs().max() > 1e-3  # or decay would not show


def test_adamw_has_pytorch_s_epsilon_where_gradients_are_tiny():
    whole = linear_task(1)
    task = fv.Task(whole.model, whole.data, whole.clients, loss=lambda z, y: 1e-7 * cross_entropy(z, y))
    how = fv.LocalTraining("adamw", 0.01, epochs=3, batch=24, weight_decay=0.1)
    stack = ClientStack(task, (0,), 1, fv.Seed.root(2), fv.Seed.root(3), [Slots()], [{}])
    w = task.initial.clone().requires_grad_()
    steps = torch.optim.AdamW([w], 0.01, weight_decay=0.1)
    for _ in range(3):
        steps.zero_grad()
        task.losses(w, task.x, task.y).mean().backward()
        steps.step()
    torch.testing.assert_close(how.train(stack, task.initial)[0][0], w.detach(), atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------------------------- schedules


def rates(*made, rounds=12, lr=0.4):
    """What PyTorch's schedulers, chained, make of a rate."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr)
    chained, found = lr_scheduler.ChainedScheduler([make(optimizer) for make in made]), []
    for _ in range(rounds):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        chained.step()
    return found


def cosine(rounds):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, rounds)


def warm(rounds):
    return lambda optimizer: lr_scheduler.LinearLR(optimizer, 1 / (rounds + 1), total_iters=rounds)


def warm_cosine(optimizer):
    parts = [warm(3)(optimizer), cosine(9)(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


SCHEDULES = {
    "constant": ({}, [lambda o: lr_scheduler.ConstantLR(o, 1.0)]),
    "cosine": ({"schedule": "cosine", "schedule_rounds": 12}, [cosine(12)]),
    "warm-up": ({"warmup": 4}, [warm(4)]),
    "warm-up and cosine": ({"schedule": "cosine", "schedule_rounds": 12, "warmup": 3}, [warm_cosine]),
    "a callable": ({"schedule": lambda r: 0.5**r}, [lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5 ** (e + 1))]),
    "decay": ({"decay": 0.9}, [lambda o: lr_scheduler.ExponentialLR(o, 0.9)]),
    "steps": ({"decay": 0.1, "decay_after": (3, 8)}, [lambda o: lr_scheduler.MultiStepLR(o, [3, 8], 0.1)]),
    "steps and warm-up": (
        {"decay": 0.1, "decay_after": (6,), "warmup": 2},
        [lambda o: lr_scheduler.MultiStepLR(o, [6], 0.1), warm(2)],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_of_each_round_is_that_of_pytorch_s_scheduler(name):
    options, made = SCHEDULES[name]
    local = fv.LocalTraining(lr=0.4, **options)
    assert [local.rate(r) for r in range(1, 13)] == pytest.approx(rates(*made), rel=1e-12)


def test_a_cosine_takes_the_rounds_of_the_run_and_then_stays(task):
    method = fv.Scaffold(local=fv.LocalTraining(lr=1.0, schedule="cosine"))
    found = fv.settle(task, method, 3, 8).local
    assert found.schedule_rounds == 8
    assert found.rate(5) == pytest.approx(0.5)
    assert found.rate(20) == found.rate(8) == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)
    assert fv.settle(task, method, 3, 8).over(30).local.schedule_rounds == 8
    with pytest.raises(ValueError, match=r"set local\.schedule_rounds"):
        method.local.rate(1)


def test_training_in_a_round_uses_the_rate_of_that_round():
    task = linear_task(1)
    fast = fv.LocalTraining(lr=0.1, schedule=lambda r: 1 / r, batch=24)
    stack = ClientStack(task, (0,), 4, fv.Seed.root(2), fv.Seed.root(3), [Slots()], [{}])
    moved = fast.train(stack, task.initial)[0] - task.initial
    slow = fv.LocalTraining(lr=0.025, batch=24).train(stack, task.initial)[0] - task.initial
    assert torch.equal(moved, slow)


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "adam"])
def test_the_server_follows_its_schedule(optimizer):
    task = linear_task()
    halves = fv.ServerOptimizer(optimizer, schedule=lambda r: 0.5 ** (r - 1))
    plain = fv.ServerOptimizer(optimizer)
    for kind in (fv.FedAvg, fv.FedDyn):
        first, second = (fv.run(task, kind(server=halves), rounds=n, cohort=4).weights for n in (1, 2))
        assert torch.equal(first, fv.run(task, kind(server=plain), rounds=1, cohort=4).weights)
        full = fv.run(task, kind(server=plain), rounds=2, cohort=4).weights - first
        torch.testing.assert_close(second - first, full / 2)


@pytest.mark.parametrize("down", ["weights", "replay"])
def test_baffle_s_server_follows_a_schedule(down):
    task, halves = linear_task(), fv.ServerOptimizer("plain", 0.5, schedule=lambda number: 0.5 ** (number - 1))
    whole = fv.run(task, fv.Baffle(directions=4, down=down, server=fv.ServerOptimizer("plain", 0.5)), rounds=2).weights
    first, second = (fv.run(task, fv.Baffle(directions=4, down=down, server=halves), rounds=n).weights for n in (1, 2))
    torch.testing.assert_close(second - first, (whole - first) / 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"schedule": "linear"}, r"local\.schedule is 'linear'; use constant or cosine"),
        ({"warmup": -1}, r"local\.warmup is -1"),
        ({"schedule_rounds": 3}, r"only the schedule cosine has a length; leave it out"),
        ({"schedule": "cosine", "schedule_rounds": 3, "warmup": 3}, r"the warm-up alone has 3 rounds; raise it"),
        ({"accumulate": 0}, r"local\.accumulate is 0; it must be at least 1"),
        ({"precision": "float16"}, r"local\.precision is 'float16'; use float32 or bfloat16"),
        ({"optimizer": "lion"}, r"use sgd, momentum, adam or adamw"),
    ],
)
def test_wrong_options_are_one_sentence(options, told):
    with pytest.raises(ValueError, match=told):
        fv.LocalTraining(**options)


def test_a_schedule_that_gives_no_rate_is_refused():
    local = fv.LocalTraining(schedule=lambda r: 1.0 - r)
    with pytest.raises(ValueError, match=r"local\.schedule gives 0 in round 1; it must be above 0"):
        local.rate(1)


def test_a_deployed_client_needs_the_length_of_a_cosine():
    changes = ["method.local.schedule=cosine", "split.max_records=400"]
    plan = recipe.read("digits/fedavg", changes)
    with pytest.raises(ValueError, match="set schedule_rounds"):
        plan.party(linear_task().data, None)


# ---------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 5}], ids=str)
def test_accumulated_minibatches_are_one_large_batch(task, options):
    """Of 5, 17 and 9 records, batches of 8 are whole, ragged and fewer than a minibatch."""
    parts, whole = (fv.LocalTraining("momentum", batch=b, accumulate=8 // b, **options) for b in (2, 8))
    stacks = stack_of(task), stack_of(task)
    (found, steps), (right, right_steps) = (
        how.train(stack, task.initial) for how, stack in zip((parts, whole), stacks, strict=True)
    )
    torch.testing.assert_close(found, right, atol=1e-6, rtol=1e-5)
    assert torch.equal(steps, right_steps)
    assert stacks[0].passes == stacks[1].passes
    for n in SIZES:
        ours, theirs = parts.forecast_compute(n), whole.forecast_compute(n)
        assert (ours.passes, ours.held) == (theirs.passes, min(2, n))


def test_no_more_records_than_a_minibatch_run_at_once(task):
    seen = []

    def gradient(weights, x, y, mask):
        seen.append(x.shape[1])
        return task.gradient(weights, x, y, mask)[0]

    fv.LocalTraining(batch=3, accumulate=4).train(stack_of(task), task.initial, gradient_of=gradient)
    assert max(seen) == 3


def test_the_cost_of_accumulated_steps_is_known_before_they_run(task):
    method = fv.Scaffold(local=fv.LocalTraining(batch=4, accumulate=3, steps=3, lr=0.05))
    plan = fv.Recipe(rounds=2, cohort=fv.CohortSampler(size=3), method=method)
    rows = fv.run(task, method, rounds=2, cohort=3).ledger.rows
    assert cost(task, plan)["passes"]["total"] == sum(row.passes for row in rows)


# ---------------------------------------------------------------------------------------------------- precision


class Watching(nn.Linear):
    """Notes the dtype of its outputs. In a stack, a bias in float32 would make them float32 again."""

    def forward(self, x):
        out = super().forward(x)
        SEEN.append(out.dtype)
        return out


SEEN: list[torch.dtype] = []


@pytest.mark.parametrize("clients", [(0, 1, 2), (1,)], ids=["stacked", "alone"])
def test_bfloat16_is_of_layers_only_and_close_to_float32(clients):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = task_of(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), Watching(16, 3, bias=False))
        )
    how, updates = fv.LocalTraining(lr=0.05, batch=8, epochs=2), {}
    for precision in ("float32", "bfloat16"):
        SEEN.clear()
        trained, _ = replace(how, precision=precision).train(stack_of(task, *clients), task.initial)
        assert set(SEEN) == {getattr(torch, precision)}
        assert trained.dtype == torch.float32
        updates[precision] = trained - task.initial
    difference = (updates["bfloat16"] - updates["float32"]).norm() / updates["float32"].norm()
    assert 1e-5 < difference < 0.03
    gradient, loss = task.gradient(*task._two_clients(), torch.ones(2, 2), precision="bfloat16")
    assert gradient.dtype == loss.dtype == torch.float32


def test_a_run_in_bfloat16_learns_and_evaluates_in_float32(task):
    result = fv.run(task, fv.FedAvg(local=fv.LocalTraining(precision="bfloat16", epochs=3)), rounds=3, cohort=3)
    assert result.weights.dtype == torch.float32
    assert result.ledger.rows[-1].metrics["loss"] < task.evaluate(task.initial)["loss"]


DP = {"privacy": fv.DpSgd(noise=1.0, delta=1e-3)}


@pytest.mark.parametrize(
    ("kind", "options", "local", "told"),
    [
        (fv.FedAvg, DP, {"precision": "bfloat16"}, "clipping of method.privacy is proved for float32"),
        (fv.FedAvg, DP, {"accumulate": 4, "batch": 8}, r"set local\.batch=32 and local\.accumulate=1"),
        (fv.BaffleEpochs, {}, {"precision": "bfloat16"}, r'set method\.precision="float16" instead'),
        (fv.BaffleEpochs, {"layers": ["0*"]}, {"optimizer": "adamw"}, "use adam"),
    ],
)
def test_options_that_a_training_cannot_have_are_refused(kind, options, local, told):
    with pytest.raises(ValueError, match=told):
        kind(local=fv.LocalTraining(**local), **options)


# ---------------------------------------------------------------------------------------------------- recipes


def test_a_recipe_spells_the_options_out_and_a_callable_is_for_python_only():
    changes = ["optimizer=adamw", "schedule=cosine", "warmup=2", "accumulate=4", "precision=bfloat16"]
    plan = recipe.read("digits/fedavg", [f"method.local.{change}" for change in changes])
    assert plan.method.local == replace(
        recipe.read("digits/fedavg").method.local,
        optimizer="adamw", schedule="cosine", warmup=2, accumulate=4, precision="bfloat16",
    )  # fmt: skip
    for text in ('schedule = "cosine"', "warmup = 2", "accumulate = 4", 'precision = "bfloat16"'):
        assert text in plan.toml()
    with pytest.raises(ValueError, match=r"'method\.local\.schedule' is 3; it must be text"):
        recipe.read("digits/fedavg", ["method.local.schedule=3"])


def test_runs_that_older_versions_began_keep_their_fingerprints():
    """The values are those of 0.3.0, before there were schedules."""
    assert fingerprint(fv.FedAvg()).hex() == "333ef7f032d3b516"
    assert fingerprint(fv.FedAvg(local=fv.LocalTraining(warmup=1))) != fingerprint(fv.FedAvg())
    assert fingerprint(fv.FedAvg(server=fv.ServerOptimizer(warmup=1))) != fingerprint(fv.FedAvg())
