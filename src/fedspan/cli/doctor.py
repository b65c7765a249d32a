"""``fedspan doctor``: a check of what works on this machine, and of what is missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import Json, command

__all__ = ["doctor"]

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("MISSING", "red")}


@command("doctor", "fedspan doctor", "fedspan doctor --folder /data/runs --json")
def doctor(
    folder: Annotated[Path, typer.Option("--folder", metavar="DIR", help="Folder for runs.")] = Path(),
    as_json: Json = False,
) -> None:
    """Check the installation: packages and extras, accelerator, memory, disk, port, models. Nothing is changed.

    Ends with 1 if something is missing without which nothing works.
    """
    from fedspan.cli.formatting import console, plain_table

    screen = console()
    screen.quiet = as_json
    with screen.status("looking"):
        from fedspan.runs.doctor import checks

        found = checks(folder)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=2, ensure_ascii=False))
    else:
        from rich.text import Text

        table = plain_table()
        table.add_column("", no_wrap=True)
        table.add_column("what", style="cyan", no_wrap=True)
        table.add_column("found", overflow="fold")
        for one in found:
            text, style = _MARKS[one.state]
            table.add_row(Text(text, style), one.what, one.found + (f"\n{one.cure}" if one.cure else ""))
        screen.print(table)
    if any(one.state == "missing" for one in found):
        raise typer.Exit(1)
