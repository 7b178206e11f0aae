"""Runs with a model and data of one's own: on the command line, from Python, and in folders of strangers."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedveil
from fedveil.engines.local import LocalEngine
from fedveil.runs import recipe
from fedveil.runs.checkpoint import newest
from shell import fv, good

MODULE = """
import dataclasses
from pathlib import Path
from torch import nn
import fedveil

Path("imported").touch()

def net(input, classes, hidden=12):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))

def normed(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes))

def load(records=400):
    digits = fedveil.load("digits")
    return dataclasses.replace(digits, x=digits.x[:records], y=digits.y[:records])
"""
RECIPE = """
rounds = 2
[task]
model = "ours:net"
data = "ours:load"
model_options = {hidden = 6}
[split]
clients = 4
[cohort]
size = 3
"""
NEEDED = (
    "fedveil: {} needs code that is not fedveil's, task.data is 'ours:load', task.model is 'ours:net'; if you trust "
    "it, add --import ours\n"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "ours.py").write_text(MODULE)
    (tmp_path / "ours.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("ours", None)


def forget(home: Path) -> None:
    """The module is not imported any more; if it is again, it leaves a trace."""
    sys.modules.pop("ours", None)
    (home / "imported").unlink(missing_ok=True)


def weights(folder: Path) -> torch.Tensor:
    saved = newest(folder)
    assert saved
    return saved.state.weights


def test_a_recipe_of_the_command_line_may_import(home: Path) -> None:
    told = good("cost", "ours.toml", "--format", "json")
    assert told["weights"] == 64 * 6 + 6 + 6 * 10 + 10
    changes = ["--set", "task.model=ours:net", "--set", "task.model_options.hidden=3"]
    assert good("cost", "digits/fedavg", *changes, "--format", "json")["weights"] == 64 * 3 + 3 + 3 * 10 + 10
    assert good("run", "ours.toml", "--out", "out", "--format", "json")["rounds"] == 2
    forget(home)
    good("compare", "ours.toml", "--out", "both")
    assert "is finished already" in fv("compare", "ours.toml", "--out", "both").stderr
    assert (home / "imported").exists()


def test_a_folder_imports_nothing_by_itself(home: Path) -> None:
    good("run", "ours.toml", "--out", "out")
    forget(home)
    good("report", "out")
    good("inspect", "out/checkpoint-00000002.fv")
    for line in ("resume out --rounds 3", "audit out", "cost out"):
        result = fv(*line.split())
        assert (result.exit_code, result.stderr) == (2, NEEDED.format("out"))
    assert "ours" not in sys.modules
    assert not (home / "imported").exists()
    assert good("resume", "out", "--rounds", "3", "--import", "ours", "--format", "json")["rounds"] == 3
    assert good("cost", "out", "--import", "ours", "--format", "json")["rounds"] == 3
    assert good("audit", "out", "--import", "ours", "--records", "100", "--format", "json")["round"] == 3


@pytest.mark.parametrize("model", ["os:system", "subprocess:run", "ours:net", "json:loads"])
def test_a_strangers_folder_calls_nothing(home: Path, model: str) -> None:
    """Not even functions of modules that are there already: calling them needs no import."""
    good("run", "digits/fedavg", "--set", "rounds=1", "--out", "out")
    text = (home / "out" / "recipe.toml").read_text().replace('"digits-cnn"', f'"{model}"')
    (home / "out" / "recipe.toml").write_text(
        text.replace("[split]", '[task.model_options]\ncommand = "touch x"\n[split]')
    )
    module = model.partition(":")[0]
    for line in ("resume out --rounds 3", "audit out", "cost out"):
        result = fv(*line.split())
        assert result.exit_code == 2
        assert result.stderr.endswith(f"task.model is '{model}'; if you trust it, add --import {module}\n")
    assert not (home / "x").exists()
    assert not (home / "imported").exists()


def test_nobody_is_told_to_type_what_is_no_module(home: Path) -> None:
    good("run", "digits/fedavg", "--set", "rounds=1", "--out", "out")
    text = (home / "out" / "environment.json").read_text().replace('"imports": null', '"imports": ["x; touch y"]')
    (home / "out" / "environment.json").write_text(text)
    told = "fedveil: out/environment.json is damaged: 'x; touch y' is no name of a module\n"
    assert fv("resume", "out", "--rounds", "3").stderr == told


# ---------------------------------------------------------------------------------------------------- from Python


def plan(**more: int) -> fedveil.Recipe:
    task = fedveil.TaskSpec(data="ours:load", model="ours:net", model_options={"hidden": 6})
    split = fedveil.SplitSpec(clients=4)
    return fedveil.Recipe(task=task, split=split, cohort=fedveil.CohortSampler(size=3), **more)


def test_a_folder_from_python_is_resumed_reported_audited_and_forecast(home: Path) -> None:
    here = plan(rounds=2)
    task = here.build()
    fedveil.run(task, here.method, rounds=2, cohort=3, folder="out")
    assert recipe.read("out/recipe.toml") == here
    assert "only_python" not in json.loads(Path("out/environment.json").read_text())
    assert fv("resume", "out", "--rounds", "4").stderr == NEEDED.format("out")
    assert good("resume", "out", "--rounds", "4", "--import", "ours", "--format", "json")["rounds"] == 4
    whole = fedveil.run(task, here.method, rounds=4, cohort=3)
    assert torch.equal(weights(home / "out"), whole.weights)
    cost = good("cost", "out", "--import", "ours", "--format", "json")
    assert cost["up"]["total"] == sum(row.bytes_up for row in whole.ledger.rows)
    good("audit", "out", "--import", "ours", "--records", "100")
    good("report", "out")
    again = fedveil.run(task, here.method, rounds=5, cohort=3, folder="out")  # and back
    assert len(again.ledger.rows) == 5


def test_what_the_command_line_began_python_continues_and_its_recipe_stays(home: Path) -> None:
    good("run", "ours.toml", "--out", "out", "--device", "cpu")
    before = Path("out/recipe.toml").read_text()
    here = recipe.read("ours.toml")
    objects = here.on(here.load())
    fedveil.run(objects, here.method, rounds=3, cohort=3, folder="out")
    assert Path("out/recipe.toml").read_text() == before


def objects() -> fedveil.Task:
    digits = fedveil.load("digits")
    split = fedveil.split("iid", digits, 4, fedveil.Seed.root(0))
    return fedveil.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), digits, split)


def test_a_folder_of_objects_says_that_only_python_can_go_on(home: Path) -> None:
    task = objects()
    fedveil.run(task, fedveil.Scaffold(), rounds=1, cohort=3, folder="out")
    told = (
        "fedveil: out was made by fv.run, and only fv.run can go on with it: its model, data and split are objects; "
        "fv.Recipe(…).build() makes a task that can be written; call it again with the same arguments and this folder\n"
    )
    for line in ("resume out --rounds 3", "audit out", "cost out"):
        result = fv(*line.split())
        assert (result.exit_code, result.stderr) == (2, told)
    good("report", "out", "-o", "page.html")
    page = Path("page.html").read_text()
    assert "scaffold" in page
    assert "torch.nn.modules.container.Sequential" in page
    result = fv("run", "out/recipe.toml", "--out", "other")
    assert "unknown model 'torch.nn.modules.container.Sequential'" in result.stderr
    resumed = fedveil.run(task, fedveil.Scaffold(), rounds=2, cohort=3, folder="out")
    assert torch.equal(resumed.weights, fedveil.run(task, fedveil.Scaffold(), rounds=2, cohort=3).weights)


@dataclass(frozen=True)
class Mine(fedveil.FedAvg):
    """A method of a script."""

    name: ClassVar[str] = "scripted"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[fedveil.FedAvg]:
    monkeypatch.setattr(Mine, "__module__", "__main__")
    return Mine


@dataclass(frozen=True)
class Called(fedveil.FedAvg):
    """A method with a function among its settings."""

    name: ClassVar[str] = "called"
    chosen: Callable[..., object] = max


for name in (Mine.name, Called.name):
    del fedveil.METHODS[name]  # other tests go through all methods


class Mirror(LocalEngine):
    """An engine of one's own."""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"seed": 3}, "its task is built with seed 0 and run with seed 3"),
        ({"engine": Mirror()}, "its engine is Mirror"),
        ({"insecure_test_noise": 5}, "fixes test noise at the seed only"),
    ],
)
def test_what_no_recipe_says_is_told(home: Path, more: dict[str, object], told: str) -> None:
    fedveil.run(plan().build(), fedveil.FedAvg(), rounds=1, cohort=3, folder="out", **more)
    assert told in fv("resume", "out", "--rounds", "3", "--import", "ours").stderr
    assert told in Path("out/recipe.toml").read_text()
    good("report", "out")


