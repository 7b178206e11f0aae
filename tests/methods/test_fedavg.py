"""Each method's arithmetic on an example worked out by hand, and their behaviour on the digits."""

import pytest
import torch

import fedveil as fv
from fedveil.codecs.raw import Update
from fedveil.core.clients import Reply
from fedveil.core.message import Envelope, frame
from fedveil.engines import LocalEngine
from fedveil.runs import recipe
from toys import Tamper, linear_task


def gradient(task, w, indices):
    """The gradient of the mean loss over some records, by plain autograd."""
    w = w.clone().requires_grad_()
    weight, bias = w[:6].view(2, 3), w[6:]
    loss = torch.nn.functional.cross_entropy(task.x[indices] @ weight.T + bias, task.y[indices])
    return torch.autograd.grad(loss, w)[0], loss.detach()


@pytest.fixture
def two():
    """Two clients of 8 and 16 records: full-batch training makes every step computable by hand."""
    task = linear_task(2, 24, uneven=True)
    assert task.clients.sizes.tolist() == [8, 16]
    return task


FULL = fv.LocalTraining(lr=0.5, epochs=2, batch=100)


def by_hand(task, client, correction=lambda w: 0.0, steps=2, lr=0.5):
    w = task.initial
    for _ in range(steps):
        w = w - lr * (gradient(task, w, task.clients[client])[0] + correction(w))
    return w


def test_fedsgd_takes_one_step_along_the_mean_gradient(two):
    result = fv.run(two, fv.FedSGD(server=fv.ServerOptimizer(lr=0.5)), rounds=1, cohort=2)
    g = [gradient(two, two.initial, two.clients[k])[0] for k in range(2)]
    torch.testing.assert_close(result.weights, two.initial - 0.5 * (8 * g[0] + 16 * g[1]) / 24)


def test_fedavg_is_the_mean_of_the_trained_weights_by_records(two):
    result = fv.run(two, fv.FedAvg(local=FULL), rounds=1, cohort=2)
    torch.testing.assert_close(result.weights, (8 * by_hand(two, 0) + 16 * by_hand(two, 1)) / 24)


def test_fedprox_adds_the_pull_to_the_global_weights(two):
    result = fv.run(two, fv.FedProx(local=FULL, mu=0.7), rounds=1, cohort=2)
    trained = [by_hand(two, k, lambda w: 0.7 * (w - two.initial)) for k in range(2)]
    torch.testing.assert_close(result.weights, (8 * trained[0] + 16 * trained[1]) / 24)


def test_scaffold_two_rounds_by_hand(two):
    result = fv.run(two, fv.Scaffold(local=FULL), rounds=2, cohort=2)
    w, c, own = two.initial, torch.zeros(8), [torch.zeros(8)] * 2
    for _ in range(2):
        trained = []
        for k in range(2):
            v = w
            for _ in range(2):
                v = v - 0.5 * (gradient(two, v, two.clients[k])[0] - own[k] + c)
            trained.append(v)
        new = [own[k] - c + (w - trained[k]) / (2 * 0.5) for k in range(2)]  # option II, K = 2
        w = w + sum(t - w for t in trained) / 2
        c = c + sum(n - o for n, o in zip(new, own, strict=True)) / 2
        own = new
    torch.testing.assert_close(result.weights, w)


def test_q_fedavg_by_hand(two):
    q = 0.5
    result = fv.run(two, fv.QFedAvg(local=FULL, q=q), rounds=1, cohort=2)
    numerator, denominator = torch.zeros(8), 0.0
    for k in range(2):
        loss = gradient(two, two.initial, two.clients[k])[1]
        change = (two.initial - by_hand(two, k)) / 0.5
        numerator += loss**q * change
        denominator += q * loss ** (q - 1) * change.square().sum() + loss**q / 0.5
    torch.testing.assert_close(result.weights, two.initial - numerator / denominator)


