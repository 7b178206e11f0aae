"""Private slopes: what one record can change, how much noise there is, and what an answer costs."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.core.clients import Refused
from fedveil.core.directions import words
from fedveil.data import from_tensors
from fedveil.methods.baffle import private
from fedveil.methods.baffle.baffle import Probe, Slopes
from fedveil.privacy.accountant import Noised, epsilon
from fedveil.privacy.dpsgd import GRID, WITHIN, DpSgd
from fedveil.runs import recipe
from methods.baffle.probes import linear_task, stack
from privacy.test_dpsgd import stack_of

KEY = 1234567
HOW = DpSgd(noise=1.5, clip=0.2, delta=1e-3)
QUIET = DpSgd(noise=1e-9, clip=0.2, delta=1e-3)
PLAIN = {"server": fv.ServerOptimizer("plain", 0.5), "clip": None}


def baffle(**options) -> fv.Baffle:
    return fv.Baffle(**{"directions": 6, "sigma": 1e-3, "privacy": HOW, **options})


def each(task: fv.Task, rows, count: int = 6, key: int = KEY) -> torch.Tensor:
    """(ℓ(w + σ z_k) - ℓ(w)) / σ of each record over √K, a record and a direction after the other, [records, K]."""
    z = baffle(directions=count).prober(task)._rows(torch.tensor([key]), 0, count)[0]
    w, found = task.initial.double(), torch.zeros(len(rows), count, dtype=torch.float64)
    for i, row in enumerate(rows):
        x, y = task.x[row : row + 1].double(), task.y[row : row + 1]
        for k in range(count):
            moved = torch.add(task.initial, z[k], alpha=1e-3).double()
            found[i, k] = (task.losses(moved, x, y) - task.losses(w, x, y)).sum() / 1e-3
    return found / math.sqrt(count)


def cut(rows: torch.Tensor, clip: float) -> torch.Tensor:
    return rows * (WITHIN * clip / rows.norm(dim=1, keepdim=True).clamp(min=WITHIN * clip))


def summed(task: fv.Task, rows, how: DpSgd = HOW, count: int = 6, **options) -> torch.Tensor:
    """The noiseless sum of clipped slopes of some records as one client's, [K]."""
    index = torch.tensor(rows)[None]
    prober, keys = baffle(directions=count, **options).prober(task), torch.tensor([KEY])
    mask = torch.ones(1, len(rows))
    return private.slopes(how, prober, task.initial, keys, task.x[index], task.y[index], mask, count)[0]


# ---------------------------------------------------------------------------------------------------- clipping


def test_the_sum_is_that_of_each_records_own_clipped_slopes():
    task, rows = linear_task(), [0, 5, 7, 11]
    own = each(task, rows)
    assert (own.norm(dim=1) > 0.2).any()
    torch.testing.assert_close(summed(task, rows), cut(own, 0.2).sum(0), atol=1e-9, rtol=1e-7)
    wide = dataclasses.replace(HOW, clip=1e3)
    torch.testing.assert_close(summed(task, rows, wide), own.sum(0), atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("options", [{}, {"scheme": "central"}, {"slices": "layers"}, {"memory": 1}], ids=str)
@pytest.mark.parametrize("clip", [1e-3, 0.2, 10.0])
def test_one_record_moves_the_sum_by_the_clip_at_most(clip, options):
    """Left out, so that the others run in a pass of another shape."""
    task, how = linear_task(), dataclasses.replace(HOW, clip=clip)
    whole = list(range(12))
    total, moved = summed(task, whole, how, **options), []
    for row in whole:
        without = summed(task, [k for k in whole if k != row], how, **options)
        moved.append(float((total - without).norm()))
    assert max(moved) <= clip
    if clip < 0.1:
        assert min(moved) == pytest.approx(WITHIN * clip, rel=1e-6), "slopes should be above the clip"


def test_in_float32_the_other_records_would_move_too(monkeypatch):
    """Why models run in float64: what rounding a pass of another shape changes is divided by σ."""
    task = _images()
    how, options = dataclasses.replace(HOW, clip=1.0), {"sigma": 1e-4, "count": 20}
    both = []
    for keep in (True, False):
        if not keep:
            monkeypatch.setattr(private, "replace", lambda prober, **_: prober)
        a, b = summed(task, list(range(19)), how, **options), summed(task, list(range(18)), how, **options)
        alone = summed(task, [18], how, **options)
        both.append(float((a - b - alone).norm()))
    assert both[0] < 1e-9 < 1e-6 < both[1]


def _images() -> fv.Task:
    draw = fv.Seed.root(0).torch()
    x, y = torch.randn(24, 1, 8, 8, generator=draw), torch.randint(3, (24,), generator=draw)
    data = from_tensors(x, y, x, y, classes=3)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 3))
    split = fv.split("iid", data, 2, fv.Seed.root(0))
    return fv.Task(model, data, dataclasses.replace(split, max_records=split.largest))


