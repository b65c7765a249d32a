"""A node's transfers: over a link that breaks the rest is sent; bandwidth is limited; progress is shown."""

import logging
import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.transports.http import client
from fedspan.transports.http.client import Link, NodeConnection, RefusedError
from fedspan.transports.http.server import attach
from fedspan.transports.http.signing import UnsignedSigner
from fedspan.transports.http.store import MESSAGES
from fedspan.transports.http.transport import ServerTransport
from helpers.captured_log import CapturedLog
from helpers.families import others_slow
from helpers.http_server import LocalServer, join, send_order, serve_here
from helpers.slow_link import SlowLink

SIZE, RATE, CUT_AFTER = 1_500_000, 1_500_000, 0.4
"""Bytes of a message, and bytes per second of the link: it is cut about every fourth of a message."""
MOST = 1.1
"""Maximum of the bytes on the link over the size of a message."""
UPLOAD = "a" * 32


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    monkeypatch.setattr(client, "_PAUSE", 0.05)
    with serve_here(tmp_path / "server") as made:
        yield made


def get_port(server: LocalServer) -> int:
    return int(server.link.address.rpartition(":")[2])


def test_an_order_and_its_reply_over_a_link_that_breaks_are_sent_once(server: LocalServer) -> None:
    body, message = os.urandom(SIZE), os.urandom(SIZE)
    with (
        SlowLink(get_port(server), RATE, CUT_AFTER, is_cut=False) as link,
        join(f"127.0.0.1:{link.port}") as node,
        attach(server.link, SIZE) as run,
    ):
        id = send_order(run, node.node, Envelope("{}", body), SIZE)
        link.cutting.set()
        order = node.take_order()
        assert UnsignedSigner().open_order(order[2], node.node).envelope == Envelope("{}", body)
        assert link.cuts >= 2
        assert link.received < MOST * SIZE
        cuts = link.cuts
        node.send_reply(id, message, UPLOAD)
        assert link.cuts >= cuts + 2
        assert link.up < MOST * SIZE
        (taken,) = run.take_replies([id])
        assert taken.read() == message


def test_transfers_are_continued_over_another_connection(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the end of the link for so long that a request is given up."""
    monkeypatch.setattr(client, "_RETRIES", 0)
    monkeypatch.setattr(
        "fedspan.transports.http.node_requests.secrets.randbits", lambda bits: 7
    )  # the same node, without keys
    body, message, attempts = os.urandom(SIZE), os.urandom(SIZE), 0
    with SlowLink(get_port(server), RATE, CUT_AFTER, is_cut=False) as link:
        order, before, arrived = None, None, False
        with join(f"127.0.0.1:{link.port}"), attach(server.link, SIZE) as run:
            id = send_order(run, 7, Envelope("{}", body), SIZE)
            link.cutting.set()
            while not arrived:
                attempts += 1
                assert attempts < 40
                with suppress(httpx.TransportError), join(f"127.0.0.1:{link.port}") as node:
                    if order is None:
                        node.incoming, before = (before.incoming if before else None), node
                        order = node.take_order()
                        attempts = 0
                    node.send_reply(id, message, UPLOAD, is_continued=True)
                    arrived = True
            assert attempts > 1
            assert max(link.up, link.received) < MOST * SIZE
            (taken,) = run.take_replies([id])
            assert taken.read() == message


def test_a_run_holds_one_of_the_replies_that_arrived_together(server: LocalServer) -> None:
    with ExitStack() as stack:
        nodes = {f"c{number}": stack.enter_context(join(server.link.address)) for number in range(8)}
        run = stack.enter_context(attach(server.link, SIZE))
        waiting = ServerTransport(run, {id: node.node for id, node in nodes.items()})
        waiting.send_orders(Orders("train", nodes, Envelope), 60.0)
        for node in nodes.values():
            order = node.take_order()
            opened = UnsignedSigner().open_order(order[2], node.node)
            reply = Envelope(opened.envelope.header, bytes(SIZE))
            node.send_reply(order[0], UnsignedSigner().seal_reply(reply, node.node, opened), UPLOAD)
        left = set(nodes)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        while (received := waiting.receive_reply()) is not None:
            id, reply = received
            left.remove(id)
            assert reply == Envelope(id, bytes(SIZE))
        assert not left
        assert tracemalloc.get_traced_memory()[1] < 4.5 * SIZE  # two copies, one before it, and one of this test
        assert waiting.retain_orders(()) == frozenset()
        run.cancel(())
        assert not list((server.link.folder / MESSAGES).iterdir())


@pytest.mark.parametrize("status", others_slow([408, 429, 500, 503], [503]))
def test_a_reply_that_was_not_taken_for_the_moment_is_continued(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers so that waited too long for the rest of a body, is stopped, or has a full disk."""
    monkeypatch.setattr(client, "_PAUSE", 0.01)
    asked = list[tuple[str, str]]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.params.get("start", "")))
        request.read()
        if len(asked) == 1:
            return httpx.Response(status)
        return httpx.Response(200, json={"bytes": 10 if len(asked) == 2 else 30})

    connections = httpx.Client(base_url="http://server/v1/", transport=httpx.MockTransport(answer))
    node = NodeConnection(Link("server", None, None, 100), UnsignedSigner(), connections)
    node.send_reply("0", bytes(30), UPLOAD)
    assert asked == [("PUT", "0"), ("GET", ""), ("PUT", "10")]


