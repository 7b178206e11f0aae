"""Bytes and operations of real work, counted while it runs.

    with Counter() as counter:
        step()
    counter.seconds(bandwidth, speed)

Two models are counted side by side. *As launched*, every operator reads its inputs once and writes its results once.
The *floor* puts operators into groups that one kernel could run:

- A product, a convolution or a kernel of this library begins a group.
- Every other operator joins the last group that made one of its inputs, unless that input is the result of a reduction
  in this group. Then it begins a group, and so does an operator whose inputs were there before.
- A group reads each tensor that others made once. It writes a tensor once if another group reads it or if the tensor
  outlives the work. Windows of pictures are read where the pictures are.

Both leave out caches, so work on tensors that a cache holds can take less time than its floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

REDUCTIONS = {"all", "amax", "amin", "any", "argmax", "argmin", "aminmax", "linalg_vector_norm", "logsumexp"} | {
    *("max", "mean", "min", "norm", "sum", "var", "var_mean")
}
OVERWRITING = {"copy_", "fill_", "zero_"}  # what they change is not read
WINDOWS = "fedveil::shown"  # pictures laid out once more
LIGHT = {"fedveil::folded"}  # of this library's kernels those that could be part of another
OWN: Mapping[str, Callable[..., int]] = {
    "fedveil::parts": lambda y, x, out: 2 * y.numel() * x.shape[-2],
    "fedveil::correlated": lambda y, x, window, out: 2 * y.numel() * out.shape[-1],
    "fedveil::convolved": lambda x, weight, bias, window, out: 2 * out.numel() * weight.shape[-1],
    # PyTorch's formula forgets groups
    "convolution_backward": lambda y, x, weight, *more, out: 2 * y.numel() * weight[0].numel() * sum(more[-1][:2]),
}  # operations of kernels that multiply


@dataclass
class Group:
    """What one kernel could run: operations, and the bytes it reads of each storage, view by view, and writes."""

    operations: int = 0
    written: int = 0
    views: dict[int, dict[Any, int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # of these storages, in bytes

    @property
    def bytes(self) -> int:
        return self.written + sum(min(sum(self.views[key].values()), self.sizes[key]) for key in self.views)


@dataclass
class _Made:
    """A storage that was made while counting."""

    group: int
    reduced: bool = False
    written: bool = False


class Counter(TorchDispatchMode):
    """Counts what operators within it do. `launched` is bytes as launched, and `operators` how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = self.operators = 0
        self.groups: list[Group] = []
        self._kept: dict[int, StorageWeakRef] = {}  # so that no address is used twice
        self._made: dict[int, _Made] = {}
        self._pictures: dict[int, Tensor] = {}  # that windows show, by the storage of the windows

    @property
    def bytes(self) -> int:
        """Of the floor."""
        return sum(group.bytes for group in self.groups)

    @property
    def operations(self) -> int:
        return sum(group.operations for group in self.groups)

    def seconds(self, bandwidth: float, speed: float) -> float:
        """The floor: each group takes as long as its bytes or its operations, whichever is longer."""
        return sum(max(group.bytes / bandwidth, group.operations / speed) for group in self.groups)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        changed = [t for t in results if any(_key(t) == _key(u) for u in given)] if func._schema.is_mutable else []
        made = [t for t in results if all(_key(t) != _key(u) for u in given)]
        if "empty" in name or not (made or changed):  # an allocation or a view
            return out
        read = given if name not in OVERWRITING else given[1:]
        self.operators += 1
        self.launched += sum({_view(t): _bytes(t) for t in read}.values()) + sum(map(_bytes, made + changed))
        if name == WINDOWS:
            self._keep(made[0])
            self._pictures[_key(made[0])] = given[0].detach()
        else:
            self._count(func, name, args, kwargs or {}, read, made, changed, out)
        return out

    def _count(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Mapping[str, Any],
        read: list[Tensor],
        made: list[Tensor],
        changed: list[Tensor],
        out: Any,
    ) -> None:
        operations = 0
        if name in OWN:
            operations = OWN[name](*args, **kwargs, out=out)
        elif func.overloadpacket in flop_registry:
            operations = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        read = [self._pictures.get(_key(t), t) for t in read]
        before = [self._made[_key(t)] for t in read if _key(t) in self._made]
        number = max((each.group for each in before), default=-1)
        ended = any(each.reduced and each.group == number for each in before)
        if number < 0 or ended or operations or (name.startswith("fedveil::") and name not in LIGHT):
            self.groups.append(Group())
            number = len(self.groups) - 1
        group = self.groups[number]
        group.operations += operations
        for t in read:
            self._read(t, number)
        for t in made:
            self._keep(t)
            self._made[_key(t)] = _Made(number, name in REDUCTIONS)
        for t in changed:
            if _key(t) in self._made:
                self._made[_key(t)] = _Made(number)
            else:
                group.written += _bytes(t)

    def _read(self, t: Tensor, number: int) -> None:
        key, group = _key(t), self.groups[number]
        source = self._made.get(key)
        if source and source.group == number:
            return
        self._keep(t)
        group.views.setdefault(key, {})[_view(t)] = _bytes(t)
        group.sizes[key] = t.untyped_storage().nbytes()
        if source and not source.written:
            source.written = True
            self.groups[source.group].written += t.untyped_storage().nbytes()

    def _keep(self, t: Tensor) -> None:
        self._kept.setdefault(_key(t), StorageWeakRef(t.untyped_storage()))


def _key(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _view(t: Tensor) -> Any:
    return _key(t), t.storage_offset(), t.shape, t.stride()


def _bytes(t: Tensor) -> int:
    """Of the entries that there are, those of an expanded dimension once."""
    return math.prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step) * t.element_size()


def difference(many: Counter, few: Counter, bandwidth: float, speed: float) -> dict[str, float]:
    """What the longer of two counted runs does beyond the shorter one."""

    def of(figure: Callable[[Counter], float]) -> float:
        return figure(many) - figure(few)

    return {
        "operators": of(lambda c: c.operators),
        "gigabytes as launched": of(lambda c: c.launched) / 1e9,
        "groups": of(lambda c: len(c.groups)),
        "gigabytes": of(lambda c: c.bytes) / 1e9,
        "billion operations": of(lambda c: c.operations) / 1e9,
        "floor, milliseconds": of(lambda c: c.seconds(bandwidth, speed)) * 1e3,
    }
