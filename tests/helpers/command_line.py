"""The commands of ``fedspan`` in this process, built once: that takes Typer a tenth of a second."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import click
import typer.main
from click.testing import Result

from fedspan.cli import app

Call = Callable[..., Result]
Refused = Callable[..., str]
Write = Callable[..., Path]


@cache
def get_program() -> click.Command:
    """Return the program, for click's ``CliRunner``."""
    return typer.main.get_command(app)


def done(result: Result) -> str:
    """What a command has printed, which must have ended well."""
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout
