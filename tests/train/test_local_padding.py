"""Ragged stacks are padded. Each client must get the numbers that it has alone and unpadded, for every layer we accept.

The reference is written out here: one client, one unpadded batch at a time, without `vmap`.
"""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedveil as fv
from fedveil.core.directions import Directions
from fedveil.core.message import Slots
from fedveil.core.stack import ClientStack
from fedveil.data import from_tensors
from fedveil.methods.baffle.probing import Prober, forward_only
from fedveil.methods.surrogates.augment import same
from fedveil.methods.surrogates.fedlap import Batches
from fedveil.models.text import LSTM
from fedveil.privacy.dpsgd import clipped, clipped_sum
from fedveil.train import local

SIZES = (1, 3, 9, 6)  # records of each client; batches of 4 leave rests of 1, 3, 1 and 2
IMAGE, SERIES, TOKENS = (2, 4, 4), (5, 4), (5,)
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


class Of(nn.Module):
    """A function of a module's outputs, or of a few modules."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x):
        return self.function(x, *self.parts)


def head(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 3))


def conv(*after):
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *after, nn.Tanh(), head(64))


def attend(x, *parts):
    return F.scaled_dot_product_attention(*(part(x)[:, None] for part in parts))[:, 0]


def last_of(cell, hidden=6):
    return Of(lambda x, cell, last: last(cell(x)[0][:, -1]), cell, nn.Linear(hidden, 3))


def attending(layer):
    return Of(lambda x, layer, last: last(layer(x, x, x, need_weights=False)[0]), layer, head(20))


def projections():
    return [nn.Linear(4, 4) for _ in range(3)]


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


ACCEPTED = {
    "Linear": (IMAGE, lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3))),
    "Bilinear": (IMAGE, lambda: Of(lambda x, layer: layer(*x.flatten(2).unbind(1)), nn.Bilinear(16, 16, 3))),
    "Conv1d": (SERIES, lambda: nn.Sequential(nn.Conv1d(5, 6, 3), nn.Tanh(), head(12))),
    "Conv2d": (IMAGE, conv),
    "ConvTranspose2d": (IMAGE, lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Tanh(), head(75))),
    "grouped Conv2d": (IMAGE, lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), head(16))),
    "GroupNorm": (IMAGE, lambda: conv(nn.GroupNorm(2, 4))),
    "LayerNorm": (IMAGE, lambda: conv(nn.LayerNorm([4, 4, 4]))),
    "RMSNorm": (IMAGE, lambda: conv(nn.RMSNorm([4, 4, 4]))),
    "LocalResponseNorm": (IMAGE, lambda: conv(nn.LocalResponseNorm(2))),
    "InstanceNorm1d": (SERIES, lambda: nn.Sequential(nn.Conv1d(5, 6, 2), nn.InstanceNorm1d(6, affine=True), head(18))),
    "InstanceNorm2d": (IMAGE, lambda: conv(nn.InstanceNorm2d(4, affine=True))),
    "MaxPool2d": (IMAGE, lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2), head(16))),
    "AvgPool2d": (IMAGE, lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), head(16))),
    "AdaptiveAvgPool2d": (IMAGE, lambda: conv(nn.AdaptiveAvgPool2d(4))),
    "Dropout of nothing": (IMAGE, lambda: conv(nn.Dropout(0.0))),
    "Embedding": (TOKENS, lambda: nn.Sequential(nn.Embedding(7, 4), head(20))),
    "fedveil's LSTM": (SERIES, lambda: Of(lambda x, cell, last: last(cell(x)[:, -1]), LSTM(4, 6, 2), nn.Linear(6, 3))),
    "LSTM": (SERIES, lambda: last_of(nn.LSTM(4, 6, batch_first=True))),
    "GRU": (SERIES, lambda: last_of(nn.GRU(4, 6, batch_first=True))),
    "MultiheadAttention": (SERIES, lambda: attending(nn.MultiheadAttention(4, 2, batch_first=True))),
    "scaled dot-product attention": (SERIES, lambda: nn.Sequential(Of(attend, *projections()), head(20))),
    "TransformerEncoderLayer": (SERIES, lambda: nn.Sequential(encoder(), head(20))),
}  # fmt: skip


def data_for(shape):
    draw = torch.Generator().manual_seed(1)
    n = sum(SIZES)
    x = torch.randint(0, 7, (n, *shape), generator=draw) if shape == TOKENS else torch.randn(n, *shape, generator=draw)
    y = torch.randint(0, 3, (n,), generator=draw)
    return from_tensors(x, y, x, y, classes=3, **({"mean": (0,) * 2, "std": (1,) * 2} if shape == IMAGE else {}))


def task_of(model, shape, **options):
    data = data_for(shape)
    order = np.random.default_rng(0).permutation(len(data.x))
    return fv.Task(model, data, fv.Split(order, np.cumsum([0, *SIZES]), "ragged"), **options)


@pytest.fixture(params=ACCEPTED, scope="module")
def task(request):
    shape, made = ACCEPTED[request.param]
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.filterwarnings("ignore", "this model cannot be stacked")
        found = task_of(made(), shape)
    assert found.stackable == (request.param not in ("LSTM", "GRU"))  # which are called once a client
    return found


def stack_of(task, *clients):
    clients = clients or tuple(range(len(SIZES)))
    return ClientStack(
        task, clients, 1, fv.Seed.root(2), fv.Seed.root(3), [Slots()] * len(clients), [{} for _ in clients]
    )


def slope(task, w, rows):
    """The gradient of the mean loss of some records, [d]."""
    w = w.detach().clone().requires_grad_()
    loss = task.losses(w, task.x[rows], task.y[rows]).mean()
    return torch.autograd.grad(loss, w)[0]


def near(found, right):
    torch.testing.assert_close(found.to(right), right, atol=2e-5 * float(right.abs().max()), rtol=1e-4)


def test_local_training_of_a_ragged_stack_is_that_of_each_client_alone(task):
    how = fv.LocalTraining(lr=0.1, batch=4, epochs=2)
    trained, steps = how.train(stack_of(task), task.initial)
    for k, size in enumerate(SIZES):
        index, sizes = how.plan(stack_of(task, k))
        w = task.initial.clone()
        for rows, n in zip(index[:, 0], sizes[:, 0], strict=True):
            w -= 0.1 * slope(task, w, rows[:n])
        assert int(steps[k]) == len(index) == 2 * -(-size // 4)
        near(trained[k] - task.initial, w - task.initial)


def test_a_ragged_batch_has_the_gradient_of_its_records(task, monkeypatch):
    monkeypatch.setattr(local, "GRADIENT_CHUNK", 4)
    found, losses = local.full_gradient(stack_of(task), task.initial)
    for k in range(len(SIZES)):
        near(found[k], slope(task, task.initial, task.clients[k]))
        own = task.losses(task.initial, task.x[task.clients[k]], task.y[task.clients[k]])
        torch.testing.assert_close(losses[k], own.mean())


def test_the_clipped_gradients_of_a_ragged_draw_are_those_of_single_records(task):
    index, mask = (torch.from_numpy(a) for a in stack_of(task).rows.padded())
    w = task.initial.expand(len(SIZES), -1)
    found = clipped_sum(task, w, task.x[index], task.y[index], mask, 0.5)
    for k in range(len(SIZES)):
        each = torch.stack([slope(task, task.initial, [i]) for i in task.clients[k]])
        near(found[k], clipped(each, 0.5).sum(0))


def test_the_probes_of_a_ragged_stack_are_those_of_each_client_alone(task):
    probes = Prober(task, Directions.of("gaussian", task.layout.size, 3), 1e-2, "central")
    index, mask = (torch.from_numpy(a) for a in stack_of(task).rows.padded())
    keys, w = torch.arange(len(SIZES)), task.initial.expand(len(SIZES), -1)
    with forward_only(task.device):
        found = probes.gradient(w, keys, task.x[index], task.y[index], mask, 3)
        for k in range(len(SIZES)):
            rows = torch.from_numpy(task.clients[k])[None]
            ones = torch.ones(rows.shape)
            alone = probes.gradient(w[:1], keys[k : k + 1], task.x[rows], task.y[rows], ones, 3)
            torch.testing.assert_close(found[k], alone[0], atol=1e-3 * float(alone.abs().max()), rtol=1e-3)


def test_the_real_batches_of_fedlap_are_those_of_each_client_alone(task):
    w = task.initial.expand(len(SIZES), -1)
    together = Batches(stack_of(task), w, 4, 2, [(0,)], same)
    for _ in range(2):
        found, rows = together(), together._index[int(together._cursor) - 1]
        for k, size in enumerate(SIZES):
            near(found[k], slope(task, task.initial, rows[k, : min(4, size)]))


# ---------------------------------------------------------------------------------------------------- refusals


class Centred(nn.Linear):
    """Batch statistics that no layer of PyTorch computes."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def contrast(logits, y):
    return F.cross_entropy(logits - logits.mean(0), y, reduction="none")


