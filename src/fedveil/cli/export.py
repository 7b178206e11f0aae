"""`fedveil export`: a trained model in a file, or a client for devices without PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from fedveil.cli import show
from fedveil.cli.options import DataDir, Fetch, Format, Sets, Shown, argument, option
from fedveil.cli.shell import say


def export(
    source: Annotated[str, argument("RUN|RECIPE")],
    file: Annotated[Path | None, argument("FILE")] = None,
    folder: Annotated[Path | None, option("-o", "DIR", "Folder of the client; must be new or empty.")] = None,
    changes: Sets = None,
    data_dir: DataDir = None,
    fetch: Fetch = False,
    quantise: Annotated[bool, option("--quantise", None, "Store layers that are not trained in 8 bits.")] = False,
    format: Shown = Format.table,
) -> None:
    """Write the trained model of a run folder to FILE: .safetensors, .pt or .onnx.

    With a RECIPE of the method baffle and -o DIR: write a client that needs only NumPy and ONNX Runtime, and
    cryptography if the recipe has a secure sum or privacy.

    Example: fedveil export runs/demo/digits-fedavg model.onnx
    """
    if file is not None and folder is None:
        told = _model(Path(source), file, fetch)
    elif folder is not None and file is None:
        told = _client(source, folder, changes or (), data_dir, fetch, quantise)
    else:
        raise ValueError("export writes the model of a run folder to a FILE, or the client of a recipe to -o DIR")
    if format is Format.json:
        show.as_json(told)
    else:
        show.pairs(told.items())


def _model(run: Path, file: Path, fetch: bool) -> dict[str, Any]:
    """Write the trained model of a run folder."""
    from fedveil.cli.jobs import Job
    from fedveil.core.export import write
    from fedveil.core.loop import trained_task

    if not run.is_dir():
        raise ValueError(f"there is no run folder {run}; a file is for the model of one, and -o for a recipe's client")
    job = Job.held(run)
    saved = job.checkpoint()
    task = job.recipe.on(job.data(fetch, {}))
    if saved.state.weights.numel() != task.layout.size:
        raise ValueError(f"{run} holds {saved.state.weights.numel()} weights, its model has {task.layout.size}")
    write(trained_task(task, saved.state), saved.state.weights, file)
    return {"file": str(file), "round": saved.round, "weights": task.layout.size, "bytes": file.stat().st_size}


def _client(
    source: str, folder: Path, changes: Sequence[str], data_dir: Path | None, fetch: bool, quantise: bool
) -> dict[str, Any]:
    """Write the client of a recipe."""
    from fedveil.core.seeds import Seed
    from fedveil.methods.baffle.baffle import Baffle
    from fedveil.methods.baffle.export import export as write_client
    from fedveil.runs import recipe

    plan = recipe.read(source, changes)
    if plan.method.name != Baffle.name:
        raise ValueError(f"{source} is a recipe of {plan.method.name}, whose clients train; choose one of baffle")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not an empty folder; choose another -o")
    say("exporting the model; this takes some seconds")
    method = cast(Baffle, plan.method).over(plan.rounds)
    return write_client(plan.build(data_dir, fetch), method, folder, quantise, Seed.root(plan.seed))
