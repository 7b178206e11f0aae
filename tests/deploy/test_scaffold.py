"""`fedveil deploy init`: what is written, and what is refused."""

import contextlib
import dataclasses
import fcntl
import io
import os
import shutil
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedveil as fv
from deploy.apps import loader
from fedveil.cli import app
from fedveil.core.ledger import Row
from fedveil.deploy import deployment, scaffold
from fedveil.runs import recipe
from fedveil.runs.folder import RunFolder


def invoke(*words):
    return CliRunner().invoke(app, ["deploy", *map(str, words)])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deploy") / "federation"
    result = invoke("init", folder, "--recipe", "digits/scaffold", "--clients", 2, "--set", "rounds=3")
    assert result.exit_code == 0, result.output
    return folder


def test_the_folder_is_whole_and_private_where_it_must_be(written):
    found = {path.relative_to(written).as_posix() for path in written.rglob("*") if path.is_file()}
    keys = {f"keys/{name}-{k}{end}" for k in range(2) for name in ("node", "identity") for end in ("", ".pub")}
    certificates = {f"certificates/{name}" for name in ("ca.crt", "server.crt", "server.key")}
    assert found == {*scaffold.COPIED, ".gitignore", "app/recipe.toml", "nginx.conf", *keys, *certificates}
    for name in ("keys/node-0", "keys/node-1", "keys/identity-0", "certificates/server.key"):
        assert stat.S_IMODE((written / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((written / "keys").stat().st_mode) == 0o700
    assert not list(written.parent.glob(".federation-*"))


def test_the_recipe_says_what_is_public(written):
    plan = recipe.read(str(written / "app" / "recipe.toml"))
    assert plan.method == recipe.read("digits/scaffold").method
    assert (plan.rounds, plan.split.clients, plan.split.max_records, plan.cohort.size) == (3, 2, 719, 2)
    assert deployment.planned(written) == (plan, "scaffold")


def test_a_method_that_only_the_app_knows_is_no_obstacle(written, tmp_path):
    (tmp_path / "app").mkdir()
    text = (written / "app" / "recipe.toml").read_text().partition("[method]")[0]
    (tmp_path / "app" / "recipe.toml").write_text(text + '[method]\nname = "our-own"\nstrength = 3\n')
    plan, name = deployment.planned(tmp_path)
    assert (plan.rounds, name) == (3, "our-own")


def test_every_client_gets_its_own_part_and_the_server_none(written):
    load, plan = loader(written), recipe.read(str(written / "app" / "recipe.toml"))
    task = plan.build()
    for k in range(2):
        mine = plan.party(load(k, 2), k)
        rows = task.clients[k]
        assert torch.equal(mine.x, task.x[rows])
        assert np.array_equal(mine.clients[k], np.arange(len(rows)))
        assert torch.equal(mine.initial, task.initial)
        assert mine.sizes == task.sizes
    server = plan.party(load(None, 2), None)
    assert server.evaluate(server.initial) == task.evaluate(task.initial)
    assert server.sizes == task.sizes
    assert torch.equal(server.x, task.test_x)


def test_nothing_but_the_app_is_sent_to_the_clients(written, tmp_path):
    build = pytest.importorskip("flwr.cli.build")
    folder = shutil.copytree(written, tmp_path / "used")
    for name in ("run/ledger.jsonl", "run/recipe.toml", "clients/0/notes.json", "logs/run.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("private")
    with zipfile.ZipFile(io.BytesIO(build.build_fab_from_disk(folder))) as bundle:
        sent = {name for name in bundle.namelist() if not name.startswith(".info/")}
    assert sent == {"pyproject.toml", "app/recipe.toml", *(name for name in scaffold.COPIED if name.endswith(".py"))}


def test_a_folder_that_holds_something_is_left_alone(written):
    before = sorted(written.rglob("*"))
    result = invoke("init", written)
    assert result.exit_code == 2
    assert result.stderr.split() == f"fedveil: {written} is not empty; choose a new folder".split()
    assert sorted(written.rglob("*")) == before


def test_an_empty_folder_will_do(tmp_path):
    assert invoke("init", tmp_path, "--clients", 1).exit_code == 0
    assert (tmp_path / "app" / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--recipe", "digits/fedavgg"], "there is no recipe 'digits/fedavgg'; did you mean 'digits/fedavg'?"),
        (["--clients", 0], "a deployment needs at least one client, not 0"),
        (["--set", "cohort.kind=weighted"], "does not know who holds how much; use uniform"),
        (["--set", "method.locale=1"], "unknown key 'method.locale'; did you mean 'method.local'?"),
        (["--set", "split.max_records=5"], "holds 479 records, but split.max_records is 5; raise it."),
        (
            ["--set", "method.secure.bits=20", "--clients", 2],
            "fedavg with these settings needs at least 3 clients per round",
        ),
    ],
)
def test_what_cannot_be_deployed_is_one_sentence_and_no_folder(tmp_path, words, told):
    result = invoke("init", tmp_path / "new", *words)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("fedveil.deploy.keys.node_key", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaffold.init(tmp_path / "new", recipe.read("digits/fedavg"), 1)
    assert not list(tmp_path.iterdir())


def test_rehearsing_what_is_no_deployment_or_has_no_such_clients(written, tmp_path):
    result = invoke("rehearse", tmp_path)
    assert result.exit_code == 2
    assert "holds no deployment; 'fedveil deploy init" in " ".join(result.stderr.split())
    for nodes in (0, 3):
        result = invoke("rehearse", written, "--nodes", nodes)
        assert result.exit_code == 2
        assert f"has 2 clients and keys for 2, so {nodes} cannot be started" in " ".join(result.stderr.split())


def test_a_deployment_is_rehearsed_by_one_process_at_a_time(written):
    with open(written / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = invoke("rehearse", written)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert told.endswith(f"fedveil: {written} is being rehearsed or changed by another process; wait for it")


def test_without_flower_the_way_to_get_it_is_told(written, tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    result = invoke("rehearse", written)
    assert result.exit_code == 2
    assert " ".join(result.stderr.split()) == "fedveil: Flower is not installed; run: pip install 'fedveil[flower]'"


def test_init_without_flower_tells_it_too(tmp_path):
    """In a process in which Flower cannot be imported."""
    hidden = "import sys; sys.modules.update(flwr=None); from fedveil.cli import main; main()"
    words = [sys.executable, "-c", hidden, "deploy", "init", str(tmp_path / "new")]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "COLUMNS": "500"}, check=False)
    assert done.returncode == 2
    assert done.stderr == "fedveil: Flower is not installed; run: pip install 'fedveil[flower]'\n"
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- a party's task


def test_a_party_needs_the_public_bound_and_an_unweighted_draw():
    plan = recipe.read("digits/fedavg")
    digits = fv.load("digits")
    with pytest.raises(ValueError, match=r"split\.max_records is not set"):
        plan.party(digits, 0)
    with pytest.raises(ValueError, match="use uniform"):
        recipe.read("digits/fedavg", ["split.max_records=2000", "cohort.kind=weighted"]).party(digits, None)
    with pytest.raises(ValueError, match="There is no client 10; there are 10, from 0"):
        recipe.read("digits/fedavg", ["split.max_records=2000"]).party(digits, 10)
    with pytest.raises(ValueError, match=r"Client 3 holds 1,437 records, but split\.max_records is 700; raise it\."):
        recipe.read("digits/fedavg", ["split.max_records=700"]).party(digits, 3)


def test_a_finished_rehearsal_with_a_changed_recipe_is_no_old_number(tmp_path):
    """It once printed the figures of the run before, with exit code 0."""
    folder = tmp_path / "federation"
    scaffold.init(folder, recipe.read("digits/fedavg", ["rounds=1"]), 2)
    plan, _ = deployment.planned(folder)
    with contextlib.closing(RunFolder(folder / "run")) as home:
        home.describe(plan.toml(), {})
        home.ledger(0).append(Row(round=1, cohort=[0, 1]))
    deployment.validate_same(folder, dataclasses.replace(plan, rounds=9))
    changed = (folder / "app" / "recipe.toml").read_text().replace("lr = 0.3", "lr = 0.2")
    (folder / "app" / "recipe.toml").write_text(changed)
    result = invoke("rehearse", folder)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "holds a run of another recipe than" in told
    assert "begin anew" in told
