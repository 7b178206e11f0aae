"""A search over settings: what decides, what is kept, and how it goes on after Ctrl-C."""

import dataclasses
import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from fedveil import data
from fedveil.cli.interrupt import Interrupt
from fedveil.core.ledger import Ledger
from fedveil.runs import recipe
from shell import fv

pytest.importorskip("optuna")

SMALL = ["split.clients=4", "cohort.size=2", "method.local.epochs=1", "rounds=3"]
SETS = [word for change in SMALL for word in ("--set", change)]
RATE = ["--over", "method.local.lr=log:0.001..1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "no data"))


def tune(out: str, *args: object, source: str = "digits/fedavg") -> Result:
    return fv("tune", source, *SETS, "--out", out, "--format", "json", *args)


def good(out: str, *args: object) -> Any:
    result = tune(out, *args)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


def sentence(*args: object, **more: Any) -> str:
    result = tune("a", *args, **more)
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    return result.stderr.splitlines()[-1]


def test_a_search_is_by_validation_records_and_tests_the_best_once() -> None:
    told = good("a", *RATE, "--trials", 3, "--seeds", 2)
    assert [trial["trial"] for trial in told["trials"]] == [0, 1, 2]
    assert told["trials"][0]["changes"] == {"method.local.lr": 0.3}  # the recipe's own
    assert len({trial["changes"]["method.local.lr"] for trial in told["trials"]}) == 3
    assert told["metric"] == "validation_accuracy"
    done = [trial for trial in told["trials"] if trial["state"] == "complete"]
    for trial in done:
        ledgers = [Ledger.read(Path(f"a/trials/{trial['trial']:04d}/seed-{s}/ledger.jsonl")) for s in (0, 1)]
        ends = [ledger.rows[-1].metrics["validation_accuracy"] for ledger in ledgers]
        assert trial["value"] == pytest.approx(statistics.mean(ends), rel=1e-5)
    assert told["best"]["value"] == max(trial["value"] for trial in done)
    plans = [recipe.read(f"a/trials/0000/seed-{seed}/recipe.toml") for seed in (0, 1)]
    assert [(plan.seed, plan.task.validation) for plan in plans] == [(0, 0.1), (1, 0.1)]

    best = recipe.read("a/best.toml")
    assert best.method.local.lr == pytest.approx(told["best"]["changes"]["method.local.lr"], rel=1e-5)
    assert best.task.validation == 0
    (folder,) = Path("a").glob("best-*")
    assert recipe.read(str(folder / "seed-0/recipe.toml")) == best
    ends = [Ledger.read(folder / f"seed-{seed}/ledger.jsonl").rows[-1].metrics["accuracy"] for seed in (0, 1)]
    assert told["test"]["mean"] == pytest.approx(statistics.mean(ends), rel=1e-5)
    assert all(Path(picture).read_text().startswith("<svg") for picture in told["figures"])
    more = good("a", *RATE, "--trials", 4, "--seeds", 2)["trials"]
    assert more[:3] == told["trials"]
    assert len(more) == 4


def test_the_test_may_have_seeds_of_its_own() -> None:
    told = good("a", *RATE, "--trials", 1, "--seeds", "7,", "--test-seeds", "2-3")
    assert [path.name for path in sorted(Path("a/trials/0000").iterdir())] == ["seed-7"]
    assert list(told["test"]["seeds"]) == ["2", "3"]
    assert sorted(path.name for path in Path("a/best-0000").iterdir()) == ["seed-2", "seed-3"]
    assert sentence(*RATE, "--test-seeds", "x").startswith("fedveil: --test-seeds is 'x'; use a number of seeds")


def test_the_test_records_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*RATE, "--trials", 3, "--seeds", 1, "--set", "target=0.3"]  # a target would end runs by test records
    first, load = good("a", *args), data.load

    def shuffled(*given: Any) -> data.Data:
        found = load(*given)
        return dataclasses.replace(found, test_y=found.test_y.flip(0))

    monkeypatch.setattr(data, "load", shuffled)
    monkeypatch.setattr("fedveil.runs.own.data.load", shuffled, raising=False)
    other = good("b", *args)
    assert other["test"]["mean"] != first["test"]["mean"]
    assert other["trials"] == first["trials"]


def test_ctrl_c_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    args = [*RATE, "--over", "method.up.name=raw,half", "--trials", 3, "--seeds", 2]
    straight, stops = good("a", *args), 0
    for after in (2, 5, 4, 50):  # rounds until Ctrl-C, each in another place of the search
        asked = itertools.count(1)
        with monkeypatch.context() as patch:

            def pressed(self: Interrupt, asked: Any = asked, after: int = after) -> bool:
                self.asked = self.asked or next(asked) > after
                return self.asked

            patch.setattr(Interrupt, "__call__", pressed)
            result = tune("b", *args)
        stops += result.exit_code == 130
        if result.exit_code == 130:
            assert "the same command with --out b goes on" in result.stderr
    assert stops >= 3
    again = good("b", *args)
    for key in ("trials", "test", "best"):
        assert again[key] == straight[key]


def test_a_kill_before_the_search_begins_does_not_lose_its_first_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    optuna = pytest.importorskip("optuna")
    for name in ("set_user_attr", "enqueue_trial"):
        with monkeypatch.context() as patch:
            patch.setattr(optuna.study.Study, name, lambda *_, **__: (_ for _ in ()).throw(SystemError))
            assert isinstance(tune("a", *RATE, "--trials", 2, "--seeds", 1).exception, SystemError)
    rates = [trial["changes"]["method.local.lr"] for trial in good("a", *RATE, "--trials", 2, "--seeds", 1)["trials"]]
    assert rates[0] == 0.3
    assert rates[1] != 0.3


