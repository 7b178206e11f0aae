"""Reports: what one or several runs reached and cost, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.report.figures import curves, svg
from fedveil.report.folder import read
from fedveil.report.groups import expand
from fedveil.report.page import page

SEARCH = "study.db"  # a folder with this file is of `fedveil tune`

__all__ = ["curves", "svg", "write"]


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the report on the runs in `folders`, finished or not, to the file `out`, and return it.

    A folder holds `recipe.toml` and what there is of `environment.json`, `ledger.jsonl`, `split.svg` and
    `figures/NAME.svg` or `.png`. One that is missing or damaged is a ValueError that says what to do. A folder without
    a recipe stands for the runs below it. Runs of one recipe with several seeds are shown as one. A folder of a search
    is shown with its pictures and the runs of its best recipe.
    """
    text = page(read(expand(folders)), [folder for folder in folders if (folder / SEARCH).is_file()])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out
