"""Every kind of message becomes an estimate that is as near to the truth as the message allows, and no attack looks at
that truth."""

import shutil
from dataclasses import replace

import pytest
import torch

import fedveil as fv
from attack_tools import FULL, attacked, run, seen_in, truths_in, without_records
from codec_tools import image_task
from fedveil.attacks.estimate import KINDS, about, cosines, estimates, nothing, relative_errors, truth_of
from fedveil.methods.rules import Mismatch
from fedveil.methods.surrogates.sets import Surrogate
from methods import matrix
from toys import Twice, linear_task

SECURE = fv.SecureSum(clip=16.0, bits=30)
FEDLAP = fv.FedLap(images=2, passes=2, batches=5, batch=15, image_steps=5, steps=3, image_lr=1.0)
FEDAGE = fv.FedAgeCodec(block=16, cohort=5, code="linear")
FITTED = {
    "fedsynth": fv.FedSynthCodec(batches=2, batch=4, epochs=2, fits=60),
    "tofu": fv.TofuCodec(points=8, steps=100),
}
LEAST = {"raw": 0.9999, "half": 0.9999, "qsgd": 0.9, "zstd": 0.9, "powersgd": 0.8, "fedsynth": 0.5, "tofu": 0.5}
CLEAR = [
    *(("fedavg", codec) for codec in matrix.CODECS),
    *((method, "raw") for method in matrix.METHODS if method != "fedavg"),
    ("scaffold", "half"),
    ("q-fedavg", "fedage"),
    ("feddyn", "powersgd"),
]


def built(method: str, codec: str) -> fv.Averaging | None:
    """The method with this codec; None where a rule refuses them."""
    up = FITTED.get(codec, matrix.CODECS[codec])
    try:
        made = matrix.METHODS[method](**{"local": matrix.LOCAL, **matrix.OWN.get(method, {}), "up": up})
        made.init_state(matrix.task())
    except Mismatch:
        return None
    return made


def check(folder, method: str, codec: str) -> None:
    """Estimates of every client in every round, as near as the clients said that their own messages decode."""
    made = built(method, codec)
    if made is None:
        return
    task = matrix.task()
    ledger = run(folder, task, made).ledger
    found, truths = estimates(seen_in(folder, task, made)), truths_in(folder)
    scores = cosines(task, found, truths)
    kinds = {"code", "difference"} if codec == "fedage" else {"code" if made.up.in_code_space else "decoded"}
    assert {each.kind for each in found} - {"control"} == (kinds if made.up.lossy else {"raw"})
    for row in ledger.rows:
        here = [(each, score) for each, score in zip(found, scores, strict=True) if each.round == row.round]
        own = {each.clients[0]: score for each, score in here if each.kind in ("raw", "decoded", "code")}
        assert set(own) == set(row.cohort)
        mean = sum(own.values()) / len(own)
        if codec == "powersgd":  # its first exchange tells more than what the server decodes
            assert row.metrics["cosine"] < mean < 1
        else:
            assert mean == pytest.approx(row.metrics.get("cosine", 1.0), abs=1e-3)
        if method == "fedavg":
            assert mean > LEAST.get(codec, 0.3)
        if codec == "fedage":  # half of the numbers are left
            assert mean == pytest.approx(0.5**0.5, abs=0.1)
            left_out = [score for each, score in here if each.kind == "difference"]
            assert sum(left_out) / len(left_out) == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize(("method", "codec"), CLEAR)
def test_messages_of_methods_that_average_are_decoded(tmp_path, method, codec):
    check(tmp_path, method, codec)


@pytest.mark.slow
@pytest.mark.parametrize("codec", matrix.CODECS)
@pytest.mark.parametrize("method", matrix.METHODS)
def test_messages_of_every_method_with_every_codec_are_decoded(tmp_path, method, codec):
    check(tmp_path, method, codec)


