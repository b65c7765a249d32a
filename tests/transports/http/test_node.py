"""A node's loop over orders, the form of messages and headers, and what is read of answers: a server's or a proxy's."""

import gzip
import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import httpx
import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.transports.http import client
from fedspan.transports.http import node as nodes
from fedspan.transports.http.admissions import admit_node, read_admissions
from fedspan.transports.http.client import Link, NodeConnection, RefusedError, open_client
from fedspan.transports.http.keys import load_node_key, make_node_key
from fedspan.transports.http.node import check_server, serve
from fedspan.transports.http.server import attach, list_nodes, prepare_folder
from fedspan.transports.http.signing import ServerSigner, UnsignedSigner, join_message, split_message
from fedspan.transports.http.transport import ServerTransport
from fedspan.transports.http.wire import NodeWork, pack, parse_range, parse_work, unpack
from helpers.captured_log import CapturedLog
from helpers.http_server import LocalServer
from helpers.ports import free_port
from helpers.refusals import refused
from helpers.reply_transport import exchanged

ORDER = {"a": Envelope("{}", b"weights")}


class Scene(NamedTuple):
    """A server's folder and a node that it has admitted."""

    server: Any
    link: Link
    id: int

    def transport(self, run: Any, **options: Any) -> ServerTransport:
        """Return a transport to the node, which waits until it is there."""
        folder = self.server.folder
        signer = ServerSigner(
            folder, lambda: {id: one.key.encode() for id, one in read_admissions(self.server).items()}
        )
        until = time.monotonic() + 20
        while self.id not in run.list_online():
            assert time.monotonic() < until
            time.sleep(0.05)
        return ServerTransport(run, {"a": self.id}, signer=signer, **options)

    @contextmanager
    def run(self, answer: Callable[[Envelope], Envelope], **options: Any) -> Generator[tuple[Event, Thread]]:
        """Run the node in a thread."""
        stop = Event()
        thread = Thread(target=nodes.serve, args=(self.link, answer, stop), kwargs=options)
        thread.start()
        try:
            yield stop, thread
        finally:
            stop.set()
            thread.join()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(nodes, "_RECONNECT", (0.1, 0.3))
    link = prepare_folder(tmp_path / "server", free_port(), [], insecure=False)
    admit_node(link, make_node_key(tmp_path / "node.key"), "a")
    key = load_node_key(tmp_path / "node.key")
    (id,) = read_admissions(link)
    return Scene(link, Link(link.address, link.authority, key, 2**22), id)


def test_replies_that_cannot_be_sent_are_failures_with_a_reason_that_says_little(scene: Scene) -> None:
    def answer(envelope: Envelope) -> Envelope:
        if envelope.body == b"fail":
            raise ValueError("patient 7 has /data/secret.csv")
        return Envelope("{}", bytes(2**21)) if envelope.body == b"long" else envelope

    with LocalServer(scene.server), scene.run(answer), attach(scene.server, 2**20) as run:
        transport = scene.transport(run)
        for body, said in (
            (b"fail", "ValueError; see the node's log"),
            (b"long", "the reply is larger than its order allows"),
            (bytes(2**22), "the message exceeds the size limit of this node"),
        ):
            assert exchanged(transport, {"a": Envelope("{}", body)}, 30.0) == {"a": said}
        assert exchanged(transport, ORDER, 30.0) == ORDER  # the node continues


def test_a_run_that_ended_does_not_end_the_node(scene: Scene) -> None:
    may_reply, asked = Event(), list[str]()

    def answer(envelope: Envelope) -> Envelope:
        asked.append(envelope.header)
        may_reply.wait(20)
        return envelope

    with LocalServer(scene.server), scene.run(answer):
        with attach(scene.server, 2**20) as run:
            assert exchanged(scene.transport(run), {"a": Envelope("first")}, 1.0) == {"a": "no reply within 1 s"}
        may_reply.set()
        with attach(scene.server, 2**20) as run:
            assert exchanged(scene.transport(run), ORDER, 30.0) == ORDER
    assert asked == ["first", "{}"]


def test_a_node_that_waits_stops_at_once_and_its_order_fails(scene: Scene) -> None:
    with LocalServer(scene.server), attach(scene.server, 2**20) as run:
        with scene.run(lambda envelope: envelope) as (stop, thread):
            transport = scene.transport(run)
            began = time.monotonic()
            stop.set()
            thread.join(20)
            assert time.monotonic() - began < 5
        assert exchanged(transport, ORDER, 30.0) == {"a": "its node is not online"}


