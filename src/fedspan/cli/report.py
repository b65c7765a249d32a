"""``fedspan report``: one or more runs as a single HTML report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import register_command


@register_command(
    "report",
    "fedspan report runs/first",
    "fedspan report runs/three --out three.html --diagnose",
    "fedspan report runs/first runs/second --out both.html",
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of series of runs.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the report.")] = Path("report.html"),
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Run one more round of each kind of run, and show its diagnostics.")
    ] = False,
    data: Annotated[bool, typer.Option(help="Read the data again, to show each client's label distribution.")] = True,
) -> None:
    """Render one or more runs as a single HTML report: scores by round, traffic, time, clients, config and a verdict.

    The report needs no network; runs that differ only in their seed are grouped. Needs fedspan[report].
    """
    from fedspan.cli.formatting import create_console

    screen = create_console()
    with screen.status("reading the runs"):
        import fedspan

        path = fedspan.report([*runs], out, diagnostics=diagnose, data=data)
    screen.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
