"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

Format = StrEnum("Format", ["table", "json"])
Between = StrEnum("Between", ["memory", "bytes"])
Kind = StrEnum("Kind", ["local", "flower", "ray"])
Prune = StrEnum("Prune", ["median", "halving", "none"])
Unit = StrEnum("Unit", ["record", "client"])
What = StrEnum("What", ["methods", "codecs", "models", "data", "losses", "metrics", "recipes"])


def number(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"'{text}' is neither auto nor a number from 1")
    return int(text)


def count(text: str | int) -> int:
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"'{text}' is no number from 1")
    return int(text)


def option(name: str, metavar: str | None, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, **more)


def argument(metavar: str) -> Any:
    return typer.Argument(metavar=metavar, hidden=True)


Sets = Annotated[list[str] | None, option("--set", "KEY=VALUE", "Change a key of the recipe; may be repeated.")]
Out = Annotated[Path | None, option("--out", "DIR", "Output folder; default: a new folder below runs/.")]
DataDir = Annotated[Path | None, option("--data-dir", "DIR", "Folder of the data sets; default: FEDVEIL_DATA.")]
Fetch = Annotated[bool, option("--fetch", None, "Download the data if it is missing.")]
Device = Annotated[str, option("--device", "auto|cpu|cuda", "Device; auto uses a GPU if there is one.")]
Stack = Annotated[int | None, option("--stack", "N|auto", "Clients per stack.", parser=number)]
Workers = Annotated[int | None, option("--workers", "N|auto", "Stacks trained in parallel.", parser=number)]
Engine = Annotated[Kind, option("--engine", "local|flower|ray", "This process, Flower's simulation, or Ray.")]
Ray = Annotated[str | None, option("--ray-address", "HOST:PORT", "With flower or ray: use this Ray cluster.")]
Debug = Annotated[bool, option("--debug", None, "Train one client at a time; stop at a failure.")]
Wire = Annotated[Between | None, option("--wire", "memory|bytes", "Hand messages over in memory, or as bytes.")]
Keep = Annotated[str | None, option("--keep-messages", "ROUNDS", "Keep messages for an audit: all, or 1-3,10.")]
Compile = Annotated[bool, option("--compile", None, "Compile heavy steps; slow at first.")]
Noise = Annotated[bool, option("--insecure-test-noise", None, "Fix the private randomness; for tests only.")]
Seeds = Annotated[str | None, option("--seeds", "SEEDS", "A run for each: 5 is 0 to 4; or 0-4; or 0,2,5-7.")]
Hold = Annotated[str | None, option("--hold", "LIST", "Hold split, weights, cohorts, noise over seeds.")]
Grid = Annotated[list[str] | None, option("--grid", "KEY=A,B,C", "A run for each value; may be repeated.")]
Jobs = Annotated[int, option("--jobs", "N", "Runs in parallel, in processes; default: 1.", parser=count)]
Version = Annotated[bool, option("--version", None, "Print the version.")]
IMPORT, IMPORTS = "--import", "Import this module first; may be repeated."
Imports = Annotated[list[str] | None, option(IMPORT, "MODULE", IMPORTS)]
Shown = Annotated[Format, option("--format", "table|json", "Format of the output; default: table.")]
