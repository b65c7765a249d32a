"""Messages between a server and its nodes from end to end: signed by their senders and sealed to their receivers.

Whoever passes a message on, as a proxy that terminates TLS, can neither read nor change it. The head of a message is
sealed by HPKE (RFC 9180: X25519, HKDF-SHA256, AES-256-GCM) and holds the header, a nonce, the key of the body, and the
signature (ECDSA on P-384 with SHA-384). The body is encrypted by AES-256-GCM, in pieces, with a key of its own.

A signature covers the direction, the node's id, the nonce, the header and the digest of the body. An order's covers the
key to which the reply is sealed, too, and a reply's the order's nonce, so that it cannot be the reply to another order;
orders carry a serial, which a node accepts once (``deployment.node``).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from fedspan.federation.protocol import Envelope
from fedspan.transports.http.keys import (
    derive_sealing_key,
    load_node_public_key,
    load_order_key,
    load_order_keys,
    read_sealing_key,
    sign_sealing_key,
)
from fedspan.transports.http.wire import LENGTH, pack, unpack

MARGIN = 2**20
"""Maximum size of what a message has beside its body, in bytes: its head, and what encryption adds."""

_VERSION = b"\x01"
_NONCE_BYTES, _KEY_BYTES, _TAG_BYTES = 16, 32, 16
_PIECE = 2**20
"""Size in bytes of the pieces of a body that are encrypted at once."""
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_ENVELOPE = b"fedspan envelope 2"


@dataclass(frozen=True)
class Body:
    """A body that is encrypted once, for all messages that have it.

    Args:
        key: The key that opens it; empty: it is in plaintext.
        digest: SHA-384 of its plaintext.
    """

    key: bytes
    digest: bytes
    data: bytes


@dataclass(frozen=True)
class OpenedOrder:
    """An order that a node has opened.

    Args:
        reply_key: The key to which the reply is sealed; empty: it is not sealed.
    """

    envelope: Envelope
    nonce: bytes
    reply_key: bytes


class UnsignedSigner:
    """Both halves without keys: for a trial on one machine."""

    def encrypt(self, body: bytes) -> Body:
        """Return a body as it is: it stays in plaintext."""
        return Body(b"", b"", body)

    def seal(self, header: str, body: Body, node: int, sealing: bytes) -> tuple[bytes, bytes]:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return join_message(pack([nonce, _encode(header)])), nonce

    def open(self, message: bytes, node: int, nonce: bytes) -> Envelope:
        """``ServerSigner.open``; the envelope is not verified."""
        return self.open_order(message, node).envelope

    def open_order(self, message: bytes, node: int) -> OpenedOrder:
        """Open an order, which is not verified."""
        head, body = split_message(message)
        nonce, header = unpack(head, 2)
        return OpenedOrder(Envelope(_decode(header), bytes(body)), nonce, b"")

    def seal_reply(self, envelope: Envelope, node: int, order: OpenedOrder) -> bytes:
        """Return a reply."""
        return join_message(pack([order.nonce, _encode(envelope.header)])) + envelope.body


class ServerSigner:
    """Seals orders with the server's order key, and opens replies of admitted nodes.

    Args:
        nodes: Returns the public keys of the admitted nodes in OpenSSH's format, by id. It is called for every reply,
            so that a revoked key counts no longer.
    """

    def __init__(self, folder: Path, nodes: Callable[[], Mapping[int, bytes]]) -> None:
        self._key, self._nodes = load_order_key(folder), nodes
        self._reply_key = X25519PrivateKey.generate()  # of this process: what it has not received is ordered again

    def encrypt(self, body: bytes) -> Body:
        """Encrypt the body of one or more orders."""
        return _encrypt(body)

    def seal(self, header: str, body: Body, node: int, sealing: bytes) -> tuple[bytes, bytes]:
        """Seal an order.

        Args:
            sealing: The node's signed sealing key, as it joined with it.

        Returns:
            What stands before the body in the message, and the order's nonce.

        Raises:
            ValueError: If the sealing key is not one of the node's.
        """
        recipient = read_sealing_key(self._get_key(node), sealing)
        nonce, reply_key = secrets.token_bytes(_NONCE_BYTES), self._reply_key.public_key().public_bytes_raw()
        signature = _sign(self._key, b"order", node, nonce, reply_key, _encode(header), body.digest)
        head = pack([nonce, reply_key, _encode(header), body.key, signature])
        return join_message(_SUITE.encrypt(head, recipient)), nonce

    def open(self, message: bytes, node: int, nonce: bytes) -> Envelope:
        """Return the envelope of a reply.

        Raises:
            ValueError: If it is not a reply of this node to this order.
        """
        key = load_node_public_key(self._get_key(node))
        (header, body_key, signature), body = _open(message, self._reply_key, 3)
        plain = _decrypt(body_key, body)
        _verify(key, signature, b"reply", node, nonce, b"", header, hashlib.sha384(plain).digest())
        return Envelope(_decode(header), plain)

    def _get_key(self, node: int) -> bytes:
        key = self._nodes().get(node)
        if key is None:
            raise ValueError("its node was not admitted with fedspan admit, or its key was revoked")
        return key


OrderSigner = ServerSigner | UnsignedSigner
"""The server's half: seals orders and opens replies."""


