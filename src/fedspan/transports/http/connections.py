"""Bounds on the server's connections that have not sent an accepted request: number, time and bytes.

uvicorn accepts any number of connections and waits for their requests without a limit. ``BoundedSocket`` counts a
connection from the moment when it is accepted, before TLS, and ``BoundedProtocol`` is uvicorn's protocol with the
bounds; the app (``app``) reports the connections whose requests it accepted. IPv6 addresses are counted by their /64,
the smallest block that one subscriber has.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, Self

from uvicorn.protocols.http.h11_impl import H11Protocol

Address = tuple[str, int]


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds on connections.

    Args:
        per_address: Connections from one IPv4 address or IPv6 /64 that have not sent an accepted request; their TLS
            handshakes count.
        proxies: Addresses of the operator's reverse proxies, which have many nodes' connections: ``total`` is their
            only limit.
        total: Such connections from all addresses.
        seconds: Time until the end of the TLS handshake, and from there until the first accepted request, in seconds.
        bytes: Bytes that are read before the first accepted request.
        per_sender: Connections of one node; the oldest one is closed for a new one.
        buffer: Bytes of an answer that may wait for the peer to read, above which its sender waits, too.
    """

    per_address: int = 64
    proxies: tuple[str, ...] = ()
    total: int = 512
    seconds: float = 10.0
    bytes: int = 1 << 20
    per_sender: int = 8
    buffer: int = 1 << 16


class Closable(Protocol):
    """A connection."""

    allowance: int | None
    """Bytes that may still be read before the next accepted request; None: any number."""

    def abort(self) -> None:
        """Close the connection at once."""
        ...


@lru_cache(4096)
def _get_block(host: str) -> str:
    """Return the block of addresses that a host counts as: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None or address.version == 4:
        return str(mapped or address)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class Connections:
    """The open connections of a server."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self._open: dict[Address, Closable] = {}
        self._pending: dict[Address, None] = {}
        self._by_host: Counter[str] = Counter()
        self._by_sender: defaultdict[bytes, OrderedDict[Address, None]] = defaultdict(OrderedDict)
        self._sender: dict[Address, bytes] = {}

    def add(self, client: Address, connection: Closable) -> bool:
        """Register a new connection.

        Returns:
            Whether it may stay; if not, it is not registered.
        """
        self.remove(client)  # of a handshake that failed, and whose port is used again
        block = _get_block(client[0])
        if self._by_host[block] >= self.limits.per_address and block not in map(_get_block, self.limits.proxies):
            return False
        if len(self._pending) >= self.limits.total:  # the oldest of the fullest address, not the newest of another
            host = max(self._by_host, key=self._by_host.__getitem__)
            oldest = next(entry for entry in self._pending if _get_block(entry[0]) == host)
            self._open[oldest].abort()
            self.remove(oldest)
        self._open[client] = connection
        self._pending[client] = None
        self._by_host[block] += 1
        return True

    def take_over(self, client: Address, connection: Closable) -> bool:
        """Replace a registered connection by its protocol after the TLS handshake; one without a handshake is added.

        Returns:
            Whether it may stay.
        """
        if client not in self._open:
            return self.add(client, connection)
        self._open[client] = connection
        return True

    def has(self, client: Address, connection: Closable) -> bool:
        """Return whether a connection is registered under its address."""
        return self._open.get(client) is connection

    def is_pending(self, client: Address) -> bool:
        """Return whether a connection has not sent an accepted request."""
        return client in self._pending

    def has_sender(self, sender: bytes) -> bool:
        """Return whether a connection is open that a sender's request was accepted on."""
        return sender in self._by_sender

    def accept(self, client: Address | None, sender: bytes, allowance: int | None) -> None:
        """Report an accepted request.

        Args:
            client: Address of the connection; one that is not registered is ignored.
            allowance: Bytes that the connection may send until its next accepted request; None: any number.
        """
        if client is None or client not in self._open:
            return
        client = (client[0], client[1])
        self._forget_pending(client)
        self._open[client].allowance = allowance
        if self._sender.get(client) == sender or allowance is None:
            return
        self._forget_sender(client)
        self._sender[client] = sender
        connections = self._by_sender[sender]
        connections[client] = None
        if len(connections) > self.limits.per_sender:
            oldest = next(iter(connections))
            self._open[oldest].abort()
            self.remove(oldest)

    def abort(self, client: Address | None) -> None:
        """Close a connection at once; one that is not registered is ignored."""
        if client is not None and (connection := self._open.get((client[0], client[1]))) is not None:
            connection.abort()

    def remove(self, client: Address) -> None:
        """Forget a connection that is closed."""
        if self._open.pop(client, None) is not None:
            self._forget_pending(client)
            self._forget_sender(client)

    def _forget_pending(self, client: Address) -> None:
        if client in self._pending:
            del self._pending[client]
            host = _get_block(client[0])
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def _forget_sender(self, client: Address) -> None:
        sender = self._sender.pop(client, None)
        if sender is not None:
            self._by_sender[sender].pop(client, None)
            if not self._by_sender[sender]:
                del self._by_sender[sender]


CONNECTIONS = Connections()


class _Handshake:
    """A connection that was accepted and has not finished its TLS handshake."""

    allowance: int | None = None

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def abort(self) -> None:
        """Close the connection at once: the handshake fails."""
        with suppress(OSError):  # it may be closed already
            self._connection.shutdown(socket.SHUT_RDWR)


class BoundedSocket(socket.socket):
    """A listening socket that counts connections from when they are accepted, and bounds their handshakes."""

    bounds = CONNECTIONS

    @classmethod
    def take_over(cls, bound: socket.socket) -> Self:
        """Take over a socket that is bound to its address."""
        return cls(bound.family, bound.type, bound.proto, fileno=bound.detach())

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, within an asyncio event loop.

        Raises:
            ConnectionAbortedError: If the connection exceeds a bound; it is closed.
        """
        connection, address = super().accept()
        client, handshake = (address[0], address[1]), _Handshake(connection)
        if not self.bounds.add(client, handshake):
            connection.close()
            raise ConnectionAbortedError
        asyncio.get_running_loop().call_later(self.bounds.limits.seconds, self._expire, client, handshake)
        return connection, address

    def _expire(self, client: Address, handshake: _Handshake) -> None:
        if self.bounds.has(client, handshake):
            handshake.abort()
            self.bounds.remove(client)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address of this machine."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with bounds on connections. h11 also bounds the size of a request's headers."""

    bounds = CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        """Register the connection, or close it."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(self.bounds.limits.buffer)
        self.allowance: int | None = self.bounds.limits.bytes
        self._address: Address | None = None
        client = self.client
        if client is None:
            return
        address = (client[0], client[1])
        if not self.bounds.take_over(address, self):
            self.abort()
            return
        self._address = address
        self._expiry = asyncio.get_running_loop().call_later(self.bounds.limits.seconds, self._expire)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, up to the allowance."""
        if self.allowance is not None:
            self.allowance -= len(data)
            if self.allowance < 0:
                self.abort()
                return
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._address is not None:
            self._expiry.cancel()
            self.bounds.remove(self._address)
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()  # pyright: ignore[reportAttributeAccessIssue]

    def _expire(self) -> None:
        assert self._address is not None
        if self.bounds.is_pending(self._address):
            self.abort()
            self.bounds.remove(self._address)
