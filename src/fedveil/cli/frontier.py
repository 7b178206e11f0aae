"""`fedveil frontier`: which of several runs are not dominated, what a target costs, and what a budget buys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedveil.cli import show
from fedveil.cli.options import Format, Shown, argument, option
from fedveil.cli.shell import out, say

if TYPE_CHECKING:
    from fedveil.report.frontier import Point
    from fedveil.runs.space import Budget

At = Annotated[list[str] | None, option("--at", "BUDGET", "bytes=1MB, epsilon=8 or rounds=10; may be repeated.")]


def frontier(
    folders: Annotated[list[Path], argument("DIR...")],
    metric: Annotated[str | None, option("--metric", "NAME", "Metric; default: the primary one.")] = None,
    target: Annotated[float | None, option("--target", "X", "Level of the metric; default: near the best.")] = None,
    at: At = None,
    file: Annotated[Path | None, option("-o", "FILE", "Picture; default: frontier.svg in the first DIR.")] = None,
    format: Shown = Format.table,
) -> None:
    """Show which runs no other run beats in everything.

    Compares the metric, bytes up and down, ε, client passes, client memory and rounds, by the ledgers of runs. A DIR
    without a run stands for all runs below it.

    Example: fedveil frontier runs/demo
    """
    from fedveil.report import svg
    from fedveil.report.folder import read
    from fedveil.report.frontier import frontier as undominated
    from fedveil.report.frontier import picture, points
    from fedveil.report.groups import expand, grouped
    from fedveil.report.words import near
    from fedveil.runs.space import parse_budget

    runs = read(expand(folders))
    found = points(grouped(runs), metric)
    if not found:
        raise ValueError(f"no run has measured {runs[0].primary.words} yet; train them first")
    if any(run.setting != runs[0].setting for run in runs):
        say("warning: the runs differ in task or split, so compare them with care")
    primary = found[0].primary
    level = near(primary, found[0].value.mean)[0] if target is None else target
    budgets = [parse_budget(text) for text in at or ()] or _budgets(found)
    best = undominated(found)
    path = file or folders[0] / "frontier.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(picture(found)), encoding="utf-8")
    if format is Format.json:
        show.as_json(_json(found, best, level, budgets) | {"picture": str(path)})
        return
    _ends(found, best)
    _to_target(found, level)
    _within(found, budgets)
    out.out(f"\nThe picture is {path}.")


def _budgets(found: Sequence[Point]) -> list[Budget]:
    """Powers of ten of bytes between what the cheapest and the dearest run send."""
    from fedveil.runs.space import Budget

    sent = [point.costs["bytes_up"] for point in found if point.costs["bytes_up"] > 0]
    if not sent:
        return []
    powers = range(math.ceil(math.log10(min(sent))), math.floor(math.log10(max(sent))) + 1)
    return [Budget("bytes", most) for most in [10.0**power for power in powers][-3:] or [max(sent)]]


def _ends(found: Sequence[Point], best: Sequence[Point]) -> None:
    from fedveil.report.frontier import COSTS, WORDS, shown

    primary = found[0].primary
    costs = [cost for cost in COSTS if any(not math.isinf(point.costs[cost]) for point in found)]
    rows = [["recipe", "", primary.words, *(WORDS[cost] for cost in costs)]]
    for point in found:
        cells = [shown(cost, point.costs[cost]) for cost in costs]
        rows.append([point.name, "*" if point in best else "", point.value.show(primary), *cells])
    show.columns(rows)
    out.out("* no other recipe is at least as good in all columns and better in one; means over seeds, ε the largest")


def _to_target(found: Sequence[Point], level: float) -> None:
    from fedveil.report.frontier import COSTS, WORDS, shown

    primary = found[0].primary
    told = [point.cost_to(level) for point in found]
    costs = [cost for cost in COSTS if any(row[cost] is not None and not math.isinf(row[cost]) for row in told)]
    out.out(f"\nCost until {primary.words} {primary.show(level)}, over the seeds that reach it:")
    rows = [["recipe", "reached", *(WORDS[cost] for cost in costs)]]
    for row in told:
        cells = [shown(cost, row[cost]) for cost in costs]
        rows.append([row["recipe"], f"{row['reached']} of {row['seeds']}", *cells])
    show.columns(rows)


def _within(found: Sequence[Point], budgets: Sequence[Budget]) -> None:
    if not budgets:
        return
    primary = found[0].primary
    out.out(f"\n{primary.words[:1].upper()}{primary.words[1:]} within a budget:")
    rows = [["recipe", *(_called(budget) for budget in budgets)]]
    for point in found:
        values = [point.within(budget) for budget in budgets]
        rows.append([point.name, *("–" if value is None else value.show(primary) for value in values)])
    show.columns(rows)


def _called(budget: Budget) -> str:
    from fedveil.report.frontier import shown

    if budget.kind == "epsilon":
        return f"ε {budget.most:g}"
    return f"{shown('bytes_up', budget.most)} up" if budget.kind == "bytes" else f"{budget.most:g} rounds"


def _json(found: Sequence[Point], best: Sequence[Point], level: float, budgets: Sequence[Budget]) -> dict[str, object]:
    import msgspec

    def finite(costs: object) -> object:
        if isinstance(costs, float) and math.isinf(costs):
            return None
        return {key: finite(value) for key, value in costs.items()} if isinstance(costs, dict) else costs

    within = [
        {
            "recipe": point.name,
            "budget": {budget.kind: budget.most},
            "value": None if (value := point.within(budget)) is None else msgspec.structs.asdict(value),
        }
        for budget in budgets
        for point in found
    ]
    recipes = [
        {
            "recipe": point.name,
            "frontier": point in best,
            "value": msgspec.structs.asdict(point.value),
            "seeds": list(point.ledgers),
            **{cost: finite(value) for cost, value in point.costs.items()},
        }
        for point in found
    ]
    to_target = [finite(point.cost_to(level)) for point in found]
    return {
        "metric": found[0].primary.name,
        "recipes": recipes,
        "target": level,
        "cost_to_target": to_target,
        "within_budget": within,
    }
