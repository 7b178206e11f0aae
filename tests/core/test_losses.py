"""Losses by name against hand computations, and targets that a loss does not take."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedveil as fv
from fedveil.core.losses import LOSSES, loss_by_name
from fedveil.data import from_tensors

DRAW = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


def task(model, x, y, **options) -> fv.Task:
    data = from_tensors(x, y, x, y)
    return fv.Task(model, data, fv.split("iid", data, 2, fv.Seed.root(0)), **options)


def test_cross_entropy_with_options_is_pytorchs():
    logits, y, weights = normal(6, 3), torch.tensor([0, 1, 2, 2, 1, 0]), [1.0, 2.0, 0.5]
    loss = loss_by_name("cross-entropy", {"weights": weights, "smoothing": 0.1})
    expected = F.cross_entropy(logits, y, torch.tensor(weights), label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(loss(logits, y), expected)


@pytest.mark.parametrize(("shape", "positions"), [((4, 5, 3), (4, 5)), ((4, 3, 2, 5), (4, 2, 5))])
def test_a_record_has_the_mean_of_its_positions_that_are_not_ignored(shape, positions):
    logits, y = normal(*shape), torch.randint(0, 3, positions, generator=DRAW)
    y[0, 0], y[1] = -100, -100
    found = LOSSES["cross-entropy"](logits, y)
    for k in (0, 2, 3):
        one = logits[k].movedim(0, -1) if len(shape) == 4 else logits[k]
        torch.testing.assert_close(found[k], F.cross_entropy(one.reshape(-1, 3), y[k].flatten()))
    assert found[1] == 0
    if len(shape) == 3:
        torch.testing.assert_close(LOSSES["next-token"](logits, y), found)
        ignoring = loss_by_name("next-token", {"ignore": 2})(logits[2:], y[2:])
        torch.testing.assert_close(ignoring[0], F.cross_entropy(logits[2], y[2], ignore_index=2))


def test_square_logits_of_a_sequence_have_their_classes_last_and_of_a_map_second():
    y = torch.tensor([[0, 1, 2]])
    sharp = 50 * F.one_hot(y, 3).float()
    assert LOSSES["cross-entropy"](sharp, y) < 1e-6
    y = torch.tensor([[[0, 1, 1], [2, 1, 0], [0, 0, 1]]])
    assert LOSSES["cross-entropy"](50 * F.one_hot(y, 3).float().movedim(-1, 1), y) < 1e-6


def test_bits_by_hand():
    logits, y = torch.tensor([[0.0], [2.0]]), torch.tensor([1, 0])
    expected = torch.tensor([math.log(2), math.log(1 + math.exp(2))])
    torch.testing.assert_close(LOSSES["binary"](logits, y), expected)
    torch.testing.assert_close(LOSSES["binary"](logits[:, 0], y.float()), expected)
    torch.testing.assert_close(loss_by_name("binary", {"weight": 3})(logits, y), expected * torch.tensor([3.0, 1.0]))
    both = LOSSES["multi-label"](logits.view(1, 2), y.view(1, 2))
    torch.testing.assert_close(both, expected.mean()[None])
    weighted = loss_by_name("multi-label", {"weights": [3.0, 5.0]})(logits.view(1, 2), y.view(1, 2))
    torch.testing.assert_close(weighted, (expected * torch.tensor([3.0, 1.0])).mean()[None])


def test_errors_of_real_targets_by_hand():
    outputs, y = torch.tensor([[1.0, 5.0], [0.0, 0.5]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert LOSSES["mse"](outputs, y).tolist() == [5.0, 0.125]
    assert LOSSES["l1"](outputs, y).tolist() == [2.0, 0.25]
    assert LOSSES["huber"](outputs, y).tolist() == [1.5, 0.0625]  # (0.5 + 2.5) / 2 and 0.125 / 2
    assert loss_by_name("huber", {"delta": 4})(outputs, y).tolist() == [2.5, 0.0625]
    assert LOSSES["mse"](outputs[:, :1], y[:, 0]).tolist() == [1.0, 0.0]  # one output a record for [n]


X, LABELS, BITS = normal(8, 4), torch.tensor([0, 1, 2, 0] * 2), (normal(8, 3) > 0).float()


@pytest.mark.parametrize(
    ("outputs", "y", "options", "told"),
    [
        (3, LABELS.float(), {}, "the loss cross-entropy needs class labels, but y holds real numbers; use y.long"),
        (1, LABELS, {"loss": "mse"}, "the loss mse needs real targets, but y holds whole numbers; use y.float"),
        (1, LABELS, {"loss": "binary"}, "the loss binary needs targets of 0 and 1, but y holds whole numbers beyond"),
        (3, BITS, {"loss": "binary"}, r"the loss binary needs one target a record, but y is \[8, 3\]; use multi-label"),
        (
            1,
            BITS[:, 0],
            {"loss": "multi-label"},
            r"multi-label needs y of shape \[n, labels\], but y is \[8\]",
        ),
        (2, BITS, {"loss": "multi-label"}, r"does not fit .*the outputs are \[2, 2\] and the targets \[2, 3\]"),
        (3, LABELS, {"loss": "next-token"}, r"the loss next-token needs y of shape \[n, T\], but y is \[8\]"),
        (3, LABELS, {"loss_options": {"weights": [1, 2]}}, "weights has 2 numbers, but there are 3 classes"),
        (3, LABELS, {"loss_options": {"weights": [1, 2, 0]}}, "use numbers above 0"),
        (3, LABELS, {"loss_options": {"smooth": 1}}, "unknown option of the loss cross-entropy 'smooth'; did you mean"),
        (3, LABELS, {"loss_options": {"smoothing": 1}}, "smoothing is 1; use a number from 0 to below 1"),
        (3, LABELS, {"loss_options": {"weights": 1}}, "task.loss_options.weights is 1; it must be a list of numbers"),
        (3, LABELS, {"loss": "next-character", "loss_options": {"a": 1}}, "next-character has no options"),
        (3, LABELS, {"loss": "hinge"}, "task.loss is 'hinge'; use cross-entropy or"),
        (3, LABELS, {"loss": nn.CrossEntropyLoss()}, r"its result has shape \[\], not one number a record"),
        (2, LABELS, {}, "does not fit"),
    ],
)
def test_targets_that_a_loss_does_not_take_are_one_sentence(outputs, y, options, told):
    with pytest.raises(ValueError, match=told) as refusal:
        task(nn.Linear(4, outputs), X, y, **options)
    assert "\n" not in str(refusal.value)


def test_a_missing_label_is_refused_where_the_loss_does_not_ignore_it():
    tokens = torch.tensor([[0, 1, -100], [1, 0, 1]])
    model = nn.Sequential(nn.Embedding(2, 2))
    inputs = tokens.clamp(min=0)
    for options in ({"loss": "next-character"}, {"loss": "next-token", "loss_options": {"ignore": 0}}):
        with pytest.raises(ValueError, match=r"y holds -100 where it has no label, but the loss .* does not ignore"):
            task(model, inputs, tokens, **options)
    assert set(task(model, inputs, tokens, loss="next-token").evaluate(torch.zeros(4))) == {
        "perplexity",
        "loss",
        "token_accuracy",
    }


@pytest.mark.parametrize(
    ("outputs", "y", "loss"),
    [(1, X[:, 0].clone(), "mse"), (1, LABELS.clamp(max=1), "binary"), (3, BITS, "multi-label"), (2, X[:, :2], "huber")],
)
def test_a_task_of_any_targets_trains(outputs, y, loss):
    made = task(nn.Linear(4, outputs), X, y, loss=loss)
    assert made.stackable
    whole = fv.run(made, fv.FedAvg(local=fv.LocalTraining(lr=0.05)), rounds=3, cohort=2)
    losses = whole.ledger.series("loss")[1]
    assert losses[-1] < losses[0]
    assert whole.ledger.rows[0].metrics.keys() == made.evaluate(made.initial).keys()
