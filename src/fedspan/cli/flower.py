"""``fedspan flower-app`` and ``host``: federations of people who operate Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import MACHINES, Overrides, register_command
from fedspan.cli.deploy import make_stop_event
from fedspan.files import restrict_new_files


@register_command("flower-app", "fedspan flower-app app --config run.yaml", panel=MACHINES)
def flower_app(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the app; empty or new.")],
    config: Annotated[Path, typer.Option("--config", metavar="CONFIG", help="The run's YAML file.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Folder of the runs, on the machine of Flower's ServerApp.")
    ] = Path("runs/flower"),
    overrides: Overrides = None,
) -> None:
    """Write a Flower app that runs a federation. It is for Flower's simulation if the config names data."""
    from fedspan.transports.flower import require

    require()
    from fedspan.deployment.flower_server import write_app

    write_app(folder, config, out, overrides or ())
    typer.echo(f"run it: flwr run {folder} --stream")


@register_command("host", "fedspan host node.yaml --socket /run/fedspan/host.sock --user flower", panel=MACHINES)
@restrict_new_files()
def host(
    node: Annotated[Path, typer.Argument(metavar="NODE", help="The node's YAML file.")],
    address: Annotated[Path, typer.Option("--socket", metavar="FILE", help="The socket to create.")],
    user: Annotated[
        str | None,
        typer.Option("--user", help="Name or id of the user that the SuperNode runs as. Default: this user."),
    ] = None,
) -> None:
    """Carry out what a Flower app asks, within the node file's limits. The data stay with processes of this user."""
    from fedspan.deployment.console import log_to_console
    from fedspan.deployment.host import host as run_host

    log_to_console()
    run_host(node, address, user, make_stop_event())
