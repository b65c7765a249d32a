"""Limits on what a node sends: sizes, times, rates, slots and connections, on real connections to a server."""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedspan.federation.protocol import Envelope
from fedspan.transports.http import connections, keys
from fedspan.transports.http.client import NodeConnection
from fedspan.transports.http.connections import BoundedProtocol, ConnectionLimits
from fedspan.transports.http.requests import RequestLimits
from fedspan.transports.http.server import attach
from fedspan.transports.http.signing import UnsignedSigner
from fedspan.transports.http.transport import Arrival, PendingMessage
from fedspan.transports.http.wire import CHUNK
from helpers.http_server import LocalServer, join, send_order, serve_here


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., tuple[LocalServer, NodeConnection]]]:
    """Start a server with limits; returns it and a node that has joined."""
    with ExitStack() as stack:

        def start(**options: Any) -> tuple[LocalServer, NodeConnection]:
            server = stack.enter_context(serve_here(tmp_path / "server", **options))
            return server, stack.enter_context(join(server.link.address))

        yield start


def open_line(server: LocalServer) -> socket.socket:
    host, _, port = server.link.address.rpartition(":")
    line = socket.create_connection((host, int(port)), 30)
    line.settimeout(30)
    return line


def begin(server: LocalServer, node: NodeConnection, request: str, *headers: str) -> socket.socket:
    """Send the head of a request of a node, without a body."""
    line = open_line(server)
    lines = [f"{request} HTTP/1.1", "host: a", f"authorization: Bearer {node.session}", *headers, "", ""]
    line.sendall("\r\n".join(lines).encode())
    return line


def read_status(line: socket.socket) -> int:
    """Return the status of an answer; 0: the connection was closed without one."""
    try:
        return int((line.recv(100).split() or [b"", b"0"])[1])
    except ConnectionError:
        return 0


def is_closed(line: socket.socket) -> bool:
    """Return whether the server has closed a connection, after answers that it sent before."""
    line.settimeout(0.3)
    try:
        while line.recv(1000):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_a_body_is_refused_by_its_declared_size_before_it_is_read(serve: Callable[..., Any]) -> None:
    server, node = serve()
    part = f"PUT /v1/order/{'0' * 32}/reply?upload={'0' * 32}&start=0&total=9"
    for request, header, status in (
        (part, f"content-length: {CHUNK + 1}", 413),
        ("POST /v1/heartbeat", f"content-length: {2**14 + 1}", 413),
        ("POST /v1/heartbeat", "content-length: " + "9" * 13, 411),
        ("POST /v1/heartbeat", "transfer-encoding: chunked", 411),
        ("POST /v1/heartbeat", "content-length: -1", 400),
        ("POST /v1/order", "content-length: 4294967296", 413),
    ):
        with closing(begin(server, node, request, header)) as line:
            assert read_status(line) == status, (request, header)
    secret = server.link.secret.read_text()
    operator = f"POST /v1/runs HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {secret}\r\ncontent-length: {2**26 + 1}"
    with closing(open_line(server)) as line:
        line.sendall(f"{operator}\r\n\r\n".encode())
        assert read_status(line) == 413
    with attach(server.link, 2**20) as run:
        id = send_order(run, node.node, Envelope("{}"), 1000)
        reply = f"PUT /v1/order/{id}/reply?upload={'0' * 32}&start=0&total={1000 + 2**20 + 1}"
        with closing(begin(server, node, reply, f"content-length: {CHUNK}")) as line:
            assert read_status(line) == 413


@pytest.mark.parametrize("pieces", [1, 100])
def test_a_body_that_does_not_arrive_in_time_is_given_up(pieces: int, serve: Callable[..., Any]) -> None:
    """Neither one that stops, nor one whose bytes trickle."""
    server, node = serve(limits=RequestLimits(body_seconds=0.4, slowest=1e4))
    began = time.monotonic()
    with closing(begin(server, node, "POST /v1/heartbeat", "content-length: 9000")) as line:
        line.settimeout(0.05)
        status = None
        while status is None and time.monotonic() - began < 20:
            if pieces:
                line.sendall(b"a")
                pieces -= 1
            try:
                status = read_status(line)
            except TimeoutError:
                continue
        assert status == 408
    assert 0.4 <= time.monotonic() - began < 10
    node.note_work(None)


