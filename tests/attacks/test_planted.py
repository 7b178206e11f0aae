"""Planted weights: they read records out of gradients and sums, and what stops them does."""

import copy
import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

import fedveil as fv
from fedveil.attacks.planted import expected, imprint, imprinted, plant, read, recovered, rob
from fedveil.core import message
from fedveil.links.down import Train
from fedveil.methods.fedsgd import FedSGD
from fedveil.models import build, drawing_from
from fedveil.privacy.secagg import server as summing
from fedveil.privacy.secagg.context import Context
from fedveil.privacy.secagg.masks import FixedPoint
from fedveil.privacy.secagg.records import tensor
from privacy.secagg.sums import Transport

SEED = fv.Seed.root(0)
RECORDS, CLIENTS, BINS = 64, 5, 512
VICTIM = 2


@functools.cache
def task(bins: int = BINS, cnn: bool = False) -> fv.Task:
    """Five clients with 64 digits each."""
    data = fv.data.load("digits")
    order = SEED.numpy().permutation(len(data.x))[: RECORDS * CLIENTS]
    split = fv.Split(order, np.arange(CLIENTS + 1) * RECORDS, "by hand", RECORDS)
    with drawing_from(SEED):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, bins), nn.ReLU(), nn.Linear(bins, 10))
        return fv.Task(
            imprinted(Own(build("digits-cnn", (1, 8, 8), 10)), (1, 8, 8), bins) if cnn else model, data, split
        )


def weights(of: fv.Task) -> torch.Tensor:
    """Planted with what the test records tell."""
    return plant(of, of.initial, of.test_x, SEED)


def records(*clients: int) -> torch.Tensor:
    return torch.cat([task().x[task().clients[k]] for k in clients])


@dataclass(frozen=True)
class First(fv.CohortSampler):
    """The first clients, always."""

    def draw(self, task: fv.Task, seed: fv.Seed) -> tuple[int, ...]:
        return tuple(range(self.size))


def robbed(method, clients: int = 1, planted: torch.Tensor | None = None, engine=None):
    """The records that a round gives away."""
    w = weights(task()) if planted is None else planted
    vector, row = rob(task(), method, w, First(clients), SEED, engine)
    return read(task(), w, vector), row


ONE_STEP = fv.LocalTraining(batch=RECORDS)


# ---------------------------------------------------------------------------------------------------- one client


@pytest.mark.parametrize(
    "method",
    [FedSGD(), fv.FedAvg(ONE_STEP), FedSGD(server=fv.ServerOptimizer("adam"))],
    ids=["fedsgd", "fedavg, one step", "adam at the server"],
)
def test_most_of_64_pictures_come_out_of_a_clients_answer(method):
    found, row = robbed(method)
    assert not row.missing
    assert int(recovered(found, records(0)).sum()) >= 48
    assert not recovered(found, records(1)).any(), "another client's are not there"
    wrong = ~recovered(records(0), found)
    assert int(wrong.sum()) <= 6, "what is read is a record, but for a few mixtures"


def test_reading_does_not_look_at_records():
    w, blind = weights(task()), copy.copy(task())
    vector, _ = rob(task(), FedSGD(), w, First(1), SEED)
    blind.x, blind.y = torch.zeros_like(task().x), torch.zeros_like(task().y)
    blind.data = dataclasses.replace(task().data, x=blind.x, y=blind.y)
    assert torch.equal(read(blind, w, vector), read(task(), w, vector))


def test_one_record_comes_out_exactly_whatever_it_is():
    w = weights(task())
    for x, y in zip(records(0)[:10], task().y[task().clients[0]][:10], strict=True):
        gradient, _ = task().gradient(w[None], x[None, None], y[None, None], torch.ones(1, 1))
        found = read(task(), w, gradient[0])
        assert found.shape == (1, 1, 8, 8)
        torch.testing.assert_close(found[0], x, atol=1e-4, rtol=1e-4)


def test_the_share_is_about_that_of_records_alone_in_a_bin():
    for bins in (128, 1024):
        of = task(bins)
        w = weights(of)
        shares = []
        for k in range(CLIENTS):
            rows = torch.from_numpy(of.clients[k])
            gradient, _ = of.gradient(w[None], of.x[rows][None], of.y[rows][None], torch.ones(1, RECORDS))
            shares.append(float(recovered(read(of, w, gradient[0]), records(k)).double().mean()))
        assert np.mean(shares) == pytest.approx(expected(RECORDS, bins), abs=0.12)


