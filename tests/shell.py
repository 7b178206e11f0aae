"""The command line, called in this process."""

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from fedveil import cli


def fv(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in args])


def good(*args: object) -> Any:
    result = fv(*args)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout) if result.stdout.startswith("{") else result.stdout
