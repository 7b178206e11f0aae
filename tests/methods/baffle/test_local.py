"""Local steps along shared directions (FedKSeed): against a loop by hand, replayed, summed, and refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from attack_tools import attacked
from codec_tools import image_task
from fedveil.attacks.estimate import cosines, estimates
from fedveil.core.directions import Directions, words
from fedveil.core.message import Refused, Slots
from fedveil.data import from_tensors
from fedveil.links.steps import CatchUp
from fedveil.methods.baffle.estimate import key_of
from fedveil.methods.baffle.export import export
from fedveil.methods.baffle.questions import Probe, Slopes
from methods.baffle.probes import stack
from toys import kept, linear_task

STEPS = fv.LocalSteps(steps=6, directions=4, lr=0.2)  # two visits to each of 12 directions
METHOD = fv.Baffle(directions=12, local=STEPS)
PLAIN = {"clip": None, "server": fv.ServerOptimizer("plain", 0.5)}


def quadratic_task() -> fv.Task:
    """Least squares with 5 weights: along a direction the central difference is the exact slope."""
    draw = fv.Seed.root(3).torch()
    x, y = torch.randn(30, 4, generator=draw), torch.randn(30, 1, generator=draw)
    data = from_tensors(x, y, x, y)
    split = fv.split("iid", data, 3, fv.Seed.root(0))
    model = nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.copy_(torch.arange(4.0).view(1, 4) / 5)
        model.bias.zero_()
    return fv.Task(model, data, replace(split, max_records=split.largest), loss="mse")


def walked(task: fv.Task, client: int, z: np.ndarray, how: fv.LocalSteps) -> np.ndarray:
    """Where a client gets from the initial weights, [d]: FedKSeed's loop in float64 with NumPy alone."""
    rows = task.clients[client]
    x, y = task.x[rows].double().numpy(), task.y[rows].double().numpy()[:, 0]
    w, at = task.initial.double().numpy().copy(), 0
    for _ in range(how.steps):
        error = x @ w[:4] + w[4] - y
        gradient = 2 * np.append(error @ x, error.sum()) / len(y)
        own = z[at : at + how.directions]
        for s, direction in zip(own @ gradient, own, strict=True):
            w -= how.lr / how.directions * s * direction
        at = (at + how.directions) % len(z)
    return w


@pytest.mark.parametrize("how", [STEPS, fv.LocalSteps(3, 4, 0.2), fv.LocalSteps(24, 1, 0.05)], ids=str)
def test_a_round_is_the_mean_of_the_ways_that_a_loop_by_hand_finds(how):
    task = quadratic_task()
    visits = how.steps * how.directions / 12
    server = fv.ServerOptimizer("plain", how.lr * visits * 12 / how.directions)  # what K slopes and their mean miss
    method = fv.Baffle(directions=12, local=how, scheme="central", sigma=1e-2, clip=None, server=server)
    result = fv.run(task, method, rounds=1, cohort=3)
    key = np.array([key_of(fv.Seed.root(0).child("round", 1))])
    z = Directions.of("gaussian", 5, 12).rows(np, key, 0, 12)[0].astype(np.float64)
    expected = np.mean([walked(task, k, z, how) for k in range(3)], 0)
    assert np.allclose(result.weights.numpy(), expected, atol=2e-4)
    assert np.abs(expected - task.initial.numpy()).max() > 0.05
    assert result.ledger.rows[0].passes == 30 * how.steps * 2 * how.directions


def test_one_step_along_all_directions_gives_the_slopes_of_the_weights():
    task = linear_task(uneven=True)
    one, none = (fv.Baffle(directions=12, local=local) for local in (fv.LocalSteps(1, 12), None))
    w, question = task.initial, Probe(task.initial, 5, 12)
    for ours, plain in zip(one.probe(stack(task), w, question), none.probe(stack(task), w, question), strict=True):
        assert torch.allclose(ours.slopes, plain.slopes, atol=2e-3)
        assert ours.records == plain.records


def test_each_step_draws_records_of_its_own():
    task = linear_task(uneven=True)
    everyone, method = stack(task), replace(METHOD, batch=2)
    everyone.witnessed = True
    method.probe(everyone, task.initial, Probe(task.initial, 5, 12))
    drawn = everyone.truth["records"]
    assert [len(rows) for rows in drawn] == [6 * min(2, n) for n in task.clients.sizes]
    assert len(set(drawn[3].view(6, 2)[:, 0].tolist())) > 1
    assert everyone.passes == sum(map(len, drawn)) * (4 + 1)
    keys = words(torch.tensor([5]), torch.arange(4))
    assert torch.equal(drawn[3][:2], method.drawn(stack(task), words(keys, torch.tensor([0])))[0][3])


# ---------------------------------------------------------------------------------------------------- replay and sums


class Away(fv.CohortSampler):
    """Client 0 takes part in the first round and in the fifth; all others always."""

    def draw(self, task, seed):
        rounds = {fv.Seed.root(0).child("round", n, "cohort"): n for n in range(1, 9)}
        everyone = range(len(task.clients))
        return tuple(everyone if rounds[seed] in (1, 5) else everyone[1:])


