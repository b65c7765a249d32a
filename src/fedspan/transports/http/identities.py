"""Identities of a server and its nodes: the server's order key, the nodes' keys, and the signed challenge.

The order key's certificate is part of the file that data owners receive (``ca.crt``), signed by the authority in it. A
node's key for sealed orders is derived from its lasting key, which signs it, so that it is the same after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)

from fedspan.errors import FedspanError
from fedspan.transports.http.keys import AUTHORITY, ORDER_KEY, ORDER_NAME, find_issuer
from fedspan.transports.http.wire import pack

SEALING_BYTES = 32
"""Size of a sealing key."""
_JOIN, _SEALING = b"fedspan join 1", b"fedspan sealing key 1"


def sign_join(
    key: ec.EllipticCurvePrivateKey,
    order_keys: Iterable[ec.EllipticCurvePublicKey],
    challenge: bytes,
    server: bytes,
    sealing: bytes,
) -> bytes:
    """Sign a server's challenge, the fingerprint of the order key that it names, and the node's signed sealing key.

    Raises:
        ValueError: If the fingerprint is of no key in the node's file of the authority, so that the server passes on
            the challenge of another one.
    """
    if server not in map(fingerprint_order_key, order_keys):
        raise ValueError("the server names an order key that is not in this node's ca.crt")
    return key.sign(pack([_JOIN, challenge, server, sealing]), ec.ECDSA(hashes.SHA384()))


def verify_join(key: bytes, signature: bytes, challenge: bytes, server: bytes, sealing: bytes) -> None:
    """Verify what ``sign_join`` signed; raise ``ValueError`` if it is not signed by a key in OpenSSH's format."""
    read_sealing_key(key, sealing)
    try:
        load_node_public_key(key).verify(
            signature, pack([_JOIN, challenge, server, sealing]), ec.ECDSA(hashes.SHA384())
        )
    except InvalidSignature:
        raise ValueError("its signature is not valid") from None


def fingerprint_order_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the SHA-256 of an order key."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def load_order_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key that signs a server's orders."""
    path = folder / ORDER_KEY
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise FedspanError("server", str(path), f"the server's order key ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedspanError("server", str(path), "an elliptic-curve key, as fedspan server writes it")
    return key


def load_order_keys(path: Path) -> list[ec.EllipticCurvePublicKey]:
    """Load the public keys that sign a server's orders, and check that an authority in the file certified each.

    Args:
        path: File with the certificates of authorities and of their order keys: one of each, or two while the server's
            certificates are renewed.

    Raises:
        FedspanError: If the file has no valid certificate of an order key.
    """
    expected = f"the {AUTHORITY} that fedspan server wrote"
    keys: list[ec.EllipticCurvePublicKey] = []
    is_expired, now = False, datetime.now(UTC)
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
        for certificate in certificates:
            (name,) = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            key = certificate.public_key()
            if name.value != ORDER_NAME or not isinstance(key, ec.EllipticCurvePublicKey):
                continue
            issuer = find_issuer(certificate, certificates)
            if issuer is None:
                raise ValueError("no authority in the file certified the order key")
            if all(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in (certificate, issuer)):
                keys.append(key)
            else:
                is_expired = True
    except (OSError, ValueError, TypeError) as error:
        raise FedspanError("authority", str(path), f"{expected} ({type(error).__name__})") from error
    if not keys and is_expired:
        problem = "the certificates in it have expired. Ask the server's operator for a new one (fedspan renew)"
        raise FedspanError("authority", str(path), problem=problem)
    if not keys:
        raise FedspanError("authority", str(path), expected, problem="the file has no certificate of an order key")
    return keys


@lru_cache(4096)
def load_node_public_key(key: bytes) -> ec.EllipticCurvePublicKey:
    """Parse a node's public key in OpenSSH's format."""
    public = load_ssh_public_key(key)
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise ValueError("its node's key is not an elliptic-curve key")
    return public


@lru_cache(4096)
def read_sealing_key(key: bytes, sealing: bytes) -> X25519PublicKey:
    """Return the sealing key that a node's lasting key has signed."""
    public, signature = sealing[:SEALING_BYTES], sealing[SEALING_BYTES:]
    try:
        load_node_public_key(key).verify(signature, pack([_SEALING, public]), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise ValueError("its node's sealing key is not signed by its key") from None
    sealing_key = X25519PublicKey.from_public_bytes(public)
    X25519PrivateKey.generate().exchange(sealing_key)  # which refuses points of small order, such as zeros
    return sealing_key


def sign_sealing_key(key: ec.EllipticCurvePrivateKey, sealing: X25519PrivateKey) -> bytes:
    """Return a node's public sealing key with the signature of its lasting key."""
    public = sealing.public_key().public_bytes_raw()
    return public + key.sign(pack([_SEALING, public]), ec.ECDSA(hashes.SHA384()))


def derive_sealing_key(key: ec.EllipticCurvePrivateKey) -> X25519PrivateKey:
    """Return a node's key for sealed orders, which is the same after a restart."""
    secret = key.private_numbers().private_value.to_bytes(key.key_size // 8 + 1, "big")
    derived = HKDF(hashes.SHA256(), SEALING_BYTES, salt=None, info=_SEALING).derive(secret)
    return X25519PrivateKey.from_private_bytes(derived)
