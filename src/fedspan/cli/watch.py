"""``fedspan watch``: a run on a live web page."""

from __future__ import annotations

import time
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import register_command


@register_command("watch", "fedspan watch runs/first", "fedspan watch runs/first --open")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run; it may not exist yet.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page. Default: a free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
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
