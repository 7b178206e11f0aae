"""Where each parameter tensor lies in the flat vector of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """One parameter tensor's place in the flat vector: `w[start:stop].view(shape)`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Names each layer's slice of the flat vector."""

    layers: tuple[Layer, ...]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of named tensors, one after the other."""
        layers, start = [], 0
        for name, tensor in tensors.items():
            layers.append(Layer(name, tuple(tensor.shape), start, start + tensor.numel()))
            start += tensor.numel()
        return Layout(tuple(layers))

    @property
    def size(self) -> int:
        """d, the length of the flat vector."""
        return self.layers[-1].stop if self.layers else 0

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """[…, d] -> a view […, *shape] of each layer, by name."""
        pieces = w.split([layer.stop - layer.start for layer in self.layers], dim=-1)
        return {layer.name: p.unflatten(-1, layer.shape) for layer, p in zip(self.layers, pieces, strict=True)}

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `split` for one set of weights: named tensors -> [d]."""
        return torch.cat([parts[layer.name].reshape(-1) for layer in self.layers])
