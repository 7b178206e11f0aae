"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

Format = StrEnum("Format", ["table", "json"])
Kind = StrEnum("Kind", ["local", "flower"])
What = StrEnum("What", ["methods", "codecs", "models", "data", "recipes"])


def number(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"'{text}' is neither auto nor a number from 1")
    return int(text)


def option(name: str, metavar: str | None, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, show_default=False, **more)


def argument(metavar: str) -> Any:
    return typer.Argument(metavar=metavar, hidden=True)


Sets = Annotated[list[str] | None, option("--set", "KEY=VALUE", "Change a key of the recipe; may be repeated.")]
Out = Annotated[Path | None, option("--out", "DIR", "Where to write; by default a folder below runs/.")]
DataDir = Annotated[Path | None, option("--data-dir", "DIR", "Where data sets lie; else FEDVEIL_DATA says.")]
Fetch = Annotated[bool, option("--fetch", None, "Download the data if it is missing.")]
Device = Annotated[str, option("--device", "auto|cpu|cuda", "Where to train; auto is a GPU if there is one.")]
Stack = Annotated[int | None, option("--stack", "N|auto", "Clients trained as one.", parser=number)]
Workers = Annotated[int | None, option("--workers", "N|auto", "Stacks trained side by side.", parser=number)]
Engine = Annotated[Kind, option("--engine", "local|flower", "Clients in this process, or on Flower's simulation.")]
Ray = Annotated[str | None, option("--ray-address", "HOST:PORT", "With flower, a Ray cluster that runs already.")]
Debug = Annotated[bool, option("--debug", None, "One client at a time; a failure ends the run.")]
Compile = Annotated[bool, option("--compile", None, "On a GPU, compile heavy steps; slow at first.")]
Noise = Annotated[bool, option("--insecure-test-noise", None, "Fix the private randomness, for tests only.")]
Version = Annotated[bool, option("--version", None, "Print the version.")]
IMPORT, IMPORTS = "--import", "Import a module of yours first; may be repeated."
Imports = Annotated[list[str] | None, option(IMPORT, "MODULE", IMPORTS)]
Shown = Annotated[Format, option("--format", "table|json", "What stdout gets; by default a table.")]
