"""The distance between gradients: by hand, and its slope by finite differences."""

import math

import pytest
import torch

from fedveil.core.layout import Layer, Layout
from fedveil.methods.surrogates.matching import distance

LAYOUT = Layout((Layer("weight", (2, 3), 0, 6), Layer("bias", (2,), 6, 8)))


def test_rows_are_compared_by_themselves_and_a_bias_is_one_row():
    synthetic = torch.tensor([[1.0, 0, 0, 0, 3, 4, 1, 1]])
    real = torch.tensor([[0.0, 2, 0, 0, 6, 8, 1, -1]])
    # rows of the weight: orthogonal (1) and parallel (0), mean 1/2; the bias as one row: orthogonal (1)
    assert distance(LAYOUT, synthetic, real, 0.0, "averaged")[0].tolist() == pytest.approx([1.5])
    # squared difference: 1 + 4, 9 + 16, 0 + 4
    assert distance(LAYOUT, synthetic, real, 0.1, "averaged")[0].tolist() == pytest.approx([1.5 + 0.1 * 34])


def test_convolutions_have_a_row_for_each_output_channel():
    layout = Layout((Layer("conv", (2, 1, 1, 2), 0, 4),))
    found, _ = distance(layout, torch.tensor([[1.0, 0, 1, 0]]), torch.tensor([[1.0, 0, 1, 1]]), 0.0, "averaged")
    assert found.tolist() == pytest.approx([(1 - math.sqrt(0.5)) / 2])


def test_the_papers_distance_sums_the_rows_of_weights_and_leaves_biases_out():
    synthetic = torch.tensor([[1.0, 0, 0, 0, 3, 4, 1, 1]])
    real = torch.tensor([[0.0, 2, 0, 0, 6, 8, 1, -1]])
    # rows of the weight: orthogonal (1) and parallel (0), sum 1
    found, slope = distance(LAYOUT, synthetic, real, 0.0, "paper")
    assert found.tolist() == pytest.approx([1.0])
    assert not slope[0, 6:].any()
    assert distance(LAYOUT, synthetic, real, 0.1, "paper")[0].tolist() == pytest.approx([1 + 0.1 * 34])


def test_without_a_cosine_there_is_the_squared_difference():
    synthetic, real = torch.tensor([[1.0, 0, 0, 0, 3, 4, 1, 1]]), torch.tensor([[0.0, 2, 0, 0, 6, 8, 1, -1]])
    found, slope = distance(LAYOUT, synthetic, real, 0.5, "mse")
    assert found.tolist() == pytest.approx([17.0])
    assert torch.equal(slope, synthetic - real)


def test_clients_do_not_mix():
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 8, generator=draw), torch.randn(5, 8, generator=draw)
    apart = [distance(LAYOUT, a[k : k + 1], b[k : k + 1], 0.1, "averaged") for k in range(5)]
    for together, alone in zip(distance(LAYOUT, a, b, 0.1, "averaged"), zip(*apart, strict=True), strict=True):
        assert torch.allclose(together, torch.cat(alone))


def test_a_gradient_of_zeros_is_at_distance_one_a_layer_and_has_a_finite_slope():
    found, slope = distance(LAYOUT, torch.zeros(1, 8), torch.ones(1, 8), 0.0, "averaged")
    assert found.tolist() == [2.0]
    assert slope.isfinite().all()


def test_a_row_that_is_rounding_beside_the_others_has_no_direction():
    """Such as a convolution's bias before a normalisation, which takes every constant away."""
    rounding = torch.tensor([[1.0, 2, 3, 4, 5, 6, 1e-7, -1e-7]])
    real = torch.tensor([[1.0, 2, 3, 4, 5, 6, 1e-8, 1e-2]])
    found, slope = distance(LAYOUT, rounding, real, 0.0, "averaged")
    assert found.tolist() == pytest.approx([1.0], abs=1e-3)
    assert 1e2 < float(slope[0, 6:].abs().max()) < 2e3  # its own norm would make it ten million


@pytest.mark.parametrize(
    ("mse", "kind", "small"),
    [
        *((mse, "averaged", small) for mse in (0.0, 0.1) for small in (1.0, 1e-6)),
        (0.1, "paper", 1.0),
        (0.1, "mse", 1.0),
    ],
)
def test_its_slope_is_that_of_finite_differences(mse, kind, small):
    """With a row of its own norm, and with one of the smallest norm that counts, which is a constant here: the rows
    above it make it. Entries one by one, in float64."""
    draw = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 3, 8, generator=draw, dtype=torch.float64)
    a[:, 6:] *= small
    step = torch.full((8,), 1e-6, dtype=torch.float64) * torch.tensor([1.0] * 6 + [small] * 2, dtype=torch.float64)
    _, slope = distance(LAYOUT, a, b, mse, kind)
    for entry in range(8) if small == 1 else (6, 7):
        change = torch.zeros(8, dtype=torch.float64)
        change[entry] = step[entry]
        up, down = (distance(LAYOUT, a + sign * change, b, mse, kind)[0] for sign in (1, -1))
        assert torch.allclose(slope[:, entry], (up - down) / (2 * step[entry]), atol=1e-6, rtol=1e-4)