def test_a_method_of_a_script_and_one_of_a_module(home: Path, scripted: type[fedveil.FedAvg]) -> None:
    fedveil.run(plan().build(), scripted(), rounds=1, cohort=3, folder="out")
    told = fv("resume", "out", "--rounds", "3", "--import", "ours").stderr
    assert "its method is defined in a script, which no other process can import" in told
    scripted.__module__ = "ours_too"
    fedveil.run(plan().build(), scripted(), rounds=1, cohort=3, folder="other")
    assert fv("resume", "other", "--import", "ours").stderr.endswith("if you trust it, add --import ours_too\n")


def test_a_setting_that_toml_has_no_word_for(home: Path) -> None:
    fedveil.run(plan().build(), Called(), rounds=1, cohort=3, folder="out")
    assert "its settings cannot be written (Object of type" in fv("resume", "out").stderr
    assert "called" in good("report", "out", "-o", "page.html") + Path("page.html").read_text()


def test_processes_of_a_flower_simulation_build_the_same_task(home: Path) -> None:
    pytest.importorskip("flwr")
    from fedveil.engines.flower import FromRecipe

    clients = FromRecipe(plan().toml())(None)  # type: ignore[arg-type]
    assert torch.equal(clients.task.initial, plan().build().initial)


def test_an_exported_model_has_the_running_statistics_of_training(home: Path) -> None:
    changes = ["--set", "task.model=ours:normed", "--set", "task.model_options={}"]
    told = good("run", "ours.toml", *changes, "--out", "out", "--format", "json")
    assert told["batch_norm"] == "federated"
    good("export", "out", "model.safetensors", "--import", "ours")
    found = load_file(home / "model.safetensors")
    saved = newest(home / "out")
    assert saved
    kept = saved.state.slots["batch norm"].statistics
    assert torch.equal(torch.cat([found["2.running_mean"], found["2.running_var"]]), kept)
    assert found["2.running_mean"].abs().max() > 0.01
