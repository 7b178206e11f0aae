"""FedSynth: its arithmetic by hand, its gradients by differences, and what each setting is for."""

import pytest
import torch
from torch import nn

import fedveil as fv
from codec_tools import body, check_instead_of_fitting, digits, image_task, stack_of, through_the_wire, trained
from fedveil.codecs import fedsynth
from fedveil.codecs.factored import large
from fedveil.codecs.fedsynth import Synthetic
from fedveil.codecs.fit import PRECISIONS, cosine, normal
from fedveil.core.forecast import Turn
from fedveil.data import from_tensors
from toys import linear_task

SEEDS = [fv.Seed.root(k) for k in range(2)]
SMALL = {"batches": 2, "batch": 4, "epochs": 2, "fits": 40}


@pytest.fixture(scope="module")
def small():
    """Two clients of a small smooth task and their updates."""
    task = image_task()
    return task, trained(stack_of(task, 0, 1), fv.LocalTraining(lr=0.3, epochs=2, batch=5))


def encoded(codec: fv.FedSynthCodec, task: fv.Task, updates: torch.Tensor) -> list[Synthetic]:
    clients = range(len(updates))
    w, stack = task.initial.expand(len(updates), -1), stack_of(task, *clients)
    payloads = codec.encode(task, w, updates, stack.seeds("encoding"), stack)
    return [through_the_wire(codec, task, p) for p in payloads]


def decoded(codec: fv.FedSynthCodec, task: fv.Task, payloads: list[Synthetic]) -> torch.Tensor:
    return codec.decode(task, task.initial.expand(len(payloads), -1), payloads)


def own_loss(task: fv.Task, client: int, update: torch.Tensor) -> float:
    """The mean loss over a client's own records once it is updated."""
    rows = task.clients[client]
    return float(task.losses(task.initial + update, task.x[rows], task.y[rows]).mean())


class Spy:
    """Stands in for Adam: fits as usual and notes the losses and the variables of every step."""

    def __init__(self, monkeypatch) -> None:
        self.real, self.losses, self.seen = fedsynth.adam, [], []
        monkeypatch.setattr(fedsynth, "adam", self)

    def __call__(self, derive, variables, rates, project, watch):
        def noted_losses():
            found = derive()
            self.losses.append(found[0])
            return found

        def noted_watch():
            self.seen.append([v.value.detach().clone() for v in variables])
            watch()

        return self.real(noted_losses, variables, rates, project, noted_watch)


# ---------------------------------------------------------------------------------------------------- the arithmetic


def gradient(w, x, y):
    """Of the mean soft cross-entropy of a linear model of 3 features and 2 classes: (p - y) xᵀ, by hand."""
    error = (x @ w[:6].view(2, 3).T + w[6:]).softmax(1) - y
    return torch.cat([(error.T @ x / len(x)).flatten(), error.mean(0)])


def test_one_step_by_hand():
    task = linear_task()
    x, y = torch.tensor([[1.0, -2.0, 0.5], [0.0, 1.0, 3.0]]), torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    payload = Synthetic(x[None], y[None], torch.tensor([0.02]), torch.tensor([1.5]), -2.0, 3.0)
    g = gradient(task.initial, x, y)
    codec = fv.FedSynthCodec(batches=1, batch=2, epochs=1)
    torch.testing.assert_close(decoded(codec, task, [payload])[0], -1.5 * g / g.norm())


def test_two_batches_used_twice_by_hand():
    task = linear_task()
    x = normal(SEEDS, "x", (2, 3), torch.device("cpu"))
    y = normal(SEEDS, "y", (2, 2), torch.device("cpu")).softmax(2)
    steps = torch.tensor([0.3, -0.1, 0.2, 0.4])
    w, total = task.initial, torch.zeros(8)
    for m in range(4):
        g = gradient(w, x[m % 2], y[m % 2])
        total = total + steps[m] * g / g.norm()
        w = task.initial - total
    payload = Synthetic(x, y, steps, torch.tensor([0.7]), -3.0, 3.0)
    codec = fv.FedSynthCodec(batches=2, batch=2, epochs=2)
    torch.testing.assert_close(decoded(codec, task, [payload])[0], -0.7 * total / total.norm())


