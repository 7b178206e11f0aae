"""`fedveil export`: a client for devices without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

from fedveil.cli import show
from fedveil.cli.options import DataDir, Fetch, Format, Sets, Shown, argument, option
from fedveil.cli.shell import say
from fedveil.runs import recipe


def export(
    source: Annotated[str, argument("RECIPE")],
    folder: Annotated[Path, option("-o", "DIR", "Output folder; must be new or empty.")],
    changes: Sets = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    quantise: Annotated[bool, option("--quantise", None, "Store layers that are not trained in 8 bits.")] = False,
    format: Shown = Format.table,
) -> None:
    """Write a client that needs only NumPy and ONNX Runtime.

    RECIPE must use the method baffle without a secure sum.

    Example: fedveil export digits/baffle-clear -o edge
    """
    from fedveil.methods.baffle.baffle import Baffle
    from fedveil.methods.baffle.export import export as write

    plan = recipe.read(source, changes or ())
    if plan.method.name != Baffle.name:
        raise ValueError(f"{source} is a recipe of {plan.method.name}, whose clients train; choose one of baffle")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not an empty folder; choose another -o")
    say("exporting the model; this takes some seconds")
    told = write(plan.build(data_dir, fetch), cast(Baffle, plan.method), folder, quantise)
    if format is Format.json:
        show.as_json(told)
    else:
        show.pairs(told.items())
