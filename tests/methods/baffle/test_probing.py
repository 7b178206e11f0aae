"""Slopes and estimated gradients: what they converge to, what they hold, and that nothing is differentiated."""

import contextlib
import dataclasses

import pytest
import torch

import fedveil as fv
from fedveil import models
from fedveil.core.directions import LAWS, Directions
from fedveil.data import from_tensors
from fedveil.gpu.context import using
from fedveil.gpu.products import product
from fedveil.links.down import Train
from fedveil.methods.baffle import baffle
from fedveil.methods.baffle.baffle import Probe
from fedveil.methods.baffle.memory import peak
from fedveil.methods.baffle.probing import Prober, forward_only
from methods.baffle.probes import gradients, linear_task, stack

CPU = torch.device("cpu")


def prober(task, law="gaussian", count=8, sigma=1e-3, scheme="central", **more):
    return Prober(task, Directions.of(law, task.layout.size, count), sigma, scheme, **more)


def batch(task):
    """All records of each client and their mask."""
    index, mask = (torch.from_numpy(a) for a in task.rows(range(len(task.clients))).padded())
    return task.x[index], task.y[index], mask


@pytest.mark.parametrize("scheme", ["forward", "central"])
def test_a_slope_is_the_gradients_product_with_its_direction(scheme):
    task = linear_task(uneven=True)
    x, y, mask = batch(task)
    keys = torch.tensor([3, -4, 5, 6])
    share = (mask / mask.sum(1, keepdim=True))[..., None]
    made = prober(task, scheme=scheme)
    slopes = made.slopes(task.initial.expand(4, -1), keys, x, y, share, 8)[:, 0]
    z = made.directions.rows(torch, keys, 0, 8)
    exact = (z @ gradients(task, task.initial)[..., None])[..., 0]
    assert torch.allclose(slopes, exact, atol={"forward": 5e-3, "central": 2e-5}[scheme])


@pytest.mark.parametrize("scheme", ["forward", "central"])
@pytest.mark.parametrize("law", LAWS)
def test_the_mean_of_estimates_is_the_gradient(law, scheme):
    """Within four standard errors in each of 8 entries; forward differences of σ = 1e-4 are biased by less."""
    task, draws = linear_task(clients=1), 500
    x, y, mask = (part.expand(draws, *part.shape[1:]) for part in batch(task))
    made = prober(task, law, sigma=1e-4 if scheme == "forward" else 1e-3, scheme=scheme)
    found = made.gradient(task.initial.expand(draws, -1), torch.arange(draws) * 977, x, y, mask, 4)
    error = found.mean(0) - gradients(task, task.initial)[0]
    assert (error.abs() < 4 * found.std(0) / draws**0.5 + 1e-3).all()
    assert found.std(0).min() > 0.01  # or there was nothing to average


def test_as_many_orthogonal_directions_as_dimensions_give_the_gradient_itself():
    task = linear_task()
    x, y, mask = batch(task)
    made = prober(task, "orthogonal")
    assert made.directions.block == task.layout.size == 8
    found = made.gradient(task.initial.expand(4, -1), torch.tensor([1, 2, 3, 4]), x, y, mask, 8)
    assert torch.allclose(found, gradients(task, task.initial), atol=1e-5)


def test_the_cosine_to_the_gradient_is_about_the_root_of_k_by_n():
    """√(K / (K + n + 1)) for Gaussians, √(K / n) for orthogonal directions."""
    draw = fv.Seed.root(1).torch()
    x, y = torch.randn(64, 30, generator=draw), torch.randint(0, 10, (64,), generator=draw)
    data = from_tensors(x, y, x, y, classes=10)
    task = fv.Task(torch.nn.Linear(30, 10), data, fv.split("iid", data, 1, fv.Seed.root(0)))
    many = [part.expand(60, *part.shape[1:]) for part in batch(task)]
    for law, expected in (("gaussian", (32 / (32 + 310 + 1)) ** 0.5), ("orthogonal", (32 / 310) ** 0.5)):
        found = prober(task, law, 32).gradient(task.initial.expand(60, -1), torch.arange(60), *many, 32)
        cosine = torch.nn.functional.cosine_similarity(found, gradients(task, task.initial)).mean()
        assert float(cosine) == pytest.approx(expected, rel=0.06)


