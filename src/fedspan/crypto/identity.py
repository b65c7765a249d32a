"""Lasting identities of clients: signatures by node keys, and their fingerprints as OpenSSH prints them.

Session keys come through the server, which could replace them by its own. A client whose session keys are signed by a
key that others know by its fingerprint cannot be replaced or invented.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)


@dataclass(frozen=True)
class Identity:
    """A lasting key of a client.

    Args:
        public: The public key in OpenSSH's format.
        sign: Signs bytes, by ECDSA with SHA-384.
    """

    public: str
    sign: Callable[[bytes], bytes]


def load_identity(path: Path) -> Identity:
    """Load an identity from a private key in OpenSSH's format.

    Raises:
        ValueError: If it is no elliptic-curve key without a passphrase.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return Identity(public, lambda data: key.sign(data, ec.ECDSA(hashes.SHA384())))


def compute_fingerprint(public: str) -> str:
    """Return a public key's fingerprint as ``ssh-keygen -l`` prints it: ``SHA256:`` and 43 characters.

    Raises:
        ValueError: If it is no public key in OpenSSH's format.
    """
    parts = public.split()
    if len(parts) < 2:
        raise ValueError("not a public key in OpenSSH's format")
    digest = hashlib.sha256(base64.b64decode(parts[1], validate=True)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def verify_signature(public: str, signature: bytes, data: bytes) -> None:
    """Check a signature.

    Raises:
        ValueError: If the key or the signature is not valid.
    """
    try:
        key = load_ssh_public_key(public.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("not an elliptic-curve key")
        key.verify(signature, data, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, UnsupportedAlgorithm, UnicodeError) as error:
        raise ValueError("the signature is not valid") from error
