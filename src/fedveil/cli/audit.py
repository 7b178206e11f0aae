"""`fedveil audit`: attacks on a finished run, and on many methods alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from fedveil.cli import show
from fedveil.cli.options import Format, Shown, argument, option
from fedveil.cli.shell import err, say
from fedveil.gpu.context import LINE_EVERY, using

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.attacks.audit import Audit
    from fedveil.attacks.exposure import Attack
    from fedveil.attacks.seen import Seen
    from fedveil.cli.jobs import Job
    from fedveil.core.task import Task
    from fedveil.runs.checkpoint import Saved
    from fedveil.runs.messages import Truths

DELTA = 1e-5  # where a recipe has none
BROKEN = 1
ALL = "all"

Tell = Callable[[str], object]
Drawn = dict[str, "dict[str, Tensor]"]  # pictures of a kind of message, by what they are


@dataclass(frozen=True)
class _Asked:
    """What was asked for: the parts, whether they were named and must be possible, and the options of each."""

    parts: Sequence[str]
    named: bool
    how: Attack
    records: int
    canaries: int
    answers: int
    shadows: int


def audit(
    path: Annotated[Path | None, argument("[DIR]")] = None,
    attacks: Annotated[str, option("--attacks", "NAMES", "all, or some of inversion,images,membership,dp.")] = ALL,
    seconds: Annotated[
        float, option("--budget-seconds", "S", "Time for attacks on messages; default: 120, matrix: 300 a row.")
    ] = 0,
    victims: Annotated[int, option("--victims", "N", "Messages of a kind that are attacked; default: 8.")] = 8,
    records: Annotated[int, option("--records", "N", "Maximum number of members; default: 10000.")] = 10_000,
    canaries: Annotated[int, option("--canaries", "M", "Canaries in private gradients; default: 4000.")] = 4000,
    answers: Annotated[int, option("--answers", "N", "Answers with canaries; default: 1.")] = 1,
    shadows: Annotated[int, option("--shadows", "N", "Shadow models that are trained for LiRA; default: 16.")] = 16,
    matrix: Annotated[str | None, option("--matrix", "digits", "Attack many methods alike, without a DIR.")] = None,
    only: Annotated[list[str] | None, option("--only", "TEXT", "Rows of the matrix with this in their title.")] = None,
    folder: Annotated[Path | None, option("--out", "DIR", "Folder of the matrix; default: runs/matrix-digits.")] = None,
    format: Shown = Format.table,
) -> None:
    """Attack the run in DIR: rebuild records, infer membership and test its ε.

    inversion and images attack kept messages ('fedveil run --keep-messages'), membership the last weights, and dp the
    promised ε. The exit code is 1 if a result contradicts ε. The figures go to audit.json and figures/ in DIR.

    --matrix runs and attacks many methods and defences on the same records, and writes a page. It goes on from the rows
    that are there.

    Example: fedveil audit runs/demo/digits-fedavg
    """
    from fedveil.attacks import shadow
    from fedveil.attacks.audit import PARTS
    from fedveil.attacks.exposure import Attack

    shadow.validate(shadows)
    if records < 100 or answers < 1 or victims < 1 or seconds < 0:
        raise ValueError("--records is at least 100, --answers and --victims at least 1, and --budget-seconds above 0")
    if (path is None) == (matrix is None):
        raise ValueError("give the folder of a run, or --matrix digits, and not both")
    chosen = PARTS if attacks == ALL else tuple(attacks.split(","))
    if wrong := [each for each in chosen if each not in PARTS]:
        raise ValueError(f"--attacks has '{wrong[0]}'; use all, or some of {','.join(PARTS)}")
    if matrix is not None:
        how = Attack(victims=victims, seconds=seconds or 300)
        return _matrix(matrix, folder or Path("runs") / f"matrix-{matrix}", only or (), how, format)
    assert path
    how = Attack(victims=victims, seconds=seconds or 120)
    _run(path, _Asked(chosen, attacks != ALL, how, records, canaries, answers, shadows), format)


def _matrix(name: str, folder: Path, only: Sequence[str], how: Attack, format: Format) -> None:
    import shlex
    import sys

    from fedveil.cli import matrix
    from fedveil.runs.fingerprint import environment

    told = environment(command=shlex.join(["fedveil", *sys.argv[1:]]))
    with _progress() as tell:
        done = matrix.run(name, folder, only, how, 0, told, tell)
    if format is Format.json:
        show.as_json(msgspec.to_builtins(done))
    else:
        matrix.table(done)
    say(f"the page is {folder / matrix.PAGE}")


def _run(path: Path, asked: _Asked, format: Format) -> None:
    """Audit the run in a folder."""
    from fedveil.cli import audited
    from fedveil.cli.jobs import Job

    job = Job.held(path)
    saved = job.checkpoint()
    if job.where.insecure_test_noise:
        say("warning: the private randomness of this run was fixed, so that its noise protects nobody")
    with _progress() as tell:
        found, pictures = _audited(job, saved, asked, tell)
    _write(path, found, pictures)
    if format is Format.json:
        show.as_json(msgspec.to_builtins(found))
    else:
        audited.show(found)
    for sentence in found.broken:
        say(f"broken: {sentence}")
    if found.broken:
        raise typer.Exit(BROKEN)


def _audited(job: Job, saved: Saved, asked: _Asked, tell: Tell) -> tuple[Audit, Drawn]:
    from fedveil.attacks import mechanism, membership, shadow, users
    from fedveil.attacks.audit import Audit
    from fedveil.core.loop import trained_task
    from fedveil.core.seeds import Seed
    from fedveil.core.setup import private_root

    plan = job.recipe
    begun = plan.on(job.data(False, {}), job.where.device)
    task = trained_task(begun, saved.state)
    w, seed = saved.state.weights.to(task.device), Seed.root(plan.seed).child("audit")
    if w.shape != task.initial.shape:
        raise ValueError(f"{job.path} holds {w.numel()} weights, its recipe's model has {task.layout.size}")
    promise: Any = plan.method.promise
    delta = promise.delta if promise else DELTA
    epsilon = max((row.epsilon for row in job.ledger.rows if row.epsilon is not None), default=None)
    clients = membership.took_part(job.ledger.rows)
    if not clients:
        raise ValueError(f"in {job.path} no client took part, so there are no members to find")
    found = Audit(
        saved.round, 0, delta, epsilon, {}, None, None, None, [], relation=promise.relation if promise else None
    )
    pictures: Drawn = {}
    if {"inversion", "images"} & {*asked.parts}:
        found, pictures = _messages(job, begun, asked, found, tell)
    if "membership" in asked.parts:
        kind = "validation" if plan.task.validation else "test"
        local = shadow.training(plan.method, job.ledger.rows, task, clients)
        reached = membership.attack(
            task, w, clients, seed, delta, asked.records, tell, kind=kind, local=local, shadows=asked.shadows
        )
        told = {"attacks": reached.attacks, "control": reached.control, "baseline": reached.baseline}
        found = msgspec.structs.replace(found, records=reached.records, others=kind, shadows=asked.shadows, **told)
    if "dp" in asked.parts:
        why = mechanism.unsupported(plan.method) if promise and promise.key == "privacy" else ""
        if asked.named and (why or not promise):
            raise ValueError(why or f"--attacks has dp, but {job.path} promises no ε; leave dp out")
        if why:
            found = msgspec.structs.replace(found, left_out=found.left_out | {"dp": why})
        elif promise and promise.key == "privacy":
            secret = private_root(plan.seed).child("audit") if job.where.insecure_test_noise else None
            canary = mechanism.audit(task, plan.method, w, seed, secret, asked.canaries, asked.answers, tell)
            found = msgspec.structs.replace(found, mechanism=canary)
        if secure := plan.method.noised_sum:
            tell("noised sums of two updates")
            size = min(plan.cohort.size, len(task.clients))
            sums = users.audit(promise, secure, plan.method.summed_numbers(task), size, seed)
            found = msgspec.structs.replace(found, sums=sums)
    broken = [sentence for each in (found.mechanism, found.sums) if each for sentence in each.broken()]
    if epsilon is not None:
        broken += [
            f"the attack by {name} rules out every ε below {each.epsilon:.4g}, but {epsilon:.4g} is charged"
            for name, each in found.attacks.items()
            if each.epsilon > epsilon
        ]
    return msgspec.structs.replace(found, broken=broken), pictures


def _messages(job: Job, task: Task, asked: _Asked, found: Audit, tell: Tell) -> tuple[Audit, Drawn]:
    """Attack the messages that a folder keeps. What is not possible is left out, or a ValueError where it is named."""
    from fedveil.attacks import exposure, sets
    from fedveil.attacks.estimate import nothing
    from fedveil.attacks.seen import view
    from fedveil.core.seeds import Seed
    from fedveil.runs.messages import kept_rounds, read_round, read_truth

    left_out: dict[str, str] = {}

    def leave(part: str, why: str) -> None:
        if asked.named:
            raise ValueError(why)
        left_out[part] = why

    try:
        numbers = kept_rounds(job.path)
    except ValueError as error:
        for part in [part for part in ("inversion", "images") if part in asked.parts]:
            leave(part, str(error))
        return msgspec.structs.replace(found, left_out=left_out), {}
    method = job.recipe.method
    method.init_state(task)
    rounds = [read_round(job.path, number, method) for number in numbers]
    seen: Seen = view("server", task, method, Seed.root(job.recipe.seed), rounds)
    truths: Truths = {number: read_truth(job.path, number) for number in numbers}
    pictures: Drawn = {}
    if "inversion" in asked.parts:
        made = exposure.attempts(seen, asked.how, tell)
        if not made:
            leave("inversion", nothing(method) or f"the messages of {method.name} say nothing about a gradient")
        else:
            control = None
            if any(each.found for each in made):
                control = exposure.control(task, asked.how.inversion, seen.seed.child("audit", "control"), tell)
            rows, drawn = exposure.scored(task, seen, made, truths, control)
            found = msgspec.structs.replace(found, messages=rows)
            pictures = {
                kind: {"true": p.true, "rebuilt": p.found, "nearest other": p.nearest} for kind, p in drawn.items()
            }
    if "images" in asked.parts:
        if not sets.has_sets(seen):
            if asked.named:
                leave("images", f"the messages of {method.name} hold no synthetic records; leave images out")
        else:
            tell("synthetic sets")
            found = msgspec.structs.replace(found, sets=[sets.exposed(task, seen, truths)])
    return msgspec.structs.replace(found, left_out=left_out), pictures


def _write(path: Path, found: Audit, pictures: Drawn) -> None:
    from fedveil.report.figures import gallery, roc, svg

    (path / "audit.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    (path / "figures").mkdir(exist_ok=True)
    if found.curves:
        curves = svg(roc({name: (each.fpr, each.tpr) for name, each in found.curves.items()}))
        (path / "figures" / "audit.svg").write_text(curves, encoding="utf-8")
    lines = {f"{kind}: {name}": images for kind, each in pictures.items() for name, images in each.items()}
    if lines and next(iter(lines.values())).dim() == 4:
        (path / "figures" / "inversion.svg").write_text(svg(gallery(lines)), encoding="utf-8")


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