@pytest.mark.parametrize(("batches", "epochs"), [(1, 3), (2, 2)])
def test_the_unrolled_steps_differentiate_as_finite_differences_do(batches, epochs):
    task, codec = image_task((1, 2, 2), hidden=3), fv.FedSynthCodec(batches=batches, batch=2, epochs=epochs)
    cpu, w = torch.device("cpu"), task.initial.expand(2, -1).double()
    images = normal(SEEDS, "x", (batches, 2, 1, 2, 2), cpu).double().requires_grad_()
    labels = normal(SEEDS, "y", (batches, 2, 3), cpu).double().softmax(-1).detach().requires_grad_()
    steps = (0.1 + 0.05 * normal(SEEDS, "eta", (batches * epochs,), cpu).double()).requires_grad_()
    norm = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def induced(x, y, eta):
        return codec.induced(task, w, x, y, eta, norm, fit=True)

    assert torch.autograd.gradcheck(induced, (images, labels, steps))
    torch.testing.assert_close(
        induced(images, labels, steps).detach(),
        codec.induced(task, w, images.detach(), labels.detach(), steps.detach(), norm),
    )


@pytest.mark.parametrize("shared", [True, False])
def test_steps_with_factors_are_the_same_steps(shared):
    task, codec = image_task((1, 4, 4), hidden=40), fv.FedSynthCodec(batches=2, batch=2, epochs=2)
    cpu, w = torch.device("cpu"), task.initial.expand(2, -1).double()
    w = w if shared else w + 0.1 * normal(SEEDS, "w", (task.layout.size,), cpu)
    images = normal(SEEDS, "x", (2, 2, 1, 4, 4), cpu).double().requires_grad_()
    labels = normal(SEEDS, "y", (2, 2, 3), cpu).double().softmax(-1).detach().requires_grad_()
    steps = (0.1 + 0.05 * normal(SEEDS, "eta", (4,), cpu).double()).requires_grad_()
    names = large(task, rows=8)
    assert names
    ours, plain = (codec.induced(task, w, images, labels, steps, None, True, f) for f in (names, ()))
    torch.testing.assert_close(ours, plain)
    ahead = normal(SEEDS, "ahead", (task.layout.size,), cpu).double()
    by_ours, by_plain = (torch.autograd.grad(g, (images, labels, steps), ahead) for g in (ours, plain))
    torch.testing.assert_close(by_ours, by_plain)


def test_only_layers_that_are_larger_than_their_factors_have_some():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.once, self.twice, self.last = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 3)

        def forward(self, x):
            return self.last(self.twice(self.twice(self.once(x.flatten(1)))))

    x, y = torch.randn(6, 20), torch.arange(6) % 3
    data = from_tensors(x, y, x[:3], y[:3])
    task = fv.Task(Twice(), data, fv.split("iid", data, 2, fv.Seed.root(0)))
    assert large(task, rows=11) == ()
    assert large(task, rows=10) == ("once.weight",)
    assert large(task, rows=2) == ("once.weight", "last.weight")


@pytest.mark.parametrize("objective", ["l2", "kl", "data"])
@pytest.mark.parametrize("labels", ["project", "softmax"])
def test_the_gradient_of_each_objective_is_that_of_finite_differences(monkeypatch, objective, labels):
    task = image_task((1, 2, 2), hidden=3)
    task.x, stack = task.x.double(), stack_of(task, 0, 1)
    codec = fv.FedSynthCodec(batches=2, batch=2, epochs=2, step=0.1, objective=objective, labels=labels)
    w = task.initial.expand(2, -1).double()
    updates = 0.3 * normal(SEEDS, "update", (task.layout.size,), task.device).double()
    checked = check_instead_of_fitting(fedsynth, monkeypatch)
    codec.encode(task, w, updates, SEEDS, stack)
    assert checked == [2]


