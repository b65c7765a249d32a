"""A node's requests over connections that break: the rest is sent, answers are continued, and retries end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import pytest

resumable = pytest.importorskip(
    "fedspan.transports.flower.resumable", reason="the extra fedspan[flower] is not installed"
)
httpx = pytest.importorskip("httpx")
transfers = pytest.importorskip("fedspan.transports.flower.transfers")
wire = pytest.importorskip("fedspan.transports.flower.wire")

LONG = os.urandom(wire.RESUMABLE_BYTES)
PATH = wire.NODE_PATH + wire.TAKE_ORDER
Handler = Callable[[Any], Any]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(resumable.time, "sleep", made.append)
    return made


def answer(status: int, content: bytes = b"", **options: Any) -> Any:
    """An answer whose content is still to be read, as over a connection."""
    return httpx.Response(status, stream=httpx.ByteStream(content), **options)


def client(handle: Handler, retries: int = 3) -> Any:
    """A client of a server that answers with ``handle``; its headers name the path that they are for."""
    connections = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://server")
    return resumable.ResumableClient(connections, lambda path: {"signed": path}, retries, transfers.Transfers())


def test_a_short_request_is_sent_again_after_longer_and_longer_pauses(pauses: list[float]) -> None:
    bodies: list[bytes] = []

    def handle(request: Any) -> Any:
        bodies.append(request.read())
        assert request.headers["signed"] == request.url.path
        assert wire.UPLOAD_HEADER not in request.headers
        if len(bodies) < 4:
            raise httpx.ConnectError("lost")
        return answer(200, b"answer")

    assert client(handle).post(PATH, b"short", 100) == b"answer"
    assert bodies == [b"short"] * 4
    assert pauses == [1.0, 2.0, 4.0]


def test_retries_end(pauses: list[float]) -> None:
    def handle(request: Any) -> Any:
        raise httpx.ConnectError("lost")

    with pytest.raises(httpx.ConnectError, match="lost"):
        client(handle).post(PATH, b"short", 100, retries=1)
    assert pauses == [1.0]


@pytest.mark.parametrize(
    ("status", "is_sent_again"), [(503, True), (429, True), (408, True), (401, False), (413, False)]
)
def test_what_the_server_refuses_for_the_moment_is_sent_again(
    status: int, is_sent_again: bool, pauses: list[float]
) -> None:
    answers = iter([answer(status), answer(200, b"answer")])
    made = client(lambda request: next(answers))
    if is_sent_again:
        assert made.post(PATH, b"short", 100) == b"answer"
        return
    with pytest.raises(httpx.HTTPStatusError):
        made.post(PATH, b"short", 100)
    assert pauses == []


def test_the_rest_of_a_long_body_is_sent(pauses: list[float]) -> None:
    digest = hashlib.sha256(LONG).hexdigest()
    seen: list[tuple[str, int]] = []

    def handle(request: Any) -> Any:
        content = request.read()
        if request.url.path.endswith(wire.UPLOAD_OFFSET):
            assert content == digest.encode()
            return answer(200, b"1000")
        part = wire.parse_upload({wire.UPLOAD_HEADER.encode(): request.headers[wire.UPLOAD_HEADER].encode()})
        assert (part.digest, part.total, int(request.headers["content-length"])) == (digest, len(LONG), len(content))
        seen.append((part.digest, part.offset))
        assert content == LONG[part.offset :]
        if len(seen) == 1:
            raise httpx.ReadError("lost")
        return answer(200, b"stored")

    made = client(handle)
    assert made.post(PATH, LONG, 100) == b"stored"
    assert seen == [(digest, 0), (digest, 1000)]
    assert not made._transfers.interrupted


def test_a_body_that_has_arrived_is_not_sent_again(pauses: list[float]) -> None:
    """Its answer was lost: the server has kept it. A short reply counts as a long body."""
    sent: list[bytes] = []

    def handle(request: Any) -> Any:
        if request.url.path.endswith(wire.UPLOAD_OFFSET):
            return answer(200, wire.TAKEN + b"stored")
        sent.append(request.read())
        raise httpx.ReadError("lost")

    assert client(handle).post(wire.NODE_PATH + wire.SEND_REPLY, b"reply", 100) == b"stored"
    assert sent == [b"reply"]


@pytest.mark.parametrize("offset", [b"", b"-1", b"99999999999", b"%d" % (len(LONG) + 1)])
def test_an_answer_that_is_no_offset_of_the_body_is_an_error(offset: bytes, pauses: list[float]) -> None:
    def handle(request: Any) -> Any:
        request.read()
        if request.url.path.endswith(wire.UPLOAD_OFFSET):
            return answer(200, offset)
        raise httpx.ReadError("lost")

    with pytest.raises(httpx.RemoteProtocolError, match="an answer that is not an offset"):
        client(handle, retries=1).post(PATH, LONG, 100)


def test_an_answer_of_more_than_was_asked_for_is_an_error(pauses: list[float]) -> None:
    made = client(lambda request: answer(200, b"x" * 101), retries=0)
    assert made.post(PATH, b"short", 101) == b"x" * 101
    with pytest.raises(httpx.RemoteProtocolError, match="an answer of more than 100 bytes"):
        made.post(PATH, b"short", 100)


def test_the_rest_of_a_long_answer_is_requested_by_its_tag(pauses: list[float]) -> None:
    class Breaking(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            yield LONG[:5000]
            raise httpx.ReadError("lost")

    ranges: list[str | None] = []

    def handle(request: Any) -> Any:
        ranges.append(request.headers.get("range"))
        if len(ranges) == 1:
            return httpx.Response(200, headers={"etag": '"a"'}, stream=Breaking())
        assert request.headers["if-range"] == '"a"'
        return answer(206, LONG[5000:], headers={"etag": '"a"'})

    made = client(handle)
    assert made.post(PATH, b"short", len(LONG)) == LONG
    assert ranges == [None, "bytes=5000-"]
    assert pauses == [pytest.approx(0.1)]
    assert made._transfers.find_download(PATH, b"short") is None


def test_a_part_of_another_answer_is_an_error(pauses: list[float]) -> None:
    made = client(lambda request: answer(206, b"rest", headers={"etag": '"b"'}), retries=0)
    with pytest.raises(httpx.RemoteProtocolError, match="a part of another answer"):
        made.post(PATH, b"short", 100)
