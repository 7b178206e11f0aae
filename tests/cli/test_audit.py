"""`fedveil audit`: what it prints and writes, and how it ends."""

import importlib
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from fedveil import data
from fedveil.attacks import guesses, mechanism, membership
from fedveil.attacks.audit import Audit
from fedveil.core.task import Task
from fedveil.privacy import dpsgd
from shell import fv, good

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "audit.md").read_text(encoding="utf-8")
SMALL = ["--set", "rounds=1", "--set", "method.local.epochs=1", "--device", "cpu"]
PRIVATE = [
    *("--set", "split.max_records=150"),
    *("--set", "method.privacy.noise=2.0", "--set", "method.privacy.delta=1e-3", "--set", "method.local.steps=10"),
    *("--set", "rounds=1", "--set", "cohort.size=2", "--device", "cpu", "--insecure-test-noise"),
]
FEW = ["--canaries", 600, "--shadows", 0]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sentence(*args: object) -> str:
    result = fv(*args)
    assert result.exit_code == 2
    *before, last = result.stderr.splitlines()
    assert all(line.startswith("fedveil: warning: ") for line in before)
    return last


def test_a_run_without_a_promise_is_attacked_and_the_page_about_it_is_true():
    commands = re.findall(r"^    fedveil (.*runs/overfitted)$", PAGE, re.M)
    assert len(commands) == 2
    good(*commands[0].split(), "--device", "cpu")
    shown = good(*commands[1].split())
    found = msgspec.json.decode(Path("runs/overfitted/audit.json").read_bytes(), type=Audit)
    assert (found.round, found.records, found.epsilon, found.mechanism, found.broken) == (1, 180, None, None, [])
    assert (found.others, found.shadows, "lira" in found.attacks) == ("validation", 16, True)
    for name, each in [*found.attacks.items(), ("control", found.control), ("baseline", found.baseline)]:
        row = name + r" +(0\.\d{3}) +(0\.\d{3})–([01]\.\d{3}) +\(0\.\d{3}\) +\(?0\.\d{3}\)? +0\.\d{3} +\d\.\d\d$"
        printed = re.search(f"^{row}", shown, re.M)
        assert [float(value) for value in printed.groups()] == pytest.approx([each.auc, each.low, each.high], abs=1e-3)
        assert float(re.search(f"^    {row}", PAGE, re.M)[1]) == pytest.approx(each.auc, abs=0.02)
    assert 0.5 < found.attacks["loss"].low < found.attacks["lira"].low
    assert "180 members and as many validation records" in shown
    assert "no false one is allowed, as 0.001 of the others" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_figures_are_printed_as_json_and_drawn(monkeypatch):
    good("run", "digits/fedavg", *SMALL, "--out", "a", "--format", "json")
    found = good("audit", "a", "--records", 200, "--shadows", 0, "--format", "json")
    assert found["records"] <= 200
    assert set(found["attacks"]) == {"loss", "calibrated", "gradient"}
    assert found["control"]["auc"] > 0.8
    read = msgspec.json.decode(Path("a/audit.json").read_bytes(), type=Audit)
    assert read.attacks["loss"].auc == pytest.approx(found["attacks"]["loss"]["auc"], rel=1e-4)
    drawn = Path("a/figures/audit.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    assert "false-positive rate" in drawn
    monkeypatch.setattr(membership, "CONTROL_STEPS", 0)
    shown = " ".join(good("audit", "a", "--shadows", 4).split())
    assert re.search(r"\blira 0\.\d{3}", shown)
    assert "as many test records" in shown
    assert "Test records may differ from training records in themselves; task.validation holds out some" in shown
    assert re.search(r"The control reaches 0\.\d\d only, so what the attacks do not find says nothing", shown)
    assert "The baseline" not in shown


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of one round."""
    path = tmp_path_factory.mktemp("runs") / "private"
    good("run", "digits/fedavg", *PRIVATE, "--out", path, "--format", "json")
    return path


@pytest.fixture
def private(finished: Path, elsewhere: Path) -> str:
    shutil.copytree(finished, elsewhere / "a")
    return "a"


def test_a_promise_that_holds_is_exit_code_0_and_the_same_figures_again(private, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fedveil.cli.audit"), "LINE_EVERY", 0.0)
    result = fv("audit", private, *FEW)
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert re.search(r"^ε ruled out +\d\S* \(measured, 95%\) at δ = 8.33e-06$", result.stdout, re.M)
    assert re.search(r"^by the curve +\d\S* \(measured, 95%, for Gaussian noise\) from \d+ of ", result.stdout, re.M)
    assert re.search(r"^ε charged +\d\S* \(add/remove, proved\) for the same steps at the same δ$", result.stdout, re.M)
    assert re.search(r"^the run +ε = \S+ \(add/remove, proved\) at δ = 0.001: not contradicted", result.stdout, re.M)
    assert "attack on record 0/288" in result.stderr
    assert "control: learning records by heart" in result.stderr
    assert "canaries in the private gradients  step 1/10" in result.stderr
    first = Path("a/audit.json").read_bytes()
    good("audit", private, *FEW, "--format", "json")
    assert Path("a/audit.json").read_bytes() == first


def test_a_promise_without_noise_is_exit_code_1(private, monkeypatch):
    monkeypatch.setattr(dpsgd, "_normal", lambda words: torch.zeros(len(words), dtype=torch.float64))
    result = fv("audit", private, *FEW)
    assert result.exit_code == 1, result.stderr
    assert "at δ = 0.001: contradicted" in result.stdout
    assert result.stderr.count("fedveil: broken: ") == 2
    found = msgspec.json.decode(Path("a/audit.json").read_bytes(), type=Audit)
    assert found.mechanism.lower > found.mechanism.epsilon
    assert len(found.broken) == 2
    good("report", private)


def test_an_attack_that_finds_everybody_contradicts_the_promise_and_a_weak_audit_says_so(private, monkeypatch):
    known = {tuple(row) for row in data.load("digits").x.flatten(1).tolist()}

    def oracle(task: Task, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.tensor([float(tuple(row) in known) for row in x.flatten(1).tolist()])

    monkeypatch.setattr(membership, "loss", oracle)
    monkeypatch.setitem(membership.ATTACKS, "loss", oracle)
    monkeypatch.setattr(guesses, "SHARES", (0.01,))
    result = fv("audit", private, *FEW)
    assert result.exit_code == 1
    assert re.search(r"broken: the attack by loss rules out every ε below 3\.\d+, but 0\.\d+ is charged", result.stderr)
    assert result.stderr.count("broken: ") == 1
    shown = " ".join(result.stdout.split())
    assert "The baseline is off 0.5: members and others differ in themselves" in shown
    assert "too little to break the promise: use more --canaries" in shown


def test_what_cannot_be_audited_is_one_sentence(private, monkeypatch):
    assert "holds no run" in sentence("audit", "nowhere")
    assert "--records is at least 100" in sentence("audit", private, "--records", 1)
    assert "there are 3 shadow models; use an even number" in sentence("audit", private, "--shadows", 3)
    assert "10 canaries tell nothing" in sentence("audit", private, "--canaries", 10)
    monkeypatch.setattr(mechanism, "LENGTH", 0.0)
    assert "without noise a canary adds" in sentence("audit", private, *FEW)
    for old in Path("a").glob("checkpoint-*"):
        old.unlink()
    assert "a has no checkpoint yet; run at least one round" in sentence("audit", private)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp-fedavg", "fedlap-dp"])
def test_recipes_that_promise_privacy_keep_it_and_would_be_caught_without_noise(name):
    """The control rules out more than the whole run has charged."""
    good("run", f"digits/{name}", "--insecure-test-noise", "--out", "a", "--device", "cpu")
    good("audit", "a")
    found = msgspec.json.decode(Path("a/audit.json").read_bytes(), type=Audit)
    assert found.mechanism.lower < found.mechanism.epsilon < found.mechanism.control
    assert found.epsilon < found.mechanism.control
    assert found.mechanism.found == pytest.approx(2.0, rel=0.1)
    assert all(each.low < 0.52 for each in found.attacks.values())


def test_noised_sums_are_audited_where_clients_noise_them():
    small = [word for change in ("split.clients=10", "cohort.size=5") for word in ("--set", change)]
    good("run", "digits/dp-fedavg-users", *SMALL, *small, "--out", "a")
    shown = good("audit", "a")
    found = msgspec.json.decode(Path("a/audit.json").read_bytes(), type=Audit)
    assert (found.relation, found.sums.relation, found.sums.clients) == ("replacement", "replacement", 3)
    assert found.sums.lower < found.sums.epsilon < found.sums.control
    assert found.sums.epsilon == pytest.approx(found.epsilon)  # of the run's one round
    assert re.search(r"^sums +20000 of each of two updates, with the noise of 3 clients$", shown, re.M)
    assert re.search(r"^ε charged +1\.5\d+ \(replacement, proved\) for one round$", shown, re.M)