def test_kl_is_between_the_predictions_of_the_two_updated_nets_on_the_clients_own_records():
    task = linear_task(2, 24, uneven=True)
    codec, stack = fv.FedSynthCodec(objective="kl"), stack_of(task, 0, 1)
    w, theta, g = (normal(SEEDS, name, (8,), task.device) for name in ("w", "theta", "g"))
    found = codec._objective(task, w, theta, fedsynth._own_data(stack, 1))(g)
    for k, rows in enumerate(task.clients[k] for k in range(2)):
        p, q = (task.f(w[k] - step[k], task.x[rows]).softmax(1) for step in (theta, g))
        torch.testing.assert_close(found[k], (p * (p / q).log()).sum(1).mean())


# ---------------------------------------------------------------------------------------------------- the fit

MEASURES = {
    "l2": lambda task, k, true, got: float((true - got).square().sum()),
    "kl": lambda task, k, true, got: float(
        torch.nn.functional.kl_div(
            task.f(task.initial + got, task.x[task.clients[k]]).log_softmax(1),
            task.f(task.initial + true, task.x[task.clients[k]]).softmax(1),
            reduction="batchmean",
        )
    ),
    "data": lambda task, k, true, got: own_loss(task, k, got),
}


@pytest.mark.parametrize("objective", MEASURES)
def test_each_objective_reduces_what_it_minimises(small, objective):
    task, updates = small
    start, end = (
        decoded(codec, task, encoded(codec, task, updates))
        for codec in (fv.FedSynthCodec(**SMALL | {"fits": n}, objective=objective, best=False) for n in (1, 40))
    )
    for k in range(2):
        before, after = (MEASURES[objective](task, k, updates[k], got[k]) for got in (start, end))
        assert after < 0.7 * before


def test_the_data_objective_may_do_better_on_the_clients_data_than_its_own_update(small):
    task, updates = small
    codec = fv.FedSynthCodec(**SMALL, objective="data", lr_steps=0.1)
    got = decoded(codec, task, encoded(codec, task, torch.zeros_like(updates)))
    for k in range(2):
        assert own_loss(task, k, got[k]) < own_loss(task, k, updates[k])


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_without_a_local_update_the_fit_gives_the_norm_and_the_update_is_the_sum_of_its_steps(monkeypatch, precision):
    """H = ‖Σ η_m ĝ_m‖, so decoding is Σ η_m ĝ_m: two steps on a linear model by hand."""
    task, spy = linear_task(2, 24, uneven=True), Spy(monkeypatch)
    codec = fv.FedSynthCodec(
        batches=2, batch=2, epochs=1, fits=2, objective="data", best=False, precision=precision, lr=1.0, lr_steps=0.5
    )
    payloads = encoded(codec, task, torch.zeros(2, 8))
    for k, sent in enumerate(payloads):
        x, y = sent.images.float(), sent.labels.float()
        if precision == "uint8":
            x = sent.low + x * (sent.high - sent.low) / 255
        y = y / y.sum(-1, keepdim=True)
        first = sent.steps[0] * (g := gradient(task.initial, x[0], y[0])) / g.norm()
        total = first + sent.steps[1] * (g := gradient(task.initial - first, x[1], y[1])) / g.norm()
        torch.testing.assert_close(sent.norm[0], total.norm())
        torch.testing.assert_close(decoded(codec, task, payloads)[k], -total)
        assert own_loss(task, k, -total) == pytest.approx(float(torch.stack(spy.losses)[:, k].min()), rel=1e-5)
    assert (torch.stack(spy.losses).argmin(0) == 0).any()  # so the first of two sets is sent


