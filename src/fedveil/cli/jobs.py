"""A run in its folder: how it is begun, found again and finished."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
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
from fedveil.core.ledger import Ledger, Row, read_right
from fedveil.core.message import Refused
from fedveil.core.outcome import NOTHING, NoUsableAnswers, finished, validate_goals
from fedveil.core.setup import init_state, private_root
from fedveil.core.task import Task
from fedveil.data.files import data_directory
from fedveil.engines import cluster
from fedveil.engines.local import ClientFailure, LocalEngine
from fedveil.engines.ray import RayEngine
from fedveil.privacy.account import SPENT, Tally
from fedveil.runs import recipe
from fedveil.runs.checkpoint import RunError, Saved, first_rows, newest
from fedveil.runs.fingerprint import environment, validate_same
from fedveil.runs.folder import DEPLOYED, RunFolder, tallied
from fedveil.runs.messages import WARNING, Rounds
from fedveil.runs.origin import Where
from fedveil.runs.own import references
from fedveil.runs.plugins import MODULE, imported, is_reference, module_of
from fedveil.runs.progress import Watch
from fedveil.runs.recipe import Recipe

PICTURED = 5000  # clients of a split that is worth a picture


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
    wire: str | None,
    keep: str | None = None,
) -> Where:
    if engine == "local" and ray_address is not None:
        raise ValueError("--ray-address is for engines that run on Ray; add --engine ray or --engine flower")
    if engine == "ray":
        cluster.load("--engine ray", "ray")
    if engine == "flower":
        import fedveil.engines.flower  # noqa: F401 - says how to install what is missing, before anything is loaded

        if stack is not None or (workers is not None and ray_address is not None):
            raise ValueError(
                "a Flower node is one client and a Ray cluster has its own size; leave out --stack/--workers"
            )
    device = recipe.pick_device(device)
    if compile and engine != "local":
        raise ValueError("--compile is for the local engine; leave it out")
    if wire == "memory" and engine != "local":
        raise ValueError("--wire memory is for the local engine, whose clients are in this process; leave it out")
    if keep is not None:
        Rounds(keep)
        if engine != "local":
            raise ValueError(
                "--keep-messages needs the local engine, which has the records behind them; leave --engine out"
            )
        say(f"warning: {WARNING}")
    if noise:
        say("warning: the private randomness is fixed, so noise protects nobody in this run")
    directory = str(data_directory(folder).absolute())
    threads, modules = torch.get_num_threads(), list(imported) or None
    return Where(
        directory,
        device,
        stack,
        workers,
        threads,
        debug,
        noise,
        str(engine),
        ray_address,
        compile,
        modules,
        str(wire) if wire else None,
        keep,
    )


@dataclass
class Job:
    """A run in its folder: not begun, stopped or finished."""

    path: Path
    recipe: Recipe
    environment: Mapping[str, Any]
    ledger: Ledger = field(default_factory=Ledger)  # of the rounds that the newest checkpoint covers
    pictured: bool = True  # whether its split is worth a picture
    exhausted: bool = False  # whether the next round would exceed the budget of differential privacy

    @staticmethod
    def new(path: Path, plan: Recipe, where: Where) -> Job:
        command = shlex.join(["fedveil", *sys.argv[1:]])
        return Job(path, plan, environment(command=command, **msgspec.structs.asdict(where)))

    @staticmethod
    def held(path: Path, given: Recipe | None = None) -> Job:
        """The job that a folder holds. A folder that holds none is a ValueError.

        A folder does not decide what is imported: code that it names must come from --import, or from the recipe
        `given` on the command line.
        """
        for name in ("recipe.toml", "environment.json"):
            if not (path / name).is_file():
                raise ValueError(f"{path} holds no run that could be resumed: there is no {name} in it")
        try:
            known = msgspec.json.decode((path / "environment.json").read_bytes(), type=dict[str, Any])
            if known.get("engine") == DEPLOYED:
                told = f"{path} is the run of a deployment, whose records are elsewhere"
                raise ValueError(f"{told}; it goes on when its app is started again")
            if why := known.get("only_python"):
                raise ValueError(f"{path} was made by fv.run, and only fv.run can go on with it: {why}")
            _validate_allowed(path, msgspec.convert(known.get("imports") or [], list[str]), given)
            saved = newest(path)
            rows = first_rows(path, saved.round if saved else 0)
            msgspec.convert(known, Where)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path / 'environment.json'} is damaged: {error}") from None
        plan = recipe.read(str(path / "recipe.toml"))
        if saved:
            validate_same(path, saved.decided, {"recipe": plan.fingerprint()})
        return Job(path, plan, known, Ledger(rows, tally=_tallied(path, plan), right=read_right(path, rows)))

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
        clients = is_reference(task.data) and self.recipe.split.clients  # a function may be called for each of them
        key = repr((task.data, task.data_options, directory, self.recipe.split_seed.key if clients else 0, clients))
        if key not in loaded:
            loaded[key] = self.recipe.load(directory, fetch)
        return loaded[key]

    @property
    def fixed_noise(self) -> int | None:
        """The seed of the private randomness, in a test that fixes it."""
        if not self.where.insecure_test_noise:
            return None
        return self.recipe.seed if self.where.noise_seed is None else self.where.noise_seed

    def train(self, task: Task, stop: Callable[[], bool], observer: Callable[[Row], object] = lambda row: None) -> None:
        """Do the rounds that are left; `observer` sees the row of each."""
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
            if self.pictured:
                _picture(task, self.path / "split.svg")
            say(f"{plan.method.name}, {plan.rounds} round{'s' if plan.rounds > 1 else ''}, in {self.path}")
            warnings.filterwarnings("ignore", re.escape(WARNING))
            warnings.filterwarnings("ignore", NOTHING)  # a command says so at its end

            def seen(row: Row) -> None:
                watch(row)
                observer(row)

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
                    keep=where.keep,
                    observer=seen,
                    stop=stop,
                    insecure_test_noise=self.fixed_noise,
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

            noise = None if self.fixed_noise is None else private_root(self.fixed_noise)
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
        if where.engine == "ray":
            engine: LocalEngine = RayEngine(where.ray_address, where.workers, where.stack, logs=where.debug, tell=say)
        else:
            engine = LocalEngine(where.stack, where.workers, where.debug, where.compile, where.wire or "memory")
        stack, workers = engine.chosen(task)
        self.environment = {**self.environment, "stack": stack, "workers": workers}  # a resume elsewhere needs the same
        return closing(engine)


def _validate_allowed(path: Path, modules: list[str], given: Recipe | None) -> None:
    """Raise a ValueError if the run in `path` needs code that nobody has asked for on this command line."""
    if strange := [module for module in modules if not re.fullmatch(MODULE, module)]:  # nobody should type these
        raise ValueError(f"{path / 'environment.json'} is damaged: {strange[0]!r} is no name of a module")
    named = references(recipe.tables(str(path / "recipe.toml")))
    allowed = {*imported, *map(module_of, references(tomllib.loads(given.toml())) if given else ())}
    needed = [module for module in modules if module not in sys.modules]  # one that is there runs nothing again
    needed += [module for module in map(module_of, named) if module not in allowed]
    if needed:
        calls = "".join(f", {key} is '{each}'" for each, key in named.items() if module_of(each) in needed)
        options = " ".join(f"--import {module}" for module in dict.fromkeys(needed))
        raise ValueError(f"{path} needs code that is not fedveil's{calls}; if you trust it, add {options}")


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
