"""``fedspan demo``: a run of the packaged example config."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import Overrides, register_command
from fedspan.cli.live_run import find_unused_folder, show_run

__all__ = ["demo"]


@register_command(
    "demo",
    "fedspan demo",
    "fedspan demo --set method.name=fedsa-lora --out runs/personal",
    "fedspan demo --show-config > my.yaml",
)
def demo(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="Folder of the run. Default: runs/demo, runs/demo-2, ..."),
    ] = None,
    overrides: Overrides = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the demo's config, as a template of your own.")
    ] = False,
) -> None:
    """Run a demo: ten clinics train a classifier of patients' messages, and no message leaves its clinic."""
    packaged = files("fedspan").joinpath("demo.yaml")
    if show_config:
        typer.echo(packaged.read_text(encoding="utf-8"), nl=False)
        return
    with as_file(packaged) as path:
        show_run(out or find_unused_folder(Path("runs") / "demo"), path, overrides or ())
