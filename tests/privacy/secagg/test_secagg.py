"""The secure sum in the loop: exact for whoever is left, stopped below the threshold, the same on every engine."""

import itertools
from dataclasses import replace
from typing import Annotated

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedveil as fv
from fedveil.codecs.tofu import Proxies
from fedveil.core import message
from fedveil.core.message import Answer, Question, Shape
from fedveil.engines import LocalEngine
from fedveil.privacy import SecureSum
from fedveil.privacy.secagg import graph
from fedveil.privacy.secagg.client import NOTE, stages
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.party import Secrets
from fedveil.privacy.secagg.records import Advertise, Advertised, Agree, Deal, Mask, Masked, Share, Unmask
from fedveil.privacy.secagg.server import ask_sum
from fedveil.runs.cost import cost
from privacy.secagg.sums import LAST, Give, Only, Summand, Summed, Transport, expected, letter
from privacy.secagg.sums import given as given_by
from toys import OtherProcess, Plain, linear_task

pytestmark = pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")

STAGES = (Advertise, Share, Deal, Mask, Unmask)
STAGES6 = (Advertise, Share, Deal, Mask, Agree, Unmask)
TASK = linear_task(12, 120, uneven=True)


def played(how: SecureSum, clients: int, fates: tuple[int, ...], stages=STAGES, task=TASK) -> fv.Result:
    """One round in which client k drops out at stage fates[k]; len(stages) means never."""
    LAST.clear()
    drop = {stage: {k for k, fate in enumerate(fates) if fate <= i} for i, stage in enumerate(stages)}
    task = linear_task(clients, 12 * clients, uneven=True) if task is None else task
    plan = Only(size=clients)
    return fv.run(task, Summed(how), rounds=1, cohort=plan, engine=Transport(drop), evaluate_every=9)


def holds(how: SecureSum, clients: int, fates: tuple[int, ...], stages=STAGES, task=TASK) -> bool:
    """Whether there was a sum; it must be exact and there must be one just if enough stayed at every stage."""
    result = played(how, clients, fates, stages, task)
    (row,) = result.ledger.rows
    left = [[k for k, fate in enumerate(fates) if fate > i] for i in range(len(stages))]
    enough = all(len(each) >= how.quorum(clients) for each in left)
    summed = left[stages.index(Mask)]
    assert bool(LAST) == enough, (fates, row.events)
    if enough:
        total, weight = expected(task, summed, how, len(left[0]))
        assert torch.equal(LAST[0].totals["update"], total), fates
        assert (LAST[0].clients, LAST[0].weight) == (tuple(summed), weight)
        assert set(row.missing) == {str(k) for k, fate in enumerate(fates) if fate <= stages.index(Mask)}
    else:
        assert torch.equal(result.weights, task.initial)
        assert row.events[-1].startswith("below quorum: the secure sum stopped at ")
    names = ["keys", "shares", "dealt", "masked", *(["agreement"] if len(stages) == 6 else []), "unmask"]
    assert [each.stage for each in row.secure] == names[: len(row.secure)]
    return enough


# ---------------------------------------------------------------------------------------------------- the sum


def test_of_four_clients_every_way_to_drop_out_gives_the_exact_sum_or_none():
    outcomes = [holds(SecureSum(), 4, fates) for fates in itertools.product(range(6), repeat=4)]
    assert sum(outcomes) == 1 + 4 * 5  # nobody drops, or one of four at one of five stages


@settings(max_examples=40)
@given(st.data())
def test_whoever_is_left_the_sum_is_exact_or_there_is_none(data):
    clients = data.draw(st.integers(5, 12))
    often = st.sampled_from([0, 1, 2, 3, 4, *[5] * 8])
    holds(SecureSum(), clients, tuple(data.draw(often) for _ in range(clients)))


@settings(max_examples=40)
@given(st.data())
def test_against_a_malicious_server_it_is_the_same_with_a_higher_threshold(data):
    clients = data.draw(st.integers(3, 9))
    often = st.sampled_from([0, 1, 2, 3, 4, 5, *[6] * 20])
    holds(SecureSum(server="malicious"), clients, tuple(data.draw(often) for _ in range(clients)), STAGES6)


