"""The Ray engine: the local engine's results with the same stacks, whatever becomes of an actor, and nothing left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest
import torch

import fedveil as fv
from engines.grids import Failing, descendants, gone, peers
from engines.test_flower_ray import LOOPBACK, small
from fedveil.core.clients import Clients
from fedveil.engines import LocalEngine, RayEngine, cluster
from fedveil.engines import kept as keeping
from fedveil.runs import recipe
from privacy.secagg.sums import Summed
from shell import fv as command
from shell import good
from toys import kept

CHANGES = ["split.clients=6", "split.max_records=360", "cohort.size=5", "method.local.epochs=1"]
PLAN = recipe.read("digits/fedavg", CHANGES)
# Ray does not wait for the processes it ends, and so their handles complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def ray():
    """One Ray for all runs; afterwards none of its processes is left, and none spoke to anyone beyond this machine."""
    before = descendants(os.getpid())
    with cluster.connected(None, 2, debug=False, tell=lambda sentence: None, object_store_memory=1 << 28):
        yield
        started = descendants(os.getpid()) - before
        spoken_to = peers({os.getpid(), *started})
    assert len(started) >= 4
    assert spoken_to <= LOOPBACK
    assert not gone(started)


@pytest.fixture(scope="module")
def task():
    return PLAN.build()


def both(task, method, stack=None, **more):
    """The same run on both engines, with the private randomness fixed."""
    settings = {"rounds": 2, "cohort": 5, "seed": PLAN.seed, "insecure_test_noise": 3} | more
    local = fv.run(task, method, engine=LocalEngine(stack, workers=2), **settings)
    on_ray = fv.run(task, method, engine=RayEngine(workers=2, stack=stack), **settings)
    assert torch.equal(local.weights, on_ray.weights)
    for one, other in zip(local.ledger.rows, on_ray.ledger.rows, strict=True):
        same = ("cohort", "up", "down", "missing", "events", "metrics", "passes", "epsilon", "bytes_up", "bytes_down")
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
        assert not one.missing


def test_a_run_ends_like_the_local_one_bit_for_bit(ray, task):
    both(task, PLAN.method, stack=2)


def test_so_does_a_secure_sum_whose_secrets_go_from_actor_to_actor(ray, task):
    both(task, Summed())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "fedage", "fedlap", "baffle", "feddm", "fedavg-top-k"])
def test_so_does_every_kind_of_method(name, ray, task):
    both(task, small(recipe.read(f"digits/{name}").method), rounds=3)


@pytest.mark.slow
def test_so_does_noise_whose_root_is_fixed(ray, task):
    for how in ({"privacy": fv.DpSgd(delta=1e-3)}, {"user_privacy": fv.UserLevel(delta=1e-2)}):
        both(task, fv.FedAvg(**how))


def test_an_actor_that_dies_is_a_named_failure_and_is_replaced(ray, task, tmp_path):
    engine = RayEngine(workers=2)

    def kill(row):
        if row.round == 1:
            engine._ray.kill(engine._actors[0])

    result = fv.run(task, Failing(), rounds=3, cohort=6, seed=0, engine=engine, observer=kill, folder=tmp_path)
    first, second, third = (row.missing for row in result.ledger.rows)
    assert first == third == {"2": "failed: ArithmeticError: client 2 divides by zero"}
    died = "failed: the Ray actor that answered for its stack has died (ActorDiedError)"
    assert list(second.values()).count(died) == 3
    assert set(second.values()) <= {died, *first.values()}
    assert not torch.equal(result.weights, task.initial)
    known = json.loads((tmp_path / "environment.json").read_text())
    assert (known["engine"], known["workers"], known["stack"], known["ray_address"]) == ("ray", 2, None, None)


def test_the_command_line_runs_and_resumes_on_ray(ray, tmp_path):
    changes = [word for change in CHANGES for word in ("--set", change)]
    options = ["--set", "rounds=1", "--engine", "ray", "--workers", 2, "--out", tmp_path / "a"]
    good("run", "digits/scaffold", *changes, *options)
    assert good("resume", tmp_path / "a", "--rounds", 2, "--format", "json")["rounds"] == 2
    known = json.loads((tmp_path / "a" / "environment.json").read_text())
    assert (known["engine"], known["workers"], known["stack"]) == ("ray", 2, None)
    plan = recipe.read("digits/scaffold", [*CHANGES, "rounds=2"])
    settings = {"rounds": 2, "cohort": plan.cohort, "seed": plan.seed, "folder": tmp_path / "b"}
    fv.run(plan.build(), plan.method, engine=LocalEngine(workers=2), **settings)
    assert kept(tmp_path / "a")[:3] == kept(tmp_path / "b")[:3]  # round, state and the clients' memories
    told = command("run", "digits/fedavg", "--engine", "ray", "--workers", 3, "--out", tmp_path / "c").stderr
    assert "the Ray cluster has 2 CPUs, and 3 workers on cpu need more; use fewer --workers" in told


def test_an_address_is_refused_where_the_process_is_connected(ray, task):
    with pytest.raises(ValueError, match="cannot connect to there; leave the address out"):
        RayEngine("there").lanes(task)


def test_a_task_that_has_trained_can_travel(task):
    from ray import cloudpickle

    fv.run(task, PLAN.method, rounds=1, cohort=2)
    other = cloudpickle.loads(cloudpickle.dumps(task.at(task.norms.values)))
    assert torch.equal(other.f(other.initial, other.test_x), task.f(task.initial, task.test_x))


def test_an_absent_ray_is_said_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = command("run", "digits/fedavg", "--engine", "ray", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert result.stderr == "fedveil: --engine ray needs Ray; run: pip install 'fedveil[ray]'\n"
    with pytest.raises(ImportError, match="the Ray engine needs Ray"):
        RayEngine()


@pytest.mark.slow
def test_a_killed_run_leaves_no_process(tmp_path):
    words = [
        "run",
        "digits/fedavg",
        "--engine",
        "ray",
        "--workers",
        "2",
        "--set",
        "rounds=4000",
        "--out",
        tmp_path / "a",
    ]
    process = subprocess.Popen([sys.executable, "-m", "fedveil", *map(str, words)], start_new_session=True)
    ledger = tmp_path / "a" / "ledger.jsonl"
    while process.poll() is None and not (ledger.exists() and ledger.stat().st_size):
        time.sleep(0.05)
    started = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(started) > 4
    assert not gone(started)


def test_notes_of_a_round_outlast_a_stack_with_clients_that_were_not_asked_in_it(task):
    there, here = (Clients(PLAN.method, task, bytes(8), fv.Seed.root(0)) for _ in range(2))
    there.round, there.notes = 3, {0: {"noted": 1}}
    keeping.unpack(keeping.pack(there, 0), here, 0)
    keeping.unpack(keeping.pack_memory(there.run, 1, []), here, 1)
    assert (here.round, here.notes[0]) == (3, {"noted": 1})


@pytest.mark.slow
def test_a_cluster_that_runs_already_is_used_and_left_running(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = tempfile.mkdtemp(prefix="fv-")  # names of sockets must be short
    here = ["--node-ip-address", "127.0.0.1", "--port", str(port), "--include-dashboard=false", "--temp-dir", home]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2", *here]
    quiet = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    head = subprocess.Popen(start, start_new_session=True, env=quiet, stdout=subprocess.PIPE, text=True)
    try:
        while "block" not in head.stdout.readline():
            assert head.poll() is None
        words = ["run", "digits/scaffold", "--set", "rounds=2", "--out", str(tmp_path / "a")]
        program = [sys.executable, "-m", "fedveil", *words, "--engine", "ray", "--ray-address", f"127.0.0.1:{port}"]
        ran = subprocess.run(program, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        assert head.poll() is None
    finally:
        started = {head.pid, *descendants(head.pid)}
        head.terminate()
        head.wait()
        shutil.rmtree(home, ignore_errors=True)
    assert not gone(started)
    known = json.loads((tmp_path / "a" / "environment.json").read_text())
    assert (known["workers"], known["ray_address"]) == (2, f"127.0.0.1:{port}")
    plan = recipe.read("digits/scaffold")
    settings = {"rounds": 2, "cohort": plan.cohort, "seed": plan.seed, "folder": tmp_path / "b"}
    fv.run(plan.build(), plan.method, engine=LocalEngine(workers=2), **settings)
    assert kept(tmp_path / "a")[:3] == kept(tmp_path / "b")[:3]
