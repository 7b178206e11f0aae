"""Metrics by name. Each is updated with outputs and targets [B, …], batch by batch, and computed at the end.

Positions whose label is -100 do not count.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedveil.core.data import IGNORE
from fedveil.core.losses import alike, class_scores


class Named:
    """A metric of this module.

    maximise: whether more is better
    share:    whether it goes from 0 to 1
    """

    maximise, share = True, True

    def update(self, outputs: Tensor, y: Tensor) -> None:
        """Take a batch."""
        raise NotImplementedError

    def compute(self) -> float:
        """Return the metric of all batches; not a number where it is not defined."""
        raise NotImplementedError


class MeanLoss(Named):
    """The mean loss of the records, which every evaluation measures anyway."""

    maximise, share = False, False

    def update(self, outputs: Tensor, y: Tensor) -> None:
        pass

    def compute(self) -> float:
        return math.nan


class Accuracy(Named):
    """The share of labels that have the highest score; of logits of bits, the share of bits that are right."""

    def __init__(self) -> None:
        self.hits = self.guesses = 0

    def update(self, outputs: Tensor, y: Tensor) -> None:
        if found := _bits(outputs, y):
            logits, bits = found
            right = (logits > 0) == bits
        else:
            scores, labels = _labelled(outputs, y)
            right = self.right(scores, labels)
        self.hits, self.guesses = self.hits + int(right.sum()), self.guesses + right.numel()

    def right(self, scores: Tensor, labels: Tensor) -> Tensor:
        return scores.argmax(-1) == labels

    def compute(self) -> float:
        return self.hits / self.guesses if self.guesses else math.nan


class TopFive(Accuracy):
    """The share of labels that are among the five highest scores."""

    def update(self, outputs: Tensor, y: Tensor) -> None:
        if class_scores(outputs, y).shape[-1] < 5:
            raise ValueError("it needs at least five classes")
        super().update(outputs, y)

    def right(self, scores: Tensor, labels: Tensor) -> Tensor:
        return (scores.topk(5, -1).indices == labels[:, None]).any(-1)


class TokenAccuracy(Accuracy):
    """The share of positions whose label has the highest score."""

    def update(self, outputs: Tensor, y: Tensor) -> None:
        if y.ndim < 2 or y.is_floating_point():
            raise ValueError("it needs a label for each position, y [n, T]")
        super().update(outputs, y)


class _Confusion(Named):
    """Counts of labels and predictions, [K, K]; of K independent bits, [K, 2, 2]."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None

    def update(self, outputs: Tensor, y: Tensor) -> None:
        if found := _bits(outputs, y):
            logits, bits = found
            pairs = (2 * bits.long() + (logits > 0)).view(len(y), -1)
            counts = F.one_hot(pairs, 4).sum(0).view(-1, 2, 2)
            counts = counts[0] if y.ndim == 1 else counts
        else:
            scores, labels = _labelled(outputs, y)
            size = scores.shape[-1]
            counts = torch.bincount(labels * size + scores.argmax(-1), minlength=size * size).view(size, size)
        self.counts = counts if self.counts is None else self.counts + counts

    def _seen(self) -> Tensor:
        assert self.counts is not None
        return self.counts.double().cpu()


class BalancedAccuracy(_Confusion):
    """The mean over the classes of the share of their records that are right."""

    def compute(self) -> float:
        seen = self._seen()
        if seen.ndim > 2:
            raise ValueError("it needs one label a record")
        of = seen.sum(1)
        return float((seen.diagonal() / of)[of > 0].mean())


class F1(_Confusion):
    """2 TP / (2 TP + FP + FN): of class 1 where there are two, else the mean over classes or labels (macro)."""

    def compute(self) -> float:
        seen = self._seen()
        if seen.ndim > 2:
            return float(_ratio(2 * seen[:, 1, 1], 2 * seen[:, 1, 1] + seen[:, 0, 1] + seen[:, 1, 0]).mean())
        both = seen.sum(0) + seen.sum(1)
        each = _ratio(2 * seen.diagonal(), both)
        return float(each[1] if len(seen) == 2 else each[both > 0].mean())


class MeanIou(_Confusion):
    """Intersection over union, the mean over the classes that occur in labels or predictions."""

    def compute(self) -> float:
        seen = self._seen()
        if seen.ndim > 2:
            raise ValueError("it needs one label a position")
        union = seen.sum(0) + seen.sum(1) - seen.diagonal()
        return float((seen.diagonal() / union)[union > 0].mean())


