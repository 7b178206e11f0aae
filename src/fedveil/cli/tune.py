"""`fedveil tune`: search settings by validation records, and test the best ones once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.cli import show
from fedveil.cli.commands import fresh
from fedveil.cli.interrupt import INTERRUPTED, Interrupt
from fedveil.cli.options import DataDir, Device, Fetch, Format, Out, Prune, Sets, Shown, argument, count, option
from fedveil.cli.shell import say

if TYPE_CHECKING:
    from fedveil.cli.study import Study
    from fedveil.core.metrics import Primary
    from fedveil.core.task import Task
    from fedveil.data import Data
    from fedveil.runs.recipe import Recipe
    from fedveil.runs.space import Budget

PRIVATE = (
    "note: tuning is not free: every trial is trained on the same records, and validation records decide without "
    "noise; ε of one run covers neither"
)


def tune(
    source: Annotated[str, argument("RECIPE")],
    over: Annotated[list[str] | None, option("--over", "KEY=VALUES", "log:0.01..1, int:1..9, or a,b; repeat.")] = None,
    trials: Annotated[int, option("--trials", "N", "Number of trials; default: 20.", parser=count)] = 20,
    seconds: Annotated[float | None, option("--budget-seconds", "S", "Stop after this time.")] = None,
    seeds: Annotated[str, option("--seeds", "SEEDS", "Seeds that a trial averages over; default: 3.")] = "3",
    test_seeds: Annotated[str | None, option("--test-seeds", "SEEDS", "Seeds of the test; default: --seeds.")] = None,
    at: Annotated[str | None, option("--at", "BUDGET", "Compare at bytes=1MB or at epsilon=8.")] = None,
    metric: Annotated[str | None, option("--metric", "NAME", "Metric to improve; default: the primary one.")] = None,
    prune: Annotated[Prune, option("--prune", "median|halving|none", "End weak trials early.")] = Prune.median,
    jobs: Annotated[int, option("--jobs", "N", "Seeds of a trial in parallel; default: 1.", parser=count)] = 1,
    count_epsilon: Annotated[bool, option("--count-epsilon", None, "Add up ε of all trials.")] = False,
    changes: Sets = None,
    folder: Out = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    device: Device = "auto",
    format: Shown = Format.table,
) -> None:
    """Search settings of RECIPE by validation records.

    The first trial has the values of RECIPE. The best recipe goes to best.toml in --out, and is then trained and
    tested once; report.html shows it all. Ctrl-C stops after the current round; the same command continues.

    Example: fedveil tune digits/fedavg --over method.local.lr=log:0.01..1
    """
    from fedveil.cli.jobs import Job, choose
    from fedveil.cli.study import Study
    from fedveil.runs import recipe
    from fedveil.runs.repeats import parse_seeds, source_name
    from fedveil.runs.space import Budget, parse_budget, parse_over, validate_spaces

    if not over:
        raise ValueError("tune has nothing to search; add --over, for example --over method.local.lr=log:0.01..1")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"--budget-seconds is {seconds:g}; use a number above 0")
    spaces, chosen = [parse_over(text) for text in over], parse_seeds(seeds)
    tested_with = parse_seeds(test_seeds, "--test-seeds") if test_seeds else chosen
    plan = recipe.read(source, changes or ())
    validate_spaces(source, changes or (), spaces)
    budget = parse_budget(at) if at else Budget()
    _validate_private(plan, budget, count_epsilon)
    home = folder or fresh(f"tune-{source_name(source)}")
    where = choose(data_dir, device, None, None, "local", None, False, False, False, None)
    job = Job.new(home, plan, where)
    loaded: dict[str, Data] = {}
    primary = _chosen(plan.on(job.data(fetch, loaded), "cpu"), metric)
    with Interrupt(f"the same command with --out {home}") as interrupt:
        clock = _Clock(seconds, interrupt)
        study = Study(
            home, source, changes or (), spaces, chosen, primary, budget, prune, where, clock, interrupt, jobs, loaded
        )
        clock.before = sum(trial.user_attrs.get("seconds", 0.0) for trial in study.trials)
        done = study.search(trials)
        if interrupt.asked:
            _stopped(study, interrupt.hint)
        if not done and study.best is not None:
            say(f"--budget-seconds {seconds:g} is spent; a larger one goes on with the same search")
        _validate_found(study, seconds)
        tested = _test(study, tested_with)
        if interrupt.asked:
            _stopped(study, interrupt.hint)
    _tell(study, tested, count_epsilon, format)


class _Clock:
    """Asked after each round: whether to stop, by Ctrl-C or because the time is spent."""

    def __init__(self, seconds: float | None, asked: Callable[[], bool]) -> None:
        self.seconds, self.asked, self.before, self.began = seconds, asked, 0.0, time.monotonic()

    def __call__(self) -> bool:
        spent = self.before + time.monotonic() - self.began
        return self.asked() or (self.seconds is not None and spent >= self.seconds)


def _validate_private(plan: Recipe, budget: Budget, count_epsilon: bool) -> None:
    private = plan.method.promise is not None
    if private:
        say(PRIVATE)
    elif budget.kind == "epsilon" or count_epsilon:
        option_ = "--count-epsilon" if count_epsilon else f"--at epsilon={budget.most:g}"
        told = f"{option_} is for differential privacy, and {plan.method.name} with these settings has none"
        raise ValueError(f"{told}; set method.privacy or method.user_privacy, or leave it out")


def _chosen(task: Task, metric: str | None) -> Primary:
    """The metric that is improved: the task's primary one, or one of its others."""
    from fedveil.core.metrics import LOSS

    known = {each.name: each.primary for each in task.metrics} | {LOSS.name: LOSS}
    if metric is None:
        return task.primary
    if metric not in known:
        raise ValueError(f"--metric is '{metric}', but the task measures {', '.join(known)}; set task.metrics")
    return known[metric]


