"""``fedspan report``: one or more runs as a single HTML report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import command

__all__ = ["report"]


@command(
    "report",
    "fedspan report runs/first",
    "fedspan report runs/three --out three.html --diagnose",
    "fedspan report runs/first runs/second --out both.html",
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of series of runs.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = Path("report.html"),
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Run one more round of a run of each kind, and show its diagnostics.")
    ] = False,
    data: Annotated[bool, typer.Option(help="Read the data again, to show who holds which labels.")] = True,
) -> None:
    """Write one HTML page about runs: scores by round, bytes and time, clients, traffic, configuration, a verdict.

    The page needs no network, and runs that differ in their seed alone stand together. Needs fedspan[report].
    """
    from fedspan.cli.formatting import console

    screen = console()
    with screen.status("reading the runs"):
        import fedspan

        path = fedspan.report([*runs], out, diagnostics=diagnose, data=data)
    screen.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")
