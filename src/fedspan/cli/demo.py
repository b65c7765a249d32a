"""``fedspan demo``: a run of the packaged example config."""

from __future__ import annotations

import importlib.util
import shlex
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.commands import Overrides, flag, option, register_command
from fedspan.cli.formatting import create_console
from fedspan.cli.live_run import find_unused_folder, show_run
from fedspan.errors import build_install_command
from fedspan.progress.formatting import format_size

if TYPE_CHECKING:
    from fedspan.runs.report import RunReport


@register_command(
    "demo",
    "fedspan demo",
    "fedspan demo --set method.name=fedsa-lora --out runs/personal",
    "fedspan demo --show-config > my.yaml",
)
def demo(
    out: Annotated[Path | None, option("FOLDER", "Folder of the run. Default: runs/demo, runs/demo-2, ...")] = None,
    overrides: Overrides = None,
    show_config: Annotated[bool, flag("--show-config", "Print the demo's config, as a template of your own.")] = False,
) -> None:
    """Run a demo: twelve companies learn to tell praise from complaints in reviews, and no review leaves its company.

    With fedspan[report], the demo also writes the page that `fedspan report` makes.
    """
    packaged = files("fedspan").joinpath("demo.yaml")
    if show_config:
        typer.echo(packaged.read_text(encoding="utf-8"), nl=False)
        return
    with as_file(packaged) as path:
        folder = out or find_unused_folder(Path("runs") / "demo")
        report = show_run(folder, path, overrides or ())
    _show_result(report, folder)


def _show_result(report: RunReport, folder: Path) -> None:
    """Print what was sent instead of data, and write the report's page if its library is installed."""
    out = create_console()
    sent = report.bytes["up"] + sum(count["up"] for count in report.other_bytes.values())
    out.print(
        f"\nIn the federation, no example left its client: the clients sent {format_size(sent)} of updates and "
        "statistics."
    )
    if importlib.util.find_spec("plotly") is None:
        install = build_install_command("report")
        out.print(f"A page with curves: {install}, then fedspan report {shlex.quote(str(folder))}")
        return
    with out.status("writing the page"):
        import fedspan

        page = fedspan.report([folder], folder / "report.html")
    out.print(f"A page with curves, clients and traffic: {page}", soft_wrap=True)
