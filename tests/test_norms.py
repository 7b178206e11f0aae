"""How group norms are put together of kernels, with PyTorch in place of these; test_windows.py tries the kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from fedveil import norms, windows
from fedveil.products import Products

BLOCKS = {
    "norm": lambda c: [nn.GroupNorm(2, c)],
    "convolution, norm": lambda c: [nn.Conv2d(c, 6, 3, padding=1), nn.GroupNorm(3, 6)],
    "norm, ReLU, pool": lambda c: [nn.GroupNorm(c, c), nn.ReLU(), nn.AvgPool2d(2)],
    "all": lambda c: [nn.Conv2d(c, 6, 3, padding=1), nn.GroupNorm(6, 6), nn.ReLU(), nn.AvgPool2d(2)],
    "without a bias": lambda c: [nn.Conv2d(c, 6, 3, bias=False), nn.GroupNorm(3, 6), nn.ReLU(), nn.AvgPool2d(2)],
    "another pool": lambda c: [nn.GroupNorm(2, c), nn.ReLU(), nn.AvgPool2d(3, 1)],
    "a ReLU in place": lambda c: [nn.GroupNorm(2, c), nn.ReLU(inplace=True), nn.AvgPool2d(2)],
    "no ReLU": lambda c: [nn.GroupNorm(2, c), nn.AvgPool2d(2)],
    "a norm of something else": lambda c: [nn.Conv2d(c, 6, 3), nn.Tanh(), nn.GroupNorm(3, 6)],
}
FUSED = {"convolution, norm": (0, True), "norm, ReLU, pool": (6, False), "all": (6, True), "without a bias": (4, False)}


class Operators:
    """What the kernels compute, […, B, C, P] at a time, and how the first of them was called."""

    def __init__(self, monkeypatch):
        self.called = []
        for name in ("normalised", "sloped", "curved"):
            monkeypatch.setattr(norms, name, getattr(self, name))
        monkeypatch.setattr(norms, "usable", lambda *_: True)

    def normalised(self, x, offset, weight, bias, groups, eps, across):
        self.called.append((across, offset is not None))
        unit, _, _ = units(x, offset, groups, eps)
        result = unit * over(weight) + over(bias)
        return tiles(result.relu(), across).mean((-1, -3)).flatten(-2) if across else result

    def sloped(self, x, offset, weight, bias, g, groups, eps, across):
        unit, scale, mean = units(x, offset, groups, eps)
        g = spread(g, unit * over(weight) + over(bias), across)
        u = over(weight) * g
        by_x = scale * (u - mean(u) - unit * mean(u * unit))
        return by_x, torch.stack([(g * unit).sum(-1), g.sum(-1), by_x.sum(-1)], -3)

    def curved(self, x, offset, weight, bias, g, a, c, groups, eps, across):
        unit, scale, mean = units(x, offset, groups, eps)
        cut = unit * over(weight) + over(bias)
        p, q, r = (t[..., None] for t in c.unbind(-3))
        g, a = spread(g, cut, across), a + r
        u, tilt = over(weight) * g, p * g
        ux, ax = mean(u * unit), mean(a * unit)
        down = scale * (a - mean(a) - unit * ax)
        bend = ux * (a - mean(a)) + ax * (u - mean(u)) + (mean(a * u) - mean(a) * mean(u) - 3 * ux * ax) * unit
        by_x = scale * (tilt - mean(tilt) - unit * mean(tilt * unit)) - scale**2 * bend
        by_g = over(weight) * down + p * unit + q
        if across:
            by_g = tiles(by_g * (cut > 0), across).mean((-1, -3)).flatten(-2)
        return by_x, by_g, torch.stack([(g * down).sum(-1), by_x.sum(-1)], -3)


def units(x, offset, groups, eps):
    """x̂, its scale, and the function that takes means over groups."""

    def mean(t):
        parts = t.unflatten(-2, (groups, -1))
        return parts.mean((-1, -2), keepdim=True).expand(parts.shape).flatten(-3, -2)

    x = x if offset is None else x + over(offset)
    scale = (mean(x**2) - mean(x) ** 2 + eps).rsqrt()
    return (x - mean(x)) * scale, scale, mean


def over(t):
    """[…, C] -> […, 1, C, 1]."""
    return t[..., None, :, None]


def tiles(t, across):
    """[…, P] -> […, rows, 2, columns, 2]."""
    return t.unflatten(-1, (-1, 2, across // 2, 2))


def spread(g, cut, across):
    """The gradient by what a ReLU cut, if g is that by the pool after it."""
    if not across:
        return g
    wide = g.unflatten(-1, (-1, 1, across // 2, 1)).expand(tiles(cut, across).shape).flatten(-4)
    return wide / 4 * (cut > 0)


def slopes(model, x, traced):
    """Logits, first and second derivatives of a stack of models by its weights and its input."""
    weights = {n: torch.stack([p.detach() * (1 + k / 10) for k in range(3)]) for n, p in model.named_parameters()}
    given = [t.requires_grad_() for t in weights.values()] + [x.detach().requires_grad_()]

    def one(*given):
        return torch.func.functional_call(model, dict(zip(weights, given, strict=False)), (given[-1],))

    windows.traced = traced
    out = vmap(one)(*given).tanh()
    windows.traced = False
    first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
    return out, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), given, allow_unused=True)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("traced", [False, True])
def test_layers_in_a_row(name, traced, monkeypatch):
    """They are PyTorch's in value and derivatives, and one kernel where a compiler looks on."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*BLOCKS[name](4)).double(), torch.randn(3, 2, 4, 6, 6, dtype=torch.float64)
    want = slopes(model, x, False)
    operators = Operators(monkeypatch)
    with Products():
        got = slopes(model, x, traced)
    assert operators.called[-1] == (FUSED.get(name, (0, False)) if traced else (0, False))
    for ours, theirs in zip(got, want, strict=True):
        if theirs is not None and ours is not None:
            torch.testing.assert_close(ours, theirs)
        else:
            assert ours is None or not ours.any()  # PyTorch says "unused", we say 0
            assert theirs is None or not theirs.any()


def test_what_lies_between_can_be_needed_too(monkeypatch):
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)

        def forward(self, x):
            made = self.conv(x)
            normed = self.norm(made)
            cut = F.relu(normed)
            return F.avg_pool2d(cut, 2) + F.avg_pool2d(made + normed * cut, 2)

    torch.manual_seed(0)
    model, x = Between().double(), torch.randn(3, 2, 2, 4, 4, dtype=torch.float64)
    want = slopes(model, x, False)
    Operators(monkeypatch)
    with Products():
        got = slopes(model, x, True)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_which_norms_have_kernels(monkeypatch):
    monkeypatch.setattr(norms, "kernels", object)
    x = torch.empty(2, 6, 8, 8)
    assert not norms.usable(x, 3)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert norms.usable(x, 3)
    assert norms.usable(x, 3, True)
    assert not norms.usable(x, 4)  # no groups of equal size
    assert not norms.usable(x[:, :, 0, 0], 3)
    assert not norms.usable(x[:, :, :7], 3, True)  # no tiles of 2 × 2
    large = torch.empty(1, 6, 64, 64)
    assert not norms.usable(large, 1)
    assert norms.usable(large, 6)
    with torch.no_grad():
        assert norms.usable(large, 1)
        assert not norms.usable(large, 1, True)
        assert not norms.usable(large, 1, False, True)
