"""A node's transfers: over a link that breaks the rest is sent; bandwidth is limited; progress and work are shown."""

import asyncio
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from fedspan.federation.protocol import Envelope
from helpers.families import others_slow
from helpers.slow_link import SlowLink

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

import httpx
import uvicorn
from flwr.app import Message

from fedspan.transports.flower import door, progress, senders, transfers, wire, work
from fedspan.transports.flower.adapter import (
    NodeConnection,
    ObjectPushError,
    OutgoingReply,
    compute_object_id,
    deflate_message,
    list_tree_ids,
    node,
    set_identity,
)
from fedspan.transports.flower.adapter import node as adapter_node
from fedspan.transports.flower.messages import draw_salt, to_records
from fedspan.transports.flower.signing import UnsignedSigner
from fedspan.transports.flower.wire import INLINE_BYTES, NodeWork, pack, select_fitting
from fedspan.transports.flower.work import FRESH_SECONDS, WorkBook, read_works

NODE = 7
SIZE, RATE, CUT_AFTER = 1_500_000, 1_500_000, 0.4
"""Bytes of a message, and bytes per second of the link: it is cut about every fourth of a message."""
MOST = 1.1
"""Maximum of the bytes on the link over the size of a message."""


class Server:
    """A server behind the door that has one order, and takes replies."""

    def __init__(self) -> None:
        set_identity(1, 1, 1)
        sealed = UnsignedSigner().seal(Envelope("order", os.urandom(SIZE)), NODE)
        self.message = Message(to_records(sealed, draw_salt()), dst_node_id=NODE, message_type="train")
        tree, self.contents = deflate_message(self.message)
        head = node.PullMessagesResponse(
            messages_list=[node.message_to_proto(node.remove_content_from_message(self.message))],
            message_object_trees=[tree],
        )
        self.order = pack([head.SerializeToString(), *select_fitting(self.contents.values(), INLINE_BYTES)])
        self.stored, self.received = set[bytes](), 0

    async def take_order(self, sender: int, received: str, gone: Any, slot: Any) -> bytes:
        gone.close()
        return self.order

    async def send_reply(self, sender: int, request: Any, contents: Any) -> bytes:
        self.stored |= set(contents)
        self.received += sum(map(len, contents))
        missing = set(list_tree_ids(request.message_object_trees[0])) - {compute_object_id(one) for one in self.stored}
        return node.PushMessagesResponse(session_id="session", objects_to_push=missing).SerializeToString()

    async def pull_object(self, scope: Any, receive: Any, send: Any) -> None:
        """Flower's answer to a request for an object."""
        request = (await receive())["body"]
        content = next(content for id, content in self.contents.items() if id.encode() in request)
        body = node.PullObjectResponse(
            object_found=True, object_available=True, object_content=content
        ).SerializeToString()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, int]]:
    """The server and its port; every valid key is that of node 7."""
    monkeypatch.setattr(door, "is_node_key_required", lambda app: True)
    monkeypatch.setattr(senders, "find_node_id", lambda app, key: NODE)
    monkeypatch.setattr(door, "find_reply_limit", lambda app, node, order: None)
    made = Server()
    with serve(door.Door(made.pull_object, exchange=made)) as port:
        yield made, port


@contextmanager
def serve(doorkeeper: door.Door) -> Iterator[int]:
    """Serve behind a door; yields the port."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await doorkeeper({**scope, "app": SimpleNamespace()}, receive, send)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        served = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_level="critical"))
        thread = Thread(target=lambda: asyncio.run(served.serve([bound])), daemon=True)
        thread.start()
        until = time.monotonic() + 20
        while not served.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        yield bound.getsockname()[1]
        served.should_exit = True
        thread.join(20)


@contextmanager
def connect(port: int, *, bandwidth: transfers.Bandwidth | None = None) -> Iterator[NodeConnection]:
    connection = NodeConnection(f"127.0.0.1:{port}", None, None, 20, transfers.Transfers(bandwidth))
    connection.node_id = NODE
    try:
        yield connection
    finally:
        connection._requests.client.close()


def make_reply(to: Message) -> OutgoingReply:
    set_identity(1, 1, NODE)
    sealed = UnsignedSigner().seal(Envelope("reply", os.urandom(SIZE)), NODE)
    return OutgoingReply(1, Message(to_records(sealed, draw_salt()), reply_to=to), 1.0, NODE, to)


def test_a_reply_whose_object_the_server_cannot_store_waits_and_is_announced_again(
    server: tuple[Server, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk is full for a moment, or another process writes to its database."""
    monkeypatch.setattr(node, "PAUSE", 0.01)
    with connect(server[1]) as connection:
        reply, push, failures = make_reply(server[0].message), connection._push_objects, [True, True]

        def push_in_vain(reply: OutgoingReply) -> None:
            if failures:
                failures.pop()
                raise ObjectPushError("id", 1, "session")
            push(reply)

        monkeypatch.setattr(connection, "_push_objects", push_in_vain)
        with pytest.raises(httpx.ReadError, match="did not store an object"):
            connection.send_reply(reply)
        assert failures == []
        server[0].stored.clear()
        connection.send_reply(reply)
    assert server[0].stored == set(reply.contents.values())


