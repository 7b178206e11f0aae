"""The server's step in arithmetic that NumPy and PyTorch round alike."""

import numpy as np
import pytest
import torch

from fedveil.core.method import State
from fedveil.train.moments import clipped, same_root, stepped
from fedveil.train.optimizers import Moments, ServerOptimizer

D = 50_003


def drawn(scale, seed):
    return torch.randn(D, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "adam"])
@pytest.mark.parametrize("clip", [None, 1e-3, 10.0])
def test_a_step_is_the_same_bits_in_both_libraries_and_the_optimizers(optimizer, clip):
    how = ServerOptimizer(optimizer, 0.00231, momentum=0.83, beta2=0.97, tau=1e-8)
    first = None if optimizer == "plain" else drawn(0.1, 1)
    second = drawn(1e-3, 2).square() if optimizer == "adam" else None
    weights, gradient = drawn(1.0, 3), drawn(0.01, 4) * 10 ** drawn(2.0, 5)
    downhill = -clipped(torch, gradient, clip)
    assert clip is None or float(downhill.abs().max()) <= clip * 1.0001
    sides = [stepped(how, same_root(torch), how.lr, weights, first, second, downhill)]
    held = [None if part is None else part.numpy() for part in (weights, first, second)]
    with np.errstate(over="ignore"):
        sides.append(stepped(how, same_root(np), how.lr, *held, -clipped(np, gradient.numpy(), clip)))
    for one, other in zip(*sides, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (other.dtype == np.float32 and np.array_equal(one.numpy(), other))
    state = State(weights) if first is None else State(weights).put("server", Moments(first, second))
    assert torch.allclose(how.step(state, downhill).weights, sides[0][0], rtol=1e-5, atol=1e-5)
