"""Updates of several local steps: the simulation is the client's training, and fitting it finds the records."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from codec_tools import stack_of
from fedveil.attacks.epochs import Simulation, apart, invert_epochs, joined, order, simulate
from fedveil.attacks.inversion import Inversion, Target
from fedveil.attacks.scores import Pool, score
from inversion_tools import DATA, SEED, blind, task

POOL = Pool.of(DATA, SEED)
HOW = Inversion(steps=200, tv=1e-4)
LOCAL = fv.LocalTraining(lr=0.05, epochs=3, batch=2)


def small(records: int = 4, clients: int = 2) -> fv.Task:
    """A smooth network, and clients with a few records each."""
    net = task(nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, 10))
    net.initial = torch.rand(net.layout.size, generator=SEED.torch()) - 0.5
    order = net.clients.order[: clients * records].copy()
    net.clients = fv.Split(order, np.arange(0, clients * records + 1, records), "small")
    return net


def trained(net: fv.Task, local: fv.LocalTraining) -> tuple[Target, torch.Tensor, list[fv.Seed]]:
    """Updates as clients make them, their records [V, n, …] and the seeds of their orders."""
    clients = range(len(net.clients))
    stack = stack_of(net, *clients)
    w, _ = local.train(stack, net.initial)
    rows = torch.from_numpy(np.stack([net.clients[k] for k in clients]))
    start = net.initial.expand(len(clients), -1)
    target = Target(start, w - start, "update", rows.shape[1], net.y[rows], local)
    return target, net.x[rows], stack.seeds("shuffle")


@pytest.mark.parametrize(
    "local",
    [
        LOCAL,
        replace(LOCAL, batch=3),
        replace(LOCAL, batch=10),
        replace(LOCAL, steps=5),
        replace(LOCAL, weight_decay=0.1),
    ],
    ids=["batches", "a short batch", "whole", "steps", "decay"],
)
def test_the_simulation_is_the_clients_training(local):
    net = small()
    target, x, shuffles = trained(net, local)
    plan = order(local, 4, shuffles, 2)
    found = simulate(net, target.weights, x, target.labels, local, plan)
    torch.testing.assert_close(found.detach(), target.vector, atol=1e-5, rtol=1e-4)
    epochs = x[:, None].expand(-1, 3, *x.shape[1:])
    torch.testing.assert_close(simulate(net, target.weights, epochs, target.labels, local, plan), found)
    other = simulate(net, target.weights, x, target.labels, local, order(local, 4, None, 2))
    assert local.batch == 10 or float((other - found).detach().abs().max()) > 1e-4


def test_records_are_found_from_several_epochs_in_the_known_order():
    net = small()
    target, x, shuffles = trained(net, LOCAL)
    found = invert_epochs(net, target, HOW, Simulation(), SEED, shuffles=shuffles)
    scores = score(found.x, x, POOL, found.y, target.labels)
    assert float(scores.identified.float().mean()) > 0.8
    assert float(scores.psnr.mean()) > 20
    assert scores.labels.tolist() == [1, 1]


def test_records_are_found_where_each_epoch_has_its_own():
    net, local = small(2), replace(LOCAL, epochs=2, batch=2)
    target, x, _ = trained(net, local)
    found = invert_epochs(net, target, HOW, Simulation(own_epochs=True), SEED)
    assert found.x.shape == x.shape
    assert float(score(found.x, x, POOL).psnr.mean()) > 16
    assert score(found.x, x, POOL).identified.any()


def test_a_random_update_finds_nothing():
    net = small()
    target, x, shuffles = trained(net, LOCAL)
    noise = torch.randn(target.vector.shape, generator=SEED.torch()) * target.vector.std()
    found = invert_epochs(net, replace(target, vector=noise), HOW, Simulation(), SEED, shuffles=shuffles)
    assert float(score(found.x, x, POOL).psnr.mean()) < float(
        score(POOL.baselines(x, SEED)["mean"], x, POOL).psnr.mean()
    )
    assert not score(found.x, x, POOL).exact.any()


def test_records_of_the_task_are_not_looked_at():
    net = small()
    target, _, shuffles = trained(net, LOCAL)
    how, two = replace(HOW, steps=10), Simulation(own_epochs=True, squared=0.1)
    truly, blindly = (invert_epochs(t, target, how, two, SEED, shuffles=shuffles) for t in (net, blind(net)))
    assert torch.equal(truly.x, blindly.x)


def test_the_prior_does_not_know_the_order_of_records():
    x = torch.randn(2, 1, 4, 1, 8, 8, generator=SEED.torch())
    assert apart(torch.cat([x, x.flip(2)], 1)).tolist() == pytest.approx([0, 0], abs=1e-10)
    assert float(apart(torch.cat([x, x + 1], 1)).min()) == pytest.approx(0.5)


def test_records_of_all_epochs_are_matched_and_averaged():
    x = torch.randn(4, 1, 8, 8, generator=SEED.torch())
    torch.testing.assert_close(joined(torch.stack([x, x[[2, 0, 3, 1]] + 0.03, x[[1, 3, 0, 2]]])), x + 0.01)


def test_what_cannot_be_simulated_is_one_sentence():
    net = small()
    target, _, _ = trained(net, LOCAL)
    with pytest.raises(ValueError, match="Only plain SGD is simulated, but the clients train by adam"):
        invert_epochs(net, replace(target, local=replace(LOCAL, optimizer="adam")), HOW, Simulation(), SEED)
    with pytest.raises(ValueError, match="a target that is a gradient goes to invert"):
        invert_epochs(net, replace(target, means="gradient"), HOW, Simulation(), SEED)
    with pytest.raises(ValueError, match="use 0 or more"):
        Simulation(tie=-1)
