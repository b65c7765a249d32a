"""Signatures of orders and replies from end to end: by the server's order key and by the nodes' own keys.

The SuperLink passes messages on and is not trusted with them: anyone who can store a message there could forge one. A
signature covers the direction, Flower's id of the node, a nonce, the header and the digest of the body. A reply also
covers its order's nonce, so it cannot be used as the reply to another one; orders carry a serial, which a node accepts
once (``deployment.node``). Signatures are ECDSA on P-384 with SHA-384, as in Flower.

The order key's certificate is part of the file that data owners receive (``ca.crt``), signed by the authority in it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_public_key

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.transports.flower.keys import AUTHORITY, ORDER_KEY, ORDER_NAME, is_authority, is_issued

__all__ = ["NodeSigner", "Sealed", "ServerSigner", "Signer", "UnsignedSigner"]

NONCE_BYTES = 16
_DOMAIN = b"fedspan envelope 1"


@dataclass(frozen=True)
class Sealed:
    """An envelope with the proof of who sent it.

    Args:
        envelope: The envelope.
        nonce: A number that is used once, of 16 bytes.
        signature: The signature; empty: the envelope is not signed.
    """

    envelope: Envelope
    nonce: bytes
    signature: bytes = b""


class Signer(Protocol):
    """Seals what one side sends, and opens what it receives."""

    def seal(self, envelope: Envelope, node: int, reply_to: bytes = b"") -> Sealed:
        """Seal an envelope.

        Args:
            envelope: The envelope.
            node: Flower's id of the node that receives the order or sends the reply.
            reply_to: The order's nonce, for a reply.
        """
        ...

    def open(self, sealed: Sealed, node: int, reply_to: bytes = b"") -> Envelope:
        """Return the envelope.

        Args:
            sealed: What was received.
            node: Flower's id of the node that received the order or sent the reply.
            reply_to: The order's nonce, for a reply.

        Raises:
            ValueError: If the signature is not valid.
        """
        ...


class UnsignedSigner:
    """Seals without a signature: for a federation without keys, in a simulation or a trial on one machine."""

    def seal(self, envelope: Envelope, node: int, reply_to: bytes = b"") -> Sealed:
        """``Signer.seal``."""
        return Sealed(envelope, secrets.token_bytes(NONCE_BYTES))

    def open(self, sealed: Sealed, node: int, reply_to: bytes = b"") -> Envelope:
        """``Signer.open``; every envelope is accepted."""
        return sealed.envelope


class ServerSigner:
    """Seals orders with the server's order key, and opens replies of admitted nodes.

    Args:
        folder: The server's folder.
        nodes: Returns the public keys of the admitted nodes in OpenSSH's format, by Flower's node id. It is called
            for every reply, so that a revoked key counts no longer.

    Raises:
        FedspanError: If the folder has no order key.
    """

    def __init__(self, folder: Path, nodes: Callable[[], Mapping[int, bytes]]) -> None:
        path = folder / ORDER_KEY
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise FedspanError("server", str(path), f"the server's order key ({error})") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise FedspanError("server", str(path), "an elliptic-curve key, as fedspan server writes it")
        self._key, self._nodes = key, nodes

    def seal(self, envelope: Envelope, node: int, reply_to: bytes = b"") -> Sealed:
        """``Signer.seal``."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Sealed(envelope, nonce, _sign(self._key, _encode_signed(b"order", node, nonce, reply_to, envelope)))

    def open(self, sealed: Sealed, node: int, reply_to: bytes = b"") -> Envelope:
        """``Signer.open``."""
        admitted = self._nodes().get(node)
        if admitted is None:
            raise ValueError("its node was not admitted with fedspan admit, or its key was revoked")
        key = load_ssh_public_key(admitted)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("its node's key is not an elliptic-curve key")
        _verify(key, sealed, _encode_signed(b"reply", node, sealed.nonce, reply_to, sealed.envelope))
        return sealed.envelope


class NodeSigner:
    """Opens orders of one server, and seals replies with the node's key.

    Args:
        key: The node's private key.
        authority: File with the certificates of the authority and of the order key, from the server's operator.

    Raises:
        FedspanError: If the file has no valid certificate of an order key.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, authority: Path) -> None:
        self._key, self._server = key, load_order_keys(authority)

    def seal(self, envelope: Envelope, node: int, reply_to: bytes = b"") -> Sealed:
        """``Signer.seal``."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Sealed(envelope, nonce, _sign(self._key, _encode_signed(b"reply", node, nonce, reply_to, envelope)))

    def open(self, sealed: Sealed, node: int, reply_to: bytes = b"") -> Envelope:
        """``Signer.open``."""
        data = _encode_signed(b"order", node, sealed.nonce, reply_to, sealed.envelope)
        for key in self._server[:-1]:  # of a server whose certificates are being renewed
            with suppress(ValueError):
                _verify(key, sealed, data)
                return sealed.envelope
        _verify(self._server[-1], sealed, data)
        return sealed.envelope


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
            issuer = next(
                (
                    candidate
                    for candidate in certificates
                    if is_authority(candidate) and is_issued(certificate, candidate)
                ),
                None,
            )
            if issuer is None:
                raise ValueError("no authority in the file certified the order key")
            if all(
                certificate_of_pair.not_valid_before_utc <= now <= certificate_of_pair.not_valid_after_utc
                for certificate_of_pair in (certificate, issuer)
            ):
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


def _encode_signed(direction: bytes, node: int, nonce: bytes, reply_to: bytes, envelope: Envelope) -> bytes:
    """Return what a signature covers; every field has its length before it, so no two envelopes give equal bytes."""
    fields = (
        _DOMAIN,
        direction,
        str(node).encode(),
        nonce,
        reply_to,
        envelope.header.encode(errors="surrogatepass"),
        hashlib.sha384(envelope.body).digest(),
    )
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA384()))


def _verify(key: ec.EllipticCurvePublicKey, sealed: Sealed, data: bytes) -> None:
    if len(sealed.nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
    try:
        key.verify(sealed.signature, data, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise ValueError("its signature is not valid") from None