MIXING = {
    "BatchNorm without running statistics": (
        conv(nn.BatchNorm2d(4, track_running_stats=False)),
        IMAGE,
        r"layer '1' \(BatchNorm2d\) keeps no running statistics.*set track_running_stats=True.*fv.group_norm",
    ),
    "SyncBatchNorm": (conv(nn.SyncBatchNorm(4, track_running_stats=False)), IMAGE, r"\(SyncBatchNorm\) keeps no"),
    "InstanceNorm": (
        conv(nn.InstanceNorm2d(4, track_running_stats=True)),
        IMAGE,
        r"layer '1' \(InstanceNorm2d\) keeps running statistics.*set track_running_stats=False",
    ),
    "a user's layer": (nn.Sequential(nn.Flatten(), Centred(32, 3)), IMAGE, r"layer '1' \(Centred\) mixes.*LayerNorm"),
    "a user's model": (Centred(4, 3), (4,), "the model mixes"),
    "records in the place of time": (
        last_of(nn.LSTM(4, 6)),
        SERIES,
        r"layer 'parts.0' \(LSTM\) mixes.*keep records in the first dimension",
    ),
    "records that attend to each other": (
        attending(nn.MultiheadAttention(4, 2)),
        SERIES,
        r"layer 'parts.0' \(MultiheadAttention\) mixes",
    ),
    "a head that starts at 0": (
        nn.Sequential(nn.Flatten(), Of(lambda x: x - x.mean(0)), nn.Linear(32, 3)),
        IMAGE,
        r"layer '1' \(Of\) mixes",
    ),
    "no batch of one": (
        Of(lambda x, last: last(x.flatten(1)).squeeze(), nn.Linear(32, 3)),
        IMAGE,
        "does not take a batch of one record|the model mixes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_a_model_in_which_padding_would_count_is_refused_with_what_to_use_instead(name):
    model, shape, told = MIXING[name]
    if name == "a head that starts at 0":
        model[-1].weight.data.zero_()
        model[-1].bias.data.zero_()
    with pytest.raises(ValueError, match=told) as refused:
        task_of(model, shape)
    assert "\n" not in str(refused.value)


def test_a_loss_in_which_padding_would_count_is_refused():
    with pytest.raises(ValueError, match="the loss contrast of a record depends on the other records of its batch"):
        task_of(nn.Linear(4, 3), (4,), loss=contrast)


def test_rounding_is_not_taken_for_what_records_do_to_each_other():
    """With products in bfloat16, a record has other last digits in a batch than alone."""
    seen = []

    class Watching(nn.Linear):
        def forward(self, x):
            seen.append((len(x), torch.get_float32_matmul_precision()))
            return super().forward(x)

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("medium")
        task_of(Watching(4, 3), (4,))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before[0])
    assert torch.backends.cudnn.allow_tf32 == before[1]
    assert {precision for size, precision in seen if size == 4} == {"highest"}  # the records that are compared


def test_padding_is_a_client_s_own_record():
    model = nn.Linear(4, 3)
    task = task_of(model, (4,))
    index, _ = fv.LocalTraining(batch=4).plan(stack_of(task))
    for k in range(len(SIZES)):
        assert set(index[:, k].flatten()) <= set(task.clients[k])


class Bag(nn.Module):
    """The mean of tokens' scores, without token 0. It notes the widths of batches."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(9, 3, generator=torch.Generator().manual_seed(0)))
        self.widths: set[int] = set()

    def forward(self, x):
        self.widths.add(x.shape[-1])
        here = (x != 0).float()[..., None]
        return ((F.one_hot(x, 9).float() @ self.scores) * here).sum(-2) / here.sum(-2)


def test_batches_of_short_records_are_cut_and_train_the_same_weights():
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randint(1, 9, (40, 32), generator=draw), torch.arange(40) % 3
    x[torch.arange(32) >= torch.cat([torch.full((20, 1), 7), torch.full((20, 1), 30)])] = 0
    trained, widths = [], []
    for padding in (0, None):
        data = from_tensors(x, y, x, y, padding=padding)
        task = fv.Task(Bag(), data, fv.Split(np.arange(40), np.array([0, 15, 40]), "halves"))
        for clients in ((0,), (0, 1)):
            task._pure._own()[0].widths.clear()
            stack = ClientStack(task, clients, 1, fv.Seed.root(0), fv.Seed.root(9), [Slots()] * 2, [{}] * 2)
            trained.append(local.LocalTraining(lr=0.5, batch=4, epochs=2).train(stack, task.initial)[0].clone())
            widths.append(set(task._pure._own()[0].widths))
    assert widths == [{8}, {8, 32}, {32}, {32}]
    torch.testing.assert_close(trained[0], trained[2])
    torch.testing.assert_close(trained[1], trained[3])