def test_without_a_local_update_clients_do_not_train_and_passes_say_so(monkeypatch):
    """A fit runs M·n synthetic points and the client's records forward and backward."""
    task = linear_task(2, 24, uneven=True)
    codec = fv.FedSynthCodec(batches=3, batch=2, epochs=2, fits=4, objective="data")
    monkeypatch.setattr(fv.LocalTraining, "train", lambda *_: pytest.fail("a client trains"))
    method = fv.FedSynth(up=codec)
    rows = fv.run(task, method, rounds=2, cohort=2).ledger.rows
    wanted = sum(4 * (6 * 2 + int(n)) for n in task.clients.sizes)
    assert [row.passes for row in rows] == [wanted, wanted]
    turns = [Turn(k, int(n), 1, 2, 0) for k, n in enumerate(task.clients.sizes)]
    assert sum(method.forecast_compute(turn).passes for turn in turns) == wanted
    assert "cosine" not in rows[0].metrics
    assert rows[0].metrics["loss"] > rows[1].metrics["loss"]


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda up: fv.FedProx(up=up), "fedprox changes that training; use fedsynth, or set method.up's objective="),
        (lambda up: fv.FedSGD(up=fv.Zstd(up)), "fedsgd changes that training"),
        (lambda up: fv.Scaffold(up=up), "scaffold changes that training"),
        (lambda up: fv.QFedAvg(up=up), "q-fedavg changes that training"),
        (lambda up: fv.FedSynth(up=up, feedback=True), "no update for method.feedback or method.full_rounds"),
        (lambda up: fv.FedSynth(up=up, full_rounds=1), "no update for method.feedback or method.full_rounds"),
        (lambda up: fv.Tiers(up, fv.FedSynthCodec()), "one tier fits its data without local training"),
    ],
)
def test_what_needs_a_local_update_refuses_to_go_without(made, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(fv.FedSynthCodec(objective="data"))


def test_step_sizes_stay_within_what_the_server_accepts(small):
    task, updates = small
    payloads = encoded(fv.FedSynthCodec(**SMALL, lr_steps=5.0, best=False), task, updates)
    assert max(float(p.steps.abs().max()) for p in payloads) <= 10


def test_points_and_step_sizes_have_rates_of_their_own(small, monkeypatch):
    """Adam's first step is the rate, whatever the gradient (algorithm 2 with the paper's α = 0.2 for both)."""
    task, updates = small
    for lr_steps in (0.01, 0.2):
        spy = Spy(monkeypatch)
        encoded(fv.FedSynthCodec(**SMALL | {"fits": 2}, lr_steps=lr_steps), task, updates)
        images, _, steps = ((after - before).abs() for before, after in zip(*spy.seen, strict=True))
        torch.testing.assert_close(images.median(), torch.tensor(0.2), atol=1e-3, rtol=0)
        torch.testing.assert_close(steps, torch.full_like(steps, lr_steps), atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("labels", ["project", "softmax"])
def test_labels_stay_on_the_simplex(small, monkeypatch, labels):
    task, updates = small
    spy = Spy(monkeypatch)
    payloads = encoded(fv.FedSynthCodec(**SMALL, lr=1.0, labels=labels), task, updates)
    seen = [values[1] for values in spy.seen]
    shown = seen if labels == "project" else [logits.softmax(-1) for logits in seen]
    for soft in [*shown, *(p.labels for p in payloads)]:
        assert soft.min() >= 0
        torch.testing.assert_close(soft.sum(-1), torch.ones(soft.shape[:-1]))


def test_the_set_with_the_lowest_loss_on_the_clients_own_data_is_sent(small, monkeypatch):
    task, updates = small
    spy, codec = Spy(monkeypatch), fv.FedSynthCodec(**SMALL, lr=0.5)
    payloads = encoded(codec, task, updates)
    norm = updates.norm(dim=1)
    for k, payload in enumerate(payloads):
        rows = slice(k, k + 1)
        losses = []
        for values in spy.seen:
            step = codec.induced(task, task.initial[None], *(v[rows] for v in values), norm[rows])
            losses.append(own_loss(task, k, -step[0]))
        best = min(range(len(losses)), key=losses.__getitem__)
        torch.testing.assert_close(payload.images, spy.seen[best][0][k])
        torch.testing.assert_close(payload.labels, spy.seen[best][1][k])
        torch.testing.assert_close(payload.steps, spy.seen[best][2][k])
        assert losses[best] < losses[-1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_lowest_loss_of_the_fit_is_that_of_what_is_decoded(small, monkeypatch, precision):
    """So the rounding is within the fit."""
    task, updates = small
    spy, codec = Spy(monkeypatch), fv.FedSynthCodec(**SMALL, best=False, precision=precision)
    got = decoded(codec, task, encoded(codec, task, updates))
    torch.testing.assert_close((updates - got).square().sum(1), torch.stack(spy.losses).amin(0), atol=0, rtol=1e-3)


@pytest.mark.parametrize(("precision", "each"), [("float32", 4), ("float16", 2), ("uint8", 1)])
def test_points_cost_their_precision_and_step_sizes_and_the_norm_stay_in_floats(small, precision, each):
    for payload in encoded(fv.FedSynthCodec(**SMALL | {"fits": 1}, precision=precision), *small):
        assert payload.images.dtype == payload.labels.dtype == PRECISIONS[precision]
        assert body(payload) == each * 2 * 4 * (16 + 3) + 4 * (4 + 1)


def test_restarts_run_as_one_stack_and_the_best_is_at_least_as_good_as_the_first(small, monkeypatch):
    task, updates = small
    first, several = (fv.FedSynthCodec(**SMALL, restarts=n) for n in (1, 4))
    one = decoded(first, task, encoded(first, task, updates))
    spy, stack = Spy(monkeypatch), stack_of(task, 0, 1)
    payloads = several.encode(task, task.initial.expand(2, -1), updates, stack.seeds("encoding"), stack)
    assert len(spy.seen) == 40
    assert spy.seen[0][0].shape == (8, 2, 4, 1, 4, 4)
    assert stack.passes == 8 * 40 * 4 * 4
    got = decoded(several, task, payloads)
    gains = [own_loss(task, k, one[k]) - own_loss(task, k, got[k]) for k in range(2)]
    assert min(gains) > -1e-5
    assert max(gains) > 1e-4


def test_the_server_keeps_the_restart_that_is_nearest_to_its_step(small, monkeypatch):
    task, updates = small
    spy, codec = Spy(monkeypatch), fv.FedSynthCodec(**SMALL, restarts=4)
    payload = codec.encode(task, task.initial[None], updates[:1], SEEDS[:1], None)
    nearest = torch.stack(spy.losses).min()
    torch.testing.assert_close(
        (updates[0] - decoded(codec, task, payload)[0]).square().sum(), nearest, atol=0, rtol=1e-3
    )


def test_a_fit_over_a_ball_of_weights_decodes_better_at_weights_that_have_moved(small):
    task, updates = small
    moves = normal([fv.Seed.root(50 + k) for k in range(10)], "move", (task.layout.size,), task.device)
    moves /= moves.norm(dim=1, keepdim=True)
    cosines = {}
    for drift in (0.0, 1.0):
        codec = fv.FedSynthCodec(**SMALL | {"fits": 80}, drift=drift)
        payloads, w = encoded(codec, task, updates), task.initial.expand(2, -1)
        there = torch.stack([cosine(codec.decode(task, w + move, payloads), updates) for move in moves]).mean(0)
        cosines[drift] = cosine(codec.decode(task, w, payloads), updates), there
    (here, there), (robust_here, robust_there) = cosines.values()
    assert (here - there > 2 * (robust_here - robust_there)).all()
    assert (robust_there > there + 0.02).all()


def test_the_update_of_two_epochs_on_the_digits_comes_back_with_a_cosine_of_nine_tenths():
    task, codec = digits(), fv.FedSynthCodec(batches=3, epochs=2, fits=50)
    updates = trained(stack_of(task, 0, 1), fv.LocalTraining(lr=0.3, epochs=2, batch=20))
    assert (cosine(decoded(codec, task, encoded(codec, task, updates)), updates) >= 0.9).all()


def test_a_client_that_has_not_moved_sends_an_update_of_zeros(small):
    task, _ = small
    codec = fv.FedSynthCodec(**SMALL)
    assert not decoded(codec, task, encoded(codec, task, torch.zeros(2, task.layout.size))).any()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"restarts": 0}, "fedsynth needs batches, batch, epochs, fits and restarts of at least 1"),
        ({"drift": -1.0}, "drift >= 0"),
        ({"objective": "l1"}, "fedsynth's objective is l2, kl or data"),
        ({"labels": "hard"}, "its labels are project or softmax"),
        ({"precision": "int4"}, "fedsynth.precision is 'int4'; use float32, float16, uint8"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_sentence(setting, sentence):
    with pytest.raises(ValueError, match=sentence):
        fv.FedSynthCodec(**setting)
