"""Training that begins with weights from a run or a file."""

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv
from fedveil.runs import recipe
from fedveil.runs.checkpoint import newest
from fedveil.runs.weights import load_weights


def built(source, **more):
    changes = [f"task.weights={source}", *(f"{key}={value}" for key, value in more.items())]
    return recipe.read("digits/fedavg", changes).build()


@pytest.fixture
def finished(tmp_path):
    task = recipe.read("digits/fedavg").build()
    fv.run(task, fv.FedSGD(), rounds=1, cohort=2, folder=tmp_path / "run")
    return tmp_path / "run"


def test_a_run_begins_where_another_ended(finished):
    start = built(finished).initial
    assert torch.equal(start, newest(finished).state.weights)
    assert not torch.equal(start, recipe.read("digits/fedavg").build().initial)


def test_layers_that_a_file_does_not_name_are_drawn(tmp_path):
    np.savez(tmp_path / "w.npz", **{"conv.bias": np.arange(16)})
    task, drawn = built(tmp_path / "w.npz"), recipe.read("digits/fedavg").build()
    layers, other = task.layout.split(task.initial), drawn.layout.split(drawn.initial)
    assert torch.equal(layers["conv.bias"], torch.arange(16.0))
    assert torch.equal(layers["fc1.weight"], other["fc1.weight"])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"fc3.weight": np.zeros(3)}, r"holds 'fc3.weight' of shape \[3\], the model has no such layer"),
        ({"conv.bias": np.zeros(3)}, r"holds 'conv.bias' of shape \[3\], the model is \[16\]"),
        ({"conv.bias": np.full(16, np.nan)}, "holds 'conv.bias' with values that are not finite"),
        ({"conv.bias": np.array([object()] * 16)}, "not readable|not numbers|no .npy array"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tmp_path, arrays, sentence):
    np.savez(tmp_path / "w.npz", **arrays)
    with pytest.raises(ValueError, match=sentence):
        built(tmp_path / "w.npz")


def test_a_path_that_is_nothing_of_the_kind_is_named(tmp_path, finished):
    with pytest.raises(ValueError, match=r"neither a run folder nor an .npz or .safetensors file"):
        built(tmp_path / "no.npz")
    with pytest.raises(ValueError, match="which holds no checkpoint; give a finished run"):
        built(tmp_path)
    with pytest.raises(ValueError, match=r"holds 20010 weights, the model has \d+; give a run of this model"):
        recipe.read("digits/fedavg", [f"task.weights={finished}", "task.model=baffle-lenet"]).build()
    last = max(finished.glob("checkpoint-*.fv"))
    last.write_bytes(last.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read: checkpoint-00000001.fv \(damaged"):
        built(finished)


def with_batch_norm():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
    return nn.Sequential(*layers)


def test_running_statistics_come_with_the_weights(tmp_path):
    plan = recipe.read("digits/fedavg")
    data = plan.load()
    task = fv.Task(with_batch_norm(), data, fv.split("iid", data, 10, fv.Seed.root(0)))
    result = fv.run(task, fv.FedAvg(), rounds=1, cohort=2, folder=tmp_path / "run")
    result.save(tmp_path / "model.safetensors")
    for source in ("run", "model.safetensors"):
        model = with_batch_norm()
        load_weights(model, tmp_path / source)
        torch.testing.assert_close(torch.cat([model[1].running_mean, model[1].running_var]), result.task.norms.values)
        torch.testing.assert_close(model[4].weight, result.state_dict()["4.weight"])
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model.safetensors is not a readable .safetensors file"):
        load_weights(with_batch_norm(), tmp_path / "model.safetensors")
