"""BAFFLE's rounds against the formula, its settings, and the digits."""

import dataclasses

import numpy as np
import pytest
import torch

import fedveil as fv
from fedveil.core import message
from fedveil.core.directions import Directions, words
from fedveil.core.message import Refused
from fedveil.core.seeds import Seed
from fedveil.engines import LocalEngine as Engine
from fedveil.links.down import Train
from fedveil.methods.baffle.baffle import Probe, Slopes, _mean
from fedveil.methods.baffle.estimate import signal
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from fedveil.train.optimizers import Average
from methods.baffle.probes import gradients, stack
from toys import kept, linear_task

PLAIN = {"server": fv.ServerOptimizer("plain", 0.5), "clip": None}


def key_of(round_):
    drawn = Seed.root(0).child("round", round_, "directions").key[:8]
    return int(np.frombuffer(drawn, "<i8")[0])


def one_round(task, method, **more):
    return fv.run(task, method, rounds=1, cohort=len(task.clients), **more)


def estimate(task, keys, counts, sigma=1e-4):
    """Equation 6 in float64 with NumPy alone, for each client along its own key's directions: [C, d]."""
    weight, bias = task.initial[:6].double().numpy().reshape(2, 3), task.initial[6:].double().numpy()
    found = []
    for client, (key, count) in enumerate(zip(keys, counts, strict=True)):
        x, y = task.x[task.clients[client]].double().numpy(), task.y[task.clients[client]].numpy()

        def loss(w, b, x=x, y=y):
            logits = x @ w.T + b
            return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y])

        z = Directions.of("gaussian", 8, 100).rows(np, np.array([key]), 0, count)[0].astype(np.float64)
        ahead = [loss(weight + sigma * v[:6].reshape(2, 3), bias + sigma * v[6:]) for v in z]
        slopes = (np.array(ahead) - loss(weight, bias)) / sigma
        found.append(slopes @ z / count)
    return np.array(found)


@pytest.mark.parametrize("seeds", ["shared", "own"])
def test_a_round_at_the_batch_level_is_the_papers(seeds):
    task = linear_task(uneven=True)
    key = key_of(1)
    own = words(np.array([key]), np.arange(4)).tolist()
    found = estimate(task, own if seeds == "own" else [key] * 4, [100] * 4)
    share = task.clients.sizes / task.clients.sizes.sum()
    result = one_round(task, fv.Baffle(seeds=seeds, **PLAIN))
    expected = task.initial.numpy() - 0.5 * share @ found
    assert np.allclose(result.weights.numpy(), expected, atol=2e-3)
    assert np.abs(expected - task.initial.numpy()).max() > 0.05


def test_weak_clients_probe_fewer_directions_and_count_by_their_records_all_the_same():
    task = linear_task(uneven=True)
    method = fv.Baffle(weak=30, share=0.5, **PLAIN)
    counts = np.array([method.count(k) for k in range(4)])
    assert {*counts} == {30, 100}
    key, share = key_of(1), task.clients.sizes / task.clients.sizes.sum()
    z = Directions.of("gaussian", 8, 100).rows(np, np.array([key]), 0, 100)[0].astype(np.float64)
    slopes = gradients(task, task.initial).double().numpy() @ z.T  # exact derivatives instead of differences
    there = np.arange(100) < counts[:, None]
    expected = task.initial.numpy() - 0.5 * (share / counts) @ (slopes * there) @ z
    result = one_round(task, method)
    assert np.allclose(result.weights.numpy(), expected, atol=2e-3)
    ups = {int(k): n for k, n in result.ledger.rows[0].up.items()}
    assert {k: ups[k] - min(ups.values()) for k in ups} == {k: (c - 30) * 4 for k, c in enumerate(counts)}


def test_the_coefficients_of_clients_with_two_and_four_directions_by_hand():
    weak, strong = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0, 6.0])
    # of equal records: 1/2 (1/2 + 3/4), 1/2 (2/2 + 4/4), 1/2 · 5/4, 1/2 · 6/4
    assert _mean([(weak, 7), (strong, 7)]).tolist() == [0.625, 1.0, 0.625, 0.75]
    # of three records to one: 3/4 · 1/2 + 1/4 · 3/4, 3/4 · 2/2 + 1/4 · 4/4, 1/4 · 5/4, 1/4 · 6/4
    assert _mean([(weak, 3), (strong, 1)]).tolist() == [0.5625, 1.0, 0.3125, 0.375]
    assert _mean([(torch.ones(20), 5), (torch.zeros(100), 5)]).sum() == pytest.approx(0.5)
    assert _mean([(torch.zeros(20), 5), (torch.ones(100), 5)]).sum() == pytest.approx(0.5)


def test_the_mean_of_estimates_with_weak_clients_is_the_mean_of_the_gradients():
    """Within five standard errors in each of 8 entries, where the clients' gradients are opposite but for one entry."""
    draw = fv.Seed.root(0).torch()
    z, opposite = torch.randn(4000, 40, 8, generator=draw), torch.tensor([1.0] * 7 + [0.0])
    one, other = 3 * opposite + 1, 1 - 3 * opposite
    found = torch.stack([_mean([(z[i, :5] @ one, 2), (z[i] @ other, 2)]) @ z[i] for i in range(4000)])
    assert ((found.mean(0) - 1).abs() < 5 * found.std(0) / 4000**0.5).all()


@pytest.mark.parametrize("down", ["weights", "replay"])
def test_the_secure_sum_weighs_weak_clients_as_answers_in_the_clear_do(down):
    method = fv.Baffle(directions=16, weak=4, down=down, **PLAIN)
    counts = [method.count(k) for k in range(4)]
    clear = fv.run(linear_task(uneven=True), method, rounds=2, cohort=4)
    summed = fv.run(
        linear_task(uneven=True), dataclasses.replace(method, secure=fv.SecureSum(clip=16.0)), rounds=2, cohort=4
    )
    assert torch.allclose(summed.weights, clear.weights, atol=4e-3)
    assert (clear.weights - clear.task.initial).abs().max() > 0.1
    assert [row.passes for row in summed.ledger.rows] == [row.passes for row in clear.ledger.rows]
    # no value is beyond what a slope may be: what strong clients send is smaller, nobody's is larger
    task, question = linear_task(uneven=True), Probe(linear_task().initial, 5, 16)
    scaled = dataclasses.replace(method, down="weights", secure=fv.SecureSum()).probe(
        stack(task), task.initial, question
    )
    for answer, alone, count in zip(scaled, method.probe(stack(task), task.initial, question), counts, strict=True):
        assert torch.allclose(answer.slopes[:count], alone.slopes[:count] * (4 / count), atol=1e-3)
        assert not answer.slopes[count:].any()
        assert answer.slopes.shape == (16,)


def test_an_epoch_with_a_whole_basis_of_directions_is_fedavgs():
    local = fv.LocalTraining("adam", 0.05, epochs=2, batch=4, beta2=0.99, weight_decay=5e-4)
    for seeds in ("own", "shared"):
        probed = fv.BaffleEpochs(
            law="orthogonal", directions=8, scheme="central", sigma=1e-3, seeds=seeds, local=local,
            clip=None, server=fv.ServerOptimizer(),
        )  # fmt: skip
        ours = fv.run(linear_task(uneven=True), probed, rounds=2, cohort=4)
        theirs = fv.run(linear_task(uneven=True), fv.FedAvg(local), rounds=2, cohort=4)
        assert torch.allclose(ours.weights, theirs.weights, atol=1e-3)
        assert not torch.allclose(ours.weights, ours.task.initial, atol=0.1)
        assert ours.ledger.rows[0].passes == 16 * theirs.ledger.rows[0].passes


LEVELS = pytest.mark.parametrize("level", [fv.Baffle, fv.BaffleEpochs], ids=["batch", "epoch"])


@LEVELS
def test_a_stack_answers_what_its_clients_would_alone(level):
    batch = {"batch": 3} if level is fv.Baffle else {"local": dataclasses.replace(fv.BaffleEpochs().local, batch=3)}
    method = level(seeds="own", directions=16, **batch, **PLAIN)
    one, all_ = (one_round(linear_task(uneven=True), method, engine=Engine(stack=stack, workers=1)) for stack in (1, 4))
    assert torch.allclose(one.weights, all_.weights, atol=1e-3)
    assert one.ledger.rows[0].passes == all_.ledger.rows[0].passes


@pytest.mark.parametrize(("level", "share"), [(0.0, 0.0), (0.5, 1 / 3), (2.0, 8 / 9)])
def test_the_signal_is_the_share_of_the_mean_slopes_that_is_not_noise(level, share):
    draw, records = Seed.root(0).torch(), torch.tensor([10, 10, 20, 40])
    weights = records / records.sum()
    noise = torch.randn(4, 20_000, generator=draw) / weights.square().sum().sqrt()  # so the mean's deviation is 1
    along = level * 2**0.5 * torch.randn(20_000, generator=draw)
    assert signal(along + noise + 7, records) == pytest.approx(share, abs=0.02)


def test_clients_that_agree_are_all_signal():
    assert signal(torch.arange(5.0).expand(3, 5), torch.tensor([1, 2, 3])) == pytest.approx(1)
    assert signal(torch.zeros(3, 5), torch.tensor([1, 2, 3])) == pytest.approx(1)  # nothing differs


def test_a_round_notes_the_signal_of_shared_slopes_in_the_clear():
    for more, there in (({}, True), ({"seeds": "own"}, False), ({"secure": fv.SecureSum(clip=64)}, False)):
        row = fv.run(linear_task(), fv.Baffle(directions=8, batch=2, **more), rounds=1, cohort=4).ledger.rows[0]
        assert ("signal" in row.metrics) == there
        assert not there or 0 <= row.metrics["signal"] <= 1


def test_a_batch_is_a_draw_of_so_many_records():
    task = linear_task(uneven=True)
    method = fv.Baffle(batch=4)
    everyone = stack(task)
    index, mask = method.drawn(everyone, torch.tensor([1, 2, 3, 4]))
    for k in range(4):
        mine = index[k][mask[k] > 0].tolist()
        assert len(set(mine)) == len(mine) == min(4, task.clients.sizes[k])
        assert set(mine) <= set(task.clients[k].tolist())
    assert not torch.equal(index, method.drawn(everyone, torch.tensor([5, 6, 7, 8]))[0])


def test_the_clip_scales_an_estimate_to_its_largest_entry():
    found = fv.Baffle(clip=0.3).clipped(torch.tensor([[0.1, -0.6], [0.1, 0.2]]))
    assert torch.allclose(found, torch.tensor([[0.05, -0.3], [0.1, 0.2]]))


def test_the_moving_average_is_published_and_the_weights_themselves_trained():
    averaging = dataclasses.replace(PLAIN["server"], ema=0.995)
    plain = fv.Baffle(directions=8, **PLAIN)
    method = dataclasses.replace(plain, server=averaging)
    live = [linear_task().initial, *(fv.run(linear_task(), plain, rounds=n, cohort=4).weights for n in (1, 2))]
    averaged = fv.run(linear_task(), method, rounds=2, cohort=4)
    first = 2 / 11 * live[0] + 9 / 11 * live[1]  # (1 + 1) / (10 + 1) is kept
    assert torch.allclose(averaged.weights, 3 / 12 * first + 9 / 12 * live[2], atol=1e-6)
    late = fv.State(torch.zeros(2)).put("average", Average(torch.zeros(2), 10**6))
    published = averaging.published(late, fv.State(torch.ones(2)))
    assert torch.allclose(published.weights, torch.tensor(0.005))
    assert torch.equal(averaging.training(published).weights, torch.ones(2))


@LEVELS
def test_only_the_chosen_layers_are_trained(level):
    task = linear_task()
    result = fv.run(task, level(layers=["b*"]), rounds=2, cohort=4)
    assert torch.equal(result.weights[:6], task.initial[:6])
    assert not torch.equal(result.weights[6:], task.initial[6:])


# ---------------------------------------------------------------------------------------------------- the secure sum


@LEVELS
def test_the_secure_sum_gives_the_round_that_answers_in_the_clear_give(level):
    method = level(directions=16, **PLAIN)
    clear = one_round(linear_task(uneven=True), method)
    summed = one_round(linear_task(uneven=True), dataclasses.replace(method, secure=fv.SecureSum(clip=16.0)))
    assert torch.allclose(summed.weights, clear.weights, atol=2e-3 if level is fv.Baffle else 1e-3)
    assert not torch.equal(summed.weights, summed.task.initial)


def test_a_masked_vector_is_four_bytes_a_direction_and_the_protocol_a_column_of_its_own():
    method = fv.Baffle(directions=100, secure=fv.SecureSum(clip=16.0))
    (row,) = one_round(linear_task(), method).ledger.rows
    masked = next(stage for stage in row.secure if stage.stage == "masked")
    bare = len(message.frame(Slopes(torch.zeros(102)), message.Envelope()))  # two elements more: weight and clipped
    assert 4 * 100 < masked.up / 4 <= bare + 32  # and a digest
    result = one_round(linear_task(), method)
    assert result.summary()["protocol_up"] == sum(stage.up for stage in row.protocol) > 0


def test_questions_that_are_summed_are_not_answered_in_the_clear():
    method = fv.Baffle(secure=fv.SecureSum(clip=16.0))
    assert Probe not in method.handlers
    assert Slopes.additive
    epochs = fv.BaffleEpochs(secure=fv.SecureSum())
    assert Train not in epochs.handlers
    assert epochs.parts.up.payloads.record.additive


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"law": "cauchy"}, "method.law is 'cauchy'; use gaussian or rademacher or orthogonal"),
        ({"slices": "rows"}, "method.slices is 'rows'; use records or layers"),
        ({"losses": "float16"}, "method.losses is 'float16'; use float64 or float32"),
        ({"directions": 0}, "method.directions is at least 1"),
        ({"weak": 200}, "method.weak from 1 to that"),
        ({"sigma": 0.0}, "method.sigma and method.clip are above 0"),
        ({"weak": 0}, "method.weak from 1 to that"),
        ({"batch": 0}, "method.batch is 0; it is at least 1"),
        ({"memory": 0}, "method.memory is at least 1"),
        ({"down": "steps"}, "method.down is 'steps'; use weights or replay"),
        ({"down": "replay", "seeds": "own"}, 'it needs seeds "shared"'),
        ({"secure": fv.SecureSum(), "seeds": "own"}, 'set method.seeds="shared"'),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        fv.Baffle(**settings)
    if not {"batch", "down", "secure"} & {*settings}:
        with pytest.raises(ValueError, match=sentence):
            fv.BaffleEpochs(**settings)


