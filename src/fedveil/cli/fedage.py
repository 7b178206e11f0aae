"""`fedveil fedage`: train the pair of encoder and decoder, and attack a run that used one."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from fedveil.cli import show
from fedveil.cli.options import Device, Format, Shown, argument, option
from fedveil.cli.shell import Plainly, err, out, say
from fedveil.gpu.context import LINE_EVERY

if TYPE_CHECKING:
    from fedveil.codecs.autoencoder import Pair

DELTA = 1e-5

fedage = typer.Typer(
    cls=Plainly, no_args_is_help=True, rich_markup_mode=None, help="Train FedAGE's codes, and attack them."
)


class Telling:
    """Progress on stderr: one line that renews itself on a terminal, elsewhere a line every few seconds."""

    def __init__(self, floor: float) -> None:
        self.floor, self.told = floor, time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=10))
        self.bar = Progress(*columns, console=err, disable=not err.is_terminal)
        self.line = self.bar.add_task("training")

    def __enter__(self) -> Telling:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def __call__(self, done: int, total: int, spread: float) -> None:
        near = f"  error {spread / self.floor:.4f} of the linear floor" if math.isfinite(spread) and self.floor else ""
        self.bar.update(self.line, completed=done, total=total, description=f"step {done}/{total}{near}")
        if self.bar.disable and (time.monotonic() - self.told >= LINE_EVERY or done == total):
            self.told = time.monotonic()
            err.print(f"step {done}/{total}{near}", soft_wrap=True)


@fedage.command()
def pretrain(
    block: Annotated[int, option("--block", "B", "Numbers per block; default: 64.")] = 64,
    code_size: Annotated[int | None, option("--code-size", "H", "Numbers per code; default: half a block.")] = None,
    levels: Annotated[int, option("--levels", "S", "Entries are whole numbers from 0 to S; default: 64.")] = 64,
    cohort: Annotated[int, option("--cohort", "M", "Codes per mean; default: 10.")] = 10,
    width: Annotated[int, option("--width", "N", "Width of the networks; default: 512.")] = 512,
    seed: Annotated[int, option("--seed", "N", "Seed of weights and training data; default: 0.")] = 0,
    pretraining: Annotated[str, option("--pretraining", "own|paper", "Whose settings; default: own.")] = "own",
    epochs: Annotated[int | None, option("--epochs", "N", "Maximum number of epochs; default: 50.")] = None,
    groups: Annotated[int | None, option("--groups", "N", "Groups of M blocks per epoch; default: 50000.")] = None,
    batch: Annotated[int | None, option("--batch", "N", "Groups per step; default: 500.")] = None,
    lr: Annotated[float | None, option("--lr", "RATE", "Adam's rate; default: 0.0005, in the paper 0.0001.")] = None,
    small: Annotated[float | None, option("--small", "SHARE", "Share of small groups; default: 0.5 or 0.")] = None,
    patience: Annotated[int | None, option("--patience", "N", "Epochs without progress; default: 10 or 50.")] = None,
    device: Device = "auto",
    file: Annotated[Path | None, option("--out", "FILE", "Output file; default: in the data folder.")] = None,
    format: Shown = Format.table,
) -> None:
    """Train a pair (E, D) such that D(mean of codes) is the mean.

    Recipes with the same settings find the file. An existing file is not trained again.

    Example: fedveil fedage pretrain --block 16 --cohort 5 --width 64 --groups 25600 --batch 256 --lr 0.001
    """
    from fedveil.codecs import autoencoder
    from fedveil.codecs.pretraining import PRETRAININGS
    from fedveil.codecs.pretraining import pretrain as train
    from fedveil.runs.recipe import pick_device

    half = max(1, block // 2) if code_size is None else code_size
    key = autoencoder.Code(block, half, levels, cohort, width, seed, pretraining=pretraining)
    given: dict[str, Any] = {
        "epochs": epochs,
        "groups": groups,
        "batch": batch,
        "lr": lr,
        "small": small,
        "patience": patience,
    }
    how = replace(PRETRAININGS[pretraining], **{name: value for name, value in given.items() if value is not None})
    path, began = file or autoencoder.home() / key.file, time.monotonic()
    if path.is_file():
        say(f"{path} is there already and used as it is; delete it to train again")
        pair = autoencoder.read(path, key)
    else:
        with Telling(key.floor) as told:
            pair = train(key, how, pick_device(device), told)
        autoencoder.save(pair, path)
    figures = {
        "file": str(path),
        "spread": pair.spread,
        "floor": key.floor,
        "ratio": pair.spread / key.floor if key.floor else 0.0,
        "reach": pair.reach,
        "papers_heuristic_epsilon": _heuristic(pair),
        "seconds": time.monotonic() - began,
    }
    if format is Format.json:
        return show.as_json(figures)
    show.pairs(
        [
            ("file", figures["file"]),
            ("error, σ_ν", pair.spread),
            ("linear floor", key.floor),
            ("error / floor", figures["ratio"]),
            ("reach of a code", pair.reach),
            ("the paper's heuristic ε", f"{_heuristic(pair):.4g} a round at δ = {DELTA:g}; no guarantee of anything"),
            ("seconds", figures["seconds"]),
        ]
    )


def _heuristic(pair: Pair) -> float:
    """ε = √(2 ln(1.25/δ)) (s/m) / σ_ν: section 3.4 with noise and sensitivity in the same units, so that n cancels."""
    key = pair.code
    return math.sqrt(2 * math.log(1.25 / DELTA)) * key.levels / key.cohort / max(pair.spread, 1e-12)


@fedage.command()
def attack(path: Annotated[Path, argument("DIR")], format: Shown = Format.table) -> None:
    """Attack the next round of the run in DIR as its server could.

    Each client's update is decoded from its own codes, and found by leaving it out of the mean. The figures go to
    attack.json and figures/attack.svg in DIR, where a report finds them.

    Example: fedveil fedage attack runs/demo/digits-fedage
    """
    from fedveil.attacks.differential import expose, overheard
    from fedveil.cli.jobs import Job
    from fedveil.codecs.fedage import FedAgeCodec
    from fedveil.core.message import Slots
    from fedveil.core.seeds import Seed
    from fedveil.core.stack import ClientStack
    from fedveil.methods.averaging import Averaging
    from fedveil.report.figures import densities, svg

    job = Job.held(path)
    method = cast(Averaging, job.recipe.method)  # codecs in code space are for methods that average
    if [codec.name for codec in method.codecs[:1]] != [FedAgeCodec.name]:
        raise ValueError(f"{path} holds a run of {method.name}; this attack is on fedage and FedAvg with its codes")
    saved = job.checkpoint()
    task = job.recipe.on(job.data(False, {}), job.where.device)
    method.init_state(task)
    number = saved.round + 1
    seed = Seed.root(job.recipe.seed).child("round", number)
    clients = job.recipe.cohort.of_round(task, Seed.root(job.recipe.seed), number)
    if len(clients) < 2:
        raise ValueError("the next round's cohort has fewer than 2 clients; there is no mean to take apart")
    memory = [Slots()] * len(clients)
    stack = ClientStack(task, clients, number, seed, Seed.private(), memory, [{} for _ in clients])
    updates = method.released(stack, None, saved.state.weights.to(task.device))["update"]
    seen = None
    if method.secure:
        root = Seed.root(job.recipe.seed)
        heard = overheard(task, method, job.recipe.cohort, root, saved.state, number)
        if len(heard) < len(clients):
            raise ValueError("in the next round clients drop out; set cohort.drop to 0 in a run to be attacked")
        seen = [heard[k] for k in clients]
        say("the run sums codes securely, so what is attacked is each client's masked vector")
    found = expose(task, cast(FedAgeCodec, method.up), updates, seed, number, seen)
    told = {"round": number, "clients": list(clients), **found.figures()}
    (path / "attack.json").write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    (path / "figures").mkdir(exist_ok=True)
    rows = {f"client {k}": row for k, row in zip(clients, found.errors.cpu(), strict=True)}
    drawn = densities(rows, "error of the differential attack, in deviations of the update")
    (path / "figures" / "attack.svg").write_text(svg(drawn), encoding="utf-8")
    if format is Format.json:
        return show.as_json(told)
    table = Table("client", box=None, pad_edge=False, padding=(0, 1))
    for name in found.figures():
        table.add_column(name, justify="right")
    for client, *row in zip(clients, *found.figures().values(), strict=True):
        table.add_row(str(client), *(f"{value:.4f}" for value in row))
    out.print(table)
    say(f"the errors' density is {path / 'figures' / 'attack.svg'}")
