"""`Data` from a user's own tensors, arrays or torch datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from fedveil.core.data import Data
from fedveil.core.structure import Structure

Values = Tensor | npt.NDArray[Any]
Records = Values | Mapping[str, Any] | Sequence[Any]  # several tensors a record, in a dict, a tuple or a list


def from_tensors(
    x: Records,
    y: Values,
    test_x: Records,
    test_y: Values,
    *,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    groups: Values | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "tensors",
) -> Data:
    """`Data` from tensors or arrays: x [n, *input], y [n] or [n, T] whole numbers.

    Floats become float32; pictures of unsigned bytes [n, channels, h, w] are divided by 255; other whole numbers are
    tokens [n, T]. `classes` is by default the number of `labels`, or one more than the highest label. Pictures are
    standardised by `mean` and `std`, a number a channel, where these are given.
    """
    y, test_y = _whole(y, "y"), _whole(test_y, "test_y")
    if classes is None:
        highest = max((int(part.max()) for part in (y, test_y) if part.numel()), default=0)
        classes = len(labels) if labels is not None else highest + 1
    structure = None if isinstance(x, (Tensor, np.ndarray)) else Structure.of(_each(x))
    x, test_x = (_inputs(part) if structure is None else structure.pack(_each(part)) for part in (x, test_x))
    channels = x.shape[1] if x.ndim == 4 else 0
    data = Data(
        name=name,
        x=x,
        y=y,
        test_x=test_x,
        test_y=test_y,
        classes=classes,
        labels=tuple(map(str, range(classes))) if labels is None else tuple(labels),
        groups=None if groups is None else _whole(groups, "groups"),
        mean=(0.0,) * channels if mean is None else tuple(mean),
        std=(1.0,) * channels if std is None else tuple(std),
        structure=structure,
    )
    if mean is not None or std is not None:
        shift, scale = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (data.mean, data.std))
        for part in (data.x, data.test_x):
            part.sub_(shift).div_(scale)
    return data


def from_dataset(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    name: str = "dataset",
) -> Data:
    """`Data` from two torch datasets with a length, whose items are pairs (x, y) of one shape."""
    return from_tensors(*_collect(train), *_collect(test), classes=classes, labels=labels, name=name)


def _collect(dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """All items of a dataset, stacked: x [n, *input] and y [n] or [n, T]."""
    pairs = [dataset[i] for i in range(len(dataset))]  # type: ignore[arg-type]
    if not pairs:
        raise ValueError("A dataset has no items; give one with at least one pair (x, y).")
    try:
        columns = zip(*pairs, strict=True)
        x, y = (tree_map(lambda *own: torch.stack([torch.as_tensor(t) for t in own]), *column) for column in columns)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"The items of a dataset are not pairs (x, y) of tensors of one shape ({error}).") from error
    return x, y


def _each(records: Any) -> Any:
    """Records of several tensors, with arrays made tensors."""
    if isinstance(records, Mapping):
        records = dict(records)  # such as a tokenizer's BatchEncoding
    return tree_map(lambda each: torch.tensor(each) if isinstance(each, np.ndarray) else each, records)


def _inputs(values: Any) -> Tensor:
    """A copy: float32, or int64 tokens."""
    x = values.detach() if isinstance(values, Tensor) else torch.tensor(np.ascontiguousarray(values))
    if x.dtype == torch.uint8 and x.ndim == 4:
        return x.float().div_(255)
    return x.to(torch.float32 if x.is_floating_point() else torch.int64, copy=True)


def _whole(values: Values, what: str) -> Tensor:
    """Whole numbers as int64."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(np.ascontiguousarray(values))
    if tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"{what} holds {tensor.dtype}, but must hold whole numbers.")
    return tensor.to(torch.int64)
