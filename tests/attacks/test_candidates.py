"""Candidates are told from each other by a message that is far too short to rebuild them, and not by noise."""

import pytest
import torch

import fedveil as fv
from attack_tools import attacked, without_records
from fedveil.attacks import candidates
from fedveil.attacks.candidates import picked, similar
from fedveil.attacks.estimate import estimates
from fedveil.attacks.matrix import Case, task_of

TASKS = {n: task_of(Case("digits", fv.FedSGD(), n, small=True), fv.load("digits"), fv.Seed.root(0)) for n in (1, 8)}
ONE = fv.LocalTraining(lr=0.1)


def found(folder, method: fv.Method, records: int = 1, rounds: int = 1, kind: str = ""):
    task = TASKS[records]
    seen, truths = attacked(folder, task, method, rounds=rounds, cohort=4)
    made = [each for each in estimates(seen) if not kind or each.kind == kind]
    return picked(task, seen, made, truths)


def test_a_gradient_picks_its_record_and_the_control_does_too(tmp_path):
    told = found(tmp_path, fv.FedSGD())
    assert (told.messages, told.candidates) == (4, 4 + 360)  # all test records
    assert (told.share.value, told.auc.value, told.control) == (1, 1, 1)
    assert told.chance == pytest.approx(1 / 364)


@pytest.mark.parametrize("down", ["weights", "replay"])
def test_few_slopes_pick_a_single_record_though_nothing_can_be_rebuilt_from_them(tmp_path, down):
    told = found(tmp_path, fv.Baffle(directions=8, down=down))
    assert told.share.value == 1


def test_slopes_of_several_records_pick_some_and_more_over_rounds(tmp_path):
    one = found(tmp_path / "one", fv.Baffle(directions=8), 8)
    more = found(tmp_path / "more", fv.Baffle(directions=8), 8, rounds=6, kind="slopes over rounds")
    assert 0.6 < one.auc.value < more.auc.value
    assert more.share.value > 3 * more.chance


@pytest.mark.parametrize("law", ["rademacher", "orthogonal"])
@pytest.mark.parametrize("seeds", ["own", "shared"])
def test_every_kind_of_direction_is_regrown(tmp_path, law, seeds):
    assert found(tmp_path, fv.Baffle(directions=16, law=law, seeds=seeds)).share.value == 1


def test_updates_are_compared_with_descent(tmp_path):
    assert found(tmp_path, fv.FedAvg(ONE)).auc.value == 1
    assert found(tmp_path / "more", fv.FedAvg(fv.LocalTraining(lr=0.1, batch=2)), 8).auc.value > 0.8


def test_a_secure_sum_of_slopes_tells_less_of_each_record_than_its_terms(tmp_path):
    summed = found(tmp_path / "sum", fv.Baffle(directions=16, secure=fv.SecureSum(clip=64)), 8)
    alone = found(tmp_path / "alone", fv.Baffle(directions=16), 8)
    assert summed.messages == 1
    assert summed.auc.low < summed.auc.value < summed.auc.high  # of one message, over its records
    assert 0.5 < summed.auc.value < alone.auc.value


def test_noise_leaves_no_more_than_chance(tmp_path):
    private = fv.DpSgd(noise=50.0, clip=0.1, delta=1e-2)
    told = found(tmp_path, fv.Baffle(directions=8, privacy=private, batch=1))
    assert told is None or told.share.value < 0.5
    noisy = found(tmp_path / "avg", fv.FedAvg(ONE, privacy=private))
    assert noisy.share.value == 0
    assert noisy.control == 1


def test_scores_depend_on_messages_and_candidates_only(tmp_path):
    task = TASKS[1]
    seen, _ = attacked(tmp_path, task, fv.Baffle(directions=8), rounds=1, cohort=4)
    made = [each for each in estimates(seen) if each.kind == "slopes"]
    x, y = task.test_x[:20], task.test_y[:20]
    told = candidates.scores(task, seen, made, x, y)
    assert told.shape == (4, 20)
    assert torch.equal(told, candidates.scores(without_records(task), seen, made, x, y))


def test_many_numbers_are_compared_in_two_passes_with_the_same_scores(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    x, y, basis = (torch.randn(*shape, generator=draw) for shape in ((30, 5), (30,), (5, 40)))
    calls = []

    def made(u, v):
        calls.append(len(u))
        return u @ basis

    once = similar(made, basis[:1], x, y)[0]
    assert sum(calls) == 30
    monkeypatch.setattr(candidates, "HELD", 40 * 7)
    assert torch.allclose(similar(made, basis[:1], x, y)[0], once, atol=1e-6)
    assert sum(calls) == 90
    sent = x @ basis
    unit = sent.mean(0) / sent.mean(0).norm()
    along = torch.eye(40) - torch.outer(unit, unit)
    assert torch.allclose(once, torch.cosine_similarity(sent @ along, (basis[0] @ along)[None]), atol=1e-5)
    assert torch.allclose(similar(made, 3 * basis[:1], x, y)[0], once, atol=1e-6)
