"""``fedspan status``: a server's nodes, and the status of its run."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fedspan.cli.admission import warn_of_expiry
from fedspan.cli.commands import MACHINES, SERVER, Json, ServerFolder, argument, option, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.progress.formatting import format_duration
from fedspan.transports import http

if TYPE_CHECKING:
    from fedspan.deployment.status import RunStatus
    from fedspan.transports.http.server import Node

_COLORS = {"online": "green", "offline": "yellow", "revoked": "red"}


@register_command("status", "fedspan status", "fedspan status --run runs/first", panel=MACHINES)
def status(
    folder: ServerFolder = SERVER,
    run: Annotated[Path | None, option("FOLDER", "Run to show. Default: the newest run of this server.")] = None,
    as_json: Json = False,
) -> None:
    """Show the nodes of a server, and the progress of its run.

    A killed node counts as offline within a minute.
    """
    http.require()
    from fedspan.deployment.status import load_named_run, read_status
    from fedspan.errors import FedspanError
    from fedspan.transports.http.admissions import list_named_nodes, read_admissions
    from fedspan.transports.http.server import read_link

    named_run, link = load_named_run(folder), read_link(folder)
    run_folder = run or (None if named_run is None else named_run.folder)
    nodes = list_named_nodes(link)
    max_examples = {
        str(id): admission.max_examples
        for id, admission in read_admissions(link).items()
        if admission.max_examples is not None
    }
    clients_by_node = {node: client for client, node in ({} if named_run is None else named_run.nodes).items()}
    run_status: RunStatus | None = None
    try:
        run_status = None if run_folder is None else read_status(run_folder)
    except FedspanError:
        if run is not None:  # the server's own run may have been deleted
            raise
    if as_json:
        rows = [
            {
                **dataclasses.asdict(node),
                "client": clients_by_node.get(node.id),
                "max_examples": max_examples.get(node.id),
            }
            for node in nodes
        ]
        run_values = None if run_status is None else {"folder": str(run_folder), **dataclasses.asdict(run_status)}
        typer.echo(json.dumps({"nodes": rows, "run": run_values}, indent=2))
        return
    out = create_console()
    _show_nodes(out, nodes, clients_by_node, max_examples, run_status)
    warn_of_expiry(link)
    if run_status is not None and run_folder is not None:
        _show_run(out, run_folder, run_status)


def _show_nodes(
    out: Console,
    nodes: list[Node],
    clients_by_node: dict[str, str],
    max_examples: dict[str, int],
    run_status: RunStatus | None,
) -> None:
    if not nodes:
        out.print("no nodes yet: fedspan admit KEY.pub")
        return
    failures = {} if run_status is None else run_status.failures
    table = create_table()
    limit, failed_columns = (("max examples",) if max_examples else ()), (("failures",) if failures else ())
    for title in ("node", "client", "status", "last seen", *limit, *failed_columns):
        table.add_column(title, no_wrap=True)
    if failures:
        table.add_column("last failure")
    for node in nodes:
        client = clients_by_node.get(node.id, "")
        failed: Any = failures.get(client)
        table.add_row(
            node.name or node.id,
            client,
            Text(node.status, _COLORS.get(node.status, "dim")),
            _format_last_seen(node),
            *((str(max_examples.get(node.id, "")),) if max_examples else ()),
            *((str(failed["count"]), f"round {failed['round']}: {failed['reason']}") if failed else ()),
        )
    out.print(table)


def _format_last_seen(node: Node) -> str:
    if node.status == "online":
        return f"now, for {format_duration(node.online_seconds)}"
    return "not since start" if node.offline_since is None else _format_ago(node.offline_since)


def _format_ago(moment: float) -> str:
    shown = datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
    return f"{shown} ({format_duration(max(0.0, time.time() - moment))} ago)"


def _show_run(out: Console, run_folder: Path, run_status: RunStatus) -> None:
    total = "" if run_status.rounds is None else f" of {run_status.rounds}"
    facts = {
        "run": str(run_folder),
        "round": f"{run_status.round}{total}, {run_status.state}",
        "finished": "no round yet" if run_status.finished is None else _format_ago(run_status.finished),
    }
    if run_status.late:
        facts["late"] = ", ".join(f"{client} {count}" for client, count in sorted(run_status.late.items()))
    if run_status.state == "stopped":
        facts["resume"] = f"fedspan submit --resume {run_folder}"
    for name, fact in facts.items():
        out.print(Text.assemble((f"{name:<10}", "dim"), fact), soft_wrap=True)


@register_command("health", "fedspan health node.yaml", panel=MACHINES)
def health(
    node: Annotated[Path, argument("NODE", "The node's YAML file.")],
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
