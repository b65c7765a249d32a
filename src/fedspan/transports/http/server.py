"""A server's folder with certificates and the secret, its operator's connection, and the known nodes."""

from __future__ import annotations

import json
import secrets
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from fedspan.errors import FedspanError
from fedspan.files import make_private_folder, write_atomic
from fedspan.processes import hold_folder
from fedspan.transports.http.keys import AUTHORITY, ensure_authority
from fedspan.transports.http.wire import KEPT_ALIVE, NodeWork, parse_work

_DESCRIPTION, _SECRET = "server.json", "secret"
_SECRET_BYTES = 32
_SECONDS = 30.0
"""Time limit of a request of the operator's, beside what an answer waits."""


@dataclass(frozen=True)
class ServerLink:
    """The connection data of a server for its operator.

    Args:
        address: Address as ``host:port``, on this machine.
        authority: File with the certificate of the authority that signed the server's; None: an insecure connection.
        secret: File with the secret that commands prove to the server.
    """

    address: str
    authority: Path | None
    secret: Path

    @property
    def folder(self) -> Path:
        """The server's folder, which contains the secret."""
        return self.secret.parent


def format_address(host: str, port: int) -> str:
    """Return a host and a port as ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def prepare_folder(folder: Path, port: int, hosts: Sequence[str], *, insecure: bool) -> ServerLink:
    """Create the missing files of a server's folder.

    Args:
        folder: The server's folder, which no other user may enter.
        port: Port on which the server listens.
        hosts: Host names and addresses under which nodes reach the server.
        insecure: Whether to run without TLS and keys.

    Raises:
        FedspanError: If other users may enter the folder, a server works in it, its certificate is not valid for a
            host, or its secret is damaged.
    """
    make_private_folder(folder, "--folder")
    link = _build_link(folder, port, insecure)
    with hold_folder(folder, "server", "--folder"):
        if not insecure:
            ensure_authority(folder, hosts)
        if not link.secret.exists():
            write_atomic(link.secret, secrets.token_hex(_SECRET_BYTES).encode(), 0o600)
        read_secret(link)
        write_link(link)
    return link


def write_link(link: ServerLink) -> None:
    """Write what ``read_link`` reads. Call it only while holding the server's folder."""
    description = {"port": int(link.address.rpartition(":")[2]), "insecure": link.authority is None}
    write_atomic(link.folder / _DESCRIPTION, f"{json.dumps(description)}\n".encode())


def read_secret(link: ServerLink) -> str:
    """Return the secret that the operator's requests have.

    Raises:
        FedspanError: If it is shorter than ``prepare_folder`` writes it, which anyone might guess.
    """
    secret = link.secret.read_text(encoding="utf-8", errors="replace")
    if len(secret) < 2 * _SECRET_BYTES:
        problem = f"{link.secret} is empty or damaged. Remove it: fedspan server writes a new one when it starts"
        raise FedspanError("secret", str(link.secret), problem=problem)
    return secret


def is_prepared(folder: Path) -> bool:
    """Return whether a server was started with a folder before."""
    return (folder / _DESCRIPTION).is_file()


def read_link(folder: Path) -> ServerLink:
    """Return the connection data of a server for its own machine.

    Raises:
        FedspanError: If no server was ever started with the folder.
    """
    try:
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        port, insecure = int(description["port"]), bool(description["insecure"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedspanError("server", str(folder), "the folder of a server (fedspan server)") from error
    return _build_link(folder, port, insecure)


def _build_link(folder: Path, port: int, insecure: bool) -> ServerLink:
    return ServerLink(f"127.0.0.1:{port}", None if insecure else folder / AUTHORITY, folder / _SECRET)


class Operator:
    """Sends a server the requests of its operator, from its own machine."""

    def __init__(self, link: ServerLink) -> None:
        self.link = link
        scheme = "http" if link.authority is None else "https"
        verify: ssl.SSLContext | bool = False
        if link.authority is not None:
            verify = ssl.create_default_context(cafile=str(link.authority))
        self._client = httpx.Client(
            base_url=f"{scheme}://{link.address}/v1/",
            verify=verify,
            headers={"authorization": f"Bearer {link.secret.read_text(encoding='utf-8')}"},
            limits=httpx.Limits(keepalive_expiry=KEPT_ALIVE),
            trust_env=False,  # the server is on this machine, whatever proxy leads elsewhere
        )

    def post(self, path: str, content: Any = None, wait: float = 0.0) -> Any:
        """Send a request, and return its answer.

        Args:
            content: Plain values; None: none.
            wait: Seconds for which the answer may wait.

        Raises:
            httpx.HTTPError: If the server is unreachable, or refuses.
        """
        answer = self._client.post(path, json=content, timeout=_SECONDS + wait)
        answer.raise_for_status()
        return answer.json()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@dataclass(frozen=True)
class Node:
    """A node as its server knows it.

    Args:
        name: The operator's name for the node; empty if it was never admitted by name.
        status: Status of the node: ``online``, ``offline``, ``registered`` if it did not connect since the server
            started, or ``revoked``.
        online_seconds: Seconds since the node connected; 0 if it is not online.
        offline_since: Time when the node went offline, in seconds since 1970; None: it did not go offline.
        work: What it does, as it says; None: it waits for orders, or is not online.
    """

    id: str
    name: str
    status: str
    online_seconds: float = 0.0
    offline_since: float | None = None
    work: NodeWork | None = None


def list_nodes(link: ServerLink, names: Mapping[int, str], revoked: Mapping[int, str]) -> list[Node]:
    """Return the nodes that a server knows, those that are connected first.

    Args:
        link: Connection data of the server.
        names: The names of the admitted nodes by id; empty in a trial without keys.
    """
    operator = Operator(link)
    try:
        rows = operator.post("nodes")
    except (httpx.HTTPError, OSError) as error:
        problem = f"no answer from {link.address} ({type(error).__name__}). Is fedspan server running?"
        raise FedspanError("server", link.address, problem=problem) from error
    finally:
        operator.close()
    nodes, seen = list[Node](), set[int]()
    for row in rows:
        id = int(row["node"])
        if id not in revoked:
            seen.add(id)
            status, work = ("online" if row["online"] else "offline"), parse_work(row["work"])
            times = row["online_seconds"], row["offline_since"]
            nodes.append(Node(str(id), names.get(id, ""), status, *times, work if row["online"] else None))
    nodes += [Node(str(id), name, "registered") for id, name in names.items() if id not in seen]
    return nodes + [Node(str(id), name, "revoked") for id, name in revoked.items()]
