"""Lasting identities: which files hold one, fingerprints as ssh-keygen prints them, and forged signatures."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

identity = pytest.importorskip("fedspan.crypto.identity", reason="the extra fedspan[secagg] is not installed")
ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")


def written(path: Path, key: object) -> Path:
    encoding, format = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(encoding, format, serialization.NoEncryption()))  # type: ignore[attr-defined]
    return path


def test_what_an_identity_signed_is_valid_for_these_bytes_and_this_key_alone(tmp_path: Path) -> None:
    mine = identity.load_identity(written(tmp_path / "mine", ec.generate_private_key(ec.SECP384R1())))
    other = identity.load_identity(written(tmp_path / "other", ec.generate_private_key(ec.SECP384R1())))
    signature = mine.sign(b"keys")
    identity.verify_signature(mine.public, signature, b"keys")
    for public, forged, data in (
        (mine.public, signature, b"other keys"),
        (mine.public, signature[:-1] + bytes([signature[-1] ^ 1]), b"keys"),
        (mine.public, b"", b"keys"),
        (other.public, signature, b"keys"),
    ):
        with pytest.raises(ValueError, match="the signature is not valid"):
            identity.verify_signature(public, forged, data)


def test_files_without_an_elliptic_curve_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        identity.load_identity(tmp_path / "missing")
    (tmp_path / "text").write_text("no key")
    with pytest.raises(ValueError, match=r"OpenSSH|delimiter|format"):
        identity.load_identity(tmp_path / "text")
    with pytest.raises(ValueError, match="not an elliptic-curve key"):
        identity.load_identity(written(tmp_path / "edwards", ed25519.Ed25519PrivateKey.generate()))


def test_keys_that_are_none_verify_nothing() -> None:
    edwards = ed25519.Ed25519PrivateKey.generate().public_key()
    public = edwards.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
    with pytest.raises(ValueError, match="not an elliptic-curve key"):
        identity.verify_signature(public, b"", b"keys")
    for broken in ("", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384 AAAA", "\ud800"):
        with pytest.raises(ValueError, match=r"not valid|[Kk]ey|Invalid"):
            identity.verify_signature(broken, b"", b"keys")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_key_behind_a_passphrase_is_refused(tmp_path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "secret", "-f", str(tmp_path / "locked")]
    subprocess.run(command, check=True)
    with pytest.raises(ValueError, match=r"[Pp]assword"):
        identity.load_identity(tmp_path / "locked")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_fingerprint_is_ssh_keygen_s(tmp_path: Path) -> None:
    public = identity.load_identity(written(tmp_path / "key", ec.generate_private_key(ec.SECP384R1()))).public
    (tmp_path / "key.pub").write_text(f"{public} somebody\n")
    command = ["ssh-keygen", "-l", "-f", str(tmp_path / "key.pub")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = identity.compute_fingerprint(public)
    assert found == identity.compute_fingerprint(f"{public} a comment") == printed.split()[1]
    assert len(found) == len("SHA256:") + 43


@pytest.mark.parametrize("public", ["", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp384 A*BC"])
def test_what_is_no_public_key_has_no_fingerprint(public: str) -> None:
    with pytest.raises(ValueError, match=r"OpenSSH|base64|padding|Non-base64|alphabet"):
        identity.compute_fingerprint(public)
