"""The form of messages and headers, and what a node reads of answers: a hostile server's, or a proxy's."""

import gzip
import itertools
import json
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from fedspan.errors import FedspanError
from fedspan.transports.http import client
from fedspan.transports.http.client import Link, NodeConnection, RefusedError, open_client
from fedspan.transports.http.node import check_server, serve
from fedspan.transports.http.signing import UnsignedSigner, join_message, split_message
from fedspan.transports.http.wire import NodeWork, pack, parse_range, parse_work, unpack
from helpers.captured_log import CapturedLog


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
        with pytest.raises(FedspanError, match="an answer that is too long"):
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
