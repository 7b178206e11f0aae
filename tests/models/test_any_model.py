"""Models of every kind × what methods need of them: a stack of ragged clients is each client alone, and PyTorch's own
numbers, in float64; or a method refuses the model and gives the reason."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedveil as fv
from fedveil.core.setup import init_state
from fedveil.core.structure import inputs_of
from fedveil.data import from_tensors
from models import models_by_methods, zoo

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
RATE = 0.1
DP = fv.DpSgd(noise=1.0, clip=1.0, delta=1e-3)
PRIVATE = fv.FedAvg(privacy=DP)


class Batch(NamedTuple):
    """Weights [3, d + p], statistics [3, s], records [3, 4, …], mask [3, 4], keys [3] of three clients.

    A client's weights, d shared and p of its own batch norm layers, lie in one row.
    """

    w: Tensor
    statistics: Tensor
    x: Tensor
    y: Tensor
    mask: Tensor
    keys: Tensor

    def of(self, client: int) -> Batch:
        """One client's, as a stack of one without padding."""
        n = zoo.SIZES[client]
        cut = (t[client : client + 1, :n] for t in (self.x, self.y, self.mask))
        return Batch(
            self.w[client : client + 1], self.statistics[client : client + 1], *cut, self.keys[client : client + 1]
        )


@cache
def task_of(name: str) -> fv.Task:
    """A task in float64."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this model cannot be stacked")
        task = zoo.task_of(name)
    for pure in (task._pure, task._in_training):
        pure._model.double()
        pure._local = threading.local()  # where a thread has its copy
    task.initial, task.norms = task.initial.double(), task.norms.at(task.norms.values.double())
    task.x, task.y = (t.double() if t.is_floating_point() else t for t in (task.x, task.y))
    return task


@cache
def batch_of(name: str) -> Batch:
    """Weights that differ by client, so that none can stand for another."""
    task, draw = task_of(name), torch.Generator().manual_seed(5)
    own, statistics = task.norms.values.expand(3, -1).tensor_split([task.norms.trained], 1)
    w = torch.cat([task.initial.expand(3, -1), own], 1)
    index, mask = (torch.from_numpy(each) for each in task.rows(range(3)).padded())
    w = w + 0.05 * torch.randn(w.shape, generator=draw, dtype=w.dtype)
    return Batch(w, statistics.contiguous(), task.x[index], task.y[index], mask.double(), torch.arange(3))


class Plain:
    """A model by PyTorch alone, in float64, in the modes that a task has it in."""

    def __init__(self, name: str, training: bool) -> None:
        self.task, self.model = task_of(name), zoo.model_of(name).double().train(training)
        self.inputs = inputs_of(self.task.data.structure, self.model)
        for layer in self.model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not self.task.norms.policy:
                layer.eval()

    def losses(self, own: Batch) -> tuple[Tensor, Tensor]:
        """Losses [B] and new running statistics [s] of one client."""
        d, norms = self.task.layout.size, self.task.norms
        held = norms.split(torch.cat([own.w[0, d:], own.statistics[0]]))
        held |= {n: held[n].detach().clone() for n in norms.statistics}  # they are changed in place
        given = self.task.layout.split(own.w[0, :d]) | held
        args, kwargs = self.inputs(own.x[0])
        with sdpa_kernel(SDPBackend.MATH):
            out = functional_call(self.model, given, args, kwargs)
        after = [given[n].flatten() for n in norms.statistics]
        return self.task.loss(getattr(out, "logits", out), own.y[0]), torch.cat([own.statistics[0][:0], *after])


def trained(task: fv.Task, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weights [C, d + p] and running statistics [C, s] after a step of local training."""
    if not task.has_training_mode:
        gradient, _ = task.gradient(batch.w, batch.x, batch.y, batch.mask)
        return batch.w - RATE * gradient, batch.statistics
    gradient, _, statistics = task.train_gradient(*batch)
    return batch.w - RATE * gradient, statistics


def by_pytorch(name: str, own: Batch, training: bool) -> tuple[Tensor, Tensor]:
    """The same for one client, [d + p] and [s]."""
    own = own._replace(w=own.w.clone().requires_grad_())
    losses, statistics = Plain(name, training).losses(own)
    (gradient,) = torch.autograd.grad(losses.mean(), own.w)
    return (own.w - RATE * gradient).detach()[0], statistics