@pytest.mark.parametrize("secure", [None, fv.SecureSum(clip=16.0)], ids=["clear", "secure"])
def test_replayed_weights_are_the_server_s_bit_for_bit_also_after_rounds_away(secure):
    task = image_task()
    method = replace(METHOD, down="replay", batch=4, secure=secure)
    run = fv.Federation(task, method, fv.engines.LocalEngine(), Away(size=len(task.clients)), fv.Seed.root(0))
    state = method.init_state(task)
    for number in range(1, 6):
        before = state
        state, row = run.step(state, number, 5)
        assert row.metrics["resynced"] == 0
    stands = {k: next(e[3] for e in reversed(v) if e[2] == "down") for k, v in run.clients.memory.entries.items()}
    assert len(stands) == len(task.clients)
    assert all(torch.equal(stand.weights, before.weights) for stand in stands.values())
    sent = fv.run(task, replace(method, down="weights"), rounds=5, cohort=Away(size=len(task.clients)))
    assert torch.equal(sent.weights, state.weights)


def test_the_secure_sum_gives_the_clear_step_within_its_quanta():
    task, secure = linear_task(uneven=True), fv.SecureSum(clip=16.0)
    clear, summed = (fv.run(task, replace(METHOD, **PLAIN, secure=s), rounds=1, cohort=4) for s in (None, secure))
    fixed = secure.fixed_point(4, 4, task.sizes, Slopes)
    quantum = (
        fixed.clip * fixed.heaviest / fixed.half / task.clients.sizes.sum()
    )  # of the mean slope; a client errs by one
    z = METHOD.prober(task).directions.rows(np, np.array([key_of(fv.Seed.root(0).child("round", 1))]), 0, 12)[0]
    bound = 0.5 * np.abs(z).sum(0) / 12 * 4 * quantum
    assert bound.max() < 1e-3
    assert (np.abs((clear.weights - summed.weights).numpy()) < bound + 1e-6).all()
    assert (clear.weights - task.initial).abs().max() > 0.05


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path):
    method = replace(METHOD, down="replay", batch=3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fv.run(linear_task(), method, rounds=4, cohort=3, folder=whole)
    for rounds in (2, 4):
        fv.run(linear_task(), method, rounds=rounds, cohort=3, folder=parts)
    one, other = kept(whole), kept(parts)
    assert (one[0], one[1], one[3]) == (other[0], other[1], other[3])


def test_a_stack_answers_what_its_clients_would_alone():
    task, question = linear_task(uneven=True), Probe(linear_task().initial, 5, 12)
    together = METHOD.probe(stack(task), task.initial, question)
    for client, answer in enumerate(together):
        (alone,) = METHOD.probe(stack(task, (client,)), task.initial, question)
        assert torch.allclose(answer.slopes, alone.slopes, atol=2e-3)


def test_layer_by_layer_the_steps_are_the_same():
    task, question = linear_task(), Probe(linear_task().initial, 5, 12)
    by_layer = replace(METHOD, slices="layers").probe(stack(task), task.initial, question)
    for ours, theirs in zip(by_layer, METHOD.probe(stack(task), task.initial, question), strict=True):
        assert torch.allclose(ours.slopes, theirs.slopes, atol=5e-3)


# ---------------------------------------------------------------------------------------------------- what is refused


def test_the_attack_on_slopes_finds_the_gradient_less_well_the_longer_the_way(tmp_path):
    task = image_task()
    d = task.layout.size

    def score(folder, lr):
        local = fv.LocalSteps(2, d // 2, lr)
        seen, truths = attacked(folder, task, fv.Baffle(directions=2 * (d // 2), local=local), rounds=1)
        found = [each for each in estimates(seen) if each.kind == "slopes"]
        return min(cosines(task, found, truths))

    assert score(tmp_path / "short", 1e-6) > 0.99
    assert score(tmp_path / "long", 0.5) < 0.99


@pytest.mark.parametrize("count", [4, 11, 13])
def test_another_number_of_directions_than_the_recipe_s_is_refused(count):
    task = linear_task()
    with pytest.raises(Refused, match="too large" if count > 12 else "wrong field: .* local steps use 12"):
        METHOD.handlers[Probe](stack(task), Probe(task.initial, 1, count))


def test_a_client_that_was_never_there_catches_up_in_one_question():
    task = linear_task()
    chosen = replace(METHOD, down="replay")
    run = fv.Federation(task, chosen, fv.engines.LocalEngine(), fv.CohortSampler(size=4), fv.Seed.root(0))
    state = chosen.init_state(task)
    for number in (1, 2):
        state, _ = run.step(state, number, 2)
    missed = chosen.steps.missed(state, 0)
    newcomer = stack(task, (0,), [Slots()])
    assert isinstance(missed, CatchUp)
    chosen.steps.follow(newcomer, missed)
    assert torch.equal(newcomer.kept["down"][0].weights, state.weights)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"seeds": "own"}, "method.local adds up slopes along directions that all clients share"),
        ({"weak": 4}, "leave method.weak out"),
        ({"privacy": fv.DpSgd(delta=1e-3)}, "method.local measures records again in every step"),
        ({"directions": 10}, "6 steps of 4 directions, which do not use each of the 10 directions equally often"),
        ({"directions": 16}, "6 steps of 4 directions, which do not use each of the 16 directions equally often"),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(METHOD, **settings)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"directions": 0}, {"lr": 0.0}])
def test_local_steps_are_above_zero(settings):
    with pytest.raises(ValueError, match=r"method\.local\.steps and method\.local\.directions are at least 1"):
        fv.LocalSteps(**settings)


def test_the_edge_client_says_that_it_takes_none(tmp_path):
    with pytest.raises(ValueError, match=r"the edge client takes no local steps; leave method\.local out"):
        export(image_task(), METHOD, tmp_path)
