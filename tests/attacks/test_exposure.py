"""What messages expose: records are rebuilt where they can be, guesses and controls stand beside, and nobody cheats."""

import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch

import fedveil as fv
from attack_tools import attacked, run, seen_in, truths_in, without_records
from fedveil.attacks import exposure
from fedveil.attacks.audit import Audit, verdicts
from fedveil.attacks.exposure import FOUND, INCONCLUSIVE, NOT_FOUND, Attack, attempts, control, scored
from fedveil.attacks.inversion import Inversion
from fedveil.attacks.matrix import Case, task_of

QUICK = Attack(Inversion(steps=150, tv=1e-4), victims=3, seconds=600)
ONE = fv.LocalTraining(lr=0.1)


@cache
def task(records: int = 1) -> fv.Task:
    return task_of(Case("digits", fv.FedSGD(), records, small=True), fv.load("digits"), fv.Seed.root(0))


@cache
def checked():
    return control(task(), QUICK.inversion, fv.Seed.root(1))


def exposed(folder, method: fv.Method, records: int = 1, how: Attack = QUICK, **options):
    """The rows of a run, by kind."""
    own = task(records)
    seen, truths = attacked(folder, own, method, rounds=1, cohort=4, **options)
    rows, pictures = scored(own, seen, attempts(seen, how), truths, checked())
    return {row.kind: row for row in rows}, pictures


def test_the_control_rebuilds_single_records_from_their_gradients():
    assert checked().identified.value == 1
    assert checked().labels.value == 1
    assert checked().psnr.value > 30


def test_raw_gradients_of_single_records_are_inverted_and_guesses_do_not_find_them(tmp_path):
    rows, pictures = exposed(tmp_path, fv.FedSGD())
    row = rows["raw"]
    assert (row.verdict, row.messages, row.records, row.rounds) == (FOUND, 3, 1, [1])
    assert row.cosine.value == pytest.approx(1, abs=1e-5)
    assert row.reached.psnr.value > 30
    assert row.baselines["mean"].identified.value == 0
    assert row.baselines["nearest"].psnr.value < row.reached.psnr.value
    drawn = pictures["raw"]
    assert drawn.true.shape == drawn.found.shape == drawn.nearest.shape == (3, 1, 8, 8)
    assert (drawn.true - drawn.found).square().mean() < (drawn.true - drawn.nearest).square().mean() / 5


def test_noise_leaves_nothing_to_find_although_the_control_works(tmp_path):
    private = fv.DpSgd(noise=20.0, clip=0.1, delta=1e-2)
    rows, _ = exposed(tmp_path, fv.FedAvg(ONE, privacy=private))
    row = rows["raw"]
    assert row.verdict == NOT_FOUND
    assert "its control works" in row.why
    assert row.cosine.value < 0.5  # of the gradient of the records, not of the noised update that was sent


def test_local_steps_are_simulated(tmp_path):
    method = fv.FedAvg(fv.LocalTraining(lr=0.1, batch=1, epochs=1))
    rows, _ = exposed(tmp_path, method, records=2, how=replace(QUICK, victims=1))
    assert "by a simulation of 2 local steps" in rows["raw"].why


def test_a_secure_sum_of_single_records_is_a_batch_and_masked_vectors_are_noise(tmp_path):
    rows, _ = exposed(tmp_path, fv.FedAvg(ONE, secure=fv.SecureSum()))
    assert set(rows) == {"sum", "masked"}
    assert rows["sum"].records == 4
    assert rows["sum"].cosine.value > 0.99
    assert rows["masked"].verdict == NOT_FOUND
    assert rows["masked"].reached is None


def test_a_mask_that_is_missing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("fedveil.privacy.secagg.masks.mask", lambda *_: None)
    rows, _ = exposed(tmp_path, fv.FedAvg(ONE, secure=fv.SecureSum()), how=replace(QUICK, inversion=Inversion(steps=1)))
    assert rows["masked"].verdict == FOUND
    assert "the mask does not hide them" in rows["masked"].why


def test_a_code_that_loses_nothing_is_noticed(tmp_path):
    packed = fv.FedAge(ONE, up=fv.FedAgeCodec(block=16, cohort=5, code="packed"))
    rows, _ = exposed(tmp_path, packed, how=replace(QUICK, inversion=Inversion(steps=5)))
    assert rows["code"].verdict == FOUND
    assert "decodes the codes of single clients" in rows["code"].why


def test_a_failed_control_and_a_lack_of_time_are_inconclusive_and_never_not_found(tmp_path):
    method = fv.FedSGD()
    seen, truths = attacked(tmp_path, task(), method, rounds=1)
    weak = attempts(seen, replace(QUICK, inversion=Inversion(steps=1)))
    bad = control(task(), Inversion(steps=1), fv.Seed.root(1))
    (row,), _ = scored(task(), seen, weak, truths, bad)
    assert (row.verdict, "control failed" in row.why) == (INCONCLUSIVE, True)
    late = attempts(seen, replace(QUICK, seconds=0.0))
    (row,), _ = scored(task(), seen, late, truths, checked())
    assert row.verdict == INCONCLUSIVE
    assert "raise --budget-seconds" in row.why


def test_records_that_are_found_when_time_runs_out_are_found_and_say_so(tmp_path):
    seen, truths = attacked(tmp_path, task(), fv.FedSGD(), rounds=1)
    (made,) = attempts(seen, QUICK)
    (row,), _ = scored(task(), seen, [replace(made, found=replace(made.found, finished=False))], truths, checked())
    assert (row.verdict, row.why.endswith("; time ran out before the attack ended")) == (FOUND, True)


def test_a_device_without_memory_is_a_sentence(tmp_path, monkeypatch):
    seen, truths = attacked(tmp_path, task(), fv.FedSGD(), rounds=1)

    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(exposure, "invert", full)
    (row,), _ = scored(task(), seen, attempts(seen, QUICK), truths, checked())
    assert row.verdict == INCONCLUSIVE
    assert row.why == (
        "no attack on records: the device ran out of memory on 3 messages of 1 records; use fewer --victims"
    )


def test_attacks_do_not_see_the_truth(tmp_path):
    """Without the truth and without anybody's records the same attempts are made, bit for bit."""
    method = fv.FedSGD()
    run(tmp_path, task(), method, rounds=1)
    how = replace(QUICK, inversion=Inversion(steps=20, restarts=2, screen=5))
    before = attempts(seen_in(tmp_path, task(), method, rounds=1), how)
    assert truths_in(tmp_path)
    shutil.rmtree(tmp_path / "truth")
    after = attempts(seen_in(tmp_path, without_records(task()), method, rounds=1), how)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.found.x, b.found.x)
        assert torch.equal(a.labels, b.labels)


def test_victims_are_drawn_by_the_seed_and_share_their_number_of_records(tmp_path):
    seen, _ = attacked(tmp_path, task(), fv.FedSGD(), rounds=2, cohort=6)
    found = exposure.estimates(seen)
    assert len(found) == 12
    first, records = exposure.victims(found, seen, replace(QUICK, victims=4))
    again, _ = exposure.victims(found, seen, replace(QUICK, victims=4))
    other, _ = exposure.victims(found, replace(seen, seed=fv.Seed.root(9)), replace(QUICK, victims=4))
    key = lambda chosen: [(each.round, each.clients) for each in chosen]  # noqa: E731
    assert records == 1
    assert key(first) == key(again) != key(other)
    assert len(exposure.victims(found, seen, replace(QUICK, victims=9, records=2))[0]) == 2


def test_where_no_record_can_be_rebuilt_candidates_decide(tmp_path):
    own = task()
    body = fv.Task(own.model, own.data, own.clients, trainable=["0.*"])  # without the last layer
    for name, method, verdict in (
        ("slopes", fv.Baffle(directions=8), FOUND),
        ("noise", fv.FedAvg(ONE, privacy=fv.DpSgd(noise=50.0, clip=0.1, delta=1e-2)), NOT_FOUND),
    ):
        seen, truths = attacked(tmp_path / name, body, method, rounds=1, cohort=4)
        (row,), _ = scored(body, seen, attempts(seen, QUICK), truths, None)
        assert (row.verdict, row.reached) == (verdict, None)
        assert "candidates" in row.why
        (told,) = verdicts(Audit(1, 0, 1e-5, None, {}, None, None, None, [], messages=[row]))
        assert told.verdict == verdict
        assert "picked from a list" in told.sentence
