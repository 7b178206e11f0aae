"""Under a secure sum only the mean is found, whatever the server's optimizer made of it; masks hide the rest."""

import pytest
import torch

import fedveil as fv
from attack_tools import FULL, attacked
from codec_tools import image_task
from fedveil.attacks.estimate import cosines, estimates, masked, relative_errors
from fedveil.attacks.sums import undone
from fedveil.core.method import State
from methods import matrix
from toys import linear_task

SECURE = fv.SecureSum(clip=16.0, bits=30)
D = image_task().layout.size
SUMMED: dict[str, fv.Method] = {
    "fedavg": fv.FedAvg(FULL, secure=SECURE),
    "fedsgd": fv.FedSGD(secure=SECURE),
    "fedprox": fv.FedProx(FULL, secure=SECURE),
    "scaffold": fv.Scaffold(FULL, secure=SECURE),
    "feddyn": fv.FedDyn(FULL, secure=SECURE),
    "malicious": fv.FedAvg(FULL, secure=fv.SecureSum(clip=16.0, bits=30, server="malicious")),
    "momentum": fv.FedAvg(FULL, server=fv.ServerOptimizer("momentum", 0.5, schedule="cosine"), secure=SECURE),
    "adam": fv.FedAvg(FULL, server=fv.ServerOptimizer("adam", 0.01, ema=0.9), secure=SECURE),
    "steps down": fv.FedAvg(FULL, server=fv.ServerOptimizer("momentum"), down=fv.Qsgd(4), secure=SECURE),
    "baffle": fv.Baffle(directions=D, clip=None, secure=SECURE),
}


@pytest.mark.parametrize("name", SUMMED)
def test_the_mean_is_found_and_no_single_client(tmp_path, name):
    task = linear_task(uneven=True) if name == "fedavg" else image_task()
    seen, truths = attacked(tmp_path, task, SUMMED[name])
    found = estimates(seen)
    assert [(each.round, each.clients, each.kind, each.records) for each in found] == [
        (1, (0, 1, 2, 3), "sum", None),
        (2, (0, 1, 2, 3), "sum", None),
    ]
    assert min(cosines(task, found, truths)) > 0.999
    assert max(relative_errors(task, found, truths)) < 0.03


