"""Pictures of a search: each trial as a line through its values, and which keys matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from fedveil.core.metrics import Primary
from fedveil.report.figures import COLOURS


def parallel(trials: Sequence[tuple[Mapping[str, Any], float]], logarithmic: Sequence[str], primary: Primary) -> Figure:
    """Parallel coordinates: a line for each trial through its values, (values by key, metric); the best one is bold.

    A trial without a key has a gap there.
    """
    keys = list(dict.fromkeys(key for values, _ in trials for key in values))
    figure = Figure(figsize=(2.4 + 1.7 * len(keys), 3.8), layout="constrained")
    axes = figure.add_subplot()
    metric = [value for _, value in trials]
    columns = [_column([values.get(key) for values, _ in trials], key in logarithmic) for key in keys]
    columns.append(_column(metric, False))
    sign = 1 if primary.maximise else -1
    order = sorted(range(len(metric)), key=lambda i: (sign * metric[i], -i))  # of equal ones the first is the best
    for rank, i in enumerate(order):
        best = rank == len(order) - 1
        colour = COLOURS[1] if best else colormaps["Blues"](0.25 + 0.6 * rank / max(1, len(order) - 1))
        heights = [places[i] for places, _ in columns]
        axes.plot(range(len(columns)), heights, color=colour, linewidth=2.2 if best else 1, marker="o", markersize=3)
    for place, (_, ticks) in enumerate(columns):
        axes.axvline(place, color="#888888", linewidth=0.8, zorder=0)
        for height, text in ticks:
            shown = primary.show(float(text)) if place == len(keys) else text
            axes.text(place + 0.03, height, shown, fontsize=8, va="center", parse_math=False)
    heads = [key.removeprefix("method.") for key in keys] + [f"validation {primary.words}"]
    axes.set_xticks(range(len(columns)), heads)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)
    axes.set(yticks=[], xlim=(-0.1, len(columns) - 0.6))
    axes.spines[:].set_visible(False)
    return figure


def _column(values: Sequence[Any], log: bool) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights from 0 to 1 of the values of one axis, and its ticks."""
    numbers = [value for value in values if isinstance(value, (int, float))]
    if not numbers:  # a list: equal distances
        texts = sorted({str(value) for value in values if value is not None})
        step = 1 / max(1, len(texts) - 1)
        heights = [float("nan") if value is None else step * texts.index(str(value)) for value in values]
        return heights, [(step * i, text) for i, text in enumerate(texts)]
    low, high = min(numbers), max(numbers)
    scale = np.log if log else np.asarray
    span = float(scale(high) - scale(low)) or 1.0
    heights = [float("nan") if value is None else float(scale(value) - scale(low)) / span for value in values]
    return heights, [(0.0, f"{low:.4g}")] + ([(1.0, f"{high:.4g}")] if high > low else [])


def importance(shares: Mapping[str, float]) -> Figure:
    """A bar for each key: its share of the metric's variance over the trials."""
    ranked = sorted(shares.items(), key=lambda item: item[1])
    figure = Figure(figsize=(4.8, 1.2 + 0.35 * len(ranked)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([key for key, _ in ranked], [share for _, share in ranked], color=COLOURS[0], height=0.6)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="share of the variance (fANOVA)", xlim=(0, 1))
    return figure
