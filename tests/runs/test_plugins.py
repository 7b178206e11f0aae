"""Packages that bring methods, codecs, data or models, and modules that a user imports."""

import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedveil as fv
from fedveil import data, models
from fedveil.runs import plugins, recipe

METHOD = """
from dataclasses import dataclass
from typing import ClassVar
import fedveil as fv

@dataclass(frozen=True)
class Mine(fv.FedAvg):
    "Mine."
    name: ClassVar[str] = "plugged"
"""
REST = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from torch import nn
import fedveil as fv
from fedveil.data import from_tensors

@dataclass(frozen=True)
class Codec(fv.Half):
    name: ClassVar[str] = "plugged-codec"

class Model(nn.Sequential):
    "A linear model."
    def __init__(self, input, classes, width: int = 1):
        super().__init__(nn.Flatten(), nn.Linear(8, classes))

def numbers(directory, fetch):
    "Eight numbers a record."
    x = torch.arange(320.0).view(40, 8) / 320
    y = torch.arange(40) % 2
    return from_tensors(x, y, x, y, classes=2)
"""
POINTS = """
[fedveil.methods]
plugged = plugged_one:Mine
fedavg = plugged_one:Mine
unnamed = plugged_one:Mine
broken = plugged_broken:Nothing
absent = plugged_absent:Nothing

[fedveil.codecs]
plugged-codec = plugged_two:Codec

[fedveil.data]
plugged-numbers = plugged_two:numbers

[fedveil.models]
plugged-model = plugged_two:Model
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution in a folder of its own."""
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(POINTS))
    (tmp_path / "plugged_one.py").write_text(METHOD)
    (tmp_path / "plugged_two.py").write_text(REST)
    (tmp_path / "plugged_broken.py").write_text("raise RuntimeError('no such\\nday')\n")
    monkeypatch.syspath_prepend(tmp_path)
    tables: list[dict[str, object]] = [fv.METHODS, fv.Codec.registry, data.SETS, models.MODELS]
    before = [dict(table) for table in tables]
    plugins.load_plugins.cache_clear()
    yield tmp_path
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)
    for name in ("plugged_one", "plugged_two"):
        sys.modules.pop(name, None)
    plugins.load_plugins.cache_clear()


def test_what_packages_register_is_there(installed: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = fv.load_plugins()
    assert set(loaded) == {
        "method plugged",
        "codec plugged-codec",
        "data set plugged-numbers",
        "model plugged-model",
    }
    sentences = sorted(str(each.message) for each in told)
    assert sentences == [
        "the method 'absent' of plugged cannot be loaded (ModuleNotFoundError: No module named 'plugged_absent')",
        "the method 'broken' of plugged cannot be loaded (RuntimeError: no such day)",
        "the method 'fedavg' of plugged is left out: there is a method of this name already",
        "the method 'unnamed' of plugged is not registered under this name; state it as its `name`",
    ]
    assert fv.METHODS["fedavg"] is fv.FedAvg
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fv.load_plugins() == loaded  # once


def test_a_recipe_uses_them(installed: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fv.load_plugins()
    names = ["task.data=plugged-numbers", "task.model=plugged-model", "method.up.name=plugged-codec"]
    plan = recipe.read("digits/fedavg", ["method.name=plugged", "split.clients=4", "rounds=1", *names])
    result = fv.run(plan.build(), plan.method, rounds=1, cohort=4)
    assert result.method == "plugged"
    assert not result.ledger.rows[0].missing


@pytest.mark.parametrize("name", ["a-b", "", "os;", "..x", "a/b", "x.py/", "1x"])
def test_a_module_has_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="--import takes the name of a module"):
        plugins.import_modules([name])


def test_a_module_that_cannot_be_imported_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "half_made.py").write_text("import not_there_either\n")
    (tmp_path / "unfinished.py").write_text("def f(:\n")
    for name, sentence in {
        "not_there": "there is no module 'not_there', neither installed nor in",
        "half_made": "module 'half_made' cannot be imported: No module named 'not_there_either'",
        "unfinished": "module 'unfinished' cannot be imported: SyntaxError",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            plugins.import_modules([name])