def test_a_record_whose_loss_is_no_number_counts_as_zero():
    task = linear_task()
    task.x[3] = torch.nan
    torch.testing.assert_close(summed(task, [2, 3, 4]), summed(task, [2, 4]), atol=1e-9, rtol=0)


def test_whole_slopes_are_whole_and_no_longer_than_the_clip():
    task, how = linear_task(), dataclasses.replace(HOW, mechanism="skellam")
    for row in range(6):
        whole = summed(task, [row], how)
        assert torch.equal(whole, whole.trunc())
        assert float(whole.norm()) <= GRID
        torch.testing.assert_close(whole * (0.2 / GRID), summed(task, [row]), atol=1e-8, rtol=0)


# ---------------------------------------------------------------------------------------------------- draws and noise


@pytest.mark.parametrize("seeds", ["shared", "own"])
def test_an_answer_is_the_mean_over_the_expected_batch_of_what_was_drawn(seeds):
    task, clients = linear_task(), stack(linear_task())
    method = baffle(privacy=QUIET, batch=3, seeds=seeds)
    index, mask = private.drawn(QUIET, clients, 3, clients.secrets("slopes"))
    assert len({tuple(row) for row in mask.tolist()}) > 1
    answers = method.probe(clients, task.initial, Probe(task.initial, KEY, 6))
    for k, answer in enumerate(answers):
        rows = index[k][mask[k] > 0].tolist()
        key = KEY if seeds == "shared" else int(words(torch.tensor([KEY]), torch.tensor([k])))
        expected = cut(each(task, rows, key=key), 0.2).sum(0) * math.sqrt(6) / 3
        torch.testing.assert_close(answer.slopes, expected.float(), atol=1e-6, rtol=1e-5)
        assert answer.records == 1, "how many records a client has is private"


def test_noise_has_the_deviation_of_the_clip_times_sigma_over_the_batch():
    task, how = linear_task(), DpSgd(noise=2.0, clip=1e-6, delta=1e-3)
    method, drawn = baffle(directions=40, privacy=how, batch=3), []
    for draw in range(50):
        clients = dataclasses.replace(stack_of(task), secret=fv.Seed.root(draw))
        drawn += [a.slopes for a in method.probe(clients, task.initial, Probe(task.initial, KEY, 40))]
    noise = torch.stack(drawn).double()
    assert len(noise.unique(dim=0)) == 200
    expected = 2e-6 * math.sqrt(40) / 3
    assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * noise.numel()) + 0.01)


def test_an_empty_draw_is_noised_and_charged_like_any_other(monkeypatch):
    monkeypatch.setattr(DpSgd, "rate", lambda *_: 1e-9)
    task, charged = linear_task(), []
    clients = stack(task)
    clients.till = lambda account, number: charged.append((account.answer, number))
    answers = baffle(batch=3).probe(clients, task.initial, Probe(task.initial, KEY, 6))
    assert [number for _, number in charged] == [1]
    assert all(float(a.slopes.abs().min()) > 0 and bool(a.slopes.isfinite().all()) for a in answers)


@pytest.mark.parametrize("secure", [None, fv.SecureSum(clip=16.0)])
def test_a_client_over_its_budget_looks_at_no_record(monkeypatch, secure):
    def refuse(account, number):
        raise Refused("over budget", "no more")

    clients = stack(linear_task())
    clients.till = refuse
    monkeypatch.setattr(type(clients), "rows", property(lambda _: pytest.fail("records were looked at")))
    with pytest.raises(Refused, match="over budget"):
        baffle(batch=3, weak=2, secure=secure).probe(clients, clients.task.initial, Probe(clients.task.initial, KEY, 6))


# ---------------------------------------------------------------------------------------------------- the price


def test_an_answer_costs_what_a_step_of_dp_sgd_costs():
    task, how = linear_task(), DpSgd(noise=1.1, delta=1e-3)
    account = baffle(privacy=how, batch=3).client_cost(task)
    assert account == how.account(task, 3, 1)
    assert account.answer == Noised(1.1, 0.5, 1)
    assert account.spent(40) == epsilon([Noised(1.1, 0.5, 40)], 1e-3)
    assert account.spent(40) == pytest.approx(16.666, abs=0.001)
    assert baffle(privacy=how).client_cost(task).answer == Noised(1.1, 1.0, 1)  # all records


