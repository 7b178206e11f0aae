"""The matrix of attacks: rows share their records, each has what its page needs, and a folder is gone on from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedveil as fv
from fedveil.attacks import matrix
from fedveil.attacks.exposure import FOUND, Attack
from fedveil.attacks.inversion import Inversion
from fedveil.cli import matrix as command
from fedveil.cli.matrix import title
from shell import fv as fedveil
from shell import good

QUICK = Attack(Inversion(steps=150, tv=1e-4), victims=2, seconds=600)
ROWS = ("raw gradient, 1", "secure sum, 1", "DP-FedAvg, ε = 8")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_row_is_made_of_the_same_records_and_weights():
    data, seed = fv.load("digits"), fv.Seed.root(0)
    cases = list(matrix.cases())
    assert len({title(case) for case in cases}) == len(cases)
    one, some = (matrix.task_of(replace(matrix.CONTROL, records=n), data, seed) for n in (1, 8))
    assert torch.equal(one.initial, some.initial)
    assert [own[0] for own in map(one.clients.__getitem__, range(10))] == [some.clients[k][0] for k in range(10)]
    trained = matrix.task_of(replace(matrix.CONTROL, trained=True), data, seed)
    assert trained.evaluate(trained.initial)["accuracy"] > 0.9 > one.evaluate(one.initial)["accuracy"]


def test_rows_are_written_as_they_are_made_and_not_made_again(monkeypatch, capsys):
    folder = Path("matrix")
    told = {"command": "fedveil audit --matrix digits", "machine": "none"}
    done = command.run("digits", folder, ROWS, QUICK, 0, told, lambda _: None)
    kinds = [(row.case, row.exposure.kind) for row in done.rows]
    assert kinds == [
        ("raw gradient", "raw"),
        ("DP-FedAvg, ε = 8", "raw"),
        ("secure sum", "sum"),
        ("secure sum", "masked"),
    ]
    raw, private, _, masked = done.rows
    assert raw.exposure.verdict == FOUND
    assert raw.epsilon is None
    assert private.epsilon == pytest.approx(8, abs=0.1)
    assert private.exposure.reached.psnr.value < raw.exposure.reached.psnr.value - 10
    assert masked.exposure.verdict == "not found"
    page = (folder / "matrix.md").read_text(encoding="utf-8")
    assert page.count("\n| raw gradient | 1 | raw | 80,080 |  | 1.00 |") == 1
    assert "| secure sum | 1 | masked |" in page
    assert "matrix.svg" in page
    drawn = (folder / "matrix.svg").read_text(encoding="utf-8")
    assert "true records, 1 record" in drawn
    command.table(done)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "DP-FedAvg" in shown
    monkeypatch.setattr(matrix, "attacked", None)  # a row that is there is not made again
    again = command.run("digits", folder, ROWS, QUICK, 0, told, lambda _: None)
    assert again.rows == done.rows
    with pytest.raises(ValueError, match="holds a matrix with other settings; choose another --out"):
        command.run("digits", folder, ROWS, replace(QUICK, victims=3), 0, told, lambda _: None)
    (folder / "matrix.json").write_text("{")
    with pytest.raises(ValueError, match=r"matrix\.json is damaged"):
        command.run("digits", folder, ROWS, QUICK, 0, told, lambda _: None)


@pytest.mark.slow
def test_the_command_line_runs_the_rows_that_it_is_told():
    good("audit", "--matrix", "digits", "--only", "raw gradient, 1", "--out", "m", "--victims", 2)
    (row,) = json.loads(Path("m/matrix.json").read_text())["rows"]
    assert row["exposure"]["reached"]["identified"]["value"] == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--matrix", "imagenet"), "--matrix is 'imagenet'; use digits"),
        (("--matrix", "digits", "--only", "nothing"), "no row of the matrix has 'nothing' in its name"),
        ((), "give the folder of a run, or --matrix digits, and not both"),
        (
            ("somewhere", "--attacks", "all,none"),
            "--attacks has 'all'; use all, or some of inversion,images,membership",
        ),
        (("somewhere", "--victims", "0"), "--victims at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(args, told):
    result = fedveil("audit", *args)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_every_row_can_be_attacked():
    done = command.run("digits", Path("all"), (), QUICK, 0, {}, lambda _: None)
    assert {title(case) for case in matrix.cases()} == {title(row) for row in done.rows}
    assert all(row.exposure for row in done.rows)
