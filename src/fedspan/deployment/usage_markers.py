"""The marker of a node's book (``usage``): a file outside of the node's folder that proves that the book exists.

A marker holds the digest of the book's last version, the permission to create the first one, or the path of the marker
that it continues, because its key replaces another one.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedspan.config.node import build_budget_marker
from fedspan.errors import FedspanError
from fedspan.files import convert_disk_errors, read_bytes, write_atomic

FIRST = "no book yet"
"""Content of the marker of a new key, whose node may create its first book."""
_CONTINUES = "continues "
"""What the marker of a key that replaces another one begins with; the path of that one's marker follows."""
_MAX_REPLACED = 64
"""Number of keys in a row that replaced each other without being used."""
_CURE = "free some space on the node"


def allow_first_book(key: Path) -> None:
    """Allow the node of a key that was just created to create its first book."""
    write_marker(build_budget_marker(key), FIRST)


def require_book(key: Path) -> None:
    """Check that a key, or the folder of a node without a key, has a book that a new key can continue."""
    marker = build_budget_marker(key)
    if read_marker(marker) is None:
        expected = f"the key that the node used before (its folder, if it had none), with {marker.name!r} beside it"
        raise FedspanError("--replaces", str(key), expected)


def continue_book(key: Path, old: Path) -> None:
    """Let the node of a key that was just created continue the book of the key that it replaces.

    Args:
        key: File of the node's new private key.
        old: File of the key that it replaces; the node's folder if it had no key.
    """
    require_book(old)
    link_marker(build_budget_marker(key), old)


def link_marker(marker: Path, old: Path) -> None:
    """Let a marker continue that of another key.

    Args:
        old: File of the other key; the node's folder if it had no key.
    """
    replaced = build_budget_marker(old)
    path = os.path.relpath(replaced.parent.resolve() / replaced.name, marker.parent.resolve())
    with convert_disk_errors(marker.parent, _CURE):
        write_atomic(marker, f"{_CONTINUES}{path}".encode(errors="surrogateescape"), 0o600)


def read_marker_text(path: Path) -> str | None:
    """Return the content of a marker as it is stored; None: there is none."""
    return read_bytes(path).decode(errors="surrogateescape").strip() if path.is_file() else None


def read_marker(path: Path) -> str | None:
    """Return the content of a marker, or of the one that it continues; None: there is none."""
    for _ in range(_MAX_REPLACED):
        content = read_marker_text(path)
        if content is None or not content.startswith(_CONTINUES):
            return content
        path = path.parent / content.removeprefix(_CONTINUES)
    return None


def write_marker(path: Path, content: str) -> None:
    """Write a marker."""
    with convert_disk_errors(path.parent, _CURE):
        write_atomic(path, content.encode(), 0o600)
