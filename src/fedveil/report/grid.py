"""Pictures of a sweep: a heat map of two settings, and a panel for each value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedveil.core.ledger import Ledger
from fedveil.report.figures import COLOURS, averaged, points
from fedveil.report.groups import SHOWN, Group, varied

COLUMNS, MOST = 4, 24  # panels in a row, and in all


def heat_map(groups: Sequence[Group]) -> Figure | None:
    """Draw the mean primary metric by two settings; None unless the recipes are all combinations of two settings."""
    keys = varied(groups)
    if len(keys) != 2:
        return None
    rows, columns = (_values(groups, key) for key in keys)
    cells = {tuple(str(group.settings.get(key)) for key in keys): group.repeats().spread() for group in groups}
    if min(len(rows), len(columns)) < 2 or len(cells) != len(rows) * len(columns) or len(cells) != len(groups):
        return None
    primary = groups[0].runs[0].primary
    found = [[cells[(str(row), str(column))] for column in columns] for row in rows]
    means = np.array([[np.nan if each is None else each.mean for each in line] for line in found])
    if np.isnan(means).all():
        return None
    figure = Figure(figsize=(2.2 + 0.9 * len(columns), 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(means, cmap="Blues" if primary.maximise else "Blues_r", aspect="auto")
    low, high = np.nanmin(means), np.nanmax(means)
    for (i, j), value in np.ndenumerate(means):
        dark = (value > (low + high) / 2) == primary.maximise
        text = "–" if np.isnan(value) else primary.show(float(value))
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.set_xlabel(keys[1]).set_parse_math(False)
    axes.set_ylabel(keys[0]).set_parse_math(False)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    figure.colorbar(picture).ax.tick_params(labelsize=8)
    return figure


def _values(groups: Sequence[Group], key: str) -> list[Any]:
    """The values of a setting: numbers in order, others as they come."""
    found = {str(value): value for value in (group.settings.get(key) for group in groups)}
    numbers = all(isinstance(value, (int, float)) for value in found.values())
    return sorted(found.values()) if numbers else list(found.values())


def panels(groups: Sequence[Group]) -> Figure | None:
    """Draw the primary metric by round, with a panel for each combination of settings.

    A panel has its own curve in colour, with a band of one standard deviation over seeds, and the others in grey. None
    unless the recipes are a sweep: three or more of one method that differ in a few settings.
    """
    keys = varied(groups)
    if not 3 <= len(groups) <= MOST or not 1 <= len(keys) <= SHOWN or "method.name" in keys:
        return None
    primary = groups[0].runs[0].primary
    each = [_curve(list(group.repeats().ledgers.values()), primary.name) for group in groups]
    if not any(line for line, _ in each):
        return None
    columns = min(COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(0.6 + 2.2 * columns, 0.5 + 1.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for i, panel in enumerate(axes.flat):
        if i >= len(groups):
            panel.set_axis_off()
            continue
        for line, _ in each:
            panel.plot(*_unzipped(line), color="#c8c8c8", linewidth=0.8)
        line, edges = each[i]
        if edges:
            lower, upper = _unzipped(edges)
            panel.fill_between([x for x, _ in line], lower, upper, color=COLOURS[0], alpha=0.2, linewidth=0)
        panel.plot(*_unzipped(line), color=COLOURS[0], linewidth=1.8)
        named = "\n".join(f"{key.removeprefix('method.')} = {groups[i].settings.get(key)}" for key in keys)
        panel.set_title(named, fontsize=8, loc="left", parse_math=False)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        panel.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        if primary.percent:
            panel.yaxis.set_major_formatter(PercentFormatter(1))
    figure.supxlabel("round", fontsize=9)
    figure.supylabel(f"test {primary.words}", fontsize=9, parse_math=False)
    return figure


def _curve(ledgers: Sequence[Ledger], metric: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(round, value) pairs of one recipe, and the (lower, upper) edges of its band where it has several seeds."""
    return averaged(ledgers, "rounds", metric) if len(ledgers) > 1 else (points(ledgers[0], "rounds", metric), [])


def _unzipped(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
