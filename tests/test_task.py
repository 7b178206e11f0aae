"""Any module as a pure function of a flat vector, and the models that cannot be one."""

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil import models
from fedveil.data import from_tensors
from fedveil.task import Layout, cross_entropy, next_character
from toys import linear_task


def task_with(model, x=None, **options):
    x = torch.randn(8, 4) if x is None else x
    y = torch.arange(8) % 3
    data = from_tensors(x, y, x, y, classes=3)
    return fv.Task(model, data, fv.split("iid", data, 2, fv.Seed.root(0)), **options)


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
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    return model


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


IMPURE = [
    (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "layer '1'.*mixes the records of a batch.*use nn.GroupNorm"),
    (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), r"layer '1' \(Dropout\) draws random numbers.*remove it"),
    (Counter(), "buffer 'calls' changes when the model runs"),
    (Noisy(4, 3), "two outputs for one input"),
    (nn.Linear(4, 3).double(), r"'weight' is torch.float64.*call model.float\(\)"),
    (frozen(), "'bias' is frozen; register it as a buffer"),
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
    result = fv.run(task, fv.FedAvg(local=fv.Local(lr=0.5)), rounds=3, cohort=2)
    assert not result.ledger.rows[-1].missing
    assert not torch.equal(result.weights, task.initial)


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


def test_text_trains_too():
    tokens = torch.randint(0, 5, (12, 7), generator=fv.Seed.root(0).torch())
    data = from_tensors(tokens[:, :-1], tokens[:, 1:], tokens[:, :-1], tokens[:, 1:], classes=5)
    model = models.build("char-lstm", data.input, 5, hidden=8)
    task = fv.Task(model, data, fv.split("iid", data, 3, fv.Seed.root(0)), loss="next-character")
    result = fv.run(task, fv.FedAvg(local=fv.Local(lr=1.0, epochs=5)), rounds=5, cohort=3)
    losses = result.ledger.series("loss")[1]
    assert losses[-1] < losses[0]


def test_layout_of_a_stack():
    layout = Layout.of(nn.Linear(3, 2))
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
        (nn.CrossEntropyLoss(reduction="mean"), r"does not fit .*its result has shape \[\]"),
    ],
)
def test_a_loss_that_does_not_fit_is_one_sentence(loss, told):
    x = torch.randn(4, 3, generator=fv.Seed.root(0).torch())
    data = from_tensors(x, torch.tensor([0, 1, 0, 1]), x, torch.tensor([0, 1, 0, 1]), classes=2)
    with pytest.raises(ValueError, match=told) as refusal:
        fv.Task(nn.Linear(3, 2), data, fv.split("iid", data, 2, fv.Seed.root(0)), loss=loss)
    assert "\n" not in str(refusal.value)
