"""`fedveil audit` on kept messages: the verdict first, tables, pictures, the report, and what cannot be attacked."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from fedveil.attacks.audit import Audit
from fedveil.attacks.exposure import Attack
from fedveil.attacks.inversion import Inversion
from shell import fv, good

FEW = ["--set", "split.clients=360", "--set", "cohort.size=3", "--set", "rounds=1", "--device", "cpu"]  # 4 records each
LAP = ["--set", "rounds=1", "--set", "method.batches=2", "--set", "method.passes=1", "--device", "cpu"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs whose messages are kept, and one whose are not."""
    home = tmp_path_factory.mktemp("runs")
    good("run", "digits/fedsgd", *FEW, "--keep-messages", "all", "--out", home / "few")
    good("run", "digits/fedlap", *LAP, "--set", "method.init=real", "--keep-messages", "1", "--out", home / "sets")
    good("run", "digits/fedavg", *FEW, "--out", home / "plain")
    return home


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.attacks.exposure.Attack", partial(Attack, Inversion(steps=300, tv=1e-4)))


def test_a_verdict_comes_first_and_the_tables_fit_a_terminal(home):
    shown = good("audit", home / "few", "--attacks", "inversion", "--victims", 3)
    assert shown.startswith("found  records of clients can be rebuilt from their messages (raw): ")
    assert max(map(len, shown.splitlines())) <= 80
    assert [line.split()[0] for line in shown.splitlines() if line.startswith(("raw ", "guess", "control"))] == [
        *("raw", "guess:", "guess:", "guess:", "control")
    ]
    found = msgspec.json.decode((home / "few" / "audit.json").read_bytes(), type=Audit)
    assert (found.messages[0].kind, found.messages[0].records, found.messages[0].messages) == ("raw", 4, 3)
    assert found.attacks == {}
    assert found.control is None
    assert (home / "few" / "figures" / "inversion.svg").read_text(encoding="utf-8").startswith("<svg")
    good("report", home / "few")
    page = (home / "few" / "report.html").read_text(encoding="utf-8")
    for words in ("Verdicts", "raw", "guess: nearest", "what was rebuilt of them", "data:image/svg+xml"):
        assert words in page


def test_synthetic_sets_are_attacked_as_data(home):
    shown = good("audit", home / "sets", "--attacks", "images")
    found = msgspec.json.decode((home / "sets" / "audit.json").read_bytes(), type=Audit)
    assert found.sets[0].control.found
    assert found.sets[0].found.matched >= 0.9  # images that started from records are nearest to these
    assert "synthetic" in shown
    good("report", home / "sets")
    assert "Synthetic sets" in (home / "sets" / "report.html").read_text(encoding="utf-8")


def test_what_cannot_be_attacked_is_left_out_or_a_sentence(home):
    shown = " ".join(good("audit", home / "plain", "--shadows", 0).split())
    assert "left out" in shown
    assert "keeps no messages to attack; run the recipe again with --keep-messages all" in shown
    found = msgspec.json.decode((home / "plain" / "audit.json").read_bytes(), type=Audit)
    assert set(found.left_out) == {"inversion", "images"}
    assert found.control
    for attack, told in (
        ("inversion", "keeps no messages to attack; run the recipe again with --keep-messages all"),
        ("dp", "promises no ε; leave dp out"),
    ):
        result = fv("audit", home / "plain", "--attacks", attack)
        assert result.exit_code == 2
        assert told in result.stderr.splitlines()[-1]
    result = fv("audit", home / "few", "--attacks", "images")
    assert "the messages of fedsgd hold no synthetic records; leave images out" in result.stderr


def test_without_the_truth_nothing_is_scored(home, tmp_path):
    import shutil

    shutil.copytree(home / "few", tmp_path / "few")
    shutil.rmtree(tmp_path / "few" / "truth")
    result = fv("audit", tmp_path / "few", "--attacks", "inversion")
    assert result.exit_code == 2
    assert "keep the messages of this round again" in result.stderr
