"""Validation records, early stopping, the best weights, and a primary metric that is not accuracy."""

import json
import tomllib
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.core.ledger import Ledger, Row
from fedveil.core.method import State
from fedveil.core.metrics import ACCURACY, LOSS, Primary
from fedveil.core.outcome import best_row, reached, stalled
from fedveil.data import from_tensors, hold_out
from fedveil.runs import recipe
from fedveil.runs.folder import RunFolder

RMSE = Primary("rmse", maximise=False)


def task(validation: bool = True, **options) -> fv.Task:
    draw = fv.Seed.root(1).torch()
    x = torch.randn(60, 4, generator=draw)
    y = x.sum(1) + torch.randn(60, generator=draw)
    data = from_tensors(x[:30], y[:30], x[30:40], y[30:40], validation=(x[40:], y[40:]) if validation else None)
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, -1)
    return fv.Task(model, data, fv.split("iid", data, 3, fv.Seed.root(0)), loss="mse", **options)


def method(lr: float = 0.03) -> fv.FedAvg:
    return fv.FedAvg(local=fv.LocalTraining(lr=lr, epochs=2, batch=4))


def test_records_are_held_out_by_the_seed_and_are_nobodys():
    data = fv.load("digits")
    once, again, other = (hold_out(data, 0.1, fv.Seed.root(seed)) for seed in (0, 0, 1))
    assert torch.equal(once.validation_x, again.validation_x)
    assert not torch.equal(once.validation_x, other.validation_x)
    assert (len(once.x), len(once.validation_x)) == (len(data.x) - round(len(data.x) / 10), round(len(data.x) / 10))
    rows = [tuple(row) for row in torch.cat([once.x, once.validation_x]).flatten(1).tolist()]
    assert sorted(rows) == sorted(tuple(row) for row in data.x.flatten(1).tolist())
    for share, told in ((0.0, "validation share is 0"), (1.0, "is 1; use"), (1e-9, "is 0; leave some")):
        with pytest.raises(ValueError, match=told):
            hold_out(data, share, fv.Seed.root(0))
    with pytest.raises(ValueError, match="has validation records of its own"):
        hold_out(once, 0.1, fv.Seed.root(0))


def test_groups_follow_their_records():
    x = torch.arange(20.0)[:, None]
    data = from_tensors(x, x.long()[:, 0], x, x.long()[:, 0], groups=x.long()[:, 0])
    kept = hold_out(data, 0.25, fv.Seed.root(0))
    assert torch.equal(kept.groups, kept.x[:, 0].long())
    assert len(kept.x) == 15


