"""What most programs need: `run` trains a task with a method, in a folder or not; `plot` shows the result."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from fedveil.core.cohort import Engine
from fedveil.core.identity import Identities
from fedveil.core.ledger import Ledger, Result, Row
from fedveil.core.loop import Federation
from fedveil.core.message import moved
from fedveil.core.method import Method
from fedveil.core.outcome import (
    NoUsableAnswers,
    behind_clients,
    grouped,
    learned_nothing,
    nothing_learned,
    reached,
    unanswered,
)
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.setup import init_state, private_root, settle
from fedveil.core.task import Task
from fedveil.engines.local import LocalEngine
from fedveil.runs.fingerprint import decided, validate_same
from fedveil.runs.folder import RunFolder
from fedveil.runs.origin import Where, describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run(
    task: Task,
    method: Method,
    *,
    rounds: int = 20,
    cohort: CohortSampler | int = 10,
    seed: int = 0,
    engine: Engine | None = None,
    evaluate_every: int = 1,
    target: float | None = None,
    patience: int = 5,
    folder: RunFolder | Path | str | None = None,
    observer: Callable[[Row], object] | None = None,
    stop: Callable[[], bool] = lambda: False,
    insecure_test_noise: int | None = None,
    identities: Identities | None = None,
) -> Result:
    """Train `task` with `method` and return what came of it and what it cost.

    Where the method's noise is "auto", it is what `settle` finds for these rounds.

    cohort:   how many clients a round, or a `CohortSampler`
    target:   stop when test accuracy reaches it
    patience: stop when so many rounds in a row had no answer that could be used
    folder:   where ledger and checkpoints go; a folder that holds a checkpoint is continued from it. If a recipe built
              the task (`Recipe.build`), the command line can go on with the folder
    observer: called with each round's `Row` as it is written
    stop:     asked after each round; True ends the run there
    identities: whose signatures a secure sum accepts; by default those of simulated clients, which prove nothing
    """
    sampler = cohort if isinstance(cohort, CohortSampler) else CohortSampler(size=cohort)
    engine = LocalEngine() if engine is None else engine
    method = settle(task, method, sampler, rounds, seed)
    if target is not None and not task.scores:
        raise ValueError(
            f"target is {target:g}, but the model's outputs are not class scores, so there is no accuracy; leave it out"
        )
    home = RunFolder(folder) if isinstance(folder, (str, Path)) else folder
    with contextlib.ExitStack() as at_the_end:
        if home:
            at_the_end.callback(home.close)
        saved = home.load() if home else None
        secret = None if insecure_test_noise is None else private_root(insecure_test_noise)
        options: dict[str, Any] = {"run": saved.run} if saved else {}
        options |= {"secret": secret, "identities": identities}
        federation = Federation(task, method, engine, sampler, Seed.root(seed), evaluate_every, **options)
        at_the_end.callback(engine.close)
        state, done = init_state(task, method, sampler), 0
        if home:
            home.decided |= decided(task, method, sampler, seed, rounds, insecure_test_noise)
        if home and saved:
            validate_same(home.path, saved.decided, home.decided)
            state, done = moved(saved.state, task.device), saved.round
            federation.clients.memory.entries = saved.memory
        if home and home is not folder:  # whoever hands over an open folder has described it
            settings: dict[str, Any] = {"rounds": rounds, "seed": seed, "cohort": sampler, "method": method}
            settings |= {"evaluate_every": evaluate_every, "target": target}
            where, why = _where(task, engine, seed, insecure_test_noise, identities)
            describe(home, task, where, why, settings)
        ledger = home.ledger(done) if home else Ledger()
        if account := method.account(task, sampler):
            tally = account.tally(home.asking) if home else account.tally()
            tally.recall(home.asked(done) if home else [])
            federation.tally = ledger.tally = tally
            if home and account.everyone:  # who was drawn is what its ε counts on
                home.hide()
        failed = sum(1 for _ in takewhile(unanswered, reversed(ledger.rows))) % patience
        stopped = "target" if any(reached(row, target) for row in ledger.rows[-1:]) else ""
        for number in range(done + 1, rounds + 1):
            stopped = stopped or ("budget" if federation.exhausted(number) else "")
            if stopped:
                break
            state, row = federation.step(state, number, rounds)
            if saved and saved.damaged and number == done + 1:
                told = "; ".join(saved.damaged)
                row.events.append(f"{told} cannot be read: the run goes on from the checkpoint of round {done}")
            if behind := behind_clients(row):
                row.events.append(f"clients have seen round {number} before; the run goes on with the next one")
            ledger.append(row)
            if home:
                for name, pictures in federation.exhibits.items():
                    _exhibit(home, name, number, *pictures)
                home.save(federation.run, number, state, federation.clients.memory.entries)
            if observer:
                observer(row)
            failed = failed + 1 if unanswered(row) and not behind else 0
            if failed:
                why = grouped(row.missing.values())
                warnings.warn(f"no client answered in round {number}: {why}", RuntimeWarning, stacklevel=2)
            if failed >= patience:
                raise NoUsableAnswers.after(ledger)
            stopped = "target" if reached(row, target) else "interrupt" if stop() else ""
        if learned_nothing(ledger):
            warnings.warn(nothing_learned(ledger), RuntimeWarning, stacklevel=2)
        return Result(method.name, state.weights.cpu(), ledger, task, stopped or "rounds")


def _where(
    task: Task, engine: Engine, seed: int, noise: int | None, identities: Identities | None
) -> tuple[Where, str]:
    """The options with which the command line would go on, and why it cannot, if it cannot."""
    here = Where(
        "", str(task.device), None, None, torch.get_num_threads(), False, noise is not None, type(engine).__name__
    )
    if type(engine) is not LocalEngine:
        return here, f"its engine is {type(engine).__name__}"
    local = {"stack": engine.stack, "workers": engine.lanes(task), "debug": engine.debug, "compile": engine.compile}
    here = msgspec.structs.replace(here, engine="local", **local)
    if identities is not None or noise not in (None, seed):
        return here, "the command line has no identities and fixes test noise at the seed only"
    return here, ""


def plot(result: Result) -> Figure:
    """Test accuracy against rounds and against bytes sent by clients."""
    from fedveil.report.figures import curves  # matplotlib takes a second to import

    return curves({result.method: result.ledger})


def _exhibit(home: RunFolder, name: str, number: int, images: Tensor, real: Tensor) -> None:
    """Write a round's images [N, channels, height, width], and real ones beside them, for people to look at."""
    from fedveil.report.figures import strip

    home.exhibit(name, {f"{number:05d}": strip(images), "real": strip(real)})
