"""The command line. Results go to stdout, progress and warnings to stderr; a user's mistake is one sentence there."""

from __future__ import annotations

import dataclasses
import datetime
import os
import shlex
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import click
import msgspec
import torch
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from torch import Tensor
from typer.core import TyperGroup

import fedveil
from fedveil import data, message, models, recipe
from fedveil.data.files import data_directory
from fedveil.engines.local import ClientFailure, Local
from fedveil.federation import METHODS
from fedveil.ledger import Ledger, Row, figure
from fedveil.message import KINDS, SERVER, Record, Refused
from fedveil.recipe import Recipe
from fedveil.runs import Checkpoint, RunFolder, environment, read_checkpoint
from fedveil.task import Task

DEMO = ["digits/fedavg", "digits/fedprox", "digits/scaffold", "digits/q-fedavg", "digits/fedsgd"]
INTERRUPTED = 130
PICTURED = 5000  # clients of a split that is worth a picture
LINE_EVERY = 5.0  # seconds, where stderr is no terminal
BUG = "fedveil did not expect this; please report it with the recipe."

out = Console(markup=False, highlight=False, emoji=False)
err = Console(markup=False, highlight=False, emoji=False, stderr=True)


def say(sentence: object) -> None:
    """A sentence on stderr; one line, except that a terminal's lines end between words."""
    err.print(f"fedveil: {' '.join(str(sentence).split())}", soft_wrap=not err.is_terminal)


