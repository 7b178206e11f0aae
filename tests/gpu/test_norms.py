"""How group norms are put together of kernels, with PyTorch in place of these; test_windows.py tries the kernels."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from fedveil.gpu import graphs, norms
from fedveil.gpu.products import Products

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

    with graphs.tracing() if traced else nullcontext():
        out = vmap(one)(*given).tanh()
    first = torch.autograd.grad(out.square().sum(), given, create_graph=True, allow_unused=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first if g is not None), given, allow_unused=True)
    return out, *first, *second


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
    agree(got, want)


def agree(got, want):
    for ours, theirs in zip(got, want, strict=True):
        if ours is None or theirs is None:  # PyTorch may say "unused" where we say 0
            assert ours is None or not ours.any()
            assert theirs is None or not theirs.any()
        else:
            torch.testing.assert_close(ours, theirs)


class Odd(nn.Module):
    """Layers that look as if they could be one kernel."""

    def __init__(self, forward):
        super().__init__()
        self.own, self.conv, self.other = forward, nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.second = nn.GroupNorm(2, 4), nn.GroupNorm(4, 4)

    def forward(self, x):
        return self.own(self, x)


def between(net, x):
    made = net.conv(x)
    normed = net.norm(made)
    cut = F.relu(normed)
    return F.avg_pool2d(cut, 2) + F.avg_pool2d(made + normed * cut, 2)


def late(net, x):
    """The pool is of a norm that is not the last."""
    cut = F.relu(net.norm(net.conv(x)))
    return net.second(net.other(cut)).mean() * F.avg_pool2d(cut, 2)


def changed(net, x):
    made = net.conv(x)
    made += made.detach().sin()
    return F.avg_pool2d(input=F.relu(net.norm(made)), kernel_size=2)


def overwritten(net, x):
    normed = net.norm(net.conv(x))
    normed[..., 0] = 1
    return F.avg_pool2d(F.relu(normed), 2)


def cut_in_place(net, x):
    made = net.conv(x)
    torch.ops.aten.relu_.default(made)
    return net.norm(made)


def without_gradients(net, x):
    with torch.no_grad():
        normed = net.norm(net.conv(x))
    return F.avg_pool2d(F.relu(normed), 2) * net.other(net.conv(x)).mean()


def single(net, x):
    """A picture by itself: the norm takes its channels for a batch."""
    return torch.stack([F.group_norm(net.conv(each), 2) for each in x])


def twice(net, x):
    first = F.avg_pool2d(F.relu(net.norm(net.conv(x))), 2)
    again = F.avg_pool2d(F.relu(net.norm(net.other(first))), 2)
    return first.mean() + again


@pytest.mark.parametrize(
    "forward", [between, late, changed, overwritten, cut_in_place, without_gradients, single, twice]
)
def test_layers_that_look_as_if_they_were_in_a_row(forward, monkeypatch):
    torch.manual_seed(0)
    model, x = Odd(forward).double(), torch.randn(3, 2, 2, 4, 4, dtype=torch.float64)
    want = slopes(model, x, False)
    Operators(monkeypatch)
    with Products():
        got = slopes(model, x, True)
    agree(got, want)


def test_which_norms_have_kernels(monkeypatch):
    monkeypatch.setattr(norms, "kernels", object)
    x = torch.empty(2, 6, 8, 8)
    assert not norms.usable(x, 3)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert norms.usable(x, 3)
    assert norms.usable(x, 3, True)
    assert norms.usable(x[:0], 3)
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


@pytest.mark.parametrize("stacked", [False, True])
def test_there_is_no_third_derivative(stacked, monkeypatch):
    """And that is said: a derivative that is silently 0 would be worse."""
    Operators(monkeypatch)
    x, weight, bias = torch.randn(2, 3, 4, 5), torch.randn(2, 4), torch.randn(2, 4)
    x.requires_grad_()

    def norm(x, weight, bias):
        return norms.group_norm(x, 2, weight, bias, 1e-5)

    out = vmap(norm)(x, weight, bias) if stacked else norm(x[0], weight[0], bias[0])
    for _ in range(2):
        (out,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no third derivative"):
        torch.autograd.grad(out.sin().sum(), x)


def test_other_functions_are_called_as_they_were():
    with Products():
        found = torch.where(condition=torch.tensor([True, False]), input=torch.ones(2), other=torch.zeros(2))
    assert found.tolist() == [1, 0]


def test_a_compiler_looks_on_in_one_thread():
    with graphs.tracing(), ThreadPoolExecutor(1) as other:
        assert graphs.traced()
        assert not other.submit(graphs.traced).result()
    assert not graphs.traced()
