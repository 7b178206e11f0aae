"""The command line: what it prints, where, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import fedveil
from fedveil import cli, data
from fedveil.cli import commands, jobs, shell, show
from fedveil.cli.interrupt import Interrupt
from fedveil.cli.options import What
from fedveil.codecs.raw import Update
from fedveil.core import message
from fedveil.core.ledger import Ledger
from fedveil.core.message import Envelope
from fedveil.gpu.context import current
from fedveil.runs import progress, recipe
from fedveil.runs.checkpoint import read_checkpoint
from fedveil.runs.folder import RunFolder

KEYS = {
    "method", "rounds", "accuracy", "accuracy_last3", "loss", "bytes_up", "bytes_down", "bytes_up_per_client_round",
    "clients_failed", "seconds", "out", "stopped",
}  # fmt: skip
SMALL = ["--set", "split.clients=4", "--set", "cohort.size=2", "--set", "method.local.epochs=1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "no data"))
    return tmp_path


def fv(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in args])


def run(out: object, *args: object, rounds: int = 2, method: str = "fedavg") -> Result:
    return fv("run", f"digits/{method}", "--out", out, *SMALL, "--set", f"rounds={rounds}", *args)


def good(result: Result) -> Any:
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout) if result.stdout.startswith(("{", "[")) else result.stdout


def sentence(result: Result, code: int = 2) -> str:
    """The one sentence that a mistake is answered with."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code
    assert result.stdout == ""
    told = [line for line in result.stderr.splitlines() if line.startswith("fedveil: ")]
    assert result.stderr.endswith(told[-1] + "\n")
    return told[-1]


def weights(folder: Path | str) -> torch.Tensor:
    newest = max(Path(folder).glob("checkpoint-*.fv"))
    found: torch.Tensor = read_checkpoint(newest).state.weights
    return found


def stop_after_one_round(patch: pytest.MonkeyPatch) -> None:
    """As if Ctrl-C were pressed in the first round."""
    patch.setattr(Interrupt, "__call__", lambda self: setattr(self, "asked", True) or True)


# ---------------------------------------------------------------------------------------------------- run


def test_a_run_ends_with_one_json_object_and_a_whole_folder() -> None:
    result = run("a", "--format", "json")
    summary = good(result)
    assert set(summary) >= KEYS
    assert (summary["method"], summary["rounds"], summary["stopped"], summary["out"]) == ("fedavg", 2, "rounds", "a")
    assert all(value == float(f"{value:.6g}") for value in summary.values() if isinstance(value, float))
    assert {f.name for f in Path("a").iterdir()} >= {"recipe.toml", "environment.json", "ledger.jsonl", "split.svg"}
    assert recipe.read("a/recipe.toml").rounds == 2
    assert re.search(r"round [012]/2", result.stderr)  # a slow round is told before it ends


def test_a_run_ends_with_a_table_that_fits_a_terminal() -> None:
    shown = good(run("a"))
    assert re.search(r"^accuracy +0\.\d+$", shown, re.M)
    assert re.search(r"^bytes up +[\d,]+$", shown, re.M)
    assert max(map(len, shown.splitlines())) <= 80


def test_without_out_a_run_goes_below_runs() -> None:
    summary = good(fv("run", "digits/fedavg", *SMALL, "--set", "rounds=1", "--format", "json"))
    assert re.fullmatch(r"runs/digits-fedavg-\d{8}-\d{6}", summary["out"])


def test_an_own_recipe_and_its_target(tmp_path: Path) -> None:
    Path("mine.toml").write_text('like = "digits/fedavg"\ntarget = 0.01\n')
    summary = good(fv("run", "mine.toml", *SMALL, "--format", "json"))
    assert (summary["stopped"], summary["rounds"]) == ("target", 1)
    assert summary["out"].startswith("runs/mine-")
    result = fv("resume", summary["out"], "--format", "json")
    assert good(result)["stopped"] == "target"
    assert "reached its target accuracy 0.01 in round 1" in result.stderr


def test_what_resume_needs_is_in_the_environment() -> None:
    good(run("a", "--stack", 1, "--workers", 1, "--device", "cpu", "--data-dir", "here", "--insecure-test-noise"))
    known = json.loads(Path("a/environment.json").read_text())
    assert (known["stack"], known["workers"], known["device"], known["insecure_test_noise"]) == (1, 1, "cpu", True)
    assert known["data_dir"] == str(Path("here").absolute())
    assert known["command"].startswith("fedveil")


