"""Metrics against scikit-learn, over several batches, and metrics that do not fit."""

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

import fedveil as fv
from fedveil.core import metrics
from fedveil.core.measures import METRICS
from fedveil.core.metrics import metrics_of, validate_metrics
from fedveil.data import from_tensors

DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=DRAW)


def streamed(name: str, outputs: torch.Tensor, y: torch.Tensor) -> float:
    """A metric by name, in batches of 7."""
    measure = METRICS[name]()
    for batch in zip(outputs.split(7), y.split(7), strict=True):
        measure.update(*batch)
    return measure.compute()


SCORES, LABELS = normal(50, 7), ints(7, 50)
LOGIT, BIT = normal(50).round(decimals=1), ints(2, 50)  # rounded: some scores are equal
LOGITS, BITS = normal(50, 4).round(decimals=1), ints(2, 50, 4)
PROBABILITIES = SCORES.double().softmax(-1)
REALS, TRUE = normal(50, 3) + 1000, normal(50, 3) + 1000
HOT = F.one_hot(LABELS, 7)
BINARY = LOGIT > 0

CASES = {
    "accuracy": (SCORES, LABELS, sk.accuracy_score(LABELS, SCORES.argmax(1))),
    "accuracy of a logit": (LOGIT[:, None], BIT, sk.accuracy_score(BIT, BINARY)),
    "accuracy of bits": (LOGITS, BITS.float(), sk.accuracy_score(BITS.flatten(), LOGITS.flatten() > 0)),
    "top5": (SCORES, LABELS, sk.top_k_accuracy_score(LABELS, SCORES, k=5)),
    "balanced_accuracy": (SCORES, LABELS, sk.balanced_accuracy_score(LABELS, SCORES.argmax(1))),
    "balanced_accuracy of a logit": (LOGIT, BIT, sk.balanced_accuracy_score(BIT, BINARY)),
    "f1": (SCORES, LABELS, sk.f1_score(LABELS, SCORES.argmax(1), average="macro")),
    "f1 of a logit": (LOGIT, BIT, sk.f1_score(BIT, BINARY)),
    "f1 of two": (SCORES[:, :2], BIT, sk.f1_score(BIT, SCORES[:, :2].argmax(1))),
    "f1 of bits": (LOGITS, BITS, sk.f1_score(BITS, LOGITS > 0, average="macro")),
    "auroc": (SCORES, LABELS, sk.roc_auc_score(LABELS, PROBABILITIES, multi_class="ovr")),
    "auroc of a logit": (LOGIT, BIT.float(), sk.roc_auc_score(BIT, LOGIT)),
    "auroc of two": (SCORES[:, :2], BIT, sk.roc_auc_score(BIT, SCORES[:, 1] - SCORES[:, 0])),
    "auroc of bits": (LOGITS, BITS, sk.roc_auc_score(BITS, LOGITS)),
    "average_precision": (SCORES, LABELS, sk.average_precision_score(HOT, PROBABILITIES)),
    "average_precision of a logit": (LOGIT, BIT, sk.average_precision_score(BIT, LOGIT)),
    "average_precision of bits": (LOGITS, BITS, sk.average_precision_score(BITS, LOGITS)),
    "mae": (REALS, TRUE, sk.mean_absolute_error(TRUE, REALS)),
    "rmse": (REALS, TRUE, sk.mean_squared_error(TRUE, REALS) ** 0.5),
    "rmse of one": (REALS[:, :1], TRUE[:, 0], sk.root_mean_squared_error(TRUE[:, 0], REALS[:, 0])),
    "r2": (REALS, TRUE, sk.r2_score(TRUE, REALS)),
    "perplexity": (SCORES.view(10, 5, 7), LABELS.view(10, 5), np.exp(sk.log_loss(LABELS, PROBABILITIES))),
    "token_accuracy": (SCORES.view(10, 5, 7), LABELS.view(10, 5), sk.accuracy_score(LABELS, SCORES.argmax(1))),
    "mean_iou": (
        SCORES.view(2, 5, 5, 7).movedim(-1, 1),
        LABELS.view(2, 5, 5),
        sk.jaccard_score(LABELS, SCORES.argmax(1), average="macro"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_metric_is_that_of_scikit_learn(case):
    outputs, y, expected = CASES[case]
    assert streamed(case.split()[0], outputs, y) == pytest.approx(float(expected), rel=1e-6)


def test_every_metric_by_name_is_tested():
    assert {case.split()[0] for case in CASES} | {"loss"} == set(METRICS)


@pytest.mark.parametrize("name", ["accuracy", "token_accuracy", "perplexity", "balanced_accuracy", "f1", "mean_iou"])
def test_ignored_positions_do_not_count(name):
    outputs, y = SCORES.view(10, 5, 7), LABELS.view(10, 5).clone()
    y[0], y[3:, 2] = -100, -100
    kept = y != -100
    expected = streamed(name, outputs[kept][:, None], y[kept][:, None])
    assert streamed(name, outputs, y) == pytest.approx(expected, rel=1e-12)


def test_a_label_that_nobody_has_is_left_out_and_one_class_alone_has_no_auroc():
    bits = BITS.clone()
    bits[:, 2] = 0
    expected = sk.roc_auc_score(bits[:, [0, 1, 3]], LOGITS[:, [0, 1, 3]])
    assert streamed("auroc", LOGITS, bits) == pytest.approx(expected)
    assert np.isnan(streamed("auroc", LOGIT, torch.ones(50)))


def regression(**options) -> fv.Task:
    x = normal(40, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    data = from_tensors(x[:30], y[:30], x[30:], y[30:], validation=(x[:5], y[:5]))
    return fv.Task(nn.Linear(3, 1), data, fv.split("iid", data, 3, fv.Seed.root(0)), loss="mse", **options)


class Largest:
    """The largest error, as an object."""

    maximise = False

    def __init__(self):
        self.most = 0.0

    def update(self, outputs, y):
        self.most = max(self.most, float((outputs[:, 0] - y).abs().max()))

    def compute(self):
        return self.most


def within(outputs, y):
    return ((outputs[:, 0] - y).abs() < 1).float()


def test_own_functions_objects_and_torchmetrics_measure(monkeypatch):
    monkeypatch.setattr(metrics, "EVALUATION_BATCH", 3)
    own = [fv.Metric(Largest(), "largest", maximise=False), within, torchmetrics.MeanAbsoluteError()]
    task = regression(metrics=[*own, "mae", "rmse", "r2"])
    for _ in range(2):  # nothing is left of the first evaluation
        found = task.evaluate(task.initial)
        outputs = task.f(task.initial, task.test_x)[:, 0]
        errors = (outputs - task.test_y).abs()
        assert found["largest"] == pytest.approx(float(errors.max()))
        assert found["within"] == pytest.approx(float((errors < 1).float().mean()))
        assert found["MeanAbsoluteError"] == pytest.approx(found["mae"])
        assert found["loss"] == pytest.approx(found["rmse"] ** 2)
        held = (task.f(task.initial, task.data.validation_x)[:, 0] - task.data.validation_y).abs()
        assert found["validation_largest"] == pytest.approx(float(held.max()))
    assert list(found)[:2] == ["largest", "loss"]
    assert task.primary == metrics.Primary("largest", maximise=False)
    assert fv.Metric(torchmetrics.MeanAbsoluteError()).primary == metrics.Primary("MeanAbsoluteError", maximise=False)
    assert fv.Metric(torchmetrics.R2Score()).primary.maximise


def test_torchmetrics_take_classes_of_sequences_where_they_look_for_them():
    outputs, y = SCORES.view(10, 5, 7), LABELS.view(10, 5)
    measure = fv.Metric(torchmetrics.classification.MulticlassAccuracy(7, average="micro")).begin()
    measure.update(outputs, y)
    assert float(measure.compute()) == pytest.approx(CASES["accuracy"][2])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["accurcy"], "there is no metric 'accurcy'; did you mean 'accuracy'"),
        (["mae", "mae"], "the metrics are mae, mae; give each a name of its own"),
        ([lambda outputs, y: y], "a metric is called '<lambda>'; name it with fedveil.Metric"),
        (["f1"], "the metric f1 does not fit .*it needs class labels, or targets .* of 0 and 1"),
        (
            ["perplexity"],
            "the metric perplexity does not fit .*class labels, and the targets are real numbers",
        ),
        (["mean_iou"], "the metric mean_iou does not fit"),
        (["token_accuracy"], "it needs a label for each position"),
        (["top5"], "the metric top5 does not fit"),
        (["auroc"], "the metric auroc does not fit"),
        ([F.mse_loss], r"the metric mse_loss does not fit .* \(its result has shape \[\], not one number a record\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_metric_that_does_not_fit_is_one_sentence(given, told):
    with pytest.raises(ValueError, match=told) as refusal:
        regression(metrics=given)
    assert "\n" not in str(refusal.value)
    with pytest.raises(TypeError, match="a metric is a name, a function or an object"):
        metrics_of([3])


def test_metrics_of_labels_refuse_others():
    for name in ("mae", "rmse", "r2"):
        with pytest.raises(ValueError, match=f"the metric {name} does not fit .*it needs real targets"):
            validate_metrics(metrics_of([name]), SCORES, LABELS)
    with pytest.raises(ValueError, match="it needs at least five classes"):
        validate_metrics(metrics_of(["top5"]), SCORES[:, :3], LABELS.clamp(max=2))


class Bag(nn.Module):
    """The sum of tokens' scores; token 0 counts nothing. It notes the widths of batches."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(9, 2, generator=torch.Generator().manual_seed(0)))
        self.widths: set[int] = set()

    def forward(self, x):
        self.widths.add(x.shape[-1])
        return (F.embedding(x, self.scores) * (x != 0)[..., None]).sum(-2)


def test_records_of_different_lengths_are_evaluated_in_order_of_length_and_without_padding():
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(1, 9, (300, 40), generator=draw)
    x[torch.arange(40) >= torch.randint(1, 41, (300, 1), generator=draw)] = 0
    y = torch.randint(0, 2, (300,), generator=draw)
    tasks = {}
    for padding in (0, None):
        data = from_tensors(x[:20], y[:20], x, y, padding=padding, validation=(x[::2], y[::2]))
        tasks[padding] = fv.Task(Bag(), data, fv.split("iid", data, 2, fv.Seed.root(0)), metrics=["accuracy", "auroc"])
    cut, whole = tasks[0], tasks[None]
    seen = cut._pure._own()[0].widths
    seen.clear()
    found = cut.evaluate(cut.initial)
    assert seen == {24, 40}  # of batches of 128; lengths are rounded up to a multiple of 8
    assert found == pytest.approx(whole.evaluate(whole.initial), abs=1e-6)
    right = cut.classified(cut.initial)
    assert torch.equal(right, whole.classified(whole.initial))
    assert float(right.double().mean()) == pytest.approx(found["accuracy"])
