"""A heat map of runs that differ in two settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedveil.report.groups import Group, varied


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
