"""Pieces of HTML. Text is escaped here; what is called HTML in a docstring is not."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fedveil.report.figures import curves, svg
from fedveil.report.folder import Run
from fedveil.report.groups import grouped


def table(head: Sequence[str], body: Sequence[str], label: str) -> str:
    """A table in a box of its own to scroll in, from HTML rows."""
    heads = "".join(f'<th scope="col">{name}</th>' for name in head)
    rows = "\n".join(f"<tr>{row}</tr>" for row in body)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def name(text: str) -> str:
    """The first cell of a row."""
    return f'<th scope="row"><span class="name">{escape(text)}</span></th>'


def cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def figure(picture: str, caption: str) -> str:
    """A picture, which is HTML, and what it shows."""
    return f'<figure><div class="figure">{picture}</div><figcaption>{escape(caption)}</figcaption></figure>\n'


def image(path: Path, alt: str) -> str:
    """A picture from a file, which as an image runs nothing."""
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    return f'<img alt="{escape(alt)}" src="data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}">'


def charts(runs: Sequence[Run], against: str, caption: str, metric: str | None = None) -> str:
    """A figure with a curve a run, or a mean and a band a recipe, by default of the primary metric."""
    ledgers = {group.name: [run.ledger for run in group.runs] for group in grouped(runs)}
    drawn = svg(curves(ledgers, [against], metric))
    return figure(drawn.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1), caption)
