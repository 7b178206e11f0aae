"""Kernels and PyTorch give the same, those that are differentiated also in their derivatives: on a GPU, or in Triton's
interpreter."""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fedveil as fv
from fedveil.core import task as task_module
from fedveil.core.directions import Directions
from fedveil.data import from_tensors
from fedveil.gpu import convolutions, forward, graphs, norms, products
from fedveil.gpu import windows as w
from fedveil.gpu.graphs import compiled
from fedveil.gpu.products import Products
from fedveil.gpu.windows import Window
from fedveil.methods.surrogates.matching import matched
from fedveil.privacy.dpsgd import _clipped_sum
from toys import Fold, Spread

SHAPES = [
    (2, 2, 5, 4, Window(3, 3, 1, 1, 1, 1)),
    (2, 1, 6, 6, Window(3, 2, 2, 1, 1, 0)),
    (3, 2, 7, 7, Window(1, 1, 2, 2, 0, 0)),
]
CONVOLUTIONS = [  # channels in and out, height, width
    (3, 5, 7, 6, Window(3, 3, 1, 1, 1, 1)),
    (16, 20, 6, 5, Window(3, 3, 2, 2, 1, 1)),
    (1, 16, 9, 8, Window(5, 5, 1, 1, 2, 2)),
    (6, 3, 8, 7, Window(2, 3, 1, 2, 0, 1)),
    (128, 33, 4, 4, Window(3, 3, 1, 1, 1, 1)),
    (32, 130, 5, 5, Window(1, 1, 2, 2, 0, 0)),
]
NORMS = [  # channels, groups, a picture, and how much of it a program holds
    (torch.float16, 8, 2, (7, 5), 16384),
    (torch.float16, 6, 1, (3, 5), 64),
    (torch.float32, 6, 2, (9,), 16),
    (torch.float64, 5, 1, (3, 3), 16384),
]
CLOSE = {  # half a unit in the last place, and the rounding of a sum that is not in half precision
    torch.float16: {"rtol": 5.5e-4, "atol": 2e-5},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
}


def compare(device):
    torch.manual_seed(0)
    if device == "cpu":
        forward.usable = lambda x: not torch.is_grad_enabled()
        norms.usable = lambda *_: True
    compare_windows(device)
    compare_long_sums(device)
    compare_slopes_of_convolutions(device)
    compare_slopes_of_norms(device)
    compare_steps(device)
    with torch.no_grad():
        compare_convolutions(device)
        compare_directions(device)
        compare_norms(device)


def compare_windows(device):
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


def compare_convolutions(device):
    for dtype, settings in ((torch.float16, CONVOLUTIONS), (torch.float32, CONVOLUTIONS[:3])):
        for channels, outputs, height, width, window in settings:
            _, _, sh, sw, ph, pw = window
            entries = channels * window.kh * window.kw
            flat = (torch.randn(2, 3, outputs * (entries + 1), device=device) / entries**0.5).to(dtype)
            weight, bias = flat.split((outputs * entries, outputs), -1)  # as they lie in a model's
            weight = weight.unflatten(-1, (outputs, channels, window.kh, window.kw))
            shared = torch.randn(2, channels, 2, height, width, device=device).to(dtype).transpose(1, 2)

            def layer(x, weight, *bias, window=window):
                return forward.conv2d(x, weight, *bias or [None], window)

            def plain(x, weight, *bias, steps=(sh, sw), padding=(ph, pw)):
                return F.conv2d(x, weight, *bias or [None], steps, padding)

            agree(layer, plain, shared, weight, bias, shared=True)
            agree(layer, plain, shared[:, None] * torch.arange(1, 4, device=device).view(-1, 1, 1, 1, 1), weight)


def compare_directions(device):
    keys = torch.tensor([3, -5, 2**62 + 12345], device=device)
    for size in (7, 2051):
        drawn = Directions("gaussian", size).rows(torch, keys, 2, 3)
        torch.testing.assert_close(forward.gaussians(keys, 2, 3, size), drawn, rtol=1e-5, atol=1e-5)


def compare_slopes_of_convolutions(device):
    """Value, first and second derivatives against PyTorch's in float64."""
    settings = [(1, 6, 7, 6, Window(5, 5, 1, 1, 2, 2)), (32, 17, 5, 4, Window(3, 2, 1, 1, 0, 1))]
    for channels, outputs, height, width, window in settings:
        x = torch.randn(2, channels, 3, height, width, device=device).transpose(1, 2)
        weight = torch.randn(2, outputs, channels, window.kh, window.kw, device=device) / channels

        def plain(x, weight, padding=window[4:]):
            return F.conv2d(x, weight, None, 1, padding)

        ours = slopes(lambda x, weight, window=window: convolutions.conv2d(x, weight, window), x, weight)
        for one, other in zip(ours, slopes(plain, x.double().cpu(), weight.double().cpu()), strict=True):
            assert float((one.cpu() - other).norm()) < 1e-5 * float(other.norm())


def compare_long_sums(device):
    for o, i, n in ((3, 2, 4100), (130, 17, 2048), (16, 70, 100)):
        y, x = torch.randn(2, 2, o, n, device=device), torch.randn(2, 2, n, i, device=device).mT
        for precision, close in (("highest", 1e-5), ("high", 5e-3)):
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(precision)
            got = products.parts(y, x).sum(-3)
            torch.set_float32_matmul_precision(before)
            want = y.double() @ x.double().mT
            assert float((got - want).abs().max()) < close * n**0.5


def compare_slopes_of_norms(device):
    """Value, first and second derivatives by all of them, in float64."""
    settings = [
        (6, 2, (3, 5), False),
        (4, 4, (4, 4), False),
        (6, 2, (4, 6), True),
        (4, 4, (8, 8), True),
        (5, 1, (2, 4), True),
    ]
    for channels, groups, shape, pooled in settings:
        x = 3 + torch.randn(2, channels, 3, *shape, dtype=torch.float64, device=device)
        x, affine = x.transpose(1, 2), torch.randn(3, 2, channels, dtype=torch.float64, device=device)
        for given in ((x, *affine), (x, *affine[:2])):  # with and without an offset

            def kernel(x, weight, bias, *offset, groups=groups, pooled=pooled):
                return norms.group_norm(x, groups, weight, bias, 1e-5, pooled, *offset)

            def plain(x, weight, bias, *offset, groups=groups, pooled=pooled):
                x = x + offset[0][:, None, None] if offset else x
                result = F.group_norm(x, groups, weight, bias)
                return F.avg_pool2d(result.relu(), 2) if pooled else result

            for ours, theirs in zip(slopes(kernel, *given), slopes(plain, *given), strict=True):
                torch.testing.assert_close(ours, theirs)
    x = torch.full((1, 2, 4, 4), torch.nan, device=device)
    assert norms.group_norm(x, 2, None, None, 1e-5, True).isnan().all()


def slopes(layer, *given):
    """What a stack of a layer gives, its derivatives, the derivatives of these, and the first ones found by `grad`."""
    given = [t.detach().requires_grad_() for t in given]
    out = vmap(layer)(*given).tanh()
    first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in first), given)
    inside = vmap(grad(lambda *each: layer(*each).tanh().square().sum(), tuple(range(len(given)))))
    return out, *first, *second, *inside(*(t.detach() for t in given))


def compare_steps(device):
    """FedLAP's steps as a stack, eager and as a compiler sees them, against a client at a time."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.ReLU(), nn.AvgPool2d(2)]
    layers += [nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
    x, y = torch.randn(20, 1, 8, 8), torch.arange(20) % 3
    data = from_tensors(x, y, x, y)
    split = fv.split("iid", data, 2, fv.Seed.root(0))
    task = fv.Task(nn.Sequential(*layers, nn.Linear(24, 3)), data, split, device=device)
    weights = task.initial + 0.1 * torch.randn(2, task.layout.size, device=device)
    goal, points, labels = torch.randn_like(weights), task.x.unflatten(0, (2, 10)), task.y.unflatten(0, (2, 10))
    mask = torch.ones(2, 10, device=device)
    steps = (
        (partial(matched, task, 0.1, "averaged"), (weights, points, labels, goal)),
        (partial(_clipped_sum, task, 0.5), (weights, points, labels, mask)),
        (task.gradient, (weights, points, labels, mask)),
    )
    for step, given in steps:
        alone = [step(*(t[k : k + 1] for t in given)) for k in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                patch.setattr(task_module, "nullcontext", Products)
                patch.setattr(w, "windows", w._Windows.of)
                patch.setattr(torch, "compile", lambda operations, dynamic: operations)  # which takes a minute
            stacked, program = step(*given), compiled(step, *given)(*given)
        for one, other, each in zip(stacked, program, zip(*alone, strict=True), strict=True):
            assert float((one - torch.cat(each)).norm()) < 1e-3 * float(one.norm())
            assert float((other - torch.cat(each)).norm()) < 1e-3 * float(one.norm())


def compare_norms(device):
    for dtype, channels, groups, shape, entries in NORMS:
        x = 3 + torch.randn(2, 3, channels, 2, *shape, device=device).to(dtype).transpose(2, 3)
        weight, bias = torch.randn(2, 2, 3, channels, device=device).to(dtype)

        def plain(x, *affine, groups=groups):
            return F.group_norm(x, groups, *affine)

        def layer(*tensors, plain=plain):
            with Products():
                return plain(*tensors)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(norms, "ENTRIES", entries)
            agree(layer, plain, x, weight, bias)
            agree(layer, plain, x[:, 0], weight, shared=True)
            agree(layer, plain, x)


def agree(layer, plain, x, *others, shared=False):
    """`layer` of two groups of three models, stacked or not, is what `plain` is in float64, and repeats bit for bit."""
    over = vmap(layer, (None if shared else 0, *[0] * len(others)))
    got = vmap(over)(x, *others)
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    assert not x.is_cuda or torch.equal(got, vmap(over)(x, *others))
    group = over(x[1], *(t[1] for t in others))
    last = [x[1] if shared else x[1, 2], *(t[1, 2] for t in others)]
    for g, k, result in ((0, 1, got[0, 1]), (1, 0, got[1, 0]), (1, 1, group[1]), (1, 2, layer(*last))):
        one = [x[g] if shared else x[g, k], *(t[g, k] for t in others)]
        want = plain(*(t.double().cpu() for t in one)).to(x.device)
        torch.testing.assert_close(result.double(), want, **CLOSE[x.dtype])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore::UserWarning", "error:a step runs uncompiled")  # the compiler warns of its own
def test_on_a_gpu():
    assert w.kernels()
    compare("cuda")


def test_in_the_interpreter():
    pytest.importorskip("triton")
    code = "import test_windows as t; t.w.BLOCK = 64; t.compare('cpu')"
    paths = os.pathsep.join(["tests", "tests/gpu", os.environ.get("PYTHONPATH", "")])
    settings = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], check=True, env=settings)


@pytest.mark.parametrize("window", [Window(3, 3, 1, 1, 1, 1), Window(5, 3, 2, 2, 0, 2), Window(1, 1, 2, 1, 0, 0)])
def test_windows_are_those_of_pytorch(window):
    x = torch.randn(3, 2, 7, 6, generator=torch.Generator().manual_seed(1))
    size, step, padding = window[:2], window[2:4], window[4:]
    expected = F.unfold(x, size, padding=padding, stride=step).transpose(0, 1).flatten(1)
    assert torch.equal(w.windows(x, window), expected)


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


@pytest.mark.parametrize("how", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def test_while_a_compiler_looks_on_windows_are_kernels(how, monkeypatch):
    """Second derivatives of stacked windows: those of slices, with one operator for each copy or sum of windows."""
    monkeypatch.setattr(w, "kernels", lambda: SimpleNamespace(fold=Fold(), spread=Spread()))
    window, draw = Window(3, 3, 1, 1, 1, 1), torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 2, 5, 4, generator=draw, dtype=torch.float64)

    def slope(made, x):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad((vmap(made)(x) ** 3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    with graphs.tracing():
        program = make_fx(lambda x: slope(lambda t: w._Windows.of(t, window), x), tracing_mode="fake")(x)
    operators = [node.target for node in program.graph.nodes]
    assert operators.count(torch.ops.fedveil.folded.default) == 2
    assert operators.count(torch.ops.fedveil.shown.default) == 2
    assert not any("slice" in str(target) for target in operators)
    program = torch.compile(program, dynamic=False) if how == "compiled" else program
    torch.testing.assert_close(program(x), slope(lambda t: w.slices(t, window), x))
