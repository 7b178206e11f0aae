"""Separate convolutions equal PyTorch's, in value and in first and second gradients, stacked or not."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

import fedveil as fv
from fedveil import models
from fedveil.data import from_tensors
from fedveil.gpu import separate
from fedveil.gpu.separate import Separate

SETTINGS = [{}, {"padding": 2}, {"padding": "same"}, {"stride": 2, "padding": (1, 0)}, {"dilation": 2}]


def tensors(*stack):
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 3, 9, 8), (4, 3, 3, 3), (4,)
    return [torch.randn(*stack, *s, generator=draw, dtype=torch.float64, requires_grad=True) for s in shapes]


def second(conv, given):
    """A value, first gradients and second ones."""
    out = conv(*given).tanh()
    first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
    return out, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), given)


def compare(conv, given):
    with Separate():
        ours = second(conv, given)
    for one, other in zip(ours, second(conv, given), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("stack", [(), (3,), (2, 3)], ids=str)
def test_value_and_gradients(settings, stack):
    conv = lambda x, weight, bias: F.conv2d(x, weight, bias, **settings)  # noqa: E731
    for _ in stack:
        conv = vmap(conv)
    compare(conv, tensors(*stack))


@pytest.mark.parametrize("dims", [(None, 0, 0), (0, None, None), (0, 0, None)], ids=str)
def test_what_all_clients_share_is_not_stacked(dims):
    single, stacked = tensors(), tensors(3)
    given = [own if d is None else each for d, own, each in zip(dims, single, stacked, strict=True)]
    compare(vmap(F.conv2d, dims), given)


def test_pictures_that_all_perturbed_models_share():
    x, (_, weight, bias) = tensors(3)[0], tensors(3, 2)
    compare(vmap(vmap(F.conv2d, (None, 0, 0))), [x, weight, bias])
    compare(vmap(vmap(F.conv2d), (None, 0, 0)), [x, *(t.detach()[:2].requires_grad_() for t in tensors(2, 3)[1:])])


def test_without_a_bias_and_with_pictures_that_need_no_gradient():
    x, weight, _ = tensors(3)
    compare(lambda w: vmap(F.conv2d)(x.detach(), w), [weight])


def test_groups_and_fewer_bits_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(separate._Convolution, "of", None)
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 2, 3, 3)
    with Separate():
        torch.testing.assert_close(F.conv2d(x, weight, groups=2), torch.conv2d(x, weight, groups=2))
        with torch.autocast("cpu", torch.bfloat16):
            assert F.conv2d(x[:, :2], weight).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["lenet5", "digits-cnn"])
def test_large_models_train_by_separate_convolutions(name, monkeypatch):
    called, of = [], separate._Convolution.of
    monkeypatch.setattr(separate._Convolution, "of", lambda *args: called.append(1) or of(*args))
    shape = (1, 28, 28) if name == "lenet5" else (1, 8, 8)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, *shape, generator=draw), torch.arange(12) % 10
    data = from_tensors(x, y, x, y, classes=10)
    task = fv.Task(models.build(name, shape, 10), data, fv.split("iid", data, 3, fv.Seed.root(0)))
    rows = torch.arange(12).view(3, 4)
    stack = task.gradient(task.initial.expand(3, -1), task.x[rows], task.y[rows], torch.ones(3, 4))[0]
    assert bool(called) == (name == "lenet5")
    called.clear()
    task.stacked_losses(task.initial.expand(3, -1), task.x[rows], task.y[rows])  # for synthetic codecs
    assert not called
    for own, row in zip(stack, rows, strict=True):
        alone = task.gradient(task.initial[None], task.x[row][None], task.y[row][None], torch.ones(1, 4))[0][0]
        torch.testing.assert_close(own, alone, rtol=1e-4, atol=1e-6)
