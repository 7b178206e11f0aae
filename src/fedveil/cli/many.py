"""Several runs as one queue: recipes by values of a grid by seeds, one after the other or in processes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fedveil.cli.interrupt import INTERRUPTED, Interrupt
from fedveil.cli.jobs import Job, holds_run
from fedveil.cli.shell import say
from fedveil.core.ledger import headline
from fedveil.core.setup import settled_like
from fedveil.runs import recipe
from fedveil.runs.folder import RunFolder
from fedveil.runs.origin import Where
from fedveil.runs.own import references
from fedveil.runs.plugins import module_of
from fedveil.runs.recipe import Recipe
from fedveil.runs.repeats import folder_name, parse_grid, parse_held, parse_seeds, source_name, with_seed
from fedveil.runs.statistics import Repeats

if TYPE_CHECKING:
    from fedveil.data import Data

PAUSE = 0.05  # seconds between looks at the processes


@dataclass
class Variant:
    """A recipe with some changes, and its runs by seed."""

    name: str
    jobs: dict[int, Job]
    repeated: bool  # whether seeds were asked for

    @property
    def repeats(self) -> Repeats:
        """The runs that have begun."""
        return Repeats(self.name, {seed: job.ledger for seed, job in self.jobs.items() if job.ledger.rows})


@dataclass(frozen=True)
class Layout:
    """Which runs there are, and where.

    A run is in home/RECIPE/CHANGES/seed-N: RECIPE if `several`, CHANGES with a grid, seed-N with seeds.
    """

    home: Path
    sources: Sequence[str]
    changes: Sequence[str]
    grids: Sequence[str]
    seeds: str | None
    hold: str | None
    several: bool = False

    def variants(self, where: Where) -> list[Variant]:
        """The runs that are there already, and new ones for the rest."""
        held = parse_held(self.hold, where.insecure_test_noise)
        if held and self.seeds is None:
            raise ValueError(f"--hold is {self.hold}, but there is one seed only; add --seeds")
        seeds = None if self.seeds is None else parse_seeds(self.seeds)
        if "noise" in held and seeds:
            where = msgspec.structs.replace(where, noise_seed=seeds[0])
        found: dict[Path, Variant] = {}
        for source in self.sources:
            for changes in parse_grid(self.grids):
                plan = recipe.read(source, [*self.changes, *changes])
                parts = [source_name(source)] * self.several + [folder_name(changes)] * bool(changes)
                path = self.home.joinpath(*parts)
                if path in found:
                    raise ValueError("two of the recipes have one name and would share a folder; name each once")
                plans = {seed: with_seed(plan, seed, held, seeds[0]) for seed in seeds or ()} if seeds else {}
                jobs = {seed: job_in(path / f"seed-{seed}", own, where) for seed, own in plans.items()}
                jobs = jobs or {plan.seed: job_in(path, plan, where)}
                found[path] = Variant("/".join(parts) or source_name(source), jobs, seeds is not None)
        variants = list(found.values())
        if self.grids and not any(v.jobs[seed].recipe.task.validation for v in variants for seed in v.jobs):
            say(
                "note: these are figures of the test records; to choose a value, hold out validation records with "
                "--set task.validation=0.1, or use fedveil tune"
            )
        return variants


def job_in(path: Path, plan: Recipe, where: Where) -> Job:
    """The run of `plan` in `path`: the one that is there, or a new one."""
    if not holds_run(path):
        return Job.new(path, plan, where)
    job = Job.held(path, plan)
    if job.recipe != dataclasses.replace(plan, method=settled_like(plan.method.over(plan.rounds), job.recipe.method)):
        raise ValueError(f"{path} holds a run of another recipe; choose another --out or delete that folder")
    return job


def train(jobs: Sequence[Job], fetch: bool, parallel: int, interrupt: Interrupt) -> None:
    """Train the jobs that are not finished; `parallel` of them beside each other."""
    loaded: dict[str, Data] = {}
    for job in jobs:
        if job.ended:
            say(f"{job.path} is finished already and used as it is")
        else:
            job.data(fetch, loaded)  # what is missing should show before anything is trained
    waiting = [job for job in jobs if not job.ended]
    if parallel > 1:
        _beside(waiting, parallel, interrupt)
        return
    for job in waiting:
        if not interrupt.asked:
            job.train(job.recipe.on(job.data(fetch, loaded), job.where.device), interrupt)


@dataclass
class _Child:
    """A process that does the rounds of one job that are left: `fedveil resume`."""

    job: Job
    process: subprocess.Popen[str]
    errors: Any  # a file


def _beside(jobs: Sequence[Job], parallel: int, interrupt: Interrupt) -> None:
    """Train jobs in processes. A run's folder is all that the processes share."""
    waiting, running, failed = list(jobs), list[_Child](), ""
    while running or (waiting and not interrupt.asked and not failed):
        while waiting and len(running) < parallel and not interrupt.asked and not failed:
            child = _start(waiting.pop(0), parallel)
            interrupt.children.append(child.process)
            running.append(child)
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            interrupt.children.remove(child.process)
            if (why := _end(child)) and not failed:
                failed = why
                interrupt.tell_children()  # they stop after their round
        time.sleep(PAUSE)
    if failed:
        raise click.ClickException(failed)


def _start(job: Job, parallel: int) -> _Child:
    threads = max(1, job.where.threads // parallel)
    with closing(RunFolder(job.path)) as folder:
        folder.describe(job.recipe.toml(), {**job.environment, "threads": threads})
    named = map(module_of, references(tomllib.loads(job.recipe.toml())))
    modules = dict.fromkeys([*(job.where.imports or ()), *named])
    command = [sys.executable, "-m", "fedveil", "resume", str(job.path), "--format", "json"]
    command += [word for module in modules for word in ("--import", module)]
    errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by _end
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True, start_new_session=True
    )
    return _Child(job, process, errors)


def _end(child: _Child) -> str:
    """Take over what a process did, and return why it failed, if it did."""
    job, code = child.job, child.process.returncode
    assert child.process.stdout
    with child.process.stdout as out, child.errors as errors:
        text = out.read()
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    if not text:  # it ended before it had a summary
        told = lines[-1].removeprefix("fedveil: ") if lines else f"exit code {code}"
        return "" if code == INTERRUPTED else f"{job.path}: {told}"
    done = Job.held(job.path, job.recipe)
    job.recipe, job.ledger, job.environment = done.recipe, done.ledger, done.environment
    job.exhausted = msgspec.json.decode(text)["stopped"] == "budget"
    if job.ended:
        rounds = len(job.ledger.rows)
        say(f"{job.path}: {rounds} round{'s' if rounds > 1 else ''}, {headline(job.ledger.rows)}")
    return ""