@pytest.mark.parametrize("name", zoo.KINDS)
def test_a_step_of_a_ragged_stack_is_the_step_of_each_client(name):
    task, batch = task_of(name), batch_of(name)
    assert task.stackable == (name != "GRU")
    together = trained(task, batch)
    assert not torch.allclose(together[0], batch.w, rtol=1e-4)
    for client in range(3):
        own = batch.of(client)
        for found, alone in zip(together, trained(task, own), strict=True):
            torch.testing.assert_close(found[client], alone[0], **CLOSE)
        if not task.noisy:
            for found, expected in zip(together, by_pytorch(name, own, training=True), strict=True):
                torch.testing.assert_close(found[client], expected, **CLOSE)


@pytest.mark.parametrize("name", [name for name in zoo.KINDS if "dropout" in name or "BERT" in name or "GPT" in name])
def test_a_model_that_draws_random_numbers_has_pytorchs_gradients_without_them(name):
    task, batch = task_of(name), batch_of(name)
    assert task.noisy
    gradient, _ = task.gradient(batch.w, batch.x, batch.y, batch.mask)
    for client in range(3):
        expected, _ = by_pytorch(name, batch.of(client), training=False)
        torch.testing.assert_close(batch.w[client] - RATE * gradient[client], expected, **CLOSE)


def refused(name: str, method: fv.Method, reason: str) -> bool:
    """Whether a method refuses a task because its batch norm layers are trained; if so, its sentence has the reason."""
    task = task_of(name)
    if not task.norms.policy:
        return False
    with pytest.raises(
        ValueError, match=f"batch norm layers that are {task.norms.policy}: .*{reason}.*; set batch_norm"
    ):
        init_state(task, method, fv.CohortSampler(size=3))
    return True


@pytest.mark.parametrize("name", zoo.KINDS)
def test_a_gradient_of_each_record_is_that_of_the_record_alone(name):
    if refused(name, PRIVATE, "(no clip bounds|no record's gradient can be clipped)"):
        return
    task, batch = task_of(name), batch_of(name)
    records = 4
    w = batch.w.repeat_interleave(records, 0)
    x, y = (t.flatten(0, 1)[:, None] for t in (batch.x, batch.y))
    keys, ones = torch.arange(len(w)), w.new_ones(len(w), 1)
    drawn, _ = task.gradient(w, x, y, ones, keys)
    plain, _ = task.gradient(w, x, y, ones)
    for i in range(0, len(w), 3):
        own = slice(i, i + 1)
        torch.testing.assert_close(drawn[own], task.gradient(w[own], x[own], y[own], ones[own], keys[own])[0], **CLOSE)
        one = Batch(w[own], batch.statistics[:1], x[own], y[own], ones[own], keys[own])
        expected, _ = by_pytorch(name, one, training=False)
        torch.testing.assert_close(w[i] - RATE * plain[i], expected, **CLOSE)


@pytest.mark.parametrize("name", zoo.KINDS)
def test_second_derivatives_of_a_stack_are_those_of_each_client(name):
    if refused(name, fv.Tofu(), "tofu fits gradients of single records"):
        return
    task, batch = task_of(name), batch_of(name)

    def derived(losses: Tensor, w: Tensor, x: Tensor) -> list[Tensor]:
        """Of the squared norm of each client's gradient, by weights and, where they are real numbers, by records."""
        (slope,) = torch.autograd.grad(losses, w, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), [t for t in (w, x) if t.requires_grad]))

    def asked(own: Batch) -> Batch:
        return own._replace(w=own.w.clone().requires_grad_(), x=own.x.clone().requires_grad_(own.x.is_floating_point()))

    stack = asked(batch)
    together = derived((task.stacked_losses(stack.w, stack.x, stack.y) * batch.mask).sum(), stack.w, stack.x)
    for client in range(3):
        own = asked(batch.of(client))
        expected = derived(Plain(name, training=False).losses(own)[0].sum(), own.w, own.x)
        for found, alone in zip(together, expected, strict=True):
            cut = found[client] if found.dim() == 2 else found[client, : zoo.SIZES[client]]
            torch.testing.assert_close(cut, alone[0], **CLOSE)