@pytest.mark.parametrize("stage", range(5))
def test_a_drop_out_at_any_stage_is_survived(stage):
    """A known failure: one that happened during the key exchange ended the round."""
    assert holds(SecureSum(), 7, (5, stage, 5, stage, 5, 5, stage))


@pytest.mark.parametrize("stage", range(5))
def test_at_the_threshold_there_is_a_sum_and_below_it_none(stage):
    assert holds(SecureSum(), 9, (stage,) * 4 + (5,) * 5)
    assert not holds(SecureSum(), 9, (stage,) * 5 + (5,) * 4)


def test_thresholds():
    assert [SecureSum().quorum(n) for n in (3, 4, 5, 10, 100)] == [3, 3, 3, 6, 51]
    assert [SecureSum(server="malicious").quorum(n) for n in (3, 4, 5, 10, 100)] == [3, 3, 4, 7, 67]
    for n in range(3, 50):
        assert 2 * SecureSum().quorum(n) > n
        assert 3 * SecureSum(server="malicious").quorum(n) > 2 * n


@pytest.mark.parametrize("server", ["curious", "malicious"])
@pytest.mark.parametrize("bits", [20, 40])
def test_the_mean_is_that_of_the_floats_within_the_bound(server, bits):
    result = fv.run(TASK, Summed(SecureSum(server=server, bits=bits)), rounds=2, cohort=9)
    sizes = torch.from_numpy(TASK.clients.sizes)

    last = LAST[0]
    values = torch.stack([given_by(k).double() for k in last.clients])
    weights = sizes[list(last.clients)].double()
    assert last.weight == weights.sum()
    mean = (weights[:, None] * values).sum(0) / weights.sum()
    assert (last.totals["update"] * last.heaviest / last.weight - mean).abs().max() <= last.error * (1 + 1e-9)
    assert last.error < (1e-5 if bits == 20 else 1e-11)
    assert result.ledger.rows[0].metrics["quantisation"] < 1e-5


def test_values_beyond_the_range_are_counted_in_the_ledger():
    result = fv.run(TASK, Summed(SecureSum(clip=0.5)), rounds=1, cohort=6)

    beyond = sum(int((given_by(k).abs() > 0.5).sum()) for k in LAST[0].clients)
    assert beyond > 10
    assert result.ledger.rows[0].metrics["clipped"] == LAST[0].clipped == beyond


@message.kind
class Parts(Answer, frozen=True):
    """Two tensors, one of a length that the question chooses, and no weight."""

    additive = True
    one: Annotated[Tensor, Shape((2, "length"))]
    other: Annotated[Tensor, Shape((3,))]


@message.kind
class Ask(Question, frozen=True):
    reply = Parts
    length: int

    def sizes(self):
        return {"length": self.length}


class Several(Summed):
    def init_state(self, task):
        self.secure.validate(task, Parts)
        return Plain(task.initial)

    def round(self, state, cohort):
        LAST[:] = [ask_sum(cohort, Ask(5), self.secure)]
        return state

    @property
    def handlers(self):
        return stages(self.secure, ({Ask: self.parts}, Parts))

    def parts(self, stack, question):
        drawn = [given_by(k, 2 * question.length + 3) for k in stack.clients]
        return [Parts(v[:-3].view(2, question.length), v[-3:]) for v in drawn]


def test_several_tensors_are_summed_and_without_records_all_clients_count_the_same():
    fv.run(TASK, Several(), rounds=1, cohort=Only(size=4))
    mean = torch.stack([given_by(k, 13) for k in range(4)]).mean(0)
    assert (LAST[0].weight, LAST[0].heaviest) == (4, 1)
    torch.testing.assert_close(LAST[0].mean("one"), mean[:-3].view(2, 5), atol=LAST[0].error, rtol=0)
    torch.testing.assert_close(LAST[0].mean("other"), mean[-3:], atol=LAST[0].error, rtol=0)