def _stopped(study: Study, hint: str) -> None:
    say(f"stopped after {len(study.completed)} complete trials; {hint} goes on")
    raise typer.Exit(INTERRUPTED)


def _validate_found(study: Study, seconds: float | None) -> None:
    """Raise a ValueError if no trial was completed."""
    if study.best is not None:
        return
    unfinished = [trial for trial in study.trials if not trial.state.is_finished()]
    if unfinished or not study.trials:
        raise ValueError(f"--budget-seconds {seconds:g} was spent before a trial was complete; raise it to go on")
    raise ValueError(f"no trial was completed; the last one failed: {study.why or _last_why(study)}")


def _last_why(study: Study) -> str:
    return str(next((t.user_attrs["why"] for t in reversed(study.trials) if "why" in t.user_attrs), "unknown"))


def _test(study: Study, seeds: Sequence[int]) -> Any:
    """Write the best recipe, train it on all training records, and measure it on the test records."""
    from fedveil.cli.many import Variant, job_in, train
    from fedveil.runs import recipe
    from fedveil.runs.repeats import with_seed
    from fedveil.runs.space import changes_of

    best = study.best
    assert best
    plan = recipe.read(study.source, [*study.changes, *changes_of(best.params)])
    (study.home / "best.toml").write_text(plan.toml(), encoding="utf-8")
    path = study.home / f"best-{best.number:04d}"  # a later trial may be better
    jobs = {seed: job_in(path / f"seed-{seed}", with_seed(plan, seed, (), seeds[0]), study.where) for seed in seeds}
    train(list(jobs.values()), False, study.parallel, study.interrupt)
    return Variant("best", jobs, True).repeats


def _pictures(study: Study) -> list[str]:
    """Write parallel coordinates and importances to DIR/figures, as far as there are enough trials."""
    from fedveil.report import svg
    from fedveil.report.tuning import importance, parallel

    done, figures = study.completed, {}
    if len(done) > 1:
        logarithmic = [space.key for space in study.spaces if space.log]
        figures["parallel"] = parallel([(trial.params, trial.value) for trial in done], logarithmic, study.primary)
    if len({trial.value for trial in done}) > 3:
        evaluator = study.optuna.importance.FanovaImportanceEvaluator(seed=0)
        figures["importance"] = importance(
            study.optuna.importance.get_param_importances(study.study, evaluator=evaluator)
        )
    folder = study.home / "figures"
    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        (folder / f"{name}.svg").write_text(svg(figure), encoding="utf-8")
    return [str(folder / f"{name}.svg") for name in figures]


