"""FedLAP's rounds, its radii and starts, what it refuses, and the digits."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Clients, Letter
from fedveil.core.message import Envelope, Refused, Slots
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine as Engine
from fedveil.methods.surrogates import base
from fedveil.methods.surrogates.fedlap import Batches, FedLap
from fedveil.methods.surrogates.sets import Classes, Distil, Surrogate, WhichClasses
from fedveil.privacy.accountant import Noised, epsilon
from fedveil.privacy.dpsgd import DpSgd, Gradients
from fedveil.runs import recipe
from fedveil.runs.cost import cost
from methods.surrogates.small import stack_of, task_of
from toys import Tamper, kept

SMALL = {"images": 2, "passes": 1, "batches": 3, "batch": 8, "steps": 5, "image_lr": 1.0}
PRIVATE = {"region": "constant", "weighting": "equal", "privacy": DpSgd(delta=1e-3)}


def question(task, method, classes=2) -> Distil:
    return Distil(task.initial, method.images * classes)


# ---------------------------------------------------------------------------------------------------- the clients


def test_labels_are_equally_many_of_each_class_that_a_client_holds():
    task, method = task_of(), FedLap(**SMALL)
    assert [a.held.tolist() for a in method.which(stack_of(task), WhichClasses())][:2] == [[1, 1, 0], [0, 1, 1]]
    answers = method.distil(stack_of(task), question(task, method))
    assert [a.labels.tolist() for a in answers][:3] == [[0, 0, 1, 1], [1, 1, 2, 2], [0, 0, 2, 2]]
    assert [a.records for a in answers] == [12] * 4


def test_fitting_brings_the_gradients_of_the_images_to_those_of_the_records():
    task = task_of()
    method = FedLap(**{**SMALL, "batches": 200, "batch": 100, "image_lr": 0.5})
    stack = stack_of(task)
    labels = torch.stack([a.labels for a in method.distil(stack_of(task), question(task, method))]).long()
    images = method.start(stack, labels)
    before, after = torch.zeros(4), torch.zeros(4)
    rows = torch.from_numpy(stack.rows.padded()[0])
    w = task.initial.expand(4, -1)
    goal = task.gradient(w, task.x[rows], task.y[rows], torch.ones(rows.shape))[0]
    method.slope(task, w, images, labels, goal, before)
    method.fit(stack, task.initial, images, labels)
    method.slope(task, w, images, labels, goal, after)
    assert (after < 0.2 * before).all()


@pytest.fixture
def passes(monkeypatch):
    """The number of each pass that is begun, and the weights then, [C, d]."""
    seen, begin = [], Batches.begin

    def watched(self, piece):
        seen.append((piece, self._weights.clone()))
        begin(self, piece)

    monkeypatch.setattr(Batches, "begin", watched)
    return seen


def test_a_stack_fits_what_its_clients_fit_by_themselves(passes):
    """Also where some are out of their radius while others go on, in two trajectories."""
    task = task_of(sizes=(12, 9, 7, 11))
    method = FedLap(**{**SMALL, "passes": 4}, model_steps=1, trajectories=2, radius=0.2)
    together = method.distil(stack_of(task), question(task, method))
    left = [((weights - task.initial).norm(dim=1) >= method.radius).tolist() for _, weights in passes]
    assert any(True in some and False in some for some in left)
    for k, answer in enumerate(together):
        (alone,) = method.distil(stack_of(task, (k,)), question(task, method))
        assert torch.allclose(alone.images, answer.images, atol=1e-4)
        assert alone.radius == pytest.approx(answer.radius, rel=1e-3)


def test_what_images_start_from():
    task = task_of()
    labels = torch.tensor([[0, 0, 1, 1]])

    def started(init, memory=None, round_=1):
        held = [Slots({"surrogates": memory} if memory else {})]
        return FedLap(**SMALL, init=init).start(stack_of(task, (0,), round_, held), labels)

    (answer,) = FedLap(**SMALL).distil(stack := stack_of(task, (0,)), Distil(task.initial, 4))
    (last,) = stack.kept["surrogates"]
    assert torch.equal(started("previous", last)[0], answer.images)
    assert torch.equal(started("previous"), started("noise"))
    assert torch.equal(started("noise", last), started("noise"))
    assert not torch.equal(started("noise", round_=2), started("noise"))
    real = started("real")[0]
    own = task.clients[0]
    for image, label in zip(real, labels[0], strict=True):
        assert (task.x[own][task.y[own] == label] == image).all(1).any()
    assert len(real.unique(dim=0)) == 4


def test_a_set_is_as_like_the_records_as_its_gradient():
    task, method = task_of(), FedLap(**SMALL)
    stack = stack_of(task)
    rows = torch.from_numpy(np.stack(stack.rows.indices))
    x, y = task.x[rows], task.y[rows]
    assert method.likeness(stack, task.initial, x, y).tolist() == pytest.approx([1.0] * 4, abs=1e-5)
    for k, found in enumerate(method.likeness(stack, task.initial, x[:, :3], y[:, :3]).tolist()):
        one, other = (
            torch.func.grad(lambda w, n=n, k=k: task.losses(w, x[k, :n], y[k, :n]).mean())(task.initial)
            for n in (3, 12)
        )
        assert found == pytest.approx(float(one @ other / (one.norm() * other.norm())), abs=1e-5)


def test_a_class_with_fewer_records_than_images_repeats_them():
    task = task_of(sizes=(3,), hands=((0, 1),))  # two records of class 0, one of class 1
    real = FedLap(**{**SMALL, "images": 3}, init="real").start(stack_of(task), torch.tensor([[0, 0, 0, 1, 1, 1]]))[0]
    assert len(real[:3].unique(dim=0)) == 2
    assert len(real[3:].unique(dim=0)) == 1


def test_a_trajectory_stays_within_its_radius_and_makes_as_many_passes_as_it_may(passes):
    task, stack = task_of(), stack_of(task_of())
    steady = {**SMALL, "trajectories": 2, "passes": 4, "region": "fixed"}
    FedLap(**steady).distil(stack, question(task, FedLap(**SMALL)))
    assert [number for number, _ in passes] == list(range(8))
    assert all((weights == task.initial).all() for _, weights in passes)  # without model steps they stay where they are
    whole = stack.passes
    passes.clear()
    FedLap(**steady, model_steps=3, radius=1e-3).distil(stack := stack_of(task), question(task, FedLap(**SMALL)))
    assert [number for number, _ in passes] == [0, 1, 4, 5]  # a step leads out of the ball, so the second is not made
    assert [bool((weights == task.initial).all()) for _, weights in passes] == [True, False, True, False]
    assert stack.passes == whole / 4


def test_the_radius_is_where_the_real_loss_is_lowest_on_the_way():
    task = task_of(sizes=(12,), hands=((0, 1),))
    method = FedLap(**{**SMALL, "steps": 40, "lr": 1.0})
    labels = torch.tensor([[0, 0, 1, 1]])
    images = torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(3))
    (radius,) = method.calibrated(stack_of(task), task.initial, images, labels).tolist()
    w, seen = task.initial.clone(), []
    for t in range(40):
        gradient = task.gradient(w[None], images, labels, torch.ones(1, 4))[0][0]
        w = w - 0.5 * (1 + math.cos(math.pi * t / 40)) * gradient
        seen.append((float(task.losses(w, task.x, task.y).mean()), float((w - task.initial).norm())))
    assert radius == pytest.approx(min(seen)[1], rel=1e-3)
    assert 0 < radius < max(away for _, away in seen)


def test_a_set_that_only_raises_the_real_loss_has_no_radius():
    """Images of the client's records with their labels swapped: every step on them does harm."""
    task = task_of(sizes=(12,), hands=((0, 1),))
    own = torch.from_numpy(task.clients[0])
    x, y = task.x[own], task.y[own]
    swapped = torch.cat([x[y == 1], x[y == 0]])[None], torch.cat([y[y == 0], y[y == 1]])[None]
    method = FedLap(**{**SMALL, "steps": 40})
    assert method.calibrated(stack_of(task), task.initial, *swapped).tolist() == [0.0]