def test_a_resume_has_as_many_workers_as_the_run_whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.engines.local.LARGE", 1)  # so that auto is a worker a core
    for name, cores in (("a", 3), ("b", 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        good(run(name, "--stack", "auto", "--workers", "auto", rounds=1))
        known = json.loads(Path(name, "environment.json").read_text())
        assert (known["stack"], known["workers"]) == (None, cores)
    good(fv("resume", "a", "--rounds", 2))  # on two cores now
    assert json.loads(Path("a/environment.json").read_text())["workers"] == 3


def test_a_folder_with_a_run_is_not_written_over() -> None:
    good(run("a", rounds=1))
    assert "'fedveil resume a' continues it" in sentence(run("a"))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["run"], "Missing argument 'RECIPE'; see 'fedveil run --help'"),
        (["run", "digits/fedavgg"], "did you mean 'digits/fedavg'?"),
        (["run", "gone.toml"], "there is no recipe file gone.toml"),
        (["run", "digits/fedavg", "--set", "roundz=1"], "did you mean 'rounds'?"),
        (["run", "digits/fedavg", "--set", "task.model=cnn"], "unknown model 'cnn'"),
        (["run", "digits/fedavg", "--set", "split.clients=9999"], "too few for 9,999 clients"),
        (["run", "digits/fedavg", "--device", "tpu"], "device 'tpu' is not known"),
        (["run", "digits/fedavg", "--stack", "0"], "'0' is neither auto nor a number from 1"),
        (["run", "digits/fedavg", "--out", "file"], "file is a file; give a folder"),
        (["run", "mnist/fedavg"], "no data/mnist: put them there"),
        (["run", "digits/fedavg", "--set", "task.loss=next-character"], "the loss next_character does not fit outputs"),
        (["run", "digits/tofu", "--set", "method.up.shrink=3"], "shrink 3 do not suit images"),
        (["run", "digits/fedavg", "--format", "xml"], "'xml' is not one of 'table', 'json'"),
        (["xyzzy"], "No such command 'xyzzy'; see 'fedveil --help'"),
        (["resume", "gone"], "gone holds no run that could be resumed"),
        (["report", "gone"], "gone holds no recipe.toml"),
        (["inspect", "gone"], "there is no file gone"),
        (["inspect", "."], "there is no file ."),
        (["inspect", "file"], "file cannot be shown: not a frame"),
        (["describe", "fedavgg"], "did you mean 'fedavg'?"),
        (["list", "things"], "'things' is not one of"),
        (["compare", "digits/fedavg", "digits/fedavg"], "two of the recipes have one name"),
    ],
)
def test_a_mistake_is_one_sentence(args: list[str], told: str) -> None:
    Path("file").write_bytes(b"something else entirely, and long enough")
    result = fv(*args)
    assert told in sentence(result)
    assert result.stderr.count("\n") == 1
    assert not Path("gone").exists()


@pytest.mark.filterwarnings("default")
def test_clients_that_never_answer_are_a_sentence_of_code_1() -> None:
    result = run("a", "--set", "cohort.drop=0.999999", rounds=9)
    assert "no client answered for 5 rounds" in sentence(result, 1)
    for number in range(1, 6):
        assert f"fedveil: warning: no client answered in round {number}: 2 × dropped\n" in result.stderr


@pytest.mark.filterwarnings("default")
def test_a_run_that_never_learned_anything_ends_with_code_1_however_often_it_is_looked_at() -> None:
    told = "fedveil: b: nothing was learned: no answer could be used in 2 rounds; the last reasons: 2 × dropped\n"
    for result in (
        run("b", "--set", "cohort.drop=0.999999", "--format", "json"),
        fv("resume", "b", "--format", "json"),
    ):
        assert result.exit_code == 1
        assert json.loads(result.stdout)["rounds"] == 2
        assert result.stderr.endswith(told)
        assert result.stderr.count("nothing was learned") == 1


@pytest.mark.filterwarnings("default")
def test_a_comparison_with_a_run_that_never_learned_anything_is_finished_and_ends_with_code_1() -> None:
    result = fv("compare", "digits/fedavg", *SMALL, "--set", "rounds=1", "--set", "cohort.drop=0.999999", "--out", "c")
    assert result.exit_code == 1
    assert Path("c/report.html").is_file()
    assert "c/digits-fedavg: nothing was learned: no answer could be used in 1 round; " in result.stderr