@pytest.mark.parametrize("cell", matrix.covering(), ids="-".join)
def test_each_pair_of_parts_is_read_one_by_one_or_as_a_sum(tmp_path, cell):
    """Privacy, the secure sum and what goes down change who is seen, and not whether messages can be read."""
    try:
        method = matrix.built(cell)
    except Mismatch:
        return
    name, codec, privacy, secure, _ = cell
    task = matrix.task()
    run(tmp_path, task, method)
    found, truths = estimates(seen_in(tmp_path, task, method)), truths_in(tmp_path)
    assert {each.kind for each in found} == {"sum"} or secure == "clear"
    assert "sum" not in {each.kind for each in found} or secure == "secure"
    assert {each.round for each in found} == {1, 2}
    noised = privacy == "user, by each client" or (privacy, secure) == ("user, in the sum", "secure")
    if not noised and codec not in FITTED:  # with the few steps that they have here, these tell nearly nothing
        exact = codec in ("raw", "half") and secure == "clear" and name not in ("scaffold", "fedsgd")
        assert min(cosines(task, found, truths)) > (0.9999 if exact else 0.0)


def test_a_sparse_update_keeps_the_share_of_its_energy_that_was_sent(tmp_path):
    task = image_task()
    seen, truths = attacked(tmp_path, task, fv.FedAvg(up=fv.TopK(share=0.2)), rounds=1)
    found = estimates(seen)
    wanted = []
    for each in found:
        true = truths[1][each.clients[0]]["update"]
        energy = true.square().sort(descending=True).values
        wanted.append(float((energy[: int((each.vector != 0).sum())].sum() / energy.sum()).sqrt()))
    assert cosines(task, found, truths) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("method", [FEDLAP, fv.FedDm(images=2, batches=3, batch=15, draws=5)], ids=["fedlap", "feddm"])
def test_a_synthetic_set_has_some_of_the_gradient(tmp_path, method):
    task = image_task()
    seen, truths = attacked(tmp_path, task, method)
    found = estimates(seen)
    assert {(each.kind, each.means, each.records) for each in found} == {("set", "gradient", 15)}
    scores = cosines(task, found, truths)
    assert min(scores) > (0.3 if method is FEDLAP else 0.0)


def test_calibrated_sets_have_the_lengths_that_clients_sent(tmp_path):
    task = image_task()
    method = fv.FedLap(images=2, passes=1, batches=2, batch=15, steps=1, region="fixed", calibrate=True)
    seen, truths = attacked(tmp_path, task, method, rounds=1)
    found = estimates(seen)
    lengths = [float(each.vector.norm() / truth_of(task, each, truths[1]).norm()) for each in found]
    assert lengths == pytest.approx([1.0] * 4, abs=1e-4)


def test_private_sets_do_not_state_a_number_of_records(tmp_path):
    base, held = image_task(), ((0, 1, 2),) * 4
    split = fv.Split(base.clients.order, base.clients.starts, "iid", 15, held)
    task = fv.Task(base.model, base.data, split)
    method = fv.FedLap(
        images=1, passes=1, batches=2, image_steps=1, region="fixed", init="noise", weighting="equal", privacy=matrix.DP
    )
    seen, _ = attacked(tmp_path, task, method, rounds=1)
    assert {each.records for each in estimates(seen)} == {None}


# ---------------------------------------------------------------------------------------------------- the truth

METHODS: dict[str, fv.Method] = {
    "fedavg": fv.FedAvg(FULL),
    "fedsgd": fv.FedSGD(),
    "scaffold": fv.Scaffold(FULL, up=fv.Half(), down=fv.Half()),
    "q-fedavg": fv.QFedAvg(FULL),
    "sparse": fv.FedAvg(up=fv.TopK(0.1), down=fv.Qsgd(), feedback=True),
    "tofu": fv.Tofu(up=fv.TofuCodec(points=2, steps=3)),
    "fedage": fv.FedAge(up=FEDAGE),
    "factors": fv.FedAvg(up=fv.PowerSgd()),
    "from init": fv.FedAvg(down=fv.FedSynthCodec(batches=2, batch=2, epochs=1, fits=3)),
    "full rounds": fv.FedAvg(up=fv.Qsgd(8), full_rounds=1),
    "fedlap": FEDLAP,
    "baffle": fv.Baffle(directions=8),
    "replay": fv.Baffle(directions=8, down="replay"),
    "secure": fv.FedAvg(secure=SECURE),
    "secure slopes": fv.Baffle(directions=8, secure=SECURE),
    "private sum": fv.FedAvg(user_privacy=matrix.USER),
}


