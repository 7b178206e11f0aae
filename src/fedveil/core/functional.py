"""A module as a pure function of its weights and its input."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[Tensor], tuple[tuple[Any, ...], dict[str, Any]]]  # records -> the arguments of a module
_Place = tuple[nn.Module, dict[str, Any], str, str]  # a module, where it keeps a tensor, under which name, and whose


def one_argument(x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Records are the module's only argument."""
    return (x,), {}


class Pure:
    """A module called with other weights: what `torch.func.functional_call` does, without walking the module each time.

    names:  the parameters and buffers that each call gives; all others are constants, which threads share
    inputs: turns records into the arguments of the module

    Tensors are put in their places while the module runs, so each thread has a module of its own.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], inputs: Inputs = one_argument) -> None:
        self._model, self._names, self._inputs, self._local = model, set(names), inputs, threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pure, (self._model, self._names, self._inputs)  # threads elsewhere make modules of their own

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        model, places = self._own()
        try:
            for _, held, name, own in places:
                held[name] = tensors[own]
            return self._run(model, x)
        finally:
            _clear(places)

    def by_layer(self, tensors: Callable[[str], Tensor], x: Tensor) -> Tensor:
        """The same, where the weights of a layer are made when its module runs, and let go when it has run."""
        model, places = self._own()
        parts: dict[nn.Module, list[_Place]] = {}
        for place in places:
            parts.setdefault(place[0], []).append(place)

        def put(module: nn.Module, _: Any) -> None:
            for _, held, name, own in parts[module]:
                held[name] = tensors(own)

        def drop(module: nn.Module, *_: Any) -> None:
            _clear(parts[module])

        hooks = [module.register_forward_pre_hook(put) for module in parts]
        hooks += [module.register_forward_hook(drop) for module in parts]
        try:
            return self._run(model, x)
        finally:
            for hook in hooks:
                hook.remove()
            _clear(places)

    def _run(self, model: nn.Module, x: Tensor) -> Tensor:
        args, kwargs = self._inputs(x)
        return output(model(*args, **kwargs))

    def _own(self) -> tuple[nn.Module, list[_Place]]:
        """This thread's module, and where its tensors go."""
        if not hasattr(self._local, "model"):
            self._local.model = clone(self._model)  # the first call may be traced, where no tensor can be copied
            self._local.places = _places(self._local.model, self._names)
        return self._local.model, self._local.places


def clone(model: nn.Module) -> nn.Module:
    """Return a copy of a module that shares all tensors with it."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in _tensors(model).values()})


def on_cpu(model: nn.Module, trained: Collection[str]) -> nn.Module:
    """Return a copy of a module on the CPU that shares the parameters which are not trained and are there already."""
    constants = {n: p for n, p in model.named_parameters() if n not in trained and p.device.type == "cpu"}
    return copy.deepcopy(model, {id(tensor): tensor for tensor in constants.values()}).cpu()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a tied one has its first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _places(model: nn.Module, names: set[str]) -> list[_Place]:
    """Where each tensor of these names is kept; tied ones are kept in several places."""
    own = {id(tensor): name for name, tensor in _tensors(model).items() if name in names}
    return [
        (module, held, name, own[id(tensor)])
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if id(tensor) in own
    ]


def _clear(places: Iterable[_Place]) -> None:
    for _, held, name, _ in places:
        held[name] = None  # or the module would keep the graph alive


def output(out: Any) -> Tensor:
    """The tensor of a module's output: itself, or what a Hugging Face or torchvision model calls its logits."""
    if isinstance(out, Tensor):
        return out
    for name in ("logits", "out"):
        found = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
        if isinstance(found, Tensor):
            return found
    raise ValueError(
        f"the model returns a {type(out).__name__}; it must return one tensor, or an output with `logits`: wrap it in "
        "a module that does"
    )


def first_line(error: Exception) -> str:
    """The first line of what went wrong, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def count_work(model: nn.Module, x: Tensor, inputs: Inputs = one_argument) -> tuple[int, int]:
    """Of one record's forward pass, roughly: multiply-adds (each layer's outputs times the inputs of one of them), and
    numbers that the backward pass needs again (the input and each layer's outputs)."""
    work, activations = 0, x[0].numel()

    def count(layer: nn.Module, _: Any, out: Any) -> None:
        nonlocal work, activations
        weight = getattr(layer, "weight", None)
        if isinstance(out, Tensor) and isinstance(weight, Tensor) and weight.dim():
            work += out.numel() * weight[0].numel() // len(x)
        if isinstance(out, Tensor) and not any(True for _ in layer.children()):
            activations += out.numel() // len(x)

    hooks = [layer.register_forward_hook(count) for layer in model.modules()]
    try:
        with torch.no_grad():
            call(model, x, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return work, activations


def call(model: nn.Module, x: Tensor, inputs: Inputs = one_argument) -> Tensor:
    """The output of a module for some records. A ValueError says what it does not take."""
    args, kwargs = inputs(x)
    try:
        out: Any = model(*args, **kwargs)
    except Exception as error:
        given = ", ".join(
            f"{key} {list(value.shape[1:])}" for key, value in kwargs.items() if isinstance(value, Tensor)
        )
        shape = f"shape {tuple(x.shape[1:])}" if not given else f"the shapes {given}"
        raise ValueError(f"the model does not take inputs of {shape}: {first_line(error)}") from error
    return output(out)
