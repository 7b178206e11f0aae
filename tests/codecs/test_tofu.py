"""TOFU: its arithmetic by hand, its gradients by differences, its priors and its bits, and how near it comes."""

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import nn

import fedveil as fv
from codec_tools import body, check_instead_of_fitting, digits, image_task, stack_of, through_the_wire, trained
from fedveil.codecs import tofu
from fedveil.codecs.fit import PRECISIONS, cosine
from fedveil.codecs.tofu import Proxies
from fedveil.data import from_tensors
from toys import linear_task

SEEDS = [fv.Seed.root(k) for k in range(2)]


def norms(task: fv.Task, update: torch.Tensor) -> torch.Tensor:
    """The norm of each layer of an update [d]."""
    return torch.stack([update[a.start : a.stop].norm() for a in task.layout.layers])


def updated(task: fv.Task) -> torch.Tensor:
    """Two clients' updates after two epochs, [2, d]."""
    return trained(stack_of(task, 0, 1), fv.LocalTraining(lr=0.3, epochs=2, batch=20))


def encoded(codec: fv.TofuCodec, task: fv.Task, updates: torch.Tensor) -> list[Proxies]:
    payloads = codec.encode(task, task.initial.expand(2, -1), updates, SEEDS, stack_of(task, 0, 1))
    return [through_the_wire(codec, task, p) for p in payloads]


def test_two_points_by_hand():
    """A linear model: the update goes along -Σ α (p - y) xᵀ, each layer stretched to the norm that was sent."""
    task = linear_task()
    weight, bias = task.initial[:6].view(2, 3), task.initial[6:]
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]])
    y = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    alphas, scales = torch.tensor([0.25, 0.75]), torch.tensor([2.0, 0.5])
    error = (x @ weight.T + bias).softmax(1) - y  # p - y
    along = [-sum(a * torch.outer(e, v) for a, e, v in zip(alphas, error, x, strict=True)).flatten(), -alphas @ error]
    by_hand = torch.cat([s * piece / piece.norm() for s, piece in zip(scales, along, strict=True)])
    payload = Proxies(x, y, alphas, scales, -2.0, 3.0)
    decoded = fv.TofuCodec(points=2).decode(task, task.initial[None], [payload])
    torch.testing.assert_close(decoded, by_hand[None])


def test_every_layer_is_rescaled_to_the_norm_that_was_sent():
    task = image_task()
    updates, codec = updated(task), fv.TofuCodec(points=3, steps=5)
    payloads = encoded(codec, task, updates)
    decoded = codec.decode(task, task.initial.expand(2, -1), payloads)
    for update, payload, got in zip(updates, payloads, decoded, strict=True):
        torch.testing.assert_close(payload.scales, norms(task, update))
        torch.testing.assert_close(norms(task, got), payload.scales, rtol=1e-6, atol=0)


def test_the_gradient_of_the_loss_is_that_of_finite_differences(monkeypatch):
    task, codec = image_task((1, 2, 2), hidden=3), fv.TofuCodec(points=2)
    w, updates = task.initial.expand(2, -1).double(), updated(task).double()
    checked = check_instead_of_fitting(tofu, monkeypatch)
    codec.encode(task, w, updates, SEEDS, None)
    assert checked == [2]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_of_the_fit_is_one_minus_the_cosine_of_what_is_decoded(monkeypatch, precision):
    """So the rounding is within the fit. The loss is of the points' own gradient: with its own norms for scales."""
    fits = []
    real = tofu.adam

    def then_look(derive, *rest):
        real(derive, *rest)
        fits.append(derive()[0])

    monkeypatch.setattr(tofu, "adam", then_look)
    task, codec = image_task(), fv.TofuCodec(points=5, steps=40, precision=precision)
    updates = updated(task)
    payloads = encoded(codec, task, updates)
    for update, payload, lost in zip(updates, payloads, fits[0], strict=True):
        labels, images = payload.labels.float(), payload.images.float()
        if precision == "uint8":
            images = payload.low + images * (payload.high - payload.low) / 255
        labels = labels / labels.sum(1, keepdim=True)
        gradient = codec._direction(task, task.initial[None], images[None], labels[None], payload.alphas[None])[0]
        own = replace(payload, scales=norms(task, gradient))
        decoded = codec.decode(task, task.initial[None], [own])
        torch.testing.assert_close(1 - cosine(decoded, update[None])[0], lost, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("precision", "each"), [("float32", 4), ("float16", 2), ("uint8", 1)])
