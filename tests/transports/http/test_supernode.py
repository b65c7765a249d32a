"""A node's loop over orders, and its requests over connections that break."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from threading import Event, Timer
from typing import Any

import httpx
import pytest
from fedspan.transports.http.adapter import (
    ObjectPullError,
    OutgoingReply,
    ReceivedOrder,
    RunNotRunningException,
    deflate_message,
    list_tree_ids,
)
from fedspan.transports.http.messages import draw_salt, to_records
from flwr.app import Message

from fedspan.federation.protocol import Envelope
from fedspan.transports.http import resumable, supernode, transfers, wire
from fedspan.transports.http.signing import UnsignedSigner
from fedspan.transports.http.transfers import Transfers
from fedspan.transports.http.wire import NodeWork

pytestmark = pytest.mark.usefixtures("identity")


def gone() -> BaseException:
    return RunNotRunningException()


def lost() -> BaseException:
    return ObjectPullError("id", "timeout")


class Connection:
    """A connection whose server has two orders."""

    node_id = 1
    get_work: Callable[[], NodeWork | None]

    def __init__(self, where: str = "", error: Callable[[], BaseException] = gone, along: int = 0) -> None:
        self._failing, self._error, self._along = {where}, error, along
        self.contents: dict[str, bytes] = {}
        self.transfers = Transfers()
        self.messages: list[tuple[Message, Any]] = []
        self.received, self.sent = list[str](), list[Message]()
        for header in ("first", "second"):
            sealed = UnsignedSigner().seal(Envelope(header), 1)
            message = Message(to_records(sealed, draw_salt()), dst_node_id=1, message_type="train")
            tree, objects = deflate_message(message)
            self.messages.append((message, tree))
            self.contents |= objects

    def at(self, place: str) -> None:
        if place in self._failing:
            self._failing.clear()
            raise self._error()

    def take_order(self, received: str) -> ReceivedOrder | None:
        self.received.append(received)
        self.at("take")
        if not self.messages:
            return None
        message, tree = self.messages.pop(0)
        along = list_tree_ids(tree)[: self._along]
        return ReceivedOrder(message, tree, {id: self.contents[id] for id in along})

    def pull_object(self, run: int, id: str) -> bytes:
        self.at("pull")
        return self.contents[id]

    def send_reply(self, reply: OutgoingReply) -> None:
        self.at("send")
        self.sent.append(reply.reply)


def answer(connection: Connection, received: Any = None) -> list[str]:
    """Run the loop until the second order; the headers of the orders that were carried out."""
    stop, answered = Event(), list[str]()

    def answer(envelope: Envelope) -> Envelope:
        answered.append(envelope.header)
        if envelope.header == "second":
            stop.set()
        return envelope

    link, known = supernode.Link("", None, None, 2**20), received or supernode._Received()
    supernode._serve_connection(connection, link, UnsignedSigner(), answer, stop, known)
    return answered


@pytest.mark.parametrize("where", ["pull", "send", "take"])
@pytest.mark.parametrize("error", [gone, lost])
def test_a_run_that_ended_does_not_end_the_node(where: str, error: Callable[[], BaseException]) -> None:
    connection = Connection(where, error)
    assert answer(connection) == (["second"] if where == "pull" else ["first", "second"])
    assert len(connection.sent) == (2 if where == "take" else 1)


@pytest.mark.parametrize("along", [9, 2, 0])
def test_an_order_counts_as_received_only_with_the_request_after_its_reply(along: int) -> None:
    """A node that is killed before its reply is sent the order again, however large the order is."""
    connection = Connection(along=along)
    first, second = (message.metadata.message_id for message, _ in connection.messages)
    received = supernode._Received()
    assert answer(connection, received) == ["first", "second"]
    assert (connection.received, received.id) == (["", first], second)


def test_an_order_that_a_broken_connection_lost_has_not_been_received() -> None:
    received = supernode._Received()
    with pytest.raises(httpx.ReadError):
        answer(Connection("pull", lambda: httpx.ReadError("lost")), received)
    assert received.id == ""


def test_a_node_that_waits_for_an_order_stops_at_once() -> None:
    waiting, stop = Event(), Event()

    class Silent(Connection):
        def take_order(self, received: str) -> None:
            waiting.wait(60)

    Timer(0.1, stop.set).start()
    began = time.monotonic()
    assert supernode._next_order(Silent(), "", stop) is None
    assert time.monotonic() - began < 5
    waiting.set()


def test_a_server_that_does_not_wait_is_not_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, stop = Connection(), Event()
    connection.messages.clear()
    Timer(0.5, stop.set).start()
    link = supernode.Link("", None, None, 2**20)
    supernode._serve_connection(connection, link, UnsignedSigner(), lambda e: e, stop, supernode._Received())
    assert len(connection.received) == 1


def test_a_reply_that_a_broken_connection_lost_waits_for_the_next_one() -> None:
    received = supernode._Received()
    first = Connection("send", lambda: httpx.ReadError("lost"))
    with pytest.raises(httpx.ReadError):
        answer(first, received)
    assert received.reply is not None
    second = Connection()
    second.messages.pop(0)
    assert answer(second, received) == ["second"]  # its order is not carried out again
    assert len(second.sent) == 2


def test_the_server_learns_that_a_reply_is_too_large_for_its_order() -> None:
    response = httpx.Response(413, request=httpx.Request("POST", "https://server"))
    connection = Connection("send", lambda: httpx.HTTPStatusError("413", request=response.request, response=response))
    connection.messages.pop(0)
    assert answer(connection) == ["second"]
    (sent,) = connection.sent
    assert not sent.has_content()
    assert sent.error.reason == "the reply is larger than its order allows"


def test_a_reply_of_another_node_is_not_sent() -> None:
    received = supernode._Received()
    with pytest.raises(httpx.ReadError):
        answer(Connection("send", lambda: httpx.ReadError("lost")), received)
    other = Connection()
    other.node_id = 2
    other.messages.pop(0)
    assert answer(other, received) == ["second"]
    assert len(other.sent) == 1


def test_objects_that_were_fetched_before_a_connection_broke_are_not_fetched_again() -> None:
    received, pulled = supernode._Received(), list[str]()

    class Counting(Connection):
        def pull_object(self, run: int, id: str) -> bytes:
            if len(pulled) == 2:
                self.at("pull")
            pulled.append(id)
            return self.contents[id]

    first = Counting("pull", lambda: httpx.ReadError("lost"))
    order = first.messages[0]
    with pytest.raises(httpx.ReadError):
        answer(first, received)
    first.messages.insert(0, order)
    assert answer(first, received) == ["first", "second"]
    assert len(pulled) == len(set(pulled)) == len(first.contents)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_waits_for_its_link_while_it_counts_as_online(comes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "_OFFLINE", 0.2)
    monkeypatch.setattr(supernode, "_RECONNECT", (0.1, 0.1))
    tries = list[int]()

    class Renewing(Connection):
        def renew(self) -> bool:
            tries.append(1)
            return comes_back and len(tries) == 2

    link, lost = supernode.Link("", None, None, 2**20), httpx.ReadError("lost")
    received = supernode._Received()
    assert supernode._wait_for_link(Renewing(), link, Event(), lost, received) is comes_back
    assert len(tries) >= 2


def test_a_stopped_node_waits_for_its_link_until_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "_RECONNECT", (0.1, 0.1))

    class Silent(Connection):
        def renew(self) -> bool:
            return False

    link, lost, began = supernode.Link("", None, None, 2**20), httpx.ReadError("lost"), time.monotonic()
    leave_at = began + 0.3
    assert not supernode._wait_for_link(Silent(), link, Event(), lost, supernode._Received(), leave_at=leave_at)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_that_is_stopped_sends_the_reply_that_waits(comes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernode, "_OFFLINE", 0.5)
    monkeypatch.setattr(supernode, "_RECONNECT", (0.1, 0.1))
    stop, stopped = Event(), list[bool]()

    class Losing(Connection):
        """The SuperLink takes heartbeats, and answers the reply with an error, once or forever."""

        is_stopped = False

        def at(self, place: str) -> None:
            if place == "send":
                stop.set()
                if not comes_back:
                    raise httpx.ReadError("the SuperLink answered 500")
            super().at(place)

        def renew(self) -> bool:
            return True

    connection = Losing("send", lambda: httpx.ReadError("lost"))

    @contextmanager
    def connect(*arguments: Any) -> Iterator[Losing]:
        yield connection
        stopped.append(connection.is_stopped)

    monkeypatch.setattr(supernode, "connect_node", connect)
    link, answered = supernode.Link("", None, None, 2**20), list[str]()

    def answer(envelope: Envelope) -> Envelope:
        answered.append(envelope.header)
        return envelope

    began = time.monotonic()
    supernode.serve(link, answer, stop, get_work=lambda: NodeWork("training", 3))
    assert time.monotonic() - began < 5
    assert connection.get_work() == NodeWork("training", 3)
    assert answered == ["first"]
    assert len(connection.sent) == comes_back
    assert stopped == ([True] if comes_back else [])
    assert connection.is_stopped is comes_back


def test_a_node_that_is_stopped_and_has_no_reply_does_not_wait_for_its_link() -> None:
    stop = Event()
    stop.set()
    link, lost = supernode.Link("", None, None, 2**20), httpx.ReadError("lost")
    assert supernode._wait_for_link(Connection(), link, stop, lost, supernode._Received())


def test_an_order_that_arrives_while_the_node_is_stopped_is_carried_out() -> None:
    class Slow(Connection):
        def take_order(self, received: str) -> ReceivedOrder | None:
            time.sleep(0.3)
            return super().take_order(received)

    stop = Event()
    stop.set()
    order = supernode._next_order(Slow(), "", stop)
    assert order.message.metadata.dst_node_id == 1


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (0.0, None),
        (-200.0, None),
        (60.0, "the clock of this machine is 60 seconds ahead of the server's"),
        (-900.0, "the clock of this machine is 900 seconds behind the server's"),
    ],
)
def test_a_wrong_clock_is_named_as_the_reason(ahead: float, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_790_000_000
    monkeypatch.setattr(supernode.time, "time", lambda: now + ahead)
    response = supernode.httpx.Response(401, headers={"date": formatdate(now, usegmt=True)})
    assert supernode.explain_clock(response) == said
    for date in ("", "yesterday", "Thu, 01 Jan 99999 00:00:00 GMT"):
        assert supernode.explain_clock(supernode.httpx.Response(401, headers={"date": date})) is None
    assert supernode.explain_clock(supernode.httpx.Response(401)) is None


LONG = os.urandom(wire.RESUMABLE_BYTES)
PATH = wire.NODE_PATH + wire.TAKE_ORDER
Handler = Callable[[Any], Any]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr(resumable.time, "sleep", made.append)
    return made


def respond(status: int, content: bytes = b"", **options: Any) -> Any:
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
        return respond(200, b"answer")

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
def test_what_is_refused_for_the_moment_is_sent_again(status: int, is_sent_again: bool, pauses: list[float]) -> None:
    answers = iter([respond(status), respond(200, b"answer")])
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
            return respond(200, b"1000")
        part = wire.parse_upload({wire.UPLOAD_HEADER.encode(): request.headers[wire.UPLOAD_HEADER].encode()})
        assert (part.digest, part.total, int(request.headers["content-length"])) == (digest, len(LONG), len(content))
        seen.append((part.digest, part.offset))
        assert content == LONG[part.offset :]
        if len(seen) == 1:
            raise httpx.ReadError("lost")
        return respond(200, b"stored")

    made = client(handle)
    assert made.post(PATH, LONG, 100) == b"stored"
    assert seen == [(digest, 0), (digest, 1000)]
    assert not made._transfers.interrupted


def test_a_body_that_has_arrived_is_not_sent_again(pauses: list[float]) -> None:
    """Its answer was lost: the server has kept it. A short reply counts as a long body."""
    sent: list[bytes] = []

    def handle(request: Any) -> Any:
        if request.url.path.endswith(wire.UPLOAD_OFFSET):
            return respond(200, wire.TAKEN + b"stored")
        sent.append(request.read())
        raise httpx.ReadError("lost")

    assert client(handle).post(wire.NODE_PATH + wire.SEND_REPLY, b"reply", 100) == b"stored"
    assert sent == [b"reply"]


@pytest.mark.parametrize("offset", [b"", b"-1", b"99999999999", b"%d" % (len(LONG) + 1)])
def test_an_answer_that_is_no_offset_of_the_body_is_an_error(offset: bytes, pauses: list[float]) -> None:
    def handle(request: Any) -> Any:
        request.read()
        if request.url.path.endswith(wire.UPLOAD_OFFSET):
            return respond(200, offset)
        raise httpx.ReadError("lost")

    with pytest.raises(httpx.RemoteProtocolError, match="an answer that is not an offset"):
        client(handle, retries=1).post(PATH, LONG, 100)


def test_an_answer_of_more_than_was_asked_for_is_an_error(pauses: list[float]) -> None:
    made = client(lambda request: respond(200, b"x" * 101), retries=0)
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
        return respond(206, LONG[5000:], headers={"etag": '"a"'})

    made = client(handle)
    assert made.post(PATH, b"short", len(LONG)) == LONG
    assert ranges == [None, "bytes=5000-"]
    assert pauses == [pytest.approx(0.1)]
    assert made._transfers.find_download(PATH, b"short") is None


def test_a_part_of_another_answer_is_an_error(pauses: list[float]) -> None:
    made = client(lambda request: respond(206, b"rest", headers={"etag": '"b"'}), retries=0)
    with pytest.raises(httpx.RemoteProtocolError, match="a part of another answer"):
        made.post(PATH, b"short", 100)
