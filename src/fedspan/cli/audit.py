"""``fedspan approve``, ``budget`` and ``audit``: a node operator's approval of jobs, its budget, and audit logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.commands import MACHINES, Json, argument, flag, option, register_command
from fedspan.errors import FedspanError, escape_controls


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
    from fedspan.logs import AuditLog

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
    from fedspan.logs import AuditLog

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
    from fedspan.logs import AuditLog, find_position

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
