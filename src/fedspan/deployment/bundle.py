"""Bundles: folders with everything that a data owner needs to join, apart from its data."""

from __future__ import annotations

import hashlib
import shutil
from importlib.resources import files
from pathlib import Path
from string import Template

import yaml

from fedspan import __version__
from fedspan.errors import FedspanError
from fedspan.files import build_folder_name, convert_disk_errors, write_atomic

_TEMPLATES = files("fedspan.deployment") / "templates"
FILES = ("README.md", "compose.yaml", "fedspan-node.service", "node.yaml")
"""The files of a bundle beside the authority's certificate."""


def compute_digest(authority: Path) -> str:
    """Compute the SHA-256 of a certificate's file, by which a data owner recognizes it."""
    return hashlib.sha256(authority.read_bytes()).hexdigest()


def write_bundle(folder: Path, id: str, address: str, authority: Path) -> Path:
    """Write the folder of a data owner's bundle: node file, authority, instructions, units for systemd, containers.

    Args:
        folder: The folder in which the bundle becomes a folder named by the id.
        address: Address of the server as the data owner reaches it, ``host:port``.

    Raises:
        FedspanError: If the id has characters that no terminal prints, the bundle exists, or the disk refuses to write.
    """
    if not id or not id.isprintable() or "\n" in id:
        raise FedspanError("--bundle", id, "the id of a node in printable characters")
    target = folder / build_folder_name(id)
    if target.exists():
        problem = f"{target} exists. Remove it to write the bundle again"
        raise FedspanError("--bundle", id, problem=problem)
    values = {
        "address": address,
        "id": id,
        "version": __version__,
    }
    with convert_disk_errors(folder, "free some space", "--bundle"):
        target.mkdir(parents=True)
        try:
            write_atomic(target / "ca.crt", authority.read_bytes())
            (target / "data").mkdir()
            for name in FILES:
                text = (_TEMPLATES / name).read_text(encoding="utf-8")
                write_atomic(target / name, Template(text).substitute(_quote(values, name)).encode())
        except OSError:
            shutil.rmtree(target, ignore_errors=True)
            raise
    return target


def _quote(values: dict[str, str], name: str) -> dict[str, str]:
    if name == "node.yaml":
        quoted = {field: yaml.safe_dump(values[field], default_style='"').strip() for field in ("id", "address")}
        return {**values, **quoted}
    if name == "compose.yaml":  # names of Compose projects have lower-case letters, digits, - and _
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in values["id"].lower())
        return {**values, "id": safe}
    if name == "fedspan-node.service":
        return {**values, "id": values["id"].replace("%", "%%")}
    return values
