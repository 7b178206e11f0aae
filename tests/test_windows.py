"""Windows by kernel and by PyTorch are the same, and so are their derivatives: on a GPU, or in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from torch.func import grad, vmap

from fedveil import windows as w
from fedveil.windows import Window

SHAPES = [
    (2, 2, 5, 4, Window(3, 3, 1, 1, 1, 1)),
    (2, 1, 6, 6, Window(3, 2, 2, 1, 1, 0)),
    (3, 2, 7, 7, Window(1, 1, 2, 2, 0, 0)),
]


def compare(device):
    torch.manual_seed(0)
    for batch, channels, height, width, window in SHAPES:
        x = torch.randn(channels, batch, height, width, dtype=torch.float16, device=device).transpose(0, 1)
        assert torch.equal(w._Windows.of(x, window).cpu(), w.windows(x.cpu(), window))
        xs = torch.randn(2, 2, batch, channels, height, width, dtype=torch.float64, device=device)
        stacked = vmap(vmap(lambda t, window=window: w._Windows.of(t, window)))(xs)
        assert torch.equal(stacked[1, 0].cpu(), w.windows(xs[1, 0].cpu(), window))

        def slope(made, xs, window=window):
            inner = grad(lambda t: (made(t, window) ** 3).sum())
            return vmap(grad(lambda t: (inner(t) ** 2).sum()))(xs)

        assert torch.allclose(slope(w._Windows.of, xs[0]).cpu(), slope(w.windows, xs[0].cpu()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    assert w._kernels()
    compare("cuda")


def test_in_the_interpreter():
    pytest.importorskip("triton")
    code = "import sys; sys.path.insert(0, 'tests'); import test_windows as t; t.w.BLOCK = 64; t.compare('cpu')"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def test_the_adjoint_of_windows_is_what_sums_them():
    """⟨windows(x), y⟩ = ⟨x, fold(y)⟩, by PyTorch's own derivative."""
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64, requires_grad=True)
    window = Window(3, 3, 2, 1, 1, 1)
    parts = w.windows(x, window)
    assert parts.shape == (27, 2 * 3 * 5)
    y = torch.randn_like(parts)
    (back,) = torch.autograd.grad(parts, x, y)
    assert torch.allclose((parts * y).sum(), (x * back).sum())
    assert torch.equal(parts[4].view(2, 3, 5), x[:, 0, ::2])  # the window's middle, which padding does not move
