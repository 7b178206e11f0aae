"""The distance between gradients: by hand, and its slope by finite differences."""

import math

import pytest
import torch

from fedveil.surrogates.matching import distance
from fedveil.task import Layer, Layout

LAYOUT = Layout((Layer("weight", (2, 3), 0, 6), Layer("bias", (2,), 6, 8)))


def test_rows_are_compared_by_themselves_and_a_bias_is_one_row():
    synthetic = torch.tensor([[1.0, 0, 0, 0, 3, 4, 1, 1]])
    real = torch.tensor([[0.0, 2, 0, 0, 6, 8, 1, -1]])
    # rows of the weight: orthogonal (1) and parallel (0), mean 1/2; the bias as one row: orthogonal (1)
    assert distance(LAYOUT, synthetic, real, 0.0).tolist() == pytest.approx([1.5])
    # squared difference: 1 + 4, 9 + 16, 0 + 4
    assert distance(LAYOUT, synthetic, real, 0.1).tolist() == pytest.approx([1.5 + 0.1 * 34])


def test_convolutions_have_a_row_for_each_output_channel():
    layout = Layout((Layer("conv", (2, 1, 1, 2), 0, 4),))
    found = distance(layout, torch.tensor([[1.0, 0, 1, 0]]), torch.tensor([[1.0, 0, 1, 1]]), 0.0)
    assert found.tolist() == pytest.approx([(1 - math.sqrt(0.5)) / 2])


def test_clients_do_not_mix():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 8, generator=draw), torch.randn(5, 8, generator=draw)
    together = distance(LAYOUT, a, b, 0.1)
    assert torch.allclose(together, torch.cat([distance(LAYOUT, a[k : k + 1], b[k : k + 1], 0.1) for k in range(5)]))


def test_a_gradient_of_zeros_is_at_distance_one_a_layer_and_has_a_finite_slope():
    zero = torch.zeros(1, 8, requires_grad=True)
    found = distance(LAYOUT, zero, torch.ones(1, 8), 0.0)
    assert found.tolist() == [2.0]
    (slope,) = torch.autograd.grad(found.sum(), zero)
    assert slope.isfinite().all()


def test_a_row_that_is_rounding_beside_the_others_has_no_direction():
    """Such as a convolution's bias before a normalisation, which takes every constant away."""
    rounding = torch.tensor([[1.0, 2, 3, 4, 5, 6, 1e-7, -1e-7]]).requires_grad_()
    real = torch.tensor([[1.0, 2, 3, 4, 5, 6, 1e-8, 1e-2]])
    found = distance(LAYOUT, rounding, real, 0.0)
    assert found.tolist() == pytest.approx([1.0], abs=1e-3)
    (slope,) = torch.autograd.grad(found.sum(), rounding)
    assert float(slope[0, 6:].abs().max()) < 2e3  # its own norm would make it ten million


@pytest.mark.parametrize("mse", [0.0, 0.1])
def test_its_slope_is_that_of_finite_differences(mse):
    draw = torch.Generator().manual_seed(1)
    a = torch.randn(3, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 8, generator=draw, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a: distance(LAYOUT, a, b, mse), (a,), eps=1e-6, atol=1e-7, rtol=1e-5)
