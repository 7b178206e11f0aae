"""FedDM's fit, its features and what it refuses; what it shares with FedLAP is tested there."""

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.data import from_tensors
from fedveil.methods.surrogates.feddm import FedDm, embedding
from fedveil.methods.surrogates.sets import Distil
from fedveil.runs import recipe
from methods.surrogates.small import images_task, stack_of, task_of

SMALL = {"images": 2, "draws": 3, "batches": 2, "batch": 8, "steps": 5}


def means(task, w, x, y) -> torch.Tensor:
    """The mean features and logits of each class, [classes, features + logits]."""
    found = embedding(task, w, x)
    return torch.stack([found[y == c].mean(0) for c in y.unique()])


def test_features_are_what_the_last_linear_layer_is_given():
    task = task_of()
    found = embedding(task, task.initial, task.x[:7])
    weights = task.layout.split(task.initial)
    hidden = torch.tanh(task.x[:7] @ weights["0.weight"].T + weights["0.bias"])
    assert torch.allclose(found, torch.cat([hidden, task.f(task.initial, task.x[:7])], 1), atol=1e-6)
    task = images_task()
    assert embedding(task, task.initial, task.x[:7]).shape == (7, 27 + 2)


def test_fitting_brings_the_means_of_each_class_to_those_of_the_records():
    task = task_of()
    method = FedDm(**{**SMALL, "draws": 100, "batch": 12, "image_lr": 0.2}, radius=1e-3)
    stack = stack_of(task)
    labels = torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2], [0, 0, 2, 2], [0, 0, 1, 1]])
    images = method.start(stack, labels)
    goals = [means(task, task.initial, task.x[own], task.y[own]) for own in (task.clients[k] for k in range(4))]
    before, after = [], []
    for seen in (before, after):
        for x, y, goal in zip(images, labels, goals, strict=True):
            seen.append(float((means(task, task.initial, x, y) - goal).square().sum()))
        if seen is before:
            told = method.fit(stack, task.initial, images, labels)
    assert all(b < 0.05 * a for a, b in zip(before, after, strict=True))
    assert told.tolist() == pytest.approx(after, rel=0.3, abs=1e-3)


def test_a_stack_fits_what_its_clients_fit_by_themselves():
    task = task_of(sizes=(12, 9, 7, 11))
    method = FedDm(**SMALL, region="min")
    question = Distil(task.initial, 4)
    for k, answer in enumerate(method.distil(stack_of(task), question)):
        (alone,) = method.distil(stack_of(task, (k,)), question)
        assert torch.allclose(alone.images, answer.images, atol=1e-5)
        assert alone.radius == pytest.approx(answer.radius, rel=1e-3)


def test_weights_are_drawn_within_the_radius_and_anew_each_round():
    task = task_of()
    near = {r: FedDm(**SMALL, radius=0.5).near(stack_of(task, round_=r), task.initial) for r in (1, 2)}
    assert near[1].shape == (3, task.layout.size)
    assert torch.allclose((near[1] - task.initial).norm(dim=1), torch.full((3,), 0.5), atol=1e-5)
    assert len(torch.cat([near[1], near[2]]).unique(dim=0)) == 6
    wide = FedDm(**SMALL, radius=100.0).near(stack_of(task), task.initial)
    assert float((wide - task.initial).norm(dim=1).max()) < 30  # normally distributed, and far from the edge


def test_batches_are_equally_many_records_of_each_class():
    task = task_of(sizes=(12, 5), hands=((0, 1), (1, 2)))
    rows = FedDm(**SMALL).rows(stack_of(task), torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2]]), 6)
    assert rows.shape == (6, 2, 2, 4)
    for k, classes in enumerate(((0, 1), (1, 2))):
        for c, label in enumerate(classes):
            assert (task.y[rows[:, k, c]] == label).all()
            assert np.isin(rows[:, k, c].numpy(), task.clients[k]).all()
    assert all(len(batch.unique()) == 4 for batch in rows[:, 0, 0])  # six records, none twice
    assert all(len(batch.unique()) == 2 for batch in rows[:, 1, 1])  # two records, each twice


def test_a_run_is_counted_and_learns():
    task = task_of()
    result = fv.run(task, FedDm(**{**SMALL, "draws": 20, "image_lr": 0.1}), rounds=4, cohort=4)
    first, *_, last = result.ledger.rows
    assert not result.summary()["clients_failed"]
    assert {"matching", "moved", "server_steps", "radius"} <= set(last.metrics)
    assert last.metrics["loss"] < first.metrics["loss"]
    assert last.passes == 4 * 40 * 8
    assert result.summary()["epsilon"] is None


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"draws": 0}, "method.draws is 0; it is at least 1"),
        ({"init": "zeros"}, "method.init is 'zeros'; use noise, previous, real"),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedDm(**settings)


def test_differential_privacy_is_refused():
    with pytest.raises(ValueError, match=r"feddm has no 'method.privacy'"):
        recipe.read("digits/feddm", ["method.privacy.noise=1.0"])


def test_a_model_without_a_linear_layer_is_refused():
    x, y = torch.randn(8, 1, 2, 2), torch.arange(2).repeat(4)
    data = from_tensors(x, y, x, y, classes=2)
    task = fv.Task(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten()), data, fv.split("iid", data, 2, fv.Seed.root(0)))
    with pytest.raises(ValueError, match="feddm compares what a model's last linear layer is given"):
        FedDm(**SMALL).init_state(task)


@pytest.mark.slow
def test_digits_are_learnt():
    plan = recipe.read("digits/feddm")
    result = fv.run(plan.build(), plan.method, rounds=plan.rounds, cohort=plan.cohort)
    assert result.accuracy >= 0.88
