"""The loss of each record, by name, and what each loss needs of the targets.

Outputs and targets have the records in their first dimension. Scores of K classes are in the last dimension for one
label a record (outputs [B, K], y [B]) and for sequences (outputs [B, T, K], y [B, T]). For maps and everything larger
they are in the second, as in PyTorch (outputs [B, K, h, w], y [B, h, w]).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.core.data import IGNORE, Data
from fedveil.core.spelling import unknown

Loss = Callable[[Tensor, Tensor], Tensor]


def class_scores(outputs: Tensor, y: Tensor) -> Tensor:
    """The outputs with the scores of the classes in the last dimension, [*y, K], for labels y [B], [B, T], [B, h, w]…

    Raises a ValueError where the outputs are of another shape.
    """
    scores = outputs.movedim(1, -1) if y.ndim > 2 and outputs.ndim > 1 else outputs
    if scores.shape[:-1] != y.shape:
        wanted = "[B, K]" if y.ndim == 1 else "[B, T, K]" if y.ndim == 2 else "[B, K, …]"
        raise ValueError(
            f"the outputs are {list(outputs.shape)} and the labels {list(y.shape)}; scores of K classes are {wanted}"
        )
    return scores


def alike(outputs: Tensor, y: Tensor) -> Tensor:
    """The outputs in the shape of the targets: [B, 1] fits y [B]. Raises a ValueError where they are of another."""
    if outputs.shape == (*y.shape, 1):
        outputs = outputs.squeeze(-1)
    if outputs.shape != y.shape:
        raise ValueError(
            f"the outputs are {list(outputs.shape)} and the targets {list(y.shape)}; use as many outputs as targets"
        )
    return outputs


def _bits(logits: Tensor, y: Tensor, weights: tuple[float, ...] | None) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(
        alike(logits, y), y.to(logits.dtype), reduction="none", pos_weight=_on(weights, logits)
    )
    return _mean(losses)


def _mean(errors: Tensor) -> Tensor:
    """The mean over everything but the records: [B, …] -> [B]."""
    return errors if errors.ndim == 1 else errors.flatten(1).mean(1)


def _check_weights(loss: object, weights: tuple[float, ...] | None) -> None:
    if weights is not None and not all(w > 0 for w in weights):
        raise ValueError(f"the loss {type(loss).__name__} has weights {list(weights)}; use numbers above 0")


def _on(weights: tuple[float, ...] | None, like: Tensor) -> Tensor | None:
    return None if weights is None else _tensor(weights, like.device, like.dtype)


@lru_cache
def _tensor(weights: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(weights, device=device, dtype=dtype)  # once: a captured graph takes nothing from the host


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of each record, [B]: logits [B, K] against labels [B] or probabilities [B, K].

    Of labels [B, T] or [B, h, w] it is the mean over the positions that are not -100.
    """
    if y.is_floating_point():
        return -(y * F.log_softmax(logits, -1)).sum(-1)
    if y.ndim > 1:
        return CrossEntropy()(logits, y)
    return F.cross_entropy(logits, y, reduction="none")


def next_character(logits: Tensor, y: Tensor) -> Tensor:
    """Loss of each record, [B]: the mean over its positions. Logits [B, T, K] against characters [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(-1)


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy with options.

    weights:   a factor of the loss of each class
    smoothing: share of the label that is spread evenly over all classes
    ignore:    the label of positions that do not count; a record's loss is the mean over its other positions
    """

    targets: ClassVar[str] = "labels"
    weights: tuple[float, ...] | None = None
    smoothing: float = 0.0
    ignore: int = IGNORE

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"the loss's smoothing is {self.smoothing:g}; use a number from 0 to below 1")
        _check_weights(self, self.weights)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Loss of each record, [B]."""
        scores = class_scores(logits, y)
        losses = F.cross_entropy(
            scores.flatten(0, -2),
            y.flatten(),
            _on(self.weights, logits),
            ignore_index=self.ignore,
            label_smoothing=self.smoothing,
            reduction="none",
        ).view(y.shape)
        if y.ndim == 1:
            return losses
        return losses.flatten(1).sum(1) / (y != self.ignore).flatten(1).sum(1).clamp(min=1)


@dataclass(frozen=True)
class NextToken(CrossEntropy):
    """Cross-entropy of sequences: outputs [B, T, K], y [B, T] the token that follows at each position."""


@dataclass(frozen=True)
class Binary:
    """Logistic loss of one logit a record: outputs [B] or [B, 1], y [B] 0 or 1.

    weight: factor of the loss of records with y = 1, for classes of different sizes
    """

    targets: ClassVar[str] = "bits"
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_weights(self, (self.weight,))

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Loss of each record, [B]."""
        return _bits(logits, y, None if self.weight == 1 else (self.weight,))


@dataclass(frozen=True)
class MultiLabel:
    """Mean logistic loss of K independent logits: outputs [B, K], y [B, K] bits.

    weights: factor of the loss of each label where its bit is 1
    """

    targets: ClassVar[str] = "bits"
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_weights(self, self.weights)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        """Loss of each record, [B]."""
        return _bits(logits, y, self.weights)


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """Squared error of each record, [B]: the mean over its numbers."""
    return _mean((alike(outputs, y) - y).square())


