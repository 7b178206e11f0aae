"""User-level differential privacy: what one client can change, how much noise there is, and what a round costs."""

import dataclasses
import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedveil as fv
from codec_tools import stack_of
from fedveil.core.setup import private_root
from fedveil.engines import LocalEngine as Engine
from fedveil.links.down import Train
from fedveil.privacy import skellam
from fedveil.privacy.account import Tally
from fedveil.privacy.accountant import Noised, Skellam, epsilon
from fedveil.privacy.dpsgd import WITHIN, normal
from fedveil.privacy.users import UserLevel
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from privacy.secagg.sums import Transport
from toys import linear_task

LOCAL = fv.LocalTraining(lr=0.5, batch=3)
SUM = UserLevel(noise=1.5, clip=0.2, delta=1e-2)
ZERO = dataclasses.replace(SUM, relation="zero-out")
CLIENT = dataclasses.replace(SUM, where="client")
ROOT = fv.Seed.root(4)
NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)
POISSON = fv.CohortSampler(size=2, kind="poisson")


def cut(updates: torch.Tensor, clip: float) -> torch.Tensor:
    norms = updates.norm(dim=1, keepdim=True)
    return updates * (WITHIN * clip / norms.clamp(min=WITHIN * clip))


# ---------------------------------------------------------------------------------------------------- the sum


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_one_client_moves_the_sum_by_the_clipping_norm_at_most(rows, clip):
    how, updates = UserLevel(clip=clip), torch.tensor(rows, dtype=torch.float64)
    total = how.clipped_sum(updates)
    assert total.isfinite().all()
    for k in range(len(updates)):
        without = how.clipped_sum(torch.cat([updates[:k], updates[k + 1 :]]))
        assert float((total - without).norm()) <= clip * (1 + 1e-9)


def test_the_server_cuts_sums_noises_and_divides_by_the_public_number():
    """Unweighted, and by how many a round is meant to have even if fewer answer."""
    task = linear_task(uneven=True)
    result = fv.run(
        task,
        fv.FedAvg(LOCAL, user_privacy=SUM),
        rounds=1,
        cohort=fv.CohortSampler(size=3, drop=0.5),
        insecure_test_noise=5,
    )
    (row,) = result.ledger.rows
    came = [k for k in row.cohort if str(k) not in row.missing]
    assert 0 < len(came) < 3
    updates = LOCAL.train(stack_of(task, *came), task.initial)[0] - task.initial
    noise = normal(private_root(5).child("server", 1, "noise"), 8).float() * (1.5 * 0.2)
    torch.testing.assert_close(result.weights, task.initial + (cut(updates, 0.2).sum(0) + noise) / 3)


@pytest.mark.parametrize("more", [{"up": fv.Qsgd(bits=8)}, {"up": fv.Half(), "full_rounds": 1}])
def test_any_codec_that_is_decoded_alone_can_be_summed_so(more):
    method = fv.FedAvg(LOCAL, user_privacy=dataclasses.replace(SUM, noise=1e-3, clip=1e-3), **more)
    result = fv.run(linear_task(), method, rounds=2, cohort=4)
    assert 0 < float((result.weights - linear_task().initial).norm()) <= 2.01e-3


@pytest.mark.parametrize("drop", [0.0, 0.999999])
def test_a_round_in_which_nobody_is_drawn_or_answers_is_noised_and_charged_too(drop):
    task, method, plan = linear_task(), fv.FedAvg(LOCAL, user_privacy=ZERO), fv.CohortSampler(1, "poisson", drop=drop)
    tally = Tally(method.account(task, plan))
    federation = fv.Federation(task, method, Engine(), plan, ROOT, secret=private_root(5), tally=tally)
    state, cohorts = method.init_state(task), []
    for number in range(1, 13):
        after, row = federation.step(state, number, 12)
        cohorts.append(len(row.cohort))
        assert not row.events
        if not row.cohort or drop:
            noise = normal(private_root(5).child("server", number, "noise"), 8).float() * (1.5 * 0.2)
            torch.testing.assert_close(after.weights, state.weights + noise)
        state = after
    assert 0 in cohorts
    assert max(cohorts) > 1
    assert row.epsilon == epsilon([Noised(1.5, 0.25, 12)], 1e-2)


