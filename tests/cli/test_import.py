"""--import brings somebody's own method to every command; a run folder names it, and imports nothing by itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedveil
from shell import fv, good

METHOD = '''
"""A method of somebody's own."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import fedveil as fv
from fedveil.core import message
from fedveil.core.message import Record, Weights


@message.kind
class Kept(Record, frozen=True):
    common = ()
    last: Weights


@dataclass(frozen=True)
class Mine(fv.FedAvg):
    """Remembers its last update."""

    name: ClassVar[str] = "mine"
    factor: float = 1.0

    def trained(self, stack, question, w, trained):
        stack.remember("mine", [Kept(row * self.factor) for row in trained.update.cpu()])
        return super().trained(stack, question, w, trained)
'''
RECIPE = """
rounds = 1
[split]
clients = 3
[cohort]
size = 3
[method]
name = "mine"
factor = 2.0
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mymethod.py").write_text(METHOD)
    (tmp_path / "mine.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mymethod", None)
    fedveil.METHODS.pop("mine", None)


def command(home: Path, *args: str, code: int = 0) -> str:
    """The real command line in a folder, in a process of its own."""
    line = [sys.executable, "-P", "-m", "fedveil", *args]  # -P: the current directory is not on the path by itself
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=home, env=alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_run_of_ones_own_method_is_resumed_and_reported(home: Path) -> None:
    command(home, "run", "mine.toml", "--import", "mymethod", "--out", "out")
    assert json.loads((home / "out" / "environment.json").read_text())["imports"] == ["mymethod"]
    told = command(home, "resume", "out", "--rounds", "2", code=2)
    assert told == "fedveil: out needs code that is not fedveil's; if you trust it, add --import mymethod\n"
    again = json.loads(command(home, "resume", "out", "--rounds", "2", "--format", "json", "--import", "mymethod"))
    assert (again["method"], again["rounds"]) == ("mine", 2)
    good("report", "out", "-o", "page.html")
    assert "mymethod" in (home / "page.html").read_text()


def test_a_run_whose_module_is_elsewhere_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good("run", "mine.toml", "--import", "mymethod", "--out", "out")
    sys.modules.pop("mymethod")
    sys.path.remove(str(home))
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    told = fv("resume", "../out", "--rounds", "3", "--import", "mymethod").stderr
    assert "there is no module 'mymethod', neither installed nor in" in told


def test_a_method_is_unknown_until_its_module_is_imported(home: Path) -> None:
    assert "fedveil: there is no method 'mine'" in fv("cost", "mine.toml").stderr
    assert fv("cost", "mine.toml", "--import", "my-method").stderr.startswith("fedveil: --import takes the name of a")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--import mymethod list methods", "mine"),
        ("list --import=mymethod methods", "mine"),
        ("describe mine --import mymethod", "method.factor"),
        ("cost mine.toml --import mymethod --import json", "mine"),
        ("run --help", "--import MODULE"),
        ("deploy --help", "--import MODULE"),
        ("deploy init --help", "--import MODULE"),
    ],
)
def test_every_command_takes_it(home: Path, line: str, found: str) -> None:
    assert found in good(*line.split())


def test_a_method_that_does_not_describe_itself_is_listed_by_its_docstring(home: Path) -> None:
    source = (home / "mymethod.py").read_text()
    (home / "mymethod.py").write_text(source.replace("fv.FedAvg", "fv.Averaging"))
    assert "mine" in good("list", "methods", "--import", "mymethod")
    assert "mine does not describe itself; state `about" in fv("describe", "mine", "--import", "mymethod").stderr
