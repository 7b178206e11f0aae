"""`Data` from a user's own tensors, arrays or torch datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from fedveil.core.data import Data
from fedveil.core.seeds import Seed
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
    validation: tuple[Records, Values] | None = None,
    padding: int | None = None,
    name: str = "tensors",
) -> Data:
    """`Data` from tensors or arrays: x [n, *input], and y as the loss needs it.

    x: floats become float32; pictures of unsigned bytes [n, channels, h, w] are divided by 255; other whole numbers are
    tokens [n, T]. Pictures are standardised by `mean` and `std`, a number a channel, where these are given.

    y: whole numbers are labels [n], tokens [n, T] or maps [n, h, w], where -100 is no label; floats are real targets
    or bits [n, …] and become float32. `classes` is by default the number of `labels`, or one more than the highest
    label; floats have 0 classes.

    validation: x and y of records to choose on, for `early_stopping`; they are neither trained nor tested on

    padding: the token that fills up records on the right. The model must ignore it; batches are cut to their longest
    record where that saves work
    """
    y = _targets(y)
    real = y.is_floating_point()
    test_y = _targets(test_y) if real else _whole(test_y, "test_y")
    valid_y = None if validation is None else _targets(validation[1]) if real else _whole(validation[1], "validation")
    if classes is None:
        parts = [part for part in (y, test_y, valid_y) if part is not None and part.numel() and not real]
        highest = max((int(part.max()) for part in parts), default=-1 if real else 0)
        classes = len(labels) if labels is not None else highest + 1
    structure = None if isinstance(x, (Tensor, np.ndarray)) else Structure.of(_each(x))

    def packed(part: Records) -> Tensor:
        return _inputs(part) if structure is None else structure.pack(_each(part))

    valid_x = None if validation is None else validation[0]
    x, test_x = packed(x), packed(test_x)
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
        validation_x=None if valid_x is None else packed(valid_x),
        validation_y=valid_y,
        padding=padding,
    )
    if mean is not None or std is not None:
        shift, scale = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (data.mean, data.std))
        for part in (data.x, data.test_x, *([] if data.validation_x is None else [data.validation_x])):
            part.sub_(shift).div_(scale)
    return data


def from_dataset(
    train: Dataset[Any],
    test: Dataset[Any],
    *,
    classes: int | None = None,
    labels: Sequence[str] | None = None,
    validation: Dataset[Any] | None = None,
    name: str = "dataset",
) -> Data:
    """`Data` from torch datasets with a length, whose items are pairs (x, y) of one shape."""
    held = None if validation is None else _collect(validation)
    return from_tensors(*_collect(train), *_collect(test), classes=classes, labels=labels, validation=held, name=name)


def hold_out(data: Data, share: float, seed: Seed) -> Data:
    """Move a share of the training records, drawn by the public `seed`, to the validation records."""
    if not 0 < share < 1:
        raise ValueError(f"The validation share is {share:g}; use a number above 0 and below 1.")
    if data.validation_x is not None:
        raise ValueError(f"{data.name!r} has validation records of its own; leave the share at 0.")
    held = round(share * len(data.x))
    if not 0 < held < len(data.x):
        raise ValueError(f"A share of {share:g} of {len(data.x):,} records is {held:,}; leave some on either side.")
    order = torch.from_numpy(seed.child("validation").numpy().permutation(len(data.x)))
    out, kept = (part.sort().values for part in (order[:held], order[held:]))
    groups = None if data.groups is None else data.groups[kept]
    x, y = data.x, data.y
    return replace(data, x=x[kept], y=y[kept], groups=groups, validation_x=x[out], validation_y=y[out])


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


def _targets(values: Values) -> Tensor:
    """A copy of floats as float32, and anything else as int64."""
    tensor = values.detach() if isinstance(values, Tensor) else _numbers(values, "y")
    return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else _whole(tensor, "y")


def _numbers(values: Any, what: str) -> Tensor:
    try:
        return torch.tensor(np.ascontiguousarray(values))
    except TypeError:
        raise ValueError(
            f"{what} holds {np.asarray(values).dtype}; number the classes from 0, and name them by labels."
        ) from None


def _whole(values: Values, what: str) -> Tensor:
    """Whole numbers as int64."""
    tensor = values if isinstance(values, Tensor) else _numbers(values, what)
    if tensor.is_floating_point() or tensor.is_complex():
        raise ValueError(f"{what} holds {tensor.dtype}, but must hold whole numbers.")
    return tensor.to(torch.int64)