def test_a_cohort_too_small_for_a_secure_sum_is_a_sentence() -> None:
    told = sentence(run("a", "--set", "method.secure.bits=20"))
    assert (
        told == "fedveil: fedavg with these settings needs at least 3 clients per round, "
        "but a round has at most 2; raise cohort.size"
    )


def test_the_first_failure_in_debug_mode_is_a_sentence_of_code_1() -> None:
    told = sentence(run("a", "--debug", "--set", "method.local.lr=1e30"), 1)
    assert re.search(r"client \d failed at Train in round 1", told)


@pytest.mark.filterwarnings("default")
def test_weights_that_run_away_are_a_sentence_of_code_1() -> None:
    result = run("a", "--set", "method.server.lr=1e12")
    assert result.exit_code == 1
    assert re.search(r"nothing was learned: .*the result was refused: weights reaches from -\S+ to \S+", result.stderr)


def test_a_folder_that_turns_out_unusable_is_a_sentence() -> None:
    good(run("a", rounds=1))
    Path("a/recipe.toml").write_text('rounds = 2\n[method]\nname = "scaffold"\n')
    assert "a holds a run of another recipe; choose another folder, or change the recipe back" in sentence(
        fv("resume", "a")
    )


def test_a_full_disk_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "a/checkpoint")

    monkeypatch.setattr(RunFolder, "save", full)
    assert sentence(run("a")) == "fedveil: a/checkpoint: No space left on device"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(fedveil, "run", broken)
    result = run("a")
    assert isinstance(result.exception, ValueError)
    assert result.exception.__notes__ == [shell.BUG]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert "pip install 'fedveil[fetch]'" in sentence(fv("run", "mnist/fedavg", "--fetch"))


# ---------------------------------------------------------------------------------------------------- resume


def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_after_one_round(patch)
        result = run("a", "--format", "json", rounds=3, method="scaffold")
    assert result.exit_code == 130
    assert (json.loads(result.stdout)["stopped"], json.loads(result.stdout)["rounds"]) == ("interrupt", 1)
    assert "stopped after round 1 of 3; 'fedveil resume a' goes on" in result.stderr
    assert good(fv("resume", "a", "--format", "json"))["rounds"] == 3
    good(run("b", rounds=3, method="scaffold"))
    assert torch.equal(weights("a"), weights("b"))


def test_a_finished_run_says_so_and_can_be_extended() -> None:
    good(run("a", rounds=1))
    before = Path("a/ledger.jsonl").read_bytes()
    result = fv("resume", "a", "--format", "json")
    assert good(result)["stopped"] == "rounds"
    assert "a is finished: it reached the last of its rounds in round 1" in result.stderr
    assert Path("a/ledger.jsonl").read_bytes() == before
    assert good(fv("resume", "a", "--rounds", 2, "--format", "json"))["rounds"] == 2
    assert recipe.read("a/recipe.toml").rounds == 2
    assert "a has 2 rounds already" in sentence(fv("resume", "a", "--rounds", 1))


def test_resume_uses_what_the_run_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    good(run("a", "--stack", 1, "--debug", rounds=1))
    made: list[tuple[object, ...]] = []
    engine = jobs.LocalEngine
    monkeypatch.setattr(jobs, "LocalEngine", lambda *args: made.append(args) or engine(*args))
    good(fv("resume", "a", "--rounds", 2))
    assert made == [(1, 1, True, False, "memory")]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("environment.json", "{", "environment.json is damaged"),
        ("environment.json", '{"device": 3}', "environment.json is damaged"),
        ("recipe.toml", "rounds =", "recipe.toml is not valid TOML"),
        ("ledger.jsonl", "", "ledger.jsonl has 0 rows but the checkpoint is of round 1"),
        ("checkpoint-00000001.fv", "nothing", "no checkpoint in a can be read"),
    ],
)
def test_a_damaged_folder_is_a_sentence(name: str, text: str, told: str) -> None:
    good(run("a", rounds=1))
    Path("a", name).write_text(text)
    assert told in sentence(fv("resume", "a"))