# ---------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("server", ["curious", "malicious"])
def test_in_this_process_in_stacks_and_in_another_one_the_result_is_the_same(server):
    method, plan = Summed(SecureSum(server=server)), fv.CohortSampler(size=9, drop=0.04)
    results = [
        fv.run(TASK, method, rounds=4, cohort=plan, engine=engine)
        for engine in (
            LocalEngine(stack=1, workers=1),
            LocalEngine(workers=1),
            LocalEngine(stack=2, workers=2),
            OtherProcess(),
        )
    ]
    assert not torch.equal(results[0].weights, TASK.initial)
    assert any(row.missing or row.events for row in results[0].ledger.rows)
    for result in results[1:]:
        assert torch.equal(result.weights, results[0].weights)
        for row, other in zip(result.ledger.rows, results[0].ledger.rows, strict=True):
            assert (row.up, row.down, row.missing, row.secure) == (other.up, other.down, other.missing, other.secure)


def test_the_methods_question_is_answered_by_a_stack():
    seen = []

    class Watched(Summed):
        def give(self, stack, question):
            seen.append(stack.clients)
            return super().give(stack, question)

    fv.run(TASK, Watched(), rounds=1, cohort=6, engine=LocalEngine(workers=1))
    assert [len(each) for each in seen] == [6]


def test_a_client_that_fails_in_a_stack_masks_zeros_alone(caplog):
    """The server does not see it, and whoever runs the client does."""

    class Failing(Summed):
        def give(self, stack, question):
            if 4 in stack.clients:
                raise RuntimeError("out of luck")
            return super().give(stack, question)

    result = fv.run(TASK, Failing(), rounds=1, cohort=Only(size=8), engine=LocalEngine(workers=1))
    (row,) = result.ledger.rows
    assert not row.missing
    assert not row.events
    assert LAST[0].clients == tuple(range(8))
    assert LAST[0].weight == sum(TASK.clients.sizes[:8])
    assert torch.equal(LAST[0].totals["update"], expected(TASK, [0, 1, 2, 3, 5, 6, 7], SecureSum(), 8)[0])
    assert [r.message for r in caplog.records] == ["client 4 masks zeros in round 1: RuntimeError: out of luck"]
    assert row.metrics["zeroed"] == 1  # the one stack in which somebody did, of one client


def test_an_engine_in_debug_mode_shows_what_failed():
    class Failing(Summed):
        def give(self, stack, question):
            raise RuntimeError("out of luck")

    with pytest.raises(Exception, match=r"client 0 failed at Mask in round 1 .*out of luck"):
        fv.run(TASK, Failing(), rounds=1, cohort=Only(size=4), engine=LocalEngine(debug=True))


def test_a_sum_of_zeros_is_told_in_the_ledger():
    class Failing(Summed):
        def give(self, stack, question):
            raise RuntimeError("out of luck")

    result = fv.run(TASK, Failing(), rounds=1, cohort=Only(size=4), engine=LocalEngine(workers=1))
    (event,) = result.ledger.rows[0].events
    assert event == "the secure sum is 0 in every element: clients may have failed and masked zeros; see their logs"
    assert torch.equal(result.weights, TASK.initial)


# ---------------------------------------------------------------------------------------------------- large cohorts


@pytest.mark.parametrize("drop", [0.0, 0.03])
def test_in_a_large_cohort_each_masks_with_a_few(drop):
    task, n = linear_task(130, 520, uneven=False), 130
    result = fv.run(task, Summed(), rounds=1, cohort=fv.CohortSampler(size=n, drop=drop), engine=LocalEngine(workers=1))
    (row,) = result.ledger.rows
    keys, shares, _dealt, _masked, unmask = row.secure
    total, weight = expected(task, LAST[0].clients, SecureSum(), keys.answered)
    assert torch.equal(LAST[0].totals["update"], total)
    assert LAST[0].weight == weight
    assert (unmask.answered < n) == bool(drop)
    assert shares.up / shares.answered < 150 * graph.degree(n) < 150 * 99


@settings(max_examples=15)
@given(st.data())
def test_with_few_neighbours_the_sum_is_exact_or_there_is_none(data):
    how, clients = SecureSum(neighbours=4), 12
    fates = tuple(data.draw(st.sampled_from([0, 1, 2, 3, 4, *[5] * 20])) for _ in range(clients))
    result = played(how, clients, fates)
    if LAST:
        total, _ = expected(TASK, LAST[0].clients, how, sum(fate > 0 for fate in fates))
        assert torch.equal(LAST[0].totals["update"], total)
        assert set(LAST[0].clients) <= {k for k, fate in enumerate(fates) if fate > 3}
    else:
        assert torch.equal(result.weights, TASK.initial)