class Plainly(TyperGroup):
    """What a user can get wrong is one sentence and exit code 2; a bug keeps its traceback."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        code: int = 2
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_, **__: say(f"warning: {text}")
            try:
                code = super().main(*args, **extra | {"prog_name": "fedveil", "standalone_mode": False})
            except click.UsageError as error:
                where = f"; see '{error.ctx.command_path} --help'" if error.ctx else ""
                say(error.format_message().rstrip(".") + where)
            except click.ClickException as error:
                code = error.exit_code
                say(error.format_message())
            except OSError as error:
                file = f"{error.filename}: " if error.filename else ""
                say(f"{file}{error.strerror}" if error.strerror else error)
            except (ValueError, ImportError) as error:
                if BUG in getattr(error, "__notes__", ()):
                    raise
                say(error)
        sys.exit(code)


app = typer.Typer(cls=Plainly, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def main() -> None:
    app()


# ---------------------------------------------------------------------------------------------------- options

Format = StrEnum("Format", ["table", "json"])
What = StrEnum("What", ["methods", "models", "data", "recipes"])


def _number(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"'{text}' is neither auto nor a number from 1")
    return int(text)


def _option(name: str, metavar: str | None, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, **more)


def _argument(metavar: str) -> Any:
    return typer.Argument(metavar=metavar, hidden=True)


Sets = Annotated[list[str] | None, _option("--set", "KEY=VALUE", "Change a key of the recipe; may be repeated.")]
Out = Annotated[Path | None, _option("--out", "DIR", "Where to write; by default a new folder below runs/.")]
DataDir = Annotated[Path | None, _option("--data-dir", "DIR", "Where data sets lie; else FEDVEIL_DATA says.")]
Fetch = Annotated[bool, _option("--fetch", None, "Download the data if it is missing.")]
Device = Annotated[str, _option("--device", "auto|cpu|cuda", "Where to train; auto is a GPU if there is one.")]
Stack = Annotated[int | None, _option("--stack", "N|auto", "Clients trained as one.", parser=_number)]
Workers = Annotated[int | None, _option("--workers", "N|auto", "Stacks trained side by side.", parser=_number)]
Debug = Annotated[bool, _option("--debug", None, "One client at a time; the first failure ends the run.")]
Noise = Annotated[bool, _option("--insecure-test-noise", None, "Fix the private randomness, for tests only.")]
Version = Annotated[bool, _option("--version", None, "Print the version.")]
Shown = Annotated[Format, _option("--format", "table|json", "What stdout gets; by default a table.")]


# ---------------------------------------------------------------------------------------------------- runs


class Where(msgspec.Struct, frozen=True):
    """What a run depends on besides its recipe, as far as the user decides it; `resume` reads it again."""

    data_dir: str
    device: str
    stack: int | None
    workers: int | None
    threads: int
    debug: bool
    insecure_test_noise: bool


def _where(folder: Path | None, device: str, stack: int | None, workers: int | None, debug: bool, noise: bool) -> Where:
    if noise:
        say("warning: the private randomness is fixed, so noise protects nobody in this run")
    directory = str(data_directory(folder).absolute())
    return Where(directory, recipe.pick_device(device), stack, workers, torch.get_num_threads(), debug, noise)


@dataclass
class Job:
    """A run in its folder: not begun, stopped or finished."""

    path: Path
    recipe: Recipe
    environment: Mapping[str, Any]
    ledger: Ledger = field(default_factory=Ledger)  # of the rounds that the newest checkpoint covers

    @staticmethod
    def new(path: Path, plan: Recipe, where: Where) -> Job:
        command = shlex.join(["fedveil", *sys.argv[1:]])
        return Job(path, plan, environment(command=command, **msgspec.structs.asdict(where)))

    @staticmethod
    def held(path: Path) -> Job:
        """The job that a folder holds. A folder that holds none is a ValueError."""
        for name in ("recipe.toml", "environment.json"):
            if not (path / name).is_file():
                raise ValueError(f"{path} holds no run that could be resumed: there is no {name} in it")
        try:
            known = msgspec.json.decode((path / "environment.json").read_bytes(), type=dict[str, Any])
            msgspec.convert(known, Where)
        except ValueError as error:
            raise ValueError(f"{path / 'environment.json'} is damaged: {error}") from None
        with closing(RunFolder(path)) as folder:
            saved = folder.load()
            rows = folder.ledger(saved.round if saved else 0).rows
        return Job(path, recipe.read(str(path / "recipe.toml")), known, Ledger(rows))

    @property
    def where(self) -> Where:
        return msgspec.convert(self.environment, Where)

    @property
    def ended(self) -> str | None:
        """Why no round is left to do; None if some are."""
        rows, target = self.ledger.rows, self.recipe.target
        if rows and target is not None and rows[-1].metrics.get("accuracy", 0.0) >= target:
            return "target"
        return "rounds" if len(rows) >= self.recipe.rounds else None

    def summary(self) -> dict[str, Any]:
        figures = self.ledger.summary(self.recipe.method.name)
        return figures | {"out": str(self.path), "stopped": self.ended or "interrupt"}

    def data(self, fetch: bool, loaded: dict[str, data.Data]) -> data.Data:
        """The job's data set, read once for all jobs that share `loaded`."""
        task, directory = self.recipe.task, self.where.data_dir
        key = repr((task.data, task.data_options, directory))
        if key not in loaded:
            loaded[key] = data.load(task.data, directory, fetch, **task.data_options)
        return loaded[key]

    def train(self, task: Task, stop: Callable[[], bool]) -> None:
        """Do the rounds that are left."""
        plan, where = self.recipe, self.where
        engine = Local(where.stack, where.workers, where.debug)
        torch.set_num_threads(where.threads)
        with closing(RunFolder(self.path)) as folder, Watch(self) as watch:
            folder.describe(plan.toml(), dict(self.environment))
            _picture(task, self.path / "split.svg")
            say(f"{plan.method.name}, {plan.rounds} rounds, in {self.path}")
            try:
                result = fedveil.run(
                    task,
                    plan.method,
                    rounds=plan.rounds,
                    cohort=plan.cohort,
                    seed=plan.seed,
                    engine=engine,
                    evaluate_every=plan.evaluate_every,
                    target=plan.target,
                    folder=folder,
                    observer=watch,
                    stop=stop,
                    insecure_test_noise=plan.seed if where.insecure_test_noise else None,
                )
            except Exception as error:
                if isinstance(error, (ClientFailure, Refused)) or str(error).startswith("no client answered"):
                    raise click.ClickException(f"the run ended early: {error}") from None
                error.add_note(BUG)
                raise
        self.ledger = result.ledger


def _picture(task: Task, path: Path) -> None:
    if len(task.clients) <= PICTURED and not path.exists():
        from fedveil.report.figures import svg

        path.write_text(svg(task.clients.picture(task.data.y, task.data.labels)), encoding="utf-8")


