"""What an audit found, on stdout: the verdict first, then tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from fedveil.attacks.audit import Audit, verdicts
from fedveil.attacks.mechanism import Mechanism
from fedveil.attacks.roc import Figures
from fedveil.attacks.sets import SetExposure
from fedveil.attacks.users import SumAudit
from fedveil.cli.shell import out
from fedveil.cli.show import pairs

if TYPE_CHECKING:
    from fedveil.attacks.exposure import Exposure
    from fedveil.attacks.scores import Range


def show(found: Audit) -> None:
    """Print the verdicts, then a table of each part."""
    told = verdicts(found)
    pairs([(each.verdict, each.sentence) for each in told] + [("left out", why) for why in {*found.left_out.values()}])
    if found.messages:
        out.out("")
        _exposed(found.messages)
    if found.sets:
        out.out("")
        _sets(found.sets)
    if found.control and found.baseline:
        out.out("")
        _members(found, found.control, found.baseline)
    if rows := list(_promises(found)):
        out.out("")
        pairs(rows)


def _exposed(messages: list[Exposure]) -> None:
    """A row for each kind of message, and the guesses and the control below."""
    table = Table("messages", box=None, pad_edge=False, padding=(0, 1))
    for head in ("number", "records", "cosine", "labels", "PSNR", "identified", "exact", "picked"):
        table.add_column(head, justify="right")
    for each in messages:
        near = each.reached
        told = [f"{each.cosine.value:.2f}", _share(each.labels)]
        told += [_number(near.psnr), _share(near.identified), _share(near.exact)] if near else ["–"] * 3
        told.append(_share(each.picked.share if each.picked else None))
        table.add_row(each.kind, str(each.messages), str(each.records), *told)
    for name, near in messages[0].baselines.items():
        told = ["", "", "", "", _number(near.psnr), _share(near.identified), _share(near.exact)]
        table.add_row(f"guess: {name}", *told)
    if control := next((each.control for each in messages if each.control), None):
        told = [str(control.victims), "1", "1.00", _share(control.labels)]
        table.add_row("control", *told, _number(control.psnr), _share(control.identified), _share(control.exact))
    out.print(table)
    for each in messages:
        _paragraph(f"{each.kind}: {each.verdict}. {each.why[:1].upper()}{each.why[1:]}.{_picked(each)}")


def _picked(row: Exposure) -> str:
    """What testing candidates found, if the verdict is about something else."""
    if row.picked is None or row.reached is None:
        return ""
    tested = row.picked
    told = f"Of a list of {tested.candidates:,} candidates, the server picks {tested.share.value:.0%} of the true ones"
    return f" {told} (by chance {tested.chance:.1%})."


def _sets(sets: list[SetExposure]) -> None:
    """A row for the set of a client, its control and its baseline."""
    table = Table("synthetic set", box=None, pad_edge=False, padding=(0, 1))
    for head in ("AUC, nearest", "95%", "AUC, likelihood", "matched", "by chance", "classes"):
        table.add_column(head, justify="right")
    for each in sets:
        rows = {f"client {each.client}": each.found, "baseline": each.baseline, "control": each.control}
        for name, row in rows.items():
            likely = f"{row.likelihood.auc:.3f}" if row.likelihood else "–"
            near = row.nearest
            cells = [f"{near.auc:.3f}", f"{near.low:.3f}–{near.high:.3f}", likely, f"{row.matched:.0%}"]
            table.add_row(name, *cells, f"{row.chance:.0%}", f"{row.classes:.0%}")
    out.print(table)


def _share(value: Range | None) -> str:
    return "–" if value is None else f"{value.value:.0%}"


def _number(value: Range | None) -> str:
    return "–" if value is None else f"{value.value:.1f}"


def _members(found: Audit, control: Figures, baseline: Figures) -> None:
    """A row an attack, then what it means."""
    table = Table("attack", box=None, pad_edge=False, padding=(0, 1))
    for head in ("AUC", "95%", *(f"TPR at\n{rate.fpr:g} FPR" for rate in control.rates), "balanced", "ε ≥"):
        table.add_column(head, justify="right")
    for name, each in [*found.attacks.items(), ("baseline", baseline), ("control", control)]:
        table.add_row(name, *_cells(each))
    out.print(table)
    for note in _notes(found, control, baseline):
        _paragraph(note)


def _promises(found: Audit) -> Iterator[tuple[str, str]]:
    if found.mechanism:
        yield from _mechanism(found.mechanism)
    if found.sums:
        yield from _sums(found.sums)
    if found.epsilon is not None:
        kept = "contradicted" if found.broken else "not contradicted, which proves nothing"
        yield "the run", f"ε = {found.epsilon:.4g} ({found.relation}, proved) at δ = {found.delta:g}: {kept}"


def _paragraph(text: str) -> None:
    out.out("\n" + textwrap.fill(text, out.width))


def _notes(found: Audit, control: Figures, baseline: Figures) -> Iterator[str]:
    from fedveil.attacks.membership import SUCCESS

    others = f"{found.records} members and as many {found.others} records, as many of each class."
    yield f"{others} ε is at δ = {found.delta:g}."
    if found.others == "test":
        yield "Test records may differ from training records in themselves; task.validation holds out some that do not."
    if found.shadows:
        yield f"lira trains {found.shadows} models and knows all these records, but not who is a member: a worst case."
    if coarse := [rate.fpr for rate in found.attacks["loss"].rates if not rate.resolved]:
        yield f"In brackets: no false one is allowed, as {max(coarse):g} of the others would be less than one."
    if control.auc < SUCCESS:
        yield f"The control reaches {control.auc:.2f} only, so what the attacks do not find says nothing."
    if baseline.low > 0.5 or baseline.high < 0.5:
        yield "The baseline is off 0.5: members and others differ in themselves, which is no leak of the run."


def _mechanism(m: Mechanism) -> Iterator[tuple[str, str]]:
    weak = "" if m.best_control > m.epsilon else ", too little to break the promise: use more --canaries"
    yield "canaries", f"{m.canaries} in {m.steps} private gradients; {m.right} of {m.guesses} guesses are right"
    yield "ε ruled out", f"{m.lower:.4g} (measured, 95%) at δ = {m.delta:.3g}"
    if m.curve is not None:
        guesses = f"{m.curve_right} of {m.curve_guesses} guesses"
        yield "by the curve", f"{m.curve:.4g} (measured, 95%, for Gaussian noise) from {guesses}"
    yield "ε charged", f"{m.epsilon:.4g} (add/remove, proved) for the same steps at the same δ"
    yield "noise", f"{m.found:.4g} found, {m.most:.4g} at most (measured); the recipe's is {m.noise:g}"
    yield "control", f"without noise, an ε of {m.best_control:.4g} is ruled out{weak}"


def _sums(s: SumAudit) -> Iterator[tuple[str, str]]:
    weak = "" if s.control > s.epsilon else ", too little to break the promise"
    yield "sums", f"{s.trials} of each of two updates, with the noise of {s.clients} clients"
    yield "ε ruled out", f"{s.lower:.4g} (measured, 95%) at δ = {s.delta:.3g}"
    if s.curve is not None:
        yield "by the curve", f"{s.curve:.4g} (measured, 95%, for Gaussian noise)"
    yield "ε charged", f"{s.epsilon:.4g} ({s.relation}, proved) for one round"
    yield "control", f"without noise, an ε of {s.control:.4g} is ruled out{weak}"


def _cells(each: Figures) -> Iterator[str]:
    yield f"{each.auc:.3f}"
    yield f"{each.low:.3f}–{each.high:.3f}"
    for rate in each.rates:
        yield f"{rate.tpr:.3f}" if rate.resolved else f"({rate.tpr:.3f})"
    yield f"{each.balanced:.3f}"
    yield f"{each.epsilon:.2f}"