def test_what_has_arrived_of_a_reply_that_broke_off_is_continued_and_ends_with_its_order(
    serve: Callable[..., Any],
) -> None:
    """A reply takes no more of the disk than its order allows, and no longer than its order is awaited."""
    server, node = serve(limits=RequestLimits(body_seconds=0.3))
    with attach(server.link, 2**20) as run:
        id = send_order(run, node.node, Envelope("{}"), 1000)
        path = f"/v1/order/{id}/reply?upload={'0' * 32}"
        with closing(begin(server, node, f"PUT {path}&start=0&total=200", "content-length: 200")) as line:
            line.sendall(bytes(120))
            assert read_status(line) == 408
        with closing(begin(server, node, f"GET {path}")) as line:
            answer = b""
            while not answer.endswith(b"}"):
                answer += line.recv(1000)
            assert answer.endswith(b'{"bytes":120}')
        messages = server.link.folder / "messages"
        assert (messages / f"{id}.part").stat().st_size == 120
        run.cancel([id])
        assert not list(messages.iterdir())


def test_one_node_s_requests_wait_for_each_other_and_not_for_those_of_others(serve: Callable[..., Any]) -> None:
    server, node = serve(limits=RequestLimits(parallel=1, waiting=3, body_seconds=2.0))
    with attach(server.link, 2**20) as run:
        id = send_order(run, node.node, Envelope("{}"), 1000)
        path = f"/v1/order/{id}/reply?upload={'0' * 32}"
        slow = begin(server, node, f"PUT {path}&start=0&total=200", "content-length: 200")
        time.sleep(0.2)
        others = [begin(server, node, f"GET {path}") for _ in range(4)]
        time.sleep(0.2)
        others[-1].settimeout(1.0)
        assert read_status(others[-1]) == 429  # three wait, and no more
        with join(server.link.address) as another:
            another.note_work(None)
        assert read_status(slow) == 408
        assert [read_status(line) for line in others[:-1]] == [200] * 3
        for line in (slow, *others):
            line.close()


def test_a_node_in_a_hurry_is_slowed_down_and_no_other(serve: Callable[..., Any]) -> None:
    server, node = serve(limits=RequestLimits(rate=20.0, burst=5.0))
    began = time.monotonic()
    for _ in range(25):
        node.note_work(None)
    assert time.monotonic() - began >= 0.9
    with join(server.link.address) as another:
        began = time.monotonic()
        another.note_work(None)
        assert time.monotonic() - began < 0.5


