"""Layers as products equal PyTorch's, in value and in first and second gradients, stacked or not."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedveil.gpu import graphs, products
from fedveil.gpu.products import Products

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

    for ours, theirs in zip(second(products.conv2d), second(F.conv2d), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("settings", [{}, {"stride": 2}, {"stride": 1}, {"padding": 1}, {"ceil_mode": True}], ids=str)
def test_mean_pools(settings):
    x = torch.randn(3, 2, 7, 6, dtype=torch.float64, requires_grad=True)
    pool = torch.nn.AvgPool2d(2, **settings)

    def second():
        out = vmap(pool)(x[:, None]).tanh()
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out, first, *torch.autograd.grad(first.sin().sum(), x)

    with Products():
        ours = second()
        assert (pool(x).grad_fn.name() == "MeanBackward1") == (settings in ({}, {"stride": 2}))
    for one, other in zip(ours, second(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (700, 4)], ids=str)  # the last sum is long enough to be cut
def test_linear_layers(shape):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, *shape, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 6, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 6, generator=draw, dtype=torch.float64, requires_grad=True)

    def second(layer):
        out = vmap(layer)(x, weight, bias).tanh()
        first = torch.autograd.grad(out.square().sum(), (x, weight, bias), create_graph=True)
        return out, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), (x, weight, bias))

    for ours, theirs in zip(second(products.linear), second(F.linear), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "alone"])
def test_under_autocast_products_and_their_derivatives_are_in_fewer_bits(stacked, monkeypatch):
    """The derivatives are taken outside of it, as training does."""
    layers = torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.GroupNorm(2, 4), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    model, seen = torch.nn.Sequential(*layers), []
    weights = {k: torch.stack([v.detach()] * 2).requires_grad_() for k, v in model.named_parameters()}
    x = torch.randn(2, 5, 1, 6, 6)
    for kind in (products._Forward, products._Outer, products._Back):
        monkeypatch.setattr(kind, "of", lambda a, b, own=kind.of: seen.append({a.dtype, b.dtype}) or own(a, b))

    def one(weights, x):
        return torch.func.functional_call(model, weights, (x,))

    def gradients(autocast):
        seen.clear()
        with Products(), torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            if stacked:
                out = vmap(one)(weights, x)
            else:
                out = torch.stack([one({k: v[i] for k, v in weights.items()}, x[i]) for i in range(2)])
        return torch.cat([g.flatten() for g in torch.autograd.grad(out.float().square().sum(), [*weights.values()])])

    exact = gradients(False)
    assert all(types == {torch.float32} for types in seen)
    rounded = gradients(True)
    assert len(seen) >= 5
    assert all(types == {torch.bfloat16} for types in seen)
    assert rounded.dtype == torch.float32
    assert 1e-5 < (rounded - exact).norm() / exact.norm() < 0.03


def test_gradients_come_in_the_layout_of_the_weights():
    weight, x = torch.randn(3, 6, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    out = vmap(products.linear)(x, weight)
    by_weight, by_input = torch.autograd.grad(out.square().sum(), (weight, x), create_graph=True)
    (again,) = torch.autograd.grad(by_input.square().sum(), weight)
    assert by_weight.is_contiguous()
    assert again.is_contiguous()


def test_weights_that_clients_share():
    weight, x = torch.randn(6, 4), torch.randn(3, 5, 4)
    torch.testing.assert_close(vmap(products.linear, (0, None))(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("layer", [torch.nn.Conv2d(1, 3, 3, padding="same"), torch.nn.Linear(6, 2)], ids=repr)
def test_the_mode_takes_over_the_layers_of_a_module_under_vmap(layer, monkeypatch):
    weights, x = torch.randn(5, *layer.weight.shape), torch.randn(5, 2, 1, 6, 6)

    def one(weight, x):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    plain = vmap(one)(weights, x)
    calls = []
    monkeypatch.setattr(products, "product", lambda *a, own=products.product: calls.append(1) or own(*a))
    with Products():
        torch.testing.assert_close(vmap(one)(weights, x), plain)
    assert calls


def test_weights_at_odd_addresses_are_copied_where_that_is_cheap(monkeypatch):
    """GPUs have fast products for matrices that begin at a multiple of 16 bytes."""
    seen, flat = [], torch.randn(3, 4 * 5 + 1, requires_grad=True)
    monkeypatch.setattr(products._Forward, "of", lambda w, x, own=products._Forward.of: seen.append(w) or own(w, x))

    def layer(flat, x):
        return products.product(flat[:20].view(4, 5), x)

    for columns, stride in ((16, 20), (15, 21)):
        x = torch.randn(3, 5, columns)
        result = vmap(layer)(flat, x)
        assert seen[-1].stride(0) == stride
        torch.testing.assert_close(result, flat[:, :20].view(3, 4, 5) @ x)
        (found,) = torch.autograd.grad(result.sum(), flat)
        torch.testing.assert_close(found[:, :20].view(3, 4, 5), x.sum(-1)[:, None].expand(-1, 4, -1))


@pytest.mark.parametrize("kind", [products._Forward, products._Outer, products._Back])
def test_matrices_at_odd_addresses_are_copied_in_derivatives_too(kind, monkeypatch):
    """What comes back from a stack of gradients lies as weights do, and no `vmap` sees it."""
    seen = []
    monkeypatch.setattr(products, "aligned", lambda m, other: seen.append(m) or m)
    a, b = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    kind.forward(a, b)
    assert [m is t for m, t in zip(seen, (a, b), strict=True)] == [True, True]


def test_what_a_compiler_sees_is_aligned_without_gradients_too(monkeypatch):
    seen = []
    monkeypatch.setattr(products._Forward, "of", lambda w, x, own=products._Forward.of: seen.append(1) or own(w, x))
    with torch.no_grad():
        products.product(torch.ones(2, 3), torch.ones(3, 4))
        assert not seen
        with graphs.tracing():
            products.product(torch.ones(2, 3), torch.ones(3, 4))
    assert seen


def test_long_sums_in_single_precision_are_a_kernel_on_a_gpu(monkeypatch):
    calls = []

    def parts(y, x):
        calls.append(y.shape)
        return torch.stack([part @ other.mT for part, other in zip(y.chunk(3, -1), x.chunk(3, -1), strict=True)], -3)

    monkeypatch.setattr(products, "parts", parts)
    monkeypatch.setattr(products.windows, "kernels", object)
    torch.manual_seed(0)
    long, short = (torch.randn(2, 3, 700), torch.randn(2, 4, 700)), (torch.randn(2, 3, 100), torch.randn(2, 4, 100))
    want = [y @ x.mT for y, x in (long, short)]
    products._Outer.forward(*long)
    assert not calls  # no GPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    products._Outer.forward(*(t.double() for t in long))
    assert not calls
    got = [products._Outer.forward(*given) for given in (long, short)]
    assert calls == [(2, 3, 700)]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
