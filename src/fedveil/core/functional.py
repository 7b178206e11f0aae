"""A module as a pure function of its weights and its input."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Pure:
    """A module called with other weights: what `torch.func.functional_call` does, without walking the module each time.

    Weights are put in the parameters' places while the module runs, so each thread has a module of its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._local = model, threading.local()

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        model, places = self._own()
        try:
            for module, name, layer in places:
                module._parameters[name] = weights[layer]  # type: ignore[assignment]
            out: Tensor = model(x)
            return out
        finally:
            _clear(places)

    def by_layer(self, weights: Callable[[str], Tensor], x: Tensor) -> Tensor:
        """The same, where the weights of a layer are made when its module runs, and let go when it has run."""
        model, places = self._own()
        own: dict[nn.Module, list[_Place]] = {}
        for place in places:
            own.setdefault(place[0], []).append(place)

        def put(module: nn.Module, _: Any) -> None:
            for _, name, layer in own[module]:
                module._parameters[name] = weights(layer)  # type: ignore[assignment]

        def drop(module: nn.Module, *_: Any) -> None:
            _clear(own[module])

        hooks = [module.register_forward_pre_hook(put) for module in own]
        hooks += [module.register_forward_hook(drop) for module in own]
        try:
            out: Tensor = model(x)
            return out
        finally:
            for hook in hooks:
                hook.remove()
            _clear(places)

    def _own(self) -> tuple[nn.Module, list[_Place]]:
        """This thread's module, and where its weights go."""
        if not hasattr(self._local, "model"):
            self._local.model = copy.deepcopy(self._model)
            self._local.places = _places(self._local.model)
        return self._local.model, self._local.places


_Place = tuple[nn.Module, str, str]  # a module, the name of a parameter that it keeps, and that parameter's layer


def _places(model: nn.Module) -> list[_Place]:
    """Where each parameter is kept; tied ones are kept in several places."""
    layers = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (module, name, layers[id(parameter)])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def _clear(places: Iterable[_Place]) -> None:
    for module, name, _ in places:
        module._parameters[name] = None  # or the module would keep the graph alive


def first_line(error: Exception) -> str:
    """The first line of what went wrong, without its full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def count_work(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Of one record's forward pass, roughly: multiply-adds (each layer's outputs times the inputs of one of them), and
    numbers that the backward pass needs again (the input and each layer's outputs)."""
    work, activations = 0, x[0].numel()

    def count(layer: nn.Module, _: Any, out: Any) -> None:
        nonlocal work, activations
        weight = getattr(layer, "weight", None)
        if isinstance(out, Tensor) and isinstance(weight, Tensor):
            work += out.numel() * weight[0].numel() // len(x)
        if isinstance(out, Tensor) and not any(True for _ in layer.children()):
            activations += out.numel() // len(x)

    probe = copy.deepcopy(model).cpu()
    for layer in probe.modules():
        layer.register_forward_hook(count)
    with torch.no_grad():
        call(probe, x)
    return work, activations


def call(model: nn.Module, x: Tensor) -> Tensor:
    try:
        out: Any = model(x)
    except Exception as error:
        raise ValueError(f"the model does not take inputs of shape {tuple(x.shape[1:])}: {error}") from error
    if not isinstance(out, Tensor):
        raise ValueError(f"the model returns a {type(out).__name__}; it must return one tensor of logits")
    return out
