"""Membership inference: it finds those whom weights learnt by heart, and nobody in weights that learnt nothing."""

import math

import msgspec
import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.attacks import membership
from fedveil.attacks.membership import ATTACKS, SUCCESS, attack, by_heart, matched, scores, took_part
from fedveil.privacy import dpsgd
from fedveil.runs import recipe
from toys import linear_task

SEED = fv.Seed.root(0)


def attacked(*changes: str, source: str = "digits/fedavg", **options):
    """What is found in a run of a recipe, whose private randomness is fixed."""
    plan = recipe.read(source, changes)
    task = plan.build()
    result = fv.run(task, plan.method, rounds=plan.rounds, cohort=plan.cohort, seed=plan.seed, insecure_test_noise=0)
    clients = took_part(result.ledger.rows)
    return attack(task, result.weights, clients, SEED, 1e-5, 10_000, lambda _: None, **options)


# ---------------------------------------------------------------------------------------------------- records


def test_either_side_has_as_many_of_each_class():
    task = recipe.read("digits/fedavg-classes").build()  # each client has two classes
    members, others = matched(task, [0, 1], SEED, 10_000)
    held = np.concatenate([task.clients[0], task.clients[1]])
    assert set(members.tolist()) <= set(held.tolist())
    assert len(set(members.tolist())) == len(members) == len(set(others.tolist())) == len(others)
    ours, theirs = (torch.bincount(y, minlength=10) for y in (task.y[members], task.test_y[others]))
    assert torch.equal(ours, theirs)
    available = torch.minimum(torch.bincount(task.y[held], minlength=10), torch.bincount(task.test_y, minlength=10))
    assert torch.equal(ours, available)
    few, _ = matched(task, [0, 1], SEED, 20)
    assert 15 <= len(few) <= 20
    assert torch.bincount(task.y[few]).max() <= 10


def test_records_come_in_no_order_and_the_same_seed_draws_the_same():
    task = recipe.read("digits/fedavg").build()
    members, others = matched(task, range(10), SEED, 200)
    assert not torch.equal(task.y[members], task.test_y[others])
    assert (task.y[members].diff() < 0).sum() > 50
    again, other = matched(task, range(10), SEED, 200)[0], matched(task, range(10), fv.Seed.root(1), 200)[0]
    assert torch.equal(members, again)
    assert not torch.equal(members, other)


def test_classes_that_nobody_tests_leave_nobody_to_compare_with():
    task = linear_task()
    task.test_y = 1 - task.test_y.clamp(min=1)
    task.clients = fv.Split(torch.where(task.y == 1)[0].numpy(), np.array([0, int(task.y.sum())]), "ones")
    with pytest.raises(
        ValueError, match="only 0 test records are of classes that clients hold, too few to compare with; give more"
    ):
        matched(task, [0], SEED, 10)


def test_validation_records_are_the_others_where_a_recipe_holds_some_out():
    task = recipe.read("digits/fedavg", ["task.validation=0.5"]).build()
    members, others = matched(task, range(10), SEED, 10_000, "validation")
    assert len(others) > len(task.test_x)
    assert torch.equal(task.y[members].bincount(), task.validation[1][others].bincount())
    with pytest.raises(ValueError, match="'digits' has no validation records to compare members with;"):
        matched(recipe.read("digits/fedavg").build(), [0], SEED, 100, "validation")


def test_others_from_another_distribution_are_told_apart_before_training_and_held_out_ones_are_not():
    task = recipe.read("digits/fedavg", ["task.validation=0.5"]).build()
    task.test_x = task.test_x * 0.5
    found = {
        kind: attack(task, task.initial, range(10), SEED, 1e-5, 10_000, lambda _: None, kind=kind).baseline
        for kind in ("validation", "test")
    }
    assert found["validation"].low < 0.5 < found["validation"].high
    assert not found["test"].low < 0.5 < found["test"].high


