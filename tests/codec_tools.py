"""What the tests of the codecs share: small smooth tasks, a stack without a run, and the digits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.core import message, schema
from fedveil.core.message import Envelope, Slots
from fedveil.data import from_tensors
from fedveil.runs import recipe


def image_task(
    shape: tuple[int, ...] = (1, 4, 4), hidden: int = 6, clients: int = 4, model: nn.Module | None = None
) -> fv.Task:
    """A smooth network on random images of 3 classes, which a linear rule tells apart."""
    draw = fv.Seed.root(1).torch()
    x = torch.randn(60, *shape, generator=draw)
    rule = torch.randn(x[0].numel(), 3, generator=draw)
    y = (x.flatten(1) @ rule).argmax(1)
    if model is None:
        features = x[0].numel()
        model = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 3)
    data = from_tensors(x, y, x, y, classes=3)
    return fv.Task(model, data, fv.split("iid", data, clients, fv.Seed.root(1), max_records=-(-60 // clients)))


@functools.cache
def digits() -> fv.Task:
    return recipe.read("digits/fedavg", ["split.max_records=144"]).build()


def stack_of(task: fv.Task, *clients: int, round_: int = 1, memory: list[Slots] | None = None) -> fv.ClientStack:
    """Clients as a method's `handlers` see them."""
    seed = fv.Seed.root(0).child("round", round_)
    notes: list[dict[str, Any]] = [{} for _ in clients]
    return fv.ClientStack(task, clients, round_, seed, fv.Seed.root(7), memory or [Slots() for _ in clients], notes)


def trained(stack: fv.ClientStack, local: fv.LocalTraining) -> Tensor:
    """Each client's update after training from the initial weights, [C, d]."""
    return local.train(stack, stack.task.initial)[0] - stack.task.initial


def through_the_wire(codec: fv.Codec, task: fv.Task, payload: Any) -> Any:
    """The payload as the other side reads it, held against its schema."""
    sizes = codec.sizes(task)
    data = message.frame(payload, Envelope())
    kinds = {codec.payload.kind: codec.payload}
    received, _ = message.unframe(data, kinds, schema.size_limit(codec.payload, sizes))
    schema.check(received, sizes)
    codec.check(task, received)
    return received


def body(payload: Any) -> int:
    """Bytes of a payload's tensors."""
    return sum(v.nbytes for n in payload.__struct_fields__ if isinstance(v := getattr(payload, n), Tensor))


def slopes(loss: Callable[[], Tensor], value: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient of the summed loss with respect to `value`, by central differences."""
    flat, found = value.view(-1), torch.empty(value.numel(), dtype=value.dtype)
    for i, here in enumerate(flat.clone()):
        ends = []
        for there in (here - step, here + step):
            flat[i] = there
            ends.append(loss().sum().detach())
        flat[i] = here
        found[i] = (ends[1] - ends[0]) / (2 * step)
    return found.view_as(value)


def check_instead_of_fitting(module: Any, monkeypatch: Any) -> list[int]:
    """Let `encode` of a codec's module run in doubles and check its gradients where it would call Adam.

    The list that is returned says how many losses were checked.
    """
    checked: list[int] = []
    draw = module.normal
    monkeypatch.setattr(module, "normal", lambda *arguments: draw(*arguments).double())

    def adam(derive: Callable[[], Sequence[Tensor]], variables: Any, *rest: Any) -> None:
        for variable in variables:
            variable.value.data = variable.value.double()
        losses, *gradients = derive()
        for variable, gradient in zip(variables, gradients, strict=True):
            by_differences = slopes(lambda: derive()[0], variable.value)
            assert by_differences.abs().max() > 1e-4
            torch.testing.assert_close(gradient, by_differences, atol=1e-8, rtol=1e-6)
        checked.append(len(losses))

    monkeypatch.setattr(module, "adam", adam)
    return checked