def test_refitting_goes_on_with_the_mean_gradient_of_each_pass():
    """One place, its three gradients by hand, and the steps after the fit."""
    task, labels = task_of(sizes=(12,), hands=((0, 1),)), torch.tensor([[0, 0, 1, 1]])
    plain = FedLap(**{**SMALL, "batches": 3}, image_steps=2, momentum=0.0)
    first = plain.start(stack_of(task), labels)
    images = first.clone()
    plain.fit(stack_of(task), task.initial, images, labels)
    again = first.clone()
    dataclasses.replace(plain, refits=2).fit(stack_of(task), task.initial, again, labels)
    batches = Batches(stack_of(task), task.initial[None], plain.batch, 3, [(0, 0)], lambda x: x)
    batches.begin(0)
    goal = torch.stack([batches() for _ in range(3)]).mean(0)
    for _ in range(2 * plain.image_steps):
        images -= plain.image_lr * plain.slope(task, task.initial[None], images, labels, goal, torch.zeros(1))
    assert torch.allclose(again, images, atol=1e-5)


def test_refitting_is_free_and_looks_at_no_record():
    task = task_of()
    once, more = (FedLap(**SMALL, **PRIVATE, refits=refits) for refits in (0, 3))
    assert once.client_cost(task) == more.client_cost(task)
    stacks = [stack_of(task), stack_of(task)]
    for method, stack in zip((once, more), stacks, strict=True):
        stack.charge = lambda price: None
        method.distil(stack, question(task, method))
    assert stacks[0].passes == stacks[1].passes > 0