def test_the_servers_combination_is_the_sum_and_layers_that_are_left_out_stay():
    task = linear_task()
    places = torch.tensor([6, 7])
    made = Prober(task, Directions.of("gaussian", 2, 8), 1e-3, "forward", places)
    own = [torch.tensor([1.0, -2.0, 0.5]), torch.tensor([3.0])]
    z = made.directions.rows(torch, torch.tensor([9, -9]), 0, 3)
    expected = own[0] @ z[0] + own[1] @ z[1, :1]
    found = made.combine([9, -9], own)
    assert torch.allclose(found[6:], expected)
    assert not found[:6].any()
    chunked = Prober(task, made.directions, 1e-3, "forward", places, memory=1).combine([9, -9], own)
    assert torch.allclose(chunked, found, atol=1e-6)


def test_slopes_do_not_depend_on_how_many_run_at_once():
    task = linear_task(uneven=True)
    x, y, mask = batch(task)
    share = (mask / mask.sum(1, keepdim=True))[..., None]
    arguments = task.initial.expand(4, -1), torch.tensor([1, 2, 3, 4]), x, y, share, 8
    one, all_ = prober(task, memory=1), prober(task, memory=1 << 30)
    assert one.chunk(4, x.shape[1]) == (1, 1)
    assert all_.chunk(4, x.shape[1])[0] > 8
    assert torch.allclose(one.slopes(*arguments), all_.slopes(*arguments), atol=1e-4)


@pytest.mark.parametrize("scheme", ["forward", "central"])
@pytest.mark.parametrize("places", [None, [6, 7]])
def test_slices_by_layer_give_the_same_slopes_and_gradients(scheme, places):
    task = linear_task(uneven=True)
    x, y, mask = batch(task)
    share = (mask / mask.sum(1, keepdim=True))[..., None]
    w, keys = task.initial + torch.arange(4.0)[:, None] / 10, torch.tensor([1, 2, 3, 4])
    size, where = (8, None) if places is None else (2, torch.tensor(places))
    whole = Prober(task, Directions.of("gaussian", size, 8), 1e-2, scheme, where)
    sliced = dataclasses.replace(whole, by_layer=True, memory=1)
    assert sliced.chunk(4, x.shape[1]) == (1, 1)
    assert torch.allclose(
        sliced.slopes(w, keys, x, y, share, 8), whole.slopes(w, keys, x, y, share, 8), rtol=1e-4, atol=1e-4
    )
    found, expected = (made.gradient(w, keys, x, y, mask, 8) for made in (sliced, whole))
    assert torch.allclose(found, expected, atol=1e-4)
    assert expected.abs().max() > 0.1


def test_slices_by_layer_give_a_deep_networks_slopes(wide):
    x, y, _ = batch(wide)
    how = {"directions": 3, "sigma": 1e-3}
    arguments = wide.initial[None], torch.tensor([7]), x[:, :8], y[:, :8], torch.full((1, 8, 1), 1 / 8), 3
    with forward_only(CPU):
        whole, sliced = (fv.Baffle(slices=s, **how).prober(wide).slopes(*arguments) for s in ("records", "layers"))
    assert torch.allclose(sliced, whole, rtol=1e-2, atol=1e-2)
    assert whole.abs().min() > 0.1


def test_a_model_whose_layers_use_each_others_weights_is_not_sliced_by_layer():
    class Borrows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.lent = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.own(x) @ self.lent.weight.T + self.lent.bias

    base = linear_task(clients=1)
    task = fv.Task(Borrows(), base.data, base.clients)
    fv.Baffle().init_state(task)
    with pytest.raises(ValueError, match=r"method.slices is 'layers', but a layer of this model .*; use records"):
        fv.Baffle(slices="layers").init_state(task)


def test_mean_losses_in_float32_are_compared_as_in_the_paper():
    """A slope is then a whole number of float32 steps of the loss by σ; losses in float64 are finer."""
    task = linear_task(clients=1)
    x, y, mask = batch(task)
    share = (mask / mask.sum(1, keepdim=True))[..., None]
    sigma, coarse = 2.0**-13, {}
    for losses in (torch.float32, torch.float64):
        made = prober(task, sigma=sigma, scheme="forward", losses=losses)
        coarse[losses] = made.slopes(task.initial[None], torch.tensor([1]), x, y, share, 8)[0, 0]
    z = made.directions.rows(torch, torch.tensor([1]), 0, 8)[0]

    def loss(w):  # in float32 throughout
        logits = x[0] @ w[:6].view(2, 3).T + w[6:]
        return torch.nn.functional.cross_entropy(logits, y[0])

    by_hand = torch.stack([loss(task.initial + sigma * v) - loss(task.initial) for v in z]) / sigma
    step = 2.0**-24 / sigma  # of a loss from 0.5 to 1
    assert 0.5 < loss(task.initial) < 1
    assert torch.equal(coarse[torch.float32] / step, (coarse[torch.float32] / step).round())
    assert not torch.equal(coarse[torch.float64] / step, (coarse[torch.float64] / step).round())
    assert (coarse[torch.float32] - by_hand).abs().max() < 4.1 * step
    assert torch.allclose(coarse[torch.float32], coarse[torch.float64], atol=6 * step)


