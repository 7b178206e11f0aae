"""What most programs need: `run` trains a task with a method, in a folder or not; `plot` shows the result."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from fedveil.core.batchnorm import SLOT
from fedveil.core.cohort import Engine
from fedveil.core.identity import Identities
from fedveil.core.ledger import Best, Ledger, Result, Right, Row
from fedveil.core.loop import Federation, trained_task
from fedveil.core.message import Slots
from fedveil.core.method import Method, State
from fedveil.core.metrics import ACCURACY, VALIDATION
from fedveil.core.moving import moved
from fedveil.core.outcome import (
    NoUsableAnswers,
    behind_clients,
    best_row,
    finished,
    grouped,
    learned_nothing,
    nothing_learned,
    unanswered,
    validate_goals,
)
from fedveil.core.sampling import CohortSampler
from fedveil.core.seeds import Seed
from fedveil.core.setup import init_state, private_root, settle
from fedveil.core.task import Task
from fedveil.engines.local import LocalEngine
from fedveil.engines.ray import RayEngine
from fedveil.runs.fingerprint import decided, validate_same
from fedveil.runs.folder import RunFolder
from fedveil.runs.messages import WARNING, MessageLog, Rounds
from fedveil.runs.origin import Where, describe
from fedveil.runs.store import Store

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
    early_stopping: int | None = None,
    patience: int = 5,
    folder: RunFolder | Path | str | None = None,
    keep: str | None = None,
    observer: Callable[[Row], object] | None = None,
    progress: bool = False,
    stop: Callable[[], bool] = lambda: False,
    insecure_test_noise: int | None = None,
    identities: Identities | None = None,
) -> Result:
    """Train `task` with `method` and return what came of it and what it cost.

    Where the method's noise is "auto", it is what `settle` finds for these rounds.

    cohort:   how many clients a round, or a `CohortSampler`
    target:   stop when the task's primary metric on the test records reaches it: at least, or at most if less is better
    early_stopping: stop when that metric on the validation records has not improved in so many evaluations
    patience: stop when so many rounds in a row had no answer that could be used
    folder:   where ledger and checkpoints go; a folder that holds a checkpoint is continued from it. If a recipe built
              the task (`Recipe.build`), the command line can go on with the folder
    keep:     rounds whose messages the folder keeps for an audit, such as "all" or "1-3,10". The folder then also holds
              which records each client used, and its exact update. The engine must be a `LocalEngine`
    observer: called with each round's `Row` as it is written
    progress: tell on stderr how far the run is: the round, the metric, the bytes and the time that is left
    stop:     asked after each round; True ends the run there
    identities: whose signatures a secure sum accepts; by default those of simulated clients, which prove nothing
    """
    sampler = cohort if isinstance(cohort, CohortSampler) else CohortSampler(size=cohort)
    engine = LocalEngine() if engine is None else engine
    method = settle(task, method, sampler, rounds, seed)
    validate_goals(task, target, early_stopping)
    log = _validate_kept(keep, engine, folder)
    home = RunFolder(folder) if isinstance(folder, (str, Path)) else folder
    with contextlib.ExitStack() as at_the_end:
        if home:
            at_the_end.callback(home.close)
        saved = home.load() if home else None
        secret = None if insecure_test_noise is None else private_root(insecure_test_noise)
        options: dict[str, Any] = {"run": saved.run} if saved else {}
        options |= {"secret": secret, "identities": identities}
        messages: MessageLog | None = None
        federation = Federation(task, method, engine, sampler, Seed.root(seed), evaluate_every, **options)
        at_the_end.callback(engine.close)
        state, done = init_state(task, method, sampler), 0
        if home:
            home.decided |= decided(task, method, sampler, seed, rounds, insecure_test_noise)
        if home and saved:
            validate_same(home.path, saved.decided, home.decided)
            state, done = moved(saved.state, task.device), saved.round
            home.memory = Store(home.path, saved.memory)
        if home:
            federation.clients.memory.entries = home.memory
        if home and log:
            federation.witness = messages = MessageLog(home.path, log)
            federation.clients.witnessed = True
            home.hide()
            warnings.warn(WARNING, UserWarning, stacklevel=2)
        if home and home is not folder:  # whoever hands over an open folder has described it
            settings: dict[str, Any] = {"rounds": rounds, "seed": seed, "cohort": sampler, "method": method}
            settings |= {"evaluate_every": evaluate_every, "target": target, "early_stopping": early_stopping}
            where, why = _where(task, engine, seed, insecure_test_noise, identities, keep)
            describe(home, task, where, why, settings)
        ledger = home.ledger(done) if home else Ledger()
        observers = [observer] if observer else []
        if progress:
            from fedveil.runs.progress import Watch  # rich takes a moment to import

            observers.append(at_the_end.enter_context(Watch(rounds, ledger)))
        if account := method.account(task, sampler):
            tally = account.tally(home.asking) if home else account.tally()
            tally.recall(home.asked(done) if home else [])
            federation.tally = ledger.tally = tally
            if home and account.everyone:  # who was drawn is what its ε counts on
                home.hide()
        failed = sum(1 for _ in takewhile(unanswered, reversed(ledger.rows))) % patience
        best = _Best(task, home, ledger)
        stopped = finished(ledger, rounds, target, early_stopping) or ""
        began = time.perf_counter()
        for number in range(done + 1, rounds + 1):
            stopped = stopped or ("budget" if federation.exhausted(number) else "")
            if stopped:
                break
            if messages:
                messages.begin(number, state)
            state, row = federation.step(state, number, rounds)
            if messages:
                messages.end(number, state)
            if saved and saved.damaged and number == done + 1:
                told = "; ".join(saved.damaged)
                row.events.append(f"{told} cannot be read: the run goes on from the checkpoint of round {done}")
            new_best = best.see(row, state)
            if finished(Ledger([*ledger.rows, row]), rounds, target, early_stopping) == "early":
                told = f"{VALIDATION}{task.primary.name} has not improved"
                row.events.append(
                    f"early stopping: {told} in {early_stopping} evaluation{'s' if early_stopping != 1 else ''}"
                )
            if behind := behind_clients(row):
                row.events.append(f"clients have seen round {number} before; the run goes on with the next one")
            if home:
                home.join()
                row.saving = home.saving
            now = time.perf_counter()
            row.seconds, began = now - began, now
            ledger.append(row)
            if home:
                for name, pictures in federation.exhibits.items():
                    _exhibit(home, name, number, *pictures)
                home.save(federation.run, number, state, new_best)
                if not getattr(engine, "simulated", True):  # clients that saw the next round would refuse this one
                    home.join()
            for each in observers:
                each(row)
            failed = failed + 1 if unanswered(row) and not behind else 0
            if failed:
                why = grouped(row.missing.values())
                warnings.warn(f"no client answered in round {number}: {why}", RuntimeWarning, stacklevel=2)
            if failed >= patience:
                raise NoUsableAnswers.after(ledger)
            ended = finished(ledger, rounds, target, early_stopping)
            stopped = ended if ended in ("target", "early") else "interrupt" if stop() else ""
        if home:
            home.join()
        trained = trained_task(task, state)
        ledger.right = _right(trained, state, ledger)
        if home and ledger.right:
            home.keep_right(ledger.right)
        if learned_nothing(ledger):
            warnings.warn(nothing_learned(ledger), RuntimeWarning, stacklevel=2)
        return Result(method.name, state.weights.cpu(), ledger, trained, stopped or "rounds", best.kept)


def _right(trained: Task, state: State, ledger: Ledger) -> Right | None:
    """Which test records the final weights classify correctly, if the last round was evaluated."""
    if not ledger.rows or ACCURACY.name not in ledger.rows[-1].metrics:
        return None
    right = trained.classified(state.weights)
    return None if right is None else Right.of(ledger.rows[-1].round, right)


def _validate_kept(keep: str | None, engine: Engine, folder: object) -> Rounds | None:
    """The rounds whose messages are kept, if these can be kept."""
    if keep is None:
        return None
    if folder is None:
        raise ValueError(f"keep is '{keep}', and messages are kept in a run folder; give folder, too")
    if not isinstance(engine, LocalEngine) or isinstance(engine, RayEngine):
        raise ValueError(
            f"keep is '{keep}', but with {type(engine).__name__} the records behind messages are in other processes; "
            "use LocalEngine"
        )
    return Rounds(keep)


class _Best:
    """The best weights so far by the validation records."""

    def __init__(self, task: Task, home: RunFolder | None, ledger: Ledger) -> None:
        self.task, self.primary, row = task, task.primary, best_row(ledger)
        self.name = VALIDATION + self.primary.name
        self.value = row.metrics[self.name] if row else None
        state = home.best(row.round) if home and row else None
        self.kept = self._best(row.round, row.metrics[self.name], state) if row and state else None

    def see(self, row: Row, state: State) -> State | None:
        """Keep the weights of a round if they are the best, and return what a folder keeps of them."""
        value = row.metrics.get(self.name)
        if value is None or (self.value is not None and not self.primary.better(value, self.value)):
            return None
        self.value, self.kept = value, self._best(row.round, value, state)
        norms = state.slots.get(SLOT)
        return State(state.weights, Slots({SLOT: norms} if norms else {}))

    def _best(self, round_: int, value: float, state: State) -> Best:
        return Best(round_, value, state.weights.cpu().clone(), trained_task(self.task, state))


def _where(
    task: Task, engine: Engine, seed: int, noise: int | None, identities: Identities | None, keep: str | None
) -> tuple[Where, str]:
    """The options with which the command line would go on, and why it cannot, if it cannot."""
    here = Where(
        "", str(task.device), None, None, torch.get_num_threads(), False, noise is not None, type(engine).__name__
    )
    if not isinstance(engine, LocalEngine) or type(engine) not in (LocalEngine, RayEngine):
        return here, f"its engine is {type(engine).__name__}"
    stack, workers = engine.chosen(task)
    ours: dict[str, Any] = {"engine": "local", "stack": stack, "workers": workers}
    ours |= {"debug": engine.debug, "compile": engine.compile, "wire": None if engine.wire == "memory" else "bytes"}
    if isinstance(engine, RayEngine):
        ours |= {"engine": "ray", "ray_address": engine.address}
    here = msgspec.structs.replace(here, keep=keep, **ours)
    if identities is not None or noise not in (None, seed):
        return here, "the command line has no identities and fixes test noise at the seed only"
    return here, ""


def plot(result: Result) -> Figure:
    """The primary metric on the test records against rounds and against bytes sent by clients."""
    from fedveil.report.figures import curves  # matplotlib takes a second to import

    return curves({result.method: result.ledger})


def _exhibit(home: RunFolder, name: str, number: int, images: Tensor, real: Tensor) -> None:
    """Write a round's images [N, channels, height, width], and real ones beside them, for people to look at."""
    from fedveil.report.figures import strip

    home.exhibit(name, {f"{number:05d}": strip(images), "real": strip(real)})
