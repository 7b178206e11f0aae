"""Traces of steps on a CPU give what the steps give, bit for bit."""

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedveil as fv
from fedveil.data import from_tensors
from fedveil.gpu import graphs, trace
from fedveil.gpu.context import using
from fedveil.gpu.graphs import Fused, one_thread
from models.zoo import KINDS, task_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace at the second call, and not when it pays."""
    monkeypatch.setattr(graphs, "CALLS", 1)
    monkeypatch.setattr(graphs, "SECONDS", 0.0)


def gradient_of(task: fv.Task) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]:
    """The gradient that local training takes, and a maker of its arguments for some clients and a seed."""
    own, statistics = task.norms.values.tensor_split([task.norms.trained])

    def given(clients: int, seed: int) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(seed)
        w = torch.cat([task.initial, own]).expand(clients, -1)
        w = w + 0.1 * torch.randn(w.shape, generator=draw) * w.abs().mean()
        rows = torch.randint(0, len(task.x), (clients, 4), generator=draw)
        mask = (torch.arange(4) < torch.randint(1, 5, (clients, 1), generator=draw)).float()
        batch = task.x[rows], task.y[rows], mask
        if not task.has_training_mode:
            return w, *batch
        return w, statistics.expand(clients, -1).clone(), *batch, torch.randint(0, 2**40, (clients,), generator=draw)

    return (task.train_gradient if task.has_training_mode else task.gradient), given


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) and p.stride() == q.stride() for p, q in zip(a, b, strict=True))


SLOW = [name for name in KINDS if name.startswith("ResNet") and "group" not in name]


@pytest.mark.filterwarnings("ignore:this model cannot be stacked")
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS])
def test_every_kind_of_model_has_the_gradient_of_the_eager_step(name: str, clients: int) -> None:
    function, given = gradient_of(task_of(name))
    program = trace.program(function, *given(clients, 0))
    assert (program is function) == (name == "GRU")  # which writes in place
    for seed in range(3):
        batch = given(clients, seed)
        assert same(program(*batch), function(*batch))


class Branches(nn.Module):
    """A model whose layers depend on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.sum()) > 0 else self.b(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (Branches()(x),),
        lambda x: (x * float(x.max()),),
        lambda x: (x[x > 0],),
        lambda x: (x + torch.rand_like(x),),
        lambda x: (x.clone().relu_(),),
        lambda x: (torch.from_numpy(x.numpy() * 2),),
    ],
)
def test_what_may_differ_from_call_to_call_is_not_traced(function: Callable[..., tuple[Tensor, ...]]) -> None:
    assert trace.program(function, torch.ones(2, 5)) is function


def test_a_trace_with_another_result_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def pooled(x: Tensor) -> tuple[Tensor, ...]:
        return (F.avg_pool2d(x, 2),)

    x = torch.randn(2, 3, 4, 4)
    assert trace.program(pooled, x) is not pooled
    monkeypatch.setattr(trace, "mean_tiles", lambda x, kh, kw: F.avg_pool2d(x, kh) + 1e-6)
    assert trace.program(pooled, x) is pooled


def test_no_result_is_an_argument_that_the_caller_may_overwrite() -> None:
    def copied(x: Tensor) -> tuple[Tensor, ...]:
        return x.clone(), (2 * x).clone()

    x = torch.ones(3)
    program = trace.program(copied, x)
    assert program is not copied
    first, _ = program(x)
    first.add_(1)
    assert x.tolist() == [1, 1, 1]