def test_a_model_that_cannot_be_stacked_is_probed_one_direction_at_a_time():
    class Looks(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + (0.0 if self.weight.sum().item() > 1e9 else 1.0)

    base = linear_task(clients=1)
    with pytest.warns(UserWarning, match="cannot be stacked"):
        task = fv.Task(Looks(3, 2), base.data, base.clients)
    made = prober(task)
    assert made.chunk(1, 24) == (1, 24)
    x, y, mask = batch(task)
    found = made.gradient(task.initial[None], torch.tensor([1]), x, y, mask, 400)
    assert float(torch.nn.functional.cosine_similarity(found, gradients(task, task.initial))) > 0.9


# ---------------------------------------------------------------------------------------------------- forward only


@pytest.fixture
def no_autograd(monkeypatch):
    """Whatever differentiates raises."""

    def caught(*_, **__):
        raise AssertionError("something was differentiated")

    monkeypatch.setattr(torch.autograd, "grad", caught)
    monkeypatch.setattr(torch.autograd, "backward", caught)
    monkeypatch.setattr(torch.Tensor, "backward", caught)
    monkeypatch.setattr(torch.Tensor, "requires_grad_", caught)
    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(caught))
    monkeypatch.setattr(torch.func, "grad", caught)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("level", "seeds"), [("batch", "shared"), ("batch", "own"), ("epoch", "own")])
def test_nothing_on_a_clients_path_is_differentiated(level, seeds, inference, no_autograd_after_task):
    task = no_autograd_after_task
    method = (fv.Baffle if level == "batch" else fv.BaffleEpochs)(seeds=seeds, directions=4, layers=["weight"])
    question = Probe(task.initial, 5, 4) if level == "batch" else Train(task.initial)
    with torch.inference_mode(inference):
        answers = method.handlers[type(question)](stack(task), question)
    assert len(answers) == 4
    made = [answer.slopes if level == "batch" else answer.update for answer in answers]
    assert not any(tensor.requires_grad for tensor in made)
    with pytest.raises(AssertionError, match="differentiated"):
        fv.LocalTraining().train(stack(task), task.initial)


@pytest.fixture
def no_autograd_after_task(request):
    task = linear_task()  # a task tries a gradient once, to see whether the model can be stacked
    request.getfixturevalue("no_autograd")
    return task


def test_products_on_a_gpu_are_plain_ones_where_nothing_is_differentiated(no_autograd):
    w, x = torch.randn(3, 4, 5), torch.randn(5, 6)
    with torch.no_grad():
        found = torch.func.vmap(product, (0, None))(w, x)
    assert torch.allclose(found, w @ x, atol=1e-6)


def test_tensor_float_32_is_off_while_probing_and_then_as_it_was():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        with contextlib.suppress(KeyError), forward_only(torch.device("cuda")):
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.is_grad_enabled()
            raise KeyError
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def several(task, **more):
    """The same slopes, measured several times."""
    x, y, mask = batch(task)
    share = (mask / mask.sum(1, keepdim=True))[..., None]
    w, keys = task.initial.expand(len(x), -1), torch.arange(len(x), device=task.device)
    given = [t.to(task.device) for t in (x, y, share)]
    with forward_only(task.device):
        return [prober(task, **more).slopes(w, keys, *given, 8) for _ in range(6)]


def test_each_precision_of_probes_has_graphs_of_its_own():
    task = linear_task()
    for precision in (torch.float32, torch.float64):
        several(task, precision=precision)
    assert [key[1] for key in task.steppers] == [torch.float32, torch.float64]


def test_what_cannot_be_stacked_cannot_be_captured():
    task = linear_task()
    task.stackable = False
    several(task)
    assert not task.steppers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_replayed_probes_are_those_that_are_launched(precision):
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(32, 1, 28, 28, generator=draw), torch.randint(0, 10, (32,), generator=draw)
    data = from_tensors(x, y, x, y, classes=10)
    task = fv.Task(
        models.build("baffle-lenet", (1, 28, 28), 10), data, fv.split("iid", data, 2, fv.Seed.root(0)), device="cuda"
    )
    replayed = several(task, precision=precision, sigma=1e-3)
    task.steppers.clear()
    with using(capture=False):
        launched = several(task, precision=precision, sigma=1e-3)
    assert launched[0].abs().max() > 0
    for found in replayed + launched:
        assert torch.equal(found, launched[0])


