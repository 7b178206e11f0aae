"""Labels are counted from the last layer's gradient: surely of one record, nearly of a batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedveil as fv
from codec_tools import stack_of
from fedveil.attacks.inversion import Target
from fedveil.attacks.labels import allot, count, last_layer
from fedveil.attacks.scores import overlap
from inversion_tools import SEED, blind, dense, gradients, task, victims


def bare(act=nn.Tanh):
    """A network whose last layer has no bias."""
    return task(nn.Flatten(), nn.Linear(64, 32), act(), nn.Linear(32, 10, bias=False))


def seen(net, many, n):
    x, y = victims(net, many, n)
    return Target(*gradients(net, x, y), "gradient", n), y


@pytest.mark.parametrize("net", [dense, bare], ids=["bias", "no bias"])
def test_the_label_of_one_record_is_certain(net):
    target, y = seen(net(), 40, 1)
    found = count(net(), target, SEED)
    assert torch.equal(found.y, y)
    assert torch.equal(found.counts, F.one_hot(y[:, 0], 10))


def test_a_random_vector_tells_no_label():
    target, y = seen(dense(), 200, 1)
    noise = torch.randn(target.vector.shape, generator=SEED.torch())
    hits = count(dense(), replace(target, vector=noise), SEED).y == y
    assert float(hits.float().mean()) < 0.2


@pytest.mark.parametrize(("n", "share"), [(4, 1.0), (16, 0.9)])
def test_labels_of_a_batch_are_counted_from_the_bias(n, share):
    target, y = seen(dense(), 20, n)
    found = count(dense(), target, SEED)
    assert found.counts.sum(1).tolist() == [n] * 20
    assert torch.equal(found.counts, torch.stack([torch.bincount(own, minlength=10) for own in found.y]))
    assert float(overlap(found.y, y, 10).mean()) >= share
    even = torch.arange(n).expand(20, -1) * 10 // n  # as many of each class as there can be
    assert float(overlap(even, y, 10).mean()) < share - 0.1


def test_without_a_bias_rows_are_summed_where_features_are_not_negative():
    net = bare(nn.Sigmoid)
    target, y = seen(net, 20, 8)
    assert float(overlap(count(net, target, SEED).y, y, 10).mean()) > 0.9


def test_an_update_of_several_steps_is_a_mean_gradient():
    net, local = dense(), fv.LocalTraining(lr=0.05, epochs=2, batch=8)
    net.clients = fv.Split(net.clients.order[:64].copy(), torch.arange(0, 65, 16).numpy(), "small")
    w, _ = local.train(stack_of(net, 0, 1, 2, 3), net.initial)
    y = torch.stack([net.y[net.clients[k]] for k in range(4)])
    target = Target(net.initial.expand(4, -1), w - net.initial, "update", 16, local=local)
    found = count(net, target, SEED)
    assert float(overlap(found.y, y, 10).mean()) > 0.85
    wrong = count(net, replace(target, vector=-target.vector), SEED)
    assert float(overlap(wrong.y, y, 10).mean()) < 0.7


def test_counts_are_whole_and_hold_the_classes_that_certainly_occur():
    wanted = torch.tensor([[2.6, 0.9, 0.4, 0.1], [0.0, 3.2, 0.2, 0.6]])
    present = torch.tensor([[False, False, False, True], [True, False, False, False]])
    assert allot(wanted, present, 4).tolist() == [[2, 1, 0, 1], [1, 3, 0, 0]]
    assert allot(wanted, torch.ones(2, 4, dtype=torch.bool), 2).tolist() == [[1, 1, 0, 0], [0, 1, 0, 1]]


def test_the_last_layer_is_found_by_its_outputs():
    weight, bias = last_layer(dense())
    assert (weight.name, bias.name) == ("3.weight", "3.bias")
    assert last_layer(task(nn.Flatten(), nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10, bias=False)))[1] is None


def test_what_has_no_labels_to_count_is_one_sentence():
    net = blind(dense())
    net.data = replace(net.data, y=net.data.y[:, None].repeat(1, 2), test_y=net.test_y[:, None].repeat(1, 2))
    with pytest.raises(ValueError, match="need one class label a record"):
        count(net, seen(dense(), 1, 1)[0], SEED)


def test_records_of_the_task_are_not_looked_at():
    target, _ = seen(dense(), 3, 4)
    assert torch.equal(count(blind(dense()), target, SEED).counts, count(dense(), target, SEED).counts)
