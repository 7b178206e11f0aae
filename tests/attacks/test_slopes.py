"""K slopes with known directions are K measurements: what they keep of a gradient, in one round and over several."""

import math
from dataclasses import replace

import pytest
import torch

import fedveil as fv
from attack_tools import attacked
from codec_tools import image_task
from fedveil.attacks.estimate import cosines, estimates, relative_errors, truth_of
from fedveil.attacks.slopes import regrown, smallest
from fedveil.core.directions import Directions

STILL = fv.ServerOptimizer("plain", 1e-12)  # weights that do not move
D = image_task().layout.size


def scores(folder, method: fv.Baffle, kind: str = "slopes", rounds: int = 1) -> list[float]:
    seen, truths = attacked(folder, image_task(), method, rounds=rounds)
    found = [each for each in estimates(seen) if each.kind == kind]
    assert {each.means for each in found} <= {"gradient"}
    return cosines(image_task(), found, truths)


@pytest.mark.parametrize("scheme", ["forward", "central"])
@pytest.mark.parametrize("law", ["gaussian", "rademacher"])
def test_as_many_slopes_as_weights_give_the_whole_gradient(tmp_path, law, scheme):
    assert min(scores(tmp_path, fv.Baffle(directions=D, law=law, scheme=scheme))) > 0.999


def test_more_slopes_than_weights_give_it_more_exactly(tmp_path):
    seen, truths = attacked(tmp_path, image_task(), fv.Baffle(directions=2 * D), rounds=1)
    assert max(relative_errors(image_task(), estimates(seen), truths)) < 2e-3


@pytest.mark.parametrize("law", ["gaussian", "rademacher", "orthogonal"])
@pytest.mark.parametrize("share", [0.125, 0.5])
def test_fewer_slopes_keep_their_share_of_the_energy(tmp_path, law, share):
    found = scores(tmp_path, fv.Baffle(directions=round(share * D), law=law))
    assert sum(found) / len(found) == pytest.approx(math.sqrt(share), abs=0.1)


def test_an_estimate_is_the_projection_of_the_gradient_onto_the_directions(tmp_path):
    task, method = image_task(), fv.Baffle(directions=40, scheme="central")
    seen, truths = attacked(tmp_path, task, method, rounds=1)
    for each in estimates(seen):
        question = next(m.question for m in seen.rounds[0].messages if (m.client,) == each.clients)
        z = regrown(method.prober(task), ((question.key, 40),)).double()
        true = truth_of(task, each, truths[1]).double()
        projected = z.mT @ torch.linalg.solve(z @ z.mT, z @ true)
        assert float(torch.linalg.vector_norm(each.vector - projected) / projected.norm()) < 1e-2


@pytest.mark.parametrize(
    "method",
    [
        fv.Baffle(directions=D, seeds="own"),
        fv.Baffle(directions=D, down="replay"),
        fv.Baffle(directions=D, batch=4),
        fv.Baffle(directions=D, batch=4, seeds="own"),
    ],
    ids=["own keys", "replay", "batch", "own keys, batch"],
)
def test_weights_keys_and_batches_of_each_client_are_those_it_used(tmp_path, method):
    """In the second round the weights have moved, and a wrong key or batch would leave nothing of the gradient."""
    assert min(scores(tmp_path, method, rounds=2)) > 0.99


@pytest.mark.parametrize("down", ["weights", "replay"])
def test_weights_are_those_in_training_before_the_step(tmp_path, down):
    server = fv.ServerOptimizer("adam", 0.1, ema=0.9 if down == "weights" else 0.0)
    seen, _ = attacked(tmp_path, image_task(), fv.Baffle(directions=4, down=down, server=server), rounds=2)
    for each in estimates(seen):
        before = server.training(seen.rounds[each.round - 1].state)
        assert torch.equal(each.weights, before.weights)