def test_whole_slopes_are_charged_for_as_many_numbers_as_there_are():
    how = dataclasses.replace(HOW, mechanism="skellam")
    answer = baffle(privacy=how, directions=4, batch=3).client_cost(linear_task()).answer
    assert answer == how.account(linear_task(), 3, 1, size=4).answer != how.account(linear_task(), 3, 1).answer


def test_the_ledger_has_the_epsilon_and_the_budget_ends_the_run():
    how = dataclasses.replace(HOW, budget=epsilon([Noised(1.5, 0.5, 3)], 1e-3) * 1.0001)
    result = fv.run(linear_task(), baffle(privacy=how, batch=3, **PLAIN), rounds=5, cohort=4)
    assert len(result.ledger.rows) == 3
    assert result.ledger.rows[-1].epsilon == pytest.approx(epsilon([Noised(1.5, 0.5, 3)], 1e-3))


# ---------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "options",
    [{}, {"down": "replay"}, {"seeds": "own"}, {"secure": fv.SecureSum(clip=16.0, bits=40)}, {"weak": 3}],
    ids=str,
)
def test_with_a_wide_clip_and_hardly_any_noise_a_run_is_the_ordinary_one(options):
    task, wide = linear_task(), DpSgd(noise=1e-12, clip=1e3, delta=1e-3)
    common = {"directions": 6, "sigma": 1e-2, **PLAIN, **options}
    private_, plain = (fv.run(task, fv.Baffle(privacy=how, **common), rounds=3, cohort=4) for how in (wide, None))
    assert not any(row.missing for row in private_.ledger.rows)
    torch.testing.assert_close(private_.weights, plain.weights, atol=2e-4, rtol=0)
    assert float((plain.weights - task.initial).norm()) > 0.05


def test_clients_take_private_steps_as_the_server_does():
    """The noised coefficients go down, so nobody strays and nobody needs the weights."""
    result = fv.run(linear_task(), baffle(batch=3, down="replay"), rounds=4, cohort=4)
    assert not any(row.missing or row.metrics["resynced"] for row in result.ledger.rows)
    assert result.ledger.rows[-1].epsilon == pytest.approx(epsilon([Noised(1.5, 0.5, 4)], 1e-3))


def test_uneven_clients_count_by_the_records_they_draw_and_say_nothing_of_how_many_they_have():
    task = linear_task(uneven=True)
    wide = DpSgd(noise=1e-12, clip=1e3, delta=1e-3)
    result = fv.run(task, fv.Baffle(directions=6, sigma=1e-2, privacy=wide, **PLAIN), rounds=1, cohort=4)
    plain = fv.run(task, fv.Baffle(directions=6, sigma=1e-2, **PLAIN), rounds=1, cohort=4)
    share = len(task.x) / (4 * task.largest)  # the mean is over as many as four of the largest client would have
    torch.testing.assert_close(result.weights - task.initial, share * (plain.weights - task.initial), atol=1e-4, rtol=0)


def test_the_server_refuses_a_private_answer_that_claims_records():
    sizes = baffle().schema(linear_task(), Probe(linear_task().initial, KEY, 6), 0)
    with pytest.raises(Refused, match="records is 2, the largest client has 1"):
        fv.core.schema.check(Slopes(torch.zeros(6), 2), sizes)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("options", [{"precision": "float16"}, {"losses": "float32"}], ids=str)
def test_other_precisions_are_refused(options):
    with pytest.raises(ValueError, match=r"method\.privacy runs the model in float64, so that no rounding"):
        baffle(**options)


class Fixed(nn.Module):
    """A layer that multiplies by a float32 matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("turn", torch.eye(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x @ self.turn)


def test_a_model_that_does_not_run_in_float64_is_refused():
    task = linear_task()
    task = fv.Task(Fixed(), task.data, task.clients)
    with pytest.raises(ValueError, match=r"runs the model in float64, which it does not \(RuntimeError\)"):
        baffle().init_state(task)
    dataclasses.replace(baffle(), privacy=None).init_state(task)


def test_user_level_privacy_is_refused_with_what_to_use():
    with pytest.raises(ValueError, match=r"baffle sends slopes of the loss; use baffle-epochs"):
        recipe.read("digits/baffle-clear", ["method.user_privacy.noise=1.0"])