@pytest.mark.parametrize(("is_stopped", "comes_back"), [(False, True), (True, True), (True, False)])
def test_a_reply_that_a_broken_connection_lost_is_sent_over_the_next_one(
    is_stopped: bool, comes_back: bool, scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: CapturedLog
) -> None:
    """Also by a node that is stopped meanwhile, if the server is back in time. The order is not carried out again."""
    seconds = 20.0 if comes_back else 4.0
    monkeypatch.setattr(nodes, "_LEAVING", seconds / 4)
    asked, is_carried_out, back = list[str](), Event(), dict[str, Any]()

    def answer(envelope: Envelope) -> Envelope:
        asked.append(envelope.header)
        is_carried_out.set()
        time.sleep(0.5)
        return envelope

    server = LocalServer(scene.server).__enter__()
    with attach(scene.server, 2**20) as run, scene.run(answer) as (stop, thread):
        transport = scene.transport(run)
        round = Thread(target=lambda: back.update(exchanged(transport, ORDER, seconds, wait_for_offline=True)))
        round.start()
        assert is_carried_out.wait(20)
        if is_stopped:
            stop.set()
        server.__exit__()
        if comes_back:
            time.sleep(1.0)
        else:
            thread.join(10)
            assert not thread.is_alive()
            assert sum("no connection" in text for text in caplog.messages) < 20  # it pauses between two attempts
        with LocalServer(scene.server):
            round.join(30)
            assert ((back == ORDER), asked) == (comes_back, ["{}"])
            if is_stopped:
                thread.join(20)
                assert not thread.is_alive()


def test_an_order_that_arrives_while_the_node_is_stopped_is_carried_out() -> None:
    class Slow:
        def take_order(self) -> Any:
            time.sleep(0.3)
            return "order", 1, b""

    stop = Event()
    stop.set()
    node: Any = nodes._Node(Slow(), UnsignedSigner(), lambda envelope: envelope, lambda: None)  # type: ignore[arg-type]
    assert node._take(stop, lambda: None) == ("order", 1, b"")


def test_the_server_knows_what_a_node_does_while_it_does_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_HEARTBEAT", 0.05)
    shown = list[NodeWork | None]()

    def answer(envelope: Envelope) -> Envelope:
        until = time.monotonic() + 10
        while (work := list_nodes(scene.server, {scene.id: "a"}, {})[0].work) is None:
            assert time.monotonic() < until
        shown.append(work)
        return envelope

    work = NodeWork("training", 37)
    with LocalServer(scene.server), scene.run(answer, get_work=lambda: work), attach(scene.server, 2**20) as run:
        assert exchanged(scene.transport(run), ORDER, 30.0) == ORDER
        assert shown == [work]
        until = time.monotonic() + 10
        while list_nodes(scene.server, {scene.id: "a"}, {})[0].work is not None:
            assert time.monotonic() < until


class Clock(Event):
    """An event that is never set; waiting for it moves the time forward at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pauses = list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        self.now += timeout or 0.0
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(nodes.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(nodes.random, "uniform", lambda low, high: 1.0)
    yield made
    monkeypatch.undo()


def refuse(status: int, reason: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> FedspanError:
    """Let a node's connections be refused until it gives up."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"reason": reason})

    def connect(link: Link) -> httpx.Client:
        return httpx.Client(base_url="https://h/v1/", transport=httpx.MockTransport(answer))

    monkeypatch.setattr(nodes, "open_client", connect)
    with pytest.raises(FedspanError) as caught:
        nodes.serve(Link("h:1", None, None, 2**20), lambda envelope: envelope, clock)
    return caught.value


def test_a_key_that_the_operator_revoked_is_named_and_asked_for_at_most_once_a_minute(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: CapturedLog
) -> None:
    with caplog.at_level(logging.WARNING, "fedspan.node"):
        error = refuse(403, "this key was not admitted", clock, monkeypatch)
    assert "has not admitted this node's key" in str(error)
    assert "has revoked it" in str(error)
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert all("has revoked it" in message for message in caplog.messages)
    assert len(caplog.messages) == len(clock.pauses)


def test_another_refusal_is_repeated_and_obeyed_by_no_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refuse(426, "update fedspan \x1b[2J", clock, monkeypatch)
    assert r"the server answered 426: update fedspan \x1b[2J" in str(error)


