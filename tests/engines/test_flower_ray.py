"""Flower's simulation: every method gives the same weights as on the local engine, and nothing is left running."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import fedveil as fv
from engines.grids import Failing, FromToml, Recording, alive, any_run, descendants, gone, peers
from fedveil.engines import LocalEngine
from fedveil.engines.flower import simulate
from fedveil.runs import recipe
from privacy.secagg.sums import Summed
from toys import LastReference, Twice, kept

OWN = sorted(name for name, method in fv.METHODS.items() if method.__module__.startswith("fedveil."))
PLAN = recipe.read("digits/fedavg", ["split.clients=4", "split.max_records=360", "rounds=2", "method.local.epochs=1"])
# Ray does not wait for the processes it ends, and so their handles complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
SMALL = {"steps": 5, "fits": 5, "epochs": 1, "restarts": 1, "batches": 3, "draws": 3}
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    """One Ray for all runs; afterwards none of its processes is left, and none spoke to anyone beyond this machine."""
    folder, before = tmp_path_factory.mktemp("runs"), descendants(os.getpid())
    with simulate(any_run(folder), 4, workers=2) as engine:
        yield lambda plan: Recording(engine, folder, FromToml(plan.toml()))
        started = descendants(os.getpid()) - before
        spoken_to = peers({os.getpid(), *started})
    assert len(started) >= 4
    assert spoken_to <= LOOPBACK
    assert not gone(started)


@pytest.fixture(scope="module")
def task():
    return PLAN.build()


def small(thing):
    """The same settings with fewer steps, however deep they are."""
    changes = {}
    for part in dataclasses.fields(thing):
        value = getattr(thing, part.name)
        if dataclasses.is_dataclass(value):
            changes[part.name] = small(value)
        elif part.name in SMALL and isinstance(value, int):
            changes[part.name] = min(value, SMALL[part.name])
    return dataclasses.replace(thing, **changes)


def both(simulation, task, method, **more):
    """The same run on both engines, with the private randomness fixed."""
    settings = {"rounds": 2, "cohort": 2, "seed": PLAN.seed, "insecure_test_noise": 3} | more
    local = fv.run(task, method, engine=LocalEngine(stack=1, workers=1), **settings)
    flower = fv.run(task, method, engine=simulation(PLAN), **settings)
    assert torch.equal(local.weights, flower.weights)
    for one, other in zip(local.ledger.rows, flower.ledger.rows, strict=True):
        same = ("cohort", "up", "down", "missing", "events", "metrics", "passes", "epsilon")
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
    return flower.ledger


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("fedavg", "scaffold") else pytest.mark.slow) for n in OWN]
)
def test_every_method_gives_the_same_weights_bit_for_bit(name, simulation, task):
    built_in = f"digits/{name}"
    method = recipe.read(built_in).method if built_in in recipe.names() else fv.METHODS[name]()
    assert method.name == name
    ledger = both(simulation, task, small(method), cohort=4)  # a secure sum is of three or more
    assert not any(row.missing for row in ledger.rows)
    assert all(row.wire_up > row.bytes_up > 0 and row.wire_down > row.bytes_down > 0 for row in ledger.rows)


def test_so_does_error_feedback(simulation, task):
    both(simulation, task, fv.FedAvg(up=fv.Codec.registry["top-k"](), feedback=True), rounds=3, cohort=4)


@pytest.mark.filterwarnings("ignore:no client answered in round", "ignore:nothing was learned")
def test_so_do_clients_that_were_away_and_are_caught_up(simulation, task):
    method = small(fv.FedAvg(down=fv.Codec.registry["qsgd"]()))
    ledger = both(simulation, task, method, rounds=4, cohort=fv.CohortSampler(size=2, drop=0.3))
    assert sum(row.metrics["caught_up"] for row in ledger.rows) > 0
    assert any(row.missing for row in ledger.rows)


@pytest.mark.parametrize("method", [Twice(), LastReference()], ids=lambda method: method.name)
def test_so_do_toys_that_ask_twice_or_send_what_was_missed(method, simulation, task):
    both(simulation, task, method, rounds=3)


def test_so_does_a_secure_sum_whose_secrets_go_from_process_to_process(simulation, task):
    both(simulation, task, Summed(), cohort=4)


def test_so_does_noise_whose_root_is_fixed(simulation, task):
    for how in ({"privacy": fv.DpSgd(delta=1e-3)}, {"user_privacy": fv.UserLevel(delta=1e-2)}):
        both(simulation, task, fv.FedAvg(**how))


def test_so_does_a_resumed_run(simulation, task, tmp_path):
    settings = {"cohort": 2, "seed": PLAN.seed}
    fv.run(task, fv.Scaffold(), rounds=4, engine=LocalEngine(stack=1, workers=1), folder=tmp_path / "local", **settings)
    for rounds in (2, 4):
        fv.run(task, fv.Scaffold(), rounds=rounds, engine=simulation(PLAN), folder=tmp_path / "flower", **settings)
    one, other = kept(tmp_path / "local"), kept(tmp_path / "flower")
    assert one[:3] == other[:3]  # round, state and the clients' memories


def test_a_client_that_fails_is_missing_with_its_reason(simulation, task):
    ledger = both(simulation, task, Failing(), rounds=1, cohort=4)
    assert ledger.rows[0].missing == {"2": "failed: ArithmeticError: client 2 divides by zero"}


# ---------------------------------------------------------------------------------------------------- the command line


def begin(folder, *options):
    """`fedveil run` on Flower in a process group of its own, once it has done a round."""
    command = ["run", "digits/scaffold", "--engine", "flower", "--out", str(folder), *options]
    program = [sys.executable, "-m", "fedveil", *command]
    process = subprocess.Popen(
        program, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ledger, end = folder / "ledger.jsonl", time.monotonic() + 900
    while process.poll() is None and time.monotonic() < end:
        if ledger.exists() and ledger.read_bytes().count(b"\n") >= 1:
            break
        time.sleep(0.05)
    return process, {process.pid, *descendants(process.pid)}


def test_a_killed_run_leaves_no_process_and_is_resumed_on_flower(tmp_path):
    small = ["--set", "rounds=400", "--set", "split.clients=4", "--set", "cohort.size=2", "--workers", "1"]
    process, started = begin(tmp_path / "flower", *small)
    try:
        assert process.poll() is None, process.stderr.read()
        assert len(started) > 4
    finally:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not gone(started)
    done = len(fv.Ledger.read(tmp_path / "flower" / "ledger.jsonl").rows) + 2
    resume = [
        sys.executable,
        "-m",
        "fedveil",
        "resume",
        str(tmp_path / "flower"),
        "--rounds",
        str(done),
        "--format",
        "json",
    ]
    resumed = subprocess.run(resume, capture_output=True, text=True, timeout=900)
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["rounds"] == done
    assert json.loads((tmp_path / "flower" / "environment.json").read_text())["engine"] == "flower"
    plan = recipe.read(str(tmp_path / "flower" / "recipe.toml"))
    settings = {"rounds": done, "cohort": plan.cohort, "seed": plan.seed, "folder": tmp_path / "local"}
    fv.run(plan.build(), plan.method, engine=LocalEngine(stack=1, workers=1), **settings)
    assert kept(tmp_path / "local")[:3] == kept(tmp_path / "flower")[:3]


@pytest.mark.slow
def test_a_ray_process_that_dies_costs_answers_and_is_started_again(simulation, task):
    fv.run(task, fv.FedAvg(), rounds=1, cohort=4, engine=simulation(PLAN))
    commands = {pid: alive([pid]) for pid in descendants(os.getpid())}
    victim = next(pid for pid, told in commands.items() if told and "ray::ClientAppActor" in told[0])
    os.kill(victim, signal.SIGKILL)
    missing = []
    for _ in range(60):
        result = fv.run(task, fv.FedAvg(), rounds=1, cohort=4, engine=simulation(PLAN))
        missing.append(list(result.ledger.rows[0].missing.values()))
        if len(missing) > 1 and not missing[-1]:
            break
        time.sleep(0.5)
    assert all("failed: Flower's error" in reason for reason in missing[0])
    assert missing[0]
    assert not missing[-1]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_every_process(times, tmp_path):
    process, started = begin(tmp_path / "run", "--set", "rounds=400")
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        time.sleep(0.2)
    _, told = process.communicate(timeout=900)
    assert process.returncode == 130
    assert ("stopped after round" if times == 1 else "aborted;") in told
    assert not gone(started)


@pytest.mark.slow
def test_compare_runs_several_recipes_on_flower(tmp_path):
    command = ["compare", "digits/fedavg", "digits/fedavg-qsgd", "--engine", "flower", "--out", str(tmp_path / "runs")]
    ran = subprocess.run(
        [sys.executable, "-m", "fedveil", *command, "--set", "rounds=2", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr
    assert [run["rounds"] for run in json.loads(ran.stdout)["runs"]] == [2, 2]
    assert (tmp_path / "runs" / "report.html").exists()


RAISES = """
import os
from engines.grids import descendants
from fedveil.engines.flower import FromRecipe, client_app, simulate

with simulate(client_app(FromRecipe("")), 2):
    print(*descendants(os.getpid()), flush=True)
    raise ArithmeticError("on purpose")
"""


@pytest.mark.slow
def test_an_exception_ends_every_process_too():
    ran = subprocess.run(
        [sys.executable, "-c", RAISES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert "ArithmeticError: on purpose" in ran.stderr
    started = {int(pid) for pid in ran.stdout.split()}
    assert len(started) > 4
    assert not gone(started)


@pytest.mark.slow
def test_a_second_simulation_in_one_process_is_refused(simulation):
    with pytest.raises(ValueError, match="Ray runs already in this process"), simulate(None, 2):
        pass
