"""The commands of ``fedspan`` in this process, built once: that takes Typer a tenth of a second."""

from __future__ import annotations

from functools import cache

import click
import typer.main

from fedspan.cli import app


@cache
def get_program() -> click.Command:
    """Return the program, for click's ``CliRunner``."""
    return typer.main.get_command(app)