def test_a_radius_is_measured_on_some_records_of_a_client_that_has_many(monkeypatch):
    task, method, seen = task_of(sizes=(12, 9), hands=((0, 1), (1, 2))), FedLap(**SMALL), []
    whole = task.stacked_losses

    def watched(w, x, y, key=None):
        if not torch.is_grad_enabled():
            seen.append(y)
        return whole(w, x, y, key)

    monkeypatch.setattr(base, "MEASURED", 5)
    monkeypatch.setattr(task, "stacked_losses", watched)
    stack = stack_of(task)
    method.calibrated(stack, task.initial, torch.randn(2, 4, 4), torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2]]))
    assert [y.shape for y in seen] == [(2, 5)] * (1 + method.steps)
    assert all(torch.equal(y, seen[0]) for y in seen)
    assert stack.passes == (1 + method.steps) * 2 * 5


def test_a_client_that_left_its_radius_looks_at_no_more_records():
    task, stack = (made := task_of(sizes=(12, 9), hands=((0, 1), (1, 2)))), stack_of(made)
    method = FedLap(**SMALL, radius=1e-6)  # which the first step leaves
    method.calibrated(stack, task.initial, torch.randn(2, 4, 4), torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2]]))
    assert stack.passes == 2 * (12 + 9)  # where it starts, and after the step


def test_a_question_for_other_points_than_belong_to_the_classes_is_refused():
    task, method = task_of(), FedLap(**SMALL)
    with pytest.raises(Refused, match="out of range: 6 points are asked for, 4 belong to it"):
        method.distil(stack_of(task), question(task, method, classes=3))


# ---------------------------------------------------------------------------------------------------- the server


def sets(radii, records=(1, 1, 1)):
    """Sets of two, three and one points."""
    images = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).split([2, 3, 1])
    labels = torch.tensor([0, 1, 0, 1, 2, 2], dtype=torch.int16).split([2, 3, 1])
    return [Surrogate(*each) for each in zip(images, labels, radii, records, strict=True)]


