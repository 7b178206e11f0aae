"""A linear layer with a bias gives one record away exactly, and of a batch those that have neurons of their own."""

import pytest
import torch
from torch import nn

from fedveil.attacks.linear import find, lacking, recover
from inversion_tools import SEED, blind, dense, gradients, task, victims


def seen(net, count, n):
    x, y = victims(net, count, n)
    return gradients(net, x, y)[1], x


def test_one_record_is_exact_and_so_is_a_multiple_of_its_gradient():
    vector, x = seen(dense(), 5, 1)
    found = recover(dense(), -0.1 * vector, 1)
    assert (found.layer, found.records) == ("1", True)
    assert found.sure.all()
    torch.testing.assert_close(found.x, x, atol=1e-4, rtol=1e-4)


def test_a_random_vector_gives_nothing():
    vector, x = seen(dense(), 5, 1)
    noise = torch.randn(vector.shape, generator=SEED.torch())
    assert float((recover(dense(), noise, 1).x - x).square().mean()) > 0.5
    assert not recover(dense(), noise, 4).sure.any()
    assert not recover(dense(), torch.zeros_like(vector), 1).sure.any()


def test_of_a_batch_those_are_found_that_have_neurons_of_their_own():
    """ReLUs with a high threshold: most neurons are silent, and some fire for one record only."""
    wide = dense(2000, nn.ReLU)
    wide.initial[wide.layout.layers[1].start : wide.layout.layers[1].stop] = -1.8
    vector, x = seen(wide, 3, 4)
    found = recover(wide, vector, 4)
    assert found.sure.sum() >= 6
    apart = torch.cdist(found.x.flatten(2), x.flatten(2)).amin(2)
    assert float(apart[found.sure].max()) < 1e-2


def test_of_a_batch_in_which_all_neurons_fire_nothing_is_claimed():
    assert not recover(dense(), seen(dense(), 3, 4)[0], 4).sure.any()


def test_behind_other_layers_the_features_are_read():
    net = task(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
    vector, x = seen(net, 2, 1)
    found = recover(net, vector, 1)
    assert (found.layer, found.records) == ("3", False)
    torch.testing.assert_close(found.x[:, 0], net.model[:3](x[:, 0]).detach(), atol=1e-4, rtol=1e-4)
    assert "is fed by features" in (lacking(net) or "")


def test_a_model_without_such_a_layer_is_one_sentence():
    net = task(nn.Flatten(), nn.Linear(64, 10, bias=False))
    assert find(net) is None
    with pytest.raises(ValueError, match="no trained linear layer with a bias"):
        recover(net, torch.zeros(1, net.layout.size), 1)
    assert lacking(dense()) is None


def test_records_of_the_task_are_not_looked_at():
    vector, _ = seen(dense(), 2, 1)
    assert torch.equal(recover(blind(dense()), vector, 1).x, recover(dense(), vector, 1).x)