class Watch:
    """Progress on stderr: one line that renews itself on a terminal, elsewhere a line every few seconds."""

    def __init__(self, job: Job) -> None:
        self.rounds, self.first = job.recipe.rounds, len(job.ledger.rows)
        self.up, self.accuracy = sum(row.bytes_up for row in job.ledger.rows), ""
        self.began, self.told = time.monotonic(), -LINE_EVERY
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=10))
        self.bar = Progress(*columns, console=err, disable=not err.is_terminal)
        self.line = self.bar.add_task(f"round {self.first}/{self.rounds}", total=self.rounds)

    def __enter__(self) -> Watch:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, row: Row) -> None:
        self.up += row.bytes_up
        if "accuracy" in row.metrics:
            self.accuracy = f"  accuracy {row.metrics['accuracy']:.4f}"
        now = time.monotonic()
        left = round((now - self.began) / (row.round - self.first) * (self.rounds - row.round))
        line = f"round {row.round}/{self.rounds}{self.accuracy}  {decimal(self.up)} up"
        line += f"  {datetime.timedelta(seconds=left)} left" if left else ""
        self.bar.update(self.line, completed=row.round, description=line)
        if self.bar.disable and now - self.told >= LINE_EVERY:
            self.told = now
            err.print(line, soft_wrap=True)


class Interrupt:
    """Ctrl-C: the first one stops after the round, the second one at once."""

    def __init__(self, hint: str) -> None:
        self.hint, self.asked = hint, False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self) -> bool:
        return self.asked

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # run folders survive a kill at any moment; an exception would wait for the engine's threads
            _interject(f"aborted; {self.hint} goes on from the last finished round", "\x1b[?25h")  # shows the cursor
            os._exit(INTERRUPTED)
        self.asked = True
        _interject("stopping after this round; Ctrl-C again aborts at once")


def _interject(sentence: str, control: str = "") -> None:
    """Say something from a signal handler, which may have interrupted a write to stderr: past its buffer."""
    start = f"\r\x1b[2K{control}" if err.is_terminal else ""  # in place of the progress bar, which comes again below
    os.write(2, f"{start}fedveil: {sentence}\n".encode())


# ---------------------------------------------------------------------------------------------------- showing


def _json(value: Any) -> None:
    out.out(msgspec.json.format(msgspec.json.encode(_short(value)), indent=2).decode())


def _short(value: Any) -> Any:
    """The same with six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, (list, tuple)) else value


def _pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Two columns, the second one wrapped between words."""
    shown = [(left, str(x).lower() if x is None or isinstance(x, bool) else figure(x)) for left, x in pairs]
    width = max(len(left) for left, _ in shown) + 2
    for left, right in shown:
        lines = textwrap.wrap(right, out.width - width, break_long_words=False, break_on_hyphens=False)
        out.out(left.ljust(width) + ("\n" + " " * width).join(lines))


def _comparison(jobs: Sequence[Job]) -> None:
    table = Table("run", box=None, pad_edge=False, padding=(0, 2))
    for head in ("accuracy", "up per client\nand round", "up in all", "seconds"):
        table.add_column(head, justify="right")
    for job in jobs:
        s = job.summary()
        each, total = decimal(round(s["bytes_up_per_client_round"])), decimal(s["bytes_up"])
        table.add_row(job.path.name, figure(s["accuracy"]), each, total, f"{s['seconds']:.3g}")
    out.print(table)


# ---------------------------------------------------------------------------------------------------- commands


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: Version = False) -> None:
    """Federated learning in which no raw gradient leaves a client.

    Start with: fedveil run digits/fedavg
    """
    if version:
        out.out(fedveil.__version__)
    elif context.invoked_subcommand is None:
        out.out(context.get_help())