def test_an_answer_of_more_than_was_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_RETRIES", 0)
    headers = {"fedspan-order": "0", "fedspan-bytes": "100", "fedspan-reply": "100"}
    content = bytes(client.CHUNK + 1)
    connections = httpx.Client(
        base_url="http://server/v1/",
        transport=httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=httpx.ByteStream(content))),
    )
    node = NodeConnection(Link("server", None, None, 2**30), UnsignedSigner(), connections)
    for fetch, error in (
        (node.take_order, ValueError),
        (lambda: node.fetch_base("a", "b", 0), httpx.RemoteProtocolError),
    ):
        with pytest.raises(error, match="more than was requested"):
            fetch()


def test_a_refusal_is_repeated_in_few_words_and_not_tried_again() -> None:
    asked = list[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(404, json={"reason": "gone" * 1000} if len(asked) == 1 else [1])

    connections = httpx.Client(base_url="http://server/v1/", transport=httpx.MockTransport(answer))
    node = NodeConnection(Link("server", None, None, 100), UnsignedSigner(), connections)
    for _ in range(2):
        with pytest.raises(RefusedError, match="404") as caught:
            node.send_failure("0", "a reason")
        assert len(str(caught.value)) < 300
    assert len(asked) == 2


def test_a_transfer_stays_below_its_bandwidth(server: LocalServer) -> None:
    rate = 3_000_000.0
    with join(server.link.address, up=rate, down=rate) as node, attach(server.link, SIZE) as run:
        id = send_order(run, node.node, Envelope("{}", bytes(SIZE)), SIZE)
        began = time.monotonic()
        assert node.take_order() is not None
        received = time.monotonic()
        node.send_reply(id, bytes(SIZE), UPLOAD)
        sent = time.monotonic()
    assert received - began >= SIZE / rate
    assert sent - received >= SIZE / rate


def test_transfers_share_a_rate() -> None:
    pacer, began = client.Pacer(1e5), time.monotonic()
    threads = [Thread(target=lambda: [pacer.wait(1000) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.2


def test_a_pause_is_not_made_up_for() -> None:
    pacer = client.Pacer(1e5)
    pacer.wait(1000)
    time.sleep(0.1)
    began = time.monotonic()
    for _ in range(10):
        pacer.wait(1000)
    assert time.monotonic() - began >= 0.1


def test_a_node_logs_progress_after_some_seconds(monkeypatch: pytest.MonkeyPatch, caplog: CapturedLog) -> None:
    now = [100.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    blocks = list[int]()
    progress = client.TransferProgress("reply sent", lambda: blocks.append(1))
    with caplog.at_level(logging.INFO, "fedspan.node"):
        progress.show(1)  # nothing has begun
        progress.begin(20_000_000)
        for now[0], current in ((102.0, 9_000_000), (103.5, 10_000_000), (105.0, 11_000_000), (109.0, 12_000_000)):
            progress.show(current)
        progress.begin(7_000_000)
        now[0] = 113.0
        progress.show(5_000_000)
    assert caplog.messages == [
        "reply sent: 10.0 of 20.0 MB",
        "reply sent: 12.0 of 20.0 MB",
        "reply sent: 5.0 of 7.0 MB",
    ]
    assert len(blocks) == 6  # every block renews the node's heartbeat


@pytest.mark.slow
def test_a_message_crosses_a_server_over_a_link_that_breaks(tmp_path: Path) -> None:
    """The short form of ``evidence.regression.transfers``, with processes, TLS and keys."""
    from evidence.regression import transfers as benchmark

    row = benchmark.measure(tmp_path, 6_000_000, 500_000, 4.0)
    assert row["cuts"] > 3
    assert max(row["order"], row["reply"]) < MOST
