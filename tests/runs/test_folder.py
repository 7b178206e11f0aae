"""Run folders: what is written, in which order, and what becomes of it when the disk or a file is bad."""

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.core import message
from fedveil.core.clients import Reply
from fedveil.core.message import Refused
from fedveil.core.method import State
from fedveil.data import from_tensors
from fedveil.engines import LocalEngine
from fedveil.methods.scaffold import Control
from fedveil.runs.checkpoint import RunError, read_checkpoint
from fedveil.runs.fingerprint import environment, fingerprint
from fedveil.runs.folder import KEPT, RunFolder
from fedveil.train.optimizers import Moments
from toys import LastReference, Tamper, kept, linear_task

LOCAL = fv.LocalTraining(batch=4)
METHODS = {
    "fedavg": fv.FedAvg(local=LOCAL, server=fv.ServerOptimizer(optimizer="momentum")),
    "scaffold": fv.Scaffold(local=LOCAL),
    "two parts": fv.Scaffold(local=LOCAL, up=fv.TopK(share=0.4), down=fv.Half(), feedback=True),
    "last reference": LastReference(),
}
TASK = linear_task()
ROUNDS = 4


def train(folder, method=METHODS["scaffold"], rounds=ROUNDS, **options) -> fv.Result:
    options = {"cohort": 3, "engine": LocalEngine(stack=1, workers=1), **options}
    return fv.run(TASK, method, rounds=rounds, folder=folder, **options)


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


@pytest.fixture
def undisturbed(method, tmp_path):
    train(tmp_path / "undisturbed", method)
    return kept(tmp_path / "undisturbed")


# ------------------------------------------------------------------------------------------------- what is written


def test_a_folder_holds_its_ledger_and_the_last_two_checkpoints(tmp_path):
    train(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-00000003.fv",
        "checkpoint-00000004.fv",
        "environment.json",
        "index-00000002.fv",
        "ledger.jsonl",
        "lock",
        "memory-00000001.fv",
        "recipe.toml",
        "right.json",
    ]
    assert KEPT == 2


def test_the_folder_says_what_was_asked_for_and_where_it_ran(tmp_path):
    with contextlib.closing(RunFolder(tmp_path / "deep" / "er")) as folder:
        folder.describe('method = "fedavg"\n', environment(device="cpu"))
    assert (folder.path / "recipe.toml").read_text() == 'method = "fedavg"\n'
    assert f'"torch": "{torch.__version__}"' in (folder.path / "environment.json").read_text()


def packed(memory):
    return {k: [(*e[:3], message.pack(e[3])) for e in entries] for k, entries in memory.items()}


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    state = State(torch.tensor([1.0, float("nan"), -0.0])).put("server", Moments(torch.ones(3)))
    ones, zeros = Control(torch.ones(3)), Control(torch.zeros(3))
    memory = {7: [(1, 0, "one", ones), (3, 1, "one", zeros), (3, 1, "two", ones)], 9: [(2, 0, "two", ones)]}
    with contextlib.closing(RunFolder(tmp_path)) as folder:
        assert folder.load() is None
        folder.memory.update(memory)
        folder.save(b"this run", 3, state)
        folder.join()
        saved = folder.load()
    assert (saved.run, saved.round) == (b"this run", 3)
    assert message.pack(saved.state) == message.pack(state)
    del memory[7][0]  # which no round after the third can find
    assert packed(saved.memory) == packed(memory)


