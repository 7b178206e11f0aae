"""FedDyn's arithmetic by hand, and what it is for."""

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.data import from_tensors
from toys import linear_task

LOCAL = fv.LocalTraining(lr=0.5, epochs=2, batch=100)


def gradient(task, w, indices):
    w = w.clone().requires_grad_()
    weight, bias = w[:6].view(2, 3), w[6:]
    loss = torch.nn.functional.cross_entropy(task.x[indices] @ weight.T + bias, task.y[indices])
    return torch.autograd.grad(loss, w)[0]


def test_two_rounds_by_hand():
    """Acar et al. 2021, algorithm 1, with the inner problem solved by two gradient steps."""
    task, alpha = linear_task(2, 24, uneven=True), 0.3
    result = fv.run(task, fv.FedDyn(LOCAL, alpha=alpha), rounds=2, cohort=2)
    w, h, own = task.initial, torch.zeros(8), [torch.zeros(8)] * 2
    for _ in range(2):
        trained = []
        for k in range(2):
            v = w
            for _ in range(2):
                v = v - 0.5 * (gradient(task, v, task.clients[k]) - own[k] + alpha * (v - w))
            trained.append(v)
        own = [own[k] - alpha * (trained[k] - w) for k in range(2)]
        h = h - alpha * sum(v - w for v in trained) / 2
        w = sum(trained) / 2 - h / alpha
    torch.testing.assert_close(result.weights, w)


def test_absent_clients_keep_their_gradient_and_count_in_h():
    """One of two clients a round: h moves by half of the update."""
    task = linear_task(2, 24)
    result = fv.run(task, fv.FedDyn(LOCAL, alpha=0.3), rounds=1, cohort=1)
    (client,) = result.ledger.rows[0].cohort
    v = task.initial
    for _ in range(2):
        v = v - 0.5 * (gradient(task, v, task.clients[client]) + 0.3 * (v - task.initial))
    torch.testing.assert_close(result.weights, v + (v - task.initial) / 2)


def test_it_converges_to_the_optimum_of_the_joint_loss_and_averaging_does_not():
    """Two clients whose labels contradict each other: after long local training FedAvg stops short of the optimum."""
    draw = fv.Seed.root(3).torch()
    x = torch.randn(40, 3, generator=draw)
    y = (x[:, 0] + 0.8 * torch.randn(40, generator=draw) > 0).long()
    y[20:] = (x[20:, 1] + 0.8 * torch.randn(20, generator=draw) > 0).long()
    data = from_tensors(x, y, x, y, classes=2)
    halves = fv.Split(np.arange(40), np.array([0, 20, 40]), "halves")
    task = fv.Task(torch.nn.Linear(3, 2), data, halves)
    local = fv.LocalTraining(lr=0.5, epochs=20, batch=100)
    dyn, avg = (fv.run(task, m, rounds=100, cohort=2).weights for m in (fv.FedDyn(local, alpha=0.1), fv.FedAvg(local)))
    steep = [float(torch.linalg.norm(gradient(task, w, torch.arange(40)))) for w in (dyn, avg)]
    assert steep[0] < 1e-3 < 1e-2 < steep[1]


def test_a_regularizer_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"method\.alpha is 0; it must be above 0"):
        fv.run(linear_task(2), fv.FedDyn(alpha=0), rounds=1, cohort=2)