def _spent(study: Study) -> dict[str, float] | None:
    """ε and δ of all runs of the search and of the test together, by basic composition: both add up.

    It holds for trials that are chosen by the results of others (Dwork and Roth 2014, theorem 3.16 and section 3.5).
    Papernot and Steinke (2022), https://arxiv.org/abs/2110.03620, is tighter if the number of trials is random and only
    the best is told.
    """
    from fedveil.core.ledger import Ledger
    from fedveil.runs import recipe

    epsilon = delta = 0.0
    for path in sorted(study.home.glob("*/*/ledger.jsonl")) + sorted(study.home.glob("trials/*/*/ledger.jsonl")):
        charged = [row.epsilon for row in Ledger.read(path).rows if row.epsilon is not None]
        promise = recipe.read(str(path.parent / "recipe.toml")).method.promise
        if charged and promise:
            epsilon, delta = epsilon + charged[-1], delta + promise.delta
    return {"epsilon": epsilon, "delta": delta}


def _tell(study: Study, tested: Any, count_epsilon: bool, format: Format) -> None:
    from fedveil.core.metrics import VALIDATION
    from fedveil.report import write

    best, pictures = study.best, _pictures(study)
    assert best
    page = write([study.home], study.home / "report.html")
    primary, spent = study.primary, _spent(study) if count_epsilon else None
    rows = [_row(trial) for trial in study.trials]
    final = {seed: ledger.series(primary.name)[1] for seed, ledger in tested.ledgers.items()}
    values = {seed: series[-1] for seed, series in final.items() if series}
    if format is Format.json:
        from fedveil.runs.statistics import spread

        test = spread(list(values.values())) if values else None
        told = {"metric": primary.name, "seeds": values, "mean": test and test.mean}
        figures = {
            "metric": VALIDATION + primary.name,
            "best": _row(best),
            "recipe": str(study.home / "best.toml"),
            "test": told | {"deviation": test and test.deviation},
            "trials": rows,
            "tuning": spent,
            "figures": pictures,
            "report": str(page),
            "out": str(study.home),
        }
        show.as_json(figures)
        return
    _table(study, rows)
    _finish(study, values, spent)
    say(f"the report is {page}")


def _row(trial: Any) -> dict[str, Any]:
    state, why = trial.state.name.lower(), trial.user_attrs.get("why")
    return {"trial": trial.number, "state": state, "value": trial.value, "changes": dict(trial.params), "why": why}


def _table(study: Study, rows: Sequence[dict[str, Any]]) -> None:
    """The trials, the best one first."""
    primary, keys = study.primary, [space.key for space in study.spaces]
    sign = -1 if primary.maximise else 1

    def place(row: dict[str, Any]) -> tuple[bool, float]:
        done = row["state"] == "complete"
        return not done, sign * row["value"] if done else row["trial"]

    cells = [["trial", *(key.rpartition("method.")[2] for key in keys), f"validation\n{primary.words}"]]
    for row in sorted(rows, key=place):
        values = [row["changes"].get(key, "–") for key in keys]
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        cells.append(
            [str(row["trial"]), *shown, primary.show(row["value"]) if place(row)[0] is False else row["state"]]
        )
    show.columns(cells)


def _finish(study: Study, values: dict[int, float], spent: dict[str, float] | None) -> None:
    from fedveil.cli.shell import out
    from fedveil.runs.statistics import spread

    best, primary = study.best, study.primary
    assert best
    seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
    out.out(f"\nbest: trial {best.number}, in {study.home / 'best.toml'}")
    if values:
        tested = spread(list(values.values())).show(primary)
        out.out(f"test {primary.words}, measured once with {seeds}: {tested}")
    by_hand = next((trial for trial in study.completed if trial.number == 0), None)
    if by_hand and best.number:
        gain = f"{primary.show(by_hand.value)} for the recipe's own values, {primary.show(best.value)} for the best"
        out.out(f"validation {primary.words}: {gain}")
    if spent:
        out.out(
            f"ε of all trials and the test together: {spent['epsilon']:.4g} at δ {spent['delta']:.3g} (they add up)"
        )
