"""Flower's simulation on Ray: nodes on this machine, or on a Ray cluster, and nothing left of it afterwards."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedveil.core.clients import Clients
from fedveil.core.seeds import Seed
from fedveil.engines.flower.grid import Flower, note
from fedveil.engines.local import cores
from fedveil.runs import recipe
from fedveil.runs.plugins import import_modules, load_plugins

ENDING = 60.0  # seconds for Flower's threads to end; a client that is still at work is waited for
PATIENCE = 12 * 3600.0  # seconds; a simulated client may take its time, and Flower keeps no message for longer
POLL = 0.05  # seconds; the answers are in this process


@dataclass(frozen=True)
class FromRecipe:
    """Makes the clients of a recipe in every process of a simulation: each loads the whole data set and its split."""

    toml: str
    data_dir: str | None = None
    device: str = "cpu"
    secret: Seed | None = None
    imports: tuple[str, ...] = ()  # modules that bring what the recipe names

    def __call__(self, context: Context) -> Clients:
        load_plugins()
        import_modules(self.imports)
        plan = recipe.parse(tomllib.loads(self.toml))
        task = plan.build(self.data_dir, device=self.device)
        return Clients(plan.method, task, bytes(8), Seed.root(plan.seed), self.secret)


@contextmanager
def simulate(
    app: ClientApp,
    nodes: int,
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    debug: bool = False,
    tell: Callable[[str], object] = note,
) -> Iterator[Flower]:
    """An engine whose clients are `nodes` simulated nodes; every process it starts ends with it.

    workers:     Ray actors that answer side by side; None: one a core. A cluster has as many as it has cores.
    ray_address: a Ray cluster that runs already; None starts one on this machine, on loopback
    debug:       let Flower and Ray log
    """
    try:
        import ray
        from ray._private import ray_constants
    except ImportError:
        raise ImportError("Flower's simulation needs Ray; run: pip install 'fedveil[flower]'") from None
    if ray.is_initialized():
        raise ValueError("Ray runs already in this process, and a simulation starts its own; call ray.shutdown() first")
    level = logging.INFO if debug else logging.CRITICAL
    with _home() as (home, path):
        logging.getLogger("flwr").setLevel(level)
        own: dict[str, Any] = {
            "num_cpus": workers or min(cores(), nodes),
            "_temp_dir": home,
            "_node_ip_address": "127.0.0.1",
        }
        tell("starting Ray" if ray_address is None else f"connecting to Ray at {ray_address}")
        # Ray turns 127.0.0.1 into an address that others reach, except where, as on a Mac, it is for one machine only
        ray_constants.ENABLE_RAY_CLUSTER = ray_address is not None and _beyond_loopback(ray_address)
        ray.init(
            address=ray_address or "local",
            include_dashboard=False,
            log_to_driver=debug,
            logging_level=level,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
            **({} if ray_address else own),
        )
        try:
            with _flower(app, nodes) as (grid, alive):
                yield Flower(grid, PATIENCE, nodes, poll=POLL, tell=tell, simulated=True, alive=alive)
        finally:
            ray.shutdown()


def _beyond_loopback(address: str) -> bool:
    """Whether the Ray at HOST:PORT serves other machines too. Raises ConnectionError where there is none: Ray itself
    would look for it for minutes."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the Ray address is '{address}'; it is HOST:PORT, as 'ray start --head' prints it")
    if not _listens(host, int(port)):
        raise ConnectionError(
            f"there is no Ray at {address}; start one with 'ray start --head', or leave the address out"
        )
    return not host.startswith(("127.", "localhost")) or _listens(get_node_ip_address(), int(port))


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _flower(app: ClientApp, nodes: int) -> Iterator[tuple[Grid, Callable[[], None]]]:
    """Flower's simulation in a thread beside this one: its grid, and a function that raises when it has ended."""
    from flwr.simulation import run_simulation

    server, over, ready = ServerApp(), threading.Event(), threading.Event()
    grids: list[Grid] = []
    errors: list[BaseException] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        grids.append(grid)
        ready.set()
        over.wait()

    def run() -> None:
        try:
            # Without restarts every further question to an actor that died would fail.
            actor: dict[str, Any] = {"num_cpus": 1, "max_restarts": -1}
            run_simulation(server, app, nodes, backend_config={"client_resources": actor})
        except BaseException as error:  # whatever ended it, the thread that waits must hear of it
            errors.append(error)
        ready.set()

    def why() -> str:
        first = errors[0].__cause__ or errors[0] if errors else "it gave no reason"
        return " ".join(str(first).split()) + "; --debug shows its log"

    def alive() -> None:
        if not thread.is_alive():
            raise ConnectionError(f"Flower's simulation ended before the run did: {why()}")

    thread = threading.Thread(target=run, name="flower", daemon=True)
    thread.start()
    try:
        ready.wait()
        if not grids:
            raise ConnectionError(f"Flower's simulation did not start: {why()}")
        yield grids[0], alive
    finally:
        over.set()
        thread.join(ENDING)


@contextmanager
def _home() -> Iterator[tuple[str, str]]:
    """A folder and an environment for Flower's and Ray's processes, and a warden that ends them and removes the folder
    when this process is done with them or killed. Yields the folder and the import path."""
    home, path = tempfile.mkdtemp(prefix="fv-"), os.pathsep.join(p for p in sys.path if p)
    mine = {"FLWR_HOME": home, "PYTHONPATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    before = {name: os.environ.get(name) for name in mine}
    program = [sys.executable, "-S", str(Path(__file__).with_name("warden.py")), home, str(os.getpid())]
    warden = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)
    os.environ.update(mine)
    try:
        yield home, path
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        warden.communicate(timeout=ENDING)
