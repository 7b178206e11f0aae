"""`fedveil audit --matrix`: one attack on many methods, a table of what their messages expose, and pictures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from rich.table import Table
from torch import Tensor

from fedveil.attacks import matrix
from fedveil.attacks.estimate import KINDS
from fedveil.attacks.exposure import Attack, Pictures
from fedveil.attacks.matrix import Case, Matrix, Row
from fedveil.cli.shell import out, say
from fedveil.core.files import write
from fedveil.core.seeds import Seed
from fedveil.data import load
from fedveil.report import matrix as report
from fedveil.report.figures import svg

MATRICES = ("digits",)
FILE, PAGE, DRAWN, PICTURES = "matrix.json", "matrix.md", "matrix.svg", "pictures.safetensors"

Tell = Callable[[str], object]


def run(
    name: str, folder: Path, only: Sequence[str], how: Attack, seed: int, environment: dict[str, Any], tell: Tell
) -> Matrix:
    """Run and attack the rows of a matrix, but for those that `folder` holds already, and write its page.

    only: parts of the titles of rows; empty for all
    """
    if name not in MATRICES:
        raise ValueError(f"--matrix is '{name}'; use {' or '.join(MATRICES)}")
    data, root = load(name), Seed.root(seed)
    cases = list(matrix.cases())
    wanted = [case for case in cases if not only or any(part in title(case) for part in only)]
    if not wanted:
        raise ValueError(f"no row of the matrix has {' or '.join(map(repr, only))} in its name; leave --only out")
    folder.mkdir(parents=True, exist_ok=True)
    settings = dataclasses.asdict(how) | {"seed": seed}
    done = _held(folder, settings)
    if done is None:
        checked = matrix.checked(data, root, how, tell)
        done = matrix.Matrix(name, matrix.MODEL, settings, environment, checked, [])
    order = {title(case): place for place, case in enumerate(cases)}
    for case in wanted:
        if any(title(row) == title(case) for row in done.rows):
            continue
        began = time.monotonic()
        task = matrix.task_of(case, data, root)
        rows, pictures = matrix.attacked(case, task, root, how, done.control, tell)
        kept = sorted([*done.rows, *rows], key=lambda row: order[title(row)])
        done = msgspec.structs.replace(done, rows=kept)
        _keep(folder, title(case), pictures)
        _write(folder, done)
        told = rows[0].exposure.verdict if rows[0].exposure else "nothing to attack"
        say(f"{title(case)}: {told} ({time.monotonic() - began:.0f} s)")
    _write(folder, done)  # the page is that of this version
    return done


def title(row: Case | Row) -> str:
    """The name of a row with the number of records behind a message."""
    name = row.case if hasattr(row, "case") else row.name
    return f"{name}, {row.records} record{'s' if row.records > 1 else ''}"


def table(done: Matrix) -> None:
    """Print a row for each attack."""
    shown = Table("what clients send", box=None, pad_edge=False, padding=(0, 1))
    for head in ("n", "cosine", "labels", "PSNR", "found", "exact"):
        shown.add_column(head, justify="right")
    shown.add_column("verdict", no_wrap=True)
    for row in done.rows:
        cells = report.cells(row)
        shown.add_row(row.case, cells[0], *cells[4:])
    out.print(shown)


def _held(folder: Path, settings: dict[str, Any]) -> Matrix | None:
    """The rows that are there already; a folder of other settings is a ValueError."""
    if not (folder / FILE).is_file():
        return None
    try:
        held = msgspec.json.decode((folder / FILE).read_bytes(), type=Matrix)
    except msgspec.DecodeError as error:
        raise ValueError(f"{folder / FILE} is damaged: {error}; delete it or choose another --out") from None
    if held.settings != msgspec.json.decode(msgspec.json.encode(settings)):
        raise ValueError(f"{folder} holds a matrix with other settings; choose another --out")
    return held


def _keep(folder: Path, name: str, pictures: Mapping[str, Pictures]) -> None:
    """Add a row's pictures to those in the folder, in 8 bits."""
    held = _pictures(folder)
    for each in pictures.values():
        for part in ("true", "found", "nearest"):
            held[f"{name}/{part}"] = (getattr(each, part) * 255).round().to(torch.uint8).contiguous()
    write(folder / PICTURES, safetensors.torch.save(held))


def _pictures(folder: Path) -> dict[str, Tensor]:
    file = folder / PICTURES
    return safetensors.torch.load(file.read_bytes()) if file.is_file() else {}


def _write(folder: Path, done: Matrix) -> None:
    """Write the figures, the page and the pictures of all rows that are done."""
    held = _pictures(folder)
    titles = [title(row) for row in done.rows if f"{title(row)}/found" in held]
    lines = {name: tuple(held[f"{name}/{part}"] / 255 for part in ("true", "found", "nearest")) for name in titles}
    write(folder / FILE, msgspec.json.format(msgspec.json.encode(done), indent=2) + b"\n")
    if lines:
        write(folder / DRAWN, svg(report.album(lines)).encode())
    write(folder / PAGE, report.markdown(done, KINDS, DRAWN).encode())
