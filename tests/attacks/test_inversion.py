"""Gradient matching finds one record of an untrained smooth network, and nothing in a vector that is no gradient."""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.attacks.inversion import DLG, Inversion, Target, as_gradient, gradient, invert, signed_adam, variation
from fedveil.attacks.lbfgs import Lbfgs
from fedveil.attacks.scores import Pool, score
from inversion_tools import DATA, SEED, blind, gradients, task, victims

POOL = Pool.of(DATA, SEED)
SHORT = replace(DLG, steps=150, restarts=2, screen=30)
COSINE = Inversion(steps=300, tv=1e-4)


def smooth(act: type[nn.Module] = nn.Sigmoid) -> fv.Task:
    """A convolution and a linear layer with the activation and the weights of the networks of the DLG paper."""
    net = task(nn.Conv2d(1, 8, 3, padding=1), act(), nn.Flatten(), nn.Linear(512, 10))
    net.initial = torch.rand(net.layout.size, generator=SEED.torch()) - 0.5
    return net


def seen(net: fv.Task, many: int, n: int = 1, labels: bool = True) -> tuple[Target, torch.Tensor, torch.Tensor]:
    x, y = victims(net, many, n)
    return Target(*gradients(net, x, y), "gradient", n, y if labels else None), x, y


@pytest.mark.parametrize("labels", [True, False], ids=["given", "fitted"])
def test_dlg_is_exact(labels):
    target, x, y = seen(smooth(), 5, labels=labels)
    found = invert(smooth(), target, SHORT, SEED)
    scores = score(found.x, x, POOL, found.y, y)
    assert scores.exact.sum() >= 4
    assert torch.equal(found.y, y)
    assert found.finished
    assert scores.identified[scores.exact].all()


def test_cosine_is_near_and_keeps_pixels_in_their_range():
    target, x, _ = seen(smooth(), 4)
    found = invert(smooth(), target, COSINE, SEED)
    assert float(score(found.x, x, POOL).psnr.mean()) > 25
    pixels = found.x * 0.376 + 0.305
    assert float(pixels.min()) > -1e-5
    assert float(pixels.max()) < 1 + 1e-5


def test_cosine_finds_a_batch():
    target, x, y = seen(smooth(), 2, 2)
    found = invert(smooth(), target, replace(COSINE, restarts=2), SEED)
    scores = score(found.x, x, POOL, found.y, y)
    assert scores.identified.all()
    assert scores.labels.tolist() == [1, 1]


@pytest.mark.parametrize("how", [SHORT, COSINE], ids=["dlg", "cosine"])
def test_a_random_vector_finds_nothing(how):
    target, x, _ = seen(smooth(), 4)
    size = torch.linalg.vector_norm(target.vector, dim=1, keepdim=True)
    noise = torch.randn(target.vector.shape, generator=SEED.torch())
    wrong = replace(target, vector=noise * size / math.sqrt(noise.shape[1]))
    found = score(invert(smooth(), wrong, how, SEED).x, x, POOL)
    assert not found.exact.any()
    assert float(found.psnr.mean()) < float(score(POOL.baselines(x, SEED)["mean"], x, POOL).psnr.mean())


def test_the_restart_of_lowest_loss_is_kept_and_victims_do_not_matter_to_each_other():
    target, _, _ = seen(smooth(), 3)
    how = replace(SHORT, steps=20, restarts=3, screen=0)
    found = invert(smooth(), target, how, SEED)
    fewer = invert(smooth(), target, replace(how, restarts=1), SEED)
    assert (found.loss <= fewer.loss * 1.01).all()
    first = replace(target, weights=target.weights[:1], vector=target.vector[:1], labels=target.labels[:1])
    alone = invert(smooth(), first, replace(how, steps=5), SEED)
    torch.testing.assert_close(alone.x, invert(smooth(), target, replace(how, steps=5), SEED).x[:1], atol=1e-3, rtol=0)


def test_records_of_the_task_are_not_looked_at():
    target, _, _ = seen(smooth(), 2, labels=False)
    for how in (replace(SHORT, steps=20), replace(COSINE, steps=20)):
        truly, blindly = (invert(net, target, how, SEED) for net in (smooth(), blind(smooth())))
        assert torch.equal(truly.x, blindly.x)
        assert torch.equal(truly.y, blindly.y)


def test_a_deadline_ends_it_and_progress_is_told():
    target, _, _ = seen(smooth(), 2)
    told: list[str] = []
    found = invert(smooth(), target, COSINE, SEED, tell=told.append, deadline=time.monotonic())
    assert not found.finished
    assert found.x.shape == (2, 1, 1, 8, 8)
    assert told == []
    invert(smooth(), target, replace(COSINE, steps=50), SEED, tell=told.append)
    assert [line.split("  median")[0] for line in told] == [f"cosine inversion  step {k}/50" for k in (20, 40, 50)]


def test_an_update_is_read_as_a_gradient():
    target, x, _ = seen(smooth(), 2)
    local = fv.LocalTraining(lr=0.01, epochs=3, batch=4)
    update = replace(target, vector=-0.03 * target.vector, means="update", local=local)
    torch.testing.assert_close(as_gradient(update), target.vector)
    assert float(score(invert(smooth(), update, COSINE, SEED).x, x, POOL).psnr.mean()) > 25


def test_total_variation_is_that_of_neighbours():
    x = torch.zeros(2, 1, 1, 2, 3)
    x[1, ..., 0, 0] = 1
    assert variation(x).tolist() == pytest.approx([0, 1 / 4 + 1 / 3])


def test_the_gradient_can_be_differentiated_by_records_and_labels():
    net, (x, _) = smooth(), victims(smooth(), 2, 1)
    soft = torch.full((2, 1, 10), 0.1, requires_grad=True)
    given = x.clone().requires_grad_()
    slopes = torch.autograd.grad(gradient(net, net.initial.expand(2, -1), given, soft).square().sum(), [given, soft])
    assert all(float(slope.abs().max()) > 0 for slope in slopes)


def test_adam_follows_signs_and_its_rate_falls_three_times():
    point, moves = torch.zeros(1, 2), []
    step = signed_adam(point, lambda: (torch.zeros(1), torch.tensor([[1e-6, -50.0]])), Inversion(steps=8), lambda: None)
    for _ in range(8):
        before = point.clone()
        step()
        moves.append((point - before)[0])
    rates = torch.tensor([0.1] * 3 + [0.01] * 2 + [0.001] * 2 + [0.0001])
    torch.testing.assert_close(torch.stack(moves), rates[:, None] * torch.tensor([-1.0, 1.0]), atol=1e-6, rtol=1e-2)


def test_lbfgs_takes_the_steps_of_pytorch():
    scale = torch.logspace(0, 2, 6, dtype=torch.float64)
    start = torch.randn(1, 6, generator=SEED.torch()).double()
    point, best, theirs = start.clone(), start.clone(), start.clone().requires_grad_()
    step = Lbfgs(point, best, lambda: ((point.square() @ scale) / 2, point * scale), 1.0)
    other = torch.optim.LBFGS([theirs], lr=1, max_iter=8, max_eval=100, history_size=100, tolerance_change=0)

    def closure() -> torch.Tensor:
        other.zero_grad()
        loss = (theirs.square() @ scale).sum() / 2
        loss.backward()
        return loss

    other.step(closure)
    for _ in range(8):
        step()
    torch.testing.assert_close(point, theirs.detach())


def test_lbfgs_goes_on_from_the_best_point_where_a_loss_is_no_number():
    point, best = torch.tensor([[3.0], [3.0]]), torch.tensor([[1.0], [3.0]])
    losses = torch.tensor([math.nan, 1.0])
    Lbfgs(point, best, lambda: (losses, torch.ones(2, 1)), 0.5)()
    assert point.tolist() == [[1.0], [2.5]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"means": "weights"}, "means 'weights'; use gradient or update"),
        ({"means": "update"}, "needs the local training that made it"),
        ({"vector": torch.zeros(1, 3)}, r"its vector \[1, 3\]; both are"),
        ({"labels": torch.zeros(1, 2)}, r"labels are \[1, 2\], not \[1, 1\]"),
    ],
)
def test_a_target_that_does_not_fit_is_one_sentence(changes, sentence):
    target, _, _ = seen(smooth(), 1)
    with pytest.raises(ValueError, match=sentence):
        replace(target, **changes)


class Once(torch.autograd.Function):
    """The sigmoid, which can be differentiated once only."""

    @staticmethod
    def forward(x):
        return x.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, slope):
        if torch.is_grad_enabled():
            raise RuntimeError("no derivative of the derivative")
        return slope * ctx.saved_tensors[0] * (1 - ctx.saved_tensors[0])


class Layer(nn.Module):
    def forward(self, x):
        return Once.apply(x)


def test_a_model_that_cannot_be_differentiated_twice_is_one_sentence():
    with pytest.warns(UserWarning, match="cannot be stacked"):
        net = task(nn.Flatten(), nn.Linear(64, 10), Layer())
    with pytest.raises(
        ValueError, match=r"differentiates the model twice, and that fails here \(no derivative of the derivative\)\."
    ):
        invert(net, seen(net, 1)[0], COSINE, SEED)


def test_settings_that_cannot_be_are_one_sentence():
    with pytest.raises(ValueError, match="kind is 'adam'; use dlg or cosine"):
        Inversion("adam")
    with pytest.raises(ValueError, match="steps and restarts of at least 1"):
        Inversion(restarts=0)
