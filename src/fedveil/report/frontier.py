"""Which recipes are not dominated: a metric against what it costs, from ledgers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fedveil.core.ledger import Ledger, Row
from fedveil.core.measures import METRICS
from fedveil.core.metrics import VALIDATION, Primary, primary_of
from fedveil.report.figures import log_axis, look, size
from fedveil.report.groups import Group
from fedveil.runs.space import Budget
from fedveil.runs.statistics import Spread, spread

COSTS: dict[str, Callable[[Sequence[Row]], float]] = {  # name -> its amount after some rounds; less is better
    "bytes_up": lambda rows: sum(row.bytes_up for row in rows),
    "bytes_down": lambda rows: sum(row.bytes_down for row in rows),
    "epsilon": lambda rows: max((row.epsilon for row in rows if row.epsilon is not None), default=math.inf),
    "passes": lambda rows: sum(row.passes for row in rows),
    "memory": lambda rows: max(row.memory for row in rows) or math.inf,
    "rounds": len,
}
SIZES = ("bytes_up", "bytes_down", "memory")
WORDS = {
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "epsilon": "ε",
    "passes": "client passes",
    "memory": "client memory",
    "rounds": "rounds",
}


def shown(cost: str, value: float | None) -> str:
    """A cost for people."""
    if value is None or math.isinf(value):
        return "–"
    return size(value).replace("\N{NO-BREAK SPACE}", " ") if cost in SIZES else f"{value:,.4g}"


@dataclass(frozen=True)
class Point:
    """A recipe: the mean of a metric over seeds at the end, and mean costs; ε is the largest, or infinite without
    differential privacy. Memory is infinite where it is not known."""

    name: str
    ledgers: Mapping[int, Ledger]
    primary: Primary
    value: Spread
    costs: Mapping[str, float]

    def dominates(self, other: Point) -> bool:
        """Whether this one is at least as good in everything and better in something, by the means."""
        pairs = [(self.costs[cost], other.costs[cost]) for cost in COSTS]
        sign = -1 if self.primary.maximise else 1
        pairs.append((sign * self.value.mean, sign * other.value.mean))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    def cost_to(self, target: float) -> dict[str, Any]:
        """Mean costs until the metric first reaches `target`, over the seeds that do, and how many these are."""
        ends = []
        for ledger in self.ledgers.values():
            found = (i for i, row in enumerate(ledger.rows, 1) if self._reached(row, target))
            if end := next(found, 0):
                ends.append(ledger.rows[:end])
        costs = {cost: _mean(cost, ends) if ends else None for cost in COSTS}
        return {"recipe": self.name, "reached": len(ends), "seeds": len(self.ledgers), **costs}

    def within(self, budget: Budget) -> Spread | None:
        """The metric when it was last measured within a budget, over seeds; None unless all have it."""
        ends = []
        for ledger in self.ledgers.values():
            values = [v for row in budget.rows(ledger.rows) if (v := row.metrics.get(self.primary.name)) is not None]
            private = budget.kind != "epsilon" or any(row.epsilon is not None for row in ledger.rows)
            ends += values[-1:] if private else []
        return spread(ends) if len(ends) == len(self.ledgers) else None

    def _reached(self, row: Row, target: float) -> bool:
        value = row.metrics.get(self.primary.name)
        return value is not None and self.primary.reached(value, target)


def points(groups: Sequence[Group], metric: str | None) -> list[Point]:
    """The recipes that have measured the metric, the best first."""
    primary = _primary(groups, metric)
    found = []
    for group in groups:
        repeats = group.repeats(primary)
        if value := repeats.spread():
            costs = {cost: _mean(cost, [ledger.rows for ledger in repeats.ledgers.values()]) for cost in COSTS}
            found.append(Point(group.name, repeats.ledgers, primary, value, costs))
    sign = -1 if primary.maximise else 1
    return sorted(found, key=lambda point: sign * point.value.mean)


def frontier(found: Sequence[Point]) -> list[Point]:
    """The points that no other one dominates."""
    return [point for point in found if not any(other.dominates(point) for other in found)]


def _mean(cost: str, ends: Sequence[Sequence[Row]]) -> float:
    amounts = [COSTS[cost](rows) for rows in ends]
    return max(amounts) if cost == "epsilon" else math.fsum(amounts) / len(amounts)


def _primary(groups: Sequence[Group], metric: str | None) -> Primary:
    own = groups[0].runs[0].primary
    if metric is None:
        return own
    rows = [row for group in groups for run in group.runs for row in run.ledger.rows]
    measured = {name for row in rows for name in row.metrics if name.removeprefix(VALIDATION) in {own.name, *METRICS}}
    if metric not in measured:
        known = f"they measured {', '.join(sorted(measured))}" if measured else "they measured nothing yet"
        raise ValueError(f"--metric is '{metric}', but no run measured it; {known}")
    name = metric.removeprefix(VALIDATION)
    return msgspec.structs.replace(own if name == own.name else primary_of(name), name=metric)


def picture(found: Sequence[Point]) -> Figure:
    """The metric against each cost that differs. Points that nothing dominates in these two are filled and joined."""
    primary = found[0].primary
    costs = [cost for cost in COSTS if len({point.costs[cost] for point in found}) > 1] or ["bytes_up"]
    columns = min(3, len(costs))
    rows = -(-len(costs) // columns)
    legend = 0.25 * len(found)
    figure = Figure(figsize=(3.9 * columns, 3.2 * rows + legend), layout="constrained")
    handles: dict[str, Any] = {}
    for panel, cost in enumerate(costs):
        axes = figure.add_subplot(rows, columns, panel + 1)
        _panel(axes, found, cost, handles)
        axes.set_xlabel(WORDS[cost])
        axes.set_ylabel(primary.words).set_parse_math(False)
        if primary.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
    drawn = figure.legend(handles.values(), handles, loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    for text in drawn.get_texts():
        text.set_parse_math(False)
    return figure


def _panel(axes: Any, found: Sequence[Point], cost: str, handles: dict[str, Any]) -> None:
    placed = [point for point in found if 0 < point.costs[cost] < math.inf]
    best: list[Point] = []
    for point in sorted(placed, key=lambda p: (p.costs[cost], -p.value.mean if p.primary.maximise else p.value.mean)):
        if not best or point.primary.better(point.value.mean, best[-1].value.mean):
            best.append(point)
    ends = [point.costs[cost] for point in best], [point.value.mean for point in best]
    axes.plot(*ends, color="#888888", linewidth=1, drawstyle="steps-post", zorder=0)
    for i, point in enumerate(found):
        if point not in placed:
            continue
        style = look(i) | {"linestyle": "none", "capsize": 2}
        style["markerfacecolor"] = style["color"] if point in best else "white"
        drawn = axes.errorbar([point.costs[cost]], [point.value.mean], yerr=point.value.deviation, **style)
        handles.setdefault(point.name, drawn)
    if placed:
        amounts = [point.costs[cost] for point in placed]
        log_axis(axes, min(amounts), max(amounts), lambda x: shown(cost, x))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8d8d8", linewidth=0.6)
