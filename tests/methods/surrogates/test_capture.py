"""The steps of surrogate methods can be captured as CUDA graphs: tried on a CPU by watching every operation."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fedveil as fv
from fedveil.core import task as task_module
from fedveil.core.seeds import Seed
from fedveil.gpu import graphs, windows
from fedveil.gpu.context import using
from fedveil.gpu.graphs import Loop, compiled
from fedveil.gpu.products import Products
from fedveil.gpu.windows import _Windows
from fedveil.methods.surrogates.feddm import FedDm
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.methods.surrogates.matching import matched
from fedveil.methods.surrogates.sets import Distil
from fedveil.privacy import dpsgd
from fedveil.privacy.dpsgd import DpSgd, _clipped_sum, clipped_sum
from methods.surrogates.small import images_task, stack_of
from toys import Fold, Spread

ATEN = torch.ops.aten
REFUSED = {
    *(ATEN._local_scalar_dense, ATEN.is_nonzero, ATEN.equal),  # the host waits for a number
    *(ATEN.nonzero, ATEN.masked_select, ATEN._unique2, ATEN.unique_dim),  # shapes depend on values
    *(ATEN.lift_fresh, ATEN.lift_fresh_copy),  # a tensor is made on the host
}


class Watch(TorchDispatchMode):
    """Refuses what a graph cannot hold, and notes every operation with the numbers it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in REFUSED, f"{func} cannot be captured"
        if func.overloadpacket in (ATEN.index, ATEN.index_put_):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a mask as index cannot be captured"
        plain = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, int | float | bool)]
        self.seen.append((str(func), plain))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def repeats(monkeypatch):
    """Every step runs under watch, with layers as products as on a GPU; gives the operations of each step."""
    found = []

    def run(self, times):
        if not hasattr(self, "steps"):
            self.steps = []
            found.append(self.steps)
        for _ in range(times):
            with Watch() as watch:
                self._step()
            self.steps.append(watch.seen)

    monkeypatch.setattr(Loop, "run", run)
    monkeypatch.setattr(task_module, "nullcontext", Products)
    return found


SMALL = {"images": 2, "batches": 3, "batch": 8, "steps": 4, "augment": "flip crop scale rotate cutout color"}
METHODS = {
    "fedlap": FedLap(**SMALL, passes=2, model_steps=2, image_lr=1.0),
    "fedlap-dp": FedLap(
        **SMALL, passes=2, model_steps=2, region="constant", weighting="equal", privacy=DpSgd(delta=1e-3), mse=0.0
    ),
    "feddm": FedDm(**{**SMALL, "region": "min"}, draws=2),
}


def answers(task, method):
    return method.distil(stack_of(task), Distil(task.initial, 2 * method.images))


@pytest.mark.parametrize("name", METHODS)
def test_no_step_of_a_client_or_the_server_needs_the_host(name, repeats):
    """And all steps are the same operations with the same numbers, or a replay would differ from the steps."""
    task, method = images_task(), METHODS[name]
    method.optimise(task, task.initial, answers(task, method))
    assert len(repeats) >= 2
    for steps in repeats:
        assert len(steps[0]) > 20
        assert all(seen == steps[0] for seen in steps)


def test_layers_as_products_have_the_same_slopes_and_private_gradients(monkeypatch):
    task, method = images_task(), METHODS["fedlap"]
    draw = torch.Generator().manual_seed(1)
    weights = task.initial + 0.1 * torch.randn(2, task.layout.size, generator=draw)
    images, labels = torch.randn(2, 4, 1, 6, 6, generator=draw), torch.tensor([[0, 0, 1, 1]] * 2)
    rows, mask = torch.arange(32).view(2, 16), torch.ones(2, 16)
    found = []
    for context in (task_module.nullcontext, Products):
        monkeypatch.setattr(task_module, "nullcontext", context)
        goal = clipped_sum(task, weights, task.x[rows], task.y[rows], mask, clip=0.5)
        slope = method.slope(task, weights, images, labels, goal, torch.zeros(2))
        found.append((goal, slope))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)
        assert float(one.abs().max()) > 1e-3