def test_what_planted_weights_look_like():
    of, names = task(), imprint(task())
    w = weights(of)
    before, parts = of.layout.split(of.initial), of.layout.split(w)
    rows, edges = parts[names.rows], -parts[names.biases]
    assert (rows == rows[0]).all()
    assert (edges[1:] > edges[:-1]).all()
    assert (parts[names.behind] == parts[names.behind][:, :1]).all()
    assert torch.equal(parts["3.bias"], before["3.bias"])
    through = (of.test_x.flatten(1) @ rows[0])[:, None] > edges
    assert through[:, 0].all(), "every record is in a bin"
    assert through.double().mean(0)[BINS // 2] == pytest.approx(0.5, abs=0.08)
    assert (of.f(w, of.test_x) - parts["3.bias"]).abs().max() < 0.1, "outputs stay about where they are"


class Own(nn.Sequential):
    """A network whose forward may do anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_network_that_begins_otherwise_can_be_given_the_module():
    of = task(BINS, True)
    w = weights(of)
    vector, _ = rob(of, FedSGD(), w, First(1), SEED)
    assert int(recovered(read(of, w, vector), records(0)).sum()) >= 48


@pytest.mark.parametrize(
    "method",
    [
        fv.FedAvg(fv.LocalTraining(batch=8)),
        FedSGD(up=fv.Qsgd(bits=8)),
        FedSGD(up=fv.TopK(0.1)),
        FedSGD(privacy=fv.DpSgd(noise=1.0, clip=1.0, delta=1e-3)),
    ],
    ids=["eight local steps", "qsgd", "top-k", "dp"],
)
def test_what_defeats_exact_recovery(method):
    found, row = robbed(method)
    assert not row.missing
    assert int(recovered(found, records(0)).sum()) <= 5


def test_weights_that_are_not_planted_give_nothing_away():
    found, _ = robbed(FedSGD(), planted=task().initial)
    assert not recovered(found, records(0)).any()
    found = read(task(), weights(task()), torch.randn(task().layout.size, generator=SEED.torch()))
    assert len(found) < BINS / 20, "quotients of noise do not fall into their own bins"
    assert not recovered(found, records(0)).any()


def test_recovered_is_within_a_ten_thousandth_of_the_variance():
    own = records(0)
    spread = own.std()
    for error, near in ((0.005, True), (0.02, False)):
        changed = own.flip(0) + error * spread * torch.randn(own.shape, generator=SEED.torch())
        assert recovered(changed, own).tolist() == [near] * RECORDS
    assert not recovered(own[:0], own).any()
    assert recovered(own[:1], own[:1]).all()
    assert expected(1, 10) == 1
    assert expected(3, 10) == pytest.approx(0.81)


# ---------------------------------------------------------------------------------------------------- secure sums


@pytest.mark.parametrize("server", ["curious", "malicious"])
def test_a_secure_sum_does_not_stop_weights_that_all_clients_get(server):
    """It fills the bins with the records of all: as many come out as of a sum in the clear."""
    everybody = records(*range(CLIENTS))
    clear, _ = robbed(FedSGD(), CLIENTS)
    found, row = robbed(FedSGD(secure=fv.SecureSum(server=server)), CLIENTS)
    assert not row.missing
    share = float(recovered(found, everybody).double().mean())
    assert share == pytest.approx(float(recovered(clear, everybody).double().mean()), abs=0.02)
    assert share == pytest.approx(expected(RECORDS * CLIENTS, BINS), abs=0.08)
    assert share < 0.6 < float(recovered(robbed(FedSGD())[0], records(0)).double().mean())


def others_get_dead_weights(client: int, question):
    """Everybody but the victim is asked with weights at which no record gets through the first layer."""
    if client == VICTIM or not (isinstance(question, Train) or getattr(question, "asked", None) == Train.kind):
        return question
    if isinstance(question, Train):
        return replace(question, weights=dead(question.weights))
    inner = message.unpack(question.question.numpy().data, Train)
    return replace(question, question=tensor(message.pack(replace(inner, weights=dead(inner.weights)))))


def dead(w: torch.Tensor) -> torch.Tensor:
    parts = {name: part.clone() for name, part in task().layout.split(w).items()}
    parts[imprint(task()).biases].fill_(-1e3)
    return task().layout.join(parts)


def of_the_victim(method) -> tuple[int, dict[str, str]]:
    """How many of the victim's records a server gets that asks everybody else with dead weights."""
    found, row = robbed(method, CLIENTS, engine=Transport(ask=others_get_dead_weights))
    return int(recovered(found, records(VICTIM)).sum()), row.missing


@pytest.fixture
def unscrupulous(monkeypatch) -> None:
    """The server leaves out its own checks of what it sums."""
    monkeypatch.setattr(FixedPoint, "check", lambda self, total, clients: None)
    monkeypatch.setattr(summing._Scene, "alike", lambda self, masked: dict(masked))


def test_control_without_a_secure_sum_one_client_is_singled_out():
    assert of_the_victim(FedSGD())[0] >= 48


def test_control_a_secure_sum_that_is_not_bound_to_the_question_is_broken(unscrupulous, monkeypatch):
    monkeypatch.setattr(Context, "asked", lambda self, basis, question: bytes(32))
    assert of_the_victim(FedSGD(secure=fv.SecureSum()))[0] >= 48


def test_a_secure_sum_stops_a_server_that_asks_one_client_differently(unscrupulous):
    """Masks of clients who were asked different things do not cancel: what comes out is noise."""
    count, missing = of_the_victim(FedSGD(secure=fv.SecureSum()))
    assert count == 0
    assert not missing, "the clients of a curious server do not see it"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_against_a_malicious_server_clients_refuse(unscrupulous):
    count, missing = of_the_victim(FedSGD(secure=fv.SecureSum(server="malicious")))
    assert count == 0
    assert len(missing) == CLIENTS


def test_an_honest_server_leaves_the_odd_client_out():
    count, missing = of_the_victim(FedSGD(secure=fv.SecureSum()))
    assert count == 0
    assert "out of step" in missing[str(VICTIM)]


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "model",
    [
        lambda: build("digits-cnn", (1, 8, 8), 10),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.ReLU(), nn.Linear(8, 10)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        lambda: Own(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)),
    ],
    ids=["convolution", "tanh", "no bias", "one layer", "a forward of its own"],
)
def test_a_model_without_a_suitable_layer_is_named(model):
    data = task().data
    other = fv.Task(model(), data, task().clients)
    with pytest.raises(ValueError, match=r"planting needs an nn.Sequential .* and this model begins with \w+.*; give"):
        plant(other, other.initial, other.test_x, SEED)


def test_a_pool_that_tells_no_quantiles_is_named():
    with pytest.raises(ValueError, match="the pool's 2 records measure alike, which tells no quantiles; give more"):
        plant(task(), task().initial, task().test_x[[0, 0]], SEED)
