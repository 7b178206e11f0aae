"""What a run gives: the model for other programs, and itself in a notebook."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import fedveil as fv
from fedveil.cli import app
from fedveil.core import notebook
from fedveil.core.export import state_dict
from fedveil.core.ledger import Row
from fedveil.data import Share, from_tensors
from fedveil.runs import recipe
from toys import linear_task


class Tied(nn.Module):
    """An embedding whose weights are also those of the last layer, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.last = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.last.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([2.0, 1.0, 1.0, 0.5]))

    def forward(self, x):
        return self.last(torch.tanh(self.mix(self.embedding(x).mean(1) * self.scale)))


@pytest.fixture(scope="module")
def result():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 5, (40, 3), generator=draw), torch.randint(0, 5, (40,), generator=draw)
    data = from_tensors(x, y, x, y, classes=5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = fv.Task(Tied(), data, fv.split("iid", data, 4, fv.Seed.root(0)))
    return fv.run(task, fv.FedAvg(), rounds=3, cohort=4)


def outputs(result):
    return result.task.f(result.weights, result.task.x)


def test_the_state_loads_into_the_user_s_own_model(result):
    model, state = Tied(), result.state_dict()
    assert set(state) == set(model.state_dict())
    assert torch.equal(state["embedding.weight"], state["last.weight"])
    assert not torch.equal(state["last.weight"], state_dict(result.task, result.task.initial)["last.weight"])
    model.load_state_dict(state)
    torch.testing.assert_close(model(result.task.x), outputs(result))
    assert model.last.weight is model.embedding.weight
    state["mix.weight"].zero_()
    assert result.state_dict()["mix.weight"].any()  # it was a copy


@pytest.mark.parametrize(("suffix", "read"), [("safetensors", load_file), ("pt", torch.load)])
def test_a_saved_model_is_read_by_others(result, tmp_path, suffix, read):
    result.save(tmp_path / f"model.{suffix}")
    model, found = Tied(), read(tmp_path / f"model.{suffix}")
    assert {name: torch.equal(value, result.state_dict()[name]) for name, value in found.items()} == dict.fromkeys(
        model.state_dict(), True
    )
    model.load_state_dict(found)


def test_an_exported_model_gives_the_same_outputs_for_any_number_of_records(result, tmp_path):
    result.export(str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for records in (1, 7, 40):
        x = result.task.x[:records]
        (found,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(found, result.task.f(result.weights, x).numpy(), rtol=1e-5, atol=1e-6)


def test_a_file_of_another_kind_or_nowhere_is_one_sentence(result, tmp_path):
    with pytest.raises(ValueError, match=r"has the suffix '\.onnx'; use \.safetensors or \.pt"):
        result.save(tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"has the suffix ''; use \.onnx"):
        result.export(tmp_path / "model")
    with pytest.raises(ValueError, match=r"there is no folder .* for model\.pt; make it first"):
        result.save(tmp_path / "none" / "model.pt")


def test_the_command_writes_the_model_of_a_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "digits/fedavg", "--set", "rounds=1", "--out", "a", "--device", "cpu"])
    assert done.exit_code == 0, done.stderr
    told = CliRunner().invoke(app, ["export", "a", "model.safetensors"])
    assert told.exit_code == 0, told.stderr
    plan = recipe.read("digits/fedavg", ["rounds=1"])
    result = fv.run(plan.build(), plan.method, rounds=1, cohort=plan.cohort, seed=plan.seed)
    found = load_file("model.safetensors")
    assert found.keys() == result.state_dict().keys()
    for name, value in result.state_dict().items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)
    for wrong, sentence in (
        (["a", "model.txt"], "has the suffix '.txt'; use .safetensors or .pt or .onnx"),
        (["digits/fedavg", "model.pt"], "there is no run folder digits/fedavg"),
        (["a"], "to a FILE, or the client of a recipe to -o DIR"),
        (["a", "model.pt", "-o", "e"], "to a FILE, or the client of a recipe to -o DIR"),
    ):
        refused = CliRunner().invoke(app, ["export", *wrong])
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.split())


# ---------------------------------------------------------------------------------------------------- notebooks


def test_what_is_printed_is_one_line(result):
    accuracy = f"accuracy {result.accuracy:.4f}"
    sent = r"[\d.]+ k?B(ytes)? up"
    for thing, pattern in (
        (result, rf"Result\(fedavg, 3 rounds, {accuracy}, {sent}\)"),
        (replace(result, stopped="target"), rf"Result\(fedavg, 3 rounds, {accuracy}, {sent}, stopped: target\)"),
        (result.ledger, rf"Ledger\(3 rounds, {accuracy}, {sent}\)"),
        (result.task, r"Task\(Tied, 40 weights, data 'tensors', 4 clients, cpu\)"),
        (result.task.data, r"Data\('tensors', 40 training and 40 test records of \[3\], 5 classes\)"),
        (result.task.clients, r"Split\('iid', 4 clients with 10 to 10 records\)"),
        (fv.Ledger(), r"Ledger\(0 rounds, 0 bytes up\)"),
    ):
        assert re.fullmatch(pattern, repr(thing)), repr(thing)


class Balanced(HTMLParser):
    """Notes tags and text, and that every tag is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(html):
    page = Balanced()
    page.feed(html)
    assert not page.open
    assert "http" not in html  # nothing from elsewhere
    return page


def test_a_notebook_shows_curve_and_table(result):
    page = parsed(result._repr_html_())
    (line,) = [attributes for tag, attributes in page.tags if tag == "polyline"]
    xs, ys = zip(*(map(float, point.split(",")) for point in line["points"].split()), strict=True)
    assert xs == (notebook.LEFT, (notebook.LEFT + notebook.WIDTH - notebook.RIGHT) / 2, notebook.WIDTH - notebook.RIGHT)
    _, values = result.ledger.series("accuracy")
    low, high = min(values), max(values)
    floor = notebook.HEIGHT - notebook.BOTTOM
    expected = [floor - (floor - notebook.TOP) * ((v - low) / (high - low) if high > low else 0.5) for v in values]
    assert ys == pytest.approx(expected, abs=0.06)
    for row in result.table().splitlines():
        name, value = row.split("  ", 1)
        assert {name, value.strip()} <= set(page.text)


@pytest.mark.parametrize(
    ("rows", "points"),
    [
        ([], None),
        ([{}], None),
        ([{"loss": float("nan")}], None),
        ([{"loss": 1.0}], 1),
        ([{"loss": 1.0}, {}, {"loss": float("inf")}, {"loss": 0.5}], 2),
        ([{"accuracy": 0.5, "loss": 1.0}] * 3, 3),
    ],
)
def test_a_notebook_shows_what_was_measured(rows, points):
    ledger = fv.Ledger([Row(round=i, cohort=[0], metrics=each) for i, each in enumerate(rows, 1)])
    page = parsed(fv.Result("<own>", torch.zeros(8), ledger, linear_task())._repr_html_())
    assert "<own>" in page.text
    lines = [attributes for tag, attributes in page.tags if tag == "polyline"]
    assert [len(line["points"].split()) for line in lines] == ([] if points is None else [points])


def test_a_share_of_a_deployment_is_printed_in_one_line():
    assert repr(Share.of(1, 3, 20, 50)) == "Share('held', 3 clients with 0 to 20 records)"
