"""A server's folder with certificates and the secret, its operator's connection, and the known nodes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedspan.errors import FedspanError
from fedspan.files import make_private_folder
from fedspan.transports.flower.adapter import build_flwr_command
from fedspan.transports.flower.keys import AUTHORITY, ensure_authority

__all__ = [
    "DATABASE",
    "WORK",
    "Node",
    "ServerLink",
    "call_flower",
    "format_address",
    "is_prepared",
    "list_nodes",
    "prepare_folder",
    "read_link",
]

_DESCRIPTION, _SECRET = "server.json", "secret"
DATABASE = "flower.db"
"""The SuperLink's database in the server's folder."""
WORK = "work.json"
"""The file in the server's folder that says what its nodes do (``work``)."""

_NAME = "fedspan"
_BUNDLE = """\
[project]
name = "fedspan-run"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedspan"

[tool.flwr.app.components]
serverapp = "fedspan.transports.flower.app:server"
clientapp = "fedspan.transports.flower.app:client"
"""


@dataclass(frozen=True)
class ServerLink:
    """The connection data of a SuperLink for its operator.

    Args:
        address: Address as ``host:port``, on this machine.
        authority: File with the certificate of the authority that signed the SuperLink's; None: an insecure connection.
        secret: File with the secret that the SuperLink was started with.
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
        FedspanError: If other users may enter the folder, or its certificate is not valid for a host.
    """
    make_private_folder(folder, "--folder")
    if not insecure:
        ensure_authority(folder, hosts)
    if not (folder / _SECRET).exists():
        descriptor = os.open(folder / _SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    (folder / _DESCRIPTION).write_text(json.dumps({"port": port, "insecure": insecure}) + "\n", encoding="utf-8")
    return read_link(folder)


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
    return ServerLink(f"127.0.0.1:{port}", None if insecure else folder / AUTHORITY, folder / _SECRET)


def call_flower(link: ServerLink, *arguments: str) -> Any:
    """Call Flower's own command line for a SuperLink.

    Args:
        link: Connection data of the SuperLink.
        arguments: Arguments of ``flwr``; ``@`` stands for the SuperLink's name.

    Returns:
        The parsed output of ``--format json``.

    Raises:
        FedspanError: If the command failed, took too long, or could not be run, as on a full disk.
    """
    try:
        return _call_flower(link, arguments)
    except subprocess.TimeoutExpired as error:
        problem = f"flwr {' '.join(arguments[:2])} took more than {error.timeout:g} seconds"
        raise FedspanError("server", link.address, problem=problem) from error
    except OSError as error:
        problem = f"flwr {' '.join(arguments[:2])} could not be run: {error}"
        raise FedspanError("server", link.address, problem=problem) from error


def _call_flower(link: ServerLink, arguments: Sequence[str]) -> Any:
    with tempfile.TemporaryDirectory(prefix="fedspan-") as home:
        secure = f'root-certificates = "{link.authority.resolve()}"' if link.authority else "insecure = true"
        config = f'[superlink]\ndefault = "{_NAME}"\n\n[superlink.{_NAME}]\naddress = "{link.address}"\n{secure}\n'
        Path(home, "config.toml").write_text(config, encoding="utf-8")
        bundle = Path(home, "bundle")
        bundle.mkdir()
        (bundle / "pyproject.toml").write_text(_BUNDLE, encoding="utf-8")
        expanded = [
            _NAME if argument == "@" else str(bundle) if argument == "%" else argument for argument in arguments
        ]
        command = build_flwr_command(*expanded, "--format", "json")
        # On a dumb terminal JSON has no colors, even if FORCE_COLOR is set, as in the kernel of a notebook.
        environment = {**os.environ, "FLWR_HOME": home, "TERM": "dumb"}
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return _parse_response(completed, expanded)


def _parse_response(completed: subprocess.CompletedProcess[str], arguments: Sequence[str]) -> Any:
    try:
        response = json.loads(completed.stdout[completed.stdout.index("{") :])
    except ValueError:
        response = {"success": False, "error-message": (completed.stderr or completed.stdout).strip()[-500:]}
    if completed.returncode or not response.get("success", True):
        command = f"flwr {' '.join(arguments[:2])}"
        raise FedspanError("server", command, problem=f"{command} failed: {response.get('error-message', response)}")
    return response


@dataclass(frozen=True)
class Node:
    """A node as its server knows it.

    Args:
        id: Flower's node id.
        name: The operator's name for the node; empty if it was never admitted by name.
        status: Status of the node: ``online``, ``offline``, ``registered`` if it never connected, or ``revoked``.
        online_seconds: Seconds since the node connected; 0 if it is not online.
        offline_since: Time when the node went offline, in seconds since 1970; None: it did not go offline.
    """

    id: str
    name: str
    status: str
    online_seconds: float
    offline_since: float | None


def list_nodes(link: ServerLink, names: Mapping[int, str]) -> list[Node]:
    """Return the nodes that a server knows; a node whose key was revoked only if it has a name here.

    Args:
        link: Connection data of the server.
        names: The operator's names by Flower's node id.
    """
    nodes: list[Node] = []
    for record in call_flower(link, "supernode", "list", "@").get("nodes", []):
        id, status = str(record.get("node-id")), str(record.get("status"))
        name = names.get(int(id), "") if id.isdigit() else ""
        if status == "unregistered":
            if not name:
                continue
            status = "revoked"
        online = float(record.get("online-elapsed") or 0.0) if status == "online" else 0.0
        nodes.append(Node(id, name, status, online, _parse_timestamp(record.get("offline-at"))))
    return nodes


def _parse_timestamp(value: object) -> float | None:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:  # N/A
        return None
