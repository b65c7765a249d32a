"""A node with a valid key that sends whatever it likes to a SuperLink, and strangers without a key."""

import base64
import hashlib
import importlib
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

_FLEET = "flwr.proto.fleet_pb2"
_MESSAGES = "flwr.proto.message_pb2"


def name_of(module: str, name: str) -> Any:
    """Return a name of Flower's that its public interface does not have."""
    return getattr(importlib.import_module(module), name)


class HostileNode:
    """Sends single requests of the node API, signed with an admitted key.

    Args:
        address: Address of the SuperLink as ``host:port``.
        authority: File with the certificate of the server's authority.
        key: The node's private key.
    """

    def __init__(self, address: str, authority: Path, key: Any) -> None:
        httpx = importlib.import_module("httpx")
        self._client = httpx.Client(
            base_url=f"https://{address}", verify=ssl.create_default_context(cafile=str(authority)), timeout=60
        )
        self._key = key
        self.public = name_of("flwr.supercore.primitives.asymmetric", "public_key_to_bytes")(key.public_key())
        self.node = 0

    def headers(self) -> dict[str, str]:
        """Return the headers of a request, signed now."""
        sign = name_of("flwr.supercore.primitives.asymmetric", "sign_message")
        stamp = name_of("flwr.supercore.date", "now")().isoformat()
        constants = importlib.import_module("flwr.supercore.constant")
        return {
            constants.FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(self.public).decode(),
            constants.FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign(self._key, stamp.encode())).decode(),
            name_of("flwr.common.constant", "TIMESTAMP_HEADER"): stamp,
            "content-type": "application/protobuf",
        }

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Send a request, with further headers; return its status and content."""
        data = body if isinstance(body, bytes) else body.SerializeToString()
        answer = self._client.post(f"/v1/fleet/{path}", content=data, headers={**self.headers(), **(headers or {})})
        return answer.status_code, answer.content

    def post_own(self, name: str, *parts: bytes, cut: float = 60.0) -> tuple[int, bytes]:
        """Send one of the door's own requests; return its status and content.

        Args:
            name: Name of the path.
            parts: Parts of the body.
            cut: Seconds after which the connection is closed.
        """
        body = importlib.import_module("fedspan.transports.flower.wire").pack(parts)
        answer = self._client.post(f"/fedspan/node/{name}", content=body, headers=self.headers(), timeout=cut)
        return answer.status_code, answer.content

    def activate(self) -> None:
        """Be online."""
        request = name_of(_FLEET, "ActivateNodeRequest")(public_key=self.public, heartbeat_interval=600.0)
        status, content = self.post("activate-node", request)
        assert status == 200, content
        self.node = name_of(_FLEET, "ActivateNodeResponse").FromString(content).node_id

    def own(self) -> Any:
        """Return how the node names itself in a request."""
        return name_of("flwr.proto.node_pb2", "Node")(node_id=self.node)

    def pull(self) -> Any:
        """Return the next order with the tree of its objects, or None."""
        status, content = self.post("pull-messages", name_of(_FLEET, "PullMessagesRequest")(node=self.own()))
        assert status == 200, content
        answer = name_of(_FLEET, "PullMessagesResponse").FromString(content)
        return (answer.messages_list[0], answer.message_object_trees[0]) if answer.messages_list else None

    def reply(self, order: Any, tree: Any, **metadata: Any) -> tuple[int, bytes]:
        """Announce a reply to an order with any tree of objects and any metadata."""
        return self.post("push-messages", self.announcement(order, tree, **metadata))

    def announcement(self, order: Any, tree: Any, **metadata: Any) -> Any:
        """Return the announcement of a reply to an order."""
        message = type(order)()
        message.CopyFrom(order)
        head = message.metadata
        head.message_id, head.reply_to_message_id = tree.object_id, order.metadata.message_id
        head.src_node_id, head.dst_node_id = self.node, order.metadata.src_node_id
        head.ttl = order.metadata.ttl / 2
        head.created_at = order.metadata.created_at + 0.001
        for name, value in metadata.items():
            setattr(head, name, value)
        return name_of(_FLEET, "PushMessagesRequest")(
            node=self.own(), messages_list=[message], message_object_trees=[tree]
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def make_strange_keys() -> list[bytes]:
    """Return public keys as PEM that are no node's: of every kind, of an unknown kind or curve, and very long."""
    from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa, x25519
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    modulus = (1 << 2047) + 1
    keys: list[Any] = [
        *(ec.derive_private_key(7, curve).public_key() for curve in (ec.SECP256R1(), ec.SECP521R1(), ec.SECP256K1())),
        ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key(),
        ed448.Ed448PrivateKey.from_private_bytes(bytes(57)).public_key(),
        x25519.X25519PrivateKey.from_private_bytes(bytes(32)).public_key(),
        rsa.RSAPublicNumbers(65537, modulus).public_key(),
        dsa.DSAPublicNumbers(4, dsa.DSAParameterNumbers((1 << 1023) + 1, (1 << 159) + 1, 2)).public_key(),
    ]
    encoded = [key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for key in keys]
    unknown = encoded[0].replace(bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d03017f"))
    kindless = encoded[0].replace(bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d027f"))
    long = b"a" * 2**14 + b"\n" + to_pem(encoded[0])  # text before the key is allowed in PEM
    return [*map(to_pem, (*encoded, unknown, kindless, b"", b"0")), long]


def to_pem(key: bytes) -> bytes:
    """Return a public key in DER as PEM."""
    return b"-----BEGIN PUBLIC KEY-----\n" + base64.encodebytes(key) + b"-----END PUBLIC KEY-----\n"


def tree_of(id: str, children: Sequence[Any] = ()) -> Any:
    """Return a tree of objects."""
    return name_of(_MESSAGES, "ObjectTree")(object_id=id, children=children)


def id_of(content: bytes) -> str:
    """Return an object's id."""
    return hashlib.sha256(content).hexdigest()


def connect(address: str, authority: Path) -> ssl.SSLSocket:
    """Open a connection to a SuperLink without sending anything."""
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), 30)
    return ssl.create_default_context(cafile=str(authority)).wrap_socket(plain, server_hostname=host)


def send_unauthenticated(address: str, authority: Path, declared: int, sent: int) -> tuple[str, int]:
    """Send a body without credentials until the server stops reading it.

    Args:
        address: Address of the SuperLink as ``host:port``.
        authority: File with the certificate of the server's authority.
        declared: Size of the body that the headers declare, in bytes.
        sent: Bytes to send at most.

    Returns:
        The first line of the answer, and the number of bytes of the body that were sent.
    """
    with closing(connect(address, authority)) as line:
        line.sendall(f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: {declared}\r\n\r\n".encode())
        line.settimeout(30)
        answer, done, piece = b"", 0, bytes(2**16)
        try:
            line.settimeout(0.05)
            while done < sent:
                done += line.send(piece)
                try:
                    answer += line.recv(1000)
                    break
                except TimeoutError:
                    continue
            line.settimeout(30)
            answer = answer or line.recv(1000)
        except (OSError, ssl.SSLError):
            pass
        return answer.split(b"\r\n", 1)[0].decode(errors="replace"), done
