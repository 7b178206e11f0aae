"""The apps of a deployment on a grid in this process: who loads what, where state goes, and what is refused."""

import json
import logging

import pytest
import torch

import fedveil as fv
from fedveil.deploy import scaffold
from fedveil.engines.claims import Claims, Roster, Seat
from fedveil.engines.local import LocalEngine
from fedveil.privacy.account import SPENT
from fedveil.runs import recipe
from fedveil.runs.checkpoint import RunError, read_checkpoint

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from deploy.apps import loader
from engines.grids import Nodes
from fedveil.deploy import party

CONFIG = {"rounds": 0, "nodes": 0, "patience": 600.0, "device": "cpu", "out": "run"}


class Federation:
    """A deployment whose nodes are in this process."""

    def __init__(self, folder, source, *changes, clients=2):
        scaffold.init(folder, recipe.read(source, ["rounds=2", *changes]), clients)
        self.folder, self.path, self.loaded = folder, folder / "app" / "recipe.toml", []
        self.load, self.plan = loader(folder), recipe.read(str(self.path))
        self.grid = Nodes(party.client_app(self.path, self.noted), range(clients))
        for node, context in self.grid.contexts.items():
            context.node_config["memory"] = f"clients/{node}"
            own = context.node_config["partition-id"]
            context.node_config.update(identity=f"keys/identity-{own}", identities="keys")

    def noted(self, partition, partitions):
        self.loaded.append((partition, partitions))
        return self.load(partition, partitions)

    def start(self, **config):
        """One run of the server's app, in the folder."""
        party.server_app(self.path, self.noted)(self.grid, Context(7, 0, {}, RecordDict(), {**CONFIG, **config}))

    @property
    def rows(self):
        return fv.Ledger.read(self.folder / "run" / "ledger.jsonl").rows

    @property
    def weights(self):
        newest = max((self.folder / "run").glob("checkpoint-*.fv"))
        return read_checkpoint(newest).state.weights


@pytest.fixture(autouse=True)
def quiet():
    """What a server's app does to the logger ends with it."""
    log = logging.getLogger("fedveil")
    before = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate, log.level = before


@pytest.fixture
def federation(tmp_path, monkeypatch):
    made = Federation(tmp_path / "federation", "digits/scaffold", "method.local.epochs=1")
    monkeypatch.chdir(made.folder)
    return made


def test_a_deployment_ends_where_a_simulation_does_and_goes_on_where_it_stood(federation):
    federation.start()
    federation.start(rounds=4)
    plan = federation.plan
    whole = fv.run(plan.build(), plan.method, rounds=4, cohort=plan.cohort, engine=LocalEngine(stack=1, workers=1))
    assert torch.equal(federation.weights, whole.weights)
    assert [row.metrics for row in federation.rows] == [row.metrics for row in whole.ledger.rows]


def test_everybody_loads_its_own_data_only(federation):
    federation.start()
    assert set(federation.loaded) == {(None, 2), (0, 2), (1, 2)}
    assert federation.loaded.count((None, 2)) == 1
    environment = json.loads((federation.folder / "run" / "environment.json").read_text())
    assert (environment["engine"], environment["nodes"]) == ("deployment", 2)
    assert recipe.read(str(federation.folder / "run" / "recipe.toml")) == federation.plan
    kept = sorted((federation.folder / "clients").glob("*/*.fv"))
    assert len(kept) == 2  # each client's memory is in its own folder, and the server's checkpoint has none
    newest = max((federation.folder / "run").glob("checkpoint-*.fv"))
    assert read_checkpoint(newest).memory == {}


def test_a_run_of_another_recipe_is_not_gone_on_with(federation):
    federation.start()
    before = federation.weights
    text = federation.path.read_text()
    federation.path.write_text(text.replace("lr = 0.3", "lr = 0.2"))
    with pytest.raises(RunError, match="run holds a run of another recipe; choose another folder with 'out'"):
        federation.start(rounds=3)
    assert torch.equal(federation.weights, before)
    federation.start(rounds=1, out="another")
    assert (federation.folder / "another" / "ledger.jsonl").exists()


def test_what_a_client_lacks_costs_its_answers_and_the_reason_stays_with_it(federation):
    node = next(n for n, context in federation.grid.contexts.items() if context.node_config["partition-id"] == 1)
    del federation.grid.contexts[node].node_config["memory"]
    federation.start()
    assert [row.missing for row in federation.rows] == [
        {"1": "failed: the client gives no answer; its own log says why"}
    ] * 2
    assert [list(row.up) for row in federation.rows] == [["0"]] * 2


