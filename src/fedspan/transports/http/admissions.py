"""The admitted nodes of a server: who was let in, until when it holds, and with how many examples at most.

``nodes.json`` names the admitted and the revoked nodes. Commands change it under a lock, every change is an entry of
the server's audit log first, and from that log a lost file is rebuilt. A running server reads the file when it changes.
A revoked key is never admitted again, so a node that comes back needs a new one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from filelock import FileLock

from fedspan.crypto.identity import compute_fingerprint
from fedspan.errors import FedspanError, require_printable, suggest_nearest
from fedspan.files import convert_disk_errors, write_atomic
from fedspan.logs import AuditLog
from fedspan.transports.http.keys import load_node_public_key
from fedspan.transports.http.server import Node, ServerLink, list_nodes

DAYS = 730
"""Days for which a key is admitted, unless the operator says otherwise."""

_NAMES, _LOCK = "nodes.json", "nodes.lock"
_ADMITTED, _REVOKED = "admitted", "revoked"


@dataclass(frozen=True)
class Admission:
    """The admission of a node by the operator.

    Args:
        name: Id that the node must use; empty: any.
        key: The node's public key in OpenSSH's format.
        until: Day on which the admission ends, as YYYY-MM-DD; empty: never.
        max_examples: Number of training examples up to which the number that the node declares counts; None: any.
        revoked: When the key was revoked, in ISO 8601; empty: it was not.
    """

    name: str
    key: str
    until: str = ""
    max_examples: int | None = None
    revoked: str = ""

    @property
    def days_left(self) -> float:
        """Days until the admission ends; infinite if it does not, and 0 or less if it has ended."""
        if not self.until:
            return math.inf
        try:
            end = datetime.fromisoformat(self.until).replace(tzinfo=UTC)
        except ValueError:
            raise FedspanError("nodes.json, until", self.until, "a day as YYYY-MM-DD, or nothing") from None
        return (end - datetime.now(UTC)).total_seconds() / 86400


def open_audit_log(link: ServerLink) -> AuditLog:
    """Return the audit log of a server."""
    return AuditLog(link.folder / "audit.jsonl")


def hash_key(key: str) -> str:
    """Return the SHA-256 of a public key in OpenSSH's format, without its comment."""
    return hashlib.sha256(" ".join(key.split()[:2]).encode()).hexdigest()


@contextmanager
def _hold_lock(link: ServerLink) -> Generator[None]:
    with FileLock(link.folder / _LOCK, mode=0o600):
        yield


def admit_node(
    link: ServerLink,
    key: Path,
    name: str,
    *,
    days: int = DAYS,
    replace: bool = False,
    max_examples: int | None = None,
    fingerprint: str | None = None,
) -> Admission:
    """Admit the node that has a public key.

    Args:
        name: Id that the node must use; empty: any.
        days: Days after which the admission ends; 0: never.
        replace: Whether the keys that were admitted under this name before are revoked.
        max_examples: Number of training examples up to which the number that the node declares counts; 0: any; None:
            as this name or key was admitted before, otherwise any.
        fingerprint: The key's fingerprint as the data owner reads it out; None: it is not compared.

    Raises:
        FedspanError: If the key has another fingerprint or was revoked, or the name has another key already.
    """
    if not key.is_file():
        raise FedspanError("key", str(key), "a file with a node's public key (KEY.pub)")
    try:
        require_printable(name)
    except ValueError as error:
        raise FedspanError("--as", name, str(error)) from None
    text = key.read_text(encoding="utf-8").strip()
    if fingerprint is not None:
        _require_fingerprint(key, text, fingerprint)
    until = (datetime.now(UTC) + timedelta(days=days)).date().isoformat() if days else ""
    with _hold_lock(link):
        nodes = _read_nodes(link)
        admitted, key_fingerprint = _select_admitted(nodes), hash_key(text)
        same = {
            id: (name != "" and admission_of_node.name == name, hash_key(admission_of_node.key) == key_fingerprint)
            for id, admission_of_node in nodes.items()
        }
        if max_examples is None:  # revoked keys included: a limit outlives the key
            earlier = [nodes[id] for id, (same_name, same_key) in same.items() if same_name or same_key]
            max_examples = earlier[-1].max_examples if earlier else None
        replaced = [id for id, (same_name, same_key) in same.items() if id in admitted and same_name and not same_key]
        if replaced and not replace:
            problem = f"{name!r} has another key. Use --replace to replace it by the new key"
            raise FedspanError("--as", name, problem=problem)
        node = _find_id(key, text, nodes)
        admission = Admission(name, text, until, max_examples or None)
        facts = {"key_sha256": key_fingerprint, "until": until, "max_examples": admission.max_examples}
        open_audit_log(link).write(_ADMITTED, node=str(node), name=name, key=text, **facts)
        nodes.pop(node, None)  # the newest admission is the last
        nodes[node] = admission
        _store(link, nodes)
        for replaced_id in replaced:
            _revoke(link, nodes, replaced_id, f"replaced by node {node}")
    return admission