@pytest.mark.parametrize(
    ("region", "reach"), [("min", 0.1), ("max", 0.5), ("median", 0.2), ("constant", 0.3), ("fixed", math.inf)]
)
def test_how_far_the_server_goes(region, reach):
    task = task_of()
    method = FedLap(region=region, radius=0.3, lr=0.01, steps=300)
    assert method.reach([0.5, 0.1, 0.2]) == reach
    weights, figures = method.optimise(task, task.initial, sets((0.5, 0.1, 0.2)))
    moved = float((weights - task.initial).norm())
    assert figures["moved"] == pytest.approx(moved)
    assert [figures.get(f"radius_{end}") for end in ("least", "most")] == (
        [0.1, 0.5] if region in ("min", "max", "median") else [None, None]
    )
    assert reach <= moved < reach + 0.02 if reach < math.inf else moved > 0.5
    assert figures["server_steps"] > 280 if reach == math.inf else figures["server_steps"] < 280


@pytest.mark.parametrize(("weighting", "shares"), [("records", (1 / 6, 2 / 6, 3 / 6)), ("equal", (1 / 3,) * 3)])
def test_a_step_of_the_server_weighs_clients(weighting, shares):
    task = task_of()
    given = sets((1.0, 1.0, 1.0), records=(10, 20, 30))
    weights, _ = FedLap(weighting=weighting, steps=1, lr=0.5).optimise(task, task.initial, given)
    w = task.initial.clone().requires_grad_()
    loss = sum(share * task.losses(w, s.images, s.labels.long()).mean() for share, s in zip(shares, given, strict=True))
    (gradient,) = torch.autograd.grad(loss, w)
    assert torch.allclose(weights, task.initial - 0.5 * gradient, atol=1e-6)


def test_sets_of_different_sizes_train_together():
    task = task_of(hands=((0, 1), (0, 1, 2), (2,), (0, 1)))
    result = fv.run(task, FedLap(**SMALL), rounds=2, cohort=4)
    assert not result.summary()["clients_failed"]
    assert not torch.equal(result.weights, task.initial)
    found = result.ledger.rows[0].metrics
    assert {"matching", "cosine_real", "moved", "server_steps"} <= set(found)
    private = fv.run(task, FedLap(**SMALL, **PRIVATE), rounds=1, cohort=4).ledger.rows[0].metrics
    assert "matching" in private
    assert "cosine_real" not in private
    assert 0 < found["radius_least"] == found["radius"] < found["radius_most"]


# ---------------------------------------------------------------------------------------------------- hostile answers


def tampered(record, change, method):
    """Two rounds, in the second of which client 2 answers with what `change` makes of its record."""

    def edit(round_, replies):
        out = []
        for reply in replies:
            if round_ == 2 and reply.client == 2 and reply.frame and message.envelope(reply.frame)[0] == record.kind:
                _, where = message.envelope(reply.frame)
                honest = message.unpack(reply.frame[message.PREFIX_BYTES :], record)
                fields = {name: getattr(honest, name) for name in record.__struct_fields__} | change(honest)
                reply = dataclasses.replace(reply, frame=message.frame(record(**fields), where))
            out.append(reply)
        return out

    return fv.run(task_of(), method, rounds=2, cohort=4, engine=Tamper(edit))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: {"images": a.images * math.nan}, "not finite: images"),
        (lambda a: {"images": a.images * 0 + 2e3}, "out of range: images"),
        (lambda a: {"images": a.images[:2]}, "wrong shape: images"),
        (lambda a: {"images": a.images.double()}, "wrong dtype: images"),
        (lambda a: {"images": a.images.repeat(2, 1), "labels": a.labels.repeat(2)}, "wrong shape: images"),
        (lambda a: {"labels": a.labels.flip(0)}, "out of range: labels are not 2 of each class that the client holds"),
        (lambda a: {"labels": a.labels * 0 + 1}, "out of range: labels are not 2 of each class"),
        (lambda a: {"labels": a.labels * 0 - 1}, "out of range: labels reaches from -1"),
        (lambda a: {"labels": a.labels * 0 + 300}, "out of range: labels are not 2 of each class"),
        (lambda a: {"labels": a.labels.long()}, "wrong dtype: labels"),
        (lambda a: {"radius": -1.0}, "wrong field"),
        (lambda a: {"radius": math.nan}, "not finite: radius|wrong field"),
        (lambda a: {"radius": 11.0}, "out of range: radius is 11, the recipe's is 10"),
        (lambda a: {"records": 0}, "wrong field"),
        (lambda a: {"records": 13}, "out of range: records is 13, the largest client has 12"),
    ],
)
def test_a_set_that_cannot_be_is_refused_and_left_out(change, sentence):
    result = tampered(Surrogate, change, FedLap(**SMALL))
    (reason,) = [row.missing["2"] for row in result.ledger.rows if row.missing]
    assert reason.startswith("refused: ")
    assert any(part in reason for part in sentence.split("|"))
    assert torch.equal(result.weights, without_the_last_answer().weights)


