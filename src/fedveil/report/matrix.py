"""The page of a matrix of attacks: a table in Markdown, and pictures of what was rebuilt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from fedveil.report.figures import gallery

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.attacks.exposure import Exposure
    from fedveil.attacks.matrix import Matrix, Row
    from fedveil.attacks.scores import Range

HEADS = (
    "what clients send",
    "records",
    "attacked",
    "bytes",
    "ε",
    "cosine",
    "labels",
    "PSNR",
    "identified",
    "exact",
    "",
)
WORDS = {  # the columns, for the page
    "records": "behind each message; a sum is of the records of all clients",
    "attacked": "what the server makes of a message, see [kinds](#kinds)",
    "bytes": "a client sends in all rounds",
    "cosine": "of the estimate with the client's true gradient or update",
    "labels": "the share of records whose class was found",
    "PSNR": "of the rebuilt pictures, in dB; higher is nearer",
    "identified": "the share of records that the rebuilt picture tells from up to 999 others",
    "exact": "the share of records rebuilt with an error below 1e-4 of the data's variance",
}


def name(row: Row) -> str:
    return row.case


def cells(row: Row) -> list[str]:
    """A row of the table behind its name."""
    found, epsilon = row.exposure, "" if row.epsilon is None else f"{row.epsilon:.3g}"
    if found is None:
        return [str(row.records), "–", f"{row.bytes_up:,}", epsilon, *["–"] * 5, "nothing to attack"]
    near = found.reached
    told = [f"{found.cosine.value:.2f}", _share(found.labels)]
    told += [_ranged(near.psnr), _share(near.identified), _share(near.exact)] if near else ["–"] * 3
    return [str(found.records or row.records), found.kind, f"{row.bytes_up:,}", epsilon, *told, found.verdict]


def markdown(matrix: Matrix, kinds: Mapping[str, str], pictures: str) -> str:
    """The page. `kinds` says what each kind of estimate is, `pictures` is the file with pictures."""
    lines = [*_row(HEADS), *(line for row in matrix.rows for line in _row([name(row), *cells(row)])[:1])]
    columns = "\n".join(f"- **{head}**: {words}" for head, words in WORDS.items())
    used = {row.exposure.kind for row in matrix.rows if row.exposure}
    about = "\n".join(f"- **{kind}**: {words}" for kind, words in kinds.items() if kind in used)
    baselines = "\n".join(_baselines(matrix.rows))
    control = matrix.control
    return f"""# What messages expose: {matrix.data}

`{matrix.environment.get("command", "")}` ({matrix.environment.get("machine", "")}, PyTorch
{matrix.environment.get("torch", "")}{_commit(matrix)}). The network is {matrix.model}. It has random weights, unless
a row says otherwise. Ten clients hold one or eight records each, which favours the attacker. The server is honest but
curious.

Everything here is **measured**: "found" means that this attack rebuilds records, "not found" that this attack does not,
which is no proof that another one cannot. On raw gradients of single records (the control), it identifies
{_share(control.identified)} of the records and rebuilds {_share(control.exact)} exactly.

{chr(10).join(lines)}

{columns}

Intervals (95%, over messages), verdicts in words and settings are in `matrix.json`.

## Kinds

{about}

## Guesses

What is reached without any message, from test records: by the mean record, by a random one, and by the one nearest to
the truth, which no attacker can pick.

{baselines}

## Pictures

![Records, what was rebuilt of them, and the nearest test record]({pictures})
"""


def _commit(matrix: Matrix) -> str:
    return f", commit {matrix.environment['commit']}" if "commit" in matrix.environment else ""


def _row(cells: Sequence[str]) -> list[str]:
    """A line of a table; for the heads with the line below."""
    line = "| " + " | ".join(cells) + " |"
    return [line, "|" + " --- |" * 3 + " ---: |" * (len(cells) - 4) + " --- |"] if tuple(cells) == HEADS else [line]


def _baselines(rows: Sequence[Row]) -> Iterator[str]:
    yield "| records | guess | PSNR | identified |\n| ---: | --- | ---: | ---: |"
    seen: set[int] = set()
    for row in rows:
        found: Exposure | None = row.exposure
        if found and found.records not in seen and found.baselines:
            seen.add(found.records)
            for guess, near in found.baselines.items():
                yield f"| {found.records} | {guess} | {_ranged(near.psnr)} | {_share(near.identified)} |"


def _share(value: Range | None) -> str:
    return "–" if value is None else f"{value.value:.0%}"


def _ranged(value: Range | None) -> str:
    return "–" if value is None else f"{value.value:.1f}"


def album(pictures: Mapping[str, Sequence[Tensor]]) -> Figure:
    """Lines of pictures: for each number of records the true ones, the nearest test records, and what each row rebuilt.

    pictures: by the title of a row, true records, rebuilt ones and the nearest others
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for title, (true, found, nearest) in pictures.items():
        records = title.rpartition(", ")[2]
        heads = {f"true records, {records}": true, f"nearest test records, {records}": nearest}
        groups.setdefault(records, heads)[title] = found
    return gallery({title: images for lines in groups.values() for title, images in lines.items()})
