"""Dropout and other noise: seeded by client, round, step and layer, and off in evaluation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedveil as fv
from fedveil.core.noise import Seeded
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine

LOCAL = fv.LocalTraining(lr=0.1, batch=4)


class Blurred(nn.Linear):
    def forward(self, x):
        return super().forward(x) + (0.1 * torch.randn_like(x[:, :1]) if self.training else 0)


class Shallow(nn.Module):
    """Stochastic depth, as timm (`new_empty`) and torchvision (`empty`) draw it."""

    def __init__(self, empty):
        super().__init__()
        self.empty, self.short, self.deep = empty, nn.Linear(20, 3), nn.Linear(20, 3)

    def forward(self, x):
        keep = self.empty(x).bernoulli_(0.6).div_(0.6) if self.training else 1.0
        return self.short(x) + self.deep(x) * keep


class Forgetful(Shallow):
    """Draws into a tensor and then uses that tensor."""

    def forward(self, x):
        keep = self.empty(x)
        if self.training:
            keep.bernoulli_(0.6)
        return self.short(x) + self.deep(x) * (keep if self.training else 1.0)


class Dropping(nn.Module):
    """Attention whose weights are dropped."""

    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(4, 4), nn.Linear(20, 3)

    def forward(self, x):
        rows = self.project(x.unflatten(1, (5, 4)))[:, None]
        p = 0.4 if self.training else 0.0
        return self.head(F.scaled_dot_product_attention(rows, rows, rows, dropout_p=p).flatten(1))


MODELS = {
    "Dropout": lambda: nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)),
    "AlphaDropout": lambda: nn.Sequential(nn.Linear(20, 16), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(16, 3)),
    "Dropout1d": lambda: nn.Sequential(nn.Unflatten(1, (5, 4)), nn.Dropout1d(0.5), nn.Flatten(), nn.Linear(20, 3)),
    "FeatureAlphaDropout": lambda: nn.Sequential(
        nn.Unflatten(1, (5, 4)), nn.FeatureAlphaDropout(0.4), nn.Flatten(), nn.Linear(20, 3)
    ),
    "randn_like": lambda: Blurred(20, 3),
    "new_empty, bernoulli_": lambda: Shallow(lambda x: x.new_empty(len(x), 1)),
    "empty, bernoulli_": lambda: Shallow(lambda x: torch.empty(len(x), 1)),
    "attention": Dropping,
}


def task_of(model, sizes=(3, 9, 6), **options):
    draw = torch.Generator().manual_seed(1)
    n = sum(sizes)
    x, y = torch.randn(n, 20, generator=draw), torch.randint(0, 3, (n,), generator=draw)
    data = from_tensors(x, y, x, y, classes=3)
    split = fv.Split(np.arange(n), np.cumsum([0, *sizes]), "ragged", max_records=9)
    return fv.Task(model, data, split, **options)


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_a_run_repeats_whatever_the_stack_is(name):
    """Batches of 4 leave rests, so padding is there in stacks and not in single clients."""
    task = task_of(made(name))
    assert task.noisy
    assert task.stackable
    runs = [fv.run(task, fv.FedAvg(local=LOCAL), rounds=3, engine=LocalEngine(stack=n)).weights for n in (1, 3, 2)]
    for other in runs[1:]:
        torch.testing.assert_close(runs[0], other, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(runs[0], fv.run(task, fv.FedAvg(local=LOCAL), rounds=3, seed=1).weights)


@pytest.mark.parametrize("name", MODELS)
def test_noise_is_off_in_evaluation_and_on_in_training(name):
    model = made(name)
    task = task_of(model)
    x, ones = task.x, torch.ones(len(task.x))
    torch.testing.assert_close(task.f(task.initial, x), model.eval()(x).detach())
    empty = torch.empty(0)
    first, again, other = (task.train_f(task.initial, empty, x, ones, torch.tensor(k))[0] for k in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, task.f(task.initial, x))


def test_a_layer_in_eval_mode_drops_nothing():
    assert not task_of(made("Dropout").eval()).noisy


def test_units_are_kept_with_their_probability_and_scaled():
    x = torch.ones(1000, 50)
    with Seeded(torch.tensor(3)):
        found, second = F.dropout(x, 0.3), F.dropout(x, 0.3)
        channels = F.dropout2d(torch.ones(500, 20, 3, 3), 0.3)
        normal, uniform = torch.randn_like(x), torch.rand(1000, 50)
    assert found.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert float((found > 0).float().mean()) == pytest.approx(0.7, abs=0.01)
    assert not torch.equal(found, second), "each layer has draws of its own"
    assert ((channels == 0).flatten(2).all(-1) | (channels > 0).flatten(2).all(-1)).all()
    assert float((channels > 0).float().mean()) == pytest.approx(0.7, abs=0.02)
    assert float(normal.mean()) == pytest.approx(0, abs=0.02)
    assert float(normal.std()) == pytest.approx(1, abs=0.02)
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01)


def test_draws_into_a_tensor_have_their_distributions():
    with Seeded(torch.tensor(3)):
        held = torch.empty(50_000)
        assert held.bernoulli_(0.3) is held
        assert float(held.mean()) == pytest.approx(0.3, abs=0.01)
        uniform, normal, waits = (torch.empty(50_000) for _ in range(3))
        uniform.uniform_(-1, to=3)
        normal.normal_(2, std=0.5)
        waits.exponential_(4)
    assert float(uniform.min()) == pytest.approx(-1, abs=0.01)
    assert float(uniform.mean()) == pytest.approx(1, abs=0.03)
    assert (float(normal.mean()), float(normal.std())) == pytest.approx((2, 0.5), abs=0.02)
    assert float(waits.min()) > 0
    assert (float(waits.mean()), float(waits.std())) == pytest.approx((0.25, 0.25), abs=0.01)


def test_channels_of_feature_alpha_dropout_are_dropped_as_one_and_keep_their_moments():
    x = torch.randn(2000, 20, 3, generator=torch.Generator().manual_seed(0))
    with Seeded(torch.tensor(3)):
        found = F.feature_alpha_dropout(x, 0.3, training=True)
    dropped = found == found.flatten().mode().values
    assert bool((dropped.all(-1) | ~dropped.any(-1)).all())
    assert float(dropped.all(-1).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert (float(found.mean()), float(found.std())) == pytest.approx((0, 1), abs=0.03)


def test_one_tensor_never_holds_the_draws_of_a_stack():
    with pytest.warns(UserWarning, match="cannot be stacked and trains one client at a time"):
        task = task_of(Forgetful(lambda x: torch.empty(len(x), 1)))
    assert not fv.run(task, fv.FedAvg(local=LOCAL), rounds=1).ledger.rows[0].missing


def test_what_a_record_draws_does_not_depend_on_those_behind_it():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    with Seeded(torch.tensor(3)):
        six = F.dropout(x, 0.5)
    with Seeded(torch.tensor(3)):
        four = F.dropout(x[:4], 0.5)
    assert torch.equal(six[:4], four)


def test_clients_rounds_and_steps_have_draws_of_their_own():
    task = task_of(nn.Sequential(nn.Linear(20, 3), nn.Dropout(0.5)))
    seen = []
    train_f = task.train_f

    def noted(w, statistics, x, mask, key):
        seen.append(int(key))
        return train_f(w, statistics, x, mask, key)

    task.train_f, task.stackable = noted, False
    fv.run(task, fv.FedAvg(local=LOCAL), rounds=2)
    taken = 2 * (1 + 3 + 2)  # rounds, and the steps of each client
    assert len(seen) == len(set(seen)) == taken


def test_attention_without_dropout_is_that_of_pytorch():
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.float().log()}, {"scale": 0.3}):
        found = Seeded(torch.tensor(0))._attention(q, k, v, dropout_p=0.0, **options)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, **options))
    found = Seeded(torch.tensor(0))._attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_dropout_that_cannot_be_seeded_is_off_with_a_notice():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True), nn.Linear(20, 3)

        def forward(self, x):
            rows = x.unflatten(1, (5, 4))
            return self.head(self.attention(rows, rows, rows, need_weights=False)[0].flatten(1))

    with pytest.warns(UserWarning, match="dropout inside 'attention' cannot be seeded and is off"):
        task = task_of(Attending())
    assert not task.noisy


def test_private_training_drops_units_of_each_record_by_itself():
    task = task_of(made("Dropout"))
    private = fv.DpSgd(noise=1e-6, clip=1e3, delta=1e-5)
    method = fv.FedAvg(local=fv.LocalTraining(lr=0.1, batch=9, steps=1), privacy=private)
    dropped = fv.run(task, method, rounds=1, insecure_test_noise=1).weights
    plain = fv.run(task_of(made("Dropout").eval()), method, rounds=1, insecure_test_noise=1).weights
    assert not torch.allclose(dropped, plain, atol=1e-4)
    again = fv.run(task, method, rounds=1, insecure_test_noise=1, engine=LocalEngine(stack=1)).weights
    torch.testing.assert_close(dropped, again, rtol=1e-4, atol=1e-5)


def test_probes_and_synthetic_fits_drop_nothing():
    noisy, plain = task_of(made("Dropout")), task_of(made("Dropout").eval())
    for method in (fv.Baffle(directions=4), fv.FedLap(images=1, batches=1, steps=2, passes=1, image_lr=0.1)):
        found = [fv.run(task, method, rounds=1).weights for task in (noisy, plain)]
        assert torch.equal(*found)


def test_the_masks_of_a_record_do_not_depend_on_the_other_records_of_a_private_batch():
    """Or leaving out a record would change the gradients of others, and move the sum by more than one clip."""
    task = task_of(made("Dropout"))
    silent = fv.DpSgd(noise=1e-12, clip=1.0)

    def total(records):
        task.clients = fv.Split(np.array(records), np.array([0, len(records)]), "own", max_records=9)
        stack = fv.ClientStack(task, (0,), 1, fv.Seed.root(0), fv.Seed.root(9), [fv.Slots()], [{}])
        pieces = [(1, [fv.Seed.root(5)])]  # the same secrets each time; a batch of 9 in 9 draws every record
        return silent.gradients(stack, task.initial[None], 9, pieces, training=True)() * 9

    whole = total([0, 1, 2, 3, 4])
    for left_out in range(5):
        without = total([k for k in range(5) if k != left_out])
        assert float((whole - without).norm()) <= 1 + 1e-5
        torch.testing.assert_close(whole - without, total([left_out]), rtol=1e-3, atol=1e-5)
