"""``fedspan report``: one or more runs as a single HTML report."""

from __future__ import annotations

import time
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import argument, flag, option, register_command
from fedspan.cli.formatting import create_console


@register_command(
    "report",
    "fedspan report runs/first",
    "fedspan report runs/three --out three.html --diagnose",
    "fedspan report runs/first runs/second --out both.html",
)
def report(
    runs: Annotated[list[Path], argument("RUN...", "Folders of runs, or of series of runs.")],
    out: Annotated[Path, option("FILE", "File of the report.")] = Path("report.html"),
    diagnose: Annotated[
        bool, flag("--diagnose", "Run one more round of each kind of run, and show its diagnostics.")
    ] = False,
    data: Annotated[bool, typer.Option(help="Read the data again, to show each client's label distribution.")] = True,
) -> None:
    """Render one or more runs as a single HTML report: scores by round, traffic, time, clients, config and a verdict.

    The report needs no network; runs that differ only in their seed are grouped. Needs fedspan[report].
    """
    screen = create_console()
    with screen.status("reading the runs"):
        import fedspan

        path = fedspan.report([*runs], out, diagnostics=diagnose, data=data)
    screen.print(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


@register_command("watch", "fedspan watch runs/first", "fedspan watch runs/first --open")
def watch(
    run: Annotated[Path, argument("RUN", "Folder of a run; it may not exist yet.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page. Default: a free one.")] = 0,
    open_page: Annotated[bool, flag("--open", "Open the page in the browser.")] = False,
) -> None:
    """Show a run on a web page of this machine, live until Ctrl-C: rounds, curves, clients, failures, traffic, privacy.

    The page only reads the run's folder. Its address has a secret token. Needs fedspan[web].
    """
    from fedspan.monitoring.web import WebPage, require_web, write_redirect

    require_web()
    from fedspan.monitoring.run_monitor import RunMonitor, build_page_state

    monitor = RunMonitor(run)
    with ExitStack() as stack:
        page = stack.enter_context(WebPage(lambda: build_page_state(monitor), port=port))
        typer.echo(f"{run} is shown at\n  {page.url}\nuntil Ctrl-C")
        if open_page:
            webbrowser.open(stack.enter_context(write_redirect(page.url)).as_uri())
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            typer.echo("stopped; the run itself is not affected", err=True)
