"""Keys of one session, and a client's long-lived identity."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra fedspan[secagg] is not installed")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedspan.crypto import identity
from fedspan.crypto import keys as sealing
from fedspan.crypto.keys import (
    SessionKeys,
    compute_masking_public,
    compute_share_commitment,
    derive_pair_seed,
    draw_secret,
    open_sealed,
    read_commitments,
    seal,
)


def test_two_clients_agree_on_a_seed_that_is_theirs_and_the_session_s() -> None:
    one, other, third = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(3))
    seed = derive_pair_seed(one.masking, other.masking_public, "run/1")
    assert seed == derive_pair_seed(other.masking, one.masking_public, "run/1")
    assert (
        len({seed, derive_pair_seed(one.masking, third.masking_public, "run/1"), one.own, other.own, one.masking}) == 5
    )
    assert seed != derive_pair_seed(one.masking, other.masking_public, "run/2")
    assert compute_masking_public(one.masking) == one.masking_public
    with pytest.raises(
        ValueError, match="shared key"
    ):  # a point of low order: everybody would agree with it on the same
        derive_pair_seed(one.masking, bytes(32), "run/1")


def test_all_keys_of_a_session_follow_from_its_secret_and_differ() -> None:
    secret = draw_secret()
    keys, again, later = (
        SessionKeys.derive(secret, "run/1"),
        SessionKeys.derive(secret, "run/1"),
        SessionKeys.derive(secret, "run/2"),
    )
    assert keys == again
    every = [key for one in (keys, later) for key in (one.sealing, one.masking, one.own)]
    assert len({secret, *every}) == 7


def test_only_the_receiver_opens_what_was_sealed_and_only_as_it_was_sealed() -> None:
    one, other, third = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(3))
    sealed = seal(one.sealing, other.sealing_public, "one", "other", "run/1", b"shares")
    assert b"shares" not in sealed
    assert open_sealed(other.sealing, one.sealing_public, "one", "other", "run/1", sealed) == b"shares"
    wrong: list[tuple[Any, ...]] = [
        (third.sealing, one.sealing_public, "one", "other", "run/1", sealed),
        (other.sealing, third.sealing_public, "one", "other", "run/1", sealed),
        (other.sealing, one.sealing_public, "other", "one", "run/1", sealed),
        (other.sealing, one.sealing_public, "one", "other", "run/2", sealed),
        *((other.sealing, one.sealing_public, "one", "other", "run/1", changed) for changed in (
            sealed[:-1], b"", sealed[:20], sealed[:12] + bytes(64) + sealed[76:],
            sealed[:-1] + bytes([sealed[-1] ^ 1]), bytes([sealed[0] ^ 1]) + sealed[1:])),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(ValueError, match="not what"):
            open_sealed(*arguments)


def test_shares_are_those_that_their_sender_committed_itself_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads the commitments; a sender that seals other shares seals nothing that opens."""
    one, other = (SessionKeys.derive(draw_secret(), "run/1") for _ in range(2))
    arguments = one.sealing, other.sealing_public, "one", "other", "run/1"
    sealed = seal(*arguments, b"own" + b"key")
    assert read_commitments(sealed) == (compute_share_commitment(b"own"), compute_share_commitment(b"key"))
    assert b"own" not in sealed
    with monkeypatch.context() as patch:
        patch.setattr(sealing, "_commit", lambda _: compute_share_commitment(b"own") + compute_share_commitment(b"no"))
        wrong = seal(*arguments, b"own" + b"key")
    with pytest.raises(ValueError, match="not what 'one' sealed for 'other'"):
        open_sealed(other.sealing, one.sealing_public, "one", "other", "run/1", wrong)


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
