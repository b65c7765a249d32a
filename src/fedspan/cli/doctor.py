"""``fedspan doctor``: a check of the installation on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import Json, register_command

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("MISSING", "red")}


@register_command("doctor", "fedspan doctor", "fedspan doctor --folder /data/runs --json")
def doctor(
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Folder for runs.")] = Path(),
    as_json: Json = False,
) -> None:
    """Check the installation: packages and extras, accelerator, memory, disk, port, models. Nothing is changed.

    Exits with 1 if a required component is missing.
    """
    from fedspan.cli.formatting import create_console, create_table

    screen = create_console()
    screen.quiet = as_json
    with screen.status("checking the installation"):
        from fedspan.runs.doctor import run_checks

        results = run_checks(folder)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in results], indent=2, ensure_ascii=False))
    else:
        from rich.text import Text

        table = create_table()
        table.add_column("", no_wrap=True)
        table.add_column("component", style="cyan", no_wrap=True)
        table.add_column("finding", overflow="fold")
        for check in results:
            text, style = _MARKS[check.state]
            table.add_row(Text(text, style), check.name, check.finding + (f"\n{check.advice}" if check.advice else ""))
        screen.print(table)
    if any(check.state == "missing" for check in results):
        raise typer.Exit(1)
