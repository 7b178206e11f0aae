"""Record-level differential privacy of FedAvg and its kin: what leaves a client, and what it costs."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from codec_tools import digits, image_task, stack_of
from fedveil.codecs.raw import Update
from fedveil.core import message
from fedveil.core.clients import Clients, Letter, Reply
from fedveil.core.message import Envelope, Slots, frame, pack
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine as Engine
from fedveil.gpu.graphs import Loop
from fedveil.links.down import Train
from fedveil.methods.scaffold import Control
from fedveil.privacy import dpsgd
from fedveil.privacy.accountant import Noised, epsilon
from fedveil.privacy.dpsgd import DpSgd, Gradients, clipped_sum, normal, poisson
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from methods.surrogates.test_capture import Watch
from toys import Tamper, linear_task

LOCAL = fv.LocalTraining(lr=0.3, steps=4, batch=3, weight_decay=0.1)
PRIVACY = DpSgd(noise=1.5, clip=0.7, delta=1e-3)
CODECS = {
    "raw": fv.Raw(),
    "half": fv.Half(),
    "qsgd": fv.Qsgd(),
    "fedage": fv.FedAgeCodec(block=4, code="linear"),
    "tofu": fv.TofuCodec(points=2, steps=3),
    "fedsynth": fv.FedSynthCodec(batches=1, batch=2, epochs=1, fits=3, best=False),
    "tiers": fv.Tiers(*(fv.FedSynthCodec(batches=b, batch=2, epochs=1, fits=2, best=False) for b in (2, 1))),
    "zstd": fv.Zstd(),
}


PUBLIC = ("split.max_records=144", "method.privacy.delta=1e-3")


def uneven(seed: int, sizes=(6, 3, 5, 4)) -> fv.Task:
    """Clients of these sizes with records drawn from `seed`, of which a client may hold 6."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), 3, generator=draw)
    data = from_tensors(x, (x[:, 0] > 0).long(), x, (x[:, 0] > 0).long(), classes=2)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    split = dataclasses.replace(fv.Split(np.arange(len(x)), starts, "by hand"), max_records=6)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) / 10)
        model.bias.zero_()
    return fv.Task(model, data, split)


# ---------------------------------------------------------------------------------------------------- training


def updates(method: fv.Averaging, stack: fv.ClientStack, w: torch.Tensor) -> torch.Tensor:
    """What training from `w` [d] gives, [C, d]."""
    return method.released(stack, Train(w), w)["update"]


def by_hand(task, client, secret, steps, local=LOCAL, pull=0.0, start=None, push=0.0):
    """DP-SGD, step after step, with the noise and the draws of one client's secret."""
    w, rate = (task.initial if start is None else start).clone(), local.batch / task.largest
    drawn = poisson(secret.child("draw"), task.clients[client], rate, steps)
    noise = normal(secret.child("noise"), steps * len(w)).view(steps, -1) * (PRIVACY.noise * PRIVACY.clip)
    for rows, added in zip(drawn, noise, strict=True):
        total = torch.zeros_like(w, dtype=torch.float64)
        if len(rows):
            total = clipped_sum(task, w[None], task.x[rows][None], task.y[rows][None], torch.ones(1, len(rows)), 0.7)[0]
        private = ((total + added) / local.batch).float()
        w = w - local.lr * (private + local.weight_decay * w + pull * (w - task.initial) + push)
    return w


@pytest.mark.parametrize("pull", [0.0, 0.5])
def test_private_training_is_dp_sgd_and_what_looks_at_weights_only_comes_after_the_noise(pull):
    task = uneven(0)
    method = fv.FedProx(LOCAL, mu=pull, privacy=PRIVACY) if pull else fv.FedAvg(LOCAL, privacy=PRIVACY)
    stack = stack_of(task, 0, 1, 2, 3)
    found = updates(method, stack, task.initial)
    for k, secret in enumerate(stack.secrets("gradients")):
        expected = by_hand(task, k, secret.child(0), 4, pull=pull) - task.initial
        torch.testing.assert_close(found[k], expected, atol=1e-5, rtol=1e-4)