def test_an_order_over_a_link_that_breaks_is_received_once(server: tuple[Server, int]) -> None:
    with SlowLink(server[1], RATE, CUT_AFTER) as link, connect(link.port) as connection:
        order = connection.take_order("")
        assert order.contents == server[0].contents
        assert link.cuts >= 2
        assert link.received < MOST * SIZE


def test_an_object_over_a_link_that_breaks_is_received_once(server: tuple[Server, int]) -> None:
    id = max(server[0].contents, key=lambda name: len(server[0].contents[name]))
    with SlowLink(server[1], RATE, CUT_AFTER) as link, connect(link.port) as connection:
        assert connection.pull_object(1, id) == server[0].contents[id]
        assert link.cuts >= 2
        assert link.received < MOST * SIZE


def test_a_reply_over_a_link_that_breaks_is_sent_once(server: tuple[Server, int]) -> None:
    with SlowLink(server[1], RATE, CUT_AFTER) as link, connect(link.port) as connection:
        reply = make_reply(server[0].message)
        connection.send_reply(reply)
        assert server[0].stored == set(reply.contents.values())
        assert link.cuts >= 2
        assert link.up < MOST * SIZE


@pytest.mark.parametrize("status", others_slow([408, 429, 500, 503], [503]))
def test_a_reply_that_was_not_taken_for_the_moment_is_continued(status: int) -> None:
    """A SuperLink answers so that waited too long for the rest of a body, is stopped, or has a full disk."""
    set_identity(1, 1, NODE)
    message, asked = Message(to_records(UnsignedSigner().seal(Envelope("order"), NODE), draw_salt()), NODE, "train"), []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path.rpartition("/")[2])
        if asked[-1] == wire.UPLOAD_OFFSET:
            return httpx.Response(200, stream=httpx.ByteStream(b"10"))
        return httpx.Response(status if len(asked) == 1 else 200, stream=httpx.ByteStream(b""))

    with connect(1) as connection:
        connection._requests.client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
        connection.send_reply(make_reply(message))
    assert asked == [wire.SEND_REPLY, wire.UPLOAD_OFFSET, wire.SEND_REPLY]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_node_says_whether_it_goes_offline_because_it_is_stopped(is_stopped: bool) -> None:
    notices = list[bool]()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("deactivate-node"):
            notices.append(wire.STOPPED_HEADER in request.headers)
        return httpx.Response(200, stream=httpx.ByteStream(b""))

    connection = NodeConnection("server", None, None, 0)
    connection._requests.client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    connection.node_id, connection.is_stopped = NODE, is_stopped
    connection.close()
    assert notices == [is_stopped]


def test_a_reply_is_continued_over_another_connection(server: tuple[Server, int]) -> None:
    kept, keys, reply = transfers.Transfers(), node.generate_key_pairs(), make_reply(server[0].message)
    with SlowLink(server[1], RATE, CUT_AFTER) as link:
        attempts = 0
        while not server[0].stored:
            attempts += 1
            assert attempts < 20
            connection = NodeConnection(f"127.0.0.1:{link.port}", None, keys, 0, kept)
            connection.node_id = NODE
            with suppress(httpx.TransportError):
                connection.send_reply(reply)
            connection._requests.client.close()
        assert attempts > 1
        assert server[0].stored == set(reply.contents.values())
        assert link.up < MOST * SIZE