@app.command()
def run(
    source: Annotated[str, _argument("RECIPE")],
    changes: Sets = None,
    folder: Out = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    device: Device = "auto",
    stack: Stack = None,
    workers: Workers = None,
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
    if _holds_run(path):
        raise ValueError(f"{path} already holds a run; 'fedveil resume {path}' continues it, or choose another --out")
    job = Job.new(path, plan, _where(data_dir, device, stack, workers, debug, insecure_test_noise))
    _finish(job, fetch, format)


@app.command()
def resume(
    path: Annotated[Path, _argument("DIR")],
    rounds: Annotated[int | None, _option("--rounds", "N", "Go on to N rounds in all.")] = None,
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
        _tell(job, format)
    else:
        _finish(job, False, format)


def _finish(job: Job, fetch: bool, format: Format) -> None:
    """Train, and tell what came of it."""
    hint = f"'fedveil resume {job.path}'"
    task = job.recipe.on(job.data(fetch, {}), job.where.device)
    with Interrupt(hint) as interrupt:
        job.train(task, interrupt)
    _tell(job, format)
    if not job.ended:
        say(f"stopped after round {len(job.ledger.rows)} of {job.recipe.rounds}; {hint} goes on")
        raise typer.Exit(INTERRUPTED)


def _tell(job: Job, format: Format) -> None:
    if format is Format.json:
        _json(job.summary())
    else:
        _pairs((key.replace("_", " "), value) for key, value in job.summary().items() if value is not None)


def _name(source: str) -> str:
    """What the folder of a recipe is called."""
    return Path(source).stem if source.endswith(".toml") else source.replace("/", "-")


def _fresh(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _holds_run(path: Path) -> bool:
    return (path / "ledger.jsonl").exists() or any(path.glob("checkpoint-*.fv"))


@app.command()
def compare(
    sources: Annotated[list[str] | None, _argument("[RECIPE]...")] = None,
    changes: Sets = None,
    folder: Out = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    device: Device = "auto",
    stack: Stack = None,
    workers: Workers = None,
    debug: Debug = False,
    insecure_test_noise: Noise = False,
    format: Shown = Format.table,
) -> None:
    """Run several recipes and write one report.

    Each run goes to a folder of its own in --out; one that is there already is continued, or used if it is finished.
    Without a RECIPE the methods that send raw updates are compared on digits.

    Example: fedveil compare digits/fedavg digits/scaffold --set rounds=10
    """
    home, chosen = folder or _fresh("compare"), sources or DEMO
    where = _where(data_dir, device, stack, workers, debug, insecure_test_noise)
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
        _json({"runs": [job.summary() for job in begun], "report": page and str(page)})
    else:
        _comparison(begun)
    if page is None:
        say(f"stopped; {interrupt.hint} goes on")
        raise typer.Exit(INTERRUPTED)
    say(f"the report is {page}")


def _job(path: Path, plan: Recipe, where: Where) -> Job:
    """The run of `plan` in `path`: the one that is there, or a new one."""
    if not _holds_run(path):
        return Job.new(path, plan, where)
    job = Job.held(path)
    if job.recipe != plan:
        raise ValueError(f"{path} holds a run of another recipe; choose another --out or delete that folder")
    return job


def _report(folders: Sequence[Path], path: Path) -> Path:
    from fedveil.report import write

    return write(folders, path)


@app.command()
def report(
    folders: Annotated[list[Path], _argument("DIR...")],
    file: Annotated[Path | None, _option("-o", "FILE", "By default report.html in the first DIR.")] = None,
) -> None:
    """Write one HTML page about the runs in some folders.

    Example: fedveil report runs/demo/digits-fedavg runs/demo/digits-scaffold
    """
    out.out(_report(folders, file or folders[0] / "report.html"))


@app.command("list")
def list_(what: Annotated[What, _argument("methods|models|data|recipes")], format: Shown = Format.table) -> None:
    """List methods, models, data sets or recipes.

    Example: fedveil list recipes
    """
    tables: dict[What, Callable[[], dict[str, str]]] = {
        What.methods: lambda: {name: method.about.summary for name, method in METHODS.items()},
        What.models: lambda: {name: _first_line(model) for name, model in models.MODELS.items()},
        What.data: lambda: {name: _first_line(getattr(load, "func", load)) for name, load in data.SETS.items()},
        What.recipes: lambda: {name: _setting(recipe.read(name)) for name in recipe.names()},
    }
    found = tables[what]()
    if format is Format.json:
        _json([{"name": name, "summary": summary} for name, summary in found.items()])
    else:
        _pairs(found.items())


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").partition("\n")[0]


def _setting(plan: Recipe) -> str:
    over = "" if plan.split.kind == "natural" else f" over {plan.split.clients} clients"
    return f"{plan.split.kind} split{over}, {plan.cohort.size} a round, {plan.rounds} rounds"


@app.command()
def describe(method: Annotated[str, _argument("METHOD")], format: Shown = Format.table) -> None:
    """Say what METHOD sends, who sees it, and which keys it has.

    Example: fedveil describe scaffold
    """
    if method not in METHODS:
        raise ValueError(f"there is no method '{method}'{recipe.nearest(method, METHODS)}")
    about, keys = METHODS[method].about, dict(_keys(METHODS[method](), "method"))
    if format is Format.json:
        claims = [{"kind": kind, "sentence": sentence} for kind, sentence in about.claims]
        _json({"name": method, **vars(about), "claims": claims, "keys": keys})
        return
    words = [(name.replace("_", " "), text) for name, text in vars(about).items() if name not in ("claims", "paper")]
    _pairs([("method", method), *words, *about.claims, ("paper", about.paper)])
    out.out("\nkeys for --set, with their defaults")
    _pairs((f"  {key}", value) for key, value in keys.items())


def _keys(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What a recipe can set below `path`, and the present values."""
    if hasattr(thing, "registry"):
        yield f"{path}.name", thing.name
    for part in dataclasses.fields(thing):
        value, key = getattr(thing, part.name), f"{path}.{part.name}"
        yield from _keys(value, key) if dataclasses.is_dataclass(value) else [(key, value)]


@app.command()
def inspect(file: Annotated[Path, _argument("FILE")], format: Shown = Format.table) -> None:
    """Show what a checkpoint or a message holds.

    Example: fedveil inspect runs/demo/digits-scaffold/checkpoint-00000020.fv
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    try:
        head, records = _opened(file.read_bytes())
    except Refused as error:
        raise ValueError(f"{file} cannot be shown: {error}") from None
    parts = [(part, type(record).__name__, _fields(record)) for part, record in records]
    if format is Format.json:
        _json(head | {"records": [{"part": part, "kind": kind, "fields": seen} for part, kind, seen in parts]})
        return
    _pairs(head.items())
    for part, kind, seen in parts:
        out.out(f"\n{part}: {kind}")
        _pairs((f"  {name}", _line(value)) for name, value in seen.items())


def _opened(raw: bytes) -> tuple[dict[str, Any], list[tuple[str, Record]]]:
    """What stands on the envelope, and the records inside, each with what it is. Raises `Refused`."""
    number, where = message.envelope(raw)
    if number not in KINDS:
        raise Refused("wrong kind", f"this program knows no record of kind {number}")
    head = {"kind": KINDS[number].__name__, "run": where.run.hex(), "round": where.round}
    if number != Checkpoint.kind:
        head |= {"client": "server" if where.client == SERVER else where.client, "question": where.serial}
        return head, [("record", message.unframe(raw, KINDS, len(raw))[0])]
    saved = read_checkpoint(raw)
    memories = [
        (f"memory of client {client}, round {round_}, question {serial}", record)
        for client, entries in saved.memory.items()
        for round_, serial, record in entries
    ]
    return head, [("state", saved.state), *memories]


def _fields(record: Record) -> dict[str, Any]:
    return {name: _seen(getattr(record, name)) for name in record.__struct_fields__}


def _seen(value: Any) -> Any:
    """A field in figures: a tensor by its dtype, shape and extent, long things by their length."""
    if isinstance(value, Tensor):
        x = value.double()
        extent = {"min": x.min(), "max": x.max(), "mean": x.mean(), "norm": torch.linalg.vector_norm(x)}
        told = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return told | {name: float(x) for name, x in extent.items()}
    if isinstance(value, (bytes, list)):
        return f"{len(value)} {'bytes' if isinstance(value, bytes) else 'entries'}"
    return value


def _line(value: Any) -> str:
    if not isinstance(value, dict):
        return repr(value)
    extent = "  ".join(f"{name} {value[name]:.3g}" for name in ("min", "max", "mean", "norm"))
    return f"{value['dtype']} {value['shape']}  {extent}"
