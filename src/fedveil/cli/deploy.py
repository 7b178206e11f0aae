"""`fedveil deploy`: write a deployment on Flower, rehearse it, and manage its clients."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fedveil.cli import show
from fedveil.cli.interrupt import INTERRUPTED
from fedveil.cli.options import Format, Sets, Shown, argument, option
from fedveil.cli.shell import Plainly, err, say

if TYPE_CHECKING:
    from fedveil.core.ledger import Row
    from fedveil.engines.claims import Seat
    from fedveil.runs.progress import Watch
    from fedveil.runs.recipe import Recipe

Superlink = Annotated[str | None, option("--superlink", "NAME", "Connection name in Flower's config.toml.")]

deploy = typer.Typer(
    cls=Plainly, no_args_is_help=True, rich_markup_mode=None, help="Write and rehearse a deployment on Flower."
)


@deploy.command()
def init(
    folder: Annotated[Path, argument("DIR")],
    source: Annotated[str, option("--recipe", "RECIPE", "Recipe to deploy; default: digits/fedavg.")] = "digits/fedavg",
    changes: Sets = None,
    model: Annotated[str | None, option("--model", "MODEL", "Name, or your own as my_file:function.")] = None,
    data: Annotated[str | None, option("--data", "DATA", "Name or path, or your own as my_file:function.")] = None,
    clients: Annotated[int, option("--clients", "N", "Number of clients; default: 3.")] = 3,
) -> None:
    """Write a Flower app, certificates, node keys and an nginx configuration to DIR.

    Example: fedveil deploy init federation --recipe digits/scaffold --clients 2
    """
    from fedveil.deploy import scaffold
    from fedveil.runs import recipe

    own = [f"task.{key}={value}" for key, value in (("model", model), ("data", data)) if value is not None]
    for sentence in scaffold.init(folder, recipe.read(source, [*(changes or ()), *own]), clients):
        say(sentence)
    say(
        f"{folder} is written; 'fedveil deploy rehearse {folder}' runs it, and {folder / 'README.md'} says what is next"
    )


@deploy.command()
def rehearse(
    folder: Annotated[Path, argument("DIR")],
    rounds: Annotated[int | None, option("--rounds", "N", "Total number of rounds.")] = None,
    nodes: Annotated[int | None, option("--nodes", "N", "Start only the first N clients.")] = None,
    format: Shown = Format.table,
) -> None:
    """Run the deployment in DIR on this machine.

    Start a server and one process per client, over TLS, with a key for each client. A stopped run continues.

    Example: fedveil deploy rehearse federation --rounds 5
    """
    from fedveil.deploy import deployment

    plan, method = deployment.planned(folder)
    plan = plan if rounds is None else dataclasses.replace(plan, rounds=rounds)
    deployment.validate_same(folder, plan)
    there = [k for k in deployment.clients(folder) if k < plan.split.clients]
    if not 1 <= (started := len(there) if nodes is None else nodes) <= len(there):
        told = f"{folder} has {plan.split.clients} clients and keys for {len(there)}"
        raise ValueError(
            f"{told}, so {started} cannot be started; use --nodes, or 'fedveil deploy add {folder} CLIENT'"
        )
    if stopped := deployment.finished(deployment.held(folder), plan):
        say(f"{folder / 'run'} is finished; --rounds goes on")
    else:
        stopped = _rehearse(folder, plan, there[:started])
    figures = deployment.held(folder).summary(method)
    show.summary(figures | {"out": str(folder / "run"), "stopped": stopped}, format)


@deploy.command()
def add(
    folder: Annotated[Path, argument("DIR")],
    client: Annotated[int, argument("CLIENT")],
    key: Annotated[Path | None, option("--key", "FILE", "The public key of the client's node.")] = None,
    superlink: Superlink = None,
    format: Shown = Format.table,
) -> None:
    """Register a key as client number CLIENT, from 0.

    No other key is then accepted for this client. Without --key and --superlink, make new keys for the rehearsal.

    Example: fedveil deploy add federation 0 --key client-0.pub --superlink ours
    """
    from fedveil.deploy import roster

    _shown(client, roster.add(folder, client, key, superlink), superlink, format)


@deploy.command()
def remove(
    folder: Annotated[Path, argument("DIR")],
    client: Annotated[int, argument("CLIENT")],
    superlink: Superlink = None,
    format: Shown = Format.table,
) -> None:
    """Unregister client CLIENT; its number is free until another key is added.

    Without --superlink, delete its keys of the rehearsal.

    Example: fedveil deploy remove federation 0 --superlink ours
    """
    from fedveil.deploy import roster

    _shown(client, roster.remove(folder, client, superlink), superlink, format)


@deploy.command()
def revoke(
    folder: Annotated[Path, argument("DIR")],
    client: Annotated[int, argument("CLIENT")],
    superlink: Superlink = None,
    format: Shown = Format.table,
) -> None:
    """Unregister the key of client CLIENT, and never accept it again.

    To add the client again, use a new key and 'fedveil deploy add'. Without --superlink, delete its rehearsal key.

    Example: fedveil deploy revoke federation 0 --superlink ours
    """
    from fedveil.deploy import roster

    _shown(client, roster.remove(folder, client, superlink, revoke=True), superlink, format)


@deploy.command()
def proxy(folder: Annotated[Path, argument("DIR")]) -> None:
    """Write DIR/nginx.conf again after a change of the recipe, which determines the size limit of a request.

    Example: fedveil deploy proxy federation
    """
    from fedveil.deploy import proxy as gate

    answer = gate.rewrite(folder)
    say(f"{folder / 'nginx.conf'} is written for answers of at most {answer:,} bytes")


def _shown(client: int, seat: Seat, superlink: str | None, format: Format) -> None:
    """The client, its key and, at a SuperLink, its node; the id is text, since many programs round such numbers."""
    show.summary({"client": client, "node": str(seat.node) if superlink else None, "key": seat.key}, format)


def _rehearse(folder: Path, plan: Recipe, clients: Sequence[int]) -> str:
    from fedveil.deploy import deployment
    from fedveil.deploy import rehearse as stage
    from fedveil.runs.progress import Watch

    stopping = (signal.SIGINT, signal.SIGTERM)  # also where whoever started this ignores the first
    before = [signal.signal(number, _interrupt) for number in stopping]
    try:
        with Watch(plan.rounds, deployment.held(folder), err) as watch:
            return stage.rehearse(folder, plan, clients, lambda row: _watched(row, watch), say)
    except stage.Failed as error:
        for line in error.lines:
            err.print(f"  {line}", soft_wrap=True)
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        done = len(deployment.held(folder).rows)
        say(f"stopped after round {done} of {plan.rounds}; 'fedveil deploy rehearse {folder}' goes on")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        for number, handler in zip(stopping, before, strict=True):
            signal.signal(number, handler)


def _watched(row: Row, watch: Watch) -> None:
    watch(row)
    for client, reason in row.missing.items():
        say(f"round {row.round} went without client {client}: {reason}")
    for event in row.events:
        say(f"round {row.round}: {event}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