# ---------------------------------------------------------------------------------------------------- noise of clients


def test_a_client_cuts_and_noises_its_update_before_it_is_encoded():
    task, stack = linear_task(), stack_of(linear_task(), 0, 1)
    updates = torch.stack([torch.arange(8.0), torch.ones(8) / 100])
    found = CLIENT.noised(stack, updates)
    for k, secret in enumerate(stack.secrets("user privacy")):
        noise = normal(secret.child("noise"), 8).float() * (1.5 * 0.2)
        torch.testing.assert_close(found[k], cut(updates, 0.2)[k] + noise)
    result = fv.run(task, fv.FedAvg(LOCAL, up=fv.Half(), user_privacy=CLIENT), rounds=1, cohort=4)
    assert 0.05 < float((result.weights - task.initial).norm()) < 3  # √8 · 0.3 / √4 is 0.42


@pytest.mark.parametrize("colluders", [0, 2])
def test_the_fewest_clients_that_a_secure_sum_accepts_have_all_of_the_noise_without_colluders(monkeypatch, colluders):
    task, asked, true = linear_task(8, 48), [], skellam.draw

    def watched(key, variance, size):
        asked.append((key, variance, size))
        return true(key, variance, size)

    monkeypatch.setattr(skellam, "draw", watched)
    how = fv.SecureSum(bits=20)
    private = dataclasses.replace(SUM, colluders=colluders)
    result = fv.run(task, fv.FedAvg(fv.LocalTraining(lr=1e-9), user_privacy=private, secure=how), rounds=2, cohort=8)
    assert how.quorum(8) == 5
    assert {asking[1:] for asking in asked} == {((1.5 * (2**19 - 1)) ** 2 / (5 - colluders), 8)}
    assert len({key for key, *_ in asked}) == 16
    assert result.ledger.rows[0].metrics["clipped"] == 0
    assert {(row.relation, row.colluders) for row in result.ledger.rows} == {("replacement", colluders)}
    assert result.summary()["colluders"] == colluders
    assert 0.01 < float((result.weights - task.initial).norm()) < 1.5  # √2 rounds · √8 · 0.3 · √(8/5) / 8 is 0.19


def test_nothing_is_added_to_an_update_before_the_secure_sum_noises_it():
    task = linear_task()
    method = fv.FedAvg(LOCAL, user_privacy=SUM, secure=fv.SecureSum())
    found = method.released(stack_of(task, 0, 1, 2, 3), Train(task.initial), task.initial)["update"]
    expected = LOCAL.train(stack_of(task, 0, 1, 2, 3), task.initial)[0] - task.initial
    torch.testing.assert_close(found, cut(expected, 0.2))
    assert method.parts.secure.clip == 0.2


def test_a_secure_sum_of_private_updates_is_divided_by_the_public_number():
    """With hardly any noise it is the sum of the cut updates, of those who were left, over those meant to be there."""
    task = linear_task(8, 48, uneven=True)
    quiet = dataclasses.replace(SUM, noise=1e-6)
    method = fv.FedAvg(LOCAL, user_privacy=quiet, secure=fv.SecureSum(bits=40))
    result = fv.run(task, method, rounds=1, cohort=fv.CohortSampler(size=6, drop=0.06), seed=3)
    (row,) = result.ledger.rows
    assert row.missing
    left = [k for k in row.cohort if str(k) not in row.missing]
    updates = LOCAL.train(stack(task, left, 3), task.initial)[0] - task.initial
    expected = task.initial + cut(updates, 0.2).sum(0) / 6
    torch.testing.assert_close(result.weights, expected, atol=1e-5, rtol=0)