def test_scaffold_corrects_after_the_noise_and_makes_its_control_variates_of_private_weights():
    task, method = uneven(0), fv.Scaffold(LOCAL, privacy=PRIVACY)
    w, c = task.initial + 0.1, torch.linspace(-0.2, 0.2, 8)
    own = [torch.full((8,), 0.1 * k) for k in range(4)]
    stack = stack_of(task, 0, 1, 2, 3)
    stack.memory[:] = [Slots({"scaffold": Control(each)}) for each in own]
    question = method.parts.down.question
    answers = method.handlers[question](stack, question(weights=w, control=c))
    for k, secret in enumerate(stack.secrets("gradients")):
        trained = by_hand(task, k, secret.child(0), 4, start=w, push=c - own[k])
        torch.testing.assert_close(answers[k].update, trained - w, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(answers[k].control, (w - trained) / (4 * LOCAL.lr) - c, atol=1e-4, rtol=1e-4)
    assert stack.charged == 1


def test_scaffold_charges_what_fedavg_does_and_ends_within_its_budget():
    task, found = uneven(0), []
    for method in (fv.FedAvg(LOCAL, privacy=PRIVACY), fv.Scaffold(LOCAL, privacy=PRIVACY)):
        found.append([row.epsilon for row in fv.run(task, method, rounds=3, cohort=4).ledger.rows])
    assert found[0] == found[1]
    assert found[0][0] < found[0][2]
    least = dataclasses.replace(PRIVACY, budget=(found[0][1] + found[0][2]) / 2)
    result = fv.run(task, fv.Scaffold(LOCAL, privacy=least), rounds=3, cohort=4)
    assert (len(result.ledger.rows), result.stopped) == (2, "budget")


def test_noise_that_is_too_much_to_hold_is_drawn_in_pieces(monkeypatch):
    """As many steps at a time as are held for one client, so that a stack changes nothing."""
    task, pieces = uneven(0), []
    true = DpSgd.gradients

    def watched(self, stack, weights, batch, given, **more):
        pieces.extend((steps, tuple(secret.key for secret in secrets)) for steps, secrets in given)
        return true(self, stack, weights, batch, given, **more)

    monkeypatch.setattr(dpsgd, "NOISE", 3 * 8)
    monkeypatch.setattr(DpSgd, "gradients", watched)
    method = fv.FedAvg(dataclasses.replace(LOCAL, steps=8), privacy=PRIVACY)
    together = updates(method, stack_of(task, 0, 1, 2, 3), task.initial)
    assert [steps for steps, _ in pieces] == [3, 3, 2]
    assert len({key for _, keys in pieces for key in keys}) == 12  # no noise twice
    alone = updates(method, stack_of(task, 2), task.initial)
    torch.testing.assert_close(alone[0], together[2], atol=1e-5, rtol=1e-4)


def test_the_number_of_steps_is_public():
    task = uneven(0)
    assert fv.LocalTraining(epochs=2, batch=4).private_steps(task.largest) == 4
    assert fv.LocalTraining(steps=7, epochs=2, batch=4).private_steps(task.largest) == 7


def test_fedsgd_noises_the_sum_of_all_records_once_and_divides_by_the_most_there_may_be():
    task = uneven(0)
    method, stack = fv.FedSGD(privacy=PRIVACY), stack_of(task, 0, 1)
    found = updates(method, stack, task.initial)
    for k, secret in enumerate(stack.secrets("gradients")):
        rows = task.clients[k]
        total = clipped_sum(
            task, task.initial[None], task.x[rows][None], task.y[rows][None], torch.ones(1, len(rows)), 0.7
        )[0]
        noise = normal(secret.child("noise"), 8) * (1.5 * 0.7)
        torch.testing.assert_close(found[k], -((total + noise) / 6).float())
    assert method.client_cost(task).answer == Noised(1.5, 1.0, 1)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_no_step_of_private_training_needs_the_host(monkeypatch, optimizer):
    """So it can be captured as a CUDA graph; tried on a CPU by watching every operation."""
    watched = []

    def run(self, times):
        for _ in range(times):
            with Watch() as watch:
                self._step()
            watched.append(watch.seen)

    monkeypatch.setattr(Loop, "run", run)
    local = dataclasses.replace(LOCAL, optimizer=optimizer)
    updates(fv.FedProx(local, privacy=PRIVACY), stack_of(uneven(0), 0, 1), uneven(0).initial)
    assert len(watched) == 4
    assert all(seen == watched[0] for seen in watched)


# ---------------------------------------------------------------------------------------------------- what leaves


METHODS = {
    f"{kind.name}, {name}": kind(LOCAL, up=codec, privacy=PRIVACY, feedback=name == "qsgd")
    for kind in (fv.FedAvg, fv.FedProx, fv.FedSGD)
    for name, codec in CODECS.items()
} | {
    f"scaffold, {name}": fv.Scaffold(LOCAL, up=codec, privacy=PRIVACY, feedback=name == "qsgd")
    for name, codec in CODECS.items()
    if not codec.in_code_space
}


@pytest.mark.parametrize("name", METHODS)
def test_what_leaves_a_client_depends_on_its_records_through_private_gradients_only(monkeypatch, name):
    """With these replaced, clients of other and of fewer records answer the same, byte for byte, in two rounds."""

    def blind(self):
        return torch.cos(self._weights) / 3 + torch.arange(self._weights.shape[1])

    monkeypatch.setattr(Gradients, "__call__", blind)
    method = METHODS[name]
    heard = []
    for task in (uneven(0), uneven(1, (4, 6, 2, 5))):
        overheard = []

        def listen(round_, replies, overheard=overheard):
            overheard += [(round_, r.client, r.frame[24:], r.problem) for r in replies]
            return replies

        fv.run(task, method, rounds=2, cohort=4, engine=Tamper(listen), insecure_test_noise=1)
        assert not any(problem for *_, problem in overheard)
        heard.append(overheard)
    assert heard[0] == heard[1]


def test_every_client_counts_the_same_and_one_that_says_otherwise_is_refused():
    def claim(round_, replies):
        out = []
        for reply in replies:
            number, where = message.envelope(reply.frame)
            assert number == Update.kind
            honest = message.unpack(reply.frame[message.PREFIX_BYTES :], Update)
            assert honest.records == 1
            records = 5 if reply.client == 2 else 1
            out.append(Reply(reply.client, frame(Update(honest.update, records), where)))
        return out

    result = fv.run(uneven(0), fv.FedAvg(LOCAL, privacy=PRIVACY), rounds=1, cohort=4, engine=Tamper(claim))
    assert result.ledger.rows[0].missing == {
        "2": "refused: out of range: records is 5, the largest client has 1",
    }


def test_a_secure_sum_is_that_of_the_private_updates():
    task, same = uneven(0), {"rounds": 1, "cohort": 4, "insecure_test_noise": 1}
    method = fv.FedAvg(LOCAL, privacy=PRIVACY, secure=fv.SecureSum(clip=4.0))
    seen = []

    class Watched(fv.FedAvg):
        def trained(self, stack, question, w, trained):
            seen.append(trained.update)
            return super().trained(stack, question, w, trained)

    chosen = {each.name: getattr(method, each.name) for each in dataclasses.fields(method)}
    summed = fv.run(task, Watched(**chosen), **same)
    torch.testing.assert_close(summed.weights - task.initial, seen[0].mean(0), atol=4.0 / 2**19, rtol=0)
    assert summed.ledger.rows[0].epsilon == epsilon([Noised(1.5, 0.5, 4)], 1e-3)


# ---------------------------------------------------------------------------------------------------- the account


@pytest.mark.parametrize("secure", [None, fv.SecureSum()])
@pytest.mark.parametrize("name", ["raw", "fedage"])
def test_training_is_charged_once_whatever_else_is_asked(secure, name):
    task = uneven(0)
    method = fv.FedAvg(LOCAL, up=CODECS[name], privacy=PRIVACY, secure=secure)
    federation = fv.Federation(task, method, Engine(), fv.CohortSampler(size=4), fv.Seed.root(0))
    federation.step(method.init_state(task), 1, 1)
    assert [federation.clients.memory.spent(k).total() for k in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["tofu", "fedsynth"])
def test_synthetic_updates_run_under_privacy_and_are_charged(name):
    plan = recipe.read(f"digits/{name}", [*PUBLIC, "method.local.steps=3", "method.local.lr=0.3"])
    up = dataclasses.replace(plan.method.up, **{"steps": 5} if name == "tofu" else {"fits": 5, "best": False})
    result = fv.run(digits(), dataclasses.replace(plan.method, up=up), rounds=2, cohort=plan.cohort)
    rate, times = plan.method.local.batch / digits().largest, np.zeros(10, int)
    for row in result.ledger.rows:
        times[row.cohort] += 1
        assert row.epsilon == epsilon([Noised(1.0, rate, 3 * int(times.max()))], 1e-3)
        assert not row.missing
        assert 0 < row.metrics["cosine"] < 1


def test_a_full_round_is_charged_like_any_other():
    method = fv.FedAvg(LOCAL, up=CODECS["qsgd"], privacy=PRIVACY, full_rounds=1)
    result = fv.run(uneven(0), method, rounds=2, cohort=4)
    assert result.ledger.rows[1].epsilon == epsilon([Noised(1.5, 0.5, 8)], 1e-3)


@pytest.mark.parametrize("kind", ["fedavg", "fedsgd", "fedavg-qsgd"])
def test_what_it_will_cost_is_what_it_costs(kind):
    plan = recipe.read(f"digits/{kind}", [*PUBLIC, "rounds=2", "method.local.epochs=1"])
    told = cost(digits(), plan)
    summary = fv.run(digits(), plan.method, rounds=2, cohort=plan.cohort, seed=plan.seed).summary()
    assert told["up"]["total"] == summary["bytes_up"]
    assert told["down"]["total"] == summary["bytes_down"]
    assert told["passes"]["total"] == summary["passes"]


def test_what_it_will_cost_in_privacy_is_known_before():
    changes = ["method.privacy.delta=1e-3", "method.privacy.noise=2", "rounds=6", "method.local.epochs=1"]
    assert cost(digits(), recipe.read("digits/fedavg"))["epsilon"] is None
    for budget in ("1000.0", "1.2"):
        plan = recipe.read("digits/fedavg", [*changes, f"method.privacy.budget={budget}"])
        told = cost(digits(), plan)
        result = fv.run(digits(), plan.method, rounds=6, cohort=plan.cohort, seed=plan.seed)
        assert told["epsilon"] == result.summary()["epsilon"]
        ended = [note for note in told["notes"] if f"ends the run after round {len(result.ledger.rows)}" in note]
        assert bool(ended) == (result.stopped == "budget") == (budget == "1.2")


def test_how_many_records_were_drawn_is_in_no_figure():
    task = uneven(0)
    figures = {
        (row.passes, *sorted(row.metrics))
        for noise in range(6)
        for row in fv.run(
            task, fv.FedAvg(LOCAL, privacy=PRIVACY), rounds=1, cohort=4, insecure_test_noise=noise
        ).ledger.rows
    }
    assert len(figures) == 1


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("up", "fix"),
    [
        (fv.FedSynthCodec(), "set its best=false"),
        (fv.FedSynthCodec(objective="kl", best=False), 'set its objective="l2" and best=false'),
        (fv.FedSynthCodec(objective="data"), 'set its objective="l2" and best=false'),
        (fv.Zstd(inner=fv.FedSynthCodec()), "set its best=false"),
        (fv.Tiers(fv.FedSynthCodec(best=False), fv.FedSynthCodec()), "set its best=false"),
    ],
)
def test_a_codec_that_looks_at_the_records_again_is_refused(up, fix):
    for how in ({"privacy": PRIVACY}, {"user_privacy": fv.UserLevel(delta=0.1, where="client")}):
        with pytest.raises(ValueError, match="reads a client's records when it encodes.*" + fix):
            fv.FedAvg(up=up, **how).init_state(image_task())


