"""--import brings somebody's own method to every command, and a run folder remembers it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
def home(tmp_path: Path) -> Path:
    (tmp_path / "mymethod.py").write_text(METHOD)
    (tmp_path / "mine.toml").write_text(RECIPE)
    return tmp_path


def fedveil(home: Path, *args: str, code: int = 0) -> str:
    """The real command line in a folder."""
    command = [sys.executable, "-P", "-m", "fedveil", *args]  # -P: the current directory is not on the path by itself
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_run_of_ones_own_method_is_resumed_and_reported(home: Path) -> None:
    assert "fedveil: there is no method 'mine'" in fedveil(home, "run", "mine.toml", "--out", "out", code=2)
    fedveil(home, "run", "mine.toml", "--import", "mymethod", "--out", "out")
    assert json.loads((home / "out" / "environment.json").read_text())["imports"] == ["mymethod"]
    again = json.loads(fedveil(home, "resume", "out", "--rounds", "2", "--format", "json"))
    assert (again["method"], again["rounds"]) == ("mine", 2)
    fedveil(home, "report", "out", "-o", "page.html")
    assert "mymethod" in (home / "page.html").read_text()
    (elsewhere := home / "elsewhere").mkdir()
    told = fedveil(elsewhere, "resume", "../out", "--rounds", "3", code=2)
    assert "there is no module 'mymethod', neither installed nor in" in told


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["--import", "mymethod", "list", "methods"], "mine"),
        (["list", "--import=mymethod", "methods"], "mine"),
        (["describe", "mine", "--import", "mymethod"], "method.factor"),
        (["cost", "mine.toml", "--import", "mymethod", "--import", "json"], "mine"),
    ],
    ids=" ".join,
)
def test_every_command_takes_it(home: Path, command: list[str], found: str) -> None:
    assert found in fedveil(home, *command)