def operators(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> list[object]:
    """What a trace calls, without its views."""
    from torch.fx.experimental.proxy_tensor import make_fx

    operations = make_fx(function, tracing_mode="fake")(*tensors)
    trace.simplify(operations)
    called = [node.target for node in operations.graph.nodes if node.op == "call_function"]
    return [target for target in called if target is not torch.as_strided]


def test_a_view_of_a_view_is_one_view_and_idle_copies_are_left_out() -> None:
    def viewed(x: Tensor) -> tuple[Tensor, ...]:
        y = (x + 1).clone()
        return (y.view(2, 6).T.unsqueeze(0).detach()[:, 1:].exp(),)

    x = torch.randn(3, 4)
    assert operators(viewed, x) == [aten.add.Tensor, aten.exp.default]
    assert same(trace.program(viewed, x)(x), viewed(x))


def test_a_product_that_is_transposed_and_copied_is_computed_transposed() -> None:
    def product(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (torch.bmm(a, b).transpose(1, 2).contiguous(),)

    given = torch.randn(2, 1, 3), torch.randn(2, 3, 1)  # one number each: no order to sum in but one
    wide = torch.randn(2, 7, 1), torch.randn(2, 1, 9)
    for a, b in (given, wide):
        assert same(trace.program(product, a, b)(a, b), product(a, b))
    assert operators(product, *wide) == [aten.bmm.default]


def test_a_product_that_would_round_differently_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_round_alike", lambda *factors: False)
    a, b = torch.randn(2, 7, 1), torch.randn(2, 1, 9)
    kept = operators(lambda a, b: (torch.bmm(a, b).transpose(1, 2).contiguous(),), a, b)
    assert kept == [aten.bmm.default, aten.clone.default]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("height", "width"), [(2, 2), (4, 6), (6, 4), (14, 14)])
def test_pools_give_what_the_kernels_give(height: int, width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(height * width)
    pictures = torch.randn(3, 5, height, width, generator=draw, dtype=dtype)
    for x in (pictures, pictures.relu(), (2 * pictures).round(), torch.zeros_like(pictures), -pictures.relu()):
        wanted, found = aten.max_pool2d_with_indices(x, [2, 2], [2, 2]), trace.max_tiles(x)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        assert torch.equal(trace.mean_tiles(x, 2, 2), F.avg_pool2d(x, 2))
        assert torch.equal(trace.mean_tiles(x, 2, 1), F.avg_pool2d(x, (2, 1)))
        gradient = F.avg_pool2d(pictures, 2)
        spread = aten.avg_pool2d_backward(gradient, x, [2, 2], [2, 2], [0, 0], False, True, None)
        assert torch.equal(trace.spread_tiles(gradient, 2, 2), spread)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 2},
        {"kernel_size": 2, "stride": 1},
        {"kernel_size": 2, "padding": 1},
        {"kernel_size": 3},
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        {"kernel_size": 1},
        {"kernel_size": (4, 2)},
    ],
)
@pytest.mark.parametrize("size", [8, 7])
def test_pools_of_all_settings_are_traced(
    pool: Callable[..., Tensor], settings: dict, size: int, dtype: torch.dtype
) -> None:
    def pooled(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = pool(x, **settings)
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    x = torch.randn(2, 3, size, size).relu().to(dtype)
    program = trace.program(pooled, x)
    assert program is not pooled
    for given in (x, x.roll(1, -1)):
        assert same(program(given), pooled(given))


def divided_by(divisor: int, x: Tensor) -> tuple[Tensor, ...]:
    return (F.avg_pool2d(x, 2, divisor_override=divisor),)


def test_other_divisors_and_dilations_stay_with_the_kernels() -> None:
    x = torch.randn(2, 3, 8, 8)
    for divisor in (1, 3):
        divided = operators(partial(divided_by, divisor), x)
        assert divided == [aten.avg_pool2d.default]
    assert trace.max_tiles not in operators(lambda x: (F.max_pool2d(x, 2, dilation=2),), x)


def test_a_function_is_traced_once_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 0.5)
    monkeypatch.setattr(graphs.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(graphs, "CALLS", 3)
    calls: list[Tensor] = []

    def doubled(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(x)
        return (2 * x,)

    fused, x = Fused("doubled", doubled), torch.ones(4)
    for _ in range(3):
        fused(x)
    traced = len(calls)
    assert traced > 3  # the last two by the tracer, and to compare with it
    for _ in range(5):
        assert fused(x)[0].tolist() == [2] * 4
    assert len(calls) == traced
    fused(torch.ones(5))
    fused(torch.ones(8)[4:])  # other shapes and offsets are other programs
    fused(x.clone().requires_grad_())
    with using(capture=False):
        fused(x)
    assert len(calls) == traced + 4


def test_a_function_that_cannot_be_traced_is_tried_once(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []
    monkeypatch.setattr(trace, "program", lambda function, *tensors: tries.append(function) or function)
    fused = Fused("noisy", lambda x: (torch.rand_like(x),))
    for _ in range(4):
        fused(torch.ones(2))
    assert len(tries) == 1


def digits_task(model: nn.Module) -> fv.Task:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 28, 28, generator=draw), torch.arange(60) % 10
    split = fv.Split(np.arange(60), np.cumsum([0, 25, 10, 7, 18]), "ragged", max_records=25)
    return fv.Task(model, from_tensors(x, y, x, y), split)


def small() -> nn.Module:
    pooled = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.Dropout(0.2)]
    return nn.Sequential(*pooled, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, 10))


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        (small, partial(fv.engines.LocalEngine)),
        (lambda: fv.models.build("lenet5", (1, 28, 28), 10), partial(fv.engines.LocalEngine, workers=2)),
    ],
)
def test_runs_end_with_the_same_weights_and_the_same_ledger(
    model: Callable[[], nn.Module], engine: Callable[[], fv.engines.LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    task, method = digits_task(model()), fv.FedAvg(local=fv.LocalTraining(epochs=2, batch=8, lr=0.05))
    with using(capture=False):
        eager = fv.run(task, method, rounds=2, cohort=4, engine=engine())
    monkeypatch.setattr(graphs, "CALLS", 1)
    monkeypatch.setattr(graphs, "SECONDS", 0.0)
    made: list[bool] = []
    real = trace.program

    def counted(function: trace.Function, *tensors: Tensor) -> trace.Function:
        found = real(function, *tensors)
        made.append(found is not function)
        return found

    monkeypatch.setattr(trace, "program", counted)
    traced = fv.run(task, method, rounds=2, cohort=4, engine=engine())
    assert made
    assert all(made)
    assert torch.equal(traced.weights, eager.weights)
    assert [row.metrics for row in traced.ledger.rows] == [row.metrics for row in eager.ledger.rows]


def test_workers_wait_for_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that went on without it would round differently, and not in every run."""
    made: list[int] = []

    def compiled(function: trace.Function, *tensors: Tensor) -> trace.Function:
        time.sleep(0.05)
        made.append(len(tensors))
        return lambda x: (x + 1,)

    monkeypatch.setattr(graphs, "compiled", compiled)
    fused = Fused("step", lambda x: (x,))

    def call(_: int) -> float:
        with using(compile=True):
            return float(fused(torch.zeros(1))[0])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(8))) == [1.0] * 8
    assert made == [1]


@pytest.mark.slow  # it runs a C++ compiler
def test_a_gradient_can_be_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    task = task_of("MLP with dropout")
    function, given = gradient_of(task)
    fused = Fused("train gradient", function)
    with using(compile=True):
        found = fused(*given(3, 0))
    for a, b in zip(found, function(*given(3, 0)), strict=True):
        torch.testing.assert_close(a, b)
    (program,) = fused._programs.values()
    assert program is not function