def test_a_folder_that_keeps_figures_only_is_reported_on_and_left_as_it_is() -> None:
    good(run("a", method="fedage"))
    kept = {name: Path("a", name).read_bytes() for name in ("recipe.toml", "environment.json", "ledger.jsonl")}
    kept["environment.json"] = kept["environment.json"].replace(b"data_dir", b"somewhere")
    Path("b").mkdir()
    for name, content in kept.items():
        Path("b", name).write_bytes(content)
    for command in ("resume", "audit", "fedage attack"):
        told = sentence(fv(*command.split(), "b"))
        assert "b keeps the figures of 2 rounds and no checkpoint, so its weights are gone; run it again" in told
    assert {path.name: path.read_bytes() for path in Path("b").iterdir()} == kept
    good(fv("report", "b"))


def test_looking_at_a_run_changes_nothing_in_it() -> None:
    good(run("a"))
    Path("a/checkpoint-00000002.fv").write_bytes(b"")
    before = Path("a/ledger.jsonl").read_bytes()
    with closing(RunFolder("a")):  # also while it is written
        good(fv("audit", "a", "--records", 100))
    assert Path("a/ledger.jsonl").read_bytes() == before


# ---------------------------------------------------------------------------------------------------- compare


def test_a_comparison_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["compare", "digits/fedavg", "digits/fedsgd", *SMALL, "--out", "c", "--format", "json"]
    loads: list[str] = []
    load = data.load
    monkeypatch.setattr(data, "load", lambda name, *args: loads.append(name) or load(name, *args))
    with monkeypatch.context() as patch:
        stop_after_one_round(patch)
        result = fv(*command, "--set", "rounds=2")
    assert result.exit_code == 130
    assert [r["rounds"] for r in json.loads(result.stdout)["runs"]] == [1]
    assert json.loads(result.stdout)["report"] is None
    assert "the same command with --out c goes on" in result.stderr

    first = good(fv(*command, "--set", "rounds=2"))
    assert [(r["method"], r["rounds"]) for r in first["runs"]] == [("fedavg", 2), ("fedsgd", 2)]
    assert first["report"] == "c/report.html"
    assert "fedsgd" in Path("c/report.html").read_text()
    assert loads == ["digits", "digits"]  # once a command

    assert good(fv(*command, "--set", "rounds=2")) == first
    assert "c/digits-fedavg holds a run of another recipe" in sentence(fv(*command, "--set", "rounds=3"))
    shown = good(fv(*command[:-1], "table", "--set", "rounds=2"))
    assert re.search(r"^digits-fedsgd +0\.\d+ +80\.1 kB +320\.3 kB +[\d.e-]+$", shown, re.M), shown


def test_a_comparison_with_a_private_run_has_a_column_for_it() -> None:
    private = ["--set", "split.max_records=360", "--set", "method.privacy.delta=1e-3", "--set", "rounds=1"]
    good(run("c/digits-fedprox", *private, method="fedprox"))
    good(run("c/digits-fedavg", "--set", "rounds=1"))
    jobs_ = [jobs.Job.held(Path("c", name)) for name in ("digits-fedavg", "digits-fedprox")]
    with show.out.capture() as shown:
        show.comparison(jobs_)
    assert re.search(r"^run +accuracy +and round +up in all +ε +by PLD +relation +seconds$", shown.get(), re.M)
    assert re.search(r"^digits-fedavg +0\.\d+ .* kB +– +– +– +\S+$", shown.get(), re.M)
    epsilon, tight = (jobs_[1].summary()[key] for key in ("epsilon", "epsilon_pld"))
    told = rf"{epsilon:.4g} +{tight:.4g} +add/remove"
    assert re.search(rf"^digits-fedprox +0\.\d+ .* kB +{told} +\S+$", shown.get(), re.M)


def test_the_demo_is_of_built_in_recipes() -> None:
    assert set(commands.DEMO) <= set(recipe.names())
    methods = {type(recipe.read(name).method).name for name in commands.DEMO}
    assert methods == {"fedavg", "scaffold", "fedsynth", "tofu", "fedage", "baffle", "fedlap"}