def test_a_client_of_whose_neighbours_too_few_share_is_left_out_before_it_masks():
    """Nobody could recover its secrets, and its mask would spoil the sum of all."""
    n, how = 12, SecureSum(neighbours=4)
    seed = fv.Seed.root(0).child("round", 1)
    circle = seed.child("secure sum").numpy().permutation(n).tolist()
    lonely, dropped = circle[5], {circle[4], circle[6], circle[7]}  # of its neighbours circle[3] alone is left
    assert graph.neighbourhoods(tuple(range(n)), 4, seed)[lonely] == sorted(circle[3:8])
    (row,) = played(how, n, tuple(1 if k in dropped else 5 for k in range(n))).ledger.rows
    assert row.missing.pop(str(lonely)) == "refused: bad set: too few of its neighbours are there"
    assert set(row.missing) == {str(k) for k in dropped}
    assert set(LAST[0].clients) == {*range(n)} - dropped - {lonely}
    assert torch.equal(LAST[0].totals["update"], expected(TASK, LAST[0].clients, how, n)[0])


@pytest.mark.slow
def test_a_thousand_clients():
    task = linear_task(1000, 4000)
    fv.run(task, Summed(), rounds=1, cohort=fv.CohortSampler(size=1000, drop=0.02), engine=LocalEngine(workers=1))
    assert 900 < len(LAST[0].clients) < 1000


# ---------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: SecureSum(clip=0), "clip above 0"),
        (lambda: SecureSum(bits=1), "from 2 to 52 bits"),
        (lambda: SecureSum(bits=53), "from 2 to 52 bits"),
        (lambda: SecureSum(server="evil"), "use curious or malicious"),
        (lambda: SecureSum(min_clients=2), "at least 3"),
        (lambda: SecureSum(neighbours=3), "an even number"),
        (lambda: SecureSum(server="malicious", neighbours=4), "everybody masks with everybody"),
        (lambda: SecureSum().validate(TASK, Proxies), "a secure sum of Proxies means nothing: these messages do not"),
        (lambda: SecureSum().validate(TASK, Summand, "median"), "aggregator.kind is 'median', which compares"),
        (lambda: SecureSum(bits=52).validate(linear_task(5000, 5000), Summand), "needs more than 64 bits"),
    ],
)
def test_what_cannot_be_summed_is_a_configuration_error_in_one_sentence(build, match):
    with pytest.raises(ValueError, match=match) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_cohort_too_small_to_hide_in_is_not_summed():
    result = fv.run(TASK, Summed(), rounds=1, cohort=2)
    assert "below quorum" in result.ledger.rows[0].events[0]
    assert torch.equal(result.weights, TASK.initial)


# ---------------------------------------------------------------------------------------------------- bytes


def test_the_ledger_has_every_stage_and_its_bytes():
    result = fv.run(TASK, Summed(), rounds=2, cohort=6)
    for row in result.ledger.rows:
        assert [each.stage for each in row.secure] == ["keys", "shares", "dealt", "masked", "unmask"]
        assert all((each.asked, each.answered) == (6, 6) for each in row.secure)
        assert sum(each.up for each in row.secure) == row.bytes_up
        assert sum(each.down for each in row.secure) == row.bytes_down
    summary = result.summary()
    masked = sum(each.up for row in result.ledger.rows for each in row.secure if each.stage == "masked")
    assert summary["protocol_up"] == summary["bytes_up"] - masked > 0
    assert summary["protocol_down"] > 0
    line = msgspec.json.encode(result.ledger.rows[0])
    assert msgspec.json.decode(line, type=fv.core.ledger.Row) == result.ledger.rows[0]
    assert fv.run(TASK, fv.FedAvg(), rounds=1, cohort=2).summary()["protocol_up"] == 0


@pytest.mark.parametrize(
    "how", [SecureSum(), SecureSum(server="malicious"), SecureSum(bits=40), SecureSum(neighbours=4)]
)
def test_the_cost_is_known_beforehand_to_the_byte(how):
    plan = fv.Recipe(method=Summed(how), cohort=fv.CohortSampler(size=9), rounds=3)
    known = cost(TASK, plan)
    summary = fv.run(TASK, plan.method, rounds=3, cohort=plan.cohort).summary()
    assert known["up"]["total"] == summary["bytes_up"]
    assert known["down"]["total"] == summary["bytes_down"]


