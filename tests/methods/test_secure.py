"""Updates and codes under the secure sum: the same means, and a server that has nothing of anyone."""

from dataclasses import replace

import pytest
import torch

import fedveil as fv
from codec_tools import digits, stack_of
from fedveil.attacks.differential import expose, overheard
from fedveil.core.clients import Clients, Letter
from fedveil.core.message import Envelope, Refused, pack
from fedveil.engines import LocalEngine
from fedveil.links.down import Train, TrainFull
from fedveil.privacy import SecureSum
from fedveil.runs import recipe
from fedveil.runs.cost import cost

LOCAL = fv.LocalTraining(lr=0.3, epochs=1, batch=20)
AGE = fv.FedAgeCodec(block=16, cohort=5, code="linear")


def ran(method, rounds=2, **sampling):
    return fv.run(digits(), method, rounds=rounds, cohort=fv.CohortSampler(**{"size": 5} | sampling))


def names(result):
    return [[stage.stage for stage in row.secure] for row in result.ledger.rows]


STAGES = ["keys", "shares", "dealt", "masked", "unmask"]


@pytest.mark.parametrize("method", [fv.FedAvg(LOCAL), fv.FedProx(LOCAL), fv.FedSGD()], ids=lambda m: m.name)
def test_the_sum_of_updates_gives_the_mean_within_its_rounding(method):
    plain, secure = ran(method, 1), ran(replace(method, secure=SecureSum()), 1)
    error = secure.ledger.rows[0].metrics["quantisation"]
    assert 0 < error < 1e-5
    assert float((plain.weights - secure.weights).abs().max()) <= error + 1e-6
    assert names(secure) == [STAGES]
    assert secure.ledger.summary("fedavg")["protocol_up"] > 0


def test_update_and_control_variate_are_summed_together():
    """The same weights and control variates as in the clear, within the rounding of fixed point, round after round."""
    method, task, error = fv.Scaffold(LOCAL), digits(), 0.0
    states = {}
    for how in (None, SecureSum(clip=4.0, bits=30)):
        chosen = replace(method, secure=how)
        run = fv.Federation(task, chosen, LocalEngine(), fv.CohortSampler(size=5), fv.Seed.root(0))
        states[how is None] = [chosen.init_state(task)]
        for number in (1, 2):
            after, row = run.step(states[how is None][-1], number, 2)
            states[how is None].append(after)
            assert not row.missing
            error = max(error, row.metrics.get("quantisation", 0.0))
            assert [stage.stage for stage in row.secure] == (STAGES if how else [])
            assert row.metrics.get("clipped", 0) == 0
    assert 0 < error < 1e-6
    for clear, secure in zip(states[True], states[False], strict=True):
        own, summed = clear.slots["scaffold"].control, secure.slots["scaffold"].control
        torch.testing.assert_close(secure.weights, clear.weights, atol=2 * error + 1e-5, rtol=0)
        torch.testing.assert_close(summed, own, atol=2 * error + 1e-5, rtol=0)
    assert own.abs().max() > 1e-3


def test_drop_outs_after_masking_are_in_the_sum_and_others_are_not():
    secure = ran(replace(fv.FedAvg(LOCAL), secure=SecureSum()), 6, size=8, drop=0.1)
    assert any(row.missing for row in secure.ledger.rows)
    assert secure.ledger.rows[-1].metrics["accuracy"] > 0.8


def test_full_rounds_of_a_codec_that_does_not_sum_are_summed_securely():
    up = fv.TofuCodec(points=4, steps=5)
    method = fv.Tofu(LOCAL, up, full_rounds=1, secure=SecureSum())
    assert names(ran(method)) == [[], STAGES]