def l1(outputs: Tensor, y: Tensor) -> Tensor:
    """Absolute error of each record, [B]: the mean over its numbers."""
    return _mean((alike(outputs, y) - y).abs())


@dataclass(frozen=True)
class Huber:
    """Squared error up to `delta` and absolute error beyond: the mean over the numbers of a record."""

    targets: ClassVar[str] = "reals"
    delta: float = 1.0

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"the loss's delta is {self.delta:g}; use a number above 0")

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each record, [B]."""
        return _mean(F.huber_loss(alike(outputs, y), y, reduction="none", delta=self.delta))


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "next-character": next_character,
    "next-token": NextToken(),
    "binary": Binary(),
    "multi-label": MultiLabel(),
    "mse": mse,
    "l1": l1,
    "huber": Huber(),
}
_WITH_OPTIONS: dict[str, type[Any]] = {
    "cross-entropy": CrossEntropy,
    "next-token": NextToken,
    "binary": Binary,
    "multi-label": MultiLabel,
    "huber": Huber,
}
_TARGETS: dict[Any, str] = {cross_entropy: "labels", next_character: "labels", mse: "reals", l1: "reals"}


def loss_by_name(name: str, options: Mapping[str, Any] | None = None) -> Loss:
    """The loss called `name`, with its options by name. A name or an option that nobody knows is a ValueError."""
    if name not in LOSSES:
        raise ValueError(f"task.loss is '{name}'; use {' or '.join(LOSSES)}")
    if not options:
        return LOSSES[name]
    kind = _WITH_OPTIONS.get(name)
    if kind is None:
        raise ValueError(f"task.loss_options has {', '.join(options)}, but the loss {name} has no options")
    known = inspect.signature(kind).parameters
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of the loss {name}", option, known)
        several = option == "weights"
        if not (isinstance(value, (list, tuple)) if several else isinstance(value, (int, float))):
            wanted = "a list of numbers" if several else "a number"
            raise ValueError(f"task.loss_options.{option} is {value!r}; it must be {wanted}")
    given = {option: tuple(value) if option == "weights" else value for option, value in options.items()}
    loss: Loss = kind(**given)
    return loss


def targets(loss: Loss) -> str:
    """The targets that a loss takes: "labels", "bits", "reals", or "" where only the loss itself knows."""
    found = next((kind for known, kind in _TARGETS.items() if loss is known), "")
    return found or (str(loss.targets) if isinstance(loss, (CrossEntropy, Binary, MultiLabel, Huber)) else "")


def called(loss: Loss) -> str:
    """The name of a loss, as a recipe has it, or that of a user's function."""
    names = (name for name, known in LOSSES.items() if loss is known or type(loss) is _WITH_OPTIONS.get(name))
    return next(names, str(getattr(loss, "__name__", loss)))


def validate_targets(loss: Loss, data: Data) -> None:
    """Raise a ValueError where the targets of `data` are none that a loss by name takes."""
    kind, y = targets(loss), data.y
    real = y.is_floating_point()
    parts = [part for part in (data.y, data.test_y, data.validation_y) if part is not None]
    held = "real numbers" if real else "whole numbers"
    told = f"the loss {called(loss)} needs"
    if kind == "labels" and real:
        raise ValueError(f"{told} class labels, but y holds real numbers; use y.long(), or a loss such as mse")
    if kind == "reals" and not real:
        raise ValueError(f"{told} real targets, but y holds whole numbers; use y.float(), or the loss cross-entropy")
    if kind == "bits" and not all(bool(((part >= 0) & (part <= 1)).all()) for part in parts):
        raise ValueError(f"{told} targets of 0 and 1, but y holds {held} beyond; use cross-entropy or mse")
    if isinstance(loss, Binary) and y.ndim != 1:
        raise ValueError(f"{told} one target a record, but y is {list(y.shape)}; use multi-label")
    if isinstance(loss, MultiLabel) and y.ndim != 2:
        raise ValueError(f"{told} y of shape [n, labels], but y is {list(y.shape)}; use binary for one label")
    if isinstance(loss, NextToken) and y.ndim != 2:
        raise ValueError(f"{told} y of shape [n, T], but y is {list(y.shape)}; use cross-entropy")
    if kind == "labels" and y.ndim > 1:
        ignored = loss.ignore if isinstance(loss, CrossEntropy) else None if loss is next_character else IGNORE
        if ignored != IGNORE and any(bool((part == IGNORE).any()) for part in parts):
            raise ValueError(f"y holds {IGNORE} where it has no label, but the loss {called(loss)} does not ignore it")
    weights = getattr(loss, "weights", None)
    wanted = data.classes if kind == "labels" else y.shape[-1]
    if isinstance(loss, (CrossEntropy, MultiLabel)) and weights and len(weights) != wanted:
        raise ValueError(f"task.loss_options.weights has {len(weights)} numbers, but there are {wanted} classes")


def outputs_of(loss: Loss, data: Data) -> int:
    """How many outputs a model needs: one a class, or one a target where targets are bits or real numbers."""
    if targets(loss) == "bits" or data.y.is_floating_point():
        return max(1, data.y[0].numel())
    return data.classes