@pytest.mark.parametrize("compile", ["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_program_does_with_other_numbers_what_the_step_does(compile, monkeypatch):
    """Layers are products of windows as on a GPU. Tracing is most of what can go wrong; compiling takes a minute."""
    monkeypatch.setattr(task_module, "nullcontext", Products)
    monkeypatch.setattr(windows, "kernels", lambda: SimpleNamespace(fold=Fold(), spread=Spread()))
    if compile == "traced":
        monkeypatch.setattr(torch, "compile", lambda operations, dynamic: operations)
    task, draw = images_task(), torch.Generator().manual_seed(1)

    def numbers():
        weights = task.initial + 0.1 * torch.randn(2, task.layout.size, generator=draw)
        images, goal = torch.randn(2, 4, 1, 6, 6, generator=draw), torch.randn(weights.shape, generator=draw)
        rows = torch.randint(len(task.x), (2, 16), generator=draw)
        mask = torch.bernoulli(torch.full((2, 16), 0.5), generator=draw)
        labels = torch.randint(2, (2, 4), generator=draw)
        records = (weights, task.x[rows], task.y[rows], mask)
        return (weights, images, labels, goal), records, records, records[:3]

    def losses(*given):
        with torch.no_grad():
            return (task.stacked_losses(*given),)

    steps = (partial(matched, task, 0.1, "averaged"), partial(_clipped_sum, task, 0.5), task.gradient, losses)
    for step, *given in zip(steps, numbers(), numbers(), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(windows, "windows", _Windows.of)
            program = compiled(step, *given[0])
        assert program is not step
        for one, other in zip(step(*given[1]), program(*given[1]), strict=True):
            assert float((one - other).norm()) < 1e-3 * float(one.norm())


def test_views_of_single_records_can_be_compiled(monkeypatch):
    """Dimensions of size 1 have any stride, so that a view may be one of the tensors at hand and not of those that the
    compiler supposes."""
    monkeypatch.setattr(task_module, "nullcontext", Products)
    monkeypatch.setattr(torch, "compile", lambda operations, dynamic: lambda *given: supposed(operations, *given))

    def supposed(operations, *given):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return operations(*map(mode.from_tensor, given))

    task, rows = images_task(convolutions=1), torch.arange(8).view(2, 4)
    given = task.initial.expand(2, -1), task.x[rows], task.y[rows], torch.ones(2, 4)
    (found,) = compiled(partial(_clipped_sum, task, 0.5), *given)(*given)
    assert found.shape == given[0].shape


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (
            METHODS["fedlap"],  # of real batches and of images, by clients and, for all clients, by the server
            {("gradient", 2, 8), ("image step", 2, 4), ("gradient", 2, 4), ("losses", 2, 16), ("gradient", 1, 8)},
        ),
        (METHODS["fedlap-dp"], {("private gradient",), ("image step", 2, 4), ("gradient", 1, 8)}),
        (fv.FedAvg(), {("gradient", 2, 16)}),
        (fv.FedAvg(privacy=DpSgd(delta=1e-3)), {("private gradient",)}),
    ],
    ids=["fedlap", "fedlap-dp", "fedavg", "dp-fedavg"],
)
def test_the_heaviest_steps_can_be_compiled(method, steps, monkeypatch):
    """Each for so many clients with so many images; how many records a private one has is drawn."""
    task, seen, call = images_task(), set(), graphs.Fused.__call__

    def watched(self, weights, images, *more):
        seen.add((self._name, *(() if "private" in self._name else images.shape[:2])))
        return call(self, weights, images, *more)

    monkeypatch.setattr(graphs.Fused, "__call__", watched)
    fv.run(task, method, rounds=1, cohort=2)
    assert seen == steps


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    def broken(operations, dynamic):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match="^a step runs uncompiled: no compiler$"):
        program = compiled(double := lambda x: (2 * x,), torch.ones(2))
    assert program is double


def test_pieces_of_one_size_have_the_same_private_gradient(monkeypatch):
    task, how = images_task(), DpSgd(noise=0.5, delta=1e-3)
    weights, found, seen = task.initial.expand(2, -1), [], []
    whole = dpsgd._clipped_sum
    monkeypatch.setattr(
        dpsgd, "_clipped_sum", lambda *given, **more: seen.append(given[-1].shape[1]) or whole(*given, **more)
    )
    monkeypatch.setattr(dpsgd, "PIECE", 3)
    for on in (False, True):
        monkeypatch.setattr(task, "_fused", {})
        with using(compile=on):
            gradient = how.gradients(stack_of(task), weights, 8, [(2, [Seed.root(k) for k in range(2)])])
            found.append(torch.stack([gradient(), gradient()]))
    assert set(seen[2:]) == {3}
    assert torch.allclose(*found, atol=1e-6)
