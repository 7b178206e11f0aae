"""Any module as a pure function of a flat vector, and the models that cannot be one."""

import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedveil as fv
from fedveil import models
from fedveil.core.capability import WAYS_OUT
from fedveil.core.layout import Layout
from fedveil.core.losses import cross_entropy, next_character
from fedveil.data import from_tensors
from toys import linear_task


def task_with(model, x=None, **options):
    x = torch.randn(8, 4) if x is None else x
    y = torch.arange(8) % 3
    data = from_tensors(x, y, x, y, classes=3)
    return fv.Task(model, data, fv.split("iid", data, 2, fv.Seed.root(0), max_records=8), **options)


def test_f_is_the_module_and_the_layout_names_its_slices():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    task = task_with(model)
    assert [layer.name for layer in task.layout.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert task.layout.size == 4 * 5 + 5 + 5 * 3 + 3 == len(task.initial)
    x = torch.randn(6, 4)
    torch.testing.assert_close(task.f(task.initial, x), model(x))
    parts = task.layout.split(task.initial)
    assert torch.equal(parts["2.weight"], model[2].weight)
    assert torch.equal(task.layout.join(parts), task.initial)
    doubled = task.f(2 * task.initial, x)
    assert not torch.allclose(doubled, model(x)), "f must use the weights it is given"


def test_by_layer_weights_are_made_when_their_layer_runs_and_are_gone_after_it():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    task = task_with(model)
    x, parts, asked, alive = torch.randn(6, 4), task.layout.split(2 * task.initial), [], []

    def weights(name):
        alive.append(sum(made() is not None for made in asked))
        own = parts[name].clone()
        asked.append(weakref.ref(own))
        return own

    assert torch.equal(task.by_layer(weights, x), task.f(2 * task.initial, x))
    assert alive == [0, 1, 0, 1]  # a weight, with it a bias, then the next layer's
    assert not any(made() is not None for made in asked)


def test_tied_weights_are_one_slice():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.b(self.a(x)))

    task = task_with(Tied())
    x = torch.randn(2, 4)
    w = task.initial.clone()
    w[:16] = 0  # both layers share it
    zero = task.f(w, x)
    torch.testing.assert_close(zero[0], zero[1])


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


def frozen():
    return nn.Linear(4, 3).requires_grad_(False)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


IMPURE = [
    (Counter(), "buffer 'calls' changes when the model runs"),
    (Noisy(4, 3), "two outputs for one input"),
    (nn.Linear(4, 3).double(), r"'weight' is torch.float64.*call model.float\(\)"),
    (frozen(), "no parameter of the model requires gradients"),
    (nn.Flatten(), "nothing to train"),
    (nn.Linear(5, 3), r"does not take inputs of shape \(4,\)"),
    (Pair(4, 3), "returns a tuple; it must return one tensor"),
]


@pytest.mark.parametrize(("model", "sentence"), IMPURE, ids=[s[:25] for _, s in IMPURE])
def test_a_model_that_is_no_pure_function_is_refused_with_what_to_use_instead(model, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        task_with(model)
    assert "\n" not in str(refused.value).split(": ")[0]


class Unstackable(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2.0 if float(self.weight.sum()) > 1e9 else 1.0)


def test_a_model_that_cannot_be_stacked_trains_one_client_at_a_time_with_a_notice():
    with pytest.warns(UserWarning, match="cannot be stacked and trains one client at a time"):
        task = task_with(Unstackable(4, 3))
    result = fv.run(task, fv.FedAvg(local=fv.LocalTraining(lr=0.5)), rounds=3, cohort=2)
    assert not result.ledger.rows[-1].missing
    assert not torch.equal(result.weights, task.initial)


@pytest.mark.parametrize(
    "method",
    [
        fv.FedAvg(local=fv.LocalTraining(lr=0.5, batch=3), privacy=fv.DpSgd(noise=0.5)),
        fv.FedSGD(privacy=fv.DpSgd(noise=0.5)),
        fv.FedAvg(up=fv.TofuCodec(points=2, steps=2)),
        fv.FedAvg(up=fv.FedSynthCodec(batches=1, batch=2, epochs=2, fits=2, restarts=2)),
        fv.Baffle(directions=3),
        fv.FedLap(images=1, batches=1, steps=2, passes=1, image_lr=0.1),
    ],
    ids=["privacy", "fedsgd", "tofu", "fedsynth", "baffle", "fedlap"],
)
def test_a_model_that_cannot_be_stacked_still_learns_whatever_a_method_stacks(method):
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="cannot be stacked"):
        task = task_with(Unstackable(4, 3))
    result = fv.run(task, method, rounds=2, cohort=2)
    assert not any(row.missing for row in result.ledger.rows)
    assert not torch.equal(result.weights, task.initial)