def stack(task, clients, seed):
    """Of the first round of a run with this seed."""
    return dataclasses.replace(stack_of(task, *clients), seed=fv.Seed.root(seed).child("round", 1))


# ---------------------------------------------------------------------------------------------------- several vectors


def asked(method: fv.Averaging, task: fv.Task):
    """The method's first question."""
    state = method.init_state(task)
    return method.parts.down.question(weights=state.weights, **method.broadcast(state))


@pytest.mark.parametrize("how", [SUM, CLIENT])
def test_update_and_control_variate_are_clipped_together(how):
    task, stack = linear_task(), stack_of(linear_task(), 0, 1, 2, 3)
    method = fv.Scaffold(LOCAL, user_privacy=how, secure=fv.SecureSum())
    plain = fv.Scaffold(LOCAL)
    found, own = (m.released(stack, asked(m, task), task.initial) for m in (method, plain))
    both, true = (torch.cat([x["update"], x["control"]], 1) for x in (found, own))
    assert (true.norm(dim=1) > 0.2).all()
    if how is CLIENT:
        noise = [normal(secret.child("noise"), 16).float() * (1.5 * 0.2) for secret in stack.secrets("user privacy")]
        both = both - torch.stack(noise)
    torch.testing.assert_close(both, cut(true, 0.2))
    assert (both.norm(dim=1) <= 0.2).all()
    assert (cut(own["update"], 0.2).norm(dim=1).square() + cut(own["control"], 0.2).norm(dim=1).square() > 0.05).all()


@pytest.mark.parametrize("secure", [None, fv.SecureSum(bits=40)])
def test_scaffolds_server_learns_the_sum_of_clipped_pairs_over_public_numbers(secure):
    """Neither weights nor control variate depend on how many answered, which may be private."""
    task, quiet = linear_task(8, 48), dataclasses.replace(SUM, noise=1e-6)
    method = fv.Scaffold(LOCAL, user_privacy=quiet, secure=secure)
    plan = fv.CohortSampler(size=6, drop=0.06 if secure else 0.5)
    federation = fv.Federation(task, method, Engine(), plan, fv.Seed.root(3), secret=private_root(5))
    after, row = federation.step(method.init_state(task), 1, 1)
    came = [k for k in row.cohort if str(k) not in row.missing]
    assert 0 < len(came) < 6
    own = fv.Scaffold(LOCAL).released(stack(task, came, 3), asked(fv.Scaffold(LOCAL), task), task.initial)
    both = cut(torch.cat([own["update"], own["control"]], 1), 0.2).sum(0)
    torch.testing.assert_close(after.weights, task.initial + both[:8] / 6, atol=1e-5, rtol=0)
    torch.testing.assert_close(after.slots["scaffold"].control, both[8:] / 8, atol=1e-5, rtol=0)


QUIET = dataclasses.replace(SUM, noise=1e-6)
SLOW = fv.LocalTraining(lr=1e-3, batch=3)


@pytest.mark.parametrize(
    "method", [fv.Scaffold(SLOW, user_privacy=QUIET), fv.BaffleEpochs(directions=2, local=SLOW, user_privacy=QUIET)]
)
def test_a_trusted_server_compares_no_client_with_the_others(method):
    """One client moves the median of all: lengths cut to ten times that would move with it, and so would the sum."""
    task, own = linear_task(5, 30), {}

    def longer(client, answer):
        own[client] = answer.update * (100 if client == 0 else 1)
        return msgspec.structs.replace(answer, update=own[client])

    method = dataclasses.replace(method, server=fv.ServerOptimizer(), user_privacy=dataclasses.replace(QUIET, clip=9.0))
    result = fv.run(task, method, rounds=1, cohort=5, engine=Transport(answer=longer), insecure_test_noise=5)
    assert method.limited
    assert float(own[0].norm()) > 20 * max(float(own[k].norm()) for k in range(1, 5))
    assert not result.ledger.rows[0].events
    torch.testing.assert_close(result.weights, task.initial + sum(own.values()) / 5, atol=2e-5, rtol=0)


# ---------------------------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize(
    ("how", "noise", "rate", "everyone"),
    [
        (ZERO, 1.5, 0.5, True),  # the server noises, and nobody else knows who was drawn
        (CLIENT, 0.75, 1.0, False),  # the server knows who was drawn
        (dataclasses.replace(CLIENT, relation="zero-out"), 1.5, 1.0, False),
    ],
)
def test_what_a_round_costs(how, noise, rate, everyone):
    task, method = linear_task(), fv.FedAvg(user_privacy=how)
    drawn = method.account(task, POISSON)
    assert (drawn.answer, drawn.everyone) == (Noised(noise, rate, 1), everyone)
    fixed = method.account(task, fv.CohortSampler(size=2))
    assert (fixed.answer, fixed.everyone) == (Noised(noise, 1.0, 1), False)
    assert drawn.spent(7) == epsilon([Noised(noise, rate, 7)], 1e-2)
    assert (drawn.promise.relation, drawn.colluders) == (how.relation, None)


@pytest.mark.parametrize(("relation", "apart"), [("replacement", 2), ("zero-out", 1)])
def test_what_a_round_of_a_secure_sum_costs(relation, apart):
    """One client's rounded update has norm r, or two of them lie 2r apart; their L1 norm is √d times that at most."""
    how = dataclasses.replace(SUM, relation=relation, colluders=1)
    method = fv.FedAvg(user_privacy=how, secure=fv.SecureSum(bits=10))
    r = math.sqrt(511**2 + 8 / 4 + 511 + math.sqrt(8) / 2)
    for cohort in (POISSON, fv.CohortSampler(size=4)):
        found = method.account(linear_task(), cohort)
        assert (found.everyone, found.colluders) == (False, 1)
        assert found.answer.variance == (1.5 * 511) ** 2
        assert found.answer.l2 == pytest.approx(apart * r)
        assert found.answer.l1 == pytest.approx(apart * r * math.sqrt(8))
    assert found.spent(3) == epsilon([dataclasses.replace(found.answer, steps=3)], 1e-2)
    assert UserLevel(relation=relation).step(3, 40).l1 == pytest.approx(apart * skellam.rounded(3, 40) ** 2)  # r < √d


@pytest.mark.parametrize(("relation", "golden"), [("zero-out", 6.24), ("replacement", 15.46)])
@pytest.mark.parametrize("where", ["sum", "client"])
def test_a_relation_means_the_same_wherever_noise_is_added(where, relation, golden):
    how = UserLevel(noise=2.0, delta=1e-3, where=where, relation=relation)
    task, plan = linear_task(), fv.CohortSampler(size=4)
    clear = fv.FedAvg(user_privacy=how).account(task, plan)
    assert clear.spent(10) == pytest.approx(golden, abs=0.005)
    secure = fv.FedAvg(user_privacy=how, secure=fv.SecureSum()).account(task, plan)
    assert isinstance(secure.answer, Skellam if where == "sum" else Noised)
    assert secure.spent(10) == pytest.approx(golden, rel=0.02)


def test_in_a_cohort_of_fixed_size_a_client_is_charged_for_the_rounds_it_is_in():
    result = fv.run(linear_task(), fv.FedAvg(LOCAL, user_privacy=SUM), rounds=6, cohort=2)
    times = [0] * 4
    for row in result.ledger.rows:
        for k in row.cohort:
            times[k] += 1
        assert row.epsilon == epsilon([Noised(0.75, 1.0, max(times))], 1e-2)
        assert (row.relation, row.colluders) == ("replacement", None)
    assert max(times) < 6


