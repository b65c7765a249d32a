"""``fedspan admit``, ``revoke`` and ``renew``: admission of nodes, and the server's certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.commands import MACHINES, SERVER, ServerFolder, argument, flag, option, register_command
from fedspan.transports import http

if TYPE_CHECKING:
    from fedspan.transports.http.server import ServerLink


@register_command(
    "admit",
    "fedspan admit clinic-a.key.pub --as clinic-a --fingerprint SHA256:...",
    "fedspan admit clinic-a.new.pub --as clinic-a --replace",
    "fedspan admit clinic-b.key.pub --as clinic-b --max-examples 5000",
    panel=MACHINES,
)
def admit(
    key: Annotated[Path, argument("KEY.pub", "The node's public key.")],
    name: Annotated[str, option("NAME", "Id that the node must use.", "--as")] = "",
    days: Annotated[int, typer.Option(min=0, max=36500, help="Days after which the admission ends; 0: never.")] = 730,
    replace: Annotated[bool, flag("--replace", "Revoke the node's earlier keys: the node has a new key.")] = False,
    max_examples: Annotated[
        int | None,
        typer.Option(
            "--max-examples",
            metavar="N",
            min=0,
            max=2**53 - 1,
            help="Largest number of training examples that counts as the node's weight, instead of max_weight_ratio "
            "(of federation); 0: limited only by that ratio. Default: as admitted before.",
        ),
    ] = None,
    fingerprint: Annotated[
        str | None,
        option(
            "SHA256:...", "The key's fingerprint, as the data owner reads it out by telephone; another key is refused."
        ),
    ] = None,
    folder: ServerFolder = SERVER,
) -> None:
    """Admit a data owner's node to the federation."""
    http.require()
    from fedspan.crypto.identity import compute_fingerprint
    from fedspan.transports.http.admissions import admit_node
    from fedspan.transports.http.server import read_link

    admission = admit_node(
        read_link(folder), key, name, days=days, replace=replace, max_examples=max_examples, fingerprint=fingerprint
    )
    limit = "" if admission.max_examples is None else f", with the weight of at most {admission.max_examples} examples"
    typer.echo(f"admitted {key}" + (f", which must use the id {name}" if name else "") + limit)
    if fingerprint is None:
        fingerprint = compute_fingerprint(admission.key)
        typer.echo(f"compare its fingerprint with the data owner's, by telephone: {fingerprint}")


@register_command("revoke", 'fedspan revoke clinic-a --reason "the machine was stolen"', panel=MACHINES)
def revoke(
    node: Annotated[str, argument("NODE", "The node's name, or its id.")],
    reason: Annotated[str, option("TEXT", "The reason, for the audit log.")] = "",
    folder: ServerFolder = SERVER,
) -> None:
    """Revoke a node's key permanently: within seconds, its requests are refused and its replies are rejected.

    A running server and running federations need no restart. To admit the node again, use a new key.
    """
    http.require()
    from fedspan.transports.http.admissions import revoke_node
    from fedspan.transports.http.server import read_link

    for id in revoke_node(read_link(folder), node, reason):
        typer.echo(f"revoked the key of {node} (node {id})")


@register_command("renew", "fedspan renew", "fedspan renew --activate", panel=MACHINES)
def renew(
    names: Annotated[
        list[str] | None, typer.Option("--name", help="Additional name or address of this machine; may be repeated.")
    ] = None,
    activate: Annotated[
        bool, flag("--activate", "Use the renewed certificates, once every data owner has the new ca.crt.")
    ] = False,
    folder: ServerFolder = SERVER,
) -> None:
    """Renew the server's certificates and its order key, in two steps, so that no node loses its connection.

    The first step creates a new ca.crt, which trusts both certificates. Send it to every data owner. The second step,
    --activate, switches to the new certificates; a running server restarts by itself.
    """
    http.require()
    from fedspan.transports.http.admissions import open_audit_log
    from fedspan.transports.http.keys import AUTHORITY, activate_authority, renew_authority
    from fedspan.transports.http.server import read_link

    link = read_link(folder)
    if activate:
        activate_authority(folder)
        open_audit_log(link).write("certificates activated")
        typer.echo("the renewed certificates are in use; resume an interrupted run with fedspan submit --resume")
        return
    path = renew_authority(folder, names or [])
    open_audit_log(link).write("certificates renewed")
    typer.echo(
        f"send to every data owner, as a replacement of {AUTHORITY}: {path}\nthen run here: fedspan renew --activate"
    )


def warn_of_expiry(link: ServerLink) -> None:
    """Print a warning for certificates and admissions that expire soon."""
    from fedspan.transports.http.admissions import read_admissions
    from fedspan.transports.http.keys import AUTHORITY, CERTIFICATE, SOON, compute_days_left

    def warn(text: str) -> None:
        typer.secho(f"warning: {text}", fg="yellow", err=True)

    if (
        link.authority is not None
        and (days := compute_days_left(link.folder / AUTHORITY, link.folder / CERTIFICATE)) < SOON
    ):
        warn(f"the server's certificates expire in {max(0, int(days))} days: fedspan renew")
    for id, admission in read_admissions(link).items():
        if admission.days_left < SOON:
            node = admission.name or f"node {id}"
            days = max(0, int(admission.days_left))
            warn(f"the admission of {node} expires in {days} days: fedspan admit KEY.pub --replace")
