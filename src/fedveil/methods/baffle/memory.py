"""How many bytes of tensors are alive at once while something runs, counted as operations hand them out.

Every result of every operation is seen below autograd and vmap, and its storage counts until it is freed, so what
autograd saves counts too. What a kernel allocates for itself and frees again is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak(what: Callable[[], object]) -> int:
    """The most bytes alive at once of tensors that were made while `what` ran."""
    living = _Living()
    with living:
        what()
    return living.most


class _Living(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if id(storage) not in self._seen and id(storage) not in before:
                    self._born(storage)
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        size, number = storage.nbytes(), id(storage)
        self._seen.add(number)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, number, size)

    def _gone(self, number: int, size: int) -> None:
        self._seen.discard(number)
        self.now -= size
