"""Figures of a report. They are plain `Figure` objects: no window, no global state of pyplot."""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter
from torch import Tensor

from fedveil.core.ledger import Ledger, Row
from fedveil.core.measures import METRICS
from fedveil.core.metrics import VALIDATION, Primary, primary_of

# From Okabe and Ito's colours and Paul Tol's: apart for colour-blind eyes, 3:1 and better against white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#332288")
DASHES = ("solid", "dashed", "dotted")
MARKERS = "os^DvP<X>*ph"
LABELS = {
    "cosine": "cosine, clients to server",
    "cosine_down": "cosine, server to clients",
    "epsilon": "ε charged so far",
    "matching": "distance to records",
    "cosine_real": "cosine to records",
    "radius": "radius",
    "moved": "distance",
    "server_steps": "steps",
}
ZOOMED = 0.9  # of a share in per cent: where a panel begins whose curves end above it
LEAST, MOST = 1e-9, 1e18  # what is beyond is from a damaged file, and no axis holds it
AXES = {"rounds": "rounds", "bytes": "bytes sent by all clients so far", "epsilon": "ε charged so far"}


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


def points(ledger: Ledger, against: str = "rounds", metric: str = "accuracy") -> list[tuple[float, float]]:
    """A metric where it was measured, against one of `AXES`: (place, value) pairs.

    ε is the largest that any client has charged; rounds before the first that is private have none.
    """
    return [point for _, point in _placed(ledger, against, metric)]


def _placed(ledger: Ledger, against: str, metric: str) -> list[tuple[Row, tuple[float, float]]]:
    """The same with their rows."""
    measured, sent, charged = [], 0, None
    for row in ledger.rows:
        sent, charged = sent + row.bytes_up, charged if row.epsilon is None else row.epsilon
        place = {"rounds": row.round, "bytes": sent, "epsilon": charged}[against]
        value = row.epsilon if metric == "epsilon" else row.metrics.get(metric)
        if place is not None and value is not None:
            measured.append((row, (place, value)))
    return measured