def test_a_second_process_with_a_node_s_key_is_refused_until_the_first_is_gone(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    refusal, ended = "another process is connected with this node's key; next attempt in", "the session at"
    with LocalServer(scene.server), attach(scene.server, 2**24) as run:
        with scene.run(lambda envelope: envelope), scene.run(lambda envelope: envelope):
            until = time.monotonic() + 20
            while refusal not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.05)
            count = caplog.text.count(ended)
            time.sleep(1.0)
            assert caplog.text.count(ended) == count
        asked, may_reply, replies = Event(), Event(), list[Any]()

        def answer(envelope: Envelope) -> Envelope:
            asked.set()
            may_reply.wait(30)
            return envelope

        with scene.run(answer):
            transport = scene.transport(run)
            exchange = Thread(target=lambda: replies.append(exchanged(transport, ORDER, 30.0)))
            exchange.start()
            assert asked.wait(20)
            count = caplog.text.count(refusal)
            with scene.run(lambda envelope: Envelope("{}", b"of the second")):  # the first one is busy
                while caplog.text.count(refusal) == count:
                    assert time.monotonic() < until + 40
                    time.sleep(0.05)
                may_reply.set()
                exchange.join()
            assert replies == [ORDER]


def test_a_connection_that_is_given_up_is_closed_after_its_last_request(scene: Scene) -> None:
    """Otherwise the thread that waits reads from the number of a closed socket, which may be a file's by then."""
    orders = list[Any]()
    with LocalServer(scene.server), open_client(scene.link) as client:
        node = NodeConnection(scene.link, scene.link.create_signer(), client)
        node.join()
        poll = Thread(target=lambda: orders.append(node.take_order()))
        poll.start()
        time.sleep(0.5)
        client.close()
        assert not client.is_closed
        with pytest.raises(httpx.HTTPError, match="given up"):
            node.leave()
        with open_client(scene.link) as other:
            other.post("leave", headers={"authorization": f"Bearer {node.session}"})
        poll.join(20)
    assert orders == [None]
    assert client.is_closed


def test_a_server_that_is_not_the_one_of_the_file_is_sent_no_signature(scene: Scene, tmp_path: Path) -> None:
    """As one that passes on the challenge of another."""
    from fedspan.transports.http.client import open_client

    other = prepare_folder(tmp_path / "other", free_port(), [], insecure=False)
    assert other.authority is not None
    link = scene.link._replace(address=other.address, tls_authority=other.authority)
    admit_node(other, tmp_path / "node.key.pub", "a")
    with LocalServer(other), open_client(link) as client:
        node = NodeConnection(link, link.create_signer(), client)
        with pytest.raises(ValueError, match=r"names an order key that is not in this node's ca\.crt"):
            node.join()
        assert not node.session


@pytest.mark.parametrize("parts", [[], [b""], [b"", b"a", bytes(1000)], [b"abc"] * 64])
def test_what_is_joined_comes_apart(parts: list[bytes]) -> None:
    assert unpack(pack(parts), len(parts)) == parts
    head, body = split_message(join_message(b"head") + pack(parts))
    assert (head, bytes(body)) == (b"head", pack(parts))


@pytest.mark.parametrize(
    "data", [b"\0", b"\0\0\0\1", b"\xff\xff\xff\xff" + bytes(9), pack([b"abc"])[:-1], pack([b""] * 3)]
)
def test_what_was_not_joined_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not 2 parts"):
        unpack(data, 2)
    with pytest.raises(ValueError, match="another version"):
        split_message(b"\2" + data)
    with pytest.raises(ValueError, match="cut off"):
        split_message(join_message(bytes(99))[:-1])


@pytest.mark.parametrize(
    ("text", "start"),
    [("bytes=5-", 5), ("", 0), ("bytes=5-6", 0), ("bytes=-5", 0), ("5", 0), ("bytes=" + "9" * 16 + "-", 0)],
)
def test_a_range_has_a_first_byte(text: str, start: int) -> None:
    assert parse_range(text) == start


@pytest.mark.parametrize(
    ("text", "work"),
    [
        ("training/37", ("training", 37)),
        ("hidden states/", ("hidden states", None)),
        ("training/900", ("training", 100)),
        ("", None),
        ("training", None),
        ("training/-1", None),
        ("<b>training</b>/3", None),
        ("Training/3", None),
        ("t" * 32 + "/3", None),
        ("training/3\n", None),
        ("träge/3", None),
    ],
)
def test_a_node_says_what_it_does_in_small_letters(text: str, work: tuple[str, int | None] | None) -> None:
    assert parse_work(text) == work
    if work is not None and work[1] != 100:
        assert NodeWork(*work).to_text() == text


GIGABYTE = 2**30
READ = 2**24
"""Bytes that leave a hostile server at most before a node closes the connection: most wait in the system's buffers."""


