"""The nodes that a server admits and knows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedspan.errors import FedspanError
from fedspan.transports.flower.server import ServerLink, call_flower

__all__ = ["Node", "admit", "known_names", "nodes"]

_NAMES = "nodes.json"
"""File with the operator's names of the nodes, by Flower's node id."""


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
    said = call_flower(link, "supernode", "register", str(key.resolve()), "@", "--name", name or key.stem)
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
    for one in call_flower(link, "supernode", "list", "@").get("nodes", []):
        id, status = str(one.get("node-id")), str(one.get("status"))
        online = float(one.get("online-elapsed") or 0.0) if status == "online" else 0.0
        found.append(Node(id, names.get(id, ""), status, online, _moment(one.get("offline-at"))))
    return found


def _moment(said: object) -> float | None:
    try:
        return datetime.fromisoformat(str(said)).timestamp()
    except ValueError:  # N/A
        return None
