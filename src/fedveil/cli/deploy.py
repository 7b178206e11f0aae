"""`fedveil deploy`: write a deployment on Flower, and rehearse it on this machine."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import click
import typer

from fedveil import recipe
from fedveil.cli import show
from fedveil.cli.options import Format, Sets, Shown, argument, option
from fedveil.cli.progress import INTERRUPTED, Watch
from fedveil.cli.shell import err, say
from fedveil.ledger import Row

deploy = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Write and rehearse a deployment on Flower.")


@deploy.command()
def init(
    folder: Annotated[Path, argument("DIR")],
    source: Annotated[str, option("--recipe", "RECIPE", "What to deploy; by default digits/fedavg.")] = "digits/fedavg",
    changes: Sets = None,
    clients: Annotated[int, option("--clients", "N", "How many clients there are; by default 3.")] = 3,
) -> None:
    """Write a Flower app, certificates and node keys to DIR.

    Example: fedveil deploy init federation --recipe digits/scaffold --clients 2
    """
    from fedveil.deploy import scaffold

    scaffold.init(folder, recipe.read(source, changes or ()), clients)
    say(
        f"{folder} is written; 'fedveil deploy rehearse {folder}' runs it, and {folder / 'README.md'} says what is next"
    )


@deploy.command()
def rehearse(
    folder: Annotated[Path, argument("DIR")],
    rounds: Annotated[int | None, option("--rounds", "N", "Go on to N rounds in all.")] = None,
    nodes: Annotated[int | None, option("--nodes", "N", "Start only the first N clients.")] = None,
    format: Shown = Format.table,
) -> None:
    """Run the deployment in DIR on this machine, as it runs in earnest.

    A server and a process for every client, over TLS, each client known by its key. A run that was stopped goes on.

    Example: fedveil deploy rehearse federation --rounds 5
    """
    from fedveil.deploy import rehearse as stage

    plan, method = stage.planned(folder)
    plan = plan if rounds is None else dataclasses.replace(plan, rounds=rounds)
    there = len(list((folder / "keys").glob("node-*.pub")))
    if not 1 <= (started := plan.split.clients if nodes is None else nodes) <= min(there, plan.split.clients):
        told = f"{folder} has {plan.split.clients} clients and keys for {there}"
        raise ValueError(f"{told}, so {started} cannot be started; use --nodes, or write a new deployment")
    if stopped := stage.finished(stage.held(folder), plan):
        say(f"{folder / 'run'} is finished; --rounds goes on")
    else:
        stopped = _rehearse(folder, plan, started)
    figures = stage.held(folder).summary(method)
    show.summary(figures | {"out": str(folder / "run"), "stopped": stopped}, format)


def _rehearse(folder: Path, plan: recipe.Recipe, nodes: int) -> str:
    from fedveil.deploy import rehearse as stage

    stopping = (signal.SIGINT, signal.SIGTERM)  # also where whoever started this ignores the first
    before = [signal.signal(number, _interrupt) for number in stopping]
    try:
        with Watch(plan.rounds, stage.held(folder)) as watch:
            return stage.rehearse(folder, plan, nodes, lambda row: _watched(row, watch), say)
    except stage.Failed as error:
        for line in error.lines:
            err.print(f"  {line}", soft_wrap=True)
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        done = len(stage.held(folder).rows)
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
