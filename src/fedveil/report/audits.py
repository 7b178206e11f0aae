"""What `fedveil audit` found of runs: a section of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from fedveil.report.figures import roc, svg
from fedveil.report.folder import Run
from fedveil.report.markup import cell, figure, image, name, table

if TYPE_CHECKING:
    from fedveil.attacks.audit import Audit
    from fedveil.attacks.scores import Nearness, Range

Audited = Sequence[tuple[Run, "Audit"]]


def audits(runs: Sequence[Run]) -> str:
    """The verdicts, then what each attack reached and whether that contradicts what was promised."""
    found = [(run, run.audit) for run in runs if run.audit]
    if not found:
        return ""
    broken = [f"{run.name}: {each}." for run, audit in found for each in audit.broken]
    told = "".join(f'<p class="warning" role="note">{escape(sentence)}</p>\n' for sentence in broken)
    told += _verdicts(found) + _messages(found) + _sets(found) + _membership(found) + _promised(found)
    drawn = "".join(_pictures(run) for run, audit in found if audit.messages)
    drawn += "".join(_roc(run, audit) for run, audit in found if audit.curves)
    return f'<h2>Audit</h2>\n{told}\n<div class="figures halves">\n{drawn}</div>'


def _verdicts(found: Audited) -> str:
    from fedveil.attacks.audit import verdicts

    rows = [
        name(run.name) + cell(each.part) + cell(each.verdict) + cell(each.sentence, "words")
        for run, audit in found
        for each in verdicts(audit)
    ]
    rows += [
        name(run.name) + cell(part) + cell("left out") + cell(why, "words")
        for run, audit in found
        for part, why in audit.left_out.items()
    ]
    said = (
        "Measured, by the attacks named here. Not found means that these attacks find nothing though they work on "
        "their controls; that is no proof."
    )
    return f'<p class="note">{said}</p>\n' + table(["run", "attack", "verdict", ""], rows, "Verdicts") if rows else ""


def _messages(found: Audited) -> str:
    """What kept messages expose, beside guesses and the control."""
    rows = [name(run.name) + row for run, audit in found for row in _exposed(audit)]
    if not rows:
        return ""
    said = (
        "Messages become an estimate of the update or gradient, and this becomes records. The cosine is that of the "
        "estimate with the truth. Identified: the share of records that the rebuilt one tells from up to 999 others. "
        "Exact: an error below 1e-4 of the variance of the data. The control is one record from its raw gradient. "
        "Picked: the share of a message's n records among the n likeliest of a list of candidates; nothing is rebuilt."
    )
    heads = [
        "run",
        "messages",
        "number",
        "records",
        "cosine",
        "labels",
        "PSNR",
        "SSIM",
        "identified",
        "exact",
        "picked",
    ]
    return f'\n<p class="note">{said}</p>\n' + table(heads, rows, "Messages")


def _exposed(audit: Audit) -> Iterator[str]:
    for each in audit.messages:
        told = [each.kind, str(each.messages), str(each.records), f"{each.cosine.value:.2f}", _share(each.labels)]
        yield "".join(map(cell, [*told, *_near(each.reached), _share(each.picked.share if each.picked else None)]))
    for first in audit.messages[:1]:
        for guess, near in first.baselines.items():
            yield "".join(map(cell, [f"guess: {guess}", "", str(near.records), "", "", *_near(near), ""]))
        if first.control:
            told = ["control", str(first.control.victims), "1", "1.00", _share(first.control.labels)]
            alone = f"{first.picked.control:.0%}" if first.picked else "–"
            yield "".join(map(cell, [*told, *_near(first.control), alone]))


def _near(near: Nearness | None) -> list[str]:
    if near is None:
        return ["–"] * 4
    ssim = "–" if near.ssim is None else f"{near.ssim.value:.2f}"
    psnr = "–" if near.psnr is None else f"{near.psnr.value:.1f} dB"
    return [psnr, ssim, _share(near.identified), _share(near.exact)]


def _share(value: Range | None) -> str:
    return "–" if value is None else f"{value.value:.0%}"


def _sets(found: Audited) -> str:
    """What synthetic sets give away as data."""
    rows = []
    for run, audit in found:
        for each in audit.sets:
            parts = {f"client {each.client}, round {each.round}": each.found}
            for what, part in {**parts, "baseline": each.baseline, "control": each.control}.items():
                near, likely = part.nearest, part.likelihood
                told = [what, f"{near.auc:.3f}", f"{near.low:.3f} to {near.high:.3f}"]
                told += [f"{likely.auc:.3f}" if likely else "–", f"{part.matched:.0%}", f"{part.chance:.0%}"]
                rows.append(name(run.name) + "".join(map(cell, [*told, f"{part.classes:.0%}"])))
    if not rows:
        return ""
    said = (
        "Is a record nearer to a client's synthetic set, or likelier under it, if the client holds it? The control "
        "puts the client's own records in the place of the set, the baseline those of strangers."
    )
    heads = [
        "run",
        "set",
        "AUC by distance",
        "with 95%",
        "by likelihood",
        "nearest is a member",
        "by chance",
        "classes",
    ]
    return f'\n<p class="note">{said}</p>\n' + table(heads, rows, "Synthetic sets")


def _membership(found: Audited) -> str:
    levels = sorted({rate.fpr for _, audit in found for each in audit.curves.values() for rate in each.rates})
    rows = [name(run.name) + row for run, audit in found for row in _reached(audit, levels)]
    if not rows:
        return ""
    told = (
        '\n<p class="note">Attacks that tell from the last weights whether a record was trained on. An area '
        "(AUC) of 0.5 is guessing. The control is the same attack on weights that learnt some members by heart, and "
        "must succeed; the baseline is on the initial weights, and must not. In brackets: too few others to tell such "
        "a rate.</p>\n"
    )
    if apart := [run.name for run, audit in found if audit.curves and audit.others == "test"]:
        told += (
            f'<p class="note">In {escape(", ".join(apart))} members are compared with test records, which may differ '
            "from training records in themselves. Validation records that a recipe holds out do not.</p>\n"
        )
    heads = ["run", "attack", "AUC", "with 95%", *(f"found at {100 * level:g}% false ones" for level in levels)]
    return told + table([*heads, "balanced accuracy"], rows, "Membership")


def _promised(found: Audited) -> str:
    rows = [name(run.name) + row for run, audit in found for row in _promises(audit)]
    if not rows:
        return ""
    said = (
        "An ε that is ruled out is measured, with 95% confidence; one that is charged is proved, unless noise was "
        "fixed. The first above the second contradicts it; below, it proves nothing."
    )
    heads = ["run", "attacked", "ε ruled out", "ε charged", "δ", "by the control", ""]
    return f'\n<p class="note">{said}</p>\n' + table(heads, rows, "Promises")


def _pictures(run: Run) -> str:
    path = run.folder / "figures" / "inversion.svg"
    said = f"{run.name}: records behind messages, what was rebuilt of them, and the nearest test record."
    return figure(image(path, said), said) if path.is_file() else ""


def _reached(audit: Audit, levels: Sequence[float]) -> Iterator[str]:
    """A row an attack."""
    for attack, each in audit.on_members.items():
        rates = {rate.fpr: f"{rate.tpr:.3f}" if rate.resolved else f"({rate.tpr:.3f})" for rate in each.rates}
        found = [rates.get(level, "–") for level in levels]
        cells = [attack, f"{each.auc:.3f}", f"{each.low:.3f} to {each.high:.3f}", *found, f"{each.balanced:.3f}"]
        yield "".join(map(cell, cells))


def _promises(audit: Audit) -> Iterator[str]:
    """A row an ε that was promised, beside those that were ruled out."""
    if audit.epsilon is not None and audit.control:
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
    curves = roc({attack: (each.fpr, each.tpr) for attack, each in audit.curves.items()})
    return figure(svg(curves), f"{run.name}: how many members are found at how many false ones.")
