"""`fedveil audit`: attacks on a finished run."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from fedveil.cli import show
from fedveil.cli.options import Format, Shown, argument, option
from fedveil.cli.shell import err, out, say
from fedveil.gpu.context import LINE_EVERY, using

if TYPE_CHECKING:
    from fedveil.attacks.mechanism import Mechanism
    from fedveil.attacks.membership import Audit
    from fedveil.attacks.roc import Figures
    from fedveil.attacks.users import SumAudit
    from fedveil.cli.jobs import Job
    from fedveil.runs.checkpoint import Saved

DELTA = 1e-5  # where a recipe has none
BROKEN = 1


def audit(
    path: Annotated[Path, argument("DIR")],
    records: Annotated[int, option("--records", "N", "Maximum number of members; default: 10000.")] = 10_000,
    canaries: Annotated[int, option("--canaries", "M", "Canaries in private gradients; default: 4000.")] = 4000,
    answers: Annotated[int, option("--answers", "N", "Answers with canaries; default: 1.")] = 1,
    format: Shown = Format.table,
) -> None:
    """Attack the run in DIR: infer membership and test its ε.

    The attack infers membership from the last weights. With method.privacy, it also adds canaries to a client's records
    and looks for them in its answers. With noise inside a secure sum, it tries to tell two noised sums apart.
    The exit code is 1 if a result contradicts ε. The figures go to audit.json and figures/audit.svg in DIR.

    Example: fedveil audit runs/demo/digits-fedavg
    """
    from fedveil.cli.jobs import Job

    if records < 100 or answers < 1:
        raise ValueError("--records is at least 100 and --answers at least 1")
    job = Job.held(path)
    saved = job.checkpoint()
    if job.where.insecure_test_noise:
        say("warning: the private randomness of this run was fixed, so that its noise protects nobody")
    with _progress() as tell:
        found = _audited(job, saved, records, canaries, answers, tell)
    _write(path, found)
    if format is Format.json:
        show.as_json(msgspec.to_builtins(found))
    else:
        _show(found)
    for sentence in found.broken:
        say(f"broken: {sentence}")
    if found.broken:
        raise typer.Exit(BROKEN)


def _audited(job: Job, saved: Saved, records: int, canaries: int, answers: int, tell: Callable[[str], object]) -> Audit:
    from fedveil.attacks import mechanism, membership, users
    from fedveil.core.loop import trained_task
    from fedveil.core.seeds import Seed
    from fedveil.core.setup import private_root

    plan = job.recipe
    task = plan.on(job.data(False, {}), job.where.device)
    task = trained_task(task, saved.state)
    w, seed = saved.state.weights.to(task.device), Seed.root(plan.seed).child("audit")
    if w.shape != task.initial.shape:
        raise ValueError(f"{job.path} holds {w.numel()} weights, its recipe's model has {task.layout.size}")
    promise: Any = plan.method.promise
    delta = promise.delta if promise else DELTA
    epsilon = max((row.epsilon for row in job.ledger.rows if row.epsilon is not None), default=None)
    clients = membership.took_part(job.ledger.rows)
    if not clients:
        raise ValueError(f"in {job.path} no client took part, so there are no members to find")
    reached = membership.attack(task, w, clients, seed, delta, records, tell)
    canary = None
    if promise and promise.key == "privacy":
        secret = private_root(plan.seed).child("audit") if job.where.insecure_test_noise else None
        canary = mechanism.audit(task, plan.method, w, seed, secret, canaries, answers, tell)
    sums = None
    if secure := plan.method.noised_sum:
        tell("noised sums of two updates")
        size = min(plan.cohort.size, len(task.clients))
        sums = users.audit(promise, secure, plan.method.summed_numbers(task), size, seed)
    count, attacks, control, baseline = reached
    broken = [sentence for each in (canary, sums) if each for sentence in each.broken()]
    if epsilon is not None:
        broken += [
            f"the attack by {name} rules out every ε below {each.epsilon:.4g}, but {epsilon:.4g} is charged"
            for name, each in attacks.items()
            if each.epsilon > epsilon
        ]
    relation = promise.relation if promise else None
    return membership.Audit(
        saved.round, count, delta, epsilon, attacks, control, baseline, canary, broken, relation, sums
    )


def _write(path: Path, found: Audit) -> None:
    from fedveil.report.figures import roc, svg

    (path / "audit.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    (path / "figures").mkdir(exist_ok=True)
    drawn = {**found.attacks, "control": found.control}
    curves = svg(roc({name: (each.fpr, each.tpr) for name, each in drawn.items()}))
    (path / "figures" / "audit.svg").write_text(curves, encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- what is told


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """What is being done, on stderr: a line that renews itself on a terminal, elsewhere one every few seconds."""
    told, doing = time.monotonic(), ""

    def tell(sentence: str) -> None:
        nonlocal told, doing
        doing = sentence
        line.update(sentence)
        if not err.is_terminal and time.monotonic() - told >= LINE_EVERY:
            told = time.monotonic()
            err.print(sentence, soft_wrap=True)

    def step(done: int, total: int) -> None:
        tell(f"{doing.partition('  ')[0]}  step {done}/{total}")

    with err.status("", spinner="dots") as line, using(observer=step):
        yield tell


def _show(found: Audit) -> None:
    """A row an attack, then what it means."""
    table = Table("attack", box=None, pad_edge=False, padding=(0, 1))
    for head in ("AUC", "95%", *(f"TPR at\n{rate.fpr:g} FPR" for rate in found.control.rates), "balanced", "ε ≥"):
        table.add_column(head, justify="right")
    for name, each in [*found.attacks.items(), ("baseline", found.baseline), ("control", found.control)]:
        table.add_row(name, *_cells(each))
    out.print(table)
    for note in _notes(found):
        out.out("\n" + textwrap.fill(note, out.width))
    rows = [] if found.mechanism is None else list(_mechanism(found.mechanism))
    rows += [] if found.sums is None else _sums(found.sums)
    if found.epsilon is not None:
        kept = "contradicted" if found.broken else "not contradicted, which proves nothing"
        rows.append(("the run", f"ε = {found.epsilon:.4g} ({found.relation}, proved) at δ = {found.delta:g}: {kept}"))
    if rows:
        out.out("")
        show.pairs(rows)


def _notes(found: Audit) -> Iterator[str]:
    from fedveil.attacks.membership import SUCCESS

    yield f"{found.records} members and as many others, as many of each class. ε is at δ = {found.delta:g}."
    if coarse := [rate.fpr for rate in found.attacks["loss"].rates if not rate.resolved]:
        yield f"In brackets: no false one is allowed, as {max(coarse):g} of the others would be less than one."
    if found.control.auc < SUCCESS:
        yield f"The control reaches {found.control.auc:.2f} only, so what the attacks do not find says nothing."
    if found.baseline.low > 0.5 or found.baseline.high < 0.5:
        yield "The baseline is off 0.5: members and others differ in themselves, which is no leak of the run."


def _mechanism(m: Mechanism) -> Iterator[tuple[str, str]]:
    weak = "" if m.control > m.epsilon else ", too little to break the promise: use more --canaries"
    yield "canaries", f"{m.canaries} in {m.steps} private gradients; {m.right} of {m.guesses} guesses are right"
    yield "ε ruled out", f"{m.lower:.4g} (measured, 95%) at δ = {m.delta:.3g}"
    yield "ε charged", f"{m.epsilon:.4g} (add/remove, proved) for the same steps at the same δ"
    yield "noise", f"{m.found:.4g} found, {m.most:.4g} at most (measured); the recipe's is {m.noise:g}"
    yield "control", f"without noise, an ε of {m.control:.4g} is ruled out{weak}"


def _sums(s: SumAudit) -> Iterator[tuple[str, str]]:
    weak = "" if s.control > s.epsilon else ", too little to break the promise"
    yield "sums", f"{s.trials} of each of two updates, with the noise of {s.clients} clients"
    yield "ε ruled out", f"{s.lower:.4g} (measured, 95%) at δ = {s.delta:.3g}"
    yield "ε charged", f"{s.epsilon:.4g} ({s.relation}, proved) for one round"
    yield "control", f"without noise, an ε of {s.control:.4g} is ruled out{weak}"


def _cells(each: Figures) -> Iterator[str]:
    yield f"{each.auc:.3f}"
    yield f"{each.low:.3f}–{each.high:.3f}"
    for rate in each.rates:
        yield f"{rate.tpr:.3f}" if rate.resolved else f"({rate.tpr:.3f})"
    yield f"{each.balanced:.3f}"
    yield f"{each.epsilon:.2f}"