def test_a_32_bit_element_takes_four_bytes_on_the_wire():
    """A known failure: 64-bit integers on the wire for 32-bit values."""
    vector = Masked(torch.zeros(1_000_000, dtype=torch.int32), torch.zeros(32, dtype=torch.uint8))
    assert message.size(vector) < 4_000_100
    fv.run(TASK, Summed(), rounds=1, cohort=4, engine=(engine := Transport()))
    assert {answer.vector.dtype for answer in engine.heard(Masked).values()} == {torch.int32}


# ---------------------------------------------------------------------------------------------------- secrets


QUESTIONS = [
    Mask(ids, elements, wide, 4, torch.zeros(1, dtype=torch.uint8))
    for ids, elements, wide in itertools.product(([1, 2], [1, 3]), (10, 10 + 2**32), (False, True))
]


def test_keys_and_signatures_are_bound_to_the_run_the_round_the_ids_and_the_purpose():
    contexts = [
        Context.of(run, round_, ids, quorum)
        for run, round_, ids, quorum in itertools.product(
            (bytes(8), b"another!"), (1, 2), ([1, 2, 3], [1, 2, 4]), (2, 3)
        )
    ]
    derived = [
        made
        for c in contexts
        for secret in (bytes(32), b"s" * 32)
        for made in (
            c.seal_key(secret, 1, 2),
            c.seal_key(secret, 2, 1),
            c.pair_mask(secret, b"a" * 32, 1, 2),
            c.pair_mask(secret, b"a" * 32, 1, 3),
            c.pair_mask(secret, b"b" * 32, 1, 2),
            c.own_mask(secret, 1),
            c.own_mask(secret, 2),
            c.mark(secret, 1),
            c.mark(secret, 1, 2),
            c.signed_set(secret, b"a" * 32, [1, 2]),
            c.signed_set(secret, b"a" * 32, [1, 3]),
            c.signed_set(secret, b"b" * 32, [1, 2]),
            *(c.asked(secret, question) for question in QUESTIONS),
        )
    ]
    derived += [made for c in contexts for made in (c.sealed_about(1, 2), c.sealed_about(2, 1))]
    derived += [c.signed_keys(k, *keys) for c in contexts[::4] for k in (1, 2) for keys in ((b"a", b"b"), (b"b", b"a"))]
    assert len(set(derived)) == len(derived)
    assert contexts[0].pair_mask(bytes(32), b"", 1, 2) == contexts[0].pair_mask(bytes(32), b"", 2, 1)


def secrets_of(kept: Secrets) -> list[bytes]:
    return [part for part in (kept.channel, kept.mask, kept.own, *kept.held.values(), *kept.pairs.values()) if part]


def test_secrets_are_gone_after_unmasking_and_never_on_disk(tmp_path):
    seen: list[bytes] = []

    class Peeking(Transport):
        def deliver(self, letters, deadline):
            replies = super().deliver(letters, deadline)
            for note in self._clients.notes.values():
                seen.extend(secrets_of(note[NOTE]))
            if letters[0].kind == Unmask.kind:
                assert not any(secrets_of(note[NOTE]) for note in self._clients.notes.values())
                assert all(note[NOTE] == replace_stage(note[NOTE]) for note in self._clients.notes.values())
            return replies

    def replace_stage(kept):
        return kept if kept == Secrets("unmask") else None

    fv.run(TASK, Summed(), rounds=2, cohort=4, engine=Peeking(), folder=tmp_path / "run")
    assert len(set(seen)) >= 2 * 4 * 3
    files = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert len(files) > 1000
    assert not any(secret in files for secret in seen)


def test_private_keys_are_forgotten_once_their_shares_are_dealt():
    class Peeking(Transport):
        def deliver(self, letters, deadline):
            replies = super().deliver(letters, deadline)
            if letters[0].kind == Share.kind:
                held = [note[NOTE] for note in self._clients.notes.values()]
                seen.append({(kept.stage, kept.channel, kept.mask) for kept in held})
            return replies

    seen: list[set[tuple[str, bytes, bytes]]] = []
    fv.run(TASK, Summed(), rounds=1, cohort=4, engine=Peeking())
    assert seen == [{("shares", b"", b"")}]


