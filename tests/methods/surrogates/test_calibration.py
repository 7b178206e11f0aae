"""FedLAP's calibration: norms of real gradients, a layer each, to which the server stretches its step."""

import dataclasses

import pytest
import torch

import fedveil as fv
from fedveil.core.layout import Layer, Layout
from fedveil.methods.surrogates.calibration import Calibrated, lengths, stretched
from fedveil.methods.surrogates.fedlap import FedLap
from fedveil.methods.surrogates.sets import Distil
from fedveil.privacy.dpsgd import DpSgd
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from methods.surrogates.small import stack_of, task_of

LAYOUT = Layout((Layer("weight", (2, 1), 0, 2), Layer("bias", (2,), 2, 4)))
ONE = {"images": 2, "passes": 1, "batches": 1, "batch": 100, "image_lr": 1.0, "region": "fixed", "steps": 1}


def gradient(task, w, x, y):
    """By plain autograd, [d]."""
    w = w.clone().requires_grad_()
    return torch.autograd.grad(task.losses(w, x, y).mean(), w)[0]


def test_each_layer_is_stretched_to_its_norm():
    made = torch.tensor([[3.0, 4.0, 0.0, 2.0], [0.0, 0.0, 1.0, 0.0]])
    assert lengths(LAYOUT, made).tolist() == [[5, 2], [0, 1]]
    to = torch.tensor([[10.0, 1.0], [7.0, 3.0]])
    assert stretched(LAYOUT, made, to).tolist() == [[6, 8, 0, 1], [0, 0, 3, 0]]  # what is 0 has no direction


def test_a_client_sends_the_norms_of_the_gradient_that_it_fits():
    """A batch of all records, so that the gradient is known."""
    task, method = task_of(), FedLap(**ONE, calibrate=True)
    stack = stack_of(task)
    answers = method.distil(stack, Distil(task.initial, 4))
    assert stack.passes == 2 * 48  # for the fit and for the norms
    for own, answer in zip(task.clients, answers, strict=True):
        assert isinstance(answer, Calibrated)
        real = gradient(task, task.initial, task.x[own], task.y[own])
        by_hand = [real[a.start : a.stop].norm() for a in task.layout.layers]
        torch.testing.assert_close(answer.lengths, torch.stack(by_hand))


@pytest.mark.parametrize(("weighting", "shares"), [("records", (0.25, 0.75)), ("equal", (0.5, 0.5))])
def test_the_server_takes_one_step_along_the_stretched_gradients(weighting, shares):
    task, method = task_of(), FedLap(**ONE, calibrate=True, lr=0.3, weighting=weighting)
    draw, labels = torch.Generator().manual_seed(1), torch.tensor([0, 1, 2], dtype=torch.int16)
    norms = torch.rand(2, 4, generator=draw)
    sets = [
        Calibrated(torch.randn(3, 4, generator=draw), labels, 1.0, n, norm)
        for n, norm in zip((5, 15), norms, strict=True)
    ]
    expected = task.initial.clone()
    for share, each in zip(shares, sets, strict=True):
        made = gradient(task, task.initial, each.images, labels.long())
        for layer, norm in zip(task.layout.layers, each.lengths, strict=True):
            piece = made[layer.start : layer.stop]
            expected[layer.start : layer.stop] -= 0.3 * share * norm * piece / piece.norm()
    found, figures = method.optimise(task, task.initial, sets)
    torch.testing.assert_close(found, expected)
    assert figures["moved"] == pytest.approx(float((expected - task.initial).norm()), rel=1e-5)


def test_a_set_larger_than_a_chunk_has_the_same_gradient(monkeypatch):
    task, method = task_of(), FedLap(**ONE, calibrate=True)
    labels = torch.tensor([0, 0, 1, 1, 2], dtype=torch.int16)
    sets = [Calibrated(torch.randn(5, 4, generator=torch.Generator().manual_seed(2)), labels, 1.0, 1, torch.ones(4))]
    whole, _ = method.optimise(task, task.initial, sets)
    monkeypatch.setattr("fedveil.methods.surrogates.calibration.GRADIENT_CHUNK", 2)
    torch.testing.assert_close(method.optimise(task, task.initial, sets)[0], whole)


def test_a_run_is_counted_as_forecast():
    method = FedLap(**ONE, calibrate=True)
    plan = dataclasses.replace(recipe.read("digits/fedlap"), method=method, rounds=2)
    task = plan.build()
    told, summary = cost(task, plan), fv.run(task, method, rounds=2, cohort=5).summary()
    assert told["up"]["total"] == summary["bytes_up"]
    assert told["passes"]["total"] == summary["passes"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": 2}, 'set method.steps to 1 and method.region to "fixed"'),
        ({"region": "min"}, 'set method.steps to 1 and method.region to "fixed"'),
        (
            {"weighting": "equal", "privacy": DpSgd(delta=1e-3)},
            "method.calibrate sends norms of gradients without noise",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedLap(**{**ONE, **settings}, calibrate=True)