class NodeSigner:
    """Opens orders of one server, and seals replies with the node's key.

    Args:
        authority: File with the certificates of the authority and of the order key, from the server's operator.
    """

    def __init__(self, key: ec.EllipticCurvePrivateKey, authority: Path) -> None:
        self.key, self.order_keys = key, load_order_keys(authority)
        self._sealing_key = derive_sealing_key(key)
        self.process = secrets.token_hex(16)
        """By this the server tells a node that connects again from a second process with its key."""

    def sign_sealing_key(self) -> bytes:
        """Return the node's sealing key with the signature of its lasting key."""
        return sign_sealing_key(self.key, self._sealing_key)

    def open_order(self, message: bytes, node: int) -> OpenedOrder:
        """Open an order.

        Raises:
            ValueError: If it is not one of the server's to this node.
        """
        (nonce, reply_key, header, body_key, signature), body = _open(message, self._sealing_key, 5)
        if len(nonce) != _NONCE_BYTES or len(reply_key) != _KEY_BYTES:
            raise ValueError("not an order's nonce and key")
        plain = _decrypt(body_key, body)
        signed = b"order", node, nonce, reply_key, header, hashlib.sha384(plain).digest()
        for key in self.order_keys[:-1]:  # of a server whose certificates are being renewed
            with suppress(ValueError):
                _verify(key, signature, *signed)
                break
        else:
            _verify(self.order_keys[-1], signature, *signed)
        return OpenedOrder(Envelope(_decode(header), plain), nonce, reply_key)

    def seal_reply(self, envelope: Envelope, node: int, order: OpenedOrder) -> bytes:
        """Return the reply to an order, sealed to the key that the order names."""
        body, header = _encrypt(envelope.body), _encode(envelope.header)
        signature = _sign(self.key, b"reply", node, order.nonce, b"", header, body.digest)
        head = _SUITE.encrypt(pack([header, body.key, signature]), X25519PublicKey.from_public_bytes(order.reply_key))
        return join_message(head) + body.data


def join_message(head: bytes) -> bytes:
    """Return what stands before a message's body."""
    return _VERSION + len(head).to_bytes(LENGTH, "big") + head


def split_message(data: bytes) -> tuple[bytes, memoryview]:
    """Split a message into its head and its body.

    Raises:
        ValueError: If it has another version, or is cut off.
    """
    if data[:1] != _VERSION:
        raise ValueError("a message of another version: update fedspan")
    start = 1 + LENGTH
    end = start + int.from_bytes(data[1:start], "big")
    if not start < end <= len(data):
        raise ValueError("a message that is cut off")
    return data[start:end], memoryview(data)[end:]


def _open(message: bytes, key: X25519PrivateKey, count: int) -> tuple[list[bytes], memoryview]:
    head, body = split_message(message)
    try:
        return unpack(_SUITE.decrypt(head, key), count), body
    except InvalidTag:
        raise ValueError("it is not sealed to this receiver, or was changed") from None


def _encrypt(plain: bytes) -> Body:
    key = secrets.token_bytes(_KEY_BYTES)
    cipher, last = AESGCM(key), max(0, len(plain) - 1) // _PIECE
    pieces = (
        cipher.encrypt(_number_piece(number, last), memoryview(plain)[number * _PIECE : (number + 1) * _PIECE], None)
        for number in range(last + 1)
    )
    return Body(key, hashlib.sha384(plain).digest(), b"".join(pieces))


def _decrypt(key: bytes, body: memoryview) -> bytes:
    if len(key) != _KEY_BYTES:
        raise ValueError("not the key of a body")
    step, cipher = _PIECE + _TAG_BYTES, AESGCM(key)
    last = max(0, len(body) - 1) // step
    try:
        return b"".join(
            cipher.decrypt(_number_piece(number, last), body[number * step : (number + 1) * step], None)
            for number in range(last + 1)
        )
    except InvalidTag:
        raise ValueError("its body was changed or cut off") from None


def _number_piece(number: int, last: int) -> bytes:
    """Return the nonce of a piece, whose key is used for one body: its number, and whether it is the last."""
    return number.to_bytes(11, "big") + bytes([number == last])


def _encode(header: str) -> bytes:
    return header.encode(errors="surrogatepass")


def _decode(header: bytes) -> str:
    return header.decode(errors="surrogatepass")


def _encode_signed(direction: bytes, node: int, nonce: bytes, reply_key: bytes, header: bytes, digest: bytes) -> bytes:
    return pack([_ENVELOPE, direction, str(node).encode(), nonce, reply_key, header, digest])


def _sign(key: ec.EllipticCurvePrivateKey, *signed: Any) -> bytes:
    return key.sign(_encode_signed(*signed), ec.ECDSA(hashes.SHA384()))


def _verify(key: ec.EllipticCurvePublicKey, signature: bytes, *signed: Any) -> None:
    try:
        key.verify(signature, _encode_signed(*signed), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        raise ValueError("its signature is not valid") from None