def test_secrets_of_a_round_are_gone_when_the_next_one_opens():
    clients = fv.core.clients.Clients(Summed(), TASK, bytes(8), fv.Seed.root(0))
    clients.answer([letter(Advertise(), 3, bytes(8), 1)])
    assert clients.notes[3][NOTE].stage == "keys"
    clients.answer([letter(Advertise(), 5, bytes(8), 2)])
    assert 3 not in clients.notes


@pytest.mark.parametrize("fixed", [None, fv.Seed.root(1)])
def test_a_client_asked_again_or_restarted_makes_other_secrets(fixed):
    """Even where tests fix the private randomness: two vectors under one mask would give their difference away."""
    first = fv.core.clients.Clients(Summed(), TASK, bytes(8), fv.Seed.root(0), fixed)
    second = fv.core.clients.Clients(Summed(), TASK, bytes(8), fv.Seed.root(0), fixed)
    asked = letter(Advertise(), 3, bytes(8))
    frames = [clients.answer([asked])[0].frame for clients in (first, first, second)]
    assert len(set(frames)) == 3
    records = [message.unframe(frame, {Advertised.kind: Advertised}, 1000)[0] for frame in frames]
    assert len({bytes(key.tolist()) for record in records for key in (record.channel, record.mask)}) == 6


@pytest.mark.parametrize("stage", [Share, Deal, Mask, Unmask])
def test_a_client_that_restarts_in_between_is_left_out(stage):
    class Restarting(Transport):
        def deliver(self, letters, deadline):
            if letters[0].kind == stage.kind:
                self._clients.notes[2].clear()
            return super().deliver(letters, deadline)

    result = fv.run(TASK, Summed(), rounds=1, cohort=Only(size=6), engine=Restarting())
    (row,) = result.ledger.rows
    said = [*row.missing.values(), *row.events]
    assert len(said) == 1
    assert "refused: lost state: 'secure sum' of round 1 is gone" in said[0]
    assert (2 in LAST[0].clients) == (stage is Unmask)


def test_a_server_that_lost_its_round_may_begin_it_again_until_somebody_unmasked():
    class Twice(Summed):
        def round(self, state, cohort):
            asked = letter(Advertise(), 1, cohort._shared.run, cohort.round)
            for stage in (Advertise, Share, Deal, Mask, Unmask):
                cohort._shared.engine.drop = {stage: range(20)}
                with pytest.raises(fv.core.cohort.BelowQuorum):
                    ask_sum(cohort, Give(state.weights), self.secure)
            cohort._shared.engine.drop = {}
            after = super().round(state, cohort)
            assert "wrong stage: client 1 has unmasked" in cohort._shared.engine.again(asked).problem
            return after

    result = fv.run(TASK, Twice(), rounds=1, cohort=Only(size=5), engine=Transport())
    assert not torch.equal(result.weights, TASK.initial)
    assert replace(LAST[0]).clients == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("wrong", [-24, -21, 1, 10**6])
def test_a_weight_that_the_clients_cannot_have_costs_the_round_and_not_the_run(wrong):
    def lie(client, answer):
        if client != 1 or not isinstance(answer, Masked):
            return answer
        vector = answer.vector.clone()
        vector[-2] += wrong
        return msgspec.structs.replace(answer, vector=vector)

    task = linear_task(4)  # six records each
    result = fv.run(task, Summed(), rounds=1, cohort=Only(size=4), engine=Transport(answer=lie))
    (event,) = result.ledger.rows[0].events
    assert f"its weight is {24 + wrong}, and that of 4 clients is from 4 to 24" in event
    assert torch.equal(result.weights, task.initial)


def test_what_is_summed_cannot_be_asked_in_the_clear():
    clients = fv.core.clients.Clients(Summed(), TASK, bytes(8), fv.Seed.root(0))
    with pytest.raises(fv.Refused, match=f"wrong kind: toy-summed has no question of kind {Give.kind}"):
        clients.answer([letter(Give(TASK.initial), 0, bytes(8))])
