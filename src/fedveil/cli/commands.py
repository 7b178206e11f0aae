"""The commands that train, and those that report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from fedveil.cli import show
from fedveil.cli.interrupt import INTERRUPTED, Interrupt
from fedveil.cli.options import (
    IMPORT,
    Compile,
    DataDir,
    Debug,
    Device,
    Engine,
    Fetch,
    Format,
    Grid,
    Hold,
    Imports,
    Jobs,
    Keep,
    Kind,
    Noise,
    Out,
    Ray,
    Seeds,
    Sets,
    Shown,
    Stack,
    Version,
    Wire,
    Workers,
    argument,
    option,
)
from fedveil.cli.shell import Plainly, out, say
from fedveil.core.version import __version__

if TYPE_CHECKING:
    from fedveil.cli.jobs import Job
    from fedveil.cli.many import Variant

DEMO = [
    "digits/fedavg",
    "digits/scaffold",
    "digits/fedavg-qsgd",
    "digits/fedavg-top-k",
    "digits/fedsynth",
    "digits/tofu",
    "digits/fedage",
    "digits/baffle",
    "digits/fedlap",
    "digits/fedlap-dp",
]
app = typer.Typer(cls=Plainly, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    app()


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: Version = False, modules: Imports = None) -> None:
    """Federated learning in which no raw gradient has to leave a client.

    Start with: fedveil run digits/fedavg
    """
    context.meta[IMPORT] = modules or []
    if version:
        out.out(__version__)
    elif context.invoked_subcommand is None:
        out.out(context.get_help())


@app.command()
def run(
    source: Annotated[str, argument("RECIPE")],
    changes: Sets = None,
    folder: Out = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    device: Device = "auto",
    stack: Stack = None,
    workers: Workers = None,
    engine: Engine = Kind.local,
    ray_address: Ray = None,
    compile: Compile = False,
    wire: Wire = None,
    keep: Keep = None,
    seeds: Seeds = None,
    hold: Hold = None,
    grid: Grid = None,
    jobs: Jobs = 1,
    debug: Debug = False,
    insecure_test_noise: Noise = False,
    format: Shown = Format.table,
) -> None:
    """Train a recipe: a built-in name or a TOML file.

    Ctrl-C stops after the current round; 'fedveil resume' continues the run. Of several runs, by --seeds or --grid,
    each has a folder in --out, and the same command continues them.

    Example: fedveil run digits/fedavg --set rounds=5 --set method.local.lr=0.1
    """
    from fedveil.cli.jobs import Job, choose, holds_run
    from fedveil.cli.many import Layout
    from fedveil.runs import recipe
    from fedveil.runs.repeats import source_name

    plan = recipe.read(source, changes or ())
    path = folder or fresh(source_name(source))
    if holds_run(path):
        raise ValueError(f"{path} already holds a run; 'fedveil resume {path}' continues it, or choose another --out")
    where = choose(
        data_dir, device, stack, workers, engine, ray_address, debug, insecure_test_noise, compile, wire, keep
    )
    if seeds is not None or grid:
        layout = Layout(path, [source], changes or [], grid or [], seeds, hold)
        _queue(layout.variants(where), path, fetch, jobs, format)
        return
    if hold is not None or jobs > 1:
        raise ValueError(f"{'--hold' if hold is not None else '--jobs'} is for several runs; add --seeds or --grid")
    _finish(Job.new(path, plan, where), fetch, format)


@app.command()
def resume(
    path: Annotated[Path, argument("DIR")],
    rounds: Annotated[int | None, option("--rounds", "N", "Total number of rounds.")] = None,
    format: Shown = Format.table,
) -> None:
    """Continue the run in DIR, or extend a finished one.

    Example: fedveil resume runs/demo/digits-fedavg --rounds 40
    """
    from fedveil.cli.jobs import Job

    job = Job.held(path)
    done = len(job.ledger.rows)
    if rounds is not None:
        if rounds < done:
            raise ValueError(f"{path} has {done} rounds already; --rounds cannot be {rounds}")
        job.recipe = dataclasses.replace(job.recipe, rounds=rounds)
    if job.ended:
        say(f"{path} is finished: {_ending(job)} in round {done}")
        show.summary(job.summary(), format)
        _validate_learned([job])
    else:
        _finish(job, False, format)


def _ending(job: Job) -> str:
    if job.ended == "target":
        return f"it reached its target {job.ledger.primary.words} {job.recipe.target:g}"
    return "it stopped early" if job.ended == "early" else "it reached the last of its rounds"


def _finish(job: Job, fetch: bool, format: Format) -> None:
    """Train, and tell what came of it."""
    hint = f"'fedveil resume {job.path}'"
    task = job.recipe.on(job.data(fetch, {}), job.where.device)
    with Interrupt(hint) as interrupt:
        job.train(task, interrupt)
    show.summary(job.summary(), format)
    if not job.ended:
        say(f"stopped after round {len(job.ledger.rows)} of {job.recipe.rounds}; {hint} goes on")
        raise typer.Exit(INTERRUPTED)
    _validate_learned([job])


def _validate_learned(jobs: Sequence[Job]) -> None:
    """End with an exit code if some run had no answer that it could use."""
    from fedveil.core.outcome import learned_nothing, nothing_learned

    if empty := [f"{job.path}: {nothing_learned(job.ledger)}" for job in jobs if learned_nothing(job.ledger)]:
        raise click.ClickException("; ".join(empty))


def fresh(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@app.command()
def compare(
    sources: Annotated[list[str] | None, argument("[RECIPE]...")] = None,
    changes: Sets = None,
    folder: Out = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    device: Device = "auto",
    stack: Stack = None,
    workers: Workers = None,
    engine: Engine = Kind.local,
    ray_address: Ray = None,
    compile: Compile = False,
    seeds: Seeds = None,
    hold: Hold = None,
    grid: Grid = None,
    jobs: Jobs = 1,
    debug: Debug = False,
    insecure_test_noise: Noise = False,
    format: Shown = Format.table,
) -> None:
    """Run several recipes and write one report.

    Each run has a folder in --out and goes on from what is there already. Without a RECIPE, compare ten runs on
    digits, one of them private. With --seeds, the table has paired differences to the first recipe.

    Example: fedveil compare digits/fedavg digits/scaffold --set rounds=10
    """
    from fedveil.cli.jobs import choose
    from fedveil.cli.many import Layout

    home, chosen = folder or fresh("compare"), sources or DEMO
    where = choose(data_dir, device, stack, workers, engine, ray_address, debug, insecure_test_noise, compile, None)
    layout = Layout(home, chosen, changes or [], grid or [], seeds, hold, several=True)
    _queue(layout.variants(where), home, fetch, jobs, format)


def _queue(variants: Sequence[Variant], home: Path, fetch: bool, parallel: int, format: Format) -> None:
    """Train the runs that are not finished, and tell what came of all."""
    from fedveil.cli.many import train

    jobs = [job for variant in variants for job in variant.jobs.values()]
    with Interrupt(f"the same command with --out {home}") as interrupt:
        train(jobs, fetch, parallel, interrupt)
    begun = [job for job in jobs if job.ledger.rows]
    page = _report([job.path for job in begun], home / "report.html") if all(job.ended for job in jobs) else None
    show.variants(variants, None if page is None else str(page), format)
    if page is None:
        say(f"stopped; {interrupt.hint} goes on")
        raise typer.Exit(INTERRUPTED)
    say(f"the report is {page}")
    _validate_learned(jobs)


def _report(folders: Sequence[Path], path: Path) -> Path:
    from fedveil.report import write

    return write(folders, path)


@app.command()
def cost(
    source: Annotated[str, argument("RECIPE")],
    changes: Sets = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    format: Shown = Format.table,
) -> None:
    """Forecast the cost of RECIPE, or of the run in a folder, without training.

    The bytes are exact if every client answers.

    Example: fedveil cost digits/tofu --set method.up.points=16
    """
    from fedveil.cli.jobs import Job
    from fedveil.runs import recipe
    from fedveil.runs.cost import cost as foretell

    if source not in recipe.names() and Path(source).is_dir():
        data_dir = data_dir or Path(Job.held(Path(source)).where.data_dir)
        source = str(Path(source) / "recipe.toml")
    plan = recipe.read(source, changes or ())
    told = foretell(plan.build(data_dir, fetch), plan)
    if format is Format.json:
        show.as_json(told)
    else:
        show.cost(told)


@app.command()
def report(
    folders: Annotated[list[Path], argument("DIR...")],
    file: Annotated[Path | None, option("-o", "FILE", "Output file; default: report.html in the first DIR.")] = None,
) -> None:
    """Write an HTML report about one or more runs.

    Example: fedveil report runs/demo/digits-fedavg runs/demo/digits-scaffold
    """
    out.out(_report(folders, file or folders[0] / "report.html"))