def test_codes_are_summed_and_only_their_mean_is_decoded():
    plain, secure = (ran(fv.FedAge(LOCAL, AGE, secure=how), 1) for how in (None, SecureSum()))
    assert names(secure) == [STAGES]
    assert float((plain.weights - secure.weights).abs().max()) < 1e-3
    assert torch.cosine_similarity(plain.weights, secure.weights, 0) > 0.99999


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (fv.Tofu(LOCAL), "but tofu's have to be decoded one by one"),
        (fv.FedAvg(LOCAL, fv.Qsgd()), "but qsgd's have to be decoded one by one"),
        (fv.Scaffold(LOCAL, fv.TopK()), "but top-k's have to be decoded one by one"),
        (fv.FedAvg(LOCAL, aggregator=fv.Aggregator("median")), "aggregator.kind is median"),
        (fv.Tofu(LOCAL, aggregator=fv.Aggregator("krum"), full_rounds=1), "aggregator.kind is krum"),
    ],
    ids=["tofu", "qsgd", "top-k", "median", "krum"],
)
def test_what_does_not_sum_is_said_before_the_run(method, told):
    with pytest.raises(ValueError, match=told):
        replace(method, secure=SecureSum())


def test_codes_and_full_updates_are_not_summed_in_one_run():
    with pytest.raises(ValueError, match="set full_rounds to 0"):
        fv.FedAge(LOCAL, AGE, full_rounds=1, secure=SecureSum())


@pytest.mark.parametrize("kind", [Train, TrainFull], ids=lambda kind: kind.__name__)
def test_a_client_whose_updates_are_summed_gives_none_in_the_clear(kind):
    task = digits()
    clients = Clients(fv.FedAvg(LOCAL, secure=SecureSum()), task, bytes(8), fv.Seed.root(0))
    asked = kind(task.initial)
    with pytest.raises(Refused, match="has no question of kind"):
        clients.answer([Letter(asked.kind, Envelope(bytes(8), 1, 0, 0), pack(asked))])


@pytest.mark.parametrize("changes", [(), ("method.full_rounds=1",)], ids=["every round", "full rounds"])
def test_the_cost_is_known_with_its_protocol(changes):
    plan = recipe.read("digits/fedavg", ["rounds=2", "method.secure.bits=20", "cohort.size=4", *changes])
    task = plan.build()
    told, result = cost(task, plan), fv.run(task, plan.method, rounds=2, cohort=plan.cohort)
    assert told["up"]["total"] == sum(row.bytes_up for row in result.ledger.rows)
    assert told["down"]["total"] == sum(row.bytes_down for row in result.ledger.rows)


def test_attacks_that_succeed_on_codes_fail_on_what_a_secure_sum_shows():
    task, seed = digits(), fv.Seed.root(3)
    stack, method = stack_of(task, 0, 1, 2, 3, 4), fv.FedAge(LOCAL, AGE, secure=SecureSum())
    updates, round_ = method.trainer.train(stack, task.initial, None).update, seed.child("round", 1)
    plan = fv.CohortSampler(size=len(task.clients))
    heard = overheard(task, method, plan, seed, method.init_state(task), 1)
    shown = expose(task, AGE, updates, round_)
    hidden = expose(task, AGE, updates, round_, seen=[heard[k] for k in range(5)])
    for name in ("direct", "differential", "own"):
        before, after = (getattr(found, name).abs() for found in (shown, hidden))
        print(
            f"{name}: cosine {before.min():.3f} to {before.max():.3f}, under the secure sum {after.max():.3f} at most"
        )
        assert float(before.min()) > 0.5
        assert float(after.max()) < 0.05
    assert float(hidden.control.min()) > 0.999


@pytest.mark.slow
def test_on_the_digits_a_fifth_of_the_cohort_may_drop_out_of_the_sum():
    secure, plain = recipe.read("digits/fedavg-secure"), recipe.read("digits/fedavg", ["cohort.size=10"])
    done = {
        plan.method.secure is None: fv.run(plan.build(), plan.method, rounds=plan.rounds, cohort=plan.cohort)
        for plan in (secure, plain)
    }
    rows = done[False].ledger.rows
    gone = 1 - sum(row.secure[-1].answered for row in rows) / (10 * len(rows))
    assert 0.15 < gone < 0.25
    last3 = [done[clear].summary()["accuracy_last3"] for clear in (False, True)]
    print(f"secure, a fifth drops out: {last3[0]:.2%}; plain: {last3[1]:.2%}")
    assert abs(last3[0] - last3[1]) <= 0.005
