"""``fedspan server``, ``join`` and ``submit``: federations between machines."""

from __future__ import annotations

import logging
import shlex
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from fedspan.cli.admission import warn_of_expiry
from fedspan.cli.commands import MACHINES, SERVER, Overrides, ServerFolder, argument, flag, option, register_command
from fedspan.cli.formatting import create_console
from fedspan.cli.train import describe_interruption, find_unused_folder
from fedspan.errors import FedspanError
from fedspan.files import restrict_new_files
from fedspan.transports import flower, http

if TYPE_CHECKING:
    from fedspan.monitoring.web import WebPage
    from fedspan.transports.http.server import ServerLink

_FINGERPRINT = " --fingerprint SHA256:..."


@register_command(
    "server",
    "fedspan server --name fl.example.org",
    "fedspan server --name fl.example.org --bundle clinic-a",
    panel=MACHINES,
)
@restrict_new_files()
def server(
    folder: Annotated[
        Path, typer.Option(help="Folder of the certificates, the secret, the database and the log.")
    ] = SERVER,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 9092,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", help="A name or address under which nodes reach this machine; may be repeated."),
    ] = None,
    insecure: Annotated[bool, flag("--insecure", "Disable TLS and keys, for tests on one machine.")] = False,
    bundles: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Write the folder that this data owner needs (node file, certificate, instructions) and "
            "exit; may be repeated.",
            "--bundle",
        ),
    ] = None,
    web_port: Annotated[
        int | None,
        typer.Option(
            "--web-port",
            min=1,
            max=65535,
            help="Serve a read-only web page of nodes and runs on this port. Default: none. Needs fedspan\\[web].",
        ),
    ] = None,
    web_host: Annotated[
        str, typer.Option(help="Address of the web page; other than on loopback, it has the server's certificate.")
    ] = "127.0.0.1",
    reconnect_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds for which an order waits for a node that has gone offline without being stopped."
        ),
    ] = 60.0,
    proxies: Annotated[
        list[str] | None,
        option(
            "ADDRESS",
            "IP address of a reverse proxy in front of the server, whose connections are those of "
            "many nodes; may be repeated.",
            "--proxy",
        ),
    ] = None,
) -> None:
    """Run a federation's server, with TLS and node keys.

    The first start creates a certificate authority and a certificate. Send ca.crt to every data owner, or a folder that
    --bundle writes. With --web-port, the address of the web page is printed with its token.
    """
    http.require()
    from fedspan.transports.http.server import format_address, prepare_folder
    from fedspan.transports.http.supervision import supervise

    if insecure:
        host = "127.0.0.1" if host == "0.0.0.0" else host
        typer.secho("INSECURE: nothing is encrypted, and any node may join. Never with real data.", fg="red", err=True)
    if bundles:
        _write_bundles(folder, bundles, names or [], port, insecure=insecure)
        return
    link = prepare_folder(folder, port, names or [], insecure=insecure)
    if not insecure:
        warn_of_expiry(link)
    stop = make_stop_event()
    page = None if web_port is None else _create_page(link, web_host, web_port, names or [])

    def print_instructions() -> None:
        address = format_address((names or ["THIS-MACHINE"])[0], port)
        typer.echo(f"listening on {host}:{port}; log: {folder / 'server.log'}")
        if page is not None:
            typer.echo(f"web page: {page.url}")
        if not insecure:
            typer.echo(f"send to every data owner: {folder / 'ca.crt'}")
        typer.echo("each data owner runs, on its own machine:")
        typer.echo("  fedspan join --new-key node.key     # and sends you node.key.pub")
        if not insecure:
            options = f"{_format_server_option(folder)}{_FINGERPRINT}"
            typer.echo(f"then run here:\n  fedspan admit node.key.pub --as NAME{options}")
        typer.echo(f"then the data owner runs, with `server: {address}` in the node's file:\n  fedspan join node.yaml")
        typer.echo(f"and run here:\n  fedspan submit config.yaml{_format_server_option(folder)}")

    with page or nullcontext():
        supervise(folder, link, host, stop, print_instructions, reconnect_seconds, proxies or ())