def test_an_average_of_one_weight_only_is_refused():
    with pytest.raises(ValueError, match=r"server.ema must be from 0 to below 1"):
        fv.ServerOptimizer(ema=1.0)


@LEVELS
def test_a_client_does_no_more_work_than_the_recipe_says(level):
    task = linear_task()
    if level is fv.BaffleEpochs:
        assert Train.__struct_fields__ == ("weights",), "a question does not say how many directions"
        return
    with pytest.raises(Refused, match="too large: 10000 directions are asked for, 100 are answered"):
        level().handlers[Probe](stack(task), Probe(task.initial, 1, 10_000))


def test_a_layer_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"'fc\*', which no layer is called; there are weight, bias"):
        fv.Baffle(layers=["fc*"]).init_state(linear_task())


SUMMED = {"secure": fv.SecureSum(clip=16.0)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weak": 20},
        {"down": "replay"},
        None,
        {"batch": 7},
        SUMMED,
        {**SUMMED, "down": "replay"},
        {**SUMMED, "weak": 20},
        {"local": fv.LocalSteps(5, 8), "batch": 7},
        {"local": fv.LocalSteps(10, 8), **SUMMED, "down": "replay"},
        {"privacy": fv.DpSgd(delta=1e-3), "batch": 7},
        {"privacy": fv.DpSgd(delta=1e-3), "batch": 7, **SUMMED},
    ],
)
def test_what_a_run_costs_is_known_before(settings):
    """Of the batch level with these settings; None: of the epoch level."""
    plan = dataclasses.replace(
        recipe.read("digits/fedavg", ["split.clients=60", "split.max_records=24"]),
        method=fv.BaffleEpochs(directions=40) if settings is None else fv.Baffle(directions=40, **settings),
        rounds=3,
        cohort=fv.CohortSampler(size=5),
    )
    task = plan.build()
    told = cost(task, plan)
    if settings is None:
        plan = dataclasses.replace(plan, method=dataclasses.replace(plan.method, directions=1))
    summary = fv.run(task, plan.method, rounds=3, cohort=plan.cohort).summary()
    assert told["up"]["total"] == summary["bytes_up"]
    assert told["down"]["total"] == summary["bytes_down"]
    if settings is not None:
        assert told["passes"]["total"] == summary["passes"]


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path):
    method = fv.Baffle(directions=8, server=fv.ServerOptimizer("adam", 0.01, tau=1e-8, ema=0.9), down="replay")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fv.run(linear_task(), method, rounds=4, cohort=3, folder=whole)
    fv.run(linear_task(), method, rounds=2, cohort=3, folder=parts)
    fv.run(linear_task(), method, rounds=4, cohort=3, folder=parts)
    one, other = kept(whole), kept(parts)
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert one[3] == other[3]


# ---------------------------------------------------------------------------------------------------- digits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_digits_are_learnt_under_the_secure_sum_with_drop_outs():
    plan = recipe.read("digits/baffle", ["method.batch=16"])
    assert plan.method.secure
    assert plan.method.seeds == "shared"
    assert plan.cohort.drop == 0.08
    result = fv.run(plan.build(), plan.method, rounds=40, cohort=plan.cohort, evaluate_every=40)
    assert result.accuracy >= 0.85
    assert result.summary()["clients_failed"] > 20
    masked = [stage for row in result.ledger.rows for stage in row.secure if stage.stage == "masked"]
    assert max(stage.up / max(stage.answered, 1) for stage in masked) < 4 * 100 + 96


def test_a_client_that_is_done_waits_for_larger_ones_unchanged():
    """In a stack of uneven clients a small one's later batches are empty."""
    task = linear_task(uneven=True)
    method = fv.BaffleEpochs(directions=4, local=fv.LocalTraining(batch=2))
    question = Train(task.initial)
    together = method.handlers[Train](stack(task), question)
    for client, answer in enumerate(together):
        (alone,) = method.handlers[Train](stack(task, (client,)), question)
        torch.testing.assert_close(answer.update, alone.update, atol=1e-5, rtol=1e-4)
