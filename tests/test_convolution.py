"""Unfolded convolutions equal PyTorch's, in value and in first and second gradients, stacked or not."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedveil import convolution
from fedveil.convolution import Unfolded

SETTINGS = [
    {},
    {"padding": 2},
    {"padding": "same"},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": (1, 2)},
    {"groups": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_value_and_gradients(settings):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 9, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(
        6, 4 // settings.get("groups", 1), 3, 3, generator=draw, dtype=torch.float64, requires_grad=True
    )
    bias = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True)

    def second(conv):
        out = conv(x, weight, bias, **settings).tanh()
        first = torch.autograd.grad(out.square().sum(), (x, weight, bias), create_graph=True)
        return out, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), (x, weight, bias))

    for ours, theirs in zip(second(convolution.conv2d), second(F.conv2d), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_mode_takes_over_the_convolutions_of_a_module_under_vmap(monkeypatch):
    layer = torch.nn.Conv2d(1, 3, 3, padding="same")
    weights, x = torch.randn(5, 3, 1, 3, 3), torch.randn(5, 2, 1, 6, 6)

    def one(weight, x):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    plain = vmap(one)(weights, x)
    calls = []
    monkeypatch.setattr(F, "pad", lambda *a, pad=F.pad: calls.append(1) or pad(*a))
    with Unfolded():
        torch.testing.assert_close(vmap(one)(weights, x), plain)
    assert calls