@pytest.mark.parametrize(("region", "lie"), [("min", 0.0), ("max", 1e3), ("median", 1e3)])
def test_a_radius_counts_up_to_ten_times_the_median_either_way(region, lie):
    method = FedLap(**SMALL, region=region, radius=1e3)
    honest, found = (
        tampered(Surrogate, change, method).ledger.rows[1] for change in (lambda _: {}, lambda _: {"radius": lie})
    )
    (told,) = found.events
    assert told.startswith(f"client 2: radius of {lie:g} counts as ")
    middle = float(told.rpartition(" ")[2])
    assert honest.metrics["radius_least"] <= middle <= honest.metrics["radius_most"]
    expected = {"min": middle / 10, "max": middle * 10, "median": middle}[region]
    assert found.metrics["radius"] == pytest.approx(expected, rel=1e-4)
    assert found.metrics["moved"] > 0
    assert not honest.events


@functools.cache
def without_the_last_answer() -> fv.Result:
    def drop(round_, replies):
        return [r for r in replies if round_ == 1 or r.client != 2 or message.envelope(r.frame)[0] != Surrogate.kind]

    return fv.run(task_of(), FedLap(**SMALL), rounds=2, cohort=4, engine=Tamper(drop))


@pytest.mark.parametrize(
    ("held", "sentence"),
    [([0, 0, 0], "held has no class at all"), ([2, 0, 1], "out of range: held"), ([1, 1, 1], "6 points are asked for")],
)
def test_classes_that_cannot_be_are_refused(held, sentence):
    said = torch.tensor(held, dtype=torch.uint8)
    result = tampered(Classes, lambda a: {"held": said}, FedLap(**SMALL))
    assert sentence in result.ledger.rows[1].missing["2"]
    assert not result.ledger.rows[1].events


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"init": "zeros"}, "method.init is 'zeros'; use noise, previous, real"),
        ({"region": "mean"}, "method.region is 'mean'; use min, max, median, constant, fixed"),
        ({"weighting": "loss"}, "method.weighting is 'loss'; use records, equal"),
        ({"images": 0}, "method.images is 0; it is at least 1"),
        ({"passes": 0}, "method.passes is 0; it is at least 1"),
        ({"radius": 0.0}, "method.radius, method.lr and method.image_lr are above 0"),
        ({"momentum": 1.0}, "method.momentum is 0 to below 1"),
        ({**PRIVATE, "init": "real"}, 'method.init is "real", which sends records without noise'),
        ({**PRIVATE, "region": "min"}, 'method.region is "min" of radii that clients measure on their records'),
        ({**PRIVATE, "weighting": "records"}, 'method.weighting is "records", which tells how many records'),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedLap(**settings)


