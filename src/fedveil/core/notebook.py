"""A run as HTML in a notebook: a curve and a table, in the notebook's own colours, and nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

WIDTH, HEIGHT = 360, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 30  # margins of the curve
LINE = "#3b82c4"  # 3:1 and better against white and against black


def page(title: str, drawn: str, rows: Iterable[tuple[str, str]]) -> str:
    """A title, a picture, which is HTML, and a table of names and values."""
    cell = 'style="text-align: {}; padding: 1px 8px; background: none"'
    left, right = cell.format("left"), cell.format("right")
    body = "".join(
        f'<tr style="background: none"><th scope="row" {left}>{escape(name)}</th><td {right}>{escape(value)}</td></tr>'
        for name, value in rows
    )
    return (
        '<div style="display: flex; flex-wrap: wrap; gap: 24px; align-items: flex-start">'
        f"<div><strong>{escape(title)}</strong><br>{drawn}</div>"
        f'<table style="border-collapse: collapse; font-size: 90%; color: inherit">{body}</table></div>'
    )


def curve(name: str, rounds: Sequence[int], values: Sequence[float]) -> str:
    """A metric over rounds as SVG; empty where nothing finite was measured."""
    seen = [(r, v) for r, v in zip(rounds, values, strict=True) if math.isfinite(v)]
    if not seen:
        return ""
    first, last = seen[0][0], seen[-1][0]
    low, high = min(v for _, v in seen), max(v for _, v in seen)
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(r: float, v: float) -> tuple[float, float]:
        x = LEFT + (right - LEFT) * (r - first) / ((last - first) or 1)
        y = floor - (floor - TOP) * ((v - low) / (high - low) if high > low else 0.5)
        return round(x, 1), round(y, 1)

    places = [place(r, v) for r, v in seen]
    points = " ".join(f"{x},{y}" for x, y in places)
    x, y = places[-1]
    marks = [(LEFT - 6, TOP + 4, "end", f"{high:.4g}"), (LEFT - 6, floor + 4, "end", f"{low:.4g}")]
    marks += [(LEFT, HEIGHT - 10, "middle", str(first)), (right, HEIGHT - 10, "end", str(last))]
    marks += [(LEFT, 14, "start", name), ((LEFT + right) // 2, HEIGHT - 10, "middle", "round")]
    told = "".join(f'<text x="{a}" y="{b}" text-anchor="{c}">{escape(d)}</text>' for a, b, c, d in marks)
    label = f"{name} by round, last {seen[-1][1]:.4g}"
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" style="color: inherit; max-width: 100%">'
        f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>'
        f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="2" stroke-linejoin="round"/>'
        f'<circle cx="{x}" cy="{y}" r="3.5" fill="{LINE}"/>'
        f'<g fill="currentColor" font-size="12" font-family="sans-serif">{told}</g></svg>'
    )
