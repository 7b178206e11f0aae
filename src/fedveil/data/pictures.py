"""A picture of who holds what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedveil.core.data import Ints, Split

# Paul Tol's 'muted' colours, which stay apart for colour-blind eyes, and grey.
COLOURS = ("#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677", "#44AA99", "#882255", "#999933", "#AA4499", "#BBBBBB")


def picture(split: Split, y: Tensor | Ints, labels: Sequence[str], clients: int = 40) -> Figure:
    """A bar a client, its records coloured by class; of more than `clients` clients, some evenly chosen.

    With more than ten classes the nine largest are coloured and the rest is grey. Where y is not one label a
    record, bars show sizes only.
    """
    if np.ndim(y) == 1 and len(labels) and np.asarray(y).dtype.kind in "iu":
        counts, names = split.counts(y, len(labels)), list(labels)
    else:
        counts, names = split.sizes[:, None], ["records"]
    if len(names) > len(COLOURS):
        largest = np.sort(np.argsort(-counts.sum(0), kind="stable")[: len(COLOURS) - 1])
        rest = counts.sum(1) - counts[:, largest].sum(1)
        counts, names = np.column_stack([counts[:, largest], rest]), [*(names[i] for i in largest), "other"]
    shown = np.linspace(0, len(split) - 1, min(clients, len(split))).round().astype(np.int64)

    figure = Figure(figsize=(8, 1.5 + 0.22 * max(len(shown), 5)), layout="constrained")
    axes = figure.add_subplot()
    ends = counts[shown].cumsum(1)
    rows = np.arange(len(shown))
    for c, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        width = counts[shown, c]
        axes.barh(rows, width, left=ends[:, c] - width, height=0.8, color=colour, label=name, edgecolor="white", lw=0.4)
    axes.set_yticks(rows, [str(k) for k in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("records")
    axes.set_ylabel("client")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    axes.set_xlim(0, ends.max() * 1.03)
    axes.spines[["top", "right"]].set_visible(False)
    who = f"{len(split):,} clients"
    if len(shown) < len(split):
        who = f"{len(shown)} of {who}, evenly chosen"
    axes.set_title(f"{split.kind} split: {who}; {len(split.order):,} records in all", fontsize=10, loc="left")
    if len(names) > 1:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure
