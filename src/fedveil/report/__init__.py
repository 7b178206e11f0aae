"""Reports: what one or several runs reached and cost, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedveil.report.figures import curves, svg
from fedveil.report.folder import read
from fedveil.report.groups import expand
from fedveil.report.page import page

__all__ = ["curves", "svg", "write"]


def write(folders: Sequence[Path], out: Path) -> Path:
    """Write the report on the runs in `folders`, finished or not, to the file `out`, and return it.

    A folder holds `recipe.toml` and what there is of `environment.json`, `ledger.jsonl`, `split.svg` and
    `figures/NAME.svg` or `.png`. One that is missing or damaged is a ValueError that says what to do. A folder without
    a recipe stands for the runs below it. Runs of one recipe with several seeds are shown as one.
    """
    text = page(read(expand(folders)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out
