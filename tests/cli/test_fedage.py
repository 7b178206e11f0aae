"""`fedveil fedage`: training a pair, and attacking a run."""

import json
from pathlib import Path

import pytest

from fedveil.codecs import autoencoder
from shell import fv, good

TINY = ["--block", 4, "--levels", 8, "--cohort", 3, "--width", 16, "--epochs", 2, "--groups", 200, "--batch", 50]
SMALL = ["--set", "method.local.epochs=1", "--set", "rounds=1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "data"))
    yield tmp_path
    autoencoder.load.cache_clear()


def sentence(*args: object) -> str:
    result = fv(*args)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_pair_is_trained_once_and_found_by_a_recipe():
    keys = [f"method.up.{key}" for key in ("block=4", "levels=8", "cohort=3", "width=16")]
    run = ["run", "digits/fedage", *SMALL, *(word for key in keys for word in ("--set", key)), "--format", "json"]
    asked = sentence(*run, "--out", "none")
    command = "fedveil fedage pretrain --block 4 --code-size 2 --levels 8 --cohort 3 --width 16 --seed 0"
    assert f"run '{command}'" in asked
    first = good("fedage", "pretrain", *TINY, "--format", "json")
    assert Path(first["file"]) == Path("data/fedage/b4-h2-s8-m3-w16-seed0.fv").absolute()
    assert first["ratio"] == pytest.approx(first["spread"] / first["floor"], rel=1e-4)
    assert first["papers_heuristic_epsilon"] == pytest.approx(4.84481 * 8 / 3 / first["spread"], rel=1e-4)
    again = fv("fedage", "pretrain", *TINY)
    assert "is there already and used as it is" in again.stderr
    assert "the paper's heuristic ε" in again.stdout
    assert "no guarantee of anything" in again.stdout
    assert good(*run, "--out", "some")["rounds"] == 1


def test_the_papers_pair_is_another_one_and_a_recipe_names_the_command_that_trains_it():
    asked = sentence("run", "mnist/fedage-iid-paper", "--set", "task.data=digits", "--set", "task.model=digits-cnn")
    assert (
        "pretrain --block 64 --code-size 32 --levels 64 --cohort 10 --width 512 --seed 0 --pretraining paper'" in asked
    )
    found = good("fedage", "pretrain", *TINY, "--pretraining", "paper", "--format", "json")
    assert Path(found["file"]).name == "b4-h2-s8-m3-w16-seed0-paper.fv"
    assert "a pretraining of own or paper" in sentence("fedage", "pretrain", "--pretraining", "mine")


def test_training_says_how_it_goes():
    assert "step 8/8  error " in fv("fedage", "pretrain", *TINY).stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--width", 0], "a width from 1 to 4096"),
        (["--code-size", 99, "--block", 4], "code size <= block"),
        (["--epochs", 0], "epochs >= 1"),
        (["--small", 2], "from 0 to 1"),
        (["--device", "abacus"], "device 'abacus' is not known"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(options, why):
    assert why in sentence("fedage", "pretrain", *options)


def test_a_run_is_attacked_and_its_report_says_so():
    good("run", "digits/fedage", *SMALL, "--out", "a", "--format", "json")
    assert "Attacks" not in Path(good("report", "a").strip()).read_text(encoding="utf-8")
    found = good("fedage", "attack", "a", "--format", "json")
    assert found["round"] == 2
    assert len(found["clients"]) == 5
    assert min(found["control"]) > 0.999
    assert all(0.6 < value < 0.75 for value in found["direct"] + found["differential"])
    assert json.loads(Path("a/attack.json").read_text())["own"] == pytest.approx(found["own"], rel=1e-4)
    assert Path("a/figures/attack.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "differential" in good("fedage", "attack", "a")
    page = Path(good("report", "a").strip()).read_text(encoding="utf-8")
    assert "<h2>Attacks</h2>" in page
    assert f"<td>{sum(found['own']) / 5:.3f}</td>" in page


def test_only_codes_are_attacked():
    good("run", "digits/fedavg", *SMALL, "--out", "a", "--format", "json")
    assert "a run of fedavg; this attack is on fedage and FedAvg with its codes" in sentence("fedage", "attack", "a")
    assert "holds no run" in sentence("fedage", "attack", "nowhere")


def test_a_damaged_attack_is_said_and_nothing_in_it_is_trusted():
    good("run", "digits/fedage", *SMALL, "--out", "a", "--format", "json")
    for text in ("", "[]", '{"round": "<script>"}', '{"round": 1, "clients": [1]}'):
        Path("a/attack.json").write_text(text)
        assert "attack.json is damaged" in sentence("report", "a")