def test_q_zero_is_the_unweighted_mean(two):
    result = fv.run(two, fv.QFedAvg(local=FULL, q=0.0), rounds=1, cohort=2)
    torch.testing.assert_close(result.weights, (by_hand(two, 0) + by_hand(two, 1)) / 2)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_local_optimisers_are_those_of_pytorch(two, optimizer):
    local = fv.LocalTraining(optimizer=optimizer, lr=0.05, epochs=4, batch=100, weight_decay=0.01)
    result = fv.run(two, fv.FedAvg(local=local), rounds=1, cohort=2)
    trained = []
    for k in range(2):
        w = two.initial.clone().requires_grad_()
        make = {
            "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, 0.05),
        }
        theirs = make[optimizer]([w])
        for _ in range(4):
            w.grad = gradient(two, w.detach(), two.clients[k])[0] + 0.01 * w.detach()
            theirs.step()
        trained.append(w.detach())
    torch.testing.assert_close(result.weights, (8 * trained[0] + 16 * trained[1]) / 24)


def test_server_optimisers_two_steps_by_hand():
    w, d1, d2 = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0]), torch.tensor([0.25, 0.5])
    momentum = fv.ServerOptimizer(optimizer="momentum", lr=0.1, momentum=0.9)
    state = momentum.step(momentum.step(momentum.init_state(w), d1), d2)
    torch.testing.assert_close(state.weights, w + 0.1 * d1 + 0.1 * (0.9 * d1 + d2))
    adam = fv.ServerOptimizer(optimizer="adam", lr=0.1, momentum=0.9, beta2=0.99, tau=1e-3)
    state = adam.step(adam.step(adam.init_state(w), d1), d2)
    m1, v1 = 0.1 * d1, 0.01 * d1**2
    m2, v2 = 0.9 * m1 + 0.1 * d2, 0.99 * v1 + 0.01 * d2**2
    torch.testing.assert_close(state.weights, w + 0.1 * m1 / (v1.sqrt() + 1e-3) + 0.1 * m2 / (v2.sqrt() + 1e-3))


MERGED = {
    "mean": torch.tensor([2.5, 25.0]),
    "median": torch.tensor([2.0, 2.0]),
    "trimmed": torch.tensor([7 / 3, 7 / 3]),
    "krum": torch.tensor([2.0, 2.0]),
}


@pytest.mark.parametrize("kind", MERGED)
def test_robust_merges_ignore_the_outlier_that_moves_the_mean(kind):
    updates = torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [3.0, 3.0], [4.5, 117.0]])
    merged = fv.Aggregator(kind=kind, trim=0.2, byzantine=1)(updates, torch.ones(5))
    torch.testing.assert_close(merged, MERGED[kind])


def test_a_share_is_not_cut_short_by_rounding():
    updates = torch.arange(100.0)[:, None].square()
    merged = fv.Aggregator(kind="trimmed", trim=0.29)(updates, torch.ones(100))
    torch.testing.assert_close(merged, updates[29:71].mean(0))


def test_norm_clipping_bounds_what_one_client_can_do():
    updates = torch.tensor([[0.3, 0.4], [300.0, 400.0]])
    merged = fv.Aggregator(kind="clip", clip=1.0)(updates, torch.tensor([1, 3]))
    torch.testing.assert_close(merged, 0.25 * updates[0] + 0.75 * torch.tensor([0.6, 0.8]))


def test_a_poisoned_client_ruins_the_mean_but_not_the_median():
    def poison(round_, replies):
        for reply in replies:
            if reply.client == 0:
                where = fv.core.message.envelope(reply.frame)[1]
                uphill = torch.tensor([1.0, 1, 1, -1, -1, -1, 0, 0]) * 1e3
                reply = Reply(0, frame(Update(uphill, 6), where))
            yield reply

    def accuracy(kind):
        method = fv.FedAvg(local=fv.LocalTraining(lr=0.5, epochs=3), aggregator=fv.Aggregator(kind=kind))
        return fv.run(linear_task(4), method, rounds=5, cohort=4, engine=Tamper(poison)).accuracy

    assert accuracy("mean") < 0.7
    assert accuracy("median") > 0.85


# ------------------------------------------------------------------------------------- ragged and stacked