def test_a_new_session_has_the_rate_of_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that joins again and again is not faster for it."""
    monkeypatch.setattr("fedspan.transports.http.node_requests.secrets.randbits", lambda bits: 7)
    with serve_here(tmp_path, limits=RequestLimits(rate=20.0, burst=5.0)) as server:
        began = time.monotonic()
        for _ in range(15):
            with join(server.link.address) as node:
                node.note_work(None)
        assert time.monotonic() - began >= 0.4


def test_a_large_answer_that_nobody_reads_is_neither_buffered_nor_kept(serve: Callable[..., Any]) -> None:
    server, node = serve(limits=RequestLimits(body_seconds=0.5), buffer=2**14)
    with attach(server.link, 2**24) as run:
        id = send_order(run, node.node, Envelope("{}", bytes(4 * 2**20)))
        silent = list[socket.socket]()
        for _ in range(5):
            line = socket.socket()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
            line.connect(("127.0.0.1", int(server.link.address.rpartition(":")[2])))
            line.sendall(
                f"GET /v1/order/{id} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {node.session}\r\n\r\n".encode()
            )
            silent.append(line)
        own = {line.getsockname() for line in silent}
        until = time.monotonic() + 20
        held = 0
        while not held:
            assert time.monotonic() < until
            protocols = [one for one in list(server.connections._open.values()) if isinstance(one, BoundedProtocol)]
            held = max((one.transport.get_write_buffer_size() for one in protocols), default=0)
        assert held <= 2**18
        taken = node.take_order()
        assert taken is not None
        assert len(taken[2]) > 4 * 2**20
        while own & server.connections._open.keys():
            assert time.monotonic() < until
            time.sleep(0.05)
        for line in silent:
            line.close()


def test_a_request_for_an_order_ends_the_earlier_ones_of_its_node(serve: Callable[..., Any]) -> None:
    _, node = serve(limits=RequestLimits(poll=1.0, parallel=1))
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        waiting = []
        for _ in range(3):
            waiting.append(pool.submit(node.take_order))
            time.sleep(0.1)
        assert [one.result() for one in waiting] == [None] * 3
        assert 1.0 <= time.monotonic() - began < 5


def test_a_node_that_is_stopped_is_offline_at_once_and_one_that_is_silent_after_a_while(
    serve: Callable[..., Any],
) -> None:
    server, node = serve(limits=RequestLimits(offline=0.5, reconnect=0.5))
    with attach(server.link, 2**20) as run, join(server.link.address) as other:
        orders = [send_order(run, one.node, Envelope("{}")) for one in (node, other)]
        node.leave()
        assert list(run.list_online()) == [other.node]
        (taken,) = run.take_replies(orders)
        assert (taken.order, taken.failure) == (orders[0], "its node was stopped")
        time.sleep(0.6)
        assert not run.list_online()
        until = time.monotonic() + 10
        while not (rest := list(run.take_replies(orders[1:]))):
            assert time.monotonic() < until
        assert (rest[0].order, rest[0].failure) == (orders[1], "its node went offline")


def test_a_failure_without_a_reason_is_one_of_its_node_alone(serve: Callable[..., Any]) -> None:
    server, node = serve()
    with attach(server.link, 2**20) as run:
        order = send_order(run, node.node, Envelope("{}"))
        node.send_failure(order, "")
        (taken,) = run.take_replies([order])
        assert Arrival(PendingMessage("a", node.node, b""), taken, UnsignedSigner()).read() == "it gives no reason"


def test_sessions_and_runs_that_are_gone_are_forgotten(serve: Callable[..., Any]) -> None:
    server, node = serve(limits=RequestLimits(lease=0.1, forgotten=0.1, offline=0.1, sweep=0.05))
    operator = httpx.Client(
        base_url=f"http://{server.link.address}/v1/",
        headers={"authorization": f"Bearer {server.link.secret.read_text()}"},
    )
    run = operator.post("runs").json()
    time.sleep(0.5)
    assert operator.post(f"runs/{run}/end").status_code == 404
    assert operator.post("nodes").json() == []
    with pytest.raises(Exception, match="401"):
        node.note_work(None)


def test_a_node_fetches_files_of_base_models_that_are_offered_and_no_others(serve: Callable[..., Any]) -> None:
    server, node = serve()
    content, offer, file = bytes(range(250)) * 8000, "a" * 64, "b" * 64
    bases = server.link.folder / "bases"
    bases.mkdir()
    (bases / "weights").write_bytes(content)
    for run in ("ended", "1"):  # each run that offers the model has a file
        (bases / f"{offer}.{run}.json").write_text(json.dumps({file: str(bases / "weights")}))
    (bases / f"{offer}.ended.json").unlink()
    received = bytearray()
    while len(received) < len(content):
        received += node.fetch_base(offer, file, len(received))
    assert received == content
    for parts in (
        (offer, "c" * 64),
        ("c" * 64, file),
        (offer, file[1:]),
        (offer, "..%2F..%2Fsecret"),
        ("*", file),
        (offer.upper(), file),
    ):
        with pytest.raises(Exception, match="404"):
            node.fetch_base(*parts, 0)
    with pytest.raises(Exception, match="404"):  # beyond its end
        node.fetch_base(offer, file, len(content))
    with closing(open_line(server)) as line:
        line.sendall(f"GET /v1/base/{offer}/{file} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
        assert read_status(line) == 401


def test_a_node_has_few_connections_and_a_stranger_sends_few_bytes(serve: Callable[..., Any]) -> None:
    server, node = serve(bounds=ConnectionLimits(per_sender=2, bytes=2**15))
    lines = [begin(server, node, "POST /v1/order", "content-length: 0") for _ in range(4)]
    time.sleep(0.3)
    assert [is_closed(line) for line in lines] == [True, True, False, False]
    node.note_work(None)
    for line in lines:
        line.close()
    with closing(open_line(server)) as line:
        line.settimeout(0.05)
        sent = 0
        try:
            while sent < 2**22:
                try:
                    sent += line.send(bytes(2**12))
                    line.recv(1)
                except TimeoutError:
                    continue
        except ConnectionError:
            pass
        assert sent < 2**21


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


def test_a_proxy_of_the_operator_s_has_as_many_connections_as_all_addresses() -> None:
    limits = connections.ConnectionLimits(per_address=2, total=5, proxies=("192.0.2.1", "2001:db8::1"))
    made, waiting = connections.Connections(limits), [Connection() for _ in range(6)]
    for port, connection in enumerate(waiting):
        assert made.add(("192.0.2.1" if port % 2 else "::ffff:192.0.2.1", port), connection)
    assert [connection.aborted for connection in waiting] == [True, *[False] * 5]  # the oldest, for the sixth
    for port in range(3):
        assert made.add(("2001:db8::ff", port), Connection()), "the /64 of the other proxy"
    assert [made.add(("192.0.2.2", port), Connection()) for port in range(3)] == [True, True, False]


async def test_connections_without_a_tls_handshake_are_few_and_closed_soon(tmp_path: Path) -> None:
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