def test_who_never_answered_is_no_member():
    rows = [fv.Row(round=1, cohort=[0, 3], missing={"3": "dropped"}), fv.Row(round=2, cohort=[5, 1])]
    assert took_part(rows) == [0, 1, 5]


# ---------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("held", [1 << 24, 8])
def test_scores_are_those_of_each_record_however_many_fit(monkeypatch, held):
    monkeypatch.setitem(dpsgd.HELD, "cpu", held)
    task = linear_task()
    w = task.initial + 0.3
    for row in range(3):
        x, y = task.x[row : row + 1], task.y[row : row + 1]
        here = w.clone().requires_grad_()
        loss = task.losses(here, x, y)[0]
        (slope,), loss = torch.autograd.grad(loss, here), loss.detach()
        before = float(task.losses(task.initial, x, y))
        expected = {"loss": -float(loss), "calibrated": before - float(loss), "gradient": -float(slope.norm())}
        for name, each in ATTACKS.items():
            assert scores(task, each, w, task.x, task.y)[row] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


def test_a_model_that_cannot_be_stacked_is_attacked_record_by_record():
    task = linear_task()
    together = scores(task, ATTACKS["gradient"], task.initial, task.x, task.y)
    task.stackable = False
    assert np.allclose(scores(task, ATTACKS["gradient"], task.initial, task.x, task.y), together, atol=1e-6)


def test_weights_that_diverged_give_scores_all_the_same():
    task = linear_task()
    found = scores(task, ATTACKS["loss"], torch.full_like(task.initial, math.nan), task.x, task.y)
    assert np.isfinite(found).all()


# ---------------------------------------------------------------------------------------------------- runs


def test_records_learnt_by_heart_are_found():
    task = recipe.read("digits/fedavg").build()
    x, y = task.x[:64], task.y[:64].roll(32)
    w = by_heart(task, x, y)
    assert float(task.losses(w, x, y).mean()) < membership.BY_HEART
    assert float(task.losses(task.initial, x, y).mean()) > 2


def test_an_overfitted_run_gives_its_members_away():
    alone = ("split.clients=40", "cohort.size=1", "rounds=1", "method.local.epochs=100")
    reached = attacked(*alone)
    found, control, baseline = reached.attacks, reached.control, reached.baseline
    assert reached.records == 36  # of the one client that took part
    assert found["loss"].low > 0.6
    assert found["gradient"].low > 0.6
    assert control.auc > SUCCESS
    assert baseline.low < 0.5 < baseline.high


def test_a_private_run_does_not():
    private = ("method.privacy.noise=2.0", "method.privacy.delta=1e-3", "method.local.steps=10", "rounds=2")
    reached = attacked("split.max_records=144", *private)
    found, control, baseline = reached.attacks, reached.control, reached.baseline
    assert reached.records == 360
    for each in found.values():
        assert each.auc < 0.56
        assert each.low < 0.5 + 0.02
        assert each.epsilon == 0
    assert control.auc > SUCCESS
    assert baseline.low < 0.5 < baseline.high


def test_another_attack_is_one_function(monkeypatch):
    """One that knows the answer finds everybody, and figures survive a file."""
    task = linear_task(records=400, clients=1)
    known = {tuple(row) for row in task.x[:200].tolist()}
    task.test_x = -task.test_x
    monkeypatch.setitem(
        ATTACKS, "oracle", lambda task, w, x, y: torch.tensor([float(tuple(r) in known) for r in x.tolist()])
    )
    task.clients = fv.Split(np.arange(200), np.array([0, 200]), "first")
    oracle = attack(task, task.initial, [0], SEED, 0.0, 400, lambda _: None).attacks["oracle"]
    assert (oracle.auc, oracle.balanced, oracle.rates[1].tpr) == (1, 1, 1)
    assert oracle.epsilon > 2.5
    read = msgspec.json.decode(msgspec.json.encode(oracle), type=membership.Figures)
    assert read == oracle
    assert len(read.fpr) == len(read.tpr) <= 400
