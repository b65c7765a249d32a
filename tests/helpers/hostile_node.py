"""A node with a valid key that sends whatever it likes to a server, and strangers without a key."""

import base64
import socket
import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa, x25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedspan.transports.http.client import Link, NodeConnection, open_client


class HostileNode:
    """Sends single requests of a node that has joined with an admitted key."""

    def __init__(self, address: str, authority: Path, key: Any) -> None:
        link = Link(address, authority, key, 2**30)
        self.client, self.signer = open_client(link), link.create_signer()
        self.connection = NodeConnection(link, self.signer, self.client)

    @property
    def node(self) -> int:
        return self.connection.node

    def join(self) -> None:
        """Be online."""
        self.connection.join()

    def send(
        self, method: str, path: str, content: Any = None, seconds: float = 60.0, **headers: str
    ) -> httpx.Response:
        """Send a request of its session."""
        session = {"authorization": f"Bearer {self.connection.session}"}
        return self.client.request(method, path, content=content, headers={**session, **headers}, timeout=seconds)

    def put(self, order: str, content: bytes, start: int = 0, total: int | None = None, upload: str = "0" * 32) -> int:
        """Send a part of a reply, and return the status of the answer."""
        total = len(content) if total is None else total
        return self.send("PUT", f"order/{order}/reply?upload={upload}&start={start}&total={total}", content).status_code

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def make_public_key(number: int, curve: ec.EllipticCurve | None = None) -> str:
    """Return a public key in OpenSSH's format, the same for each number."""
    public = ec.derive_private_key(number, curve or ec.SECP384R1()).public_key()
    return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def make_strange_keys() -> list[str]:
    """Return public keys in OpenSSH's format that are no node's: of other kinds, unknown, damaged, and very long."""
    modulus = (1 << 2047) + 1
    keys: list[Any] = [
        ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key(),
        rsa.RSAPublicNumbers(65537, modulus).public_key(),
    ]
    encoded = [key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() for key in keys]
    encoded += [make_public_key(7, curve) for curve in (ec.SECP256R1(), ec.SECP521R1(), ec.SECP384R1())]
    others: list[Any] = [
        ed448.Ed448PrivateKey.from_private_bytes(bytes(57)).public_key(),
        x25519.X25519PrivateKey.from_private_bytes(bytes(32)).public_key(),
        dsa.DSAPublicNumbers(4, dsa.DSAParameterNumbers((1 << 1023) + 1, (1 << 159) + 1, 2)).public_key(),
    ]
    ders = [key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for key in others]
    encoded += [f"ssh-unknown {base64.b64encode(der).decode()}" for der in ders]
    return [*encoded, "0", "ecdsa-sha2-nistp384 !", "ecdsa-sha2-nistp384 " + "A" * 8000]


def connect(address: str, authority: Path) -> ssl.SSLSocket:
    """Open a connection to a server without sending anything."""
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), 30)
    return ssl.create_default_context(cafile=str(authority)).wrap_socket(plain, server_hostname=host)


def send_unauthenticated(address: str, authority: Path, path: str, declared: int, sent: int) -> tuple[str, int]:
    """Send a body without credentials until the server stops reading it, or ``sent`` bytes of the declared ones.

    Returns:
        The first line of the answer, and the number of bytes of the body that were sent.
    """
    with closing(connect(address, authority)) as line:
        line.sendall(f"PUT {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {declared}\r\n\r\n".encode())
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