class Alone(torch.autograd.Function):
    """A layer whose derivative is for batches."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        if len(slope) < 2:
            raise RuntimeError("a batch is needed")
        return slope


class Attention(nn.Module):
    def __init__(self, *backends):
        super().__init__()
        self.inner, self.last, self.backends = nn.Linear(2, 2), nn.Linear(4, 3), list(backends)

    def forward(self, x):
        x = self.inner(x.view(-1, 1, 2, 2))
        with sdpa_kernel(self.backends) if self.backends else nullcontext():
            return self.last(F.scaled_dot_product_attention(x, x, x).flatten(1))


class Through(nn.Linear):
    def __init__(self, function):
        super().__init__(4, 3)
        self.function = function

    def forward(self, x):
        return self.function(super().forward(x))


class Signs(nn.Linear):
    def forward(self, x):
        return (super().forward(x) > 0).float()


SECOND = r"needs second derivatives, and this model fails there \(.*\); replace the layer that fails.*qsgd"
UNABLE = {
    "tofu": (Attention, fv.FedAvg(up=fv.TofuCodec(steps=2)), "fedavg " + SECOND),
    "tofu down": (Attention, fv.FedAvg(down=fv.TofuCodec(steps=2)), "fedavg " + SECOND),
    "fedsynth": (Attention, fv.FedSynth(), "fedsynth " + SECOND),
    "tiers": (Attention, fv.FedAvg(up=fv.Tiers()), "fedavg " + SECOND),
    "fedlap": (Attention, fv.FedLap(), "fedlap " + SECOND),
    "privacy": (
        lambda: Through(Alone.apply),
        fv.FedAvg(privacy=fv.DpSgd()),
        r"fedavg needs a gradient of each record, and this model fails there \(a batch is needed\); .*method.privacy",
    ),
    "scaffold": (lambda: Through(Alone.apply), fv.Scaffold(privacy=fv.DpSgd()), "needs a gradient of each record"),
    "other outputs": (
        lambda: nn.Linear(4, 4),
        fv.Tofu(),
        r"tofu needs a score of each class, and this model fails there \(its outputs have shape \[4\] a record",
    ),
    "no gradient": (lambda: Signs(4, 3), fv.FedAvg(), r"needs gradients.*or the method baffle"),
}


@pytest.mark.parametrize("case", UNABLE)
@pytest.mark.filterwarnings("ignore:this model cannot be stacked", "ignore:There is a performance drop")
def test_a_model_that_cannot_do_what_a_method_needs_is_found_before_anything_is_asked(case):
    model, method, told = UNABLE[case]
    task, asked = task_with(model()), []
    with pytest.raises(ValueError, match=told) as refused:
        fv.run(task, method, rounds=1, cohort=2, observer=asked.append)
    assert not asked
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:this model cannot be stacked", "ignore:There is a performance drop")
def test_the_ways_out_of_a_refusal_lead_out():
    for model, method in (
        (Attention(SDPBackend.MATH), fv.FedAvg(up=fv.TofuCodec(points=2, steps=2))),
        (Attention(), fv.FedAvg(up=fv.Qsgd())),
        (Signs(4, 3), fv.Baffle(directions=3)),
    ):
        assert not fv.run(task_with(model), method, rounds=1, cohort=2).ledger.rows[0].missing


def test_a_trial_is_made_once_a_task(monkeypatch):
    task, tried = task_with(nn.Linear(4, 3)), []
    monkeypatch.setattr("fedveil.core.task.failure", lambda operation, *_: tried.append(operation) or "")
    for _ in range(3):
        fv.core.setup.init_state(task, fv.FedAvg(up=fv.FedSynthCodec()), fv.CohortSampler(size=2))
    assert len(tried) == len(set(tried)) == 4


def test_every_method_states_needs_that_can_be_tried():
    for method in fv.METHODS.values():
        assert set(method().needs) <= set(WAYS_OUT)
        assert method().needs


def test_the_gradient_is_that_of_each_client_alone_and_padding_does_not_count():
    task = linear_task(3)
    w = torch.randn(3, 8, dtype=torch.float32)
    x, y = task.x[:12].view(3, 4, 3), task.y[:12].view(3, 4)
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    gradient, loss = task.gradient(w, x, y, mask)
    for k, n in ((0, 4), (1, 2)):
        v = w[k].clone().requires_grad_()
        alone = cross_entropy(task.f(v, x[k, :n]), y[k, :n]).mean()
        torch.testing.assert_close(gradient[k], torch.autograd.grad(alone, v)[0])
        torch.testing.assert_close(loss[k], alone.detach())
    assert gradient[2].abs().sum() == 0


def test_gradient_against_finite_differences_in_float64():
    task = linear_task()
    w = torch.randn(8, dtype=torch.float64)
    x, y = task.x[:5].double(), task.y[:5]
    assert torch.autograd.gradcheck(lambda w: task.losses(w, x, y).mean(), w.requires_grad_())


def test_losses_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    hard = cross_entropy(logits, torch.tensor([0, 2]))
    torch.testing.assert_close(hard, -torch.log(torch.tensor([0.5, 0.8])))
    soft = cross_entropy(logits, torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(soft[0], -0.5 * torch.log(torch.tensor(0.5)) - 0.5 * torch.log(torch.tensor(0.25)))
    torch.testing.assert_close(soft[1], hard[1])
    text = next_character(logits.view(1, 2, 3), torch.tensor([[0, 2]]))
    torch.testing.assert_close(text, hard.mean()[None])


def test_metrics_by_hand():
    eye = torch.eye(7)
    data = from_tensors(eye, torch.arange(7), eye, torch.tensor([0, 1, 2, 3, 4, 6, 5]), classes=7)
    task = fv.Task(nn.Linear(7, 7, bias=False), data, fv.split("iid", data, 1, fv.Seed.root(0)))
    scores = eye * 10 + torch.linspace(0, 1, 7)  # first choice right for 5 of 7; the other two are second
    metrics = task.evaluate(scores.T.reshape(-1))
    assert metrics["accuracy"] == pytest.approx(5 / 7)
    assert metrics["top5"] == 1.0
    assert metrics["loss"] == pytest.approx(float(cross_entropy(scores, data.test_y).mean()), rel=1e-6)


def one_logit(logits, y):
    return F.binary_cross_entropy_with_logits(logits.squeeze(-1), y.float(), reduction="none")


def distances(outputs, y):
    return F.cross_entropy(-outputs, y, reduction="none")


def spread(outputs, y):
    """A Gaussian's mean and log-variance."""
    return (y - outputs[:, 0]).square() / outputs[:, 1].exp() + outputs[:, 1]


