"""Training steps that hold the change of a large linear layer as two thin matrices.

The gradient by the weights [O, I] of a linear layer is Yᵀ X, with the layer's inputs X [n, I] and the gradients Y
[n, O] by its outputs. A few steps on small batches therefore change the weights by Aᵀ B with as many rows as there were
records, and nothing as large as the layer has to be written, stored for a derivative or read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedveil.core.layout import Layout
from fedveil.core.losses import cross_entropy
from fedveil.core.task import Task
from fedveil.gpu.products import Products

Named = dict[str, Tensor]
Batches = Iterator[tuple[Tensor, Tensor, Tensor]]  # images [C, n, …], labels [C, n, K] and step sizes [C]


class Factored:
    """Normalised steps of C clients from `w` [C, d], where the layers of these names are held as factors."""

    def __init__(self, task: Task, w: Tensor, names: Sequence[str]) -> None:
        self.task, self.names = task, names
        layers = task.layout.split(w.detach())
        shared = w.stride(0) == 0  # clients that begin with the same weights read them once
        self._fixed = {name: layers[name][0] if shared else layers[name].contiguous() for name in names}
        self._dims = None if shared else 0
        self._layout = Layout.of({name: t[0] for name, t in layers.items() if name not in names})
        self._start = torch.cat([layers[layer.name].flatten(1) for layer in self._layout.layers], 1)

    def __call__(self, batches: Batches) -> Tensor:
        """Σ η g/‖g‖ over the batches, [C, d], which can be differentiated by all that is in them."""
        here = self._start.clone().requires_grad_()
        left, right = ({name: here.new_empty(len(here), 0, side) for name, side in sides} for sides in self._sides)
        for x, y, eta in batches:
            probes = {name: here.new_zeros(*x.shape[:2], side, requires_grad=True) for name, side in self._sides[0]}
            with Products() if here.is_cuda else nullcontext():
                stacked = vmap(self._loss, (0, 0, 0, self._dims, 0, 0, 0))
                losses, inputs = stacked(here, x, y, self._fixed, probes, left, right)
            g, *outer = torch.autograd.grad(losses.sum(), [here, *probes.values()], create_graph=True)
            square = g.square().sum(1)
            for name, slope in zip(self.names, outer, strict=True):
                square = square + (_gram(slope) * _gram(inputs[name])).sum((1, 2)).to(g)
            rate = eta / square.clamp(min=1e-24).sqrt()
            here = here - rate[:, None] * g
            for name, slope in zip(self.names, outer, strict=True):
                left[name] = torch.cat([left[name], rate[:, None, None] * slope], 1)
                right[name] = torch.cat([right[name], inputs[name]], 1)
        moved = self._layout.split(self._start - here) | {name: left[name].mT @ right[name] for name in self.names}
        return torch.cat([moved[layer.name].flatten(1) for layer in self.task.layout.layers], 1)

    @property
    def _sides(self) -> list[list[tuple[str, int]]]:
        """The outputs of each layer, and its inputs."""
        return [[(name, self._fixed[name].shape[side]) for name in self.names] for side in (-2, -1)]

    def _loss(
        self, small: Tensor, x: Tensor, y: Tensor, fixed: Named, probes: Named, left: Named, right: Named
    ) -> tuple[Tensor, Named]:
        """One client's mean loss, and what the layers are given."""
        weights = self._layout.split(small) | fixed
        with _Linears({id(weight): name for name, weight in fixed.items()}, probes, left, right) as linears:
            logits = self.task.by_layer(weights.__getitem__, x)
        return cross_entropy(logits, y).mean(), dict(linears.given)


class _Linears(TorchFunctionMode):
    """While active, linear layers with weights of these ids have weights W - Aᵀ B, and their probes are added to what
    they give."""

    def __init__(self, names: Mapping[int, str], probes: Named, left: Named, right: Named) -> None:
        super().__init__()
        self.names, self.probes, self.left, self.right = names, probes, left, right
        self.given: list[tuple[str, Tensor]] = []  # inputs of these layers

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or id(args[1]) not in self.names:
            return func(*args, **(kwargs or {}))
        x, weight, bias = args
        name = self.names[id(weight)]
        self.given.append((name, x))
        result = x @ weight.mT + self.probes[name] - (x @ self.right[name].mT) @ self.left[name]
        return result if bias is None else result + bias


def large(task: Task, rows: int) -> tuple[str, ...]:
    """The weights of linear layers that are larger than factors of so many rows, if each is used once, on [B, I]."""
    layers, modules = task.layout.split(task.initial), dict(task.model.named_modules())
    chosen = {
        name: (*weight.shape,)
        for name, weight in layers.items()
        if name.endswith(".weight")
        and type(modules[name.removesuffix(".weight")]) is nn.Linear
        and rows * sum(weight.shape) <= weight.numel()
    }
    left, right = ({name: task.initial.new_zeros(1, shape[side]) for name, shape in chosen.items()} for side in (0, 1))
    with torch.no_grad(), _Linears({id(layers[name]): name for name in chosen}, left, left, right) as linears:
        task.by_layer(layers.__getitem__, task.x[:1])
    used = [name for name, _ in linears.given]
    return tuple(name for name, x in linears.given if used.count(name) == 1 and x.dim() == 2)


def _gram(t: Tensor) -> Tensor:
    """t tᵀ of [C, n, k], in float64: a norm is a sum of products that may nearly cancel."""
    wide = t.double()
    return wide @ wide.mT
