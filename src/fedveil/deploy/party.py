"""What Flower starts in a deployment: the server's app and a client's. Both have the recipe, each its own data only.

Nobody but the client reads its records, and nobody but the client its memory, a file in the folder that its node's
configuration names. The server's run folder survives a kill: a run that is started again goes on at its round.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import fedveil
from fedveil.core.clients import Clients
from fedveil.core.identity import Identities
from fedveil.core.ledger import Row
from fedveil.core.metrics import ACCURACY
from fedveil.core.seeds import Seed
from fedveil.data import Data
from fedveil.deploy import keys
from fedveil.engines import flower
from fedveil.engines.claims import Claims
from fedveil.privacy.account import SPENT
from fedveil.runs import recipe
from fedveil.runs.checkpoint import RunError
from fedveil.runs.fingerprint import environment
from fedveil.runs.folder import DEPLOYED, RunFolder
from fedveil.runs.recipe import Recipe

Load = Callable[[int | None, int], Data]


def server_app(path: Path, load: Load) -> ServerApp:
    """The server of the recipe at `path`; `load(None, clients)` gives the records it tests on."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log = _logger()
        try:
            _serve(grid, context, path, load, log)
        except Exception as error:
            log.error(" ".join(str(error).split()))
            raise

    return app


def client_app(path: Path, load: Load) -> ClientApp:
    """A client of the recipe at `path`; `load(k, clients)` gives client k's own records, k being `partition-id` in the
    node's configuration. `memory` there is the folder of the file in which the client remembers, `device` where it
    trains; for secure sums `identity` is its Ed25519 key and `identities` the folder of everybody's public ones."""
    return flower.client_app(_Own(path, load), lambda context: Path(_setting(context, "memory")))


@dataclass(frozen=True)
class _Own:
    """Makes the client that a node's configuration names."""

    path: Path
    load: Load

    def __call__(self, context: Context) -> Clients:
        plan, client = recipe.read(str(self.path)), int(_setting(context, "partition-id"))
        own = self.load(client, plan.split.clients)
        task = plan.party(own, client, str(context.node_config.get("device", "cpu")))
        config, own_key = context.node_config, None
        if "identity" in config:
            own_key = client, Path(_setting(context, "identity"))
        known = keys.identities(Path(_setting(context, "identities")), own_key) if own_key else Identities({}, {})
        return Clients(plan.method, task, bytes(8), Seed.root(plan.seed), identities=known)


def _setting(context: Context, key: str) -> str:
    if key not in context.node_config:
        raise ValueError(f"the node's configuration has no '{key}'; give it with flower-supernode --node-config")
    return str(context.node_config[key])


def _serve(grid: Grid, context: Context, path: Path, load: Load, log: logging.Logger) -> None:
    config, plan = context.run_config, recipe.read(str(path))
    plan = dataclasses.replace(plan, rounds=int(config["rounds"]) or plan.rounds)
    task = plan.party(load(None, plan.split.clients), None, str(config["device"]))
    nodes = int(config["nodes"]) or plan.split.clients
    with closing(RunFolder(Path(str(config["out"])))) as folder:
        _validate_same(folder, plan)
        claims = Claims(Path(str(config.get("roster", "roster.json"))), folder.path / "nodes.json")
        folder.describe(plan.toml(), environment(engine=DEPLOYED, nodes=nodes))
        result = fedveil.run(
            task,
            plan.method,
            rounds=plan.rounds,
            cohort=plan.cohort,
            seed=plan.seed,
            engine=flower.Flower(grid, float(config["patience"]), nodes, claims=claims),
            identities=keys.identities(Path(str(config.get("identities", "keys")))),
            evaluate_every=plan.evaluate_every,
            target=plan.target,
            early_stopping=plan.early_stopping,
            folder=folder,
            observer=lambda row: log.info(_told(row, plan.rounds)),
        )
        if result.stopped == "budget":
            log.info(f"stopped after round {len(result.ledger.rows)} of {plan.rounds}: {SPENT}")


def _logger() -> logging.Logger:
    """fedveil's own words on stderr, whence Flower takes them to the SuperLink; its own would be about the taking."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fedveil: %(message)s"))
    log = logging.getLogger("fedveil")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    return log


def _validate_same(folder: RunFolder, plan: Recipe) -> None:
    """A run goes on with the recipe it began with, but for the number of rounds."""
    if folder.checkpoints():
        before = recipe.read(os.fspath(folder.path / "recipe.toml"))
        if dataclasses.replace(before, rounds=plan.rounds) != plan:
            raise RunError(f"{folder.path} holds a run of another recipe; choose another folder with 'out'")


def _told(row: Row, rounds: int) -> str:
    names = dict.fromkeys(((row.primary or ACCURACY).name, "loss"))
    figures = [f"{name} {row.metrics[name]:.4g}" for name in names if name in row.metrics]
    missing = [f"client {client} {reason}" for client, reason in row.missing.items()]
    return "  ".join([f"round {row.round}/{rounds}", *figures, *missing, *row.events])
