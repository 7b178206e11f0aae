"""A run in its folder: how it is begun, found again and finished."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

import fedveil
from fedveil import data
from fedveil.cli.shell import BUG, err, say
from fedveil.core.cohort import Engine
from fedveil.core.ledger import Ledger
from fedveil.core.message import Refused
from fedveil.core.outcome import NOTHING, NoUsableAnswers, finished, validate_goals
from fedveil.core.setup import init_state, private_root
from fedveil.core.task import Task
from fedveil.data.files import data_directory
from fedveil.engines.local import ClientFailure, LocalEngine
from fedveil.privacy.account import SPENT, Tally
from fedveil.runs import recipe
from fedveil.runs.checkpoint import RunError, Saved, first_rows, newest
from fedveil.runs.fingerprint import environment, validate_same
from fedveil.runs.folder import DEPLOYED, RunFolder, tallied
from fedveil.runs.plugins import import_modules, imported
from fedveil.runs.progress import Watch
from fedveil.runs.recipe import Recipe

PICTURED = 5000  # clients of a split that is worth a picture


class Where(msgspec.Struct, frozen=True):
    """What a run depends on besides its recipe, as far as the user decides it; `resume` reads it again."""

    data_dir: str
    device: str
    stack: int | None
    workers: int | None
    threads: int
    debug: bool
    insecure_test_noise: bool
    engine: str = "local"
    ray_address: str | None = None
    compile: bool = False
    imports: list[str] | None = None  # modules of --import


def choose(
    folder: Path | None,
    device: str,
    stack: int | None,
    workers: int | None,
    engine: str,
    ray_address: str | None,
    debug: bool,
    noise: bool,
    compile: bool,
) -> Where:
    if engine == "local" and ray_address is not None:
        raise ValueError("--ray-address is where Flower's simulation runs; add --engine flower")
    if engine == "flower":
        import fedveil.engines.flower  # noqa: F401 - says how to install what is missing, before anything is loaded

        if stack is not None or (workers is not None and ray_address is not None):
            raise ValueError(
                "a Flower node is one client and a Ray cluster has its own size; leave out --stack/--workers"
            )
    device = recipe.pick_device(device)
    if compile and (engine != "local" or device != "cuda"):
        raise ValueError("--compile makes kernels for a GPU and the local engine; leave it out")
    if noise:
        say("warning: the private randomness is fixed, so noise protects nobody in this run")
    directory = str(data_directory(folder).absolute())
    threads, modules = torch.get_num_threads(), list(imported) or None
    return Where(directory, device, stack, workers, threads, debug, noise, str(engine), ray_address, compile, modules)


@dataclass
class Job:
    """A run in its folder: not begun, stopped or finished."""

    path: Path
    recipe: Recipe
    environment: Mapping[str, Any]
    ledger: Ledger = field(default_factory=Ledger)  # of the rounds that the newest checkpoint covers
    exhausted: bool = False  # whether the next round would exceed the budget of differential privacy

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
            if known.get("engine") == DEPLOYED:
                told = f"{path} is the run of a deployment, whose records are elsewhere"
                raise ValueError(f"{told}; it goes on when its app is started again")
            modules = msgspec.convert(known.get("imports") or [], list[str])
            import_modules(modules)  # before anything of theirs is read
            saved = newest(path)
            rows = first_rows(path, saved.round if saved else 0)
            msgspec.convert(known, Where)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path / 'environment.json'} is damaged: {error}") from None
        plan = recipe.read(str(path / "recipe.toml"))
        if saved:
            validate_same(path, saved.decided, {"recipe": plan.fingerprint()})
        return Job(path, plan, known, Ledger(rows, tally=_tallied(path, plan)))

    @property
    def where(self) -> Where:
        return msgspec.convert(self.environment, Where)

    @property
    def ended(self) -> str | None:
        """Why no round is left to do; None if some are."""
        plan = self.recipe
        return finished(self.ledger, plan.rounds, plan.target, plan.early_stopping) or (
            "budget" if self.exhausted else None
        )

    def summary(self) -> dict[str, Any]:
        figures = self.ledger.summary(self.recipe.method.name)
        return figures | {"out": str(self.path), "stopped": self.ended or "interrupt"}

    def checkpoint(self) -> Saved:
        """The newest checkpoint; a run that has none yet is a ValueError."""
        saved = newest(self.path)
        if saved is None:
            raise ValueError(f"{self.path} has no checkpoint yet; run at least one round")
        return saved

    def data(self, fetch: bool, loaded: dict[str, data.Data]) -> data.Data:
        """The job's data set, read once for all jobs that share `loaded`."""
        task, directory = self.recipe.task, self.where.data_dir
        key = repr((task.data, task.data_options, directory))
        if key not in loaded:
            loaded[key] = data.load(task.data, directory, fetch, **task.data_options)
        return loaded[key]

    def train(self, task: Task, stop: Callable[[], bool]) -> None:
        """Do the rounds that are left."""
        plan = self.recipe = self.recipe.settled(task)
        where = self.where
        init_state(task, plan.method, plan.cohort)  # says what does not suit the task, before anything is written
        validate_goals(task, plan.target, plan.early_stopping)
        torch.set_num_threads(where.threads)
        with (
            warnings.catch_warnings(),
            closing(RunFolder(self.path)) as folder,
            self._engine(task) as engine,
            Watch(self.recipe.rounds, self.ledger, err) as watch,
        ):
            folder.describe(plan.toml(), dict(self.environment))
            folder.decided["recipe"] = plan.fingerprint()
            _picture(task, self.path / "split.svg")
            say(f"{plan.method.name}, {plan.rounds} round{'s' if plan.rounds > 1 else ''}, in {self.path}")
            warnings.filterwarnings("ignore", NOTHING)  # a command says so at its end
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
                    early_stopping=plan.early_stopping,
                    folder=folder,
                    observer=watch,
                    stop=stop,
                    insecure_test_noise=plan.seed if where.insecure_test_noise else None,
                )
            except Exception as error:
                if isinstance(error, (ClientFailure, Refused, NoUsableAnswers)):
                    raise click.ClickException(f"the run ended early: {error}") from None
                if not isinstance(error, RunError):
                    error.add_note(BUG)
                raise
        self.ledger, self.exhausted = result.ledger, result.stopped == "budget"
        if result.stopped == "early":
            say(f"stopped after round {len(self.ledger.rows)} of {plan.rounds}: {self.ledger.rows[-1].events[-1]}")
        if self.exhausted:
            done = len(self.ledger.rows)
            say(f"stopped after round {done} of {plan.rounds}: {SPENT}")

    def _engine(self, task: Task) -> AbstractContextManager[Engine]:
        """Where this run's clients live."""
        where = self.where
        if where.engine == "flower":
            from fedveil.engines.flower import FromRecipe, client_app, simulate

            noise = private_root(self.recipe.seed) if where.insecure_test_noise else None
            modules = tuple(where.imports or ())
            app = client_app(FromRecipe(self.recipe.toml(), where.data_dir, where.device, noise, modules))
            return simulate(
                app,
                len(task.clients),
                workers=where.workers,
                ray_address=where.ray_address,
                debug=where.debug,
                tell=say,
            )
        engine = LocalEngine(where.stack, where.workers, where.debug, where.compile)
        self.environment = {**self.environment, "workers": engine.lanes(task)}  # a resume elsewhere needs as many
        return nullcontext(engine)


def _picture(task: Task, path: Path) -> None:
    if len(task.clients) <= PICTURED and not path.exists():
        from fedveil.data.pictures import picture
        from fedveil.report.figures import svg

        path.write_text(svg(picture(task.clients, task.data.y, task.data.labels)), encoding="utf-8")


def _tallied(path: Path, plan: Recipe) -> Tally | None:
    promise = plan.method.promise
    return tallied(path, promise.delta) if promise else None


def holds_run(path: Path) -> bool:
    return (path / "ledger.jsonl").exists() or any(path.glob("checkpoint-*.fv"))
