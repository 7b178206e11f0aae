"""Flower's simulation on Ray: nodes on this machine, or on a Ray cluster, and nothing left of it afterwards."""

from __future__ import annotations

import logging
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedveil.core.clients import Clients
from fedveil.core.seeds import Seed
from fedveil.engines import cluster
from fedveil.engines.cluster import note
from fedveil.engines.flower.grid import Flower
from fedveil.engines.local import cores
from fedveil.runs import recipe
from fedveil.runs.plugins import import_modules, load_plugins

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
    if cluster.load("Flower's simulation", "flower").is_initialized():
        raise ValueError("Ray runs already in this process, and a simulation starts its own; call ray.shutdown() first")
    logging.getLogger("flwr").setLevel(cluster.level(debug))
    with (
        cluster.connected(ray_address, workers or min(cores(), nodes), debug=debug, tell=tell),
        _flower(app, nodes) as (grid, alive),
    ):
        yield Flower(grid, PATIENCE, nodes, poll=POLL, tell=tell, simulated=True, alive=alive)


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
        thread.join(cluster.ENDING)
