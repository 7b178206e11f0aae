"""Messages of methods that average become updates: undone weights, control variates, and what the server refuses."""

from dataclasses import replace

import pytest
import torch

import fedveil as fv
from attack_tools import FULL, attacked
from codec_tools import image_task
from fedveil.attacks.estimate import cosines, estimates, relative_errors
from fedveil.attacks.updates import loss_to_the
from toys import linear_task

FEDAGE = fv.FedAgeCodec(block=16, cohort=5, code="linear")


@pytest.mark.parametrize("q", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("codec", "most"), [(fv.Raw(), 1e-2), (fv.Half(), 0.05)], ids=["raw", "half"])
def test_the_loss_in_an_update_of_q_fedavg_is_undone(tmp_path, q, codec, most):
    task = image_task()
    seen, truths = attacked(tmp_path, task, fv.QFedAvg(fv.LocalTraining(lr=0.1, batch=8, epochs=2), q=q, up=codec))
    found = estimates(seen)
    assert min(cosines(task, found, truths)) > 0.9999
    errors = sorted(relative_errors(task, found, truths))
    assert errors[-2] < most  # where both solutions are as far from the public loss, the length may be the wrong one


@pytest.mark.parametrize("change", [0.3, 10.0], ids=["larger", "smaller"])
@pytest.mark.parametrize("q", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("loss", [0.05, 1.0, 4.0])
def test_a_loss_to_a_power_is_found_from_h_on_either_side(loss, q, change):
    """`change` is ‖(w - w_end) / lr‖ in units of what makes the two solutions one."""
    lr = 0.1
    away = change * (loss / (q + 1) / lr) ** 0.5
    h = q * loss ** (q - 1) * away**2 + loss**q / lr
    assert loss_to_the(q, h, loss**q * away, lr, public=1.1 * loss) == pytest.approx(loss**q, rel=1e-6)


def test_control_variates_are_the_gradients_of_clients_that_take_one_step(tmp_path):
    """In the second round a control's change is the difference of two gradients, so the first round's is needed."""
    task = image_task()
    seen, truths = attacked(tmp_path / "all", task, fv.Scaffold(FULL), rounds=3)
    found = [each for each in estimates(seen) if each.kind == "control"]
    assert [each.round for each in found] == [1] * 4 + [2] * 4 + [3] * 4
    assert {each.means for each in found} == {"gradient"}
    assert min(cosines(task, found, truths)) > 0.9999
    assert max(relative_errors(task, found, truths)) < 1e-3
    seen, _ = attacked(tmp_path / "late", task, fv.Scaffold(FULL), rounds=3, keep="2-3")
    assert {each.kind for each in estimates(seen)} == {"raw"}


def test_fedsgd_sends_the_gradient(tmp_path):
    task = image_task()
    seen, truths = attacked(tmp_path, task, fv.FedSGD())
    found = estimates(seen)
    assert {each.means for each in found} == {"gradient"}
    assert max(relative_errors(task, found, truths)) < 1e-5


def test_a_codec_that_makes_its_own_updates_sends_something_like_a_gradient(tmp_path):
    method = fv.FedSynth(up=fv.FedSynthCodec(batches=2, batch=4, epochs=1, fits=20, objective="data"))
    seen, truths = attacked(tmp_path, image_task(), method, rounds=1)
    found = estimates(seen)
    assert {each.means for each in found} == {"gradient"}
    assert min(cosines(image_task(), found, truths)) > 0.3


@pytest.mark.parametrize(
    ("method", "stated"),
    [
        (fv.FedAvg(FULL), True),
        (fv.FedAvg(FULL, up=fv.TopK(0.5)), True),
        (fv.FedAge(FULL, up=FEDAGE), True),
        (fv.Scaffold(FULL), False),
        (fv.QFedAvg(FULL, up=FEDAGE), False),
        (fv.FedAvg(FULL, privacy=fv.DpSgd(noise=1.0, clip=1.0, delta=1e-3)), False),
    ],
    ids=["raw", "top-k", "codes", "unweighted", "unweighted codes", "private"],
)
def test_records_are_those_that_a_message_states(tmp_path, method, stated):
    task = linear_task(uneven=True)
    seen, _ = attacked(tmp_path, task, method, rounds=1)
    wanted = {k: int(n) if stated else None for k, n in enumerate(task.clients.sizes)}
    assert {each.clients[0]: each.records for each in estimates(seen)} == wanted


def test_codes_of_clients_of_unlike_size_have_their_full_length(tmp_path):
    """A client multiplies its update by its share of the records before it encodes it."""
    codec = replace(FEDAGE, code="packed", code_size=8)
    task = linear_task(uneven=True)
    seen, truths = attacked(tmp_path, task, fv.FedAge(FULL, up=codec), rounds=1)
    found = estimates(seen)
    assert {each.kind for each in found} == {"code", "difference"}
    assert max(relative_errors(task, found, truths)) < 0.2  # the levels that a number is rounded to


def test_what_factors_tell_in_both_exchanges_is_used(tmp_path):
    """The estimate M̂ has M̂ Q and M̂ᵀ P̂ as they were told, and no smaller matrix has."""
    task = image_task()
    codec = fv.PowerSgd(2)
    seen, truths = attacked(tmp_path, task, fv.FedAvg(FULL, up=codec), rounds=1)
    found = {each.clients[0]: each.vector for each in estimates(seen)}
    layers = [layer for layer in codec.layers(task) if layer[-1]]
    for each in seen.rounds[0].messages:
        own = [found[each.client][at].view(n, m) for at, n, m, _ in layers]
        true = [truths[1][each.client]["update"][at].view(n, m) for at, n, m, _ in layers]
        if first := hasattr(each.question, "basis"):
            factors = codec.factors(task, each.question.basis, left=False)
        else:
            factors = codec.factors(task, each.question.vector, left=True)
        for matrix, right, factor in zip(own, true, factors, strict=True):
            told = (matrix if first else matrix.T) @ factor
            torch.testing.assert_close(told, (right if first else right.T) @ factor, rtol=1e-4, atol=1e-6)
            assert matrix.norm() <= right.norm() * (1 + 1e-5)


def test_messages_that_the_server_refuses_are_left_out(tmp_path):
    task = image_task()
    seen, _ = attacked(tmp_path, task, fv.FedAvg(up=fv.TopK(0.2)), rounds=1)
    one, other, *rest = seen.rounds[0].messages
    one.answer.places[-1] = 10**6
    other.answer.values[0] = torch.nan
    assert {each.clients[0] for each in estimates(seen)} == {each.client for each in rest}


@pytest.mark.parametrize(
    "method",
    [
        fv.FedAvg(server=fv.ServerOptimizer(ema=0.9)),
        fv.FedAvg(down=fv.Qsgd(2)),
        fv.FedAvg(down=fv.FedSynthCodec(batches=1, batch=2, epochs=1, fits=2, best=False)),
    ],
    ids=["average", "steps", "from the initial weights"],
)
def test_weights_are_those_from_which_the_clients_trained(tmp_path, monkeypatch, method):
    task, trained = image_task(), []
    inner = fv.LocalTraining.train

    def train(self, stack, w, *rest):
        trained.append(w.clone())
        return inner(self, stack, w, *rest)

    monkeypatch.setattr(fv.LocalTraining, "train", train)
    seen, _ = attacked(tmp_path, task, method, rounds=3)
    found = {each.round: each.weights for each in estimates(seen)}
    for number in (1, 2, 3):
        assert any(torch.equal(found[number], w) for w in trained)
    assert not torch.equal(found[2], found[3])
