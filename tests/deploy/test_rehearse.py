"""Deployments as real processes: TLS, keys, questions across processes, faults, and nothing left afterwards."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedveil as fv
import toys
from fedveil.cli import app
from fedveil.deploy import deployment, keys, rehearse, roster, scaffold
from fedveil.engines.local import LocalEngine
from fedveil.privacy.account import SPENT
from fedveil.runs import recipe
from fedveil.runs.checkpoint import read_checkpoint

pytest.importorskip("flwr")
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are counted in /proc")
LONG = 240.0  # seconds after which a test gives up waiting


def carrying(mark: Path) -> list[int]:
    """Processes of this machine with a Flower home below `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FLWR_HOME={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder for a deployment whose processes can be told by it; they, and what they listened on, are gone after."""
    ports, drawn = [], rehearse.free_port
    monkeypatch.setattr(rehearse, "free_port", lambda: ports.append(drawn()) or ports[-1])
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path
    left = carrying(tmp_path)
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    assert not [port for port in ports if rehearse.listening(port)]
    assert not list((tmp_path / "tmp").iterdir())


def deployed(folder: Path, *changes: str) -> Path:
    """Two clients of SCAFFOLD, with data that a process has read at once."""
    digits, file = fv.load("digits"), folder.with_name("digits.npz")
    parts = {"x_train": digits.x, "y_train": digits.y, "x_test": digits.test_x, "y_test": digits.test_y}
    np.savez(file, **{name: part[:200].numpy() for name, part in parts.items()})
    fixed = [f"task.data={file}", "method.local.epochs=1"]
    scaffold.init(folder, recipe.read("digits/scaffold", [*fixed, *changes]), 2)
    return folder


def wait(condition, process=None, stage=None):
    """Until `condition()` holds; at most LONG seconds, and not beyond the end of `process`."""
    until = time.monotonic() + LONG
    while not condition():
        assert process is None or process.poll() is None, rehearse.tail(stage.logs / "run.log")
        assert time.monotonic() < until
        time.sleep(0.1)


def weights(folder: Path, number: int) -> torch.Tensor:
    return read_checkpoint(folder / "run" / f"checkpoint-{number:08d}.fv").state.weights


def test_a_method_that_asks_twice_in_a_rehearsal_of_the_command_line(room):
    """Two nodes, two rounds, four questions: what a client noted at one it finds at the next, in another process."""
    assert toys.Twice.name == "toy-twice"
    folder = deployed(room / "federation")
    text = (folder / "app" / "recipe.toml").read_text()
    (folder / "app" / "recipe.toml").write_text(text.partition("[method]")[0] + '[method]\nname = "toy-twice"\n')
    entered = "import fedveil\nimport toys\n\nfedveil.METHODS['toy-twice'] = toys.Twice\n"
    data = folder / "app" / "data.py"
    text = data.read_text()
    data.write_text(text.replace("from pathlib", f"{entered}from pathlib", 1))
    assert data.read_text() != text
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    words = ["deploy", "rehearse", str(folder), "--rounds", "2", "--format", "json"]
    result = CliRunner(env={"PYTHONPATH": path}).invoke(app, words)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["method"], figures["rounds"], figures["stopped"]) == ("toy-twice", 2, "rounds")
    assert (figures["clients_failed"], figures["out"]) == (0, str(folder / "run"))
    rows = fv.Ledger.read(folder / "run" / "ledger.jsonl").rows
    assert [(row.round, sorted(row.up), row.missing) for row in rows] == [(r, ["0", "1"], {}) for r in (1, 2)]
    assert all(row.wire_up > row.bytes_up for row in rows)
    # clients 0 and 1 answer 1 and 2, and then their share of 2: 1.5 a round is added to every weight
    assert torch.allclose(weights(folder, 2), weights(folder, 1) + 1.5)
    resumed = CliRunner().invoke(app, ["resume", str(folder / "run")])
    assert resumed.exit_code == 2
    assert "run is the run of a deployment, whose records are elsewhere" in " ".join(resumed.stderr.split())
    again = CliRunner().invoke(app, words)  # finished: nothing is started
    assert again.exit_code == 0
    assert json.loads(again.stdout) == figures


def test_a_budget_that_is_spent_is_an_end_and_no_failure(tmp_path, monkeypatch):
    class Played(rehearse.Stage):
        """A stage on which the run ends at once, with these words."""

        said = ""
        start_superlink = register = start_node = check = lambda self, *_: None

        def start_run(self, **config):
            (self.logs / "run.log").write_text(f"fedveil: {self.said}\n")
            return subprocess.Popen(["true"])

    folder, heard = deployed(tmp_path / "federation"), []
    monkeypatch.setattr(rehearse, "Stage", Played)
    plan = deployment.planned(folder)[0]
    with pytest.raises(rehearse.Failed, match="the run ended early"):
        rehearse.rehearse(folder, plan, [0, 1], heard.append, heard.append)
    Played.said = f"stopped after round 2 of 5: {SPENT}"
    assert rehearse.rehearse(folder, plan, [0, 1], heard.append, heard.append) == "budget"
    assert Played.said in heard


@pytest.mark.slow
def test_a_secure_sum_between_processes(room):
    """Five questions a round, each in another process; clients know each other by their Ed25519 keys."""
    folder = room / "federation"
    scaffold.init(folder, recipe.read("digits/fedavg", ["method.secure.bits=20", "rounds=1"]), 3)
    result = CliRunner().invoke(app, ["deploy", "rehearse", str(folder), "--format", "json"])
    assert result.exit_code == 0, result.output
    (row,) = fv.Ledger.read(folder / "run" / "ledger.jsonl").rows
    assert [(stage.stage, stage.answered) for stage in row.secure] == [
        (name, 3) for name in ("keys", "shares", "dealt", "masked", "unmask")
    ]
    plan = recipe.read(str(folder / "app" / "recipe.toml"))
    local = fv.run(plan.build(), plan.method, rounds=1, cohort=plan.cohort, engine=LocalEngine(stack=1, workers=1))
    assert torch.equal(weights(folder, 1), local.weights)  # masks differ and cancel


def kill(stage, client):
    """End a node at once, with all its processes."""
    for pid in carrying(stage.home / f"node-{client}"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def questions(stage, client):
    """How many questions of the method a node has received."""
    return (stage.logs / f"node-{client}.log").read_text().count("Receiving: train")


def test_strangers_are_turned_away_and_a_node_that_is_killed_costs_one_answer(room):
    """All on one SuperLink. Without faults the deployment is where a simulation is, bit for bit."""
    folder = deployed(room / "federation", "cohort.deadline=30", "rounds=2")
    keys.certificates(room)
    keys.node_key(room / "stranger")
    ledger = folder / "run" / "ledger.jsonl"
    with rehearse.Stage(folder) as stage:
        stage.start_superlink()
        stage.register(0, 1)
        for client in (0, 1):
            stage.start_node(client)
        run = stage.start_run()
        stage.start_node(2, key=room / "stranger")
        stage.start_node(3, authority=room / "ca.crt", key=folder / "keys" / "node-0")
        wait(lambda: questions(stage, 1) == 2, run, stage)
        kill(stage, 1)
        plan = recipe.read(str(folder / "app" / "recipe.toml"))
        whole = fv.run(plan.build(), plan.method, rounds=1, cohort=plan.cohort, engine=LocalEngine(stack=1, workers=1))
        assert torch.equal(weights(folder, 1), whole.weights)
        assert fv.Ledger.read(ledger).rows[0].metrics == whole.ledger.rows[0].metrics

        # who is not registered is turned away, and whoever is presented another authority's server turns away
        assert [stage.nodes.pop(k).wait(LONG) > 0 for k in (2, 3)] == [True, True]
        assert "[code: 2004] Failed to activate SuperNode." in rehearse.tail(stage.logs / "node-2.log")
        assert any("CERTIFICATE_VERIFY_FAILED" in line for line in rehearse.tail(stage.logs / "node-3.log"))

        wait(lambda: run.poll() is not None)
        stage.check()
        rows = fv.Ledger.read(ledger).rows
        assert [sorted(row.up) for row in rows] == [["0", "1"], ["0"]]
        assert list(rows[1].missing) == ["1"]
        assert re.match(r"late: no answer within 30 s|failed: Flower's error", rows[1].missing["1"])
        assert "accuracy" in rows[1].metrics


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_whoever_stops_a_rehearsal_leaves_nothing_behind(room, number):
    folder = deployed(room / "federation")
    words = [sys.executable, "-m", "fedveil", "deploy", "rehearse", str(folder)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "the run begins" in line:
                break
        assert len(carrying(room)) >= 3
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(30) == 130
    *before, last = said.splitlines()  # a sentence may come twice if the signal meets its printing
    assert last == f"fedveil: stopped after round 0 of 20; 'fedveil deploy rehearse {folder}' goes on"
    assert all("the run begins" in sentence for sentence in before)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("partition is None", "fedveil: nothing lies here"),  # the server's app says so and the run ends
        ("partition == 0", "no client answered for 5 rounds; the last reasons were: failed: ValueError"),
    ],
)
@pytest.mark.slow
def test_what_breaks_in_an_app_is_told_with_the_end_of_the_log(room, broken, told):
    scaffold.init(folder := room / "federation", recipe.read("digits/fedavg"), 1)
    data = folder / "app" / "data.py"
    data.write_text(
        data.read_text().replace(
            "    plan =", f"    if {broken}:\n        raise ValueError('nothing lies here')\n    plan ="
        )
    )
    result = CliRunner().invoke(app, ["deploy", "rehearse", str(folder)])
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert told in said
    assert said.endswith(f"fedveil: the run ended early; the end of {folder / 'logs' / 'run.log'} is above")
    assert "raise ValueError('nothing lies here')" in said or broken == "partition == 0"


@pytest.mark.slow
def test_a_killed_rehearsal_takes_its_processes_with_it(room):
    folder = deployed(room / "federation")
    words = [sys.executable, "-m", "fedveil", "deploy", "rehearse", str(folder)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "the run begins" in line:
                break
        wait(lambda: "Start `flwr-serverapp`" in (folder / "logs" / "run.log").read_text())
        process.kill()
    wait(lambda: not carrying(room))
    for left in (room / "tmp").iterdir():
        shutil.rmtree(left)  # its files it could not remove


@pytest.mark.slow
def test_a_number_is_one_keys_until_the_operator_gives_it_to_another(room, monkeypatch):
    """A registered rival of client 0 is named and not asked; a revoked key is out; its successor is client 0."""
    folder = deployed(room / "federation", "rounds=3")
    for name in ("rival", "next"):
        keys.node_key(room / name)

    class Rivalled(rehearse.Stage):
        def _node_config(self, client):
            return super()._node_config(client % 7)  # 7 and 14 say that they are client 0

    def deploy(*words):
        result = CliRunner().invoke(app, ["deploy", *map(str, words), "--superlink", rehearse.NAME, "--format", "json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def rows(rounds):
        run = stage.start_run(roster=str(folder / "roster.json"), rounds=rounds, nodes=1, patience=60.0)
        wait(lambda: run.poll() is not None)
        found = fv.Ledger.read(folder / "run" / "ledger.jsonl").rows
        assert len(found) == rounds, rehearse.tail(stage.logs / "run.log")
        return found[-1]

    with Rivalled(folder) as stage:
        stage._lock.close()  # the operator's commands want it
        stage.start_superlink()
        monkeypatch.setenv("FLWR_HOME", str(stage.home))
        first = deploy("add", folder, 0, "--key", folder / "keys" / "node-0.pub")
        deploy("add", folder, 1, "--key", folder / "keys" / "node-1.pub")
        rival = roster._flwr("register", str(room / "rival.pub"), rehearse.NAME)
        stage.start_node(7, key=room / "rival")
        for client in (0, 1):
            stage.start_node(client)
        wait(lambda: all(online(node) for node in (rival, int(first["node"]))))
        row = rows(1)
        assert row.missing == {}
        assert [f"Flower node {rival} says that it is client 0, but by the roster that is node {first['node']}"] == [
            event.partition(";")[0] for event in row.events
        ]
        assert deploy("revoke", folder, 0) == first
        assert stage.nodes[0].wait(LONG) >= 0  # the SuperLink tells the node, which ends
        stage.start_node(0)
        assert stage.nodes.pop(0).wait(LONG) > 0
        assert "[code: 2004] Failed to activate SuperNode." in rehearse.tail(stage.logs / "node-0.log")
        row = rows(2)
        assert (sorted(row.up), row.missing) == (["1"], {"0": "failed: no Flower node is client 0"})
        assert "client 0, but by the roster nobody is" in row.events[0]
        second = deploy("add", folder, 0, "--key", room / "next.pub")
        stage.start_node(14, key=room / "next")
        wait(lambda: online(int(second["node"])))
        assert sorted(rows(3).up) == ["0", "1"]
        assert questions(stage, 7) == 0


def online(node):
    """Whether the SuperLink of FLWR_HOME hears of a node."""
    program = Path(sys.executable).with_name("flwr")
    words = [program, "supernode", "list", rehearse.NAME, "--format", "json"]
    said = subprocess.run(words, capture_output=True, text=True, check=True, env={**rehearse.QUIET, **os.environ})
    return {"online"} == {n["status"] for n in json.loads(said.stdout)["nodes"] if n["node-id"] == str(node)}


@pytest.mark.slow
def test_a_server_that_starts_again_and_a_killed_node_that_comes_back(room):
    """Without a deadline: Flower reports the node, and the run goes on with it as soon as it is there again."""
    folder = deployed(room / "federation", "rounds=5")
    ledger = folder / "run" / "ledger.jsonl"
    with rehearse.Stage(folder) as stage:
        stage.start_superlink()
        stage.register(0, 1)
        for client in (0, 1):
            stage.start_node(client)
        run = stage.start_run(rounds=1)
        wait(lambda: run.poll() is not None)
        assert [row.missing for row in fv.Ledger.read(ledger).rows] == [{}]
        run = stage.start_run()  # another process, which goes on at round 2, with clients that remember round 1
        wait(lambda: questions(stage, 1) == 3, run, stage)
        plan = recipe.read(str(folder / "app" / "recipe.toml"))
        whole = fv.run(plan.build(), plan.method, rounds=2, cohort=plan.cohort, engine=LocalEngine(stack=1, workers=1))
        assert torch.equal(weights(folder, 2), whole.weights)
        kill(stage, 1)
        wait(lambda: len(fv.Ledger.read(ledger).rows) == 3, run, stage)
        stage.start_node(1)
        wait(lambda: run.poll() is not None)
    rows = fv.Ledger.read(ledger).rows
    assert [row.round for row in rows] == [1, 2, 3, 4, 5]
    assert rows[2].missing["1"].startswith("failed: Flower's error ")
    assert rows[4].missing == {}