def test_what_noise_is_worth() -> None:
    told = good(fv("privacy", "--noise", 1, "--sample-rate", 0.0256, "--steps", 200, "--format", "json"))
    assert told["epsilon"] == pytest.approx(2.787, abs=0.001)
    solved = good(fv("privacy", "--epsilon", 2, "--sample-rate", 0.0256, "--steps", 200, "--format", "json"))
    assert solved["noise"] > 1
    assert solved["epsilon"] <= 2
    assert "3 are missing" in sentence(fv("privacy", "--noise", 1))


def test_the_cost_is_known_before_the_run() -> None:
    changes = [*SMALL, "--set", "rounds=2", "--set", "method.up.steps=2"]
    told = good(fv("cost", "digits/tofu", *changes, "--format", "json"))
    spent = good(fv("run", "digits/tofu", *changes, "--format", "json"))
    assert (told["up"]["total"], told["down"]["total"]) == (spent["bytes_up"], spent["bytes_down"])
    assert told["passes"]["total"] == spent["passes"]
    shown = good(fv("cost", "digits/tofu", "--set", "method.down.name=tofu"))
    assert re.search(r"^bytes sent +9,\d{3} +97\d,\d{3} +8,008,000 +8\.\d+$", shown, re.M), shown
    assert "Estimate: a client needs" in shown
    assert "caught up" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_long_round_tells_how_far_its_clients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    result = run("a", "--set", "method.up.steps=120", rounds=1, method="tofu")
    good(result)
    told = re.findall(r"^round 0/1  step (\d+)/(\d+)$", result.stderr, re.M)
    assert list(dict.fromkeys(total for _, total in told)) == ["18", "120"]  # an epoch, then the fit
    assert ("1", "120") in told
    assert current().observer is None


def test_a_private_round_tells_what_it_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    quick = ["--set", "rounds=2", "--set", "method.passes=1", "--set", "method.batches=2", "--set", "method.steps=1"]
    result = fv("run", "digits/fedlap-dp", "--out", "a", *quick)
    good(result)
    spent = [row.epsilon for row in Ledger.read(Path("a/ledger.jsonl")).rows]
    assert re.findall(r"^round ./2  accuracy [\d.]+  ε ([\d.]+) \(add/remove\)  [\d.]+ kB up", result.stderr, re.M) == [
        f"{epsilon:.4g}" for epsilon in spent
    ]


def test_a_run_ends_well_where_another_round_would_exceed_its_budget() -> None:
    private = ["split.max_records=360", *(f"method.privacy.{key}" for key in ("noise=1", "delta=1e-3", "budget=5"))]
    more = [word for change in ["cohort.size=4", "method.local.batch=90", *private] for word in ("--set", change)]
    result = run("a", *more, "--format", "json", rounds=9)
    figures = good(result)
    assert figures["stopped"] == "budget"
    assert figures["rounds"] == len(Ledger.read(Path("a/ledger.jsonl")).rows) < 9
    assert 4 < figures["epsilon"] <= 5
    told = f"fedveil: stopped after round {figures['rounds']} of 9: another round would exceed the privacy budget"
    assert result.stderr.splitlines()[-1] == told
    again = fv("resume", "a", "--format", "json")
    assert good(again) == figures
    assert told in again.stderr


def test_a_report_goes_to_the_first_folder_or_where_told() -> None:
    good(run("a", rounds=1))
    assert good(fv("report", "a")) == "a/report.html\n"
    assert good(fv("report", "a", "-o", "b/own.html")) == "b/own.html\n"
    assert "<html" in Path("b/own.html").read_text()


# ---------------------------------------------------------------------------------------------------- looking


def test_the_version() -> None:
    assert good(fv("--version")) == f"{fedveil.__version__}\n"


@pytest.mark.parametrize("command", ["", "run", "resume", "compare", "cost", "report", "list", "describe", "inspect"])
def test_help_is_short_and_has_an_example(command: str) -> None:
    shown = good(fv(*command.split(), "--help"))
    assert "fedveil" in shown.partition("Example: " if command else "Start with: ")[2]
    assert len(shown.splitlines()) <= 32
    assert max(map(len, shown.splitlines())) <= 80
    assert "[default" not in shown


def test_no_command_is_a_question_for_help() -> None:
    assert good(fv()) == good(fv("--help"))