def _create_page(link: ServerLink, host: str, port: int, names: Sequence[str]) -> WebPage:
    """Create the web page of a server; other than on loopback, it has the server's certificate and names."""
    from fedspan.monitoring.web import LOOPBACK, WebPage, require_web

    require_web()
    from fedspan.monitoring.run_monitor import ServerMonitor
    from fedspan.transports.http.admissions import list_named_nodes
    from fedspan.transports.http.keys import CERTIFICATE, KEY, list_certified_hosts

    monitor = ServerMonitor(link.folder, lambda: list_named_nodes(link))
    if host in LOOPBACK or link.authority is None:  # without TLS, other addresses are refused
        return WebPage(monitor.collect, host, port, field="--web-port")
    return WebPage(
        monitor.collect,
        host,
        port,
        names=[*names, *list_certified_hosts(link.folder)],
        certificate=(link.folder / CERTIFICATE, link.folder / KEY),
        field="--web-port",
    )


def _write_bundles(folder: Path, ids: Sequence[str], names: Sequence[str], port: int, *, insecure: bool) -> None:
    """Write bundles; the port and the mode of a server that was started before are not changed."""
    from fedspan.deployment.bundle import compute_digest, write_bundle
    from fedspan.monitoring.web import LOOPBACK
    from fedspan.transports.http.keys import ensure_authority, get_newest_authority, list_certified_hosts
    from fedspan.transports.http.server import format_address, is_prepared, prepare_folder, read_link

    without_tls = FedspanError(
        "--bundle", ids[0], problem="a server without TLS has no bundles: they hold its certificate"
    )
    if insecure:
        raise without_tls
    link = read_link(folder) if is_prepared(folder) else None
    if link is not None and link.authority is None:
        raise without_tls
    if link is not None and not names:
        names = [name for name in list_certified_hosts(folder) if name not in LOOPBACK]
    if not names:
        expected = "--name with the name or address under which the data owner reaches this machine"
        raise FedspanError("--name", None, expected)
    if link is None:
        link = prepare_folder(folder, port, names, insecure=False)
    assert link.authority is not None
    ensure_authority(folder, names)
    warn_of_expiry(link)
    address = format_address(names[0], int(link.address.rpartition(":")[2]))
    authority = get_newest_authority(folder)
    for id in ids:
        target = write_bundle(link.folder / "bundles", id, address, authority)
        typer.echo(f"send this folder to the data owner {id}: {target}")
    typer.echo(f"send the SHA-256 of ca.crt over another channel: {compute_digest(authority)}")
    typer.echo("when its node.key.pub arrives, run here:")
    for id in ids:
        options = f"{_format_server_option(link.folder)}{_FINGERPRINT}"
        typer.echo(f"  fedspan admit node.key.pub --as {shlex.quote(id)}{options}")


@register_command(
    "join",
    "fedspan join --new-key node.key",
    "fedspan join --new-key new.key --replaces node.key",
    "fedspan join node.yaml --check",
    "fedspan join node.yaml",
    panel=MACHINES,
)
@restrict_new_files()
def join(
    node: Annotated[Path | None, argument("NODE", "The node's YAML file.")] = None,
    new_key: Annotated[Path | None, option("FILE", "Create a key pair and exit.")] = None,
    replaces: Annotated[
        Path | None, option("OLD", "With --new-key: the key that the new one replaces, whose budget it continues.")
    ] = None,
    check: Annotated[bool, flag("--check", "Check the file, the key, the data and the connection, and exit.")] = False,
    insecure: Annotated[bool, flag("--insecure", "Disable TLS and keys.")] = False,
) -> None:
    """Join federations as a data owner. Data and paths never leave this machine."""
    http.require()
    if new_key is not None:
        from fedspan.crypto.identity import compute_fingerprint
        from fedspan.deployment.usage_markers import allow_first_book, continue_book, require_book
        from fedspan.transports.http.keys import make_node_key

        if replaces is not None:
            require_book(replaces)
        public = make_node_key(new_key)
        if replaces is None:
            allow_first_book(new_key)
        else:
            continue_book(new_key, replaces)
        typer.echo(f"send this file, and only this, to the server's operator: {public}")
        fingerprint = compute_fingerprint(public.read_text())
        typer.echo(f"read its fingerprint to the operator by telephone; it is for `peers`, too: {fingerprint}")
        return
    if replaces is not None:
        raise FedspanError("--replaces", str(replaces), "--new-key FILE beside it")
    if node is None:
        raise FedspanError("NODE", None, "a node's YAML file, or --new-key FILE")
    from fedspan.deployment.console import log_to_console
    from fedspan.deployment.deploy import check_node
    from fedspan.deployment.deploy import join as run_node

    if check:
        for line in check_node(node, insecure=insecure):
            typer.echo(line)
        return

    log_to_console()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run_node(node, insecure=insecure, stop=make_stop_event())


