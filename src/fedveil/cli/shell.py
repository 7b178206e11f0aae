"""Where words go: results to stdout, the rest to stderr; a user's mistake is one sentence there."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click
from rich.console import Console
from typer.core import TyperGroup

from fedveil.cli.options import IMPORT, IMPORTS

BUG = "fedveil did not expect this; please report it with the recipe."

out = Console(markup=False, highlight=False, emoji=False)
err = Console(markup=False, highlight=False, emoji=False, stderr=True)


def say(sentence: object) -> None:
    """A sentence on stderr; one line, except that a terminal's lines end between words."""
    err.print(f"fedveil: {' '.join(str(sentence).split())}", soft_wrap=not err.is_terminal)


def _note(context: click.Context, parameter: click.Parameter, modules: Sequence[str]) -> None:
    context.meta.setdefault(IMPORT, []).extend(modules)


def _after_imports(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, after plugins and the modules of --import are imported."""

    @functools.wraps(command)
    def start(*args: Any, **values: Any) -> Any:
        from fedveil.runs.plugins import import_modules, imported, load_plugins

        imported.clear()
        load_plugins()
        import_modules(click.get_current_context().meta.get(IMPORT, ()))
        return command(*args, **values)

    return start


class Plainly(TyperGroup):
    """What a user can get wrong is one sentence and exit code 2; a bug keeps its traceback.

    Every command takes --import, which comes before all else that the command does. Neither help nor a command line
    that cannot be understood imports PyTorch.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command and not any(IMPORT in each.opts for each in command.params):
            option = click.Option(
                [IMPORT, "modules"], metavar="MODULE", help=IMPORTS, multiple=True, expose_value=False, callback=_note
            )
            command.params.append(option)
            if not isinstance(command, click.Group) and command.callback:
                command.callback = _after_imports(command.callback)
        return command

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        code: int = 2
        with warnings.catch_warnings():
            warnings.showwarning = lambda text, *_, **__: say(f"warning: {text}")
            try:
                code = super().main(*args, **extra | {"prog_name": "fedveil", "standalone_mode": False})
            except click.UsageError as error:
                where = f"; see '{error.ctx.command_path} --help'" if error.ctx else ""
                say(error.format_message().rstrip(".") + where)
            except click.ClickException as error:
                code = error.exit_code
                say(error.format_message())
            except OSError as error:
                file = f"{error.filename}: " if error.filename else ""
                say(f"{file}{error.strerror}" if error.strerror else error)
            except (ValueError, ImportError) as error:
                if BUG in getattr(error, "__notes__", ()):
                    raise
                say(error)
        sys.exit(code)