def test_describe_tells_which_of_the_papers_settings_are_not_the_defaults() -> None:
    told = good(fv("describe", "fedlap", "--format", "json"))["as_printed"]
    assert told["mnist/fedlap-paper"] == {
        "method.steps": 1000,
        "method.descent": "plain",
        "method.image_lr": 100.0,
    }
    assert told["mnist/fedlap-dp-paper"]["method.image_steps"] == 10
    shown = " ".join(fv("describe", "fedlap").stdout.split())
    names = "cifar10/fedlap-iid-paper, cifar10/fedlap-paper, mnist/fedlap-iid-paper, mnist/fedlap-paper"
    assert f"the paper's settings, where they differ recipe {names} method.steps" in shown
    assert good(fv("describe", "fedavg", "--format", "json"))["as_printed"] == {}


def test_a_run_that_stops_early_is_finished_and_compared_by_its_metric() -> None:
    options = [*SMALL, "--set", "task.validation=0.2", "--set", "early_stopping=1", "--set", "method.local.lr=1e-9"]
    options += ["--set", 'task.metrics=["f1", "accuracy"]', "--format", "json"]
    result = fv("run", "digits/fedavg", *options, "--out", "a")
    summary = good(result)
    assert (summary["stopped"], summary["metric"]) == ("early", "f1")
    assert summary["rounds"] == 2
    assert summary["accuracy"] is not None
    assert (
        "stopped after round 2 of 20: early stopping: validation_f1 has not improved in 1 evaluation" in result.stderr
    )
    assert list(Path("a").glob("best-00000001.fv"))
    again = fv("resume", "a", "--format", "json")
    assert good(again)["stopped"] == "early"
    assert "a is finished: it stopped early in round 2" in again.stderr
    shown = fv("compare", "digits/fedavg", "digits/fedsgd", *options[:-2], "--set", "rounds=1", "--out", "c")
    assert "F1" in shown.stdout
    told = fv("run", "digits/fedavg", *SMALL, "--set", "early_stopping=1", "--out", "b")
    assert told.exit_code != 0
    assert "early_stopping is 1, but there are no validation records" in told.stderr
    assert not Path("b").exists()


@pytest.mark.parametrize("what", list(What))
def test_lists(what: What) -> None:
    found = good(fv("list", what, "--format", "json"))
    shown = good(fv("list", what))
    assert all(entry["summary"] and entry["name"] in shown for entry in found)
    assert max(map(len, shown.splitlines())) <= 80
    assert what != What.data or len({entry["summary"] for entry in found}) == len(found)
    names = {
        "methods": "q-fedavg",
        "codecs": "top-k",
        "models": "lenet5",
        "data": "shakespeare",
        "losses": "huber",
        "metrics": "auroc",
        "recipes": "digits/fedavg-classes",
    }
    assert names[what] in [entry["name"] for entry in found]
    lines = good(fv("list", what)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == len(found) or what != "recipes"


@pytest.mark.parametrize("codec", sorted(fedveil.Codec.registry))
def test_a_codec_is_listed_and_described(codec: str) -> None:
    assert codec in [entry["name"] for entry in good(fv("list", "codecs", "--format", "json"))]
    shown = good(fv("describe", codec))
    assert f"method.up.name {codec}" in " ".join(shown.split())
    if codec not in fedveil.METHODS:
        told = good(fv("describe", codec, "--format", "json"))
        assert told["keys"]["method.up.name"] == codec
        assert told["summary"].endswith(".")
        assert ("method.down takes the same" in shown) == fedveil.Codec.registry[codec].server_can_encode


@pytest.mark.parametrize("method", sorted(fedveil.METHODS))
def test_a_method_is_described_with_keys_that_can_be_set(method: str, tmp_path: Path) -> None:
    (bare := tmp_path / "bare.toml").write_text("rounds = 1\n")
    told = good(fv("describe", method, "--format", "json"))
    assert {"summary", "sends", "server_sees", "network_sees", "paper"} <= set(told)
    assert {claim["kind"] for claim in told["claims"]} <= {"proved", "measured", "heuristic"}
    assert told["keys"]["method.name"] == method
    shown = good(fv("describe", method))
    assert max(map(len, shown.splitlines())) <= 80
    for key, value in told["keys"].items():
        assert key in shown
        if value is not None:
            recipe.read(str(bare), [f"method.name={method}", f"{key}={json.dumps(value)}"])


def test_the_keys_of_a_method_are_written_as_in_a_recipe() -> None:
    shown = good(fv("describe", "fedavg"))
    assert re.search(r"^  method\.up\.name +raw$", shown, re.M)
    assert re.search(r"^  method\.feedback +false$", shown, re.M)
    assert re.search(r"^  method\.local\.steps +none$", shown, re.M)
    keys = r"noise, clip, delta, budget,\s+accountant, mechanism"
    assert re.search(rf"^  method\.privacy +none, or its {keys}$", shown, re.M)
    assert re.search(r"^  method\.down +none, or its name$", shown, re.M)
    assert re.search(r"^  method\.up\.steps +1000$", good(fv("describe", "tofu")), re.M)
    assert re.search(r'^  method\.augment +""$', good(fv("describe", "fedlap")), re.M)


def test_a_narrow_terminal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell.out, "_width", 25)
    assert re.search(r"^  method\.local\.weight_decay +0\.0$", good(fv("describe", "fedavg")), re.M)


