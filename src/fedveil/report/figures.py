"""Figures of a report. They are plain `Figure` objects: no window, no global state of pyplot."""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from torch import Tensor

from fedveil.ledger import Ledger

# From Okabe and Ito's colours and Paul Tol's: apart for colour-blind eyes, 3:1 and better against white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288")
DASHES = ("solid", "dashed", "dotted")
MARKERS = "os^DvP<X>*ph"
LABELS = {
    "accuracy": "test accuracy",
    "cosine": "cosine, clients to server",
    "cosine_down": "cosine, server to clients",
}


def look(i: int) -> dict[str, Any]:
    """Colour, dashes and marker of run i; no two of the first twelve share a marker or both others."""
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": DASHES[i // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
    }


def size(count: float) -> str:
    """Bytes in decimal units with four significant digits: 1 MB is a million."""
    units = iter(("B", "kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while count >= 999.95 and unit != "PB":
        count, unit = count / 1000, next(units)
    return f"{count:.4g}\N{NO-BREAK SPACE}{unit}"


def by_bytes(ledger: Ledger, metric: str = "accuracy") -> tuple[list[int], list[float]]:
    """Bytes sent by all clients so far and a metric, where it was measured."""
    sent = itertools.accumulate(row.bytes_up for row in ledger.rows)
    seen = [(s, row.metrics[metric]) for s, row in zip(sent, ledger.rows, strict=True) if metric in row.metrics]
    return [s for s, _ in seen], [a for _, a in seen]


def curves(
    ledgers: Mapping[str, Ledger], against: Sequence[str] = ("rounds", "bytes"), metric: str = "accuracy"
) -> Figure:
    """Test accuracy (or another of `LABELS`) of each run, by name: a panel against rounds, one against the bytes sent
    by all clients so far. The legend leaves out runs in which it was never measured."""
    width = 4.8 * len(against)
    measured = [bool(ledger.series(metric)[0]) for ledger in ledgers.values()]
    chosen = measured if any(measured) else [True] * len(measured)
    names = ["\n".join(textwrap.wrap(name, 36)) for name in itertools.compress(ledgers, chosen)]
    columns = next((n for n in range(min(6, len(names)), 1, -1) if _legend_width(names, n) <= width), 1)
    figure = Figure(figsize=(width, 3.4 + 0.2 * len(names) / columns), layout="constrained")
    handles: list[Any] = []
    for panel, axis in enumerate(against):
        axes = figure.add_subplot(1, len(against), panel + 1)
        handles = list(itertools.compress(_panel(axes, ledgers, axis, metric), chosen))
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _legend_width(names: Sequence[str], columns: int) -> float:
    """About how many inches a legend takes; names are laid out column by column."""
    rows = -(-len(names) // columns)
    widest = (max(map(len, names[i : i + rows])) for i in range(0, len(names), rows))
    return sum(0.75 + 0.08 * n for n in widest)


def _panel(axes: Any, ledgers: Mapping[str, Ledger], against: str, metric: str) -> list[Any]:
    """Draw one panel and return its lines."""
    handles, shown = [], []
    for i, ledger in enumerate(ledgers.values()):
        x, y = ledger.series(metric) if against == "rounds" else by_bytes(ledger, metric)
        points = [(place, value) for place, value in zip(x, y, strict=True) if place > 0]
        shown += points
        step = max(1, len(points) // 8)
        (line,) = axes.plot(
            [place for place, _ in points],
            [value for _, value in points],
            **look(i),
            markevery=(i % step, step),
            markersize=5,
            linewidth=1.6,
        )
        handles.append(line)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8d8d8", linewidth=0.6)
    axes.set_ylabel(LABELS[metric])
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if not shown:
        axes.text(0.5, 0.5, f"no {metric} measured yet", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
    elif against == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        low, high = min(shown)[0], max(shown)[0]
        margin = 1.4 if high > 3 * low else 2.3  # room for two ticks at least
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
        axes.set_xticks(_ticks(low / margin, high * margin))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: size(count)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("rounds" if against == "rounds" else "bytes sent by all clients so far")
    return handles


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high: as many as fit, six at most."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks: list[float] = []
    for digits, every in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        ticks = [
            digit * 10.0**p for p in powers if p % every == 0 for digit in digits if low <= digit * 10.0**p <= high
        ]
        if len(ticks) <= 6:
            break
    return ticks


def densities(samples: Mapping[str, Tensor], label: str) -> Figure:
    """The density of some numbers, a line a sample, and the normal one of deviation 1 to compare with."""
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    edges = np.linspace(-4, 4, 81)
    for i, (name, values) in enumerate(samples.items()):
        counts, _ = np.histogram(values.numpy(), edges)
        share = counts / (values.numel() * (edges[1] - edges[0]))
        axes.plot((edges[1:] + edges[:-1]) / 2, share, **look(i) | {"marker": None}, linewidth=1.2, label=name)
    axes.plot(edges, np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi), color="#888888", linewidth=1, label="normal")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8d8d8", linewidth=0.6)
    axes.set(xlabel=label, ylabel="density")
    if len(samples) <= 12:
        axes.legend(frameon=False, fontsize=8)
    return figure


def strip(images: Tensor) -> bytes:
    """Images [N, channels, height, width] side by side as a PNG, each in its own range from black to white."""
    x = images.numpy()[:, : 3 if images.shape[1] >= 3 else 1].transpose(0, 2, 3, 1)
    low, high = (f(x, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    x = ((x - low) / np.maximum(high - low, 1e-12)).repeat(3 // x.shape[-1], 3)
    zoom = max(1, 48 // x.shape[1])
    x = np.pad(x.repeat(zoom, 1).repeat(zoom, 2), ((0, 0), (0, 0), (1, 1), (0, 0)), constant_values=1)
    out = io.BytesIO()
    imsave(out, np.concatenate(list(x), 1), format="png")
    return out.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an <svg> element. The same figure gives the same text; ids differ between different figures."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedveil"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # text stays text: the reader's fonts draw it
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    unique = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r'( id="|href="#|url\(#)', rf"\g<1>f{unique}-", tag[0]), text).strip()