def test_tokens_are_refused():
    plan = recipe.read("shakespeare/fedavg")
    assert plan.task.loss == "next-character"
    x = torch.zeros(4, 3, dtype=torch.int64)
    data = from_tensors(x, x[:, 0], x, x[:, 0], classes=2)
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2))
    task = fv.Task(model, data, fv.split("iid", data, 2, fv.Seed.root(0)))
    with pytest.raises(ValueError, match="fedlap fits its inputs by gradient, and tokens have none"):
        FedLap().init_state(task)


@pytest.mark.parametrize("more", [{}, {"region": "fixed"}])
def test_what_a_run_costs_is_known_before(more):
    method = FedLap(**SMALL, **more)
    plan = dataclasses.replace(recipe.read("digits/fedlap"), method=method, rounds=2)
    task = plan.build()
    told, summary = cost(task, plan), fv.run(task, method, rounds=2, cohort=5).summary()
    assert told["up"]["total"] == summary["bytes_up"]
    assert told["down"]["total"] == summary["bytes_down"]
    assert told["passes"]["total"] == summary["passes"]


@pytest.mark.parametrize("more", [{}, PRIVATE])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path, more):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, stops in ((whole, (3,)), (parts, (1, 3))):
        for rounds in stops:
            options = {"insecure_test_noise": 5, "folder": folder}
            fv.run(task_of(), FedLap(**SMALL, **more), rounds=rounds, cohort=3, **options)
    one, other = kept(whole), kept(parts)
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert one[3] == other[3]


# ---------------------------------------------------------------------------------------------------- privacy


def test_a_private_round_tells_nothing_but_the_noised_set():
    task = task_of(sizes=(12, 9, 7, 11))
    method = FedLap(**SMALL, **PRIVATE)
    answers = method.distil(stack_of(task), question(task, method))
    assert {a.records for a in answers} == {1}
    assert {a.radius for a in answers} == {method.radius}


def test_what_a_client_sends_depends_on_its_records_through_private_gradients_only(monkeypatch):
    """With the private gradients replaced, other records of the same classes give the same answer."""

    monkeypatch.setattr(Gradients, "__call__", lambda self: torch.ones_like(self._weights))
    method = FedLap(**SMALL, **{**PRIVATE, "model_steps": 1})
    first, second = task_of(seed=0), task_of(sizes=(9, 12, 5, 12), seed=1)
    asked = question(first, method)
    one = method.distil(stack_of(first), asked)
    other = method.distil(stack_of(second), Distil(first.initial, asked.points))
    assert [message.pack(a) for a in one] == [message.pack(a) for a in other]


def test_epsilon_is_in_the_ledger_and_never_goes_down():
    task, method = task_of(), FedLap(**SMALL, **PRIVATE)
    result = fv.run(task, method, rounds=8, cohort=1)
    times, behind = np.zeros(4, int), 0
    for row in result.ledger.rows:
        times[row.cohort] += 1
        behind += int(times[row.cohort].max() < times.max())
        expected = epsilon([Noised(1.0, 8 / 12, 3 * int(times.max()))], 1e-3)
        assert row.epsilon == pytest.approx(expected)
    assert behind  # some round asked a client that had charged less than another
    assert result.summary()["epsilon"] == result.ledger.rows[-1].epsilon
    assert fv.run(task, FedLap(**SMALL), rounds=1, cohort=2).summary()["epsilon"] is None


