"""Bounds on connections that have not sent an accepted request, and on those of one node."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

connections = pytest.importorskip(
    "fedspan.transports.flower.connections", reason="the extra fedspan[flower] is not installed"
)


class Connection:
    """A connection that remembers whether it was closed."""

    def __init__(self) -> None:
        self.allowance: int | None = 0
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_addresses_have_few_connections_without_an_accepted_request() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_address=2, total=3))
    one, other, third = ("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.1", 3)
    assert made.add(one, Connection())
    assert made.add(other, Connection())
    assert not made.add(third, Connection())
    assert made.add(("192.0.2.2", 1), Connection())
    made.accept(one, b"node", 5)
    assert not made.is_pending(one)
    assert made.add(third, Connection())
    made.remove(other)
    made.remove(third)
    assert made.add(other, Connection())


def test_the_oldest_connection_of_the_fullest_address_makes_room_for_another_address() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_address=2, total=3))
    full = [Connection(), Connection()]
    for port, connection in enumerate(full):
        assert made.add(("192.0.2.1", port), connection)
    assert made.add(("192.0.2.2", 1), Connection())
    assert made.add(("192.0.2.3", 1), Connection())
    assert [one.aborted for one in full] == [True, False]
    assert not made.is_pending(("192.0.2.1", 0))


def test_a_node_s_oldest_connection_is_closed_for_a_new_one() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_sender=2))
    own = {("192.0.2.1", port): Connection() for port in range(3)}
    for client, connection in own.items():
        assert made.add(client, connection)
        made.accept(client, b"node", 10)
        made.accept(client, b"node", 20)
        assert connection.allowance == 20
    assert [one.aborted for one in own.values()] == [True, False, False]
    foreign = Connection()
    made.add(("192.0.2.1", 9), foreign)
    made.accept(("192.0.2.1", 9), b"another node", 10)
    assert not foreign.aborted


def test_the_operator_s_connections_are_not_bounded() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_sender=1))
    own = {("127.0.0.1", port): Connection() for port in range(4)}
    for client, connection in own.items():
        made.add(client, connection)
        made.accept(client, b"operator", None)
    assert not any(one.aborted for one in own.values())


def test_what_is_not_registered_is_ignored() -> None:
    made = connections.Connections()
    made.accept(("192.0.2.1", 1), b"node", 1)
    made.accept(None, b"node", 1)
    made.remove(("192.0.2.1", 1))
    assert not made.is_pending(("192.0.2.1", 1))


def test_ipv6_addresses_are_counted_by_their_block_of_64_bits() -> None:
    made = connections.Connections(connections.ConnectionLimits(per_address=2))
    assert made.add(("2001:db8:0:1::1", 1), Connection())
    assert made.add(("2001:db8:0:1:ffff::2", 1), Connection())
    assert not made.add(("2001:db8:0:1:8000:1:2:3", 1), Connection())
    assert made.add(("2001:db8:0:2::1", 1), Connection())
    for port in (1, 2):
        assert made.add(("::ffff:192.0.2.1", port), Connection())
    assert not made.add(("192.0.2.1", 3), Connection())
    assert made.add(("::ffff:192.0.2.2", 1), Connection())


async def test_connections_without_a_tls_handshake_are_few_and_closed_soon(tmp_path: Path) -> None:
    keys = pytest.importorskip("fedspan.transports.flower.keys")
    keys.make_authority(tmp_path, [])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / keys.CERTIFICATE, tmp_path / keys.KEY)
    trusting = ssl.create_default_context(cafile=str(tmp_path / keys.AUTHORITY))
    made = connections.Connections(connections.ConnectionLimits(per_address=3, seconds=1.0))

    class Socket(connections.BoundedSocket):
        bounds = made

    class Protocol(asyncio.Protocol):
        allowance: int | None = None

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            peer = transport.get_extra_info("peername")
            assert made.take_over((peer[0], peer[1]), self)
            transport.write(b"hello")

        def abort(self) -> None:
            self.transport.abort()

    async def closed(reader: asyncio.StreamReader) -> bool:
        try:
            return await asyncio.wait_for(reader.read(1), 20) == b""
        except ConnectionError:
            return True

    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    server = await asyncio.get_running_loop().create_server(Protocol, sock=Socket.take_over(bound), ssl=context)
    async with server:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.1)
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        assert await closed(reader), "the fourth is closed before TLS"
        began = time.monotonic()
        for reader, writer in silent:
            assert await closed(reader)
            writer.close()
        assert time.monotonic() - began < 15
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
        assert await asyncio.wait_for(reader.read(5), 20) == b"hello"
        await asyncio.sleep(1.5)
        own = writer.get_extra_info("sockname")
        assert made.is_pending((own[0], own[1])), "the bound on a handshake does not close what has finished it"
        writer.close()