@pytest.mark.parametrize("how", [SUM, CLIENT])
@pytest.mark.parametrize("secure", [None, fv.SecureSum()])
def test_clients_count_where_they_make_it_private_themselves(how, secure):
    task, method = linear_task(), fv.FedAvg(LOCAL, user_privacy=how, secure=secure)
    federation = fv.Federation(task, method, Engine(), fv.CohortSampler(size=4), fv.Seed.root(0))
    federation.step(method.init_state(task), 1, 1)
    own = 0 if how is SUM and not secure else 1
    assert [federation.clients.memory.spent(k).total() for k in range(4)] == [own] * 4


def test_cohorts_are_drawn_in_private_where_that_counts():
    def cohorts(method, **more):
        return [row.cohort for row in fv.run(linear_task(8), method, rounds=12, cohort=POISSON, **more).ledger.rows]

    hidden, public = fv.FedAvg(LOCAL, user_privacy=ZERO), fv.FedAvg(LOCAL, user_privacy=CLIENT)
    assert cohorts(hidden) != cohorts(hidden)
    assert cohorts(hidden, insecure_test_noise=1) == cohorts(hidden, insecure_test_noise=1)
    assert cohorts(public) == cohorts(public) == cohorts(fv.FedAvg(LOCAL))


def test_each_client_is_drawn_by_itself():
    task = linear_task(20, 40)
    plan = fv.CohortSampler(size=5, kind="poisson")
    draws = [plan.draw(task, ROOT.child(i)) for i in range(4000)]
    hits = torch.zeros(4000, 20)
    for i, drawn in enumerate(draws):
        hits[i, list(drawn)] = 1
    assert float((hits.mean(0) - 0.25).abs().max()) < 5 * math.sqrt(0.25 * 0.75 / 4000)
    assert float(hits.sum(1).var()) == pytest.approx(20 * 0.25 * 0.75, rel=0.15)
    assert abs(float(torch.corrcoef(hits.T)[0, 1])) < 5 / math.sqrt(4000)
    assert plan.rate(task) == 0.25
    assert fv.CohortSampler(size=5).rate(task) == fv.CohortSampler(size=50, kind="poisson").rate(task) == 1.0


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"up": fv.FedAgeCodec(block=4, code="linear")}, "but fedage adds up codes; use another codec"),
        ({"up": fv.TofuCodec(), "secure": fv.SecureSum(), "full_rounds": 1}, "method.secure cannot sum tofu's"),
        (
            {"aggregator": fv.Aggregator("median")},
            "kind is median, which does not bound the effect of one client",
        ),
        ({"down": fv.Qsgd()}, "method.down is qsgd, which may skip a round and its noise"),
    ],
)
def test_what_a_sum_would_not_bound_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        fv.FedAvg(user_privacy=SUM, **given)
    if "up" not in given or given["up"].name != "tofu":
        fv.FedAvg(user_privacy=CLIENT, **given)


def test_settings_that_promise_nothing_are_refused():
    with pytest.raises(ValueError, match=r"user_privacy.where is 'server'; use sum or client"):
        UserLevel(where="server")
    with pytest.raises(ValueError, match=r"user_privacy.noise and user_privacy.clip are above 0"):
        UserLevel(noise=0.0)
    with pytest.raises(ValueError, match=r"user_privacy.delta is 0.3, but there are 4 clients; set it below 0.25"):
        fv.run(linear_task(), fv.FedAvg(user_privacy=UserLevel(delta=0.3)), rounds=1)
    with pytest.raises(ValueError, match=r"cohort.quorum is 0.5, but with method.user_privacy a skipped round"):
        fv.run(linear_task(), fv.FedAvg(user_privacy=SUM), rounds=1, cohort=dataclasses.replace(POISSON, quorum=0.5))
    with pytest.raises(ValueError, match=r"user_privacy.relation is 'add'; use replacement or zero-out"):
        UserLevel(relation="add")
    with pytest.raises(ValueError, match=r"user_privacy.colluders is -1; it is 0 or more"):
        UserLevel(colluders=-1)
    with pytest.raises(ValueError, match=r'hidden Poisson draws.*set user_privacy.relation = "zero-out"'):
        fv.run(linear_task(), fv.FedAvg(user_privacy=SUM), rounds=1, cohort=POISSON)