def test_a_checkpoint_is_shown_with_state_and_memories() -> None:
    good(run("a", method="scaffold"))
    told = good(fv("inspect", "a/checkpoint-00000002.fv", "--format", "json"))
    assert (told["kind"], told["round"]) == ("Snapshot", 2)
    state, slot, memory, *_ = told["records"]
    assert (state["part"], state["kind"], state["fields"]["slots"]) == ("state", "State", "scaffold")
    assert (slot["part"], slot["kind"]) == ("scaffold of the server", "Control")
    assert memory["kind"] == "Control"
    assert re.fullmatch(r"scaffold of client \d, round \d, question 0", memory["part"])
    seen = state["fields"]["weights"]
    assert (seen["dtype"], seen["shape"]) == ("float32", [20010])
    assert seen["norm"] == pytest.approx(float(weights("a").norm()), rel=1e-5)
    assert seen["min"] < seen["mean"] < seen["max"]
    shown = good(fv("inspect", "a/checkpoint-00000002.fv"))
    assert max(map(len, shown.splitlines())) <= 80
    good(run("b", "--set", "method.down.name=half", "--set", "method.server.optimizer=momentum", rounds=1))
    shown = good(fv("inspect", "b/checkpoint-00000001.fv"))
    assert re.search(r"^  slots +server, down$", shown, re.M)
    assert re.search(r"^  second +none$", shown, re.M)
    assert re.search(r"^  history +1 entries$", shown, re.M)
    good(run("c", rounds=1))
    assert re.search(r"^  slots +none$", good(fv("inspect", "c/checkpoint-00000001.fv")), re.M)


def test_a_message_is_shown_with_its_envelope() -> None:
    frame = message.frame(Update(torch.tensor([3.0, -4.0]), 12), Envelope(b"12345678", 4, 7, 1))
    Path("m.fv").write_bytes(frame)
    told = good(fv("inspect", "m.fv", "--format", "json"))
    assert told["records"][0]["fields"] == {
        "update": {"dtype": "float32", "shape": [2], "min": -4.0, "max": 3.0, "mean": -0.5, "norm": 5.0},
        "records": 12,
    }
    assert (told["kind"], told["run"], told["round"]) == ("Update", b"12345678".hex(), 4)
    assert (told["client"], told["question"]) == (7, 1)


def test_a_hostile_file_is_a_sentence() -> None:
    good(run("a", rounds=1))
    checkpoint = Path("a/checkpoint-00000001.fv").read_bytes()
    frame = message.frame(Update(torch.ones(5), 12), Envelope())
    unknown = message.prefix(250, Envelope()) + frame[message.PREFIX_BYTES :]
    wrong = [b"", checkpoint[:-1], checkpoint[:40], checkpoint[:-20] + bytes(20), unknown, frame[:-1], frame + b"\0"]
    wrong += [frame[:i] + bytes([frame[i] ^ 0xFF]) + frame[i + 1 :] for i in (0, 2, 3, 22, 23, *range(24, 40))]
    for raw in wrong:
        Path("x.fv").write_bytes(raw)
        assert "x.fv cannot be shown: " in sentence(fv("inspect", "x.fv"))
    Path("x.fv").write_bytes(unknown)
    assert "no record of kind 250" in sentence(fv("inspect", "x.fv"))


# ---------------------------------------------------------------------------------------------------- real processes


Child = subprocess.Popen[str]