@pytest.mark.parametrize("name", zoo.KINDS)
@torch.no_grad()
def test_losses_of_forward_passes_are_those_of_each_client(name):
    if refused(name, fv.Baffle(), "at fixed running statistics"):
        return
    task, batch = task_of(name), batch_of(name)
    together = task.stacked_losses(batch.w, batch.x, batch.y)
    for client in range(3):
        expected, _ = Plain(name, training=False).losses(batch.of(client))
        torch.testing.assert_close(together[client, : zoo.SIZES[client]], expected, **CLOSE)


class Layer(nn.Module):
    """A layer that is a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def words(**options) -> nn.Module:
    return nn.Sequential(Layer(lambda x: x.abs().long().clamp(max=6)), nn.Embedding(7, 3, **options), nn.Flatten())


REJECTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no running statistics": (lambda: nn.BatchNorm1d(5, track_running_stats=False), "keeps no running statistics"),
    "momentum None": (lambda: nn.BatchNorm1d(5, momentum=None), "has momentum=None"),
    "statistics over processes": (lambda: nn.SyncBatchNorm(5), "takes statistics over processes"),
    "instance norm": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()),
        "keeps running statistics, which are not weights",
    ),
    "mixed records": (lambda: Layer(lambda x: x - x.mean(0)), r"layer '0' \(Layer\) mixes the records of a batch"),
    "mixed gradients": (lambda: words(scale_grad_by_freq=True), "the model's gradient mixes .*scale_grad_by_freq"),
    "weights that change": (lambda: words(max_norm=1.0), r"changes its weights when it runs; set max_norm=None"),
    "state": (Counting, "two outputs for one input"),
    "noise of another kind": (lambda: Layer(lambda x: torch.normal(x, 0.1)), "two outputs for one input"),
    "noise in evaluation": (lambda: Layer(torch.rand_like), "two outputs for one input"),
    "float64": (lambda: nn.Linear(5, 5).double(), r"is torch.float64; fedveil trains float32"),
    "lazy": (lambda: nn.LazyLinear(5), "run lazy layers once before"),
    "scripted": (lambda: torch.jit.script(nn.Linear(5, 5)), "that is not scripted"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:this model cannot be stacked")
@pytest.mark.parametrize("name", REJECTED)
def test_a_rejected_model_is_one_sentence(name):
    make, reason = REJECTED[name]
    x, y = zoo.tensors(5), zoo.labels(3)
    data = from_tensors(x, y, x, y, classes=3)
    layer = make()
    last = nn.Linear(15 if name in ("mixed gradients", "weights that change") else 5, 3)
    with pytest.raises(ValueError, match=reason) as error:
        fv.Task(nn.Sequential(layer, last), data, fv.split("iid", data, 3, fv.Seed.root(0)))
    assert "\n" not in str(error.value)
    assert ";" in str(error.value)


def test_a_model_that_cannot_be_stacked_is_announced():
    with pytest.warns(UserWarning, match=r"cannot be stacked and trains one client at a time: .*aten::gru"):
        zoo.task_of("GRU")


def test_the_documented_table_has_every_model_and_method():
    lines = models_by_methods.DOC.read_text(encoding="utf-8").splitlines()
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert head == ["model", *models_by_methods.METHODS]
    assert [row[0] for row in rows] == [*zoo.KINDS]


@pytest.mark.slow
def test_the_documented_table_is_that_of_runs():
    documented = models_by_methods.DOC.read_text(encoding="utf-8")
    assert documented == models_by_methods.page(), "run python tests/models/models_by_methods.py"


@pytest.mark.parametrize("method", ["fedavg", "baffle", "tofu", models_by_methods.PRIVATE])
def test_a_refusal_is_one_sentence_with_a_way_out(method):
    for name in ("ResNet-18, batch norm federated", "GRU", "MLP, regression"):
        sentence = models_by_methods.run(name, method)
        assert not sentence or (";" in sentence and "\n" not in sentence and not sentence.endswith("."))
