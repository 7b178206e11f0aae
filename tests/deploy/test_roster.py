"""Who takes part: `fedveil deploy add`, `remove` and `revoke`, with a SuperLink that is played and in a rehearsal."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedveil.cli import app
from fedveil.deploy import deployment, keys, rehearse, roster, scaffold
from fedveil.engines.claims import Claims, Roster
from fedveil.runs import recipe

pytest.importorskip("flwr")


def invoke(*words):
    result = CliRunner().invoke(app, ["deploy", *map(str, words)])
    assert "Traceback" not in result.output
    return result


def told(*words):
    """The one sentence of a command that fails."""
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stderr.count("fedveil: ") == 1
    return " ".join(result.stderr.removeprefix("fedveil: ").split())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deploy") / "federation"
    scaffold.init(folder, recipe.read("digits/fedavg"), 2)
    for name in ("a", "b", "c"):
        keys.node_key(folder / name)
    return folder


@pytest.fixture
def folder(written, tmp_path, monkeypatch):
    """A deployment and a SuperLink that takes a key once, as Flower's does."""
    copy, known = shutil.copytree(written, tmp_path / "federation"), {}

    def flwr(words, **_):
        verb, what, name, *_ = words[2:]
        if name != "ours":
            answer = {"success": False, "error-message": f"\nSuperLink connection '{name}' not found."}
        elif verb == "register" and keys.fingerprint(Path(what)) in known:
            told = f"Using SuperLink: {name}\n\n[code: 23] Public key already in use."
            answer = {"success": False, "error-message": told}
        elif verb == "register":
            known[keys.fingerprint(Path(what))] = len(known) + 2**63
            answer = {"success": True, "node-id": known[keys.fingerprint(Path(what))]}
        else:
            assert int(what) in known.values()
            answer = {"success": True, "node-id": int(what)}
        return subprocess.CompletedProcess(words, 0, json.dumps(answer, indent=2), "")

    monkeypatch.setattr(roster.subprocess, "run", flwr)
    return copy


def at(folder, verb, client, *words):
    return verb, folder, client, *words, "--superlink", "ours", "--format", "json"


def bound(folder):
    return Claims(folder / "roster.json").bound()


def test_a_key_is_registered_as_one_client_and_the_roster_binds_it(folder):
    shown = json.loads(invoke(*at(folder, "add", 0, "--key", folder / "a.pub")).stdout)
    assert shown == {"client": 0, "node": str(2**63), "key": keys.fingerprint(folder / "a.pub")}
    assert invoke(*at(folder, "add", 1, "--key", folder / "b.pub")).exit_code == 0
    assert bound(folder) == {0: 2**63, 1: 2**63 + 1}
    claims = Claims(folder / "roster.json")
    assert (claims.refusal(0, 2**63), claims.refusal(1, 2**63 + 1)) == ("", "")
    assert "by the roster that is node" in claims.refusal(0, 5)


def test_a_fingerprint_is_what_ssh_keygen_prints(folder):
    if not (program := shutil.which("ssh-keygen")):
        pytest.skip("ssh-keygen is missing")
    with subprocess.Popen([program, "-lf", folder / "a.pub"], stdout=subprocess.PIPE, text=True) as printed:
        assert printed.stdout.read().split()[1] == keys.fingerprint(folder / "a.pub")


def test_a_revoked_key_is_never_taken_again_and_the_number_waits_for_another(folder):
    invoke(*at(folder, "add", 0, "--key", folder / "a.pub"))
    invoke(*at(folder, "add", 1, "--key", folder / "b.pub"))
    shown = json.loads(invoke(*at(folder, "revoke", 0)).stdout)
    assert shown["node"] == str(2**63)
    assert bound(folder) == {1: 2**63 + 1}
    assert "nobody is" in Claims(folder / "roster.json").refusal(0, 2**63)
    assert "a.pub was revoked; make a new key" in told(*at(folder, "add", 0, "--key", folder / "a.pub"))
    assert invoke(*at(folder, "add", 0, "--key", folder / "c.pub")).exit_code == 0
    assert bound(folder)[0] == 2**63 + 2
    assert Roster.read(folder / "roster.json").revoked == [keys.fingerprint(folder / "a.pub")]


def test_a_client_that_is_removed_comes_back_with_a_new_key(folder):
    invoke(*at(folder, "add", 0, "--key", folder / "a.pub"))
    assert invoke(*at(folder, "remove", 0)).exit_code == 0
    assert bound(folder) == {}
    again = told(*at(folder, "add", 0, "--key", folder / "a.pub"))
    assert again.endswith("[code: 23] Public key already in use; it takes a key only once, so make a new one")
    assert bound(folder) == {}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("add", 2, "--key", "c.pub"), "there is no client 2: split.clients is 2 in"),
        (("add", -1, "--key", "c.pub"), "there is no client -1"),
        (("add", 0, "--key", "c.pub"), "client 0 has a key; revoke it first with 'fedveil deploy revoke'"),
        (("add", 1, "--key", "a.pub"), "a.pub is the key of client 0; a client needs one of its own"),
        (("add", 1, "--key", "keys/identity-0.pub"), "is no public EC key; make one with: ssh-keygen -t ecdsa -b 384"),
        (("add", 1, "--key", "app/recipe.toml"), "is no public EC key; make one with: ssh-keygen -t ecdsa -b 384"),
        (("add", 1, "--key", "absent.pub"), "absent.pub: No such file or directory"),
        (("add", 1), "a client is added with --key and --superlink"),
        (("remove", 1), "client 1 has no key in"),
        (("revoke", 1), "client 1 has no key in"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(folder, words, sentence):
    invoke(*at(folder, "add", 0, "--key", folder / "a.pub"))
    before = (folder / "roster.json").read_bytes()
    verb, client, *more = words
    if more:
        more[1] = folder / more[1]
    if client < 0:
        client = ("--", client)
        assert sentence in told(verb, *more, "--superlink", "ours", folder, *client)
    else:
        assert sentence in told(*at(folder, verb, client, *more))
    assert (folder / "roster.json").read_bytes() == before


def test_what_the_superlink_refuses_is_told_in_its_words(folder):
    refused = told("add", folder, 0, "--key", folder / "a.pub", "--superlink", "theirs")
    assert refused == (
        f"the SuperLink 'theirs' did not register {folder / 'a.pub'}: SuperLink connection 'theirs' not found"
    )
    assert not (folder / "roster.json").exists()


def test_a_client_is_out_of_the_roster_also_if_the_superlink_cannot_be_told(folder):
    invoke(*at(folder, "add", 0, "--key", folder / "a.pub"))
    refused = told("revoke", folder, 0, "--superlink", "theirs")
    assert refused.startswith("client 0 is asked nothing any more, but the SuperLink 'theirs' did not unregister")
    assert refused.endswith(f"; try: flwr supernode unregister {2**63} theirs")
    assert bound(folder) == {}
    assert Roster.read(folder / "roster.json").revoked == [keys.fingerprint(folder / "a.pub")]


def test_a_folder_that_is_in_use_or_no_deployment_is_left_alone(folder, tmp_path):
    with deployment.lock(folder):
        assert "is being rehearsed or changed by another process; wait" in told("add", folder, 0)
    for verb in ("add", "remove", "revoke"):
        assert "holds no deployment; 'fedveil deploy init" in told(verb, tmp_path, 0)


def test_in_a_rehearsal_the_keys_in_the_folder_are_the_clients(folder):
    names = ("node-1", "node-1.pub", "identity-1", "identity-1.pub")
    before = {name: (folder / "keys" / name).read_bytes() for name in names}
    assert "client 1 has a key; revoke it first" in told("add", folder, 1)
    shown = json.loads(invoke("revoke", folder, 1, "--format", "json").stdout)
    assert shown == {"client": 1, "node": None, "key": shown["key"]}
    assert deployment.clients(folder) == [0]
    assert "client 1 has no key; add one with 'fedveil deploy add" in told("revoke", folder, 1)
    assert invoke("add", folder, 1).exit_code == 0
    after = {name: (folder / "keys" / name).read_bytes() for name in names}
    assert [name for name in names if before[name] != after[name]] == ["node-1", "node-1.pub"]
    assert invoke("remove", folder, 0).exit_code == 0
    assert deployment.clients(folder) == [1]
    assert not list((folder / "keys").glob("identity-0*"))
    assert invoke("add", folder, 0).exit_code == 0
    assert deployment.clients(folder) == [0, 1]
    assert not (folder / "roster.json").exists()


def test_a_rehearsal_starts_the_clients_that_have_keys(folder, monkeypatch):
    started = []
    monkeypatch.setattr(rehearse, "rehearse", lambda folder, plan, clients, *_: started.append(clients) or "rounds")
    invoke("remove", folder, 0)
    assert invoke("rehearse", folder).exit_code == 0
    assert started == [[1]]
    assert "has 2 clients and keys for 1, so 2 cannot be started" in told("rehearse", folder, "--nodes", 2)
