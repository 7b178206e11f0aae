"""PowerSGD: two factors, each averaged, and a power iteration that goes on from round to round."""

import pytest
import torch

import fedveil as fv
from methods.matrix import LOCAL, task

FULL = fv.LocalTraining(lr=0.2, batch=100)


def ran(method: fv.Averaging, rounds: int = 2, **sampling: float) -> fv.Result:
    return fv.run(task(), method, rounds=rounds, cohort=fv.CohortSampler(**{"size": 6} | sampling))


def test_the_full_rank_gives_the_mean_update():
    """Layers are 16 × 6 and 3 × 16, so that rank 6 loses nothing."""
    plain, low = ran(fv.FedAvg(LOCAL)), ran(fv.FedAvg(LOCAL, up=fv.PowerSgd(6)))
    torch.testing.assert_close(low.weights, plain.weights, atol=1e-5, rtol=0)


def test_one_round_by_hand():
    """The decoded layer is P̂ P̂ᵀ M of the mean matrix M, with P̂ from Q, which both sides can draw."""
    codec = fv.PowerSgd(1)
    mean = ran(fv.FedAvg(LOCAL), 1).weights - task().initial
    got = ran(fv.FedAvg(LOCAL, up=codec), 1).weights - task().initial
    basis = codec.factors(task(), codec.broadcast(task(), None)["basis"], left=False)
    want = mean.clone()
    for (at, n, m, _), q in zip([layer for layer in codec.layers(task()) if layer[-1]], basis, strict=True):
        matrix = mean[at].view(n, m)
        p = torch.linalg.qr(matrix @ q)[0]
        want[at] = (p @ (p.T @ matrix)).flatten()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_the_iteration_goes_on_from_round_to_round():
    """On the same matrix every round, the error falls to that of the best approximation, which the SVD gives."""
    codec, draw = fv.PowerSgd(2), fv.Seed.root(1).torch()
    matrix = torch.randn(16, 6, generator=draw)
    update = torch.zeros_like(task().initial)
    update[: matrix.numel()] = matrix.flatten()
    kept, errors = None, []
    for _ in range(30):
        basis = codec.factors(task(), codec.broadcast(task(), kept)["basis"], left=False)[0]
        left = torch.linalg.qr(matrix @ basis)[0]
        rest = torch.linalg.qr(torch.zeros(3, 2) + torch.eye(3, 2))[0]
        tuned = codec.at(task(), fv.PowerSgd.agreement(torch.cat([left.flatten(), rest.flatten()])), fv.Seed.root(0))
        decoded, kept = tuned.merge(task(), tuned.encode(task(), update[None], update[None], [], None), 1)
        errors.append(float(torch.linalg.norm(decoded - update)))
    singular = torch.linalg.svdvals(matrix)
    best = float(singular[2:].square().sum().sqrt())
    assert errors[0] > 1.1 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_feedback_sends_later_what_a_low_rank_loses():
    """Full-batch training towards one point: with feedback rank 1 comes closer to where plain averaging arrives."""
    plain = ran(fv.FedAvg(FULL), 30).weights
    lost, kept = (ran(fv.FedAvg(FULL, up=fv.PowerSgd(1), feedback=feedback), 30).weights for feedback in (False, True))
    assert torch.linalg.norm(kept - plain) < 0.8 * torch.linalg.norm(lost - plain)


def test_both_factors_are_summed_securely():
    clear, secure = (ran(fv.FedAvg(LOCAL, up=fv.PowerSgd(2), secure=how), 2) for how in (None, fv.SecureSum(clip=4.0)))
    stages = ["keys", "shares", "dealt", "masked", "unmask"]
    assert [[stage.stage for stage in row.secure] for row in secure.ledger.rows] == [stages * 2] * 2
    torch.testing.assert_close(secure.weights, clear.weights, atol=1e-3, rtol=0)


def test_it_sends_less_than_raw_and_as_much_as_was_forecast():
    raw, low = (ran(fv.FedAvg(LOCAL, up=codec)).ledger.rows[0].bytes_up for codec in (fv.Raw(), fv.PowerSgd(1)))
    assert low < raw


def test_what_has_no_matrix_or_no_rank_is_refused():
    with pytest.raises(ValueError, match="rank is 0"):
        fv.PowerSgd(0)
    model = torch.nn.LayerNorm(6)
    alone = fv.Task(model, task().data, task().clients)
    with pytest.raises(ValueError, match="factorizes matrices, and this model has none"):
        fv.PowerSgd().validate(alone)


def test_clients_that_drop_out_between_the_exchanges_are_left_out():
    result = ran(fv.FedAvg(LOCAL, up=fv.PowerSgd(2), feedback=True), 6, drop=0.2)
    assert any(row.missing for row in result.ledger.rows)
    assert bool(torch.isfinite(result.weights).all())


def test_a_resumed_run_goes_on_with_the_basis(tmp_path):
    method = fv.FedAvg(LOCAL, up=fv.PowerSgd(1), feedback=True)
    whole = fv.run(task(), method, rounds=4, cohort=6, folder=tmp_path / "whole")
    fv.run(task(), method, rounds=2, cohort=6, folder=tmp_path / "parts")
    parts = fv.run(task(), method, rounds=4, cohort=6, folder=tmp_path / "parts")
    assert torch.equal(whole.weights, parts.weights)
