"""A model, data and a loss of one's own in a deployment, by the page that shows it."""

import contextlib
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import fedveil as fv
from fedveil.core.seeds import Seed
from fedveil.deploy import proxy, scaffold
from fedveil.engines.local import LocalEngine
from fedveil.runs import recipe
from fedveil.runs.checkpoint import newest
from shell import fv as command
from shell import good

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from engines.grids import Nodes
from fedveil.deploy import party

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "own-model.md").read_text(encoding="utf-8")
CONFIG = {"rounds": 2, "nodes": 0, "patience": 600.0, "device": "cpu", "out": "run"}


def block(language, start):
    (found,) = [b for b in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if start in b]
    return found


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The files of the page in a folder that one is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "hospital.py").write_text(block("python", "# hospital.py"))
    (tmp_path / "hospital.toml").write_text(block("toml", "# hospital.toml"))
    made = block("python", "# hospital.py") + block("python", "load_breast_cancer")
    exec(compile(made, "own-model.md", "exec"), {"__name__": "documented"})
    monkeypatch.setenv("RECORDS", str(tmp_path / "records"))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("app", "hospital", "server", "helper")]:
        del sys.modules[name]


@contextlib.contextmanager
def inside(folder):
    """As Flower starts an app: in its folder, which comes first on the path, without what was imported outside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *(part for part in sys.path if part != str(folder.parent))])
        for name in [name for name in sys.modules if name.partition(".")[0] in ("app", "hospital")]:
            patch.delitem(sys.modules, name)
        yield


def weights(folder):
    return newest(folder).state.weights


def test_the_app_has_the_code_and_trains_what_a_simulation_trains(home):
    result = command("deploy", "init", "federation", "--recipe", "hospital.toml", "--clients", 2)
    assert result.exit_code == 0, result.output
    assert "fedveil: hospital.py is copied to app/hospital.py\n" in result.stderr
    app = home / "federation" / "app"
    assert (app / "hospital.py").read_bytes() == (home / "hospital.py").read_bytes()
    plan = recipe.read(str(app / "recipe.toml"))
    assert (plan.task.model, plan.task.data) == ("app.hospital:net", "app.hospital:load")
    assert (plan.task.loss, plan.task.model_options) == ("app.hospital:careful", {"hidden": 8})
    asked = []
    with inside(home / "federation"):

        def load(partition, partitions):
            asked.append(partition)
            return plan.part(partition)

        grid = Nodes(party.client_app(app / "recipe.toml", load), range(2))
        for node, context in grid.contexts.items():
            context.node_config["memory"] = f"clients/{node}"
        party.server_app(app / "recipe.toml", load)(grid, Context(7, 0, {}, RecordDict(), CONFIG))
        assert "hospital" not in sys.modules
        assert proxy.rewrite(home / "federation") > 0
    assert {None, 0, 1} == set(asked)
    here = recipe.read("hospital.toml")
    engine = LocalEngine(stack=1, workers=1)
    local = fv.run(here.build(), here.method, rounds=2, cohort=here.cohort, engine=engine)
    assert torch.equal(weights(home / "federation" / "run"), local.weights)
    good("report", "federation/run")


def test_a_client_reads_no_file_but_its_own(home):
    plan = recipe.read("hospital.toml")
    (home / "records" / "client-1.csv").unlink()
    (home / "records" / "test.csv").rename(home / "records" / "elsewhere.csv")
    assert len(plan.party(plan.part(0), 0).x) == 200
    with pytest.raises(ValueError, match=r"which raised FileNotFoundError in hospital\.py, line \d+: .*test\.csv"):
        plan.part(None)


def test_init_reads_the_servers_file_only_and_needs_the_public_bound(home):
    for k in range(2):
        (home / "records" / f"client-{k}.csv").unlink()
    own = ["--model", "hospital:net", "--data", "hospital:load", "--clients", 2]
    assert "split.max_records is not set" in command("deploy", "init", "other", *own).stderr
    good("deploy", "init", "other", *own, "--set", "split.max_records=200")
    plan = recipe.read("other/app/recipe.toml")
    assert (plan.split, plan.cohort.size) == (fv.SplitSpec("natural", 2, max_records=200), 2)


def test_names_that_the_app_has_already_are_changed(home):
    (home / "server.py").write_text((home / "hospital.py").read_text())
    good("deploy", "init", "other", "--model", "server:net", "--recipe", "hospital.toml", "--clients", 2)
    assert recipe.read("other/app/recipe.toml").task.model == "app.own_server:net"
    assert (home / "other" / "app" / "own_server.py").is_file()
    assert "server_app" in (home / "other" / "app" / "server.py").read_text()


def test_a_module_of_a_package_is_a_requirement(home):
    own = ["--model", "torch.nn:Linear", "--set", "task.model_options={in_features=30, out_features=2}"]
    result = command("deploy", "init", "other", *own, "--recipe", "hospital.toml", "--clients", 2)
    version = torch.__version__.partition("+")[0]
    assert f"every party must install torch=={version}" in result.stderr
    assert f'dependencies = ["fedveil[flower]", "torch=={version}"]' in (home / "other" / "pyproject.toml").read_text()
    assert recipe.read("other/app/recipe.toml").task.model == "torch.nn:Linear"


def test_what_cannot_be_carried_is_one_sentence_and_no_folder(home, monkeypatch):
    (home / "helper.py").write_text("WIDTH = 3\n")
    text = (home / "hospital.py").read_text()
    (home / "hospital.py").write_text(text.replace("import os\n", "import os\nfrom helper import WIDTH\n"))
    result = command("deploy", "init", "other", "--recipe", "hospital.toml", "--clients", 2)
    assert result.exit_code == 2
    assert "is in hospital.py, which imports helper from the same folder, and the app gets one file;" in result.stderr
    (home / "hospital.py").write_text(text)
    made = types.ModuleType("nowhere")
    made.net = lambda input, classes, hidden: torch.nn.Linear(*input, classes)
    monkeypatch.setitem(sys.modules, "nowhere", made)
    own = ["--model", "nowhere:net", "--recipe", "hospital.toml", "--clients", 2]
    told = "task.model is 'nowhere:net', but module 'nowhere' is neither one file of the current folder nor part of"
    assert told in command("deploy", "init", "other", *own).stderr
    assert not (home / "other").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are counted in /proc")
def test_two_clients_rehearse_with_their_own_files(home):
    """The page's commands, over TLS, in processes that know the app only."""
    good("deploy", "init", "federation", "--recipe", "hospital.toml", "--clients", 2)
    (home / "hospital.py").rename(home / "gone.txt")
    result = command("deploy", "rehearse", "federation", "--rounds", 2, "--format", "json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rounds"] == 2
    (home / "gone.txt").rename(home / "hospital.py")
    here = recipe.read("hospital.toml")
    engine = LocalEngine(stack=1, workers=1)
    local = fv.run(here.build(), here.method, rounds=2, cohort=here.cohort, engine=engine)
    assert torch.equal(weights(home / "federation" / "run"), local.weights)


def test_own_data_of_everybody_is_split_for_the_rehearsal(home):
    (home / "helper.py").write_text("import fedveil\n\ndef digits():\n    return fedveil.load('digits')\n")
    scaffold.init(home / "other", recipe.read("digits/fedavg", ["task.data=helper:digits"]), 3)
    plan = recipe.read("other/app/recipe.toml")
    assert (plan.task.data, plan.split.max_records) == ("app.helper:digits", 479)
    with inside(home / "other"):
        whole, own = plan.load(), plan.part(1)
    rows = fv.split("iid", whole, 3, Seed.root(0))[1]
    assert torch.equal(own.x, whole.x[rows])