def margin(logits, y):
    return F.multi_margin_loss(logits, y, reduction="none")


def squared(logits, y):
    return (logits - F.one_hot(y, 2)).square().sum(-1)


def likelihood(probabilities, y):
    return F.nll_loss(probabilities.log_softmax(-1).exp().log(), y, reduction="none")


@pytest.mark.parametrize(
    ("outputs", "loss", "fits"),
    [
        (2, "cross-entropy", True),
        (3, "cross-entropy", True),
        (2, margin, True),
        (2, squared, True),
        (2, likelihood, True),
        (2, nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1), True),
        (1, one_logit, False),
        (2, distances, False),
        (2, spread, False),
    ],
)
def test_accuracy_is_measured_only_where_outputs_are_class_scores(outputs, loss, fits):
    """A model with one logit and base rate 3 of 4 had an accuracy of 0.75, whatever it had learned."""
    x, y = torch.randn(8, 4, generator=fv.Seed.root(0).torch()), torch.tensor([0, 0, 0, 1] * 2)
    data = from_tensors(x, y, x, y, classes=2)
    task = fv.Task(nn.Linear(4, outputs), data, fv.split("iid", data, 2, fv.Seed.root(0)), loss=loss)
    assert set(task.evaluate(task.initial)) == ({"accuracy", "loss"} if fits else {"loss"})
    result = fv.run(task, fv.FedAvg(), rounds=1, cohort=2)
    assert ("accuracy" in result.ledger.rows[0].metrics) == fits
    assert (result.summary()["accuracy"] is not None) == fits
    assert ("accuracy" in result.table()) == fits
    fv.plot(result)
    if not fits:
        with pytest.raises(ValueError, match=r"target is 0\.9, but the model's outputs are not class scores"):
            fv.run(task, fv.FedAvg(), rounds=1, cohort=2, target=0.9)


def test_text_trains_too():
    tokens = torch.randint(0, 5, (12, 7), generator=fv.Seed.root(0).torch())
    data = from_tensors(tokens[:, :-1], tokens[:, 1:], tokens[:, :-1], tokens[:, 1:], classes=5)
    model = models.build("char-lstm", data.input, 5, hidden=8)
    task = fv.Task(model, data, fv.split("iid", data, 3, fv.Seed.root(0)), loss="next-character")
    result = fv.run(task, fv.FedAvg(local=fv.LocalTraining(lr=1.0, epochs=5)), rounds=5, cohort=3)
    losses = result.ledger.series("loss")[1]
    assert losses[-1] < losses[0]


def test_layout_of_a_stack():
    layout = Layout.of(dict(nn.Linear(3, 2).named_parameters()))
    parts = layout.split(torch.arange(16.0).view(2, 8))
    assert parts["weight"].shape == (2, 2, 3)
    assert parts["bias"].tolist() == [[6.0, 7.0], [14.0, 15.0]]


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (
            "next-character",
            r"the loss next_character does not fit outputs of shape \[2, 2\] and labels of shape \[2\] \(",
        ),
        (lambda logits, y: logits.sum(), r"its result has shape \[\], not one number a record"),
        (nn.CrossEntropyLoss(reduction="mean"), r"does not fit .*has shape \[\].*; .* with reduction='none'"),
    ],
)
def test_a_loss_that_does_not_fit_is_one_sentence(loss, told):
    x = torch.randn(4, 3, generator=fv.Seed.root(0).torch())
    data = from_tensors(x, torch.tensor([0, 1, 0, 1]), x, torch.tensor([0, 1, 0, 1]), classes=2)
    with pytest.raises(ValueError, match=told) as refusal:
        fv.Task(nn.Linear(3, 2), data, fv.split("iid", data, 2, fv.Seed.root(0)), loss=loss)
    assert "\n" not in str(refusal.value)


def test_a_model_that_is_no_module_is_one_sentence():
    data = fv.load("digits")
    with pytest.raises(TypeError, match=r"the model is a str; give an nn\.Module"):
        fv.Task("lenet5", data, fv.split("iid", data, 2, fv.Seed.root(0)))


def test_what_is_no_data_split_or_list_is_named():
    data, model = task_with(nn.Linear(4, 3)).data, nn.Linear(4, 3)
    split = fv.split("iid", data, 2, fv.Seed.root(0))
    with pytest.raises(TypeError, match=r"data is a tuple; make a Data, for instance with fedveil.data.from_tensors"):
        fv.Task(model, (1, 2), split)
    with pytest.raises(TypeError, match=r"split is a list; make a Split, for instance with fedveil.split"):
        fv.Task(model, data, [[0], [1]])
    with pytest.raises(ValueError, match=r"metrics is 'accuracy'; it is a list, such as \['accuracy'\]"):
        fv.Task(model, data, split, metrics="accuracy")
    with pytest.raises(ValueError, match=r"trainable is \[3\]; it is a list of patterns"):
        fv.Task(model, data, split, trainable=[3])
    with pytest.raises(ValueError, match="batch_norm is 'local', but the model has no batch norm layer; leave it out"):
        fv.Task(model, data, split, batch_norm="local")
    with pytest.raises(ValueError, match="groups is 0; it must be at least 1"):
        fv.group_norm(model, 0)
