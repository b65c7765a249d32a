"""A server's folder with certificates, the secret and Flower's database, and the supervision of its SuperLink."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Event

from fedspan.errors import FedspanError
from fedspan.transports.flower.attached import ServerLink, flower
from fedspan.transports.flower.keys import AUTHORITY, CERTIFICATE, KEY, certified_hosts, make_authority

__all__ = ["Node", "admit", "known_names", "link_of", "nodes", "prepare_folder", "serve"]

_ABOUT, _SECRET, _DATABASE, _LOG = "server.json", "secret", "flower.db", "superlink.log"
_NAMES = "nodes.json"
"""File with the operator's names of the nodes, by Flower's node id."""
_STARTING = 60.0
"""Time limit for the start of a SuperLink, in seconds."""

log = logging.getLogger("fedspan.server")


def prepare_folder(folder: Path, port: int, hosts: Sequence[str], *, insecure: bool) -> ServerLink:
    """Create the missing files of a server's folder.

    Args:
        folder: The server's folder, created with mode 0700.
        port: Port on which the server listens.
        hosts: Host names and addresses under which nodes reach the server.
        insecure: Whether to run without TLS and keys.

    Raises:
        FedspanError: If the folder's certificate is not valid for a host.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not insecure and not (folder / AUTHORITY).exists():
        make_authority(folder, hosts)
    elif not insecure and (others := [host for host in hosts if host not in certified_hosts(folder)]):
        files = ", ".join((AUTHORITY, CERTIFICATE, KEY))
        expected = (
            f"one that the certificate in {folder} is good for ({', '.join(certified_hosts(folder))}); for another, "
            f"remove {files} there, and give the new {AUTHORITY} to every data owner"
        )
        raise FedspanError("--name", others[0], expected)
    if not (folder / _SECRET).exists():
        descriptor = os.open(folder / _SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    (folder / _ABOUT).write_text(json.dumps({"port": port, "insecure": insecure}) + "\n", encoding="utf-8")
    return link_of(folder)


def link_of(folder: Path) -> ServerLink:
    """Return the connection data of a server for its own machine.

    Raises:
        FedspanError: If no server was ever started with the folder.
    """
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        port, insecure = int(about["port"]), bool(about["insecure"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedspanError("server", str(folder), "the folder of a server (fedspan server)") from error
    return ServerLink(f"127.0.0.1:{port}", None if insecure else folder / AUTHORITY, folder / _SECRET)


def serve(folder: Path, link: ServerLink, host: str, stop: Event, ready: Callable[[], None]) -> None:
    """Run a SuperLink until ``stop`` is set, and restart it when it ends by itself.

    Args:
        folder: The server's folder.
        link: Connection data of the SuperLink.
        host: Address to listen on.
        stop: Event that ends the function when set.
        ready: Called once, when the SuperLink is reachable for the first time.

    Raises:
        FedspanError: If the SuperLink does not start, or another process listens on its port.
    """
    _require_free(host, int(link.address.rpartition(":")[2]))
    command = [sys.executable, "-m", "fedspan.transports.flower.superlink", "--isolation", "process", "--host", host]
    command += ["--port", link.address.rpartition(":")[2], "--database", str(folder / _DATABASE)]
    command += ["--superexec-auth-secret-file", str(link.secret), "--disable-runtime-dependency-installation"]
    if link.authority is None:
        command.append("--insecure")
    else:
        command += ["--ssl-ca-certfile", str(link.authority), "--ssl-certfile", str(folder / CERTIFICATE)]
        command += ["--ssl-keyfile", str(folder / KEY), "--enable-supernode-auth"]
    first = True
    while not stop.is_set():
        with (folder / _LOG).open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, "FLWR_HOME": str(folder / "flower")}
            )
        try:
            _await(link, process, folder)
            if first:
                ready()
                first = False
            else:
                log.warning("the SuperLink had ended; it runs again")
            while process.poll() is None and not stop.is_set():
                stop.wait(0.5)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _require_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except socket.gaierror as error:
        raise FedspanError("--host", host, f"an address of this machine ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FedspanError("--port", port, "a port on which nobody else listens") from error
        raise FedspanError("--host", host, f"an address and a port to listen on ({error.strerror})") from error


def _await(link: ServerLink, process: subprocess.Popen[bytes], folder: Path) -> None:
    host, _, port = link.address.rpartition(":")
    until = time.monotonic() + _STARTING
    while time.monotonic() < until and process.poll() is None:
        try:
            with socket.create_connection((host, int(port)), 1) as plain:
                if link.authority is not None:
                    ssl.create_default_context(cafile=str(link.authority)).wrap_socket(
                        plain, server_hostname=host
                    ).close()
                return
        except ssl.SSLError as error:
            raise FedspanError("port", int(port), f"a port on which nobody else listens ({error})") from error
        except OSError:
            time.sleep(0.2)
    lines = (folder / _LOG).read_text(errors="replace").strip().splitlines()
    raise FedspanError("server", link.address, f"a SuperLink that starts; see {folder / _LOG} ({lines[-1:]})")


def admit(link: ServerLink, key: Path, name: str) -> None:
    """Admit the node that has a public key.

    Args:
        link: Connection data of the server.
        key: File with the node's public key.
        name: Id that the node must use; empty: any.

    Raises:
        FedspanError: If the SuperLink refuses or is unreachable.
    """
    if not key.is_file():
        raise FedspanError("key", str(key), "a file with a node's public key (KEY.pub)")
    said = flower(link, "supernode", "register", str(key.resolve()), "@", "--name", name or key.stem)
    if name and "node-id" in said:
        named = {**known_names(link), str(said["node-id"]): name}
        (link.folder / _NAMES).write_text(json.dumps(named) + "\n", encoding="utf-8")


def known_names(link: ServerLink) -> dict[str, str]:
    """Return the ids that admitted nodes must use, by Flower's node id."""
    try:
        found = json.loads((link.folder / _NAMES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(id): str(name) for id, name in found.items()} if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Node:
    """A node as its server knows it.

    Args:
        id: Flower's node id.
        name: The operator's name for the node; empty if it was never admitted by name.
        status: Status of the node: ``online``, ``offline``, or ``registered`` if it never connected.
        online_seconds: Seconds since the node connected; 0 if it is not online.
        offline_since: Time when the node went offline, in seconds since 1970; None: it did not go offline.
    """

    id: str
    name: str
    status: str
    online_seconds: float
    offline_since: float | None


def nodes(link: ServerLink) -> list[Node]:
    """Return the nodes that a server knows."""
    names = known_names(link)
    found: list[Node] = []
    for one in flower(link, "supernode", "list", "@").get("nodes", []):
        id, status = str(one.get("node-id")), str(one.get("status"))
        online = float(one.get("online-elapsed") or 0.0) if status == "online" else 0.0
        found.append(Node(id, names.get(id, ""), status, online, _moment(one.get("offline-at"))))
    return found


def _moment(said: object) -> float | None:
    try:
        return datetime.fromisoformat(str(said)).timestamp()
    except ValueError:  # N/A
        return None