def test_a_client_answers_no_more_when_that_would_exceed_its_budget():
    once = epsilon([Noised(1.0, 8 / 12, 3)], 1e-3)
    tight = dataclasses.replace(PRIVATE["privacy"], budget=once * 1.01)
    task, method = task_of(), FedLap(**SMALL, **{**PRIVATE, "privacy": tight})
    result = fv.run(task, method, rounds=2, cohort=4)
    assert result.stopped == "budget"
    assert [row.epsilon for row in result.ledger.rows] == [once]
    federation = fv.Federation(
        task, method, Engine(), fv.CohortSampler(4), fv.Seed.root(0)
    )  # a server that does not count
    state, first = federation.step(method.init_state(task), 1, 2)
    _, second = federation.step(state, 2, 2)
    assert not first.missing
    assert set(second.missing) == {"0", "1", "2", "3"}
    assert "over budget: the answer would bring ε to" in second.missing["0"]
    assert second.events


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_a_round_below_its_quorum_is_charged_all_the_same():
    def lost(round_, replies):
        kinds = {r.client: message.envelope(r.frame)[0] for r in replies}
        return [r for r in replies if (round_, r.client, kinds[r.client]) != (1, 2, Surrogate.kind)]

    task, quorum = task_of(), fv.CohortSampler(size=4, quorum=4)
    for rounds in (1, 2):
        result = fv.run(task, FedLap(**SMALL, **PRIVATE), rounds=rounds, cohort=quorum, engine=Tamper(lost))
        assert result.ledger.rows[0].events[0].startswith("below quorum")
        spent = epsilon([Noised(1.0, 8 / 12, 3 * rounds)], 1e-3)
        assert result.ledger.rows[-1].epsilon == pytest.approx(spent)
        assert torch.equal(result.weights, task.initial) == (rounds == 1)


def test_a_round_that_is_asked_again_is_charged_again():
    task, method, run = task_of(), FedLap(**SMALL, **PRIVATE), bytes(8)
    clients = Clients(method, task, run, fv.Seed.root(0))

    def asked(round_):
        payload = message.pack(question(task, method))
        (reply,) = clients.answer([Letter(Distil.kind, Envelope(run, round_, 0, 1), payload)])
        return message.unpack(reply.frame[message.PREFIX_BYTES :], Surrogate)

    first, again, later = asked(1), asked(1), asked(2)
    assert clients.memory.spent(0).total() == 3
    assert not torch.equal(first.images, again.images)  # fresh noise
    assert not torch.equal(again.images, later.images)


# ---------------------------------------------------------------------------------------------------- digits


TUNED = "method.local.lr=0.5"  # of 0.1, which the recipe has, 0.3, 0.5 and 0.8 the best for FedAvg here


def reached(name: str, rounds: int, *changes: str) -> np.ndarray:
    """Test accuracy after so many rounds with the seeds 0, 1 and 2, [3]."""
    found = []
    for seed in range(3):
        plan = recipe.read(name, [f"seed={seed}", f"rounds={rounds}", *changes])
        options = {"seed": seed, "engine": Engine(workers=1), "evaluate_every": rounds}
        found.append(fv.run(plan.build(), plan.method, rounds=rounds, cohort=plan.cohort, **options).accuracy)
    return np.array(found)


def test_one_round_on_the_digits_is_ten_points_above_averaging_with_each_of_three_seeds():
    surrogate = reached("digits/fedlap", 1)
    assert (surrogate >= 0.8).all()
    assert (surrogate >= reached("digits/fedavg-2class", 1) + 0.1).all()
    assert (surrogate >= reached("digits/fedavg-2class", 1, TUNED) + 0.1).all()


@pytest.mark.slow
def test_five_rounds_on_the_digits_are_ten_points_above_averaging_as_a_mean_of_three_seeds():
    """Against the rate that is best for FedAvg it is less."""
    surrogate = reached("digits/fedlap", 5)
    assert (surrogate >= 0.92).all()
    assert surrogate.mean() >= reached("digits/fedavg-2class", 5).mean() + 0.1
    assert surrogate.mean() >= reached("digits/fedavg-2class", 5, TUNED).mean() + 0.05


@pytest.mark.slow
def test_digits_are_learnt_with_differential_privacy():
    plan = recipe.read("digits/fedlap-dp")
    result = fv.run(plan.build(), plan.method, rounds=plan.rounds, cohort=plan.cohort, insecure_test_noise=7)
    assert result.accuracy >= 0.78
    assert 5 < result.summary()["epsilon"] < 6


