"""Several seeds and values on the command line: the folders, the table, the queue, and Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedveil.cli.interrupt import Interrupt
from fedveil.cli.jobs import Job
from fedveil.runs import recipe
from fedveil.runs.checkpoint import read_checkpoint
from shell import fv, good

SMALL = ["--set", "split.clients=4", "--set", "cohort.size=2", "--set", "method.local.epochs=1"]
TWO = [*SMALL, "--set", "rounds=2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "no data"))


def sentence(*args: object) -> str:
    result = fv(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr.splitlines()[-1]


def weights(folder: Path | str) -> torch.Tensor:
    found: torch.Tensor = read_checkpoint(max(Path(folder).glob("checkpoint-*.fv"))).state.weights
    return found


def test_a_run_of_several_seeds_has_a_folder_each_and_is_resumed() -> None:
    command = ["run", "digits/fedavg", *TWO, "--seeds", "0,2", "--out", "a", "--format", "json"]
    with pytest.MonkeyPatch.context() as patch:  # as if Ctrl-C were pressed in the first round
        patch.setattr(Interrupt, "__call__", lambda self: setattr(self, "asked", True) or True)
        stopped = fv(*command)
    assert stopped.exit_code == 130
    assert "the same command with --out a goes on" in stopped.stderr
    assert [(r["seed"], r["rounds"]) for r in json.loads(stopped.stdout)["runs"]] == [(0, 1)]
    told = good(*command)
    assert [(r["seed"], r["rounds"], r["out"]) for r in told["runs"]] == [(0, 2, "a/seed-0"), (2, 2, "a/seed-2")]
    (row,) = told["recipes"]
    values = [r["value"] for r in told["runs"]]
    assert row["value"]["mean"] == pytest.approx(sum(values) / 2, rel=1e-5)
    assert row["value"]["count"] == 2
    assert row["difference"] is None
    assert Path("a/report.html").is_file()
    assert good(*command) == told  # everything is there
    held = Job.held(Path("a/seed-0")).ledger.right
    assert held is not None
    assert held.round == 2
    good("run", "digits/fedavg", *TWO, "--set", "seed=2", "--out", "b")
    assert torch.equal(weights("a/seed-2"), weights("b"))
    assert "a/seed-0 holds a run of another recipe" in sentence(*command, "--set", "rounds=3")


def test_a_comparison_of_seeds_has_paired_differences() -> None:
    command = ["compare", "digits/fedavg", "digits/fedsgd", *TWO, "--seeds", 2, "--out", "c"]
    shown = good(*command)
    assert re.search(r"^digits-fedavg +2 +\d+\.\d\d% ± \d", shown, re.M), shown
    assert "[95% interval]" in shown
    assert max(map(len, shown.splitlines())) <= 80
    told = good(*command, "--format", "json")["recipes"]
    assert [row["recipe"] for row in told] == ["digits-fedavg", "digits-fedsgd"]
    assert told[1]["difference"]["mean"] == pytest.approx(told[1]["value"]["mean"] - told[0]["value"]["mean"], abs=1e-5)
    assert told[1]["difference"]["seen"] == ("no difference seen" not in shown)


def test_what_is_held_is_in_the_recipes() -> None:
    hold = ["--hold", "split,cohorts,noise", "--insecure-test-noise"]
    good("run", "digits/fedavg", *SMALL, "--set", "rounds=1", "--seeds", "3,4", *hold, "--out", "a")
    plans = [recipe.read(f"a/seed-{seed}/recipe.toml") for seed in (3, 4)]
    assert [(p.seed, p.split.seed, p.cohort.seed, p.task.weights_seed) for p in plans] == [
        (3, 3, 3, None), (4, 3, 3, None),
    ]  # fmt: skip
    known = [json.loads(Path(f"a/seed-{seed}/environment.json").read_text()) for seed in (3, 4)]
    assert [each["noise_seed"] for each in known] == [3, 3]


def test_a_grid_has_a_folder_for_each_value() -> None:
    grid = ["--grid", "method.local.lr=0.1,0.2", "--grid", "method.local.batch=10,20"]
    result = fv("run", "digits/fedavg", *SMALL, "--set", "rounds=1", *grid, "--out", "a", "--format", "json")
    told = json.loads(result.stdout)
    assert [run["recipe"] for run in told["runs"]] == [
        f"method.local.lr={lr},method.local.batch={batch}" for lr in (0.1, 0.2) for batch in (10, 20)
    ]
    assert recipe.read("a/method.local.lr=0.2,method.local.batch=10/recipe.toml").method.local.batch == 10
    assert "note: these are figures of the test records" in result.stderr
    held = ["--set", "task.validation=0.1", "--seeds", "2", "--format", "table"]
    result = fv("compare", "digits/fedavg", *SMALL, "--set", "rounds=1", "--grid", "method.local.lr=0.1", *held)
    assert "validation" in result.stdout
    assert "note" not in result.stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--seeds", "x"], "--seeds is 'x'"),
        (["--seeds", "2", "--hold", "data"], "--hold has 'data'"),
        (["--hold", "split"], "--hold is for several runs; add --seeds or --grid"),
        (["--grid", "method.local.lr=0.1", "--hold", "split"], "there is one seed only; add --seeds"),
        (["--jobs", "2"], "--jobs is for several runs"),
        (["--jobs", "0"], "'0' is no number from 1"),
        (["--grid", "method.local.lrr=1,2"], "unknown key 'method.local.lrr'"),
    ],
)
def test_a_mistake_is_one_sentence(args: list[str], told: str) -> None:
    assert told in sentence("run", "digits/fedavg", *args, "--out", "a")
    assert not Path("a").exists()


@pytest.mark.slow
def test_runs_beside_each_other_are_the_same_and_stop_at_ctrl_c() -> None:
    command = [*SMALL, "--set", "rounds=400", "--seeds", "2", "--format", "json"]
    args = ["run", "digits/fedavg", *command, "--jobs", "2", "--out", "a"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = subprocess.Popen([sys.executable, "-m", "fedveil", *args], stdout=subprocess.PIPE, env=environment)
    while not list(Path("a").glob("*/checkpoint-*.fv")):
        assert started.poll() is None
        time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    told = json.loads(started.communicate(timeout=60)[0])
    assert started.returncode == 130
    assert told["report"] is None
    assert all(0 < run["rounds"] < 400 for run in told["runs"])
    args[args.index("rounds=400")] = "rounds=3"
    args[-1] = "b"
    subprocess.run([sys.executable, "-m", "fedveil", *args], check=True, env=environment, capture_output=True)
    good(*args[:-4], "--out", "c")
    for seed in (0, 1):
        assert torch.equal(weights(f"b/seed-{seed}"), weights(f"c/seed-{seed}"))


@pytest.mark.slow
def test_a_failure_beside_others_is_one_sentence() -> None:
    args = ["--set", "cohort.drop=0.999999", "--set", "rounds=9", "--seeds", "2", "--jobs", "2", "--out", "a"]
    result = fv("run", "digits/fedavg", *SMALL, *args)
    assert result.exit_code == 1
    assert re.search(r"a/seed-\d: the run ended early: no client answered for 5 rounds", result.stderr)
