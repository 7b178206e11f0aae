"""Metrics: how good the outputs for a whole set of records are, measured batch by batch.

A metric is updated with outputs [B, …] and targets [B, …] and gives one number at the end. Positions whose label is
-100 do not count. The first metric of a task is its primary one: `target` and early stopping look at it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from fedveil.core.data import IGNORE, Data
from fedveil.core.functional import first_line
from fedveil.core.lengths import batches
from fedveil.core.losses import Loss, called
from fedveil.core.measures import METRICS, Named
from fedveil.core.spelling import nearest

EVALUATION_BATCH = 1000
LIKE_LENGTH = 128  # records of a batch, where they have different lengths
VALIDATION = "validation_"  # before the name of a metric on validation records
DEFAULTS: dict[str, Sequence[str]] = {  # by loss; others have accuracy where the outputs are scores of the classes
    "next-token": ("perplexity", "token_accuracy"),
    "binary": ("auroc", "accuracy"),
    "multi-label": ("f1", "auroc"),
    "mse": ("rmse", "r2"),
    "l1": ("mae", "r2"),
    "huber": ("rmse", "r2"),
}
WORDS = {
    "top5": "top-5 accuracy",
    "f1": "F1",
    "auroc": "AUROC",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
    "mean_iou": "mean IoU",
}


@runtime_checkable
class Measure(Protocol):
    """A metric in progress. Objects of torchmetrics are such, too."""

    def update(self, outputs: Tensor, y: Tensor, /) -> Any:
        """Take a batch."""

    def compute(self) -> Any:
        """Return the metric of all batches."""


class Primary(msgspec.Struct, frozen=True):
    """What is needed of a metric to read its numbers: a row of the ledger has that of the primary one.

    maximise: whether more is better
    share:    whether it goes from 0 to 1
    """

    name: str
    maximise: bool = True
    share: bool = False

    @property
    def words(self) -> str:
        """The metric in words."""
        return WORDS.get(self.name, self.name.replace("_", " "))

    def better(self, value: float, than: float) -> bool:
        return value > than if self.maximise else value < than

    def reached(self, value: float, target: float) -> bool:
        return value >= target if self.maximise else value <= target

    def show(self, value: float) -> str:
        """A value for people: an accuracy in per cent."""
        return f"{100 * value:.2f}%" if self.percent else f"{value:.4g}"

    @property
    def percent(self) -> bool:
        return self.share and self.name.endswith(("accuracy", "top5"))

    def validate_target(self, target: float) -> None:
        """Raise a ValueError for a target that the metric cannot reach, or always has."""
        if self.share and not 0 < target <= 1:
            raise ValueError(f"target is {target:g}; it is a test {self.words} above 0 and at most 1")


LOSS = Primary("loss", maximise=False)
ACCURACY = Primary("accuracy", share=True)


@dataclass(frozen=True)
class Metric:
    """A metric of a task.

    measure:  a function (outputs, y) -> a number a record [B], whose mean it is, or an object with `update(outputs, y)`
              and `compute()`, such as a metric of torchmetrics; a copy of the object measures each time
    name:     its name in the ledger; by default that of the function or of the object's class
    maximise: whether more is better; by default what torchmetrics says, or True
    """

    measure: Measure | Loss
    name: str = ""
    maximise: bool | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.measure, Measure) or callable(self.measure)):
            raise TypeError(
                f"a metric is a name, a function or an object with update and compute, not {self.measure!r}"
            )
        name = self.name or str(getattr(self.measure, "__name__", type(self.measure).__name__))
        if not name.replace("-", "_").isidentifier():
            raise ValueError(f"a metric is called '{name}'; name it with fedveil.Metric(…, name='…')")
        object.__setattr__(self, "name", name)

    @property
    def primary(self) -> Primary:
        if isinstance(self.measure, Named):
            return Primary(self.name, self.measure.maximise, self.measure.share)
        maximise = self.maximise
        if maximise is None:
            maximise = getattr(self.measure, "higher_is_better", None) is not False
        return Primary(self.name, maximise)

    def begin(self) -> Measure:
        """A measure that has seen nothing."""
        if not isinstance(self.measure, Measure):
            return _Mean(self.measure)
        begun = copy.deepcopy(self.measure)
        return _Fitted(begun) if hasattr(begun, "higher_is_better") else begun


def metrics_of(given: Sequence[str | Metric | Measure | Loss]) -> tuple[Metric, ...]:
    """The metrics of a task from their names, functions or objects."""
    if isinstance(given, str):
        raise ValueError(f"metrics is '{given}'; it is a list, such as ['{given}']")
    found = []
    for each in given:
        if isinstance(each, str):
            if each not in METRICS:
                raise ValueError(f"there is no metric '{each}'{nearest(each, METRICS)}")
            found.append(Metric(METRICS[each](), each))
        else:
            found.append(each if isinstance(each, Metric) else Metric(each))
    names = [metric.name for metric in found]
    if len(set(names)) < len(names):
        raise ValueError(f"the metrics are {', '.join(names)}; give each a name of its own")
    return tuple(found)


def chosen_metrics(
    given: Sequence[str | Metric | Measure | Loss], loss: Loss, data: Data, scores: bool
) -> tuple[Metric, ...]:
    """The metrics that were asked for, or else those that suit the loss and the targets.

    scores: whether the outputs are scores of the classes
    """
    return metrics_of(given or _default(called(loss), data, scores))


def _default(loss: str, data: Data, scores: bool) -> Sequence[str]:
    if loss in DEFAULTS:
        return DEFAULTS[loss]
    if not scores:
        return ()
    if loss == "cross-entropy" and data.y.ndim > 2:
        return ("mean_iou", "accuracy")
    return ("accuracy", "top5") if data.classes > 5 else ("accuracy",)


def primary_of(name: str) -> Primary:
    """The metric called `name`, one of `METRICS`."""
    return Primary(name, METRICS[name].maximise, METRICS[name].share)


@torch.no_grad()
def measured(
    f: Callable[[Tensor], Tensor],
    loss: Loss,
    metrics: Sequence[Metric],
    x: Tensor,
    y: Tensor,
    padding: int | None = None,
) -> dict[str, float]:
    """The mean loss and the metrics of a model's outputs f(x) for records x, y [n, …], the primary metric first.

    Records that are filled up with `padding` are cut, each batch to its longest.
    """
    begun, total = [metric.begin() for metric in metrics if metric.name != LOSS.name], 0.0
    ignored = getattr(loss, "ignore", IGNORE)
    for rows, inputs in batches(x, padding, EVALUATION_BATCH, LIKE_LENGTH):
        outputs, targets = f(inputs), y[rows]
        total += float(loss(outputs, targets).sum(dtype=torch.float64))
        if ignored != IGNORE:
            targets = targets.masked_fill(targets == ignored, IGNORE)
        for measure in begun:
            measure.update(outputs, targets)
    names = [metric.name for metric in metrics if metric.name != LOSS.name]
    found = {name: float(measure.compute()) for name, measure in zip(names, begun, strict=True)}
    mean = {LOSS.name: total / len(x)}
    if metrics and metrics[0].name != LOSS.name:
        return {names[0]: found[names[0]], **mean, **found}
    return {**mean, **found}


@torch.no_grad()
def classified(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, padding: int | None = None) -> Tensor:
    """Which records x [n, …] get the highest score for their label in y [n], as bool [n]."""
    right = torch.empty(len(y), dtype=torch.bool, device=y.device)
    for rows, inputs in batches(x, padding, EVALUATION_BATCH, LIKE_LENGTH):
        right[rows] = f(inputs).argmax(-1) == y[rows]
    return right


def validate_metrics(metrics: Sequence[Metric], outputs: Tensor, y: Tensor) -> None:
    """Raise a ValueError that names a metric which does not fit outputs and targets [B, …]."""
    for metric in metrics:
        if metric.name == LOSS.name:
            continue
        try:
            measure = metric.begin()
            measure.update(outputs, y)
            if isinstance(measure, Named):
                measure.compute()
        except Exception as error:  # whatever a user's metric may say
            told = f"outputs of shape {list(outputs.shape)} and targets of shape {list(y.shape)}"
            why = f"the metric {metric.name} does not fit {told} ({first_line(error)})"
            raise ValueError(f"{why}; choose another, or leave metrics out for those that suit the loss") from error


class _Mean:
    """The mean over records of a function (outputs, y) -> [B]."""

    def __init__(self, function: Loss) -> None:
        self.function, self.total, self.records = function, 0.0, 0

    def update(self, outputs: Tensor, y: Tensor) -> None:
        numbers = self.function(outputs, y)
        if list(numbers.shape) != [len(y)]:
            raise ValueError(f"its result has shape {list(numbers.shape)}, not one number a record")
        self.total, self.records = self.total + float(numbers.sum(dtype=torch.float64)), self.records + len(y)

    def compute(self) -> float:
        return self.total / self.records


class _Fitted:
    """A metric of torchmetrics, which takes [B] for one output a record and has classes in the second dimension."""

    def __init__(self, inner: Measure) -> None:
        self.inner, self.compute = inner, inner.compute

    def update(self, outputs: Tensor, y: Tensor) -> None:
        if outputs.shape == (*y.shape, 1):
            outputs = outputs.squeeze(-1)
        elif y.ndim == 2 and outputs.shape[:-1] == y.shape:
            outputs = outputs.movedim(-1, 1)
        self.inner.update(outputs, y)