def _require_fingerprint(path: Path, key: str, fingerprint: str) -> None:
    try:
        actual = compute_fingerprint(key)
    except ValueError as error:
        raise FedspanError("key", str(path), f"a file with a node's public key ({error})") from None
    if fingerprint != actual:
        problem = f"{path} has the fingerprint {actual}. Ask the data owner for the right key; nobody was admitted"
        raise FedspanError("--fingerprint", fingerprint, problem=problem)


def compute_node_id(key: str) -> int:
    """Return the id of the node that has a public key: 63 bits of the key's SHA-256.

    Raises:
        ValueError: If it is no public key in OpenSSH's format.
    """
    compute_fingerprint(key)
    return int(hash_key(key)[:16], 16) >> 1


def _find_id(path: Path, key: str, nodes: Mapping[int, Admission]) -> int:
    """Return the id of the node with a public key that can be admitted."""
    try:
        id = compute_node_id(key)
        load_node_public_key(key.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedspanError("key", str(path), f"a file with a node's public key ({error})") from None
    if id in nodes and nodes[id].revoked:
        problem = "this key was revoked, and stays so. Make a new one there (fedspan join --new-key FILE)"
        raise FedspanError("key", str(path), problem=problem)
    if id in nodes and hash_key(nodes[id].key) != hash_key(key):
        raise FedspanError("key", str(path), "another key: a node with this id has a different one")
    return id


def revoke_node(link: ServerLink, node: str, reason: str = "") -> list[int]:
    """Revoke the keys of a node: within seconds the server refuses its requests, and submitted runs its replies.

    Returns:
        Ids of the revoked nodes; several if a name had several keys.
    """
    with _hold_lock(link):
        nodes = _read_nodes(link)
        admitted = _select_admitted(nodes)
        matches = [id for id, admission in admitted.items() if node in (admission.name, str(id))]
        if not node or not matches:
            names = [admission.name or str(id) for id, admission in admitted.items()]
            raise FedspanError("NODE", node, problem=f"no node {node!r} was admitted. {suggest_nearest(node, names)}")
        for id in matches:
            _revoke(link, nodes, id, reason)
    return matches


def end_admissions(link: ServerLink) -> list[int]:
    """Revoke the nodes whose admission has ended, and return Ids of them."""
    with _hold_lock(link):
        nodes = _read_nodes(link)
        expired = [id for id, admission in _select_admitted(nodes).items() if admission.days_left <= 0]
        for id in expired:
            _revoke(link, nodes, id, f"the admission ended on {nodes[id].until}")
    return expired


def _revoke(link: ServerLink, nodes: dict[int, Admission], id: int, reason: str) -> None:
    admission = nodes[id]
    time = open_audit_log(link).write(
        _REVOKED, node=str(id), name=admission.name, key_sha256=hash_key(admission.key), reason=reason
    )
    nodes[id] = dataclasses.replace(admission, revoked=time)
    _store(link, nodes)


def _store(link: ServerLink, nodes: Mapping[int, Admission]) -> None:
    content = {str(id): dataclasses.asdict(admission) for id, admission in nodes.items()}
    with convert_disk_errors(link.folder, "free some space", field="server"):
        write_atomic(link.folder / _NAMES, json.dumps(content, indent=1).encode(), 0o600)


def read_admissions(link: ServerLink) -> dict[int, Admission]:
    """Return the admitted nodes, by id; a lost file is rebuilt from the audit log.

    Raises:
        FedspanError: If the file is damaged: without it, one node could take another's place.
    """
    return _select_admitted(_read_stored_nodes(link))


def read_revocations(link: ServerLink) -> dict[int, Admission]:
    """Return the nodes whose keys were revoked, by id."""
    return {id: admission for id, admission in _read_stored_nodes(link).items() if admission.revoked}


def list_named_nodes(link: ServerLink) -> list[Node]:
    """Return the nodes that a server knows, with the names under which they were admitted.

    A node whose key was revoked is listed if its name has no other key now.

    Raises:
        FedspanError: If the file of the admitted nodes is damaged, or the server does not answer.
    """
    admitted = {id: admission.name for id, admission in read_admissions(link).items()}
    revoked = {id: admission.name for id, admission in read_revocations(link).items()}
    replaced = set(admitted.values())
    return list_nodes(link, admitted, {id: name for id, name in revoked.items() if name and name not in replaced})


def _read_stored_nodes(link: ServerLink) -> dict[int, Admission]:
    """Return all nodes that were ever admitted; a lost file is rebuilt once, since runs read it again and again."""
    path = link.folder / _NAMES
    if not path.exists():
        with _hold_lock(link):
            if not path.exists():
                _store(link, _rebuild(link))
    return _read_nodes(link)


def _select_admitted(nodes: Mapping[int, Admission]) -> dict[int, Admission]:
    return {id: admission for id, admission in nodes.items() if not admission.revoked}


def _read_nodes(link: ServerLink) -> dict[int, Admission]:
    """Return all nodes that were ever admitted, in the order of their admissions."""
    path = link.folder / _NAMES
    try:
        state = path.stat()
        return dict(_parse_nodes(path, (state.st_mtime_ns, state.st_ino, state.st_size)))
    except FileNotFoundError:
        return _rebuild(link)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"{path} is damaged ({type(error).__name__}). Remove it: it is rebuilt from the audit log"
        raise FedspanError("server", str(path), problem=problem) from error


@lru_cache(4)
def _parse_nodes(path: Path, version: tuple[int, int, int]) -> Mapping[int, Admission]:
    """Parse the file once for each of its versions: a run reads it for every reply."""
    records = json.loads(path.read_text(encoding="utf-8"))
    return {int(id): _parse_admission(record) for id, record in records.items()}


def _parse_admission(row: Mapping[str, object]) -> Admission:
    """Return an admission from its plain values; KeyError or ValueError: they are none."""
    most = row.get("max_examples")
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError("a number of examples is at least 1")
    return Admission(str(row["name"]), str(row["key"]), str(row["until"]), most, str(row.get("revoked", "")))


def _rebuild(link: ServerLink) -> dict[int, Admission]:
    nodes: dict[int, Admission] = {}
    for row in open_audit_log(link).read():
        if row.get("event") == _ADMITTED:
            id = int(str(row["node"]))
            nodes.pop(id, None)
            nodes[id] = _parse_admission(row)
        elif row.get("event") == _REVOKED and (id := int(str(row["node"]))) in nodes:
            nodes[id] = dataclasses.replace(nodes[id], revoked=str(row["time"]))
    return nodes
