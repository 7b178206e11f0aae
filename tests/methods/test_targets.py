"""Methods on targets that are not one class label a record: they train, or they refuse with a true reason."""

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.attacks import membership
from fedveil.data import from_tensors
from fedveil.data.pictures import picture

X = torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(0))
REAL = X.flatten(1)[:, :2] @ torch.tensor([1.0, -1.0])
BITS = (X.flatten(1)[:, :3] > 0).float()
MAPS = (X[:, 0] > 0).long()
TASKS = {
    "reals": (REAL, "mse", nn.Sequential(nn.Flatten(), nn.Linear(16, 1))),
    "bits": (BITS, "multi-label", nn.Sequential(nn.Flatten(), nn.Linear(16, 3))),
    "whole bits": (BITS[:, :2].long(), "multi-label", nn.Sequential(nn.Flatten(), nn.Linear(16, 2))),
    "maps": (MAPS, "cross-entropy", nn.Conv2d(1, 2, 3, padding=1)),
}


def task(kind: str) -> fv.Task:
    y, loss, model = TASKS[kind]
    for i, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * i)
    data = from_tensors(X, y, X, y)
    return fv.Task(model, data, fv.split("iid", data, 3, fv.Seed.root(0)), loss=loss)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize(
    "method",
    [
        fv.FedAvg(up=fv.Qsgd()),
        fv.Scaffold(),
        fv.Baffle(directions=8),
        fv.FedAvg(privacy=fv.DpSgd(noise=1.5, clip=0.7, delta=1e-3)),
    ],
    ids=lambda method: f"{method.name}{'-dp' if method.promise else ''}",
)
def test_methods_that_average_take_any_targets(kind, method):
    made = task(kind)
    made.clients = fv.split("iid", made.data, 3, fv.Seed.root(0), max_records=8)
    result = fv.run(made, method, rounds=1, cohort=3)
    assert result.value == result.value  # a number
    assert result.metric == made.metrics[0].name


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("reals", "real numbers or bits as its target"),
        ("bits", "real numbers or bits as its target"),
        ("whole bits", "several labels"),
        ("maps", "several labels"),
    ],
)
@pytest.mark.parametrize("codec", [fv.TofuCodec(), fv.FedSynthCodec()])
def test_codecs_with_soft_labels_refuse_other_targets(kind, held, codec):
    with pytest.raises(
        ValueError, match=f"{codec.name} makes points with class labels, but each record has {held}; use"
    ):
        fv.run(task(kind), fv.FedAvg(up=codec), rounds=1, cohort=3)


@pytest.mark.parametrize("method", [fv.FedLap(), fv.FedDm()])
@pytest.mark.parametrize(("kind", "held"), [("reals", "real targets"), ("maps", "several")])
def test_surrogates_refuse_other_targets(method, kind, held):
    with pytest.raises(ValueError, match=f"{method.name} gives each point one label, and these records have {held}"):
        fv.run(task(kind), method, rounds=1, cohort=3)


@pytest.mark.parametrize("kind", ["dirichlet", "classes", "shards"])
def test_splits_by_class_need_labels(kind):
    with pytest.raises(
        ValueError, match=rf"A '{kind}' split needs one label a record, but y .* is real numbers \[24\]"
    ):
        fv.split(kind, task("reals").data, 3, fv.Seed.root(0))


@pytest.mark.parametrize("kind", TASKS)
def test_an_audit_takes_records_without_labels_as_one_class(kind):
    made = task(kind)
    members, others = membership.matched(made, [0, 1, 2], fv.Seed.root(0), 20)
    assert len(members) == len(others) == 20
    for attack in membership.ATTACKS.values():
        assert membership.scores(made, attack, made.initial, made.x[members], made.y[members]).shape == (20,)
    assert picture(made.clients, made.data.y, made.data.labels).axes
