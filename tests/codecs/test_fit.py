"""The fit that TOFU and FedSynth share: Adam over a stack, frozen seeds, and numbers in fewer bits."""

import pytest
import torch

import fedveil as fv
from codec_tools import image_task, stack_of, trained
from fedveil.codecs.fit import PRECISIONS, Rounding, Variable, adam, check_points, cosine, derivatives, normal, simplex
from fedveil.core.message import Refused
from fedveil.gpu.context import using

SEEDS = [fv.Seed.root(k) for k in range(3)]
CODECS = {
    "tofu": fv.TofuCodec(points=4, steps=20),
    "tofu, 8 bits": fv.TofuCodec(points=4, steps=20, precision="uint8"),
    "fedsynth": fv.FedSynthCodec(batches=2, batch=3, epochs=2, fits=10),
    "fedsynth, restarts": fv.FedSynthCodec(batches=2, batch=3, epochs=1, fits=10, restarts=2, objective="kl"),
}


def quadratic(k: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Client k's loss: each another one, client 2's so flat that Adam's ε counts."""
    scale = (1.0, 30.0, 1e-7)[k]
    return scale * ((a - k).square().sum() + (a.sum() * b - 1).square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_is_that_of_pytorch_for_every_client_of_a_stack(dtype):
    start = [normal(SEEDS, name, (4,), torch.device("cpu")).to(dtype) for name in "ab"]
    rates = torch.tensor([1.0, 1.0, 0.5, 0.1, 2.0, 1.0, 0.0, 1.0])
    a, b = (t.clone() for t in start)
    derive = derivatives(lambda a, b: (torch.stack([quadratic(k, a[k], b[k]) for k in range(3)]),), 0)
    last = adam(lambda: derive(a, b), [Variable(a, 0.1), Variable(b, 0.03)], rates)
    for k in range(3):
        theirs = [t[k].clone().requires_grad_() for t in start]
        optimizer = torch.optim.Adam([{"params": [theirs[0]], "lr": 0.1}, {"params": [theirs[1]], "lr": 0.03}])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: float(rates[min(i, 7)]))
        for _ in rates:
            optimizer.zero_grad()
            loss = quadratic(k, *theirs)
            loss.backward()
            optimizer.step()
            schedule.step()
        torch.testing.assert_close(a[k], theirs[0].detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(b[k], theirs[1].detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(last[k], loss.detach())


def test_adam_projects_after_each_step_and_watches_before_it():
    value, seen = torch.tensor([[3.0]]), []
    variables = [Variable(value, 1.0)]
    adam(
        lambda: (value.square().sum(1), 2 * value),
        variables,
        torch.ones(4),
        project=lambda: value.clamp_(min=1.5),
        watch=lambda: seen.append(float(value)),
    )
    assert seen[0] == 3.0
    assert seen[1] == pytest.approx(2.0)
    assert seen[2:] == [1.5, 1.5]


@pytest.fixture(scope="module")
def small():
    """Three clients of a small smooth task and their updates."""
    task = image_task()
    stack = stack_of(task, 0, 1, 2)
    return task, stack, trained(stack, fv.LocalTraining(lr=0.3, epochs=2, batch=5))


def encoded(codec, task, stack, updates):
    """The fitted numbers of each client and what they decode to."""
    w = task.initial.expand(len(stack), -1)
    payloads = codec.encode(task, w, updates, stack.seeds("encoding"), stack)
    return [p.images for p in payloads], torch.cat([codec.decode(task, w[:1], [p]) for p in payloads])


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_the_same_seeds_give_the_same_fit_and_others_another(small, codec):
    task, stack, updates = small
    images, decoded = encoded(codec, task, stack, updates)
    again, same = encoded(codec, task, stack, updates)
    assert all(torch.equal(a, b) for a, b in zip(images, again, strict=True))
    assert torch.equal(decoded, same)
    elsewhere, _ = encoded(codec, task, stack_of(task, 0, 1, 2, round_=2), updates)
    assert not any(torch.equal(a, b) for a, b in zip(images, elsewhere, strict=True))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_stack_of_three_fits_what_three_stacks_of_one_fit(small, codec):
    task, stack, updates = small
    images, decoded = encoded(codec, task, stack, updates)
    for k in range(3):
        (alone,), update = encoded(codec, task, stack_of(task, k), updates[k : k + 1])
        tolerance = 1 if codec.precision == "uint8" else 1e-5  # of 256 levels
        torch.testing.assert_close(alone, images[k], atol=tolerance, rtol=1e-5)
        torch.testing.assert_close(update[0], decoded[k], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- fewer bits


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_in_fewer_bits_come_back_within_half_a_step(precision):
    x = normal(SEEDS, "x", (50,), torch.device("cpu")) * torch.tensor([[1.0], [10.0], [0.1]])
    rounding = Rounding.of(x, precision)
    sent = rounding.shrink(x)
    assert sent.dtype == PRECISIONS[precision]
    span = (x.amax(1) - x.amin(1))[:, None]
    bound = {"float32": 0 * span, "float16": 2.0**-11 * x.abs(), "uint8": span / 255 / 2 * (1 + 1e-4)}[precision]
    assert ((rounding.expand(sent) - x).abs() <= bound).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_fit_sees_the_rounded_numbers_and_the_gradient_of_the_exact_ones(precision):
    x = normal(SEEDS, "x", (50,), torch.device("cpu")).requires_grad_()
    rounding = Rounding.of(x, precision)
    shown = rounding(x)
    torch.testing.assert_close(shown, rounding.expand(rounding.shrink(x.detach())), atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(shown.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * shown.detach())


def test_a_constant_image_survives_eight_bits():
    x = torch.full((2, 5), 0.7)
    rounding = Rounding.of(x, "uint8")
    torch.testing.assert_close(rounding.expand(rounding.shrink(x)), x)


def test_any_row_becomes_a_probability_vector():
    rows = torch.tensor([[0.2, 0.3, 0.5], [2.0, -1.0, 2.0], [-1.0, -2.0, -3.0], [0.0, 0.0, 0.0], [1e-20, 0.0, 0.0]])
    third = [1 / 3] * 3
    wanted = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.0, 0.5], third, third, third])
    torch.testing.assert_close(simplex(rows), wanted)


def test_points_are_refused_by_name_unless_their_labels_are_probabilities_and_their_range_is_one():
    floats, bytes_ = torch.tensor([[0.25, 0.75]]), torch.tensor([[1, 0]], dtype=torch.uint8)
    check_points(floats, -1.0, 1.0)
    check_points(floats.half(), 0.5, 0.5)
    check_points(bytes_, -1e3, 1e3)
    for labels, low, high in [
        (floats + 0.002, -1.0, 1.0),
        (floats * 0, -1.0, 1.0),
        (torch.cat([bytes_, bytes_ * 0]), -1.0, 1.0),
        (bytes_, 1.0, -1.0),
        (bytes_, -1e30, 1.0),
        (floats, 0.0, 1001.0),
    ]:
        with pytest.raises(Refused, match="out of range: "):
            check_points(labels, low, high)


def test_cosine_of_rows():
    a, b = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0], [3.0, 4.0], [1.0, 1.0]])
    torch.testing.assert_close(cosine(a, b), torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("name", ["tofu", "tofu, 8 bits"])
def test_a_fit_whose_steps_are_compiled_is_the_same(small, monkeypatch, name):
    """Traced, to be compiled for a GPU. One program serves later fits, with other weights and updates."""
    programs = []
    monkeypatch.setattr(torch, "compile", lambda operations, dynamic: programs.append(operations) or operations)
    task, stack, updates = small
    with using(compile=True):
        encoded(CODECS[name], task, stack, -updates)
        images, decoded = encoded(CODECS[name], task, stack, updates)
    assert len(programs) == 1
    plain_images, plain = encoded(CODECS[name], task, stack, updates)
    torch.testing.assert_close(decoded, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(images, plain_images, atol=1 if name == "tofu, 8 bits" else 1e-4, rtol=0)