def averaged(
    ledgers: Sequence[Ledger], against: str, metric: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The mean of a metric over runs, against the mean of one of `AXES`, and the standard deviations: of each round in
    which all have it, (place, value) pairs and (lower, upper) edges."""
    each = [{row.round: point for row, point in _placed(ledger, against, metric)} for ledger in ledgers]
    rounds = [number for number in each[0] if all(number in found for found in each)]
    places = np.array([[found[number][0] for found in each] for number in rounds])
    values = np.array([[found[number][1] for found in each] for number in rounds])
    if not rounds:
        return [], []
    middle, apart = values.mean(1), values.std(1, ddof=1)
    line = list(zip(places.mean(1).tolist(), middle.tolist(), strict=True))
    return line, list(zip((middle - apart).tolist(), (middle + apart).tolist(), strict=True))


def curves(
    ledgers: Mapping[str, Ledger | Sequence[Ledger]],
    against: Sequence[str] = ("rounds", "bytes"),
    metric: str | None = None,
) -> Figure:
    """A metric of each run, by name: a panel against each of `AXES` that is asked for. The legend leaves out runs in
    which it was never measured. Several runs of one name are their mean and a band of one standard deviation.

    metric: by default the primary metric of the first run that has one
    """
    each = {name: [found] if isinstance(found, Ledger) else list(found) for name, found in ledgers.items()}
    metric = primary_among(itertools.chain(*each.values())).name if metric is None else metric
    width = 4.8 * len(against)
    measured = [any(points(one, axis, metric) for one in found for axis in against) for found in each.values()]
    chosen = measured if any(measured) else [True] * len(measured)
    names = ["\n".join(textwrap.wrap(name, 36)) for name in itertools.compress(ledgers, chosen)]
    columns = next((n for n in range(min(6, len(names)), 1, -1) if _legend_width(names, n) <= width), 1)
    figure = Figure(figsize=(width, 3.4 + 0.2 * len(names) / columns), layout="constrained")
    handles: list[Any] = []
    for panel, axis in enumerate(against):
        axes = figure.add_subplot(1, len(against), panel + 1)
        handles = list(itertools.compress(_panel(axes, list(each.values()), axis, metric), chosen))
    legend = figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def primary_among(ledgers: Iterable[Ledger]) -> Primary:
    """The primary metric by which runs are compared: that of the first run in which it was measured."""
    found = [(ledger.primary, bool(ledger.series(ledger.primary.name)[0])) for ledger in ledgers]
    return next((primary for primary, seen in found if seen), found[0][0])


def _known(metric: str, ledgers: Iterable[Ledger]) -> Primary | None:
    """What is known of a metric of test or validation records; None for other metrics."""
    name = metric.removeprefix(VALIDATION)
    told = next((ledger.primary for ledger in ledgers if ledger.primary.name == name), None)
    return told or (primary_of(name) if name in METRICS else None)


def _label(metric: str, known: Primary | None) -> str:
    if known is None:
        return LABELS.get(metric, metric)
    part = "validation" if metric.startswith(VALIDATION) else "test"
    return f"{part} {known.words}{'' if known.maximise else ' (less is better)'}"


def _legend_width(names: Sequence[str], columns: int) -> float:
    """About how many inches a legend takes; names are laid out column by column."""
    rows = -(-len(names) // columns)
    widest = (max(map(len, names[i : i + rows])) for i in range(0, len(names), rows))
    return sum(0.75 + 0.08 * n for n in widest)


def _panel(axes: Any, runs: Sequence[Sequence[Ledger]], against: str, metric: str) -> list[Any]:
    """Draw one panel and return its lines."""
    handles, shown = [], []
    for i, ledgers in enumerate(runs):
        if len(ledgers) > 1:
            measured, edges = averaged(ledgers, against, metric)
            shaded = [(place, *edge) for (place, _), edge in zip(measured, edges, strict=True)]
            _shade(axes, shaded, look(i)["color"])
        else:
            measured = points(ledgers[0], against, metric)
        seen = [(place, value) for place, value in measured if LEAST < place < MOST and abs(value) < MOST]
        shown += seen
        step = max(1, len(seen) // 8)
        (line,) = axes.plot(
            [place for place, _ in seen],
            [value for _, value in seen],
            **look(i),
            markevery=(i % step, step),
            markersize=5,
            linewidth=1.6,
        )
        handles.append(line)
        if metric == "radius" and len(ledgers) == 1:
            shown += _band(axes, ledgers[0], against, look(i)["color"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8d8d8", linewidth=0.6)
    known = _known(metric, itertools.chain(*runs))
    axes.set_ylabel(_label(metric, known)).set_parse_math(False)
    low, high = (pick((y for _, y in shown), default=0) for pick in (min, max))
    if known and known.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        if _settled_high(axes) and low < ZOOMED:
            axes.set_ylim(ZOOMED, min(1.0, high + 0.1 * (high - ZOOMED)))
            axes.set_ylabel(f"{axes.get_ylabel()} (axis from {ZOOMED:.0%})").set_parse_math(False)
    elif high > 20 * low > LEAST and (metric == "matching" or (known and not known.maximise)):
        axes.set_yscale("log")
    elif not metric.startswith("cosine") and not (known and known.maximise):
        axes.set_ylim(min(0, low), max(1.08 * high, LEAST))
    if not shown:
        words = known.words if known else metric
        axes.text(0.5, 0.5, f"no {words} measured yet", ha="center", transform=axes.transAxes, parse_math=False)
        axes.set(xticks=[], yticks=[])
    elif against == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        log_axis(axes, min(shown)[0], max(shown)[0], size if against == "bytes" else "{:g}".format)
    axes.set_xlabel(AXES[against])
    return handles


def log_axis(axes: Any, low: float, high: float, form: Callable[[float], str]) -> None:
    """Make the horizontal axis logarithmic, from below `low` to above `high`, with round ticks."""
    margin = 1.4 if high > 3 * low else 2.3  # room for two ticks at least
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    axes.set_xticks(_ticks(low / margin, high * margin))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: form(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _band(axes: Any, ledger: Ledger, against: str, colour: str) -> list[tuple[float, float]]:
    """Shade from the smallest to the largest radius that a client measured; returns the upper edge."""
    most = dict(points(ledger, against, "radius_most"))
    edges = [(place, low, most[place]) for place, low in points(ledger, against, "radius_least") if place in most]
    return _shade(axes, edges, colour)


def _shade(axes: Any, edges: Sequence[tuple[float, float, float]], colour: str) -> list[tuple[float, float]]:
    """Shade (place, lower, upper) edges; returns the upper one."""
    edges = [edge for edge in edges if LEAST < edge[0] < MOST and max(map(abs, edge)) < MOST]
    places, lows, highs = ([edge[i] for edge in edges] for i in range(3))
    axes.fill_between(places, lows, highs, color=colour, alpha=0.15, linewidth=0)
    return list(zip(places, highs, strict=True))


def _settled_high(axes: Any) -> bool:
    """Whether every curve spends the second half of its points above `ZOOMED`."""
    halves = [line.get_ydata()[len(line.get_ydata()) // 2 :] for line in axes.lines if len(line.get_ydata())]
    return bool(halves) and all(min(half) >= ZOOMED for half in halves)


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


def roc(attacks: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """ROC curves by name, false- and true-positive rates each, on logarithmic axes: what matters is few false ones."""
    figure = Figure(figsize=(4.8, 3.8), layout="constrained")
    axes = figure.add_subplot()
    least = min((rate for fpr, tpr in attacks.values() for rate in (*fpr, *tpr) if rate > 0), default=1e-3)
    axes.plot([least, 1], [least, 1], color="#888888", linewidth=1, label="guessing")
    for i, (name, (fpr, tpr)) in enumerate(attacks.items()):
        style = {key: value for key, value in look(i).items() if key != "marker"}
        axes.plot(np.maximum(fpr, least), np.maximum(tpr, least), **style, linewidth=1.6, label=name)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#d8d8d8", linewidth=0.6)
    axes.set(xscale="log", yscale="log", xlabel="false-positive rate", ylabel="true-positive rate")
    for text in axes.legend(frameon=False, fontsize=8, loc="lower right").get_texts():
        text.set_parse_math(False)
    return figure


def gallery(rows: Mapping[str, Tensor]) -> Figure:
    """Pictures [N, channels, height, width] with pixels in [0, 1], a line of them for each name."""
    most, longest = max(len(images) for images in rows.values()), max(map(len, rows))
    figure = Figure(figsize=(0.4 + 0.09 * longest + 0.42 * most, 0.46 * len(rows)), layout="constrained")
    for axes, (name, images) in zip(figure.subplots(len(rows), squeeze=False)[:, 0], rows.items(), strict=True):
        x = images[:, : 3 if images.shape[1] >= 3 else 1].numpy().transpose(0, 2, 3, 1)
        x = np.pad(x.repeat(3 // x.shape[-1], 3), ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=1)
        axes.imshow(np.concatenate(list(x.clip(0, 1)), 1), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        label = axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        label.set_parse_math(False)
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
