"""A trained part of a model: what is constant is not sent, not perturbed, not counted and not copied."""

import threading

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.core.functional import Pure, on_cpu
from fedveil.data import from_tensors


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x).float())


def task_of(model, **options):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=draw), torch.arange(24) % 3
    data = from_tensors(x, y, x, y)
    return fv.Task(model, data, fv.split("iid", data, 3, fv.Seed.root(0)), **options)


def made():
    torch.manual_seed(0)
    return Backbone()


def frozen():
    model = made()
    model.body.requires_grad_(False)
    return model


def test_a_pattern_and_frozen_parameters_give_the_same_run():
    runs = [fv.run(task, fv.FedAvg(), rounds=2) for task in (task_of(made(), trainable=["head.*"]), task_of(frozen()))]
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert runs[0].task.layout.size == 21
    assert [layer.name for layer in runs[0].task.layout.layers] == ["head.weight", "head.bias"]


def test_it_is_training_of_that_part_by_pytorch():
    task = task_of(frozen())
    model = frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    stack = fv.ClientStack(task, (1,), 1, fv.Seed.root(0), fv.Seed.root(9), [fv.Slots()], [{}])
    local = fv.LocalTraining(lr=0.1, batch=4)
    index, _ = local.plan(stack)
    for rows in torch.from_numpy(index[:, 0]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(task.x[rows]), task.y[rows]).backward()
        optimizer.step()
    found, _ = local.train(stack, task.initial)
    expected = torch.cat([p.detach().reshape(-1) for p in model.head.parameters()])
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize(
    "method",
    [
        fv.FedAvg(),
        fv.Baffle(directions=4),
        fv.Tofu(up=fv.TofuCodec(points=2, steps=2)),
        fv.Scaffold(),
        fv.FedAvg(up="top-k"),
    ],
    ids=lambda m: m.name,
)
def test_constants_are_neither_sent_nor_changed(method):
    model = frozen()
    task = task_of(model)
    before = [p.clone() for p in task.model.body.parameters()]
    result = fv.run(task, method, rounds=2)
    assert len(result.weights) == 21
    assert result.ledger.rows[0].bytes_down < 3 * (2 * 4 * 21 + 100)
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.body.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_keep_their_type(dtype):
    class Half(Backbone):
        def forward(self, x):
            return super().forward(x.to(dtype))

    torch.manual_seed(0)
    model = Half()
    model.body.to(dtype).requires_grad_(False)
    task = task_of(model)
    assert task.model.body[0].weight.dtype == dtype
    result = fv.run(task, fv.FedAvg(), rounds=1)
    assert not result.ledger.rows[0].missing


def test_the_copy_that_is_checked_shares_constants_and_nothing_that_is_trained():
    model = made()
    checked = on_cpu(model, {"head.weight", "head.bias"})
    assert checked.body[0].weight is model.body[0].weight
    assert checked.head.weight is not model.head.weight
    assert torch.equal(checked.head.weight, model.head.weight)


def test_the_constants_of_a_task_are_not_those_of_the_caller():
    model = frozen()
    task = task_of(model)
    own = task.model.body[0].weight
    assert own.data_ptr() != model.body[0].weight.data_ptr()
    with torch.no_grad():
        model.body[0].weight.zero_()
    assert own.abs().sum() > 0


def test_threads_share_one_copy_of_the_constants():
    model = made()
    pure = Pure(model, ["head.weight", "head.bias"])
    seen = []

    def note():
        own, _ = pure._own()
        seen.append((own, own.body[0].weight))

    for thread in [threading.Thread(target=note) for _ in range(2)]:
        thread.start()
        thread.join()
    (first, weight), (second, other) = seen
    assert first is not second
    assert weight is other is model.body[0].weight


def test_tied_weights_are_trained_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.words.weight

        def forward(self, x):
            return self.out(self.words(x))

    x = torch.randint(0, 7, (24, 5), generator=torch.Generator().manual_seed(0))
    data = from_tensors(x, x, x, x, classes=7)
    task = fv.Task(Tied(), data, fv.split("iid", data, 3, fv.Seed.root(0)), loss="next-character")
    assert task.layout.size == 28
    assert fv.run(task, fv.FedAvg(local=fv.LocalTraining(lr=1.0)), rounds=3).summary()["loss"] < 1.9


def test_wrong_patterns_are_one_sentence():
    with pytest.raises(ValueError, match=r"the pattern 'haed.\*', which matches no parameter; some are body.0.weight"):
        task_of(made(), trainable=["head.*", "haed.*"])
    with pytest.raises(ValueError, match=r"trainable is 'head.\*'; it is a list of patterns"):
        task_of(made(), trainable="head.*")
    model = made()
    model.head.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"parameter 'head.weight' is torch.bfloat16; fedveil trains float32 weights"):
        task_of(model)