@pytest.mark.parametrize("lr", [0.1, 1e3])
def test_the_server_keeps_the_weights_with_the_lowest_loss_on_the_sets(lr):
    """Steps of 1e3 overshoot at once."""
    task, draw = task_of(), torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 0, 1, 1], dtype=torch.int16)
    sets = [Surrogate(torch.randn(4, 4, generator=draw), labels, 1.0, records=3) for _ in range(2)]
    w, _ = FedLap(images=2, region="fixed", lr=lr, steps=20).optimise(task, task.initial, sets)

    def loss(w):
        return sum(float(task.losses(w, each.images, each.labels.long()).mean()) for each in sets)

    assert loss(w) < loss(task.initial) if lr < 1 else loss(w) <= loss(task.initial)


# ---------------------------------------------------------------------------------------------------- public classes


def test_with_privacy_the_classes_of_a_client_must_be_public():
    """One new record of another class once changed the message for certain, at no cost."""
    task = task_of()
    unsaid = dataclasses.replace(task.clients, held=None)
    task.clients = unsaid
    with pytest.raises(ValueError, match=r"fedlap with method.privacy sends images of each class .* set split.held"):
        fv.run(task, FedLap(**SMALL, **PRIVATE), rounds=1, cohort=2)
    fv.run(task, FedLap(**SMALL), rounds=1, cohort=2)  # without, they are those of its records


@pytest.mark.parametrize("more", [(), (2,)])
def test_a_record_of_another_class_changes_nothing_and_is_left_out(more, caplog):
    """Client 0 is said to hold classes 0 and 1."""
    hands = ((0, 1, *more), (1, 2), (0, 2), (0, 1))
    task = task_of(sizes=(12 + 6 * len(more), 12, 12, 12), hands=hands)
    task.clients = dataclasses.replace(task.clients, max_records=20, held=((0, 1), (1, 2), (0, 2), (0, 1)))
    stack = stack_of(task, (0,))
    method = FedLap(**SMALL, **PRIVATE)
    (classes,) = method.which(stack, None)
    assert classes.held.tolist() == [1, 1, 0]
    (made,) = method.distil(stack, Distil(task.initial, 2 * method.images))
    assert set(made.labels.tolist()) == {0, 1}
    assert set(task.data.y[stack.rows.indices[0]].tolist()) == {0, 1}
    assert ("leaves out 6 records of classes that are not said" in caplog.text) == bool(more)


def test_a_class_without_a_record_is_fitted_to_noise():
    task = task_of()
    task.clients = dataclasses.replace(task.clients, held=((0, 1, 2), (2,), (0,), (0, 1)))
    result = fv.run(task, FedLap(**SMALL, **PRIVATE), rounds=2, cohort=4)
    assert not any(row.missing for row in result.ledger.rows)


def test_what_is_said_of_classes_must_make_sense():
    task = task_of()
    for held, told in ((((0, 3), (1,), (0,), (0,)), "names class 3; there are 3"), (((0,), (), (0,), (0,)), "without")):
        task.clients = dataclasses.replace(task.clients, held=held)
        with pytest.raises(ValueError, match=told):
            FedLap(**SMALL, **PRIVATE).init_state(task)
    plan = recipe.read("digits/fedlap-dp", ["split.held=[[0, 1]]"])
    with pytest.raises(ValueError, match=r"split.held lists 1 clients, but there are 5"):
        plan.build()


def test_the_sampling_rate_must_be_public_in_simulations_too():
    task = task_of()
    task.clients = dataclasses.replace(task.clients, max_records=None)
    with pytest.raises(
        ValueError, match=r"method.privacy needs split.max_records, a public bound .* for instance to 12"
    ):
        fv.run(task, FedLap(**SMALL, **PRIVATE), rounds=1, cohort=2)