def test_points_cost_their_precision_and_the_rest_stays_in_floats(precision, each):
    task = image_task()
    for payload in encoded(fv.TofuCodec(points=5, steps=2, precision=precision), task, updated(task)):
        assert payload.images.dtype == payload.labels.dtype == PRECISIONS[precision]
        assert body(payload) == each * 5 * (16 + 3) + 4 * (5 + 4)


# ---------------------------------------------------------------------------------------------------- priors


def test_one_channel_is_sent_and_replicated():
    task = image_task((3, 4, 4))
    gray, full = fv.TofuCodec(points=5, steps=10, channels=1), fv.TofuCodec(points=5)
    for payload in encoded(gray, task, updated(task)):
        assert payload.images.shape == (5, 1, 4, 4)
        assert body(payload) == 4 * (5 * (16 + 3 + 1) + 4)
        replicated = replace(payload, images=payload.images.repeat(1, 3, 1, 1))
        decoded = [c.decode(task, task.initial[None], [p]) for c, p in ((gray, payload), (full, replicated))]
        torch.testing.assert_close(*decoded)


def test_small_images_are_sent_and_upsampled():
    task = image_task((3, 4, 8))
    small, full = fv.TofuCodec(points=5, steps=10, shrink=2), fv.TofuCodec(points=5)
    for payload in encoded(small, task, updated(task)):
        assert payload.images.shape == (5, 3, 2, 4)
        assert body(payload) == 4 * (5 * (24 + 3 + 1) + 4)
        upsampled = replace(payload, images=F.interpolate(payload.images, scale_factor=2, mode="nearest"))
        decoded = [c.decode(task, task.initial[None], [p]) for c, p in ((small, payload), (full, upsampled))]
        torch.testing.assert_close(*decoded)


def test_both_priors_go_together():
    task = image_task((3, 4, 4))
    codec = fv.TofuCodec(points=5, steps=60, channels=1, shrink=2)
    updates = updated(task)
    payloads = encoded(codec, task, updates)
    assert payloads[0].images.shape == (5, 1, 2, 2)
    assert cosine(codec.decode(task, task.initial.expand(2, -1), payloads), updates).min() > 0.3


# ---------------------------------------------------------------------------------------------------- refusals


def tokens() -> fv.Task:
    x, y = torch.randint(9, (20, 4), generator=fv.Seed.root(0).torch()), torch.arange(20) % 3
    data = from_tensors(x, y, x, y, classes=3)
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3))
    return fv.Task(model, data, fv.split("iid", data, 2, fv.Seed.root(0)))