class Hostile:
    """A server that answers every request with a head and as many pieces as are read."""

    def __init__(self, head: str, pieces: Callable[[], Iterator[bytes]]) -> None:
        self.head, self.pieces = head, pieces
        self.requests, self.sent = list[str](), list[int]()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.link = Link(f"127.0.0.1:{self.listening.getsockname()[1]}", None, None, 2**20)

    def answer_all(self) -> None:
        """Answer until the socket is closed."""
        with suppress(OSError):
            while True:
                line, _ = self.listening.accept()
                self.sent.append(0)
                with line, suppress(OSError):
                    line.settimeout(20)
                    self.requests.append(line.recv(2**16).decode())
                    line.sendall(f"HTTP/1.1 {self.head}\r\n\r\n".encode())
                    for piece in self.pieces():
                        line.sendall(piece)
                        self.sent[-1] += len(piece)


@contextmanager
def answer(head: str, pieces: Callable[[], Iterator[bytes]]) -> Generator[Hostile]:
    hostile = Hostile(head, pieces)
    acting = threading.Thread(target=hostile.answer_all)
    acting.start()
    try:
        yield hostile
    finally:
        hostile.listening.shutdown(socket.SHUT_RDWR)
        hostile.listening.close()
        acting.join()


def repeat_blanks() -> Iterator[bytes]:
    return itertools.repeat(b" " * 2**16, GIGABYTE // 2**16)


@contextmanager
def connect(link: Link) -> Generator[NodeConnection]:
    with open_client(link) as connections:
        yield NodeConnection(link, UnsignedSigner(), connections)


@pytest.mark.parametrize(
    ("status", "error"), [("403 Forbidden", RefusedError), ("200 OK", httpx.RemoteProtocolError)], ids=str
)
def test_an_answer_of_a_gigabyte_is_not_read(status: str, error: type[Exception]) -> None:
    with answer(f"{status}\r\ncontent-length: {GIGABYTE}", repeat_blanks) as hostile:
        for request in (NodeConnection.join, NodeConnection.leave, lambda node: node.send_failure("0", "why")):
            with connect(hostile.link) as node, pytest.raises(error):
                request(node)
        if error is RefusedError:
            with connect(hostile.link) as node, pytest.raises(error, match="403: Forbidden"):
                node.take_order()
        with refused("server", "an answer that is too long"):
            check_server(hostile.link)
    assert max(hostile.sent) < READ


@pytest.mark.parametrize("status", ["403 Forbidden", "200 OK"])
def test_a_compressed_answer_is_not_decompressed(status: str) -> None:
    """No request accepts one, so it is not a fedspan server's; one MiB of it may hold a gigabyte."""
    data = gzip.compress(b'{"reason": "this was decompressed"}')
    head = f"{status}\r\ncontent-encoding: gzip\r\ncontent-length: {len(data)}"
    with answer(head, lambda: iter([data])) as hostile:
        with connect(hostile.link) as node, pytest.raises((RefusedError, httpx.RemoteProtocolError)) as caught:
            node.leave()
        assert str(caught.value) in ("the server answered 403: Forbidden", "an answer that is compressed")
        assert "accept-encoding: identity" in hostile.requests[0].lower().split("\r\n")


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"[]", b"[" * 60_000, b"{}", b'{"session": 1, "node": 1}', b'{"session": "a", "node": "1"}',
        b'{"session": "a", "node": 1e999}', b'{"session": "\\n", "node": 1}', b'{"session": "\\u00e4", "node": 1}',
    ],
    ids=lambda content: content[:40],
)  # fmt: skip
def test_an_answer_that_is_no_server_s_ends_a_connection_and_not_the_node(content: bytes, caplog: CapturedLog) -> None:
    """The node tries again until it is stopped, whatever it was answered."""

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            self.set()  # instead of the second attempt
            return True

    with answer(f"200 OK\r\ncontent-length: {len(content)}", lambda: iter([content])) as hostile:
        serve(hostile.link, lambda envelope: envelope, Stop())
    assert "no connection to" in caplog.text


@pytest.mark.parametrize("content", [{}, {"bytes": "9"}, {"bytes": None}, {"bytes": 1e999}, [1]])
def test_a_count_that_is_none_ends_the_sending_of_a_reply(content: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_RETRIES", 0)
    data = json.dumps(content).encode()
    with (
        answer(f"200 OK\r\ncontent-length: {len(data)}", lambda: iter([data])) as hostile,
        connect(hostile.link) as node,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        node.send_reply("0", b"reply", "a" * 32)