def test_ragged_clients_train_as_if_alone():
    """Clients of 1 to 9 records in one stack end where each ends alone: padding changes no gradient."""
    task = linear_task(9, 45, uneven=True)
    assert task.clients.sizes.tolist() == list(range(1, 10))
    method = fv.FedAvg(local=fv.LocalTraining(lr=0.3, epochs=3, batch=4))
    together = fv.run(task, method, rounds=1, cohort=9, engine=LocalEngine(stack=9, workers=1))
    alone = fv.run(task, method, rounds=1, cohort=9, engine=LocalEngine(stack=1, workers=1))
    torch.testing.assert_close(together.weights, alone.weights, atol=1e-6, rtol=0)


def test_steps_instead_of_epochs_give_every_client_the_same_number():
    task = linear_task(3, 12, uneven=True)
    result = fv.run(task, fv.FedAvg(local=fv.LocalTraining(steps=5, batch=1)), rounds=1, cohort=3)
    assert result.ledger.rows[0].passes == 15


def test_the_rate_falls_after_the_rounds_that_are_listed():
    """TOFU, section 4.1, with fewer rounds: 0.02 until round 2, × 0.2 until round 5, and × 0.2 again."""
    local = fv.LocalTraining(lr=0.02, decay=0.2, decay_after=(2, 5))
    assert [local.rate(t) for t in range(1, 8)] == pytest.approx([0.02, 0.02, 0.004, 0.004, 0.004, 0.0008, 0.0008])
    assert fv.LocalTraining(lr=0.02, decay=0.2).rate(3) == pytest.approx(0.0008)


def test_a_round_takes_its_rate_from_its_number_alone(two):
    """A run of 3 rounds: 0.5, 0.5 and 0.1, by hand."""
    local = fv.LocalTraining(lr=0.5, batch=100, decay=0.2, decay_after=(2,))
    result = fv.run(two, fv.FedAvg(local=local), rounds=3, cohort=2)
    w = two.initial
    for lr in (0.5, 0.5, 0.1):
        g = [gradient(two, w, two.clients[k])[0] for k in range(2)]
        w = w - lr * (8 * g[0] + 16 * g[1]) / 24
    torch.testing.assert_close(result.weights, w)


@pytest.fixture(scope="module")
def digits():
    return recipe.read("digits/fedavg").build()


def test_stack_sizes_agree_on_the_digits_after_one_round(digits):
    method = recipe.read("digits/fedavg").method
    weights = [
        fv.run(digits, method, rounds=1, cohort=10, engine=LocalEngine(stack=n, workers=w)).weights
        for n, w in ((1, 1), (10, 1), (5, 2))
    ]
    for other in weights[1:]:
        torch.testing.assert_close(weights[0], other, atol=1e-5, rtol=0)


def test_the_same_seed_twice_gives_the_same_weights_and_another_seed_others(digits):
    method = recipe.read("digits/fedavg").method
    first, again, other = (fv.run(digits, method, rounds=2, cohort=5, seed=s).weights for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_fedavg_learns_the_digits(digits):
    chosen = recipe.read("digits/fedavg")
    result = fv.run(digits, chosen.method, rounds=chosen.rounds, cohort=chosen.cohort)
    assert result.summary()["accuracy_last3"] >= 0.95
    frame_bytes = len(frame(Update(result.weights, 143), Envelope()))
    assert result.summary()["bytes_up_per_client_round"] == frame_bytes
    assert result.summary()["bytes_up"] == 20 * 5 * frame_bytes


def test_control_variates_beat_averaging_where_clients_hold_two_classes():
    """A small proximal term changes little."""
    data, reached = fv.load("digits"), {}
    for name in ("fedavg", "fedprox", "scaffold"):
        chosen = recipe.read(f"digits/{name}-classes")
        task = chosen.on(data)
        assert (task.clients.counts(task.y.numpy(), 10) > 0).sum(1).tolist() == [2] * 10
        result = fv.run(task, chosen.method, rounds=12, cohort=chosen.cohort)
        reached[name] = result.summary()["accuracy_last3"]
    assert reached["scaffold"] > reached["fedavg"] + 0.03
    assert abs(reached["fedprox"] - reached["fedavg"]) < 0.05