# ---------------------------------------------------------------------------------------------------- memory


@pytest.fixture(scope="module")
def wide():
    """WRN-10-2 with a batch of 32."""
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(32, 1, 28, 28, generator=draw), torch.randint(0, 10, (32,), generator=draw)
    data = from_tensors(x, y, x[:2], y[:2])
    model = models.build("wrn-10-2", data.input, 10, activation="hardswish")
    return fv.Task(model, data, fv.split("iid", data, 1, fv.Seed.root(0)))


def held(method, task, count):
    """The most bytes a client holds while it answers."""
    return peak(lambda: method.probe(stack(task, (0,)), task.initial, Probe(task.initial, 1, count)))


def test_memory_does_not_grow_with_the_number_of_directions():
    data = fv.load("digits")
    task = fv.Task(models.build("digits-cnn", data.input, 10), data, fv.split("iid", data, 40, fv.Seed.root(0)))
    method = fv.Baffle(directions=500, memory=4)
    few, many = (held(method, task, count) for count in (50, 500))
    assert many < 1.1 * few


def test_slices_by_layer_hold_no_second_copy_of_the_weights(wide):
    size = 4 * wide.layout.size
    bytes_ = {s: held(fv.Baffle(memory=1, batch=4, slices=s), wide, 1) for s in ("records", "layers")}
    assert bytes_["records"] > 2 * size  # a direction and the weights that it is added to
    assert bytes_["layers"] < bytes_["records"] - size


def test_a_client_holds_a_tenth_of_what_backpropagation_does(wide):
    x, y, mask = batch(wide)
    derived = peak(lambda: wide.gradient(wide.initial[None], x, y, mask))
    assert held(fv.Baffle(memory=4), wide, 3) < 0.1 * derived


def test_peak_counts_what_is_alive_and_what_autograd_saves():
    def chain(grad):
        w = torch.ones(1000, requires_grad=grad)
        value = w
        for _ in range(10):
            value = value.exp()
        return value

    assert peak(lambda: chain(False)) < 3.1 * 4000
    assert peak(lambda: chain(True)) >= 10 * 4000


def test_baffle_says_what_its_work_is():
    assert baffle.Baffle(directions=7).passes(7) == 8
    assert baffle.Baffle(directions=7, scheme="central").passes(7) == 14


def test_half_precision_measures_the_same_slopes_at_a_larger_sigma():
    """And at the σ of float32 it does not: rounding is then most of what is measured."""
    draw = fv.Seed.root(1).torch()
    x, y = torch.randn(16, 1, 12, 12, generator=draw), torch.randint(0, 10, (16,), generator=draw)
    data = from_tensors(x, y, x, y)
    model = models.build("baffle-lenet", data.input, 10, activation="hardswish")
    task = fv.Task(model, data, fv.split("iid", data, 1, fv.Seed.root(0)))
    share = torch.full((1, 16, 1), 1 / 16)

    def slopes(sigma, precision):
        made = prober(task, count=48, sigma=sigma, scheme="forward", precision=precision)
        with forward_only(CPU):
            return made.slopes(task.initial[None], torch.tensor([1]), x[None], y[None], share, 48)[0, 0]

    exact = slopes(1e-4, torch.float32)
    agreement = {s: float(torch.corrcoef(torch.stack([exact, slopes(s, torch.float16)]))[0, 1]) for s in (1e-3, 1e-5)}
    assert agreement[1e-3] > 0.99
    assert agreement[1e-5] < 0.9


def test_in_half_precision_linear_layers_still_work_in_single():
    seen = []

    class Seen(torch.nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append((x.dtype, out.dtype))
            return out

    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    data = from_tensors(x, y, x, y, classes=2)
    task = fv.Task(Seen(3, 2), data, fv.split("iid", data, 1, fv.Seed.root(0)))
    seen.clear()
    made = prober(task, count=2, precision=torch.float16)
    with forward_only(CPU):
        made.slopes(task.initial[None], torch.tensor([1]), x[None], y[None], torch.full((1, 4, 1), 0.25), 2)
    assert set(seen) == {(torch.float16, torch.float32)}