@pytest.mark.parametrize(
    ("codec", "task", "sentence"),
    [
        (fv.TofuCodec(), tokens, "tofu fits its inputs by gradient, and tokens have none; use a codec such as qsgd"),
        (fv.FedSynthCodec(), tokens, "fedsynth fits its inputs by gradient, and tokens have none; use qsgd or top-k"),
        (
            fv.TofuCodec(channels=1),
            linear_task,
            r"channels and shrink are for images, and inputs here have shape \(3,\)",
        ),
        (fv.TofuCodec(shrink=2), linear_task, r"channels and shrink are for images, and inputs here have shape \(3,\)"),
        (fv.TofuCodec(channels=2), image_task, r"channels 2 and shrink 1 do not suit images of shape \(1, 4, 4\)"),
        (fv.TofuCodec(shrink=3), image_task, r"channels None and shrink 3 do not suit images of shape \(1, 4, 4\)"),
    ],
)
def test_a_task_that_a_codec_cannot_serve_is_refused_with_a_sentence(codec, task, sentence):
    for method in (fv.FedAvg(up=codec), fv.FedAvg(down=codec)):
        with pytest.raises(ValueError, match=sentence):
            fv.run(task(), method, rounds=1, cohort=2)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"points": 0}, "tofu needs points, steps and shrink of at least 1"),
        ({"lr": 0.0}, "and lr > 0"),
        ({"precision": "int4"}, "tofu.precision is 'int4'; use float32, float16, uint8"),
        ({"decay": "never"}, "tofu.decay is 'never'; use steps or late"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_sentence(setting, sentence):
    with pytest.raises(ValueError, match=sentence):
        fv.TofuCodec(**setting)


# ---------------------------------------------------------------------------------------------------- how near it comes


def test_the_paper_lowers_its_rate_at_three_five_and_seven_eighths():
    rates = fv.TofuCodec(steps=1000)._rates()
    changes = [i for i in range(1, 1000) if rates[i] != rates[i - 1]]
    assert changes == [375, 625, 875]
    torch.testing.assert_close(rates[[0, 375, 625, 875]], torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_late_decay_holds_the_rate_for_three_quarters():
    rates = fv.TofuCodec(steps=100, decay="late")._rates()
    assert (rates[:76] == 1).all()
    torch.testing.assert_close(rates[[76, 90, 99]], torch.tensor([0.96, 0.4, 0.04]))


def test_the_update_of_two_epochs_on_the_digits_comes_back_with_a_cosine_of_nine_tenths():
    codec, updates = fv.TofuCodec(points=64, steps=150), updated(digits())
    late = fv.TofuCodec(points=64, steps=150, decay="late")
    w, found = digits().initial.expand(2, -1), {}
    for each in (codec, late):
        decoded = each.decode(digits(), w, encoded(each, digits(), updates))
        found[each.decay] = cosine(decoded, updates)
    assert (found["steps"] >= 0.9).all()
    assert (found["late"] > found["steps"]).all()


def test_a_client_that_has_not_moved_sends_an_update_of_zeros():
    task, codec = image_task(), fv.TofuCodec(points=3, steps=5)
    payloads = encoded(codec, task, torch.zeros(2, task.layout.size))
    assert not codec.decode(task, task.initial.expand(2, -1), payloads).any()


def test_after_the_first_switch_the_update_is_as_long_as_its_proxies_are_true():
    """switch₁: the step is scaled by the cosine that was reached."""
    task = linear_task()
    true = torch.linspace(-1, 1, task.layout.size)[None]
    w, seeds = task.initial[None], [fv.Seed.root(0)]
    lengths = {}
    for round_ in (3, 4):
        stack = fv.ClientStack(task, (0,), round_, fv.Seed.root(0), fv.Seed.root(0), [None], [{}])
        codec = fv.TofuCodec(points=1, steps=5, cautious_after=3)
        (decoded,) = codec.decode(task, w, codec.encode(task, w, true, seeds, stack))
        lengths[round_] = float(torch.linalg.vector_norm(decoded))
        reached = float(torch.nn.functional.cosine_similarity(decoded, true[0], dim=0))
    assert lengths[4] < lengths[3]
    assert 0 < lengths[4] / lengths[3] < 1
    assert reached > 0


def test_the_first_switch_scales_by_the_cosine_before_layers_are_rescaled():
    """U_syn (1 − R_loss), section 3.4, by hand: points that do not move keep the cosine that they start with."""
    task = linear_task()
    weight, bias, true = task.initial[:6].view(2, 3), task.initial[6:], torch.linspace(1, -1, 8)
    sent = {}
    for round_ in (3, 4):
        stack = fv.ClientStack(task, (0,), round_, fv.Seed.root(0), fv.Seed.root(0), [None], [{}])
        codec = fv.TofuCodec(points=2, steps=1, lr=1e-7, cautious_after=3)
        (sent[round_],) = codec.encode(task, task.initial[None], true[None], [fv.Seed.root(13)], stack)
    x, y, alphas = sent[3].images, sent[3].labels, sent[3].alphas
    error = alphas[:, None] * ((x @ weight.T + bias).softmax(1) - y)  # α (p - y)
    along = -torch.cat([(error.T @ x).flatten(), error.sum(0)])
    cosine = float(along @ true / (along.norm() * true.norm()))
    assert 0.05 < cosine < 0.95
    torch.testing.assert_close(sent[3].scales, torch.stack([true[:6].norm(), true[6:].norm()]))
    torch.testing.assert_close(sent[4].scales, cosine * sent[3].scales, rtol=1e-4, atol=0)