@register_command(
    "submit", "fedspan submit config.yaml --out runs/first", "fedspan submit --resume runs/first", panel=MACHINES
)
@restrict_new_files()
def submit(
    config: Annotated[Path | None, argument("CONFIG", "The YAML file of a new run.")] = None,
    out: Annotated[Path | None, option("FOLDER", "Folder of the run.")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, option("FOLDER", "Resume an interrupted run.")] = None,
    wait: Annotated[float, typer.Option(min=1, help="Maximum number of seconds to wait for all nodes.")] = 600.0,
    offer_base: Annotated[
        bool, flag("--offer-base", "Offer the base model's files to nodes that have no copy of it.")
    ] = False,
    folder: ServerFolder = SERVER,
) -> None:
    """Train across the nodes that have joined, and export the best round's adapter."""
    http.require()
    if (config is None) == (resume is None):
        raise FedspanError("CONFIG", None if config is None else str(config), "a YAML file, or --resume FOLDER")
    if resume is not None and overrides:
        problem = "it cannot be combined with --resume, because nodes have agreed to the run's own config"
        raise FedspanError("--set", " ".join(overrides), problem=problem)
    from fedspan.cli.run_summary import show_report
    from fedspan.deployment.deploy import submit as submit_run
    from fedspan.progress.view import RunView
    from fedspan.transports.http.server import read_link

    run_folder = resume or out or find_unused_folder(Path("runs") / (config or Path("run")).stem)
    screen = create_console()
    view = RunView(screen, run_folder)
    try:
        with view:
            report = submit_run(
                config,
                run_folder,
                read_link(folder),
                overrides=overrides or (),
                resume=resume is not None,
                wait=wait,
                offer=offer_base,
                listener=view,
            )
    except KeyboardInterrupt:
        typer.echo(describe_interruption(run_folder, view.rounds, "submit"), err=True)
        raise typer.Exit(130) from None
    show_report(screen, report, run_folder)


def make_stop_event() -> Event:
    """Create an event that is set by Ctrl-C or SIGTERM."""
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _format_server_option(folder: Path) -> str:
    return "" if folder == SERVER else f" --server {shlex.quote(str(folder))}"


@register_command("flower-app", "fedspan flower-app app --config run.yaml", panel=MACHINES)
def flower_app(
    folder: Annotated[Path, argument("FOLDER", "Folder of the app; empty or new.")],
    config: Annotated[Path, option("CONFIG", "The run's YAML file.")],
    out: Annotated[Path, option("FOLDER", "Folder of the runs, on the machine of Flower's ServerApp.")] = Path(
        "runs/flower"
    ),
    overrides: Overrides = None,
) -> None:
    """Write a Flower app that runs a federation. It is for Flower's simulation if the config names data."""
    flower.require()
    from fedspan.deployment.flower_server import write_app

    write_app(folder, config, out, overrides or ())
    typer.echo(f"run it: flwr run {folder} --stream")


@register_command("host", "fedspan host node.yaml --socket /run/fedspan/host.sock --user flower", panel=MACHINES)
@restrict_new_files()
def host(
    node: Annotated[Path, argument("NODE", "The node's YAML file.")],
    address: Annotated[Path, option("FILE", "The socket to create.", "--socket")],
    user: Annotated[
        str | None, typer.Option(help="Name or id of the user that the SuperNode runs as. Default: this user.")
    ] = None,
) -> None:
    """Carry out what a Flower app asks, within the node file's limits. The data stay with processes of this user."""
    from fedspan.deployment.console import log_to_console
    from fedspan.deployment.host import host as run_host

    log_to_console()
    run_host(node, address, user, make_stop_event())
