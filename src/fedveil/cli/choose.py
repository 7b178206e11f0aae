"""`fedveil choose`: which measured recipe suits a task, an uplink and a budget."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from fedveil.cli import show
from fedveil.cli.options import DataDir, Fetch, Format, Sets, Shown, Unit, count, option
from fedveil.cli.shell import err, out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fedveil.core.task import Task
    from fedveil.runs.choice import Candidate
    from fedveil.runs.recipe import Recipe

SHOWN = 3
LIKE = "digits/fedavg"


def size(text: str | float) -> float:
    """A number of bytes, such as 100kB."""
    from fedveil.runs.space import parse_size

    try:
        return parse_size(str(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def choose(
    like: Annotated[str, option("--task", "RECIPE", f"Recipe with your task and split; default: {LIKE}.")] = LIKE,
    changes: Sets = None,
    clients: Annotated[int | None, option("--clients", "N", "Number of clients.", parser=count)] = None,
    records: Annotated[int | None, option("--records", "N", "Records of each client.", parser=count)] = None,
    cohort: Annotated[int | None, option("--cohort", "N", "Clients per round.", parser=count)] = None,
    uplink: Annotated[
        float | None, option("--uplink", "SIZE", "Most bytes up per client and round.", parser=size)
    ] = None,
    downlink: Annotated[float | None, option("--downlink", "SIZE", "Most bytes down, alike.", parser=size)] = None,
    total: Annotated[float | None, option("--total", "SIZE", "Most bytes in all, both ways.", parser=size)] = None,
    rounds: Annotated[int | None, option("--rounds", "N", "Most rounds.", parser=count)] = None,
    passes: Annotated[int | None, option("--passes", "N", "Most passes, a client and round.", parser=count)] = None,
    memory: Annotated[float | None, option("--memory", "SIZE", "Most memory of a client.", parser=size)] = None,
    epsilon: Annotated[float | None, option("--epsilon", "E", "Differential privacy with this ε.")] = None,
    delta: Annotated[float | None, option("--delta", "D", "Its δ; default: 1e-5.")] = None,
    unit: Annotated[Unit, option("--unit", "record|client", "What it protects; default: record.")] = Unit.record,
    no_backprop: Annotated[bool, option("--no-backprop", None, "Clients run the model forward only.")] = False,
    secure: Annotated[bool, option("--secure", None, "The server sees sums only.")] = False,
    file: Annotated[Path | None, option("-o", "FILE", "Write the first recipe to this file.")] = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    format: Shown = Format.table,
) -> None:
    """List the recipes that suit a situation, the best first.

    Accuracies are those of measured runs on the digits; bytes, passes, memory and ε are forecast for your task. With
    --records, clients are imagined ones with so many records.

    Example: fedveil choose --uplink 12kB --no-backprop
    """
    from fedveil.runs import choice, recipe

    if epsilon is None and (delta is not None or unit is not Unit.record):
        raise ValueError(f"{'--delta' if delta is not None else '--unit'} is about differential privacy; add --epsilon")
    wish = choice.Wish(
        *(uplink, downlink, total, rounds, passes, memory, epsilon),
        delta=choice.DELTA if delta is None else delta,
        unit=unit.value,
        backprop=not no_backprop,
        secure=secure,
    )
    plan = _population(recipe.read(like, changes or ()), clients, cohort)
    plan, task = choice.placed(plan, plan.load(data_dir, fetch), records)
    table = choice.measured()
    with _progress() as tell:
        found = choice.consider(wish, plan, task, table, tell)
    best = [each for each in found if each.fits]
    if file and best:
        file.write_text(best[0].plan.toml(), encoding="utf-8")
    if format is Format.json:
        situation = _situation(plan, task, records is not None)
        show.as_json({"situation": situation, **_json(found, task, records is not None), "source": table.command})
    elif best:
        _tell(found, plan, task, records is not None, file)
    if not best:
        raise click.ClickException(_nothing(found))


def _population(plan: Recipe, clients: int | None, cohort: int | None) -> Recipe:
    """The recipe with so many clients, and so many of them a round."""
    if clients is not None:
        plan = dataclasses.replace(plan, split=dataclasses.replace(plan.split, clients=clients))
    asked = min(plan.cohort.size, plan.split.clients) if cohort is None else cohort
    if asked > plan.split.clients:
        raise ValueError(f"--cohort is {asked}, but there are {plan.split.clients} clients; lower it")
    return dataclasses.replace(plan, cohort=dataclasses.replace(plan.cohort, size=asked))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], object]]:
    """On a terminal, a line on stderr that tells how many recipes have been looked at."""
    with err.status("looking at measured recipes") as status:
        yield lambda done, of: status.update(f"recipe {done + 1} of {of}")


def _situation(plan: Recipe, task: Task, imagined: bool) -> dict[str, Any]:
    return {
        "data": plan.task.data,
        "model": plan.task.model,
        "weights": task.layout.size,
        "clients": len(task.clients),
        "imagined": imagined,
        "records": task.largest,
        "cohort": plan.cohort.size,
        "split": plan.split.kind,
    }


# ------------------------------------------------------------------------------------------------ as JSON


def _json(found: Sequence[Candidate], task: Task, imagined: bool) -> dict[str, Any]:
    fits = [each for each in found if each.fits]
    return {
        "choices": [_choice(each, fits[0], task, imagined) for each in fits],
        "others": [_other(each) for each in found if not each.fits],
    }


def _other(each: Candidate) -> dict[str, Any]:
    broken = {broken.option: broken.why for broken in each.broken}
    return {"recipe": each.row.name, "failed": each.failed or None, "broken": broken}


def _choice(each: Candidate, first: Candidate, task: Task, imagined: bool) -> dict[str, Any]:
    from fedveil.runs.choice import beyond, proves

    difference = None if each is first else each.row.difference(first.row)
    return {
        "recipe": each.row.name,
        "measured_as": {"recipe": each.row.recipe, "changes": each.row.changes},
        "accuracy": {"mean": each.row.value.mean, "deviation": each.row.value.deviation, "seeds": each.row.value.count},
        "difference": difference and difference.record(),
        "cost": each.told,
        "claims": [{"kind": kind, "sentence": sentence} for kind, sentence in proves(each.plan)],
        "extrapolates": beyond(each, task, imagined),
        "toml": each.plan.toml(),
    }


# ------------------------------------------------------------------------------------------------ in words


def _tell(found: Sequence[Candidate], plan: Recipe, task: Task, imagined: bool, file: Path | None) -> None:
    from rich.filesize import decimal

    from fedveil.core.metrics import ACCURACY

    fits = [each for each in found if each.fits]
    there = _situation(plan, task, imagined)
    out.out(
        f"{there['model']} on {there['data']}, {there['weights']:,} weights; {there['cohort']} of {there['clients']:,} "
        f"clients a round, {there['split']}\n{len(fits)} of {len(found)} measured recipes fit\n"
    )
    rows = [["recipe", "measured\naccuracy", "up", "down", "rounds", "passes", "memory", "ε"]]
    for number, each in enumerate(fits, 1):
        told = each.told or {}
        cells = [each.row.value.show(ACCURACY), decimal(told["up"]["most"]), decimal(told["down"]["most"])]
        cells += [f"{each.plan.rounds}", f"{told['passes']['most']:,}", decimal(each.memory)]
        cells.append("–" if told["epsilon"] is None else f"{told['epsilon']:.3g}")
        rows.append([f"{number} {each.row.name}", *cells])
    show.columns(rows)
    _paragraph("up, down, passes: at most, per client and round; memory: of a client, estimated")
    for number, each in enumerate(fits[:SHOWN], 1):
        out.out(f"\n{number}. {each.row.name}")
        for head, text in _words(each, fits, task, imagined):
            _paragraph(text, f"   {head}: ")
    if len(found) > len(fits):
        out.out("\nOthers do not fit:")
        for reason in _reasons(found):
            _paragraph(reason, "   ")
    out.out("")
    written = f"The first recipe is in {file}; 'fedveil run {file}' trains it."
    _paragraph(written if file else "-o FILE writes the first recipe to a file, for 'fedveil run FILE'.")


def _words(each: Candidate, fits: Sequence[Candidate], task: Task, imagined: bool) -> Iterator[tuple[str, str]]:
    """Why, what it proves, and how far the figures are extrapolated."""
    from fedveil.core.metrics import ACCURACY
    from fedveil.runs.choice import beyond, proves

    yield "why", _why(each, fits, ACCURACY)
    changes = " ".join(f"--set {_quoted(change)}" for change in each.row.changes)
    yield "measured as", f"{each.row.recipe} {changes}".strip()
    for kind, sentence in proves(each.plan):
        yield kind, sentence
    for sentence in beyond(each, task, imagined):
        yield "extrapolates", sentence


def _why(each: Candidate, fits: Sequence[Candidate], metric: Any) -> str:
    """What decided its place."""
    from fedveil.runs.choice import unbeaten

    if each is not fits[0]:
        difference = each.row.difference(fits[0].row)
        return f"compared with the first, {difference.show(metric)}" if difference else "it fits"
    alike = len(unbeaten(fits))
    if alike == 1:
        return "it is more accurate than all others that fit" if len(fits) > 1 else "no other one fits"
    return f"no other one that fits is seen to be more accurate, and of {alike} such recipes it moves the fewest bytes"


def _quoted(change: str) -> str:
    key, _, value = change.partition("=")
    number = re.fullmatch(r"-?\d+\.\d{4,}(e-?\d+)?", value)
    return f"{key}={float(value):.4g}" if number else change


def _reasons(found: Sequence[Candidate]) -> list[str]:
    """Why recipes do not fit: by option, how many and which come nearest."""
    others = [each for each in found if not each.fits]
    by_option = Counter(broken.option for each in others for broken in each.broken)
    told = []
    for name, number in by_option.most_common():
        only = [f"{each.row.name} {b.why}" for each in others for b in each.broken if b.option == name]
        named = "; ".join(only[:SHOWN]) + ("; …" if len(only) > SHOWN else "")
        told.append(f"{name}: {number} ({named})")
    if failed := [each for each in others if each.failed]:
        told += [f"{each.row.name}: {each.failed}" for each in failed[:SHOWN]]
        told += [f"… and {len(failed) - SHOWN} more that cannot run here"] * (len(failed) > SHOWN)
    return told


def _nothing(found: Sequence[Candidate]) -> str:
    """Why nothing fits, and which single option is in the way."""
    if near := next((each for each in found if len(each.broken) == 1), None):
        broken = near.broken[0]
        return (
            f"no measured recipe fits; {near.row.name} comes nearest, and {broken.option} excludes it: it {broken.why}"
        )
    reasons = "; ".join(_reasons(found))
    return f"no measured recipe fits: {reasons}" if reasons else "no measured recipe is for such a split"


def _paragraph(text: str, head: str = "") -> None:
    indent = " " * min(len(head), 6)
    out.out(textwrap.fill(head + text, out.width, subsequent_indent=indent, break_on_hyphens=False))
