"""``fedspan status``: a server's nodes, and the status of its run."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspan.cli.admission import warn_of_ends
from fedspan.cli.commands import MACHINES, SERVER, Json, ServerFolder, command

if TYPE_CHECKING:
    from rich.console import Console

    from fedspan.deployment.status import RunStatus
    from fedspan.transports.flower.server import Node

__all__ = ["status"]

_COLOURS = {"online": "green", "offline": "yellow", "revoked": "red"}


@command("status", "fedspan status", "fedspan status --run runs/first", panel=MACHINES)
def status(
    folder: ServerFolder = SERVER,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="FOLDER", help="The run to show; left out: the newest of this server."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the nodes of a server, and how far its run is.

    Whether a node is online, Flower knows by its heartbeats: of one that was killed, after a minute.
    """
    from fedspan.transports.flower import require

    require()
    from fedspan.cli.formatting import console
    from fedspan.deployment.status import load_named_run, read_status
    from fedspan.errors import FedspanError
    from fedspan.transports.flower.admissions import read_admissions, read_revocations
    from fedspan.transports.flower.server import link_of, nodes_of

    named, link = load_named_run(folder), link_of(folder)
    place = run or (None if named is None else named.folder)
    admitted = read_admissions(link)
    replaced = {one.name for one in admitted.values()}
    names = {id: one.name for id, one in read_revocations(link).items() if one.name not in replaced}
    nodes = nodes_of(link, names | {id: one.name for id, one in admitted.items()})
    most = {str(id): one.max_examples for id, one in admitted.items() if one.max_examples is not None}
    known = {node: client for client, node in ({} if named is None else named.nodes).items()}
    found: RunStatus | None = None
    try:
        found = None if place is None else read_status(place)
    except FedspanError:
        if run is not None:  # the server's own run may have been deleted
            raise
    if as_json:
        rows = [
            {**dataclasses.asdict(node), "client": known.get(node.id), "max_examples": most.get(node.id)}
            for node in nodes
        ]
        about = None if found is None else {"folder": str(place), **dataclasses.asdict(found)}
        typer.echo(json.dumps({"nodes": rows, "run": about}, indent=2))
        return
    out = console()
    _show_nodes(out, nodes, known, most, found)
    warn_of_ends(link)
    if found is not None and place is not None:
        _show_run(out, place, found)


def _show_nodes(
    out: Console, nodes: list[Node], known: dict[str, str], most: dict[str, int], found: RunStatus | None
) -> None:
    from rich.text import Text

    from fedspan.cli.formatting import plain_table

    if not nodes:
        out.print("no nodes yet: fedspan admit KEY.pub")
        return
    failures = {} if found is None else found.failures
    table = plain_table()
    limit, failed_columns = (("max examples",) if most else ()), (("failures",) if failures else ())
    for title in ("node", "client", "status", "last seen", *limit, *failed_columns):
        table.add_column(title, no_wrap=True)
    if failures:
        table.add_column("the last one")
    for node in nodes:
        client = known.get(node.id, "")
        failed: Any = failures.get(client)
        table.add_row(
            node.name or node.id,
            client,
            Text(node.status, _COLOURS.get(node.status, "dim")),
            _seen(node),
            *((str(most.get(node.id, "")),) if most else ()),
            *((str(failed["count"]), f"round {failed['round']}: {failed['reason']}") if failed else ()),
        )
    out.print(table)


def _seen(node: Node) -> str:
    from fedspan.cli.formatting import duration

    if node.status == "online":
        return f"now, for {duration(node.online_seconds)}"
    return "never" if node.offline_since is None else _ago(node.offline_since)


def _ago(moment: float) -> str:
    from fedspan.cli.formatting import duration

    shown = datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
    return f"{shown} ({duration(max(0.0, time.time() - moment))} ago)"


def _show_run(out: Console, place: Path, found: RunStatus) -> None:
    from rich.text import Text

    of = "" if found.rounds is None else f" of {found.rounds}"
    facts = {
        "run": str(place),
        "round": f"{found.round}{of}, {found.state}",
        "finished": "no round yet" if found.finished is None else _ago(found.finished),
    }
    if found.late:
        facts["late"] = ", ".join(f"{client} {count}" for client, count in sorted(found.late.items()))
    if found.state == "stopped":
        facts["go on"] = f"fedspan submit --resume {place}"
    for name, fact in facts.items():
        out.print(Text.assemble((f"{name:<10}", "dim"), fact), soft_wrap=True)