def test_weak_trials_end_early() -> None:
    told = good("a", "--over", "method.local.lr=0.3,0.2,1e-9,1e-8", "--trials", 9, "--seeds", 1)
    pruned = [trial["trial"] for trial in told["trials"] if trial["state"] == "pruned"]
    assert pruned
    assert min(pruned) >= 5
    for number in pruned:
        assert len(Ledger.read(Path(f"a/trials/{number:04d}/seed-0/ledger.jsonl")).rows) < 3


def test_runs_are_compared_at_a_budget_of_bytes() -> None:
    rounds = Ledger.read(Path(_trained()) / "ledger.jsonl").rows
    told = good("a", *RATE, "--trials", 1, "--seeds", 1, "--at", f"bytes={2 * rounds[0].bytes_up}")
    ledger = Ledger.read(Path("a/trials/0000/seed-0/ledger.jsonl"))
    assert told["best"]["value"] == pytest.approx(ledger.rows[1].metrics["validation_accuracy"], rel=1e-5)
    assert len(ledger.rows) == 3


def _trained() -> str:
    assert fv("run", "digits/fedavg", *SETS, "--set", "rounds=1", "--out", "r").exit_code == 0
    return "r"


def test_the_epsilon_of_all_trials_adds_up() -> None:
    private = ["split.max_records=360", "method.privacy.delta=1e-3", "method.local.batch=90", "rounds=1"]
    more = [word for change in private for word in ("--set", change)]
    result = tune("a", *RATE, "--trials", 2, "--seeds", 1, *more, "--count-epsilon")
    told = json.loads(result.stdout)
    each = Ledger.read(Path("a/trials/0000/seed-0/ledger.jsonl")).rows[-1].epsilon
    assert each
    assert told["tuning"]["epsilon"] == pytest.approx(3 * each, rel=1e-4)  # two trials and the test
    assert told["tuning"]["delta"] == pytest.approx(3e-3)
    assert "note: tuning is not free" in result.stderr


def test_a_metric_of_which_less_is_better() -> None:
    told = good("a", *RATE, "--trials", 3, "--seeds", 1, "--metric", "loss", "--prune", "none")
    assert told["metric"] == "validation_loss"
    assert told["best"]["value"] == min(trial["value"] for trial in told["trials"])


def test_a_trial_that_cannot_run_is_left_out() -> None:
    told = good("a", "--over", "cohort.drop=0.0,0.999999", "--trials", 4, "--seeds", 1, "--set", "rounds=6")
    assert {trial["state"] for trial in told["trials"]} == {"complete", "fail"}
    failed = next(trial for trial in told["trials"] if trial["state"] == "fail")
    assert failed["changes"] == {"cohort.drop": "0.999999"}
    assert "no client answered for 5 rounds" in failed["why"]


def test_the_table_has_the_best_trial_first() -> None:
    shown = fv("tune", "digits/fedavg", *SETS, "--out", "a", *RATE, "--trials", "3", "--seeds", "1").stdout
    assert re.search(r"^trial +local\.lr +accuracy$", shown, re.M), shown
    best = re.search(r"^best: trial (\d), in a/best\.toml$", shown, re.M)
    assert best
    assert shown.splitlines()[2].split()[0] == best[1]
    assert re.search(r"^test accuracy, measured once with 1 seed: \d\d\.\d\d%$", shown, re.M)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "tune has nothing to search; add --over"),
        (["--over", "method.local.lrr=0..1"], "--over method.local.lrr: unknown key 'method.local.lrr'"),
        (["--over", "method.local.lr=1..0.1"], "is an empty range"),
        ([*RATE, "--metric", "f1"], "--metric is 'f1', but the task measures accuracy, top5, loss; set task.metrics"),
        ([*RATE, "--at", "bytes=10", "--trials", "1"], "the first round uses 160,160 bytes, and no measured round is"),
        (
            [*RATE, "--at", "epsilon=2"],
            "--at epsilon=2 is for differential privacy, and fedavg with these settings has",
        ),
        ([*RATE, "--count-epsilon"], "--count-epsilon is for differential privacy"),
        ([*RATE, "--budget-seconds", "1e-9"], "--budget-seconds 1e-09 was spent before a trial was complete"),
        ([*RATE, "--budget-seconds", "0"], "--budget-seconds is 0; use a number above 0"),
        ([*RATE, "--trials", "0"], "'0' is no number from 1"),
        ([*RATE, "--seeds", "x"], "--seeds is 'x'"),
    ],
)
def test_a_mistake_is_one_sentence(args: list[str], told: str) -> None:
    assert told in sentence(*args)


def test_a_search_of_something_else_is_not_continued() -> None:
    good("a", *RATE, "--trials", 1, "--seeds", 1)
    assert "a holds a search with another --seeds; choose another --out" in sentence(*RATE, "--seeds", 2)
    assert "another recipe" in sentence(*RATE, "--seeds", 1, "--set", "rounds=4")
    Path("a/study.db").write_text("something else")
    assert "study.db cannot be read as a study" in sentence(*RATE, "--seeds", 1)


def test_seeds_in_parallel_find_the_same() -> None:
    few = ["--trials", 1, "--seeds", 3, "--test-seeds", "0,"]
    one = good("one", *RATE, *few)
    two = good("two", *RATE, *few, "--jobs", 2)
    assert [trial["value"] for trial in one["trials"]] == [trial["value"] for trial in two["trials"]]
    assert one["test"] == two["test"]


def test_the_report_has_the_pictures_of_the_search_and_the_best_runs() -> None:
    told = good("a", *RATE, "--trials", 2, "--seeds", 2)
    page = Path(told["report"]).read_text(encoding="utf-8")
    assert "<h2>Search</h2>" in page
    assert "Every trial of the search" in page
    assert "2 runs" in page