def test_a_delta_or_a_budget_that_promises_nothing_is_refused():
    with pytest.raises(ValueError, match=r"privacy.delta is 0.5, but a client may hold 6 records"):
        fv.run(uneven(0), fv.FedAvg(privacy=DpSgd(delta=0.5)), rounds=1)
    with pytest.raises(ValueError, match="set one of them"):
        fv.FedAvg(privacy=PRIVACY, user_privacy=fv.UserLevel())
    with pytest.raises(ValueError, match=r"q-fedavg has no method.privacy: .*which no noise covers; use fedavg"):
        fv.QFedAvg(privacy=PRIVACY)


def test_asked_in_the_clear_a_client_under_a_secure_sum_does_not_train():
    task = uneven(0)
    clients = Clients(fv.FedAvg(LOCAL, privacy=PRIVACY, secure=fv.SecureSum()), task, bytes(8), fv.Seed.root(0))
    with pytest.raises(fv.Refused, match="wrong kind"):
        clients.answer([Letter(Train.kind, Envelope(bytes(8), 1, 0), pack(Train(task.initial)))])
    assert not clients.memory.spent(0)


def test_noise_is_as_large_as_it_says():
    """Of updates without any signal: deviation lr σ C √steps / batch."""
    task = linear_task(clients=200, records=400)
    local = fv.LocalTraining(lr=1e-3, steps=4, batch=1)
    w = task.initial
    found = updates(fv.FedAvg(local, privacy=DpSgd(noise=50.0, clip=2.0)), stack_of(task, *range(200)), w)
    expected = 1e-3 * 50.0 * 2.0 * math.sqrt(4)
    assert float(found.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * found.numel()))
