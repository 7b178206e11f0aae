"""Results on stdout: figures as JSON or in columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.filesize import decimal
from rich.table import Table

from fedveil.cli.options import Format
from fedveil.cli.shell import out

if TYPE_CHECKING:
    from fedveil.cli.jobs import Job
    from fedveil.cli.many import Variant


def as_json(value: Any) -> None:
    out.out(msgspec.json.format(msgspec.json.encode(_short(value)), indent=2).decode())


def _short(value: Any) -> Any:
    """The same with six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, (list, tuple)) else value


def summary(figures: Mapping[str, Any], format: Format) -> None:
    """What came of one run."""
    if format is Format.json:
        as_json(figures)
    else:
        pairs((key.replace("_", " "), value) for key, value in figures.items() if value is not None)


def pairs(rows: Iterable[tuple[str, object]]) -> None:
    """Two columns, the second one wrapped between words."""
    from fedveil.core.ledger import figure

    shown = [(left, str(x).lower() if x is None or isinstance(x, bool) else figure(x)) for left, x in rows]
    width = max(len(left) for left, _ in shown) + 2
    for left, right in shown:
        lines = textwrap.wrap(right, max(out.width - width, 20), break_long_words=False, break_on_hyphens=False)
        out.out(left.ljust(width) + ("\n" + " " * width).join(lines))


def cost(told: Mapping[str, Any]) -> None:
    """What a run will cost: bytes and passes in a table, then the rest."""
    rows = {"bytes sent": told["up"], "bytes received": told["down"], "passes": told["passes"]}
    rounds = f"{told['rounds']} round{'s' if told['rounds'] > 1 else ''}"
    out.out(f"{told['method']}, {rounds}, {told['weights']:,} weights\n")
    table = Table("", box=None, pad_edge=False, padding=(0, 1))
    for head in ("a client and round", "in all", "FedAvg in all", "times less"):
        table.add_column(head, justify="right")
    for name, row in rows.items():
        each = f"{row['least']:,}" + (f" to {row['most']:,}" if row["most"] > row["least"] else "")
        ratio = (f"{row['fedavg']:,}", f"{row['ratio']:.3g}") if "fedavg" in row else ()
        table.add_row(name, each, f"{row['total']:,}", *ratio)
    out.print(table)
    memory = told["memory_estimate"]
    weights, activations = (decimal(memory[part]) for part in ("weights", "activations"))
    notes = [
        f"Estimate: a client needs about {weights} for weights and {activations} for activations.",
        "A pass is one record run forward and backward. FedAvg is with full weights both ways.",
    ]
    for note in [*notes, *told["notes"]]:
        out.out("\n" + textwrap.fill(note, out.width))


def comparison(jobs: Sequence[Job], called: Sequence[str] = ()) -> None:
    """A row a run; ε, the tighter one beside it and their neighbouring relation if any run has one."""
    table, summaries = Table(box=None, pad_edge=False, collapse_padding=True), [job.summary() for job in jobs]
    table.add_column("run", overflow="fold")
    private = any(s["epsilon"] is not None for s in summaries)
    promise = ["ε", "by PLD", "relation"] if private else []
    names = list(dict.fromkeys(job.ledger.primary.words for job in jobs))
    for head in (
        names[0] if len(names) == 1 else "metric",
        "up per\nclient\nand round",
        "up in all",
        *promise,
        "seconds",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    called = called or [job.path.name for job in jobs]
    for head, job, s in zip(called, jobs, summaries, strict=True):
        sent = decimal(round(s["bytes_up_per_client_round"])), decimal(s["bytes_up"])
        shown = ("–" if s[key] is None else f"{s[key]:.4g}" for key in ("value", "epsilon", "epsilon_pld"))
        value, *epsilons = shown
        value = value if len(names) == 1 else f"{job.ledger.primary.words} {value}"
        promised = [*epsilons, s["relation"] or "–"] if private else []
        table.add_row(head, value, *sent, *promised, f"{s['seconds']:.3g}")
    out.print(table)


def variants(found: Sequence[Variant], page: str | None, format: Format) -> None:
    """What came of several runs: a row a run, or with seeds a row a recipe."""
    from fedveil.runs import statistics

    begun = [(each, seed, job) for each in found for seed, job in each.jobs.items() if job.ledger.rows]
    each_recipe = [each.repeats for each in found if each.repeated and each.repeats.ledgers]
    if format is Format.json:
        told: dict[str, Any] = {"runs": [job.summary() | {"recipe": v.name, "seed": s} for v, s, job in begun]}
        if each_recipe:
            told["recipes"] = [each.record(each_recipe[0]) for each in each_recipe]
        as_json(told | {"report": page})
    elif each_recipe:
        columns(statistics.table(each_recipe))
        out.out("\n" + textwrap.fill(statistics.note(each_recipe), out.width))
    else:
        comparison([job for *_, job in begun], [each.name for each, *_ in begun])


def columns(rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column may be folded, and whose others are numbers."""
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(rows[0][0], overflow="fold")
    for head in rows[0][1:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    out.print(table)