def test_a_client_with_more_records_than_is_public_does_not_answer(federation):
    text = federation.path.read_text()
    fewer = text.replace("max_records = 719", "max_records = 718")  # of 1,437 records one client has 719
    federation.path.write_text(fewer)
    federation.start(rounds=1)
    assert [row.missing for row in federation.rows] == [
        {"1": "failed: the client gives no answer; its own log says why"}
    ]


def test_a_server_that_waits_in_vain_says_for_whom(federation, capsys):
    federation.grid.contexts.popitem()
    with pytest.raises(TimeoutError):
        federation.start(patience=0.01)
    assert "fedveil: 1 of 2 Flower nodes were there after 0.01 s" in capsys.readouterr().err


def test_a_run_may_begin_with_fewer_nodes(federation):
    federation.grid.contexts.popitem()
    federation.start(nodes=1, rounds=1, patience=5.0)
    (row,) = federation.rows
    assert [reason.partition(" Flower")[0] for reason in row.missing.values()] == ["failed: no"]
    assert len(row.up) == 1


def test_without_a_roster_the_first_claims_stay_in_the_run_folder(federation):
    federation.start(rounds=1)
    first = {context.node_config["partition-id"]: node for node, context in federation.grid.contexts.items()}
    assert Claims(kept=federation.folder / "run" / "nodes.json").bound() == first
    federation.grid.contexts[4] = federation.grid.contexts.pop(first[0])  # another key, and the server starts again
    federation.start(rounds=2, nodes=1)
    row = federation.rows[-1]
    assert row.missing == {"0": "failed: no Flower node is client 0"}
    assert f"Flower node 4 says that it is client 0, but node {first[0]} said so first" in row.events[0]


def test_the_roster_in_the_folder_decides_who_is_asked(federation):
    Roster({1: Seat(993, "SHA256:")}).write(federation.folder / "roster.json")
    federation.start(rounds=1, nodes=1)
    (row,) = federation.rows
    assert (list(row.up), list(row.missing)) == (["1"], ["0"])
    assert "Flower node 1000 says that it is client 0, but by the roster nobody is" in row.events[0]
    assert not (federation.folder / "run" / "nodes.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe.names() if name.startswith("digits/")])
def test_every_recipe_runs_with_clients_that_hold_their_own_records_and_a_server_that_holds_none(
    name, tmp_path, monkeypatch
):
    made = Federation(tmp_path / "federation", name, "cohort.size=4", "cohort.drop=0.0", clients=4)
    monkeypatch.chdir(made.folder)
    made.start()
    assert [(row.missing, row.events, len(row.up)) for row in made.rows] == [({}, [], 4)] * 2


def test_a_deployment_of_private_sets_says_in_its_recipe_which_classes_are_public(tmp_path):
    made = Federation(tmp_path / "federation", "digits/fedlap-dp", clients=4)
    assert [len(classes) for classes in made.plan.split.held] == [2] * 4


def test_a_deployment_says_that_its_privacy_budget_ended_it(tmp_path, monkeypatch, capsys):
    changes = ("rounds=4", "method.local.steps=2", "method.privacy.noise=2.0", "method.privacy.budget=1.0")
    made = Federation(tmp_path / "federation", "digits/dp-fedavg", *changes)
    monkeypatch.chdir(made.folder)
    made.start()
    assert f"fedveil: stopped after round {len(made.rows)} of 4: {SPENT}" in capsys.readouterr().err
    assert 1 <= len(made.rows) < 4
    assert made.rows[-1].epsilon <= 1.0


def test_a_client_without_an_identity_takes_no_part_in_a_secure_sum(tmp_path, monkeypatch):
    changes = ("method.secure.bits=20", "cohort.size=4", "method.local.epochs=1", "rounds=1")
    made = Federation(tmp_path / "federation", "digits/fedavg", *changes, clients=4)
    monkeypatch.chdir(made.folder)
    bare = next(c for c in made.grid.contexts.values() if c.node_config["partition-id"] == 2)
    del bare.node_config["identity"]
    made.start()
    (row,) = made.rows
    assert row.missing == {"2": "refused: bad signature: the private key of client 2 is not here"}
    assert row.secure[-1].answered == 3
