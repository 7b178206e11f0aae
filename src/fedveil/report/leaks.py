"""What runs promise of privacy, and what attacks on codes found: three sections of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fedveil.report.folder import Run
from fedveil.report.markup import cell, charts, name, table
from fedveil.report.words import private, secured

ATTACKED = {  # columns of the table of attacks: name in the file, head
    "control": "control",
    "direct": "decoded by itself",
    "differential": "left out of the mean",
    "baseline": "baseline",
    "own": "own part",
}


def privacy(runs: Sequence[Run]) -> str:
    """What privacy was spent, and what it bought."""
    if all(run.summary["epsilon"] is None for run in runs):
        return ""
    said = "".join(f'<p class="note">{escape(text)}</p>\n' for run in runs if (text := private(run)))
    by_round = charts(runs, "rounds", "The largest ε that any client has charged.", "epsilon")
    words = runs[0].primary.words
    bought = charts(runs, "epsilon", f"Test {words} against that ε; further left is more private.")
    return f'<h2>Privacy</h2>\n{said}<div class="figures">\n{by_round}{bought}</div>'


def attacks(runs: Sequence[Run]) -> str:
    """How near a server that averages codes comes to single updates: means over the clients attacked."""
    body = []
    for run in runs:
        if run.attack and run.attack.clients:
            figures = (getattr(run.attack, each) for each in ATTACKED)
            means = [f"{sum(values) / max(len(values), 1):.3f}" for values in figures]
            cells = [str(run.attack.round), str(len(run.attack.clients)), *means]
            body.append(name(run.name) + "".join(map(cell, cells)))
    if not body:
        return ""
    said = (
        "Measured: a server that holds the decoder decodes one client's codes, or leaves the client out of the mean. "
        "Cosines with the client's true update, means over a cohort: 1 is all of it. The control is the same attack on "
        "a code that loses nothing, the baseline another client's update, and the own part is what remains of both "
        "when the cohort's mean is taken away: 0 would be nothing."
    )
    told = table(["run", "round", "clients", *ATTACKED.values()], body, "Attacks on codes")
    return f'<h2>Attacks</h2>\n<p class="note">{said}</p>\n{told}'


def sums(runs: Sequence[Run]) -> str:
    """What the server saw of runs with secure sums."""
    said = "".join(f'<p class="note">{escape(text)}</p>\n' for run in runs if (text := secured(run)))
    return f"<h2>What the server saw</h2>\n{said}" if said else ""
