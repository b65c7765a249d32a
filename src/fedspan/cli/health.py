"""``fedspan health``: whether a node works, for the health checks of containers and services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import MACHINES, register_command


@register_command("health", "fedspan health node.yaml", panel=MACHINES)
def health(
    node: Annotated[Path, typer.Argument(metavar="NODE", help="The node's YAML file.")],
    within: Annotated[
        float,
        typer.Option(
            "--within",
            metavar="SECONDS",
            min=1.0,
            help="Seconds without progress after which the node is unhealthy; while it loads a model, an hour.",
        ),
    ] = 900.0,
) -> None:
    """Exit with 1 if the node that runs with this file hangs: its loop, or the training of an order."""
    from fedspan.config.node import load_node
    from fedspan.deployment.health import describe_heartbeat, find_problem

    folder = Path(load_node(node).folder)
    if (problem := find_problem(folder, within)) is not None:
        typer.echo(f"unhealthy: {problem}", err=True)
        raise typer.Exit(1)
    typer.echo(f"healthy: {describe_heartbeat(folder)}")
