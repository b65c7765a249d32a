"""The admitted nodes of a server: who was let in, by whom it can be undone, and until when it holds.

``nodes.json`` names the admitted nodes. Commands change it under a lock, every change is an entry of the server's audit
log first, and from that log a lost file is rebuilt. Flower's own database decides at the door; a revoked key is never
admitted again there, so a node that comes back needs a new one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from filelock import FileLock

from fedspan.errors import FedspanError, nearest
from fedspan.files import disk_errors, write_atomic
from fedspan.logs import AuditLog
from fedspan.transports.flower.adapter import read_node_id
from fedspan.transports.flower.server import DATABASE, ServerLink, call_flower

__all__ = ["DAYS", "Admission", "admissions", "admit_node", "audit_log", "end_admissions", "revoke_node"]

DAYS = 730
"""Days for which a key is admitted, unless the operator says otherwise."""

_NAMES, _LOCK = "nodes.json", "nodes.lock"
_ADMITTED, _REVOKED = "admitted", "revoked"


@dataclass(frozen=True)
class Admission:
    """What the operator decided about a node.

    Args:
        name: Id that the node must use; empty: any.
        key: The node's public key in OpenSSH's format.
        until: Day on which the admission ends, as YYYY-MM-DD; empty: never.
    """

    name: str
    key: str
    until: str = ""

    @property
    def days_left(self) -> float:
        """Days until the admission ends; infinite if it does not, and 0 or less if it has ended.

        Raises:
            FedspanError: If ``until`` is not a day.
        """
        if not self.until:
            return math.inf
        try:
            end = datetime.fromisoformat(self.until).replace(tzinfo=UTC)
        except ValueError:
            raise FedspanError("nodes.json, until", self.until, "a day as YYYY-MM-DD, or nothing") from None
        return (end - datetime.now(UTC)).total_seconds() / 86400


def audit_log(link: ServerLink) -> AuditLog:
    """Return the audit log of a server."""
    return AuditLog(link.folder / "audit.jsonl")


def fingerprint(key: str) -> str:
    """Return the SHA-256 of a public key in OpenSSH's format, without its comment."""
    return hashlib.sha256(" ".join(key.split()[:2]).encode()).hexdigest()


@contextmanager
def _locked(link: ServerLink) -> Generator[None]:
    with FileLock(link.folder / _LOCK, mode=0o600):
        yield


def admit_node(link: ServerLink, key: Path, name: str, *, days: int = DAYS, replace: bool = False) -> None:
    """Admit the node that has a public key.

    Args:
        link: Connection data of the server.
        key: File with the node's public key.
        name: Id that the node must use; empty: any.
        days: Days after which the admission ends; 0: never.
        replace: Whether the keys that were admitted under this name before are revoked.

    Raises:
        FedspanError: If the name has another key already, the key was revoked, or the SuperLink refuses or is
            unreachable.
    """
    if not key.is_file():
        raise FedspanError("key", str(key), "a file with a node's public key (KEY.pub)")
    text = key.read_text(encoding="utf-8").strip()
    until = (datetime.now(UTC) + timedelta(days=days)).date().isoformat() if days else ""
    with _locked(link):
        admitted = admissions(link)
        key_fingerprint = fingerprint(text)
        replaced = [
            id
            for id, known in admitted.items()
            if name and known.name == name and fingerprint(known.key) != key_fingerprint
        ]
        if replaced and not replace:
            problem = f"{name!r} has another key. Use --replace for the new key in place of it"
            raise FedspanError("--as", name, problem=problem)
        node = _register(link, key, name or key.stem)
        admission = Admission(name, text, until)
        audit_log(link).write(_ADMITTED, node=str(node), name=name, key=text, key_sha256=key_fingerprint, until=until)
        admitted[node] = admission
        _store(link, admitted)
        for replaced_id in replaced:
            _revoke(link, admitted, replaced_id, f"replaced by node {node}")


