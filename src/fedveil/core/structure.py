"""Records of several tensors, such as tokens with a mask, as rows of one tensor.

Everything in fedveil indexes, pads and stacks one tensor of records. A dict, tuple or list of tensors is laid out in
it, row by row, and taken apart again when the model is called.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedveil.core.functional import Inputs, one_argument


@dataclass(frozen=True)
class Structure:
    """How the tensors of a record lie in a row of D numbers.

    tree:   how they are nested
    shapes: the shape of each, without the dimension of records
    dtypes: the type of each: float32, int64 or bool
    """

    tree: pytree.TreeSpec
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(records: Any) -> Structure:
        """The structure of records, a dict, tuple or list of tensors [n, …]."""
        leaves, tree = pytree.tree_flatten(records)
        wrong = next((leaf for leaf in leaves if not isinstance(leaf, Tensor)), None)
        if wrong is not None or not leaves:
            found = type(wrong).__name__ if leaves else "nothing"
            raise ValueError(f"a record holds {found}; it must hold tensors, in a dict, a tuple or a list")
        if len({len(leaf) for leaf in leaves}) > 1:
            raise ValueError(
                f"the tensors of records have {[len(leaf) for leaf in leaves]} rows; all need one a record"
            )
        return Structure(tree, tuple(tuple(leaf.shape[1:]) for leaf in leaves), tuple(map(_type, leaves)))

    def pack(self, records: Any) -> Tensor:
        """Records -> rows [n, D]: float32 where all are, else int64, in which a float32 stands as its bits."""
        leaves, tree = pytree.tree_flatten(records)
        found = tree, tuple(tuple(leaf.shape[1:]) for leaf in leaves), tuple(map(_type, leaves))
        if found != (self.tree, self.shapes, self.dtypes):
            raise ValueError("training and test records must hold the same tensors, of the same shapes and types")
        rows = [leaf.detach().to(dtype).reshape(len(leaf), -1) for leaf, dtype in zip(leaves, self.dtypes, strict=True)]
        if self._real:
            return torch.cat(rows, 1)
        return torch.cat([_whole(row) for row in rows], 1)

    def unpack(self, x: Tensor) -> Any:
        """Rows […, D] -> records."""
        parts = x.split([math.prod(shape) for shape in self.shapes], -1)
        leaves = [
            _back(part, dtype, self._real).reshape(part.shape[:-1] + shape)
            for part, dtype, shape in zip(parts, self.dtypes, self.shapes, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.tree)

    def inputs(self, model: nn.Module) -> Inputs:
        """How a module is called with records: a dict by keywords and a tuple by position where its `forward` takes
        them so, and otherwise as one argument."""
        blank = pytree.tree_unflatten([None] * len(self.shapes), self.tree)
        if isinstance(blank, dict) and _takes(model, (), blank):
            return lambda x: ((), self.unpack(x))
        if isinstance(blank, (tuple, list)) and _takes(model, tuple(blank), {}):
            return lambda x: (tuple(self.unpack(x)), {})
        return lambda x: ((self.unpack(x),), {})

    @property
    def _real(self) -> bool:
        return all(dtype == torch.float32 for dtype in self.dtypes)


def inputs_of(structure: Structure | None, model: nn.Module) -> Inputs:
    """How a module is called with records of a structure; of none where a record is one tensor."""
    return one_argument if structure is None else structure.inputs(model)


def _takes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return all(isinstance(key, str) for key in kwargs)


def _type(leaf: Tensor) -> torch.dtype:
    return torch.float32 if leaf.is_floating_point() else torch.bool if leaf.dtype == torch.bool else torch.int64


def _whole(row: Tensor) -> Tensor:
    return row.contiguous().view(torch.int32).long() if row.dtype == torch.float32 else row.long()


def _back(part: Tensor, dtype: torch.dtype, real: bool) -> Tensor:
    if real:
        return part
    return part.to(torch.int32).view(torch.float32) if dtype == torch.float32 else part.to(dtype)
