"""Which layers become kernels of their own, and what those are given; what they compute is in test_windows.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fedveil.gpu import convolutions, forward, graphs, norms, products
from fedveil.gpu.context import using
from fedveil.gpu.products import Products
from fedveil.gpu.windows import Window


class Launches(list):
    """Stands for a kernel: notes its arguments and computes nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.append((grid, arguments))


@pytest.fixture
def launched(monkeypatch):
    kernels = SimpleNamespace(convolve=Launches(), normalise=Launches())
    for module in (forward, norms):
        monkeypatch.setattr(module, "kernels", lambda: kernels)
    monkeypatch.setattr(forward, "usable", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(norms, "usable", lambda x, groups, *_: x.shape[1] % groups == 0)
    return kernels


def half(*shape):
    return torch.randn(shape).half()


def conv(weight, x):
    return F.conv2d(x, weight, None, 1, 1)


def test_a_stack_reads_shared_pictures_where_they_are(launched):
    x, weights = half(2, 5, 3, 8, 8), half(2, 4, 6, 3, 3, 3)  # two groups of five pictures and of four models
    with torch.no_grad(), Products():
        result = vmap(vmap(conv, (0, None)))(weights, x)
    assert result.shape == (2, 4, 5, 6, 8, 8)
    ((grid, (pictures, *_)),) = launched.convolve
    assert grid == (2 * 4 * 3,)  # models, and 5 · 8 · 8 places in blocks of 128
    assert pictures.data_ptr() == x.data_ptr()
    assert pictures.stride() == (x.stride(0), 0, *x.stride()[1:])


def test_a_stack_dimension_may_be_anywhere(launched):
    x, weights = half(5, 4, 3, 8, 8), half(4, 6, 3, 3, 3)
    with torch.no_grad(), Products():
        result = vmap(conv, (0, 1))(weights, x)
    assert result.shape == (4, 5, 6, 8, 8)
    ((_, (pictures, *_)),) = launched.convolve
    assert pictures.data_ptr() == x.data_ptr()
    assert pictures.shape == (1, 4, 5, 3, 8, 8)


def test_a_group_norm_reads_strided_pictures_where_they_are(launched):
    x = half(6, 4, 5, 3, 3)  # six channels of four models of five pictures
    with torch.no_grad(), Products():
        result = vmap(lambda x: F.group_norm(x.transpose(0, 1), 2), 1)(x)
    assert result.shape == (4, 5, 6, 3, 3)
    ((grid, (pictures, *_)),) = launched.normalise
    assert grid == (4 * 5 * 2,)
    assert pictures.data_ptr() == x.data_ptr()
    assert pictures.shape == (1, 4, 5, 6, 9)


def test_a_convolution_that_is_differentiated_is_left_alone(launched):
    module, x = torch.nn.Conv2d(4, 6, 3).half(), torch.randn(2, 4, 5, 5).half()
    with Products():
        module(x)
        with torch.no_grad():
            grad(lambda x: module(x).float().sum())(x)
            assert launched.convolve == []
            module(x)
    assert len(launched.convolve) == 1


def test_single_precision_convolutions_stay_products(launched, monkeypatch):
    calls = []
    monkeypatch.setattr(products, "product", lambda *a, own=products.product: calls.append(1) or own(*a))
    with torch.no_grad(), Products():
        conv(torch.randn(6, 3, 3, 3), torch.randn(2, 3, 8, 8))
    assert calls
    assert not launched.convolve


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda x: F.conv2d(x, half(6, 4, 3, 3)), (2, 3, 8, 8)),
        (lambda x: F.conv2d(x, half(6, 3, 3, 3), half(5)), (2, 3, 8, 8)),
        (lambda x: F.group_norm(x, 4), (2, 6, 8)),
        (lambda x: F.group_norm(x, 2, half(5)), (2, 6, 8)),
    ],
)
def test_tensors_that_do_not_fit_are_errors(layer, shape, launched):
    """And never a read outside them."""
    with torch.no_grad(), Products(), pytest.raises(RuntimeError):
        layer(half(*shape))
    assert launched.convolve + launched.normalise == []


def test_without_a_gpu_group_norms_are_pytorchs():
    x, weight, bias = torch.randn(3, 2, 6, 4), torch.randn(3, 6), torch.randn(3, 6)
    with torch.no_grad(), Products():
        got = vmap(lambda x, *affine: F.group_norm(x, 3, *affine))(x, weight, bias)
    want = torch.stack([F.group_norm(x[n], 3, weight[n], bias[n]) for n in range(3)])
    torch.testing.assert_close(got, want)


def test_the_kernels_are_for_gpus_without_gradients_and_without_a_compiler_that_looks_on(monkeypatch):
    monkeypatch.setattr(forward, "kernels", object)
    x = torch.ones(1)
    with torch.no_grad():
        assert not forward.usable(x)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert forward.usable(x)
        with graphs.tracing():
            assert not forward.usable(x)
    assert not forward.usable(x)


def test_which_convolutions_write_no_windows(monkeypatch):
    monkeypatch.setattr(forward, "available", lambda t: True)
    before = torch.get_float32_matmul_precision()
    x, weight, same = torch.randn(2, 8, 6, 6), torch.randn(4, 8, 3, 3), Window(3, 3, 1, 1, 1, 1)
    try:
        torch.set_float32_matmul_precision("high")
        assert not convolutions.usable(x, weight, same)  # they take seconds to make
        with using(compile=True):
            assert convolutions.usable(x, weight, same)
            assert not convolutions.usable(x, weight, same._replace(sh=2))
            assert not convolutions.usable(x, weight, same._replace(ph=3))  # its gradient would have negative padding
            assert not convolutions.usable(x.double(), weight.double(), same)
            assert not convolutions.usable(x[:, :3], weight[:, :3], same)
            assert not convolutions.usable(x, weight[:3], same)
            torch.set_float32_matmul_precision("highest")
            assert not convolutions.usable(x, weight, same)
    finally:
        torch.set_float32_matmul_precision(before)