def test_a_transfer_stays_below_its_bandwidth(server: tuple[Server, int]) -> None:
    rate = 3_000_000.0
    with connect(server[1], bandwidth=transfers.Bandwidth(up=rate, down=rate)) as connection:
        began = time.monotonic()
        order = connection.take_order("")
        received = time.monotonic()
        assert order is not None
        connection.send_reply(make_reply(server[0].message))
        sent = time.monotonic()
    assert received - began >= SIZE / rate
    assert sent - received >= SIZE / rate


def test_transfers_share_a_rate() -> None:
    pacer, began = transfers.Pacer(1e5), time.monotonic()
    threads = [Thread(target=lambda: [pacer.wait(1000) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2


def test_a_pause_is_not_made_up_for() -> None:
    pacer = transfers.Pacer(1e5)
    pacer.wait(1000)
    time.sleep(0.1)
    began = time.monotonic()
    for _ in range(10):
        pacer.wait(1000)
    assert time.monotonic() - began >= 0.1


def test_a_node_logs_progress_after_some_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(transfers.time, "monotonic", lambda: now[0])
    blocks = list[int]()
    progress = transfers.TransferProgress("reply sent", lambda: blocks.append(1))
    with caplog.at_level(logging.INFO, "fedspan.node"):
        progress.show(1)  # nothing has begun
        progress.begin(20_000_000, 8_000_000)
        for now[0], current in ((102.0, 1_000_000), (103.5, 2_000_000), (105.0, 3_000_000), (109.0, 4_000_000)):
            progress.show(current)
        progress.begin(0)
        now[0] = 113.0
        progress.show(5_000_000)
    assert caplog.messages == ["reply sent: 10.0 of 20.0 MB", "reply sent: 12.0 of 20.0 MB", "reply sent: 5.0 MB"]
    assert len(blocks) == 6  # every block renews the node's heartbeat


def test_an_order_on_its_way_is_logged_on_both_sides(
    server: tuple[Server, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfers, "_SHOWN_EVERY", 0.0)
    monkeypatch.setattr(progress, "SHOWN_EVERY", 0.0)
    monkeypatch.setattr(transfers, "_FIRST_SHOWN", 0.0)
    with caplog.at_level(logging.INFO), SlowLink(server[1], RATE, CUT_AFTER) as link, connect(link.port) as connection:
        connection.transfers.received.begin(len(server[0].order))
        connection.take_order("")
        assert link.cuts >= 2
    lines = {"fedspan.node": list[str](), "fedspan.server": list[str]()}
    for record in caplog.records:
        if record.name in lines:
            lines[record.name].append(record.getMessage())
    size = f"{len(server[0].order) / 1e6:.1f}"
    assert any(line.startswith("order received: 0.5 of") for line in lines["fedspan.node"])
    assert f"node {NODE}: order sent: 0.5 of {size} MB" in lines["fedspan.server"]
    assert lines["fedspan.server"][-1] == f"node {NODE}: order sent: {size} of {size} MB"  # of an answer that went on


def test_the_server_logs_the_progress_of_a_message_over_all_answers_with_parts_of_it(
    server: tuple[Server, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them is fast; the second one comes after a pause, and is a part of another message."""
    id, now = max(server[0].contents, key=lambda name: len(server[0].contents[name])), [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with caplog.at_level(logging.INFO, "fedspan.server"), connect(server[1]) as connection:
        connection.transfers.received.begin(40_000_000, 0)
        for seconds in (0.0, 60.0, 62.0, 64.0, 66.0):
            now[0] = seconds
            connection.pull_object(1, id)
    size = len(server[0].contents[id])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fedspan.server"]
    done = float(re.fullmatch(rf"node {NODE}: order sent: ([\d.]+) of 40.0 MB", line)[1])
    assert 4 * size <= done * 1e6 + 1e5
    assert done * 1e6 - 1e5 <= 5 * size


def test_little_is_remembered() -> None:
    made = transfers.Transfers()
    for n in range(9):
        made.keep_download("path", b"%d" % n, transfers.Download("tag"))
        made.note_interruption(str(n))
    assert [made.find_download("path", b"%d" % n) is not None for n in range(9)] == [False] * 5 + [True] * 4
    assert list(made.interrupted) == ["5", "6", "7", "8"]


@pytest.mark.slow
def test_a_message_crosses_a_superlink_over_a_link_that_breaks(tmp_path: Path) -> None:
    """The short form of ``evidence/regression/transfers.py``: pieces of a message that is too large for one request."""
    from evidence.regression import transfers as benchmark

    row = benchmark.measure(tmp_path, 6_000_000, 500_000, 4.0)
    assert row["cuts"] > 3
    assert max(row["order"], row["reply"]) < MOST


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_DELAY", 0.05)


async def settle(book: WorkBook) -> None:
    if book._writing is not None:
        await book._writing


async def test_the_file_says_what_each_node_said_last(tmp_path: Path) -> None:
    book = WorkBook(tmp_path / "work.json")
    book.note(1, NodeWork("training", 3))
    book.note(2**64 - 1, NodeWork("hidden states", None))
    book.note(1, NodeWork("training", 50))
    await settle(book)
    assert read_works(tmp_path / "work.json") == {
        "1": NodeWork("training", 50),
        str(2**64 - 1): NodeWork("hidden states", None),
    }
    book.note(1, None)
    await settle(book)
    assert list(read_works(tmp_path / "work.json")) == [str(2**64 - 1)]
    assert (tmp_path / "work.json").stat().st_mode & 0o777 == 0o600


async def test_what_is_noted_while_the_file_is_written_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, may_end = Event(), Event()
    write = work.write_atomic

    def write_slowly(*arguments: Any) -> None:
        is_writing.set()
        may_end.wait(20)
        write(*arguments)

    monkeypatch.setattr(work, "write_atomic", write_slowly)
    book = WorkBook(tmp_path / "work.json")
    book.note(1, NodeWork("training", 97))
    while not is_writing.is_set():
        await asyncio.sleep(0.01)
    book.note(1, None)
    may_end.set()
    await settle(book)
    assert read_works(tmp_path / "work.json") == {}


async def test_a_node_without_work_writes_nothing(tmp_path: Path) -> None:
    book = WorkBook(tmp_path / "work.json")
    book.note(1, None)
    await settle(book)
    WorkBook(None).note(1, NodeWork("training", 3))
    assert not (tmp_path / "work.json").exists()


async def test_a_disk_that_is_full_stops_no_heartbeat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = WorkBook(tmp_path / "missing" / "work.json")
    for _ in range(2):
        book.note(1, NodeWork("training", 3))
        await settle(book)
    assert caplog.text.count("cannot be written") == 2


async def test_old_words_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "work.json", time.time()
    path.write_text(json.dumps({"1": [now, "training", 3], "2": [now - FRESH_SECONDS - 1, "training", 4]}))
    assert read_works(path) == {"1": NodeWork("training", 3)}
    book = WorkBook(path)
    book.note(1, NodeWork("training", 3))
    await settle(book)
    monkeypatch.setattr(work.time, "time", lambda: now + FRESH_SECONDS + 60)
    book.note(2, NodeWork("training", 4))
    await settle(book)
    assert list(json.loads(path.read_text())) == ["2"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"3",
        b'{"1": 3, "2": ["a", "b", 1], "3": [1e12, 5, 1], "4": [1e12, "training"], "5": [1e12, "x", "y"]}',
    ],
    ids=("empty", "not UTF-8", "nested", "a number", "other values"),
)
def test_a_damaged_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "work.json").write_bytes(content)
    assert read_works(tmp_path / "work.json") == {}
    assert read_works(tmp_path / "missing.json") == {}


def test_a_heartbeat_over_http_says_what_its_node_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "is_node_key_required", lambda app: True)
    monkeypatch.setattr(senders, "find_node_id", lambda app, key: 7)

    class Exchange:
        async def acknowledge_heartbeat(self, body: bytes, node: int | None) -> bytes:
            return adapter_node.SendNodeHeartbeatResponse(success=True).SerializeToString()

    path, until = tmp_path / "work.json", time.monotonic() + 20
    with serve(door.Door(None, exchange=Exchange(), work=path)) as port, connect(port) as connection:
        for said, known in (
            (NodeWork("training", 37), {"7": NodeWork("training", 37)}),
            (NodeWork("evaluation", None), {"7": NodeWork("evaluation", None)}),
            (None, {}),
        ):
            connection.get_work = lambda said=said: said
            assert connection.renew()
            while read_works(path) != known:
                assert time.monotonic() < until
                time.sleep(0.01)