def test_layers_that_are_not_trained_are_zero_and_the_others_are_found(tmp_path):
    task = image_task()
    layers = [layer for layer in task.layout.layers if layer.name.startswith("3.")]
    count = sum(layer.stop - layer.start for layer in layers)
    seen, truths = attacked(tmp_path, task, fv.Baffle(directions=2 * count, layers=["3.*"]), rounds=1)
    for each in estimates(seen):
        inside = torch.zeros(D, dtype=torch.bool)
        for layer in layers:
            inside[layer.start : layer.stop] = True
        assert not each.vector[~inside].any()
        true = truth_of(task, each, truths[1])
        assert float(torch.cosine_similarity(each.vector[inside], true[inside], dim=0)) > 0.999


def test_a_weak_client_is_known_by_what_it_sent(tmp_path):
    seen, truths = attacked(tmp_path, image_task(), fv.Baffle(directions=D, weak=D // 8), rounds=1)
    found = estimates(seen)
    sent = {m.client: len(m.answer.slopes) for m in seen.rounds[0].messages}
    assert set(sent.values()) == {D, D // 8}
    for each, score in zip(found, cosines(image_task(), found, truths), strict=True):
        assert score > 0.99 if sent[each.clients[0]] == D else 0.1 < score < 0.6


# ---------------------------------------------------------------------------------------------------- over rounds


def test_rounds_of_weights_that_stand_still_give_the_whole_gradient(tmp_path):
    method = fv.Baffle(directions=D // 3, scheme="central", server=STILL)
    assert 3 * method.directions == D
    assert max(scores(tmp_path / "alone", method, rounds=3)) < 0.8
    assert min(scores(tmp_path / "together", method, "slopes over rounds", rounds=3)) > 0.999


def test_rounds_of_weights_that_move_still_give_more_than_one_round(tmp_path):
    method = fv.Baffle(directions=D // 2)
    alone = scores(tmp_path / "alone", method, rounds=3)
    assert min(scores(tmp_path / "together", method, "slopes over rounds", rounds=3)) > max(alone)


def test_over_rounds_is_said_of_the_last_round_of_clients_that_came_twice(tmp_path):
    seen, _ = attacked(tmp_path, image_task(), fv.Baffle(directions=8), rounds=3, cohort=2)
    came: dict[int, list[int]] = {}
    for kept in seen.rounds:
        for each in kept.messages:
            came.setdefault(each.client, []).append(kept.round)
    found = {e.clients[0]: e.round for e in estimates(seen) if e.kind == "slopes over rounds"}
    assert found == {client: rounds[-1] for client, rounds in came.items() if len(rounds) > 1}
    assert found


def test_slopes_that_are_no_numbers_are_left_out(tmp_path):
    seen, _ = attacked(tmp_path, image_task(), fv.Baffle(directions=8), rounds=1)
    broken = seen.rounds[0].messages[0]
    broken.answer.slopes[0] = math.nan
    assert {each.clients[0] for each in estimates(seen)} == {0, 1, 2, 3} - {broken.client}


# ---------------------------------------------------------------------------------------------------- algebra


@pytest.mark.parametrize("count", [5, 20, 60])
def test_the_smallest_solution_is_that_of_the_pseudoinverse(count):
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(count, 20, generator=draw)
    s = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(smallest(z, s), torch.linalg.pinv(z.double()) @ s)


def test_directions_that_repeat_do_no_harm():
    """A singular system, as of the orthogonal law in dimensions that are no power of 2."""
    z = Directions.of("orthogonal", 48, 48).rows(torch, torch.tensor([7]), 0, 48)[0]
    g = torch.randn(48, 1, generator=torch.Generator().manual_seed(0)).double()
    assert int(torch.linalg.matrix_rank(z.double())) < 48
    found = smallest(z, z.double() @ g)
    torch.testing.assert_close(found, torch.linalg.pinv(z.double()) @ z.double() @ g, atol=1e-4, rtol=1e-4)


def test_directions_are_regrown_as_they_were_drawn():
    task = image_task()
    prober = replace(fv.Baffle(directions=300), law="gaussian").prober(task)
    rows = regrown(prober, ((5, 300), (-9, 2)))
    coefficients = torch.arange(300.0), torch.tensor([1.0, -2.0])
    torch.testing.assert_close(
        torch.cat(coefficients) @ rows, prober.combine([5, -9], list(coefficients)), rtol=1e-4, atol=1e-2
    )