@pytest.fixture
def process() -> Iterator[Callable[..., Child]]:
    """Starts `python -m fedveil` with some arguments; what still runs after the test is killed."""
    children: list[Child] = []

    def start(*args: str) -> Child:
        env, pipe = os.environ | {"PYTHONPATH": str(Path(fedveil.__file__).parents[1])}, subprocess.PIPE
        command = [sys.executable, "-m", "fedveil", *args]
        children.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def await_line(child: Child, start: str) -> None:
    assert child.stderr
    seen = ""
    while not (line := child.stderr.readline()).startswith(start):
        seen += line
        assert line, f"no line begins with '{start}' in: {seen}"


def test_ctrl_c_stops_after_the_round_and_leaves_a_run_to_resume(process: Callable[..., Child]) -> None:
    child = process("run", "digits/fedavg", "--set", "rounds=9999", "--out", "a", "--format", "json", *SMALL)
    await_line(child, "round ")  # the first round that is told need not be round 1
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=300)
    assert child.returncode == 130
    summary = json.loads(stdout)
    assert summary["stopped"] == "interrupt"
    assert "stopping after this round" in stderr
    assert "'fedveil resume a' goes on" in stderr
    done = summary["rounds"]
    assert good(fv("resume", "a", "--rounds", done + 1, "--format", "json"))["rounds"] == done + 1


def test_a_second_ctrl_c_aborts_at_once(process: Callable[..., Child]) -> None:
    slow = ["--set", "method.local.epochs=100000"]
    child = process("run", "digits/fedavg", "--out", "a", *SMALL, *slow)
    await_line(child, "fedveil: fedavg, 20 rounds, in a")
    while not Path("a/ledger.jsonl").exists():
        time.sleep(0.05)
    time.sleep(0.5)  # now threads train, and an exception would wait for them
    child.send_signal(signal.SIGINT)
    await_line(child, "fedveil: stopping after this round")
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=300)
    assert (child.returncode, stdout) == (130, "")
    assert "aborted; 'fedveil resume a' goes on" in stderr


def test_looking_around_imports_neither_matplotlib_nor_sklearn() -> None:
    code = (
        "import sys; from fedveil.cli import main; sys.argv[1:] = ['list', 'recipes']\ntry: main()\nexcept SystemExit: "
    )
    code += "print(*{'matplotlib', 'sklearn'} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": str(Path(fedveil.__file__).parents[1])}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout
    assert shown.splitlines()[-1] == ""


HEAVY = {"torch", "numpy", "scipy", "dp_accounting", "cryptography", "matplotlib", "sklearn"}
QUICK = f"""
import os, sys
from fedveil.cli import main

for line in ("", "--version", "run --help", "deploy init --help", "fedage --help", "audit --help", "nonsense", "run",
             "run --nonsense", "list nothing", "fedage pretrain --block x", "completion"):
    if line == "completion":
        os.environ.update(_FEDVEIL_COMPLETE="complete_bash", COMP_WORDS="fedveil re", COMP_CWORD="1")
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        print(line, end.code or 0, *{HEAVY} & set(sys.modules), sep=":")
"""


def test_help_version_completion_and_usage_errors_do_without_torch() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(fedveil.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True, env=env, check=True)
    ends = {line.partition(":")[0]: line.partition(":")[2] for line in ran.stdout.splitlines() if ":" in line}
    wrong = ("nonsense", "run", "run --nonsense", "list nothing", "fedage pretrain --block x")
    assert [ends[line] for line in wrong] == ["2"] * len(wrong)
    right = ("", "--version", "run --help", "deploy init --help", "fedage --help", "audit --help", "completion")
    assert [ends[line] for line in right] == ["0"] * len(right)
    assert "plain,resume" in ran.stdout
    assert f"\n{fedveil.__version__}\n" in ran.stdout


def test_fedveil_has_its_names_when_they_are_used() -> None:
    code = "import sys, fedveil; assert 'torch' not in sys.modules; "
    code += (
        "from fedveil import *; print(FedAvg is fedveil.FedAvg is fedveil.METHODS['fedavg'], fedveil.data.load is load)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(fedveil.__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert ran.stdout == "True True\n"
    assert set(fedveil.__all__) <= set(dir(fedveil))
    with pytest.raises(AttributeError, match="module 'fedveil' has no attribute 'FedAverage'"):
        fedveil.FedAverage  # noqa: B018
