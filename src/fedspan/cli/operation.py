"""``fedspan approve``, ``budget``, ``audit``, ``status`` and ``health``: the operation of servers and nodes."""

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
from fedspan.cli.commands import MACHINES, SERVER, Json, ServerFolder, argument, flag, option, register_command
from fedspan.cli.formatting import create_console, create_table
from fedspan.errors import FedspanError, escape_controls
from fedspan.logs import AuditLog, find_position
from fedspan.progress.formatting import format_duration
from fedspan.transports import http

if TYPE_CHECKING:
    from fedspan.deployment.status import RunStatus
    from fedspan.transports.http.server import Node


@register_command(
    "approve",
    "fedspan approve node.yaml",
    "fedspan approve node.yaml 3f9c12",
    'fedspan approve node.yaml 3f9c12 --refuse --reason "no consent for this model"',
    panel=MACHINES,
)
def approve(
    node: Annotated[Path, argument("NODE", "The node's YAML file.")],
    job: Annotated[str | None, argument("JOB", "First characters of a job's name.")] = None,
    refuse: Annotated[bool, flag("--refuse", "Refuse the job, even if it is running.")] = False,
    reason: Annotated[str, option("TEXT", "Reason, sent to the server.")] = "",
    settings: Annotated[bool, flag("--settings", "Show all settings, also of decided jobs.")] = False,
) -> None:
    """Show the jobs that servers request from this node, with what would leave it; approve or refuse one."""
    from fedspan.config.node import load_node
    from fedspan.deployment.approval import Approvals
    from fedspan.deployment.audit import AUDIT

    config = load_node(node)
    folder = Path(config.folder)
    approvals = Approvals(folder, AuditLog(folder / AUDIT))
    if job is not None:
        decision = approvals.decide(job, "refused" if refuse else "approved", reason)
        typer.echo(f"{decision.decision} job {decision.job[:16]}")
        return
    if refuse:
        raise FedspanError("JOB", None, "the first characters of a job's name")
    requests = approvals.list_requests()
    if not requests:
        typer.echo("no server has requested a job yet")
    for request in requests:
        if request.decision is not None and not settings:
            typer.echo(f"job {request.job[:16]}  {request.decision}, requested {request.requested_at}")
            continue
        typer.echo(f"job {request.job[:16]}")
        for name, value in request.summarize(config).items():
            typer.echo(f"  {name:<20}{value}")
        if settings:
            typer.echo("".join(f"    {line}\n" for line in request.format_settings().splitlines()), nl=False)


@register_command(
    "budget",
    "fedspan budget node.yaml",
    'fedspan budget node.yaml --new --reason "the disk with the record was lost"',
    "fedspan budget node.yaml --replaces old.key",
    panel=MACHINES,
)
def budget(
    node: Annotated[Path, argument("NODE", "The node's YAML file.")],
    new: Annotated[bool, flag("--new", "Start a new budget: nothing counts as used any more.")] = False,
    reason: Annotated[str, option("TEXT", "Reason, for the node's audit log.")] = "",
    replaces: Annotated[
        Path | None,
        option("OLD", "Continue the budget of the key that the node used before (its folder, if it had none)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what each server has used of this node's data, or start a new budget.

    With --new, every server has its full budget again on all data sets of this node. The audit log records it.
    """
    from fedspan.config.node import load_node
    from fedspan.deployment.audit import AUDIT
    from fedspan.deployment.usage import UsageBook

    config = load_node(node)
    book = UsageBook(config)
    if replaces is not None:
        if new:
            raise FedspanError("--replaces", str(replaces), "either --new or --replaces")
        book.replace_key(replaces)
        AuditLog(Path(config.folder) / AUDIT).write("key replaced", old=escape_controls(str(replaces)))
    if new:
        if not reason:
            raise FedspanError("--reason", None, "the reason for a new budget, for the audit log")
        AuditLog(Path(config.folder) / AUDIT).write("budget restarted", reason=reason[:500])
        book.restart()
        typer.echo("started a new budget")
        return
    limits = config.limits
    used = [
        {
            "server": account.server,
            "data": account.data,
            "invitations": [len(account.invitations), limits.invitations],
            "runs": [len(account.runs), limits.runs],
            "rounds": [account.rounds, limits.rounds],
            "evaluations": [account.evaluations, limits.evaluations],
            "epsilon": [account.compute_epsilon(limits.delta), limits.epsilon],
        }
        for account in book.list_accounts()
    ]
    if as_json:
        typer.echo(json.dumps(used, indent=2))
        return
    for row in used:
        totals = [
            f"{name} {value[0]:.4g} of {'no limit' if value[1] is None else f'{value[1]:g}'}"
            for name, value in row.items()
            if isinstance(value, list)
        ]
        typer.echo(escape_controls(f"{row['server']}, data set {row['data']}: {', '.join(totals)}"))
    if not used:
        typer.echo("no server has used this node's data yet")


@register_command("audit", "fedspan audit fedspan-server", "fedspan audit fedspan-node --json", panel=MACHINES)
def audit(
    folder: Annotated[Path, argument("FOLDER", "The folder of a server or a node.")],
    as_json: Json = False,
) -> None:
    """Verify the hash chain of a server's or a node's audit log, and print its entries.

    The last line has the number of entries and the log's head. Note both elsewhere: they differ after the log was
    truncated or rewritten.
    """
    from fedspan.deployment.audit import AUDIT

    path = folder / AUDIT
    if not path.is_file():
        raise FedspanError("FOLDER", str(folder), f"the folder of a server or a node (with {AUDIT} in it)")
    entries = AuditLog(path).read()
    head = find_position(path).head
    if as_json:
        typer.echo(json.dumps({"entries": entries, "head": head}, indent=2))
        return
    for entry in entries:
        facts = [f"{name}={value}" for name, value in entry.items() if name not in ("time", "event") and value != ""]
        typer.echo(escape_controls(f"{entry.get('time')}  {entry.get('event')}  {' '.join(facts)}"))
    typer.echo(f"{len(entries)} entries, head {head}")


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
