"""The vectors that clients send, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Vectors:
    """The vectors that a stack of C clients is about to send.

    named:   vectors [C, d] by name, such as "update" and SCAFFOLD's "control"
    scalars: numbers [C] by name that travel in the clear beside them
    share:   the factor that each client put on its vectors, [C, 1]; None: 1
    statistics: running statistics of batch norm layers, [C, s], which travel as they are; None: none do
    """

    named: Mapping[str, Tensor]
    scalars: Mapping[str, Tensor] = field(default_factory=dict)
    share: Tensor | None = None
    statistics: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.named[name]

    def map(self, change: Callable[[str, Tensor], Tensor]) -> Vectors:
        """Return a copy in which each vector is changed."""
        return replace(self, named={name: change(name, vector) for name, vector in self.named.items()})

    def jointly(self, change: Callable[[Tensor], Tensor]) -> Vectors:
        """Return a copy in which all vectors are changed as one, [C, sum of d]; a clip bounds their joint norm."""
        widths = [vector.shape[1] for vector in self.named.values()]
        changed = change(joined(list(self.named.values()))).split(widths, 1)
        return replace(self, named=dict(zip(self.named, changed, strict=True)))


def joined(vectors: list[Tensor]) -> Tensor:
    """Concatenate vectors [C, d]; a single one is not copied."""
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1)
