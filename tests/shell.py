"""The command line, called in this process."""

import importlib
import json
import math
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedveil import cli


def fv(*args: object) -> Result:
    """Progress is told every few seconds where stderr is no terminal; here never, or a busy machine would add lines."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("audit", "fedage"):
            module = importlib.import_module(f"fedveil.cli.{name}")
            if module.LINE_EVERY > 0:  # a test of progress sets it to 0
                patch.setattr(module, "LINE_EVERY", math.inf)
        return CliRunner().invoke(cli.app, [str(a) for a in args])


def good(*args: object) -> Any:
    result = fv(*args)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout) if result.stdout.startswith("{") else result.stdout