def test_a_recipe_holds_out_before_it_splits():
    plan = recipe.read("digits/fedavg", ["task.validation=0.2", "early_stopping=2"])
    made, before = plan.build(), recipe.read("digits/fedavg").build()
    assert int(made.clients.sizes.sum()) == len(before.data.x) - len(made.data.validation_x)
    assert set(made.evaluate(made.initial)) >= {"accuracy", "validation_accuracy", "validation_loss"}
    assert recipe.parse(tomllib.loads(plan.toml())) == plan
    for change, told in (
        ("task.validation=1.5", "task.validation is 1.5; use a share"),
        ("early_stopping=0", "early_stopping is 0; use 1 evaluation or more"),
        ('task.metrics=["acuracy"]', "there is no metric 'acuracy'; did you mean 'accuracy'"),
        ("target=2", "target is 2; it is a test accuracy above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=told):
            recipe.read("digits/fedavg", [change])
    assert recipe.read("digits/fedavg", ["task.loss=mse", "target=20"]).target == 20
    with pytest.raises(ValueError, match=r"task.validation is 0.2, but a server holds no training records"):
        recipe.read("digits/fedavg", ["task.validation=0.2", "split.max_records=99"]).party(before.data, None)


def test_a_new_option_at_its_default_leaves_the_fingerprint_as_it_was():
    assert recipe.read("digits/fedavg").fingerprint().hex() == FINGERPRINT
    assert recipe.read("digits/fedavg", ['task.metrics=["f1"]']).fingerprint().hex() != FINGERPRINT
    assert recipe.read("digits/fedavg", ["early_stopping=3"]).fingerprint().hex() == FINGERPRINT


FINGERPRINT = "76832b785f3e9997"  # of version 0.3.0


def ledger(*values: float, primary: Primary = RMSE) -> Ledger:
    rows = [Row(round=i, cohort=[], metrics={f"validation_{primary.name}": v}) for i, v in enumerate(values, 1)]
    for row in rows:
        row.primary = primary
    return Ledger(rows)


@pytest.mark.parametrize(
    ("values", "best", "stopped"),
    [
        ((3, 2, 1), 3, False),
        ((3, 1, 2, 1), 2, True),
        ((3, 1, 2), 2, False),
        ((3, 1, 2, 0.5, 1, 1), 4, True),
        ((), None, False),
    ],
)
def test_a_run_has_stalled_when_the_metric_has_not_improved(values, best, stopped):
    for primary, sign in ((RMSE, 1), (ACCURACY, -1)):
        found = ledger(*(sign * value for value in values), primary=primary)
        row = best_row(found)
        assert (row and row.round) == best
        assert stalled(found, 2) == stopped
        assert not stalled(found, None)


def test_a_target_of_an_error_is_reached_from_above():
    row = Row(round=1, cohort=[], metrics={"rmse": 0.5, "accuracy": 0.1}, primary=RMSE)
    assert reached(row, 0.5)
    assert not reached(row, 0.4)
    assert not reached(replace_primary(row), 0.5)


def replace_primary(row: Row) -> Row:
    return Row(round=1, cohort=[], metrics=row.metrics)


def test_the_primary_metric_is_in_rows_summary_and_result(tmp_path):
    result = fv.run(task(), method(0.05), rounds=3, cohort=3, folder=tmp_path / "run")
    summary = result.summary()
    assert (summary["metric"], summary["value"]) == ("rmse", result.ledger.rows[-1].metrics["rmse"])
    assert (result.metric, result.value, summary["accuracy"]) == ("rmse", summary["value"], None)
    read = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    assert read.primary == RMSE
    assert json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])["primary"] == {
        "name": "rmse",
        "maximise": False,
        "share": False,
    }
    values = result.ledger.series("rmse")[1]
    aimed = fv.run(task(), method(0.05), rounds=3, cohort=3, target=min(values))
    assert (aimed.stopped, len(aimed.ledger.rows)) == ("target", values.index(min(values)) + 1)
    digits = recipe.read("digits/fedavg").build()
    plain = fv.run(digits, fv.FedAvg(), rounds=1, cohort=2)
    assert (plain.metric, plain.value) == ("accuracy", plain.accuracy)
    assert plain.ledger.primary == ACCURACY
    assert b"primary" not in msgspec.json.encode(plain.ledger.rows[0])
    assert Ledger([Row(round=1, cohort=[], metrics={"loss": 1.0})]).primary == LOSS


def test_early_stopping_ends_the_run_and_keeps_the_best_weights(tmp_path):
    made = task()
    whole = fv.run(made, method(), rounds=30, cohort=2, early_stopping=3, folder=tmp_path / "a")
    values = whole.ledger.series("validation_rmse")[1]
    best = min(range(len(values)), key=values.__getitem__)
    assert (whole.stopped, len(values)) == ("early", best + 1 + 3)
    assert (whole.best.round, whole.best.value) == (best + 1, values[best])
    assert made.evaluate(whole.best.weights)["validation_rmse"] == pytest.approx(values[best])
    assert "early stopping: validation_rmse has not improved in 3 evaluations" in whole.ledger.rows[-1].events
    assert len(list((tmp_path / "a").glob("best-*.fv"))) == 1
    again = fv.run(made, method(), rounds=30, cohort=2, early_stopping=3, folder=tmp_path / "a")
    assert (again.stopped, len(again.ledger.rows)) == ("early", len(values))
    assert torch.equal(again.best.weights, whole.best.weights)
    in_memory = fv.run(made, method(), rounds=30, cohort=2, early_stopping=3)
    assert torch.equal(in_memory.best.weights, whole.best.weights)


