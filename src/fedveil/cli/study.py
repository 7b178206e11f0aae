"""A search over settings in a folder: trials that only see validation records, kept by Optuna in `study.db`.

Each trial trains the recipe once per seed, with other validation records each time. Trials are comparable in pairs,
because all use the same seeds.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fedveil.cli.interrupt import Interrupt
from fedveil.cli.jobs import Job
from fedveil.cli.many import job_in, train
from fedveil.cli.shell import BUG, say
from fedveil.core.ledger import Ledger, Row
from fedveil.core.metrics import VALIDATION, Primary
from fedveil.core.seeds import Seed
from fedveil.runs import recipe
from fedveil.runs.origin import Where
from fedveil.runs.recipe import Recipe
from fedveil.runs.repeats import with_seed
from fedveil.runs.space import Budget, Space, changes_of, fits, set_by_hand
from fedveil.runs.statistics import spread

if TYPE_CHECKING:
    import optuna

    from fedveil.data import Data

NAME = "fedveil"
HELD_OUT = 0.1  # share of the training records that each seed holds out, where there are no validation records
RANDOM = 5  # trials before the sampler learns from them
WARM_UP = 0.25  # share of the rounds before a trial may be pruned


def load_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError("tuning needs Optuna; pip install 'fedveil[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass
class Study:
    """A search. `source` and `changes` are the recipe, `plan` is what they say."""

    home: Path
    source: str
    changes: Sequence[str]
    spaces: Sequence[Space]
    seeds: Sequence[int]
    primary: Primary  # what is compared, on validation records
    budget: Budget
    prune: str
    where: Where
    stop: Callable[[], bool]
    interrupt: Interrupt
    parallel: int = 1  # seeds of a trial that are trained beside each other, but for the first one, which may be pruned
    loaded: dict[str, Data] = field(default_factory=dict)
    why: str = ""  # of the last trial that failed

    def __post_init__(self) -> None:
        self.plan = recipe.read(self.source, self.changes)
        self.optuna = load_optuna()
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self.study: optuna.Study = self.optuna.create_study(
                storage=f"sqlite:///{(self.home / 'study.db').absolute()}",
                study_name=NAME,
                direction="maximize" if self.primary.maximise else "minimize",
                pruner=self._pruner(),
                load_if_exists=True,
            )
            known = self.study.user_attrs.get("settings")
        except Exception as error:  # whatever SQLAlchemy says of a file that is no study
            raise ValueError(f"{self.home / 'study.db'} cannot be read as a study ({type(error).__name__})") from error
        settings = self._settings()
        if known is None:
            if by_hand := set_by_hand(self.source, self.changes, self.spaces):
                self.study.enqueue_trial(by_hand, skip_if_exists=True)
            self.study.set_user_attr("settings", settings)  # last: a kill before it begins anew
        elif changed := [key for key, value in settings.items() if known.get(key) != value]:
            raise ValueError(f"{self.home} holds a search with another {changed[0]}; choose another --out")

    def _settings(self) -> dict[str, Any]:
        """What a search that is continued must share."""
        return {
            "recipe": self.plan.toml(),
            "--over": [f"{s.key}={s.kind}:{s.low!r}..{s.high!r} {','.join(s.values)}" for s in self.spaces],
            "--seeds": list(self.seeds),
            "--metric": self.primary.name,
            "--at": f"{self.budget.kind}={self.budget.most}",
            "--prune": self.prune,
        }

    def _pruner(self) -> Any:
        pruners, warm = self.optuna.pruners, max(1, math.ceil(WARM_UP * self.plan.rounds))
        if self.prune == "median":
            return pruners.MedianPruner(n_startup_trials=RANDOM, n_warmup_steps=warm)
        if self.prune == "halving":
            return pruners.SuccessiveHalvingPruner(min_resource=warm, reduction_factor=3)
        return pruners.NopPruner()

    @property
    def trials(self) -> list[Any]:
        """Trials that have begun, in order."""
        waiting = self.optuna.trial.TrialState.WAITING
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state != waiting]

    @property
    def completed(self) -> list[Any]:
        return [trial for trial in self.trials if trial.state == self.optuna.trial.TrialState.COMPLETE]

    @property
    def best(self) -> Any | None:
        """The completed trial with the best metric; of equal ones the first."""
        sign = -1 if self.primary.maximise else 1
        return min(self.completed, key=lambda trial: (sign * trial.value, trial.number), default=None)

    def search(self, trials: int) -> bool:
        """Go on to `trials` trials. Return whether all are done."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="optuna")
            while not self.stop():
                open_ = [trial for trial in self.trials if not trial.state.is_finished()]
                if not open_ and len(self.trials) >= trials:
                    return True
                number = open_[0].number if open_ else len(self.study.get_trials(deepcopy=False))
                # A sampler for each trial: a search that was stopped then draws as one that was not.
                word = Seed.root(self.plan.seed).child("tune", number).word % 2**32
                self.study.sampler = self.optuna.samplers.TPESampler(seed=word, n_startup_trials=RANDOM)
                # study.ask() makes a new trial; one that was stopped is taken up by its id.
                trial = self.optuna.trial.Trial(self.study, open_[0]._trial_id) if open_ else self.study.ask()
                self._do(trial)
        return False

    def _do(self, trial: Any) -> None:
        """Train one trial, and tell Optuna what came of it, unless it was stopped."""
        states = self.optuna.trial.TrialState
        values, began, value = self._values(trial), time.monotonic(), None
        try:
            value = self._objective(trial, values)
        except (ValueError, click.ClickException) as error:
            if BUG in getattr(error, "__notes__", ()):
                raise
            self.why = error.message if isinstance(error, click.ClickException) else str(error)
            trial.set_user_attr("why", self.why)
        trial.set_user_attr("seconds", trial.user_attrs.get("seconds", 0.0) + time.monotonic() - began)
        if "why" in trial.user_attrs:
            self.study.tell(trial, state=states.FAIL)
            say(f"trial {trial.number} failed: {self.why}")
        elif value is not None:
            self.study.tell(trial, value)
            say(f"trial {trial.number}: validation {self.primary.words} {self.primary.show(value)}, {_told(values)}")
        elif trial.user_attrs.get("pruned"):
            self.study.tell(trial, state=states.PRUNED)
            say(f"trial {trial.number} was pruned, {_told(values)}")

    def _values(self, trial: Any) -> dict[str, Any]:
        """What the sampler chooses. A key that does not exist beside the chosen lists is left out."""
        values: dict[str, Any] = {}
        for space in sorted(self.spaces, key=lambda each: each.kind != "list"):
            if fits(self.source, self.changes, values, space):
                values[space.key] = space.suggest(trial)
        return values

    def folder(self, number: int) -> Path:
        return self.home / "trials" / f"{number:04d}"

    def trial_plan(self, values: Mapping[str, Any], seed: int) -> Recipe:
        """The recipe of a trial: with validation records, and without a target, which is about the test records."""
        plan = recipe.read(self.source, [*self.changes, *changes_of(values)])
        share = plan.task.validation or (0.0 if self._has_validation(plan) else HELD_OUT)
        plan = dataclasses.replace(plan, target=None, task=dataclasses.replace(plan.task, validation=share))
        return with_seed(plan, seed, (), self.seeds[0])

    def _job(self, number: int, values: Mapping[str, Any], seed: int) -> Job:
        """The run of a trial with one of the seeds."""
        job = job_in(self.folder(number) / f"seed-{seed}", self.trial_plan(values, seed), self.where)
        job.pictured = False
        return job

    def _has_validation(self, plan: Recipe) -> bool:
        return Job.new(self.home, plan, self.where).data(False, self.loaded).validation_x is not None

    def _objective(self, trial: Any, values: Mapping[str, Any]) -> float | None:
        """The mean over seeds of the validation metric; None if the trial was pruned or stopped.

        The steps that Optuna compares: the rounds of the first seed, then for each further seed the mean so far.
        """
        name = VALIDATION + self.primary.name
        known = set(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        found: list[float] = []

        def report(value: float, step: int) -> bool:
            """Return whether the trial should end here."""
            if step in known:
                return False
            known.add(step)
            trial.report(value, step)
            if trial.should_prune():
                trial.set_user_attr("pruned", step)
            return "pruned" in trial.user_attrs

        for i, seed in enumerate(self.seeds):
            if "pruned" in trial.user_attrs or self.stop():
                return None
            if i == 1 and self.parallel > 1:
                rest = [self._job(trial.number, values, other) for other in self.seeds[1:]]
                train([job for job in rest if not job.ended], False, self.parallel, self.interrupt)
            job = self._job(trial.number, values, seed)
            seen, first = list(job.ledger.rows), i == 0

            def observe(row: Row, seen: list[Row] = seen, first: bool = first) -> None:
                seen.append(row)
                if first and name in row.metrics and not self.budget.spent(seen):
                    report(row.metrics[name], row.round)

            def ended(seen: list[Row] = seen) -> bool:
                return "pruned" in trial.user_attrs or self.budget.spent(seen) or self.stop()

            for row in seen if first else ():  # a kill may have come between the ledger and the study
                if name in row.metrics and not self.budget.spent(seen[: row.round]):
                    report(row.metrics[name], row.round)
            if not job.ended and not ended():
                job.train(job.recipe.on(job.data(False, self.loaded), job.where.device), ended, observe)
            if "pruned" in trial.user_attrs or not (job.ended or self.budget.spent(job.ledger.rows)):
                return None
            found.append(self._measured(job.ledger))
            if i + 1 < len(self.seeds) and report(spread(found).mean, self.plan.rounds + 1 + i):
                return None
        return spread(found).mean

    def _measured(self, ledger: Ledger) -> float:
        """The validation metric at the end of the budget."""
        rows, name = self.budget.rows(ledger.rows), VALIDATION + self.primary.name
        if values := [row.metrics[name] for row in rows if name in row.metrics]:
            return values[-1]
        if self.budget.kind:
            first = ledger.rows[0]
            used = {"bytes": f"{first.bytes_up:,} bytes", "epsilon": f"ε {first.epsilon or 0:.4g}", "rounds": "1 round"}
            told = f"the first round uses {used[self.budget.kind]}, and no measured round is within --at"
            raise ValueError(f"{told} {self.budget.kind}={self.budget.most:g}; raise it")
        raise ValueError(f"no {name} was measured; the run may have diverged")


def _told(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )
