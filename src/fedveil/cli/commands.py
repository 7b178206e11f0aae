"""The commands."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from fedveil import data, models
from fedveil.cli import records, show
from fedveil.cli.jobs import Job, Where, choose, holds_run
from fedveil.cli.options import (
    Compile,
    DataDir,
    Debug,
    Device,
    Engine,
    Fetch,
    Format,
    Imports,
    Kind,
    Noise,
    Out,
    Ray,
    Sets,
    Shown,
    Stack,
    Version,
    What,
    Workers,
    argument,
    option,
)
from fedveil.cli.progress import INTERRUPTED, Interrupt
from fedveil.cli.shell import Plainly, out, say
from fedveil.codecs.base import Codec
from fedveil.core.message import Refused
from fedveil.core.method import METHODS
from fedveil.core.outcome import learned_nothing, nothing_learned
from fedveil.core.setup import settled_like
from fedveil.core.spelling import nearest
from fedveil.core.version import __version__
from fedveil.runs import recipe
from fedveil.runs.cost import cost as foretell
from fedveil.runs.plugins import import_modules, imported, load_plugins
from fedveil.runs.recipe import Recipe

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
    imported.clear()
    load_plugins()
    import_modules(modules or ())
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
    debug: Debug = False,
    insecure_test_noise: Noise = False,
    format: Shown = Format.table,
) -> None:
    """Train as RECIPE says: a built-in name or a TOML file.

    Ctrl-C stops after the round, and 'fedveil resume' goes on.

    Example: fedveil run digits/fedavg --set rounds=5 --set method.local.lr=0.1
    """
    plan = recipe.read(source, changes or ())
    path = folder or _fresh(_name(source))
    if holds_run(path):
        raise ValueError(f"{path} already holds a run; 'fedveil resume {path}' continues it, or choose another --out")
    where = choose(data_dir, device, stack, workers, engine, ray_address, debug, insecure_test_noise, compile)
    job = Job.new(path, plan, where)
    _finish(job, fetch, format)


@app.command()
def resume(
    path: Annotated[Path, argument("DIR")],
    rounds: Annotated[int | None, option("--rounds", "N", "Go on to N rounds in all.")] = None,
    format: Shown = Format.table,
) -> None:
    """Continue the run in DIR, or extend a finished one.

    Example: fedveil resume runs/demo/digits-fedavg --rounds 40
    """
    job = Job.held(path)
    done = len(job.ledger.rows)
    if rounds is not None:
        if rounds < done:
            raise ValueError(f"{path} has {done} rounds already; --rounds cannot be {rounds}")
        job.recipe = dataclasses.replace(job.recipe, rounds=rounds)
    if job.ended:
        reached = f"its target accuracy {job.recipe.target:g}" if job.ended == "target" else "the last of its rounds"
        say(f"{path} is finished: it reached {reached} in round {done}")
        show.summary(job.summary(), format)
        _validate_learned([job])
    else:
        _finish(job, False, format)


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
    if empty := [f"{job.path}: {nothing_learned(job.ledger)}" for job in jobs if learned_nothing(job.ledger)]:
        raise click.ClickException("; ".join(empty))


def _name(source: str) -> str:
    """What the folder of a recipe is called."""
    return Path(source).stem if source.endswith(".toml") else source.replace("/", "-")


def _fresh(name: str) -> Path:
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
    debug: Debug = False,
    insecure_test_noise: Noise = False,
    format: Shown = Format.table,
) -> None:
    """Run several recipes and write one report.

    Each run has a folder in --out and goes on from what is there already. Without a RECIPE, compare ten runs on
    digits, one of them private.

    Example: fedveil compare digits/fedavg digits/scaffold --set rounds=10
    """
    home, chosen = folder or _fresh("compare"), sources or DEMO
    where = choose(data_dir, device, stack, workers, engine, ray_address, debug, insecure_test_noise, compile)
    plans = {home / _name(source): recipe.read(source, changes or ()) for source in chosen}
    if len(plans) < len(chosen):
        raise ValueError("two of the recipes have one name and would share a folder; name each once")
    jobs = [_job(path, plan, where) for path, plan in plans.items()]
    loaded: dict[str, data.Data] = {}
    for job in jobs:
        if job.ended:
            say(f"{job.path} is finished already and used as it is")
        else:
            job.data(fetch, loaded)  # what is missing should show before anything is trained
    with Interrupt(f"the same command with --out {home}") as interrupt:
        for job in jobs:
            if not job.ended and not interrupt.asked:
                job.train(job.recipe.on(job.data(fetch, loaded), job.where.device), interrupt)
    begun = [job for job in jobs if job.ledger.rows]
    page = _report([job.path for job in begun], home / "report.html") if all(job.ended for job in jobs) else None
    if format is Format.json:
        show.as_json({"runs": [job.summary() for job in begun], "report": page and str(page)})
    else:
        show.comparison(begun)
    if page is None:
        say(f"stopped; {interrupt.hint} goes on")
        raise typer.Exit(INTERRUPTED)
    say(f"the report is {page}")
    _validate_learned(jobs)


def _job(path: Path, plan: Recipe, where: Where) -> Job:
    """The run of `plan` in `path`: the one that is there, or a new one."""
    if not holds_run(path):
        return Job.new(path, plan, where)
    job = Job.held(path)
    if job.recipe != dataclasses.replace(plan, method=settled_like(plan.method, job.recipe.method)):
        raise ValueError(f"{path} holds a run of another recipe; choose another --out or delete that folder")
    return job


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
    """Say what RECIPE will cost, before anything is trained.

    Bytes are those of the messages to come, exact if every client answers.

    Example: fedveil cost digits/tofu --set method.up.points=16
    """
    plan = recipe.read(source, changes or ())
    told = foretell(plan.build(data_dir, fetch), plan)
    if format is Format.json:
        show.as_json(told)
    else:
        show.cost(told)


@app.command()
def report(
    folders: Annotated[list[Path], argument("DIR...")],
    file: Annotated[Path | None, option("-o", "FILE", "By default report.html in the first DIR.")] = None,
) -> None:
    """Write one HTML page about the runs in some folders.

    Example: fedveil report runs/demo/digits-fedavg runs/demo/digits-scaffold
    """
    out.out(_report(folders, file or folders[0] / "report.html"))


@app.command("list")
def list_(what: Annotated[What, argument("methods|codecs|models|data|recipes")], format: Shown = Format.table) -> None:
    """List methods, codecs, models, data or recipes.

    Example: fedveil list recipes
    """
    tables: dict[What, Callable[[], dict[str, str]]] = {
        What.methods: lambda: {name: method.about.summary for name, method in METHODS.items()},
        What.codecs: lambda: {name: _first_line(codec) for name, codec in Codec.registry.items()},
        What.models: lambda: {name: _first_line(model) for name, model in models.MODELS.items()},
        What.data: lambda: {name: _first_line(load) for name, load in data.SETS.items()},
        What.recipes: lambda: {name: _setting(recipe.read(name)) for name in recipe.names()},
    }
    found = tables[what]()
    if format is Format.json:
        show.as_json([{"name": name, "summary": summary} for name, summary in found.items()])
    else:
        show.pairs(found.items())


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").partition("\n")[0]


def _setting(plan: Recipe) -> str:
    size, clients = plan.cohort.size, plan.split.clients
    who = f"{size} of {clients}" if size < clients else f"all {clients}"
    return f"{plan.split.kind}, {size if plan.split.kind == 'natural' else who} clients a round, {plan.rounds} rounds"


@app.command()
def describe(method: Annotated[str, argument("METHOD")], format: Shown = Format.table) -> None:
    """Say what a method or codec sends, and its keys.

    Of a method also who sees it, and of which kind each claim about privacy is.

    Example: fedveil describe scaffold
    """
    if method in Codec.registry and method not in METHODS:
        return _describe_codec(Codec.registry[method](), format)
    if method not in METHODS:
        raise ValueError(f"there is no method '{method}'{nearest(method, [*METHODS, *Codec.registry])}")
    about, keys = METHODS[method].about, dict(_keys(METHODS[method](), "method"))
    if format is Format.json:
        claims = [{"kind": kind, "sentence": sentence} for kind, sentence in about.claims]
        show.as_json({"name": method, **vars(about), "claims": claims, "keys": keys})
        return
    words = [(name.replace("_", " "), text) for name, text in vars(about).items() if name not in ("claims", "paper")]
    show.pairs([("method", method), *words, *about.claims, ("paper", about.paper)])
    out.out("\nkeys for --set, with their defaults")
    show.pairs(_typed(METHODS[method](), "method"))


def _typed(thing: Any, path: str) -> Iterator[tuple[str, str]]:
    """What a recipe can set below `path`, and the present values as one would type them. None is to leave a key out; of
    a table that is left out the keys are named."""
    for key, value in _keys(thing, path):
        shown = str(value).lower() if value is None or isinstance(value, bool) else f"{value}" or '""'
        name = key.removeprefix(f"{path}.")
        if value is None and "." not in name and (table := recipe.section(type(thing), name)):
            shown = f"none, or its {', '.join(recipe.keys(table))}"
        yield f"  {key}", shown


def _describe_codec(codec: Codec, format: Format) -> None:
    """A codec's own words, and its keys as those of the way up."""
    words, keys = " ".join((codec.__doc__ or "").split("\n\n")[0].split()), dict(_keys(codec, "method.up"))
    if format is Format.json:
        return show.as_json({"name": codec.name, "summary": words, "keys": keys})
    show.pairs([("codec", codec.name), ("summary", words)])
    out.out(f"\nkeys for --set, with their defaults{'; method.down takes the same' if codec.server_can_encode else ''}")
    show.pairs(_typed(codec, "method.up"))


def _keys(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a recipe can set below `path`, and the present values."""
    if hasattr(thing, "registry"):
        yield f"{path}.name", thing.name
    for part in dataclasses.fields(thing):
        value, key = getattr(thing, part.name), f"{path}.{part.name}"
        yield from _keys(value, key) if dataclasses.is_dataclass(value) else [(key, value)]


@app.command()
def inspect(file: Annotated[Path, argument("FILE")], format: Shown = Format.table) -> None:
    """Show what a checkpoint or a message holds.

    Example: fedveil inspect runs/demo/digits-scaffold/checkpoint-00000020.fv
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    try:
        head, found = records.opened(file.read_bytes())
    except Refused as error:
        raise ValueError(f"{file} cannot be shown: {error}") from None
    parts = [(part, type(record).__name__, records.fields(record)) for part, record in found]
    if format is Format.json:
        show.as_json(head | {"records": [{"part": part, "kind": kind, "fields": seen} for part, kind, seen in parts]})
        return
    show.pairs(head.items())
    for part, kind, seen in parts:
        out.out(f"\n{part}: {kind}")
        show.pairs((f"  {name}", records.line(value)) for name, value in seen.items())
