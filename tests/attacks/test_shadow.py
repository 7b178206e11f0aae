"""LiRA: its parts against independent ones, and an overfitted run in which it finds whom the loss does not."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fedveil as fv
from codec_tools import stack_of
from fedveil.attacks import membership, shadow
from fedveil.attacks.membership import attack, scores, took_part
from fedveil.attacks.roc import Roc
from fedveil.attacks.shadow import confidence, halves, likelihood_ratio, lira, train, training
from fedveil.core.data import Rows
from fedveil.data import from_tensors, hold_out
from fedveil.runs import recipe
from toys import linear_task

SEED = fv.Seed.root(3)
LOCAL = fv.LocalTraining(lr=0.1, epochs=20, batch=10)


def clusters(hidden: int = 64, layers: tuple[nn.Module, ...] = ()) -> fv.Task:
    """500 training records of 5 classes that overlap, which 4 clients learn by heart, and 500 that are held out."""
    draw = fv.Seed.root(0).torch()
    centres, y = torch.randn(5, 20, generator=draw), torch.randint(5, (1100,), generator=draw)
    x = centres[y] + 2 * torch.randn(1100, 20, generator=draw)
    data = hold_out(from_tensors(x[:1000], y[:1000], x[1000:], y[1000:], classes=5), 0.5, SEED)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, hidden), *layers, nn.ReLU(), nn.Linear(hidden, 5))
    return fv.Task(model, data, fv.split("iid", data, 4, SEED))


# ---------------------------------------------------------------------------------------------------- parts


def test_each_record_is_in_half_of_the_models_and_each_model_has_half_of_the_records():
    included = halves(300, 8, SEED)
    assert included.shape == (8, 300)
    assert (included.sum(0) == 4).all()
    assert (included.sum(1) == 150).all()
    assert np.abs(np.corrcoef(included[::2])[np.triu_indices(4, 1)]).max() < 0.2
    assert not np.array_equal(included, halves(300, 8, fv.Seed.root(4)))


def test_the_confidence_is_the_logit_of_the_right_class():
    task = linear_task()
    w = 3 * task.initial
    p = task.f(w, task.x).double().softmax(-1).gather(1, task.y[:, None])[:, 0]
    assert torch.allclose(confidence(task, w, task.x, task.y).double(), (p / (1 - p)).log(), atol=1e-4)
    without = copy.copy(task)
    without.scores = False  # as where there are no classes: from the loss
    assert torch.allclose(confidence(without, w, task.x, task.y), (p / (1 - p)).log(), atol=1e-4)
    assert confidence(without, 1e4 * w, task.x, task.y).isfinite().all()


def test_the_ratio_is_that_of_two_normal_densities_with_shared_variances():
    rng = np.random.default_rng(0)
    included = halves(50, 8, SEED)
    shadows = rng.normal(size=(8, 50)) + np.where(included, 2.0, 0.0) + rng.normal(size=50)
    target = rng.normal(size=50)
    target += shadows.mean() - target.mean()  # any other mean is moved to this one
    found = likelihood_ratio(target + 7, shadows, included)
    for k in (0, 17, 49):
        sides = []
        for side in (included, ~included):
            own = [shadows[side[:, i], i] for i in range(50)]
            variance = np.mean([each.var(ddof=1) for each in own])
            sides.append(stats.norm.logpdf(target[k], own[k].mean(), math.sqrt(variance)))
        assert found[k] == pytest.approx(sides[0] - sides[1])


@pytest.mark.parametrize("at_once", [100, 2])
@pytest.mark.parametrize("layers", [(), (nn.BatchNorm1d(8),)])
def test_a_shadow_model_is_trained_on_its_half_and_has_its_own_statistics(monkeypatch, at_once, layers):
    monkeypatch.setattr(shadow, "at_once", lambda task: at_once)
    task, included = clusters(8, layers), halves(60, 4, SEED)
    pool = torch.cat([task.x[:30], task.validation[0][:30]]), torch.cat([task.y[:30], task.validation[1][:30]])
    trained = train(task, pool, included, LOCAL, SEED)
    assert len(trained) == 4
    for k, (own, w) in enumerate(trained):
        alone, half = copy.copy(task), np.flatnonzero(included[k])
        alone.x, alone.y = pool
        alone.rows = lambda clients, half=half: Rows([half for _ in clients])
        stack = stack_of(alone, k)
        stack.seed = SEED
        assert torch.allclose(w, LOCAL.train(stack, task.initial)[0][0], atol=1e-5)
        assert torch.allclose(own.norms.values, stack.norms[0], atol=1e-5)
        assert own.clients is task.clients


def test_shadows_are_trained_for_as_many_epochs_as_members_were_seen():
    task = linear_task()  # 4 clients of 6 records
    rows = [fv.Row(round=1, cohort=[0, 1]), fv.Row(round=2, cohort=[0, 1], missing={"1": "dropped"})]
    rows += [fv.Row(round=3, cohort=[1, 0])]
    found = training(fv.FedAvg(fv.LocalTraining(lr=0.3, epochs=4, batch=2, decay=0.9)), rows, task, [0, 1])
    assert found == fv.LocalTraining(lr=0.3, epochs=10, batch=2)  # 5 answers of 2 clients
    steps = training(fv.FedAvg(fv.LocalTraining(lr=0.3, steps=9, batch=2)), rows, task, [0, 1])
    assert (steps.epochs, steps.steps) == (8, None)  # 9 × 2 records of 6 are 3 epochs
    assert training(fv.Baffle(), rows, task, [0, 1]).epochs >= 1


def test_a_number_of_models_that_cannot_be_is_a_sentence():
    for models in (2, 7):
        with pytest.raises(ValueError, match=f"there are {models} shadow models; use an even number from 4 on, or 0"):
            lira(
                linear_task(),
                torch.zeros(8),
                (torch.zeros(2, 3),) * 2,
                (torch.zeros(2, 3),) * 2,
                LOCAL,
                SEED,
                scores,
                models,
            )


# ---------------------------------------------------------------------------------------------------- runs


def reached(task: fv.Task, method: fv.FedAvg, rounds: int, models: int) -> dict[str, membership.Figures]:
    """The attacks on a run of a method in which every client takes part."""
    result = fv.run(task, method, rounds=rounds, cohort=len(task.clients), seed=0)
    clients = took_part(result.ledger.rows)
    local = training(method, result.ledger.rows, task, clients)
    options = {"kind": "validation", "local": local, "shadows": models}
    return attack(task, result.weights, clients, SEED, 1e-5, 10_000, lambda _: None, **options).attacks


def test_an_overfitted_run_gives_its_members_away_to_lira_sooner_than_to_the_loss():
    found = reached(clusters(), fv.FedAvg(LOCAL), 5, 8)
    by_loss, by_lira = found["loss"], found["lira"]
    assert by_lira.low > by_loss.auc + 0.05
    assert by_lira.rates[1].low > by_loss.rates[1].high  # at 1% of false positives
    assert by_lira.rates[1].tpr > 0.05


def test_weights_that_were_not_trained_or_that_diverged_give_nobody_away():
    task = clusters()
    for w in (task.initial, torch.full_like(task.initial, math.nan)):
        sides = (task.x[:400], task.y[:400]), (task.validation[0][:400], task.validation[1][:400])
        low, high = Roc(*lira(task, w, *sides, LOCAL, SEED, scores, 4)).interval()
        assert low < 0.5 < high


@pytest.mark.slow
def test_digits_that_few_clients_learn_are_given_away_to_lira():
    few = recipe.read("digits/fedavg", ["task.validation=0.8", "split.clients=4", "cohort.size=4"])
    found = reached(few.build(), few.method, 10, 64)
    assert found["lira"].low > found["loss"].auc
    assert found["lira"].rates[1].tpr > 2 * found["loss"].rates[1].tpr