@pytest.mark.parametrize(
    ("method", "least"),
    [
        (fv.FedAge(FULL, up=fv.FedAgeCodec(block=16, cohort=5, code="linear"), secure=SECURE), 0.6),
        (fv.FedAvg(FULL, up=fv.PowerSgd(), secure=SECURE), 0.8),
        (fv.Baffle(directions=D // 2, secure=SECURE), 0.55),
        (fv.Baffle(directions=D // 2, weak=D // 3, secure=SECURE), 0.4),
        (fv.Baffle(directions=D // 2, layers=["1.*"], secure=SECURE), 0.3),
    ],
    ids=["codes", "factors", "slopes", "weak slopes", "slopes of a layer"],
)
def test_of_lossy_messages_the_mean_is_found_as_far_as_they_keep_it(tmp_path, method, least):
    seen, truths = attacked(tmp_path, image_task(), method)
    found = estimates(seen)
    assert {(each.clients, each.kind) for each in found} == {((0, 1, 2, 3), "sum")}
    assert len(found) == 2
    assert least < min(cosines(image_task(), found, truths)) < 0.9999


def test_of_a_mean_of_slopes_the_projection_is_found_and_not_their_combination(tmp_path):
    """The projection has relative error √(1 - cosine²); Σ c_k z_k, which the server uses, has a larger one."""
    seen, truths = attacked(tmp_path, image_task(), fv.Baffle(directions=20, clip=None, secure=SECURE))
    found = estimates(seen)
    right = [(1 - c * c) ** 0.5 for c in cosines(image_task(), found, truths)]
    assert relative_errors(image_task(), found, truths) == pytest.approx(right, abs=5e-3)


def test_in_a_round_with_full_updates_only_the_sum_is_secure(tmp_path):
    method = fv.FedAvg(FULL, up=fv.Qsgd(8), full_rounds=1, secure=SECURE)
    seen, truths = attacked(tmp_path, image_task(), method)
    found = estimates(seen)
    assert [each.kind for each in found] == ["decoded"] * 4 + ["sum"]
    assert min(cosines(image_task(), found, truths)) > 0.99
    assert {each.round for each in masked(seen)} == {2}


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "baffle", "codes", "factors"])
def test_a_masked_vector_is_noise_and_a_mask_that_is_missing_is_noticed(tmp_path, monkeypatch, name):
    task = image_task()
    codes = fv.FedAgeCodec(block=16, cohort=5, code="packed", code_size=8, levels=64)
    made = {"codes": fv.FedAge(FULL, up=codes, secure=SECURE), "factors": fv.FedAvg(up=fv.PowerSgd(6), secure=SECURE)}
    method = made.get(name) or SUMMED[name]
    seen, truths = attacked(tmp_path / "masked", task, method)
    found = masked(seen)
    assert {each.kind for each in found} == {"masked"}
    assert len(found) == 8
    scores = cosines(task, found, truths)
    assert max(map(abs, scores)) < 4.5 / D**0.5  # deviations of the cosine of two random vectors
    monkeypatch.setattr("fedveil.privacy.secagg.masks.mask", lambda *_: None)
    seen, truths = attacked(tmp_path / "open", task, method)
    assert min(cosines(task, masked(seen), truths)) > 0.99


def test_without_a_secure_sum_there_is_nothing_masked(tmp_path):
    seen, _ = attacked(tmp_path, image_task(), fv.FedAvg(FULL))
    assert masked(seen) == []


def test_a_round_that_was_lost_gives_no_sum(tmp_path):
    method = fv.FedAvg(FULL, secure=fv.SecureSum(clip=16.0, min_clients=4))
    seen, _ = attacked(tmp_path, image_task(), method, cohort=fv.CohortSampler(size=4, drop=0.9))
    assert estimates(seen) == []


# ---------------------------------------------------------------------------------------------------- a client


@pytest.mark.parametrize(
    "server",
    [fv.ServerOptimizer(lr=0.3, warmup=2), fv.ServerOptimizer("momentum", 0.5, schedule="cosine")],
    ids=["plain", "momentum"],
)
def test_a_client_undoes_the_servers_step_from_the_weights_alone(tmp_path, server):
    seen, truths = attacked(tmp_path, image_task(), fv.FedAvg(FULL, server=server), "client", rounds=3)
    found = estimates(seen)
    assert len(found) == 3
    assert max(relative_errors(image_task(), found, truths)) < 1e-3


def test_a_client_does_not_undo_momentum_from_rounds_that_it_did_not_keep(tmp_path):
    method = fv.FedAvg(FULL, server=fv.ServerOptimizer("momentum"))
    seen, _ = attacked(tmp_path, image_task(), method, "client", rounds=4, keep="2,4")
    assert estimates(seen) == []


def test_a_client_that_replays_steps_finds_the_mean_of_all_slopes(tmp_path):
    method = fv.Baffle(directions=D, clip=None, down="replay")
    seen, truths = attacked(tmp_path, image_task(), method, "client")
    found = estimates(seen)
    assert [each.clients for each in found] == [(), ()]
    assert min(cosines(image_task(), found, truths)) > 0.999


def test_weights_that_are_encoded_anew_are_those_that_the_clients_had(tmp_path):
    method = fv.FedAvg(FULL, down=fv.FedSynthCodec(batches=1, batch=2, epochs=1, fits=2, best=False), secure=SECURE)
    seen, truths = attacked(tmp_path, image_task(), method)
    found = estimates(seen)
    assert not torch.equal(found[1].weights, seen.rounds[1].state.weights)
    assert min(cosines(image_task(), found, truths)) > 0.999


def test_who_trusts_the_server_shows_it_all_and_other_clients_the_noised_mean(tmp_path):
    task, quiet = image_task(), fv.UserLevel(noise=1e-6, clip=100.0, delta=1e-2)
    for name, how in (("noisy", matrix.USER), ("quiet", quiet)):
        method = fv.FedAvg(FULL, user_privacy=how)
        server, truths = attacked(tmp_path / name / "server", task, method)
        assert min(cosines(task, estimates(server), truths)) > 0.9999
        client, truths = attacked(tmp_path / name / "client", task, method, "client")
        found = cosines(task, estimates(client), truths)
        assert max(map(abs, found)) < 0.5 if how is matrix.USER else min(found) > 0.99


# ---------------------------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("optimizer", ["plain", "momentum", "adam"])
def test_a_step_of_the_servers_optimizer_is_undone(optimizer):
    server = fv.ServerOptimizer(optimizer, 0.1)
    draw = torch.Generator().manual_seed(0)
    state = server.init_state(torch.randn(50, generator=draw))
    for number in range(1, 4):
        delta = torch.randn(50, generator=draw)
        after = server.step(state, delta, number)
        found = undone(server, state, after, number, None)
        assert found is not None
        torch.testing.assert_close(found, delta, rtol=1e-4, atol=1e-4)
        state = after


def test_a_step_of_adam_is_not_undone_without_its_moments():
    server = fv.ServerOptimizer("adam", 0.1)
    assert undone(server, State(torch.zeros(3)), State(torch.ones(3)), 1, torch.zeros(3)) is None
