"""The records to learn from and to test on, and who holds which of them.

A client's data are indices into the set, never copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedveil.core.structure import Structure

IGNORE = -100  # in y: a position of a record that has no label, as in PyTorch


@dataclass(frozen=True, eq=False)
class Data:
    """Records to learn from and records to test on.

    A picture's pixels in [0, 1] are `x * std + mean`, channel by channel; what is no picture ([n, channels, h, w])
    has empty `mean` and `std`.
    """

    name: str
    x: Tensor  # [n, *input]: float32, or int64 or uint8 tokens [n, T]
    y: Tensor  # int64 labels [n], tokens [n, T] or maps [n, h, w], where IGNORE is no label; or float32 targets [n, …]
    test_x: Tensor
    test_y: Tensor
    classes: int  # 0 where y holds real numbers or bits
    labels: tuple[str, ...]  # a name a class
    groups: Tensor | None = None  # [n] int64: the natural owner of each record
    mean: tuple[float, ...] = ()  # a number a channel
    std: tuple[float, ...] = ()
    structure: Structure | None = None  # how x holds the tensors of a record, where there are several
    validation_x: Tensor | None = None  # records that early stopping looks at; they are neither trained nor tested on
    validation_y: Tensor | None = None
    padding: int | None = None  # the token that fills up records on the right, and that the model ignores

    def __repr__(self) -> str:
        records = f"{len(self.x):,} training and {len(self.test_x):,} test records of {list(self.x.shape[1:])}"
        return f"Data({self.name!r}, {records}, {self.classes} classes)"

    @property
    def input(self) -> tuple[int, ...]:
        """The shape of one record."""
        return tuple(self.x.shape[1:])

    @property
    def labelled(self) -> bool:
        """Whether each record has one label."""
        return self.y.ndim == 1 and not self.y.is_floating_point()

    def __post_init__(self) -> None:
        parts = [("training", self.x, self.y), ("test", self.test_x, self.test_y)]
        if (self.validation_x is None) != (self.validation_y is None):
            raise ValueError(f"{self.name!r} has one of validation_x and validation_y; give both or none.")
        if self.validation_x is not None and self.validation_y is not None:
            parts.append(("validation", self.validation_x, self.validation_y))
        for part, x, y in parts:
            where = f"the {part} part of {self.name!r}"
            if x.ndim < 2 or y.ndim < 1:
                raise ValueError(f"In {where} x is {list(x.shape)} and y {list(y.shape)}, not [n, *input] and [n].")
            if x.numel() == 0:
                raise ValueError(f"There is no record in {where}; give at least one.")
            if len(x) != len(y):
                raise ValueError(f"There are {len(x):,} records but {len(y):,} labels in {where}.")
            if x.dtype not in (torch.float32, torch.int64, torch.uint8) or y.dtype not in (torch.int64, torch.float32):
                raise ValueError(f"In {where} x is {x.dtype} and y {y.dtype}; from_tensors converts them.")
            if y.dtype != self.test_y.dtype:
                told = f"x is {x.dtype} and y {y.dtype}"
                raise ValueError(f"In {where} {told}, but the test part has y {self.test_y.dtype}; use one of them.")
            if not x.is_floating_point() and x.ndim != 2:
                raise ValueError(f"In {where} x holds whole numbers, so tokens [n, T], but is {list(x.shape)}.")
            if x.is_floating_point() and not all(map(math.isfinite, _range(x))):
                raise ValueError(f"In {where} some values of x are not finite; clean them first.")
            self._check_targets(where, x, y)
        for part, x, y in parts[1:]:
            if self.x.shape[1:] != x.shape[1:] or self.x.dtype != x.dtype:
                raise ValueError(
                    f"In {self.name!r} training records are {self.x.dtype} {list(self.x.shape[1:])} "
                    f"but {part} records {x.dtype} {list(x.shape[1:])}."
                )
            if self.y.shape[1:] != y.shape[1:]:
                raise ValueError(
                    f"In {self.name!r} y is {list(self.y.shape[1:])} a training record but {list(y.shape[1:])} a "
                    f"{part} record."
                )
        if self.padding is not None and (self.x.is_floating_point() or self.structure or self.y.ndim > 1):
            raise ValueError(
                f"{self.name!r} has padding {self.padding}, which is for rows of tokens [n, T] with one target each; "
                "leave it out."
            )
        if len(self.labels) != self.classes:
            raise ValueError(f"{self.name!r} has {self.classes} classes but {len(self.labels)} labels; name each.")
        g = self.groups
        if g is not None and (g.shape != self.x.shape[:1] or g.dtype != torch.int64):
            raise ValueError(
                f"The groups of {self.name!r} are {g.dtype} {list(g.shape)}, not torch.int64 [{len(self.x)}]."
            )
        channels = self.x.shape[1] if self.x.ndim == 4 else 0
        if not len(self.mean) == len(self.std) == channels:
            raise ValueError(
                f"{self.name!r} has {channels} picture channels, but {len(self.mean)} means and {len(self.std)} stds."
            )
        if not all(map(math.isfinite, self.mean)) or not all(0 < s < math.inf for s in self.std):
            raise ValueError(f"{self.name!r} has mean {self.mean} and std {self.std}; std must be above 0.")

    def _check_targets(self, where: str, x: Tensor, y: Tensor) -> None:
        """Raise a ValueError if y holds labels that are no classes, or numbers that are not finite."""
        if y.is_floating_point():
            if not all(map(math.isfinite, _range(y))):
                raise ValueError(f"In {where} some values of y are not finite; clean them first.")
            return
        if y.shape[1:] == (1,) and y.shape != x.shape:
            raise ValueError(
                f"In {where} y is {list(y.shape)}, neither a label a record [n] nor several a record; use y[:, 0]."
            )
        known = y[y != IGNORE] if y.ndim > 1 else y
        low, high = _range(known) if known.numel() else (0.0, 0.0)
        if low < 0 or high >= self.classes:
            raise ValueError(
                f"In {where} labels go from {low:g} to {high:g}, but there are {self.classes} classes, from 0."
            )


def _range(values: Tensor) -> tuple[float, float]:
    """The lowest and the highest value; NaN if there is one."""
    low, high = torch.aminmax(values)
    return float(low), float(high)


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """The records of K clients: client k's are `order[starts[k]:starts[k + 1]]`."""

    order: Ints  # [N] record indices, client by client
    starts: Ints  # [K + 1]
    kind: str
    max_records: int | None = None  # the public bound on a client's records; where it is None, what the largest holds
    held: tuple[tuple[int, ...], ...] | None = None  # the classes of each client, where they are public

    def __post_init__(self) -> None:
        if self.order.dtype != np.int64 or self.starts.dtype != np.int64:
            raise ValueError(f"A split holds {self.order.dtype} and {self.starts.dtype}, not int64 indices.")
        if len(self.starts) < 2 or self.starts[0] != 0 or self.starts[-1] != len(self.order):
            raise ValueError(f"The starts of a split do not go from 0 to its {len(self.order):,} records.")
        if (self.sizes < 1).any():
            raise ValueError(f"Client {int(np.argmin(self.sizes))} of a {self.kind!r} split holds no record.")
        self._check_max_records()

    def _check_max_records(self) -> None:
        if self.max_records is not None and self.sizes.max() > self.max_records:
            k = int(np.argmax(self.sizes))
            raise ValueError(
                f"Client {k} holds {self.sizes[k]:,} records, but split.max_records is {self.max_records:,}; raise it."
            )

    def __repr__(self) -> str:
        held = f"{self.sizes.min():,} to {self.sizes.max():,} records"
        return f"{type(self).__name__}({self.kind!r}, {len(self):,} clients with {held})"

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, k: int) -> Ints:
        """The record indices of client k: a view."""
        if not 0 <= k < len(self):
            raise IndexError(f"There is no client {k}; the split has {len(self)}, from 0.")
        return self.order[self.starts[k] : self.starts[k + 1]]

    @property
    def sizes(self) -> Ints:
        """The number of records of each client, [K]."""
        return np.diff(self.starts)

    @property
    def largest(self) -> int:
        """The most records that any client may hold, which is public."""
        return int(self.sizes.max()) if self.max_records is None else self.max_records

    def counts(self, y: Tensor | Ints, classes: int) -> Ints:
        """How many records of each class each client holds, [K, classes], for labels y [n]."""
        held = np.asarray(y)[self.order]
        if held.min() < 0 or held.max() >= classes:
            raise ValueError(f"Labels go from {held.min()} to {held.max()}, but there are {classes} classes, from 0.")
        cell = np.repeat(np.arange(len(self)), self.sizes) * classes + held
        return np.bincount(cell, minlength=len(self) * classes).reshape(len(self), classes)


@dataclass(frozen=True)
class Rows:
    """Which records C clients hold: index arrays of different lengths."""

    indices: list[np.ndarray]

    @cached_property
    def counts(self) -> np.ndarray:
        """n_k, [C]."""
        return np.array([len(i) for i in self.indices])

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices [C, n] and mask [C, n], short clients padded with their first record under mask 0."""
        width = int(self.counts.max())
        index = np.zeros((len(self.indices), width), np.int64)
        for row, own in zip(index, self.indices, strict=True):
            row[: len(own)], row[len(own) :] = own, own[0]
        return index, (np.arange(width) < self.counts[:, None]).astype(np.float32)