def test_each_file_reaches_the_disk_before_its_name_and_the_ledger_before_the_checkpoint(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def told_fsync(fd):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def told_replace(source, target):
        calls.append(("replace", target.name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", told_fsync)
    monkeypatch.setattr(os, "replace", told_replace)
    train(tmp_path, rounds=1)
    described = [call for call in calls[:6] if call[1] != tmp_path.name]
    assert [name for _, name in described[1::2]] == ["recipe.toml", "environment.json"]
    assert calls[6:] == [
        ("fsync", "ledger.jsonl.new"),
        ("replace", "ledger.jsonl"),
        ("fsync", tmp_path.name),
        ("fsync", "ledger.jsonl"),
        ("fsync", "memory-00000001.fv"),
        ("fsync", "index-00000002.fv"),
        ("fsync", tmp_path.name),
        ("fsync", "checkpoint-00000001.fv.new"),
        ("replace", "checkpoint-00000001.fv"),
        ("fsync", tmp_path.name),
        ("fsync", "right.json.new"),
        ("replace", "right.json"),
        ("fsync", tmp_path.name),
    ]


# ------------------------------------------------------------------------------------------------- going on


def test_a_run_in_pieces_is_the_run_in_one(method, undisturbed, tmp_path):
    for rounds in range(1, ROUNDS + 1):
        train(tmp_path, method, rounds)
    assert kept(tmp_path) == undisturbed


TWO_PARTS = {
    "scaffold": ({"scaffold", "feedback"}, fv.Scaffold(LOCAL, up=fv.TopK(share=0.4), feedback=True)),
    "scaffold, steps down": ({"scaffold", "feedback", "down"}, METHODS["two parts"]),
    "feddyn": ({"feddyn", "feedback"}, fv.FedDyn(LOCAL, up=fv.TopK(share=0.4), feedback=True)),
}


@pytest.mark.parametrize("name", TWO_PARTS)
def test_what_several_parts_of_a_method_remember_survives_a_resume(name, tmp_path):
    parts, method = TWO_PARTS[name]
    options = {"rounds": 6, "cohort": 2, "engine": LocalEngine(stack=1, workers=1)}  # clients are away at times
    whole = fv.run(TASK, method, folder=tmp_path / "whole", **options)
    for rounds in (1, 2, 5, 6):
        resumed = fv.run(TASK, method, folder=tmp_path / "pieces", **options | {"rounds": rounds})
    assert torch.equal(resumed.weights, whole.weights)
    assert kept(tmp_path / "pieces") == kept(tmp_path / "whole")
    with contextlib.closing(RunFolder(tmp_path / "pieces")) as folder:
        memory = folder.load().memory
    assert all({part for *_, part, _ in entries} == parts for entries in memory.values())
    fv.run(TASK, method, folder=tmp_path / "forgetful", **options | {"rounds": 5})
    with contextlib.closing(RunFolder(tmp_path / "forgetful")) as folder:
        saved = folder.load()
        folder.decided = saved.decided
        folder.save(saved.run, 5, saved.state)
        folder.join()
    assert not torch.equal(fv.run(TASK, method, folder=tmp_path / "forgetful", **options).weights, whole.weights)


def test_a_finished_run_is_not_gone_on_with(tmp_path):
    first, again = train(tmp_path), train(tmp_path)
    assert torch.equal(first.weights, again.weights)
    assert len(again.ledger.rows) == ROUNDS


def test_a_run_that_reached_its_target_stays_where_it_is(tmp_path):
    first, again = (train(tmp_path, rounds=9, target=0.01) for _ in range(2))
    assert torch.equal(first.weights, again.weights)
    assert len(again.ledger.rows) == 1


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_rounds_without_an_answer_are_counted_across_a_resume_and_anew_after_a_stop(tmp_path):
    def lose(round_, replies):
        return [Reply(reply.client, problem="failed: no network") for reply in replies]

    train(tmp_path, rounds=3, engine=Tamper(lose))
    for total in (5, 10):
        with pytest.raises(RuntimeError, match=f"no client answered for {total} rounds"):
            train(tmp_path, rounds=20, engine=Tamper(lose))
        assert len(fv.Ledger.read(tmp_path / "ledger.jsonl").rows) == total
    assert len(train(tmp_path, rounds=12).ledger.rows) == 12


def test_a_figure_that_is_not_a_number_does_not_spoil_the_ledger(tmp_path):
    class Noting(fv.FedAvg):
        def round(self, state, cohort):
            cohort.note(cosine=float("inf"), norm=1.5)
            return super().round(state, cohort)

    task = linear_task()
    task.test_x = torch.full_like(task.test_x, float("nan"))
    for rounds in (1, 2):
        result = fv.run(task, Noting(), rounds=rounds, cohort=2, folder=tmp_path)
    for row in result.ledger.rows:
        assert row.events == ["cosine is inf: the run may have diverged", "loss is nan: the run may have diverged"]
        assert set(row.metrics) == {"norm", "accuracy"}


def test_a_folder_of_another_method_or_model_is_refused(tmp_path):
    train(tmp_path, METHODS["scaffold"])
    with pytest.raises(RunError, match="holds a run of another method; choose another folder, or change the method"):
        train(tmp_path, METHODS["fedavg"])
    x, y = torch.randn(8, 5), torch.arange(8) % 2
    data = from_tensors(x, y, x, y, classes=2)
    other = fv.Task(nn.Linear(5, 2), data, fv.split("iid", data, 4, fv.Seed.root(0)))
    with pytest.raises(RunError, match="holds a run of another model, data, split and cohort; choose another folder"):
        fv.run(other, METHODS["scaffold"], rounds=9, cohort=2, folder=tmp_path)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="is a file; give a folder for the run"):
            RunFolder(path)


# ------------------------------------------------------------------------------------------------- damaged files


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE = {
    "a bit flipped": flipped,
    "the end cut off": lambda data: data[:-1],
    "half of it cut off": lambda data: data[: len(data) // 2],
    "nothing left": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "something behind it": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(damage, method, undisturbed, tmp_path):
    train(tmp_path, method, rounds=3)
    newest = tmp_path / "checkpoint-00000003.fv"
    newest.write_bytes(damage(newest.read_bytes()))
    with contextlib.closing(RunFolder(tmp_path)) as folder:
        assert folder.load().round == 2
    train(tmp_path, method)
    *state, rows = kept(tmp_path)
    told = rows[2].events.pop()
    assert told.startswith("checkpoint-00000003.fv (")
    assert told.endswith("cannot be read: the run goes on from the checkpoint of round 2")
    assert (*state, rows) == undisturbed


def test_every_single_damaged_byte_of_a_checkpoint_is_noticed(tmp_path):
    train(tmp_path, rounds=1)
    data = (tmp_path / "checkpoint-00000001.fv").read_bytes()
    for at in range(len(data)):
        for damaged in (data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :], data[:at]):
            (tmp_path / "damaged.fv").write_bytes(damaged)
            with pytest.raises(Refused, match="damaged"):
                read_checkpoint(tmp_path / "damaged.fv")


def test_a_checkpoint_that_cannot_be_opened_is_passed_over(tmp_path):
    train(tmp_path, rounds=3)
    newest = tmp_path / "checkpoint-00000003.fv"
    newest.unlink()
    newest.mkdir()
    with contextlib.closing(RunFolder(tmp_path)) as folder:
        assert folder.load().round == 2


def test_the_newest_checkpoint_is_known_by_its_name_and_not_by_the_clock(tmp_path):
    train(tmp_path, rounds=3)
    os.utime(tmp_path / "checkpoint-00000003.fv", (0, 0))
    with contextlib.closing(RunFolder(tmp_path)) as folder:
        assert folder.load().round == 3


def test_if_every_checkpoint_is_damaged_one_sentence_says_so_and_nothing_is_overwritten(tmp_path):
    train(tmp_path, rounds=3)
    for path in tmp_path.glob("*.fv"):
        path.write_bytes(flipped(path.read_bytes()))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for _ in range(2):  # the second time shows that the first gave the lock back
        with pytest.raises(
            ValueError, match=r"no checkpoint in .* can be read: .*00000003.*damaged.*00000002.*damaged"
        ):
            train(tmp_path)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    with contextlib.closing(RunFolder(tmp_path)) as folder:
        folder.save(bytes(8), 1, Control(torch.ones(3)))
        folder.join()
        with pytest.raises(RunError, match=r"no checkpoint in .* can be read: .*a Control is no server's state"):
            folder.load()


def test_figures_without_a_checkpoint_are_not_written_over(tmp_path):
    train(tmp_path)
    for path in tmp_path.glob("*.fv"):
        path.unlink()
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(RunError, match="keeps the figures of 4 rounds and no checkpoint, so its weights are gone"):
        train(tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_a_kill_before_the_first_checkpoint_leaves_a_row_that_is_done_again(method, undisturbed, tmp_path):
    train(tmp_path, method, rounds=1)
    (tmp_path / "checkpoint-00000001.fv").unlink()
    train(tmp_path, method)
    assert kept(tmp_path) == undisturbed


def test_a_row_that_was_cut_off_is_written_anew(method, undisturbed, tmp_path):
    train(tmp_path, method)
    ledger = tmp_path / "ledger.jsonl"
    (tmp_path / "checkpoint-00000004.fv").unlink()
    ledger.write_bytes(ledger.read_bytes()[:-20])
    train(tmp_path, method)
    assert kept(tmp_path) == undisturbed


def test_a_damaged_row_is_named(tmp_path):
    train(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(lines[0] + lines[1].replace(b"cohort", b"cohxrt") + b"".join(lines[2:]))
    with pytest.raises(ValueError, match=r"ledger\.jsonl line 2 is not a ledger row: .*cohort"):
        train(tmp_path, rounds=9)


def test_a_row_that_is_missing_is_noticed(tmp_path):
    train(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(ValueError, match="has 2 rows but the checkpoint is of round 4; the ledger was damaged"):
        train(tmp_path, rounds=9)


# ------------------------------------------------------------------------------------------------- the disk is full


def test_without_room_for_a_checkpoint_the_one_before_is_kept_and_goes_on(method, undisturbed, tmp_path):
    train(tmp_path, method, rounds=2)
    (tmp_path / "checkpoint-00000003.fv.new").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"could not write .*00000003\.fv: No space left.*written before is kept"
    ) as caught:
        train(tmp_path, method)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(p.name for p in tmp_path.glob("checkpoint*")) == ["checkpoint-00000001.fv", "checkpoint-00000002.fv"]
    train(tmp_path, method)
    assert kept(tmp_path) == undisturbed


def test_of_a_file_that_did_not_reach_the_disk_nothing_is_left(tmp_path, monkeypatch):
    train(tmp_path, rounds=2)

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"could not write .*ledger\.jsonl: No space left"):
            train(tmp_path)
    assert not list(tmp_path.glob("*.new"))
    assert len(train(tmp_path).ledger.rows) == ROUNDS


def test_without_room_for_a_row_the_run_stops_and_can_go_on(method, undisturbed, tmp_path):
    def fill(row):
        """From the second row on, what is written to the ledger meets a full disk."""
        folder.join()
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "ledger.jsonl"):
                    full = os.open("/dev/full", os.O_WRONLY)
                    os.dup2(full, int(fd))
                    os.close(full)

    folder = RunFolder(tmp_path)
    with pytest.raises(OSError, match=r"could not write .*ledger\.jsonl: No space left.*written before is kept"):
        train(folder, method, observer=fill)
    assert [p.name for p in tmp_path.glob("checkpoint*")] == ["checkpoint-00000001.fv"]
    train(tmp_path, method)
    assert kept(tmp_path) == undisturbed


# ------------------------------------------------------------------------------------------------- two at a time


def hold(path, held):
    with contextlib.closing(RunFolder(path)):
        held.set()
        signal.pause()


def test_two_processes_cannot_write_one_run_and_a_killed_one_lets_go(tmp_path):
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold, args=(tmp_path, held))
    other.start()
    try:
        assert held.wait(20)
        with pytest.raises(
            ValueError, match="is being written by another process; wait for it or choose another folder"
        ):
            train(tmp_path)
    finally:
        other.kill()
        other.join()
    assert len(train(tmp_path).ledger.rows) == ROUNDS


def test_one_process_cannot_open_a_run_twice(tmp_path):
    with contextlib.closing(RunFolder(tmp_path)), pytest.raises(ValueError, match="is being written"):
        RunFolder(tmp_path)
    RunFolder(tmp_path).close()


def test_a_run_that_fails_to_begin_gives_its_folder_back(tmp_path):
    class Broken(fv.FedAvg):
        def init_state(self, task):
            raise ArithmeticError("no first state")

    with pytest.raises(ArithmeticError):
        train(tmp_path, Broken())
    RunFolder(tmp_path).close()


# ---------------------------------------------------------------------------------------------------- exhibits


def image_task(channels=1):
    x = torch.randn(24, channels, 4, 4, generator=fv.Seed.root(0).torch())
    data = from_tensors(x, torch.arange(24) % 3, x[:6], torch.arange(6) % 3, classes=3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16 * channels, 3))
    return fv.Task(model, data, fv.split("iid", data, 3, fv.Seed.root(0)))


@pytest.mark.parametrize(
    "up", [fv.TofuCodec(points=4, steps=2), fv.FedSynthCodec(batches=2, batch=2, epochs=1, fits=2)]
)
def test_synthetic_images_are_kept_beside_real_ones_and_survive_a_resume(up, tmp_path):
    for rounds in (3, 6):
        fv.run(image_task(), fv.FedAvg(up=up), rounds=rounds, cohort=2, folder=tmp_path)
    (folder,) = (tmp_path / "figures").iterdir()
    assert folder.name == ("proxy images" if up.name == "tofu" else "synthetic images")
    assert sorted(path.stem for path in folder.iterdir()) == [f"{n:05}" for n in (1, 2, 3, 5, 6)] + ["real"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


def test_real_ones_are_of_the_same_classes(tmp_path):
    task, seen = image_task(), []

    class Shown(fv.FedAvg):
        def round(self, state, cohort):
            cohort.exhibit("own", torch.zeros(12, 1, 4, 4), torch.eye(3)[[2, 2, 0] * 4])
            cohort.exhibit("no image", torch.zeros(12, 16), torch.eye(3)[[2, 2, 0] * 4])
            seen.append(dict(cohort._shared.exhibits))
            return super().round(state, cohort)

    fv.run(task, Shown(), rounds=4, cohort=2, folder=tmp_path)
    (images, real), *_ = seen[0].values()
    assert (len(images), real.shape) == (10, (10, 1, 4, 4))
    owner = [int((task.test_x == picture).flatten(1).all(1).nonzero()[0]) % 3 for picture in real]
    assert owner == [2, 2, 0] * 3 + [2]
    assert [list(each) for each in seen] == [["own"], ["own"], [], ["own"]]
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["own"]


def test_text_and_vectors_are_no_exhibits(tmp_path):
    fv.run(linear_task(), fv.FedAvg(up=fv.TofuCodec(points=2, steps=2)), rounds=1, cohort=2, folder=tmp_path)
    assert not (tmp_path / "figures").exists()


# ---------------------------------------------------------------------------------------------------- another run


PRIVATE = fv.FedAvg(fv.LocalTraining(lr=0.5, batch=3), privacy=fv.DpSgd(noise=1.0, delta=1e-2))
CHANGES = {
    "no privacy": ({"privacy": None}, "method"),
    "less noise": ({"privacy": fv.DpSgd(noise=0.1, delta=1e-2)}, "method"),
    "another rate": ({"local": fv.LocalTraining(lr=0.4, batch=3)}, "method"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_private_run_does_not_go_on_with_another_method(tmp_path, name):
    """It once went on without its noise, at the old ε."""
    task, (change, named) = linear_task(), CHANGES[name]
    fv.run(task, PRIVATE, rounds=1, cohort=2, folder=tmp_path)
    asked = (tmp_path / "asked.jsonl").read_bytes()
    with pytest.raises(RunError, match=f"holds a run of another {named}; choose another folder"):
        fv.run(task, dataclasses.replace(PRIVATE, **change), rounds=2, cohort=2, folder=tmp_path)
    assert (tmp_path / "asked.jsonl").read_bytes() == asked
    assert len(fv.run(task, PRIVATE, rounds=2, cohort=2, folder=tmp_path).ledger.rows) == 2


def test_a_run_does_not_go_on_with_another_cohort_seed_split_or_data(tmp_path):
    fv.run(linear_task(), PRIVATE, rounds=1, cohort=2, folder=tmp_path)
    for task, options, named in (
        (linear_task(), {"cohort": 3}, "cohort"),
        (linear_task(), {"cohort": 2, "seed": 1}, "seed"),
        (linear_task(), {"cohort": 2, "insecure_test_noise": 1}, "seed"),
        (linear_task(uneven=True), {"cohort": 2}, "split"),
        (linear_task(seed=1), {"cohort": 2}, "data"),
    ):
        with pytest.raises(RunError, match=f"holds a run of another {named}; choose another folder"):
            fv.run(task, PRIVATE, rounds=2, folder=tmp_path, **options)


def test_the_number_of_rounds_may_change_unless_the_method_reads_it(tmp_path):
    plain, full = fv.FedAvg(), fv.FedAvg(up=fv.Half(), full_rounds=1)
    for rounds in (1, 2):
        fv.run(linear_task(), plain, rounds=rounds, cohort=2, folder=tmp_path / "plain")
    fv.run(linear_task(), full, rounds=2, cohort=2, folder=tmp_path / "full", stop=lambda: True)
    with pytest.raises(RunError, match="holds a run of another number of rounds"):
        fv.run(linear_task(), full, rounds=3, cohort=2, folder=tmp_path / "full")


def test_fingerprints_are_equal_for_equal_values_only():
    values = [
        fv.FedAvg(), fv.FedSGD(), fv.FedAvg(local=fv.LocalTraining(lr=0.2)), torch.ones(3), torch.ones(4), np.ones(3),
        1, 1.5, "1", None, [1], [[1]], {"a": 1}, {"a": 2},
    ]  # fmt: skip
    prints = [fingerprint(value) for value in values]
    assert len(set(prints)) == len(values)
    assert prints == [fingerprint(value) for value in values]
    assert fingerprint(fv.FedAvg()) == fingerprint(fv.FedAvg())