@pytest.mark.parametrize("more", [{"where": "sum"}, {"where": "client"}])
def test_colluders_are_refused_where_nobody_shares_noise(more):
    how = UserLevel(colluders=1, **more)
    with pytest.raises(ValueError, match=r"user_privacy.colluders is 1, but clients share noise only with"):
        fv.FedAvg(user_privacy=how, secure=fv.SecureSum() if how.where == "client" else None)


def test_as_many_colluders_as_a_sum_has_clients_are_refused():
    how, secure = dataclasses.replace(SUM, colluders=3), fv.SecureSum()
    with pytest.raises(ValueError, match=r"colluders is 3, but 3 clients are enough for a sum.*set it to 2 or less"):
        fv.run(linear_task(), fv.FedAvg(user_privacy=how, secure=secure), rounds=1, cohort=4)
    alone = dataclasses.replace(SUM, colluders=2).sum_noise  # each client then adds all of the noise
    assert alone.variance(100, secure.quorum(4)) == (1.5 * 100) ** 2


def test_noise_in_a_secure_sum_has_one_accountant():
    with pytest.raises(ValueError, match=r'accountant is pld, but noise inside a secure sum is accounted by "rdp"'):
        fv.FedAvg(user_privacy=UserLevel(accountant="pld"), secure=fv.SecureSum())
    fv.FedAvg(user_privacy=UserLevel(accountant="pld", where="client"), secure=fv.SecureSum())


def test_what_it_will_cost_names_the_relation_and_the_colluders():
    changes = ["split.clients=20", "cohort.size=20", "rounds=2", "method.user_privacy.colluders=3"]
    plan = recipe.read("digits/dp-fedavg-users", changes)
    told = cost(plan.build(), plan)
    assert told["relation"] == "replacement"
    assert told["epsilon"] == pytest.approx(epsilon([Noised(2.0, 1.0, 2)], 1e-3), rel=0.01)  # 4 counts as 2
    assert any(note.endswith("at δ 0.001 in the end, for neighbours by replacement.") for note in told["notes"])
    assert "ε holds if at most 3 clients of a sum tell the server their noise (colluders)." in told["notes"]


# ---------------------------------------------------------------------------------------------------- fixed point


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("relation", ["replacement", "zero-out"])
def test_too_coarse_a_fixed_point_is_refused_with_the_bits_that_suffice(noise, relation):
    how = UserLevel(noise=noise, relation=relation, delta=1e-3)

    def refused(bits, size):
        try:
            how._validate_precision(how.step(bits, size), bits, size)
        except ValueError as error:
            return str(error)
        return ""

    assert not any(refused(bits, size) for bits, size in [(8, 8), (8, 100), (20, 20_010), (20, 10**6), (52, 10)])
    for bits, size in [(2, 1), (4, 10), (4, 650), (6, 650), (8, 20_010)]:
        told = refused(bits, size)
        assert f"method.secure.bits is {bits}, too coarse for user_privacy with {size:,} numbers" in told
        enough = int(told.rpartition("set it to ")[2].split()[0])
        assert not refused(enough, size)
        assert refused(enough - 1, size)


def test_a_run_whose_fixed_point_is_too_coarse_does_not_begin():
    method = fv.FedAvg(user_privacy=SUM, secure=fv.SecureSum(bits=4))
    told = (
        r"bits is 4.*one round would cost ε [\d.]+ \(replacement\) instead of the [\d.]+ of noise.*set it to 5 or more"
    )
    with pytest.raises(ValueError, match=told):
        fv.run(linear_task(), method, rounds=1, cohort=4)