def test_a_resumed_run_goes_on_counting_and_has_the_best_weights(tmp_path):
    """Stopped after each round in turn, also with a newest checkpoint that is damaged."""
    made = task()
    whole = fv.run(made, method(), rounds=30, cohort=2, early_stopping=3)
    for damage in (False, True):
        folder, ended = tmp_path / str(damage), "interrupt"
        for turn in range(60):
            if damage and turn == whole.best.round:  # rounds up to the best one are done: one is done again
                sorted(folder.glob("checkpoint-*.fv"))[-1].write_bytes(b"broken")
            result = fv.run(made, method(), rounds=30, cohort=2, early_stopping=3, folder=folder, stop=lambda: True)
            ended = result.stopped
            if ended != "interrupt":
                break
        assert ended == "early"
        assert [row.metrics for row in result.ledger.rows] == [row.metrics for row in whole.ledger.rows]
        assert (result.best.round, result.best.value) == (whole.best.round, whole.best.value)
        assert torch.equal(result.best.weights, whole.best.weights)


def test_best_weights_of_rounds_that_are_done_again_are_forgotten(tmp_path):
    home = RunFolder(tmp_path)
    for number in (1, 2, 4):
        home.keep_best(bytes(8), number, fv.State(torch.full((3,), float(number))))
    assert home.best(2).weights.tolist() == [2.0] * 3
    assert [path.name for path in sorted(tmp_path.glob("best-*"))] == ["best-00000001.fv", "best-00000002.fv"]
    (tmp_path / "best-00000002.fv").write_bytes(b"broken")
    assert home.best(2) is None
    assert home.best(3) is None
    home.close()


def test_the_best_weights_of_every_checkpoint_that_is_kept_are_kept(tmp_path):
    home = RunFolder(tmp_path)
    for number in (1, 2, 3, 4, 5):
        if number < 4:
            home.keep_best(bytes(8), number, State(torch.zeros(3)))
        home.save(bytes(8), number, State(torch.zeros(3)))
        home.join()
        kept = sorted(int(path.stem[-1]) for path in tmp_path.glob("best-*.fv"))
        assert kept == {1: [1], 2: [1, 2], 3: [2, 3], 4: [3], 5: [3]}[number]
    home.close()


def test_early_stopping_needs_validation_records():
    with pytest.raises(ValueError, match="early_stopping is 3, but there are no validation records; hold some out"):
        fv.run(task(validation=False), method(), early_stopping=3)
    with pytest.raises(ValueError, match="early_stopping is 0; use 1 evaluation or more"):
        fv.run(task(), method(), early_stopping=0)
    assert fv.run(task(validation=False), method(), rounds=1, cohort=3).best is None


def test_a_metric_that_is_not_defined_is_an_event_and_no_divergence():
    x, y = torch.randn(8, 4, generator=fv.Seed.root(0).torch()), torch.tensor([0, 1] * 4)
    data = from_tensors(x, y, x[:4], y[:4] * 0)
    made = fv.Task(nn.Linear(4, 1), data, fv.split("iid", data, 2, fv.Seed.root(0)), loss="binary")
    row = fv.run(made, method(), rounds=1, cohort=2).ledger.rows[0]
    assert "auroc" not in row.metrics
    assert "auroc is nan: it is not defined on these records" in row.events


def test_validation_records_must_fit():
    data = task().data
    with pytest.raises(ValueError, match="one of validation_x and validation_y; give both or none"):
        replace(data, validation_y=None)
    with pytest.raises(ValueError, match=r"but validation records torch.float32 \[3\]"):
        replace(data, validation_x=data.validation_x[:, :3])
