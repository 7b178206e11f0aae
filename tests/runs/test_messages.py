"""Kept messages: what was sent is what is read, the truth stays beside it, and a folder says loudly what it holds."""

import stat
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedveil as fv
from codec_tools import stack_of
from fedveil.cli import app
from fedveil.core import message
from fedveil.core.method import State
from fedveil.engines import LocalEngine, RayEngine
from fedveil.runs.messages import WARNING, Rounds, kept_rounds, read_round, read_truth
from toys import linear_task

FULL = fv.LocalTraining(lr=0.1, batch=100)


def keep(path: Path, method: fv.Method, rounds: int = 3, keep: str = "2-3", **options) -> fv.Task:
    task = linear_task(clients=4, records=24)
    with pytest.warns(UserWarning, match="truth"):
        fv.run(task, method, rounds=rounds, cohort=3, folder=path, keep=keep, **options)
    return task


@pytest.mark.parametrize("wire", ["memory", "bytes"])
def test_messages_of_chosen_rounds_are_kept_with_the_state_before_and_after(tmp_path, wire):
    method = fv.FedAvg(FULL)
    task = keep(tmp_path, method, engine=LocalEngine(wire=wire))
    assert kept_rounds(tmp_path) == [2, 3]
    second, third = (read_round(tmp_path, n, method) for n in (2, 3))
    assert torch.equal(second.after.weights, third.state.weights)
    assert len(third.messages) == 3
    for each in third.messages:
        assert torch.equal(each.question.weights, third.state.weights)
        update = read_truth(tmp_path, 3)[each.client]["update"]
        assert torch.equal(each.answer.update, update)
    mean = torch.stack([each.answer.update for each in third.messages]).mean(0)
    torch.testing.assert_close(third.state.weights + mean, third.after.weights)
    records = read_truth(tmp_path, 3)
    assert all(records[k]["records"].tolist() == task.clients[k].tolist() for k in records)


def test_both_wires_keep_the_same_bytes(tmp_path):
    files = []
    for wire in ("memory", "bytes"):
        keep(tmp_path / wire, fv.FedAvg(FULL, up=fv.TopK(share=0.5)), engine=LocalEngine(wire=wire))
        files.append([(tmp_path / wire / part / "round-00000002.fv").read_bytes() for part in ("messages", "truth")])
    assert files[0][0] == files[1][0]


def test_the_truth_is_what_was_encoded_and_not_what_was_sent(tmp_path):
    method = fv.FedAvg(FULL, up=fv.TopK(share=0.25))
    keep(tmp_path, method)
    sent = read_round(tmp_path, 2, method)
    truth = read_truth(tmp_path, 2)
    assert all(int((truth[each.client]["update"] != 0).sum()) > each.answer.values.numel() for each in sent.messages)


def test_batches_of_slopes_are_told_record_by_record(tmp_path):
    method = fv.Baffle(directions=4, batch=2)
    task = keep(tmp_path, method)
    for client, truth in read_truth(tmp_path, 3).items():
        assert len(truth["records"]) == 2
        assert set(truth["records"].tolist()) <= set(task.clients[client].tolist())


def test_records_are_told_of_weak_and_other_clients_of_a_secure_sum(tmp_path):
    """Clients of unlike K answer in stacks of their own, each of which has records of its own."""
    method = fv.Baffle(directions=4, weak=2, batch=2, secure=fv.SecureSum(clip=16.0))
    task = keep(tmp_path, method)
    assert len({method.count(client) for client in range(4)}) == 2
    for number in (2, 3):
        truth = read_truth(tmp_path, number)
        assert len(truth) == 3
        for client, own in truth.items():
            assert len(own["records"]) == 2
            assert set(own["records"].tolist()) <= set(task.clients[client].tolist())


def test_a_part_of_a_stack_reveals_nothing_of_the_others():
    stack = stack_of(linear_task(), 0, 1, 2)
    stack.witnessed = True
    stack.reveal(update=torch.eye(3))
    part = stack.part([2])
    part.reveal(update=torch.ones(1, 3))
    assert torch.equal(stack.truth["update"], torch.eye(3))
    assert torch.equal(part.truth["update"], torch.ones(1, 3))


def test_keeping_changes_no_result(tmp_path):
    method, task = fv.FedAvg(FULL), linear_task(clients=4, records=24)
    plain = fv.run(task, method, rounds=3, cohort=3)
    keep(tmp_path, method, keep="all")
    assert torch.equal(read_round(tmp_path, 3, method).after.weights, plain.weights)


def test_only_the_owner_can_read_what_is_kept(tmp_path):
    keep(tmp_path, fv.FedAvg(FULL))
    for path in (tmp_path, tmp_path / "messages", tmp_path / "truth"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for part in ("messages", "truth"):
        assert stat.S_IMODE((tmp_path / part / "round-00000002.fv").stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "0", "3-1", "x", "1,,2", "1-", "-1"])
def test_a_bad_choice_of_rounds_is_a_sentence(text):
    with pytest.raises(ValueError, match="give all, or rounds from 1"):
        Rounds(text)


def test_a_choice_of_rounds():
    chosen = Rounds("1-3, 10")
    assert [n for n in range(1, 12) if n in chosen] == [1, 2, 3, 10]
    assert 10**6 in Rounds("all")


def test_messages_are_kept_in_a_folder_and_of_clients_in_this_process():
    task = linear_task()
    with pytest.raises(ValueError, match="give folder, too"):
        fv.run(task, fv.FedAvg(), rounds=1, keep="all")
    with pytest.raises(ValueError, match="use LocalEngine"):
        fv.run(task, fv.FedAvg(), rounds=1, keep="all", folder="unused", engine=RayEngine())


def test_a_folder_without_messages_and_a_damaged_file_are_sentences(tmp_path):
    method = fv.FedAvg(FULL)
    with pytest.raises(ValueError, match="keeps no messages to attack; run the recipe again with --keep-messages"):
        kept_rounds(tmp_path)
    keep(tmp_path, method)
    for part, read in (
        ("messages", lambda: read_round(tmp_path, 2, method)),
        ("truth", lambda: read_truth(tmp_path, 2)),
    ):
        path = tmp_path / part / "round-00000002.fv"
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(ValueError, match="cannot be read"):
            read()


def test_the_command_line_keeps_messages_over_a_resume_and_warns(tmp_path):
    def fedveil(*args: str) -> str:
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    out = str(tmp_path / "run")
    told = fedveil("run", "digits/fedavg", "--set", "rounds=1", "--keep-messages", "all", "--out", out)
    assert WARNING in told
    fedveil("resume", out, "--rounds", "2")
    assert kept_rounds(tmp_path / "run") == [1, 2]
    result = CliRunner().invoke(app, ["run", "digits/fedavg", "--keep-messages", "some", "--out", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert "give all, or rounds from 1" in result.output


def test_a_state_is_no_message(tmp_path):
    method = fv.FedAvg(FULL)
    keep(tmp_path, method)
    kinds = {type(each.question) for each in read_round(tmp_path, 2, method).messages}
    assert State not in kinds
    assert all(kind.kind in message.KINDS for kind in kinds)
