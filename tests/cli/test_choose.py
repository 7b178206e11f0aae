"""`fedveil choose`: what it prints, what it writes, and that a recommended recipe keeps what was asked for."""

import json
from pathlib import Path

import pytest

import fedveil as library
from fedveil.core.ledger import Ledger
from fedveil.runs import recipe
from shell import fv, good


def test_the_first_recipe_is_written_runs_and_keeps_the_uplink(tmp_path: Path) -> None:
    file, folder = tmp_path / "best.toml", tmp_path / "run"
    told = good("choose", "--uplink", "12kB", "--set", "split.clients=20", "-o", file, "--format", "json")
    assert told["situation"]["clients"] == 20
    first = told["choices"][0]
    assert first["toml"] == file.read_text(encoding="utf-8")
    result = fv("run", file, "--set", "rounds=2", "--out", folder)
    assert result.exit_code == 0, result.stderr
    rows = Ledger.read(folder / "ledger.jsonl").rows
    assert max(max(row.up.values()) for row in rows) == first["cost"]["up"]["most"] <= 12_000


def test_words_say_why_what_it_proves_and_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.cli.shell.out.width", 80)
    told = fv("choose", "--clients", 1000, "--records", 600, "--uplink", "12kB").stdout
    assert max(map(len, told.splitlines())) <= 80
    for word in (
        "why: ",
        "measured as: digits/",
        "measured: ",
        "extrapolates: ",
        "5 of 1,000 clients",
        "Others do not fit",
    ):
        assert word in told


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--uplink", "1B"], 1, "no measured recipe fits; "),
        (["--uplink", "much"], 2, "'much' is no size; use for example 100kB or 1MB"),
        (["--cohort", "11"], 2, "--cohort is 11, but there are 10 clients; lower it"),
        (["--delta", "1e-3"], 2, "--delta is about differential privacy; add --epsilon"),
        (["--unit", "client"], 2, "--unit is about differential privacy; add --epsilon"),
        (["--epsilon", "-1"], 2, "--epsilon is -1; use a number above 0"),
        (["--epsilon", "1", "--delta", "2"], 2, "--delta is 2; use a number between 0 and 1"),
        (["--task", "digits/nothing"], 2, "there is no recipe 'digits/nothing'"),
        (["--records", "0"], 2, "'0' is no number from 1"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: list[str], code: int, says: str) -> None:
    result = fv("choose", *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_number_of_clients_reaches_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "best.toml"
    good("choose", "--clients", 30, "--cohort", 7, "-o", file)
    plan = recipe.read(str(file))
    largest = -(-len(library.load("digits").x) // 30)
    assert (plan.split.clients, plan.cohort.size, plan.split.max_records) == (30, 7, largest)


def test_json_names_what_excludes_the_others() -> None:
    told = json.loads(fv("choose", "--no-backprop", "--format", "json").stdout)
    excluded = {each["recipe"]: each["broken"] for each in told["others"]}
    assert excluded["fedavg"] == {"--no-backprop": "needs gradients"}
    assert all("baffle" in each["recipe"] for each in told["choices"])


def test_the_recipe_that_is_written_has_the_epsilon_asked_for_and_not_the_measured_one(tmp_path: Path) -> None:
    file = tmp_path / "best.toml"
    told = good("choose", "--epsilon", 2, "--delta", "1e-4", "--cohort", 10, "-o", file, "--format", "json")
    promise = recipe.read(str(file)).method.promise
    assert promise is not None
    assert (promise.budget, promise.delta) == (2.0, 1e-4)
    assert told["choices"][0]["cost"]["epsilon"] <= 2
