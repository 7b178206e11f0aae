"""What runs promise of privacy, and what attacks on them found: four sections of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from fedveil.report.figures import roc, svg
from fedveil.report.folder import Run
from fedveil.report.markup import cell, charts, figure, name, table
from fedveil.report.words import private, secured

if TYPE_CHECKING:
    from fedveil.attacks.membership import Audit

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


def audits(runs: Sequence[Run]) -> str:
    """How well members are told from others, and whether that contradicts what was promised."""
    found = [(run, run.audit) for run in runs if run.audit]
    if not found:
        return ""
    levels = sorted({rate.fpr for _, audit in found for rate in audit.control.rates})
    broken = [f"{run.name}: {each}." for run, audit in found for each in audit.broken]
    told = "".join(f'<p class="warning" role="note">{escape(sentence)}</p>\n' for sentence in broken)
    told += (
        '<p class="note">Measured: attacks that tell from the last weights whether a record was trained on. An area '
        "(AUC) of 0.5 is guessing. The control is the same attack on weights that learnt some members by heart, and "
        "must succeed; the baseline is on the initial weights, and must not. In brackets: too few others to tell such "
        "a rate.</p>\n"
    )
    if apart := [run.name for run, audit in found if audit.others == "test"]:
        told += (
            f'<p class="note">In {escape(", ".join(apart))} members are compared with test records, which may differ '
            "from training records in themselves. Validation records that a recipe holds out do not.</p>\n"
        )
    heads = ["run", "attack", "AUC", "with 95%", *(f"found at {100 * level:g}% false ones" for level in levels)]
    rows = [name(run.name) + row for run, audit in found for row in _reached(audit, levels)]
    told += table([*heads, "balanced accuracy"], rows, "Membership")
    if promises := [name(run.name) + row for run, audit in found for row in _promises(audit)]:
        told += (
            '\n<p class="note">An ε that is ruled out is measured, with 95% confidence; one that is charged is proved, '
            "unless noise was fixed. The first above the second contradicts it; below, it proves nothing.</p>\n"
        )
        told += table(["run", "attacked", "ε ruled out", "ε charged", "δ", "by the control", ""], promises, "Promises")
    drawn = "".join(_roc(run, audit) for run, audit in found)
    return f'<h2>Audit</h2>\n{told}\n<div class="figures halves">\n{drawn}</div>'


def _reached(audit: Audit, levels: Sequence[float]) -> Iterator[str]:
    """A row an attack."""
    for attack, each in {**audit.attacks, "baseline": audit.baseline, "control": audit.control}.items():
        rates = {rate.fpr: f"{rate.tpr:.3f}" if rate.resolved else f"({rate.tpr:.3f})" for rate in each.rates}
        found = [rates.get(level, "–") for level in levels]
        cells = [attack, f"{each.auc:.3f}", f"{each.low:.3f} to {each.high:.3f}", *found, f"{each.balanced:.3f}"]
        yield "".join(map(cell, cells))


def _promises(audit: Audit) -> Iterator[str]:
    """A row an ε that was promised, beside those that were ruled out."""
    if audit.epsilon is not None:
        most = max((each.epsilon for each in audit.attacks.values()), default=0.0)
        yield _promise("the last weights", most, audit.epsilon, audit.delta, audit.control.epsilon)
    if m := audit.mechanism:
        told = f"{m.canaries} canaries in private gradients"
        yield _promise(told, m.lower, m.epsilon, m.delta, m.control)
        if m.curve is not None:
            yield _promise(f"{told}, by the trade-off curve", m.curve, m.epsilon, m.delta, m.curve_control)
    if s := audit.sums:
        told = f"{s.trials} noised sums ({s.relation})"
        yield _promise(told, s.lower, s.epsilon, s.delta, s.control)
        if s.curve is not None:
            yield _promise(f"{told}, by the trade-off curve", s.curve, s.epsilon, s.delta, s.control)


def _promise(what: str, ruled_out: float, charged: float, delta: float, control: float) -> str:
    kept = "not contradicted" if control > charged else "too weak to tell: the control does not contradict it either"
    figures = [f"{value:.3g}" for value in (ruled_out, charged, delta, control)]
    return "".join(map(cell, [what, *figures])) + cell("contradicted" if ruled_out > charged else kept, "words")


def _roc(run: Run, audit: Audit) -> str:
    drawn = {**audit.attacks, "control": audit.control}
    curves = roc({attack: (each.fpr, each.tpr) for attack, each in drawn.items()})
    return figure(svg(curves), f"{run.name}: how many members are found at how many false ones.")


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