class _Kept(Named):
    """Outputs and targets, kept until the end."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.y: list[Tensor] = []

    def keep(self, outputs: Tensor, y: Tensor) -> None:
        self.outputs.append(outputs.detach().double().cpu())
        self.y.append(y.cpu())

    def all(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.outputs), torch.cat(self.y)


class _Ranked(_Kept):
    """A metric of how scores rank records: of one logit or two classes, else the mean over classes (each against the
    rest, by its probability) or labels, of those that some records have and some do not."""

    def update(self, outputs: Tensor, y: Tensor) -> None:
        if found := _bits(outputs, y):
            self.keep(*(part.view(len(y), -1) for part in found))
            return
        scores, labels = _labelled(outputs, y)
        if scores.shape[-1] == 2:
            self.keep(scores[:, 1:] - scores[:, :1], (labels == 1)[:, None])
        else:
            self.keep(scores.double().softmax(-1), F.one_hot(labels, scores.shape[-1]).bool())

    def compute(self) -> float:
        scores, bits = self.all()
        mixed = bits.any(0) & ~bits.all(0)
        each = [self.of(scores[:, k], bits[:, k]) for k in torch.where(mixed)[0].tolist()]
        return sum(each) / len(each) if each else math.nan

    def of(self, scores: Tensor, bits: Tensor) -> float:
        """The metric of scores [n] for bits [n]."""
        raise NotImplementedError


class Auroc(_Ranked):
    """The share of pairs of a record with the label and one without in which the first has the higher score."""

    def of(self, scores: Tensor, bits: Tensor) -> float:
        _, place, count = scores.unique(return_inverse=True, return_counts=True)
        below = count.cumsum(0) - count
        rank = below + (count + 1) / 2  # the mean rank of equal scores, from 1
        positive = int(bits.sum())
        above = float(rank[place][bits].sum(dtype=torch.float64)) - positive * (positive + 1) / 2
        return above / (positive * (len(bits) - positive))


class AveragePrecision(_Ranked):
    """The mean precision over thresholds, weighted by the recall that each adds."""

    def of(self, scores: Tensor, bits: Tensor) -> float:
        _, place, count = (-scores).unique(return_inverse=True, return_counts=True)
        hits = torch.zeros_like(count).index_add_(0, place, bits.long())
        precision = hits.cumsum(0).double() / count.cumsum(0)
        return float((precision * hits).sum() / hits.sum())


class Mae(Named):
    """Mean absolute error over all numbers."""

    maximise, share = False, False

    def __init__(self) -> None:
        self.total, self.numbers = 0.0, 0

    def update(self, outputs: Tensor, y: Tensor) -> None:
        error = _reals(outputs, y) - y.double()
        self.total, self.numbers = self.total + float(self.cost(error).sum()), self.numbers + error.numel()

    def cost(self, error: Tensor) -> Tensor:
        return error.abs()

    def compute(self) -> float:
        return self.total / self.numbers


class Rmse(Mae):
    """The root of the mean squared error over all numbers."""

    def cost(self, error: Tensor) -> Tensor:
        return error.square()

    def compute(self) -> float:
        return math.sqrt(super().compute())


class R2(_Kept):
    """1 - squared errors / squared deviations from the mean; of several targets a record, the mean over them."""

    share = False

    def update(self, outputs: Tensor, y: Tensor) -> None:
        self.keep(_reals(outputs, y).view(len(y), -1), y.double().view(len(y), -1))

    def compute(self) -> float:
        outputs, y = self.all()
        spread = (y - y.mean(0)).square().sum(0)
        each = 1 - (outputs - y).square().sum(0) / spread
        return float(each[spread > 0].mean())


class Perplexity(Named):
    """exp of the mean cross-entropy of all positions."""

    maximise, share = False, False

    def __init__(self) -> None:
        self.total, self.positions = 0.0, 0

    def update(self, outputs: Tensor, y: Tensor) -> None:
        scores, labels = _labelled(outputs, y)
        self.total += float(F.cross_entropy(scores, labels, reduction="none").sum(dtype=torch.float64))
        self.positions += len(labels)

    def compute(self) -> float:
        mean = self.total / self.positions if self.positions else math.nan
        return math.exp(mean) if mean < 700 else math.inf


METRICS: dict[str, type[Named]] = {
    "loss": MeanLoss,
    "accuracy": Accuracy,
    "top5": TopFive,
    "balanced_accuracy": BalancedAccuracy,
    "f1": F1,
    "auroc": Auroc,
    "average_precision": AveragePrecision,
    "mae": Mae,
    "rmse": Rmse,
    "r2": R2,
    "perplexity": Perplexity,
    "token_accuracy": TokenAccuracy,
    "mean_iou": MeanIou,
}


def _labelled(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [N, K] and labels [N] of all positions that have a label."""
    if y.is_floating_point():
        raise ValueError("it needs class labels, and the targets are real numbers")
    scores, labels = class_scores(outputs, y).flatten(0, -2), y.flatten()
    if y.ndim > 1 or int(labels.min()) < 0:
        kept = labels != IGNORE
        scores, labels = scores[kept], labels[kept]
    return scores, labels


def _bits(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits and bits of one shape, [n] or [n, K], where the outputs are logits of bits; None where they are not."""
    if outputs.shape not in (y.shape, (*y.shape, 1)):
        return None
    if y.ndim > 2 or not bool(((y >= 0) & (y <= 1)).all()):
        raise ValueError("it needs class labels, or targets [n] or [n, K] of 0 and 1")
    return alike(outputs, y), y > 0.5


def _reals(outputs: Tensor, y: Tensor) -> Tensor:
    if not y.is_floating_point():
        raise ValueError("it needs real targets, and these are labels")
    return alike(outputs, y).double()


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where both are 0."""
    return part / whole.clamp(min=1)
