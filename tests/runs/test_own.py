"""Models, data and losses that a recipe names by reference: how they are called, and every way they can be wrong."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedveil as fv
from fedveil import models
from fedveil.core.seeds import Seed
from fedveil.runs import recipe
from fedveil.runs.own import make_model, references
from fedveil.runs.plugins import imported_object, is_reference

MODULE = """
import torch
import torch.nn.functional as F
from torch import nn
from fedveil.data import from_tensors

NUMBER = 3

def net(input, classes, hidden=4):
    return nn.Sequential(nn.Linear(*input, hidden), nn.Tanh(), nn.Linear(hidden, classes))

class Net(nn.Sequential):
    def __init__(self, classes, *, input):
        super().__init__(nn.Linear(*input, classes))

def fixed(hidden=5):
    model = nn.Sequential(nn.Linear(6, hidden), nn.Linear(hidden, 3))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    return model

def shaped(shape, k):
    return nn.Linear(shape[0], k)

def broken(input):
    raise RuntimeError("no\\nluck")

def nothing():
    return {"a": 1}

def loss(logits, y):
    return 2 * F.cross_entropy(logits, y, reduction="none")

def load(directory, records=40):
    x = torch.randn(records, 6)
    y = torch.arange(records) % 3
    return from_tensors(x, y, x[:8], y[:8], classes=3, name=directory.name)

def party(partition, partitions, size=5):
    if partition is None:
        x = torch.full((4, 6), -1.0)
        return from_tensors(x, torch.zeros(4).long(), x, torch.tensor([0, 1, 2, 0]), classes=3)
    x = torch.full((size + partition, 6), float(partition)) / partitions
    return from_tensors(x, torch.full((len(x),), partition), x[:1], torch.zeros(1).long(), classes=3)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module `ours`, which one is in."""
    (tmp_path / "ours.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("ours", None)


def plan(*changes: str) -> fv.Recipe:
    own = ["task.model=ours:net", "task.data=ours:load", "rounds=2", "split.clients=4", "cohort.size=2", *changes]
    return recipe.read("digits/fedavg", own)


def test_reading_a_recipe_imports_nothing() -> None:
    found = plan("task.loss=ours:loss")
    assert recipe.read(str(_write(found))) == found
    assert "ours" not in sys.modules
    deep = {"up": {"a": [1, {"name": "my.own:codec", "note": "12:30", "path": "a/b:c"}]}}
    task = vars(found.task) | {"weights": "runs:mine", "data_options": {"column": "age:years"}}
    assert references({"task": task, "method": deep}) == {
        "ours:load": "task.data",
        "ours:net": "task.model",
        "ours:loss": "task.loss",
        "my.own:codec": "method.up.a.name",
    }


def _write(found: fv.Recipe) -> Path:
    Path("own.toml").write_text(found.toml())
    return Path("own.toml")


def test_an_own_model_is_drawn_from_the_recipes_seed_and_the_global_generator_stays() -> None:
    before = torch.get_rng_state()
    first, again, other = plan().build(), plan().build(), plan("seed=1").build()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.initial, again.initial)
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.initial, other.initial)
    with models.drawing_from(Seed.root(0).child("weights")):  # by hand
        expected = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    assert torch.equal(first.initial, nn.utils.parameters_to_vector(expected.parameters()))
    assert first.layout.size == 6 * 4 + 4 + 4 * 3 + 3


def test_an_own_model_keeps_its_weights_and_takes_options() -> None:
    task = plan("task.model=ours:fixed", "task.model_options.hidden=2").build()
    assert torch.equal(task.initial[:12], torch.full((12,), 0.5))
    assert task.layout.size == 6 * 2 + 2 + 2 * 3 + 3
    model = make_model("ours:Net", {}, (6,), 3, Seed.root(0))
    assert [tuple(weight.shape) for weight in model.parameters()] == [(3, 6), (3,)]
    assert isinstance(make_model("torch.nn:Identity", {}, (6,), 3, Seed.root(0)), nn.Identity)


def test_own_data_is_given_the_folder_of_the_data_sets(tmp_path: Path) -> None:
    loaded = plan("task.data_options.records=20").load(tmp_path / "sets")
    assert (loaded.name, len(loaded.x)) == ("sets", 20)


def test_data_of_parties_are_put_together_with_their_numbers_as_groups() -> None:
    found = plan("task.data=ours:party", "split.kind=natural", "split.clients=3", "task.data_options.size=2")
    task = found.build()
    assert task.clients.sizes.tolist() == [2, 3, 4]
    assert [task.y[rows].unique().tolist() for rows in (task.clients[k] for k in range(3))] == [[0], [1], [2]]
    assert torch.equal(task.x[task.clients[2]], torch.full((4, 6), 2 / 3))
    assert task.test_y.tolist() == [0, 1, 2, 0]


def test_an_own_loss_is_used() -> None:
    task = plan("task.loss=ours:loss").build()
    x, y = task.x[:5], task.y[:5]
    expected = 2 * F.cross_entropy(task.f(task.initial, x), y, reduction="none")
    assert torch.equal(task.losses(task.initial, x, y), expected)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("task.model=not_there:net", r"there is no module 'not_there', .*; check task\.model, or change to the folder"),
        ("task.model=ours:nett", r"task\.model is 'ours:nett', but module 'ours' has no 'nett'; did you mean 'net'\?"),
        ("task.model=json:net", r"module 'json' \(.*json.__init__\.py\) has no 'net'"),
        ("task.model=torch:empty", r"'torch:empty', which raised TypeError: empty\(\) missing"),
        ("task.model=ours:NUMBER", r"task\.model is 'ours:NUMBER', but that is of type int; name a function or"),
        ("task.model=ours:", r"task\.model is 'ours:'; write package\.module:function, such as my_models:net"),
        ("task.model=ours:net.x", r"write package\.module:function"),
        ("task.model=__main__:net", r"no other process can import a script that runs; move net to another file"),
        ("task.model=ours:broken", r"'ours:broken', which raised RuntimeError in ours\.py, line 26: no luck"),
        ("task.model=ours:nothing", r"'ours:nothing', which returned dict; it must return an nn\.Module"),
        ("task.model=ours:shaped", r"'ours:shaped': missing a required argument: 'shape'; it is given input and cla"),
        ("task.model_options.width=3", r"'ours:net': got an unexpected keyword argument 'width'; .*task.model_options"),
        ("task.data=ours:net", r"task\.data is 'ours:net': missing a required argument: 'input'; it is given direct"),
        ("task.data=ours:nothing", r"which returned dict; it must return a fedveil\.Data"),
        ("task.loss=ours:NUMBER", r"task\.loss is 'ours:NUMBER', but that is of type int"),
    ],
)
def test_what_is_wrong_with_own_code_is_one_sentence(change: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        plan(change).build()
    assert "\n" not in str(error.value)


def test_an_unknown_loss_is_still_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"task\.loss is 'l2'; use cross-entropy or"):
        plan("task.loss=l2")


@pytest.mark.parametrize("path", ["a/b:c", "x:y.npz", "digits", "./a:b", "C:\\records"])
def test_a_path_is_no_reference(path: str) -> None:
    assert not is_reference(path)


def test_a_module_that_fails_is_a_sentence(home: Path) -> None:
    (home / "unfinished.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match="module 'unfinished' cannot be imported: SyntaxError"):
        imported_object("unfinished:f", "task.model")
