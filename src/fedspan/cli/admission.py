"""``fedspan admit``, ``revoke`` and ``renew``: who may take part, and the server's certificates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.commands import MACHINES, SERVER, ServerFolder, command

if TYPE_CHECKING:
    from fedspan.transports.flower.server import ServerLink

__all__ = ["admit", "renew", "revoke", "warn_of_ends"]


@command(
    "admit",
    "fedspan admit clinic-a.key.pub --as clinic-a",
    "fedspan admit clinic-a.new.pub --as clinic-a --replace",
    "fedspan admit clinic-b.key.pub --as clinic-b --max-examples 5000",
    panel=MACHINES,
)
def admit(
    key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The node's public key.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="The id that the node must have.")] = "",
    days: Annotated[
        int, typer.Option("--days", min=0, max=36500, help="Days after which the admission ends; 0: never.")
    ] = 730,
    replace: Annotated[
        bool, typer.Option("--replace", help="Revoke the keys that have this name: the node changes its key.")
    ] = False,
    max_examples: Annotated[
        int | None,
        typer.Option(
            "--max-examples",
            metavar="N",
            min=0,
            max=2**53 - 1,
            help="Training examples up to which the number that the node declares counts as its weight, in place of "
            "federation.max_weight_ratio; 0: any, up to that ratio. Left out: as admitted before.",
        ),
    ] = None,
    folder: ServerFolder = SERVER,
) -> None:
    """Let a data owner's node take part (Flower's own command: flwr supernode register)."""
    from fedspan.transports.flower import require

    require()
    from fedspan.transports.flower.admissions import admit_node
    from fedspan.transports.flower.server import link_of

    made = admit_node(link_of(folder), key, name, days=days, replace=replace, max_examples=max_examples)
    most = "" if made.max_examples is None else f", with the weight of at most {made.max_examples} examples"
    typer.echo(f"admitted {key}" + (f", which must call itself {name}" if name else "") + most)


@command("revoke", 'fedspan revoke clinic-a --why "the machine was stolen"', panel=MACHINES)
def revoke(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name, or Flower's id of it.")],
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the audit log.")] = "",
    folder: ServerFolder = SERVER,
) -> None:
    """Shut a node out for good: within seconds, its requests are refused and its replies count no longer.

    A running server and running federations need no restart. To let the node in again, admit a new key.
    """
    from fedspan.transports.flower import require

    require()
    from fedspan.transports.flower.admissions import revoke_node
    from fedspan.transports.flower.server import link_of

    for id in revoke_node(link_of(folder), node, why):
        typer.echo(f"revoked the key of {node} (node {id})")


@command("renew", "fedspan renew", "fedspan renew --activate", panel=MACHINES)
def renew(
    names: Annotated[
        list[str] | None, typer.Option("--name", help="A further name or address of this machine; may be repeated.")
    ] = None,
    activate: Annotated[
        bool, typer.Option("--activate", help="Use the renewed certificates: when every data owner has the new ca.crt.")
    ] = False,
    folder: ServerFolder = SERVER,
) -> None:
    """Renew the server's certificates and its order key, in two steps, so that no node is cut off in between.

    The first step makes a new ca.crt, which trusts the old and the new. Give it to every data owner. The second step,
    --activate, puts the new certificates in use; a running server restarts by itself.
    """
    from fedspan.transports.flower import require

    require()
    from fedspan.transports.flower.admissions import audit_log
    from fedspan.transports.flower.keys import AUTHORITY, activate_authority, renew_authority
    from fedspan.transports.flower.server import link_of

    link = link_of(folder)
    if activate:
        activate_authority(folder)
        audit_log(link).write("certificates activated")
        typer.echo("the renewed certificates are in use; submit a run that was at work again, with --resume")
        return
    path = renew_authority(folder, names or [])
    audit_log(link).write("certificates renewed")
    typer.echo(f"give to every data owner, in place of {AUTHORITY}: {path}\nthen here: fedspan renew --activate")


def warn_of_ends(link: ServerLink) -> None:
    """Print a warning for certificates and admissions that end soon."""
    from fedspan.transports.flower.admissions import read_admissions
    from fedspan.transports.flower.keys import AUTHORITY, CERTIFICATE, SOON, days_left

    def warn(text: str) -> None:
        typer.secho(f"warning: {text}", fg="yellow", err=True)

    if link.authority is not None and (days := days_left(link.folder / AUTHORITY, link.folder / CERTIFICATE)) < SOON:
        warn(f"the server's certificates expire in {max(0, int(days))} days: fedspan renew")
    for id, one in read_admissions(link).items():
        if one.days_left < SOON:
            who = one.name or f"node {id}"
            warn(f"the admission of {who} ends in {max(0, int(one.days_left))} days: fedspan admit KEY.pub --replace")