@pytest.mark.parametrize("adversary", ["server", "client"])
@pytest.mark.parametrize("name", METHODS)
def test_estimates_are_the_same_without_the_truth_and_the_records(tmp_path, name, adversary):
    task, method = image_task(), METHODS[name]
    run(tmp_path, task, method)
    before = estimates(seen_in(tmp_path, task, method, adversary))
    shutil.rmtree(tmp_path / "truth")
    after = estimates(seen_in(tmp_path, without_records(image_task()), method, adversary))
    assert bool(before) is not bool(nothing(method, adversary))
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.vector, other.vector)
        assert torch.equal(one.weights, other.weights)
        assert (one.round, one.clients, one.kind, one.means, one.records) == (
            other.round,
            other.clients,
            other.kind,
            other.means,
            other.records,
        )


def test_another_client_sees_the_mean_of_those_who_took_part_only(tmp_path):
    task, method = image_task(), fv.FedAvg(FULL)
    seen, truths = attacked(tmp_path, task, method, "client")
    found = estimates(seen)
    assert [(each.round, each.clients, each.kind) for each in found] == [(1, (), "sum"), (2, (), "sum")]
    assert min(cosines(task, found, truths)) > 0.9999
    assert max(relative_errors(task, found, truths)) < 1e-3


def test_the_truth_of_a_sum_is_the_mean_by_records_or_of_clients_that_count_the_same(tmp_path):
    task = linear_task(uneven=True)
    for name, method, even in (("records", fv.FedAvg(FULL), False), ("even", fv.Scaffold(FULL), True)):
        seen, truths = attacked(tmp_path / name, task, method, "client", rounds=1)
        found = estimates(seen)
        assert [each.even for each in found] == [even]
        assert max(relative_errors(task, found, truths)) < 1e-3


def test_scores_are_cosines_and_relative_errors(tmp_path):
    task = linear_task()
    seen, truths = attacked(tmp_path, task, fv.FedAvg(FULL), rounds=1)
    (first, *_) = estimates(seen)
    halved = replace(first, vector=-first.vector / 2)
    assert cosines(task, [first, halved], truths) == pytest.approx([1, -1])
    assert relative_errors(task, [first, halved], truths) == pytest.approx([0, 1.5], abs=1e-6)


def test_a_method_with_nothing_to_attack_says_why(tmp_path):
    seen, _ = attacked(tmp_path, linear_task(), Twice())
    assert estimates(seen) == []
    assert nothing(Twice()).startswith("toy-twice sends messages that no attack knows how to read")
    assert nothing(fv.FedAvg()) == nothing(fv.FedAvg(), "client") == nothing(FEDLAP) == ""
    assert "Adam" in nothing(fv.Baffle(), "client")
    assert "moving average" in nothing(fv.FedAvg(server=fv.ServerOptimizer(ema=0.9)), "client")
    assert nothing(fv.Baffle(down="replay"), "client") == ""


def test_every_kind_has_a_sentence():
    assert all(sentence.endswith(".") and len(sentence) > 30 for sentence in map(about, KINDS))


def test_a_set_with_a_label_that_is_no_class_is_left_out(tmp_path):
    task = image_task()
    run(tmp_path, task, FEDLAP, rounds=1)
    seen = seen_in(tmp_path, task, FEDLAP)
    for each in seen.rounds[0].messages:
        if isinstance(each.answer, Surrogate) and each.client == 0:
            each.answer.labels.fill_(7)
    assert {each.clients for each in estimates(seen)} == {(1,), (2,), (3,)}
    assert truths_in(tmp_path)[1].keys() == {0, 1, 2, 3}
