"""Certificates and keys: what they are good for, who may read them, and that ssh-keygen's do as well."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from fedspan.errors import FedspanError

keys = pytest.importorskip("fedspan.transports.flower.keys", reason="the extra fedspan[flower] is not installed")


def handshake(folder: Path, authority: Path, name: str) -> None:
    """Connect to a server with the folder's certificate, as a client that trusts an authority and expects a name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / keys.CERTIFICATE, folder / keys.KEY)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            context.wrap_socket(theirs, server_side=True).close()
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        ssl.create_default_context(cafile=str(authority)).wrap_socket(ours, server_hostname=name).close()
    finally:
        ours.close()
        thread.join()


def test_the_certificate_is_good_for_its_names_and_no_others(tmp_path: Path) -> None:
    keys.make_authority(tmp_path / "a", ["fl.example.org", "192.0.2.7"])
    for name in ("fl.example.org", "192.0.2.7", "127.0.0.1", "localhost"):
        handshake(tmp_path / "a", tmp_path / "a" / keys.AUTHORITY, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a", tmp_path / "a" / keys.AUTHORITY, "other.example.org")


def test_another_authority_is_not_trusted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        keys.make_authority(tmp_path / name, [])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a", tmp_path / "b" / keys.AUTHORITY, "localhost")


def test_what_is_secret_is_only_its_owner_s_and_nothing_is_overwritten(tmp_path: Path) -> None:
    keys.make_authority(tmp_path / "a", [])
    public = keys.make_node_key(tmp_path / "node.key")
    for path in (tmp_path / "a" / keys.KEY, tmp_path / "node.key"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert b"PRIVATE" not in public.read_bytes()
    with pytest.raises(FedspanError, match="already has certificates"):
        keys.make_authority(tmp_path / "a", [])
    with pytest.raises(FedspanError, match=r"node\.key' already exists"):
        keys.make_node_key(tmp_path / "node.key")


def test_a_key_is_read_back_unless_others_can_read_it_or_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    public = keys.make_node_key(path)
    _, found = keys.load_node_key(path)
    assert found.curve.name == "secp384r1"
    path.chmod(0o644)
    with pytest.raises(FedspanError, match="chmod 600"):
        keys.load_node_key(path)
    for content in (b"", b"nonsense", public.read_bytes()):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(FedspanError, match="a private key"):
            keys.load_node_key(path)
    with pytest.raises(FedspanError, match="a private key"):
        keys.load_node_key(tmp_path / "nothing")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen here")
def test_ssh_keygen_s_keys_do_as_well_but_no_others_of_its_kinds(tmp_path: Path) -> None:
    for kind, bits in (("ecdsa", "384"), ("ed25519", "256")):
        made = ["ssh-keygen", "-q", "-t", kind, "-b", bits, "-N", "", "-f", str(tmp_path / kind)]
        subprocess.run(made, check=True, env={**os.environ, "HOME": str(tmp_path)})
    assert keys.load_node_key(tmp_path / "ecdsa")
    with pytest.raises(FedspanError, match="elliptic-curve"):
        keys.load_node_key(tmp_path / "ed25519")
