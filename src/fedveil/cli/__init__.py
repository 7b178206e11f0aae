"""The command line: `commands` says what there is; the other modules say how it looks and where it goes."""

from fedveil.cli.commands import app, main

__all__ = ["app", "main"]