def _register(link: ServerLink, key: Path, name: str) -> int:
    """Register a key with the SuperLink; one that is registered already keeps its node id."""
    try:
        response = call_flower(link, "supernode", "register", str(key.resolve()), "@", "--name", name)
    except FedspanError:
        node, active = read_node_id(link.folder / DATABASE, key.read_bytes())
        if node is None:
            raise
        if not active:
            problem = "this key was revoked, and stays so. Make a new one there (fedspan join --new-key FILE)"
            raise FedspanError("key", str(key), problem=problem) from None
        return node
    if "node-id" not in response:
        raise FedspanError("server", link.address, problem="the SuperLink's answer has no node id")
    return int(response["node-id"])


def revoke_node(link: ServerLink, node: str, reason: str = "") -> list[int]:
    """Revoke the keys of a node: within seconds the server refuses its requests, and submitted runs its replies.

    Args:
        link: Connection data of the server.
        node: The node's name, or Flower's node id.
        reason: The reason, for the audit log.

    Returns:
        Flower's ids of the revoked nodes; several if a name had several keys.

    Raises:
        FedspanError: If there is no such node, or the SuperLink is unreachable.
    """
    with _locked(link):
        admitted = admissions(link)
        matches = [id for id, admission in admitted.items() if node in (admission.name, str(id))]
        if not node or not matches:
            names = [admission.name or str(id) for id, admission in admitted.items()]
            raise FedspanError("NODE", node, problem=f"no node {node!r} was admitted. {nearest(node, names)}")
        for id in matches:
            _revoke(link, admitted, id, reason)
    return matches


def end_admissions(link: ServerLink) -> list[int]:
    """Revoke the nodes whose admission has ended, and return Flower's ids of them."""
    with _locked(link):
        admitted = admissions(link)
        expired = [id for id, admission in admitted.items() if admission.days_left <= 0]
        for id in expired:
            _revoke(link, admitted, id, f"the admission ended on {admitted[id].until}")
    return expired


def _revoke(link: ServerLink, admitted: dict[int, Admission], id: int, reason: str) -> None:
    try:
        call_flower(link, "supernode", "unregister", str(id), "@")
    except FedspanError:
        _, active = read_node_id(link.folder / DATABASE, admitted[id].key.encode())
        if active:  # else an earlier command was killed after Flower had removed the node
            raise
    admission = admitted.pop(id)
    audit_log(link).write(
        _REVOKED, node=str(id), name=admission.name, key_sha256=fingerprint(admission.key), why=reason
    )
    _store(link, admitted)


def _store(link: ServerLink, admitted: Mapping[int, Admission]) -> None:
    content = {str(id): asdict(admission) for id, admission in admitted.items()}
    with disk_errors(link.folder, "free some space", field="server"):
        write_atomic(link.folder / _NAMES, json.dumps(content, indent=1).encode(), 0o600)


def admissions(link: ServerLink) -> dict[int, Admission]:
    """Return the admitted nodes, by Flower's node id; a lost file is rebuilt from the audit log.

    Raises:
        FedspanError: If the file is damaged: without it, one node could take another's place.
    """
    path = link.folder / _NAMES
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        return {
            int(id): Admission(str(record["name"]), str(record["key"]), str(record["until"]))
            for id, record in records.items()
        }
    except FileNotFoundError:
        return _rebuild(link)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"{path} is damaged ({type(error).__name__}). Remove it: it is rebuilt from the audit log"
        raise FedspanError("server", str(path), problem=problem) from error


def _rebuild(link: ServerLink) -> dict[int, Admission]:
    admitted: dict[int, Admission] = {}
    for row in audit_log(link).read():
        if row.get("event") == _ADMITTED:
            admitted[int(str(row["node"]))] = Admission(str(row["name"]), str(row["key"]), str(row["until"]))
        elif row.get("event") == _REVOKED:
            admitted.pop(int(str(row["node"])), None)
    return admitted
