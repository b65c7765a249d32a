"""Requests of nodes: their form, limits on their number, sizes and rates, and bounds on connections."""

import asyncio
import socket
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedspan.transports.flower.wire import (
    WORK_HEADER,
    NodeWork,
    UploadPart,
    format_reply_limit,
    pack,
    parse_offset,
    parse_reply_limit,
    parse_upload,
    parse_work,
    read_first,
    select_fitting,
    unpack,
)

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.transports.flower import adapter, bodies, connections, keys, limits, senders


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def test_the_size_of_a_reply_limits_its_objects_and_its_announcement() -> None:
    some = limits.DoorLimits(reply_bytes=10 * adapter.PIECE_BYTES - 1)
    assert some.objects == 16 + 9
    assert some.head_bytes == limits.SMALL_BYTES + 25 * 80


def test_an_order_lowers_the_limit_of_its_reply_and_never_raises_it() -> None:
    some = limits.DoorLimits(reply_bytes=1000, rate=3.0)
    assert some.restrict(10).reply_bytes == 10
    assert some.restrict(5000).reply_bytes == 1000
    assert some.restrict(10).rate == 3.0
    assert some.reply_bytes == 1000


def test_tokens_are_taken_ahead_and_refilled_up_to_a_burst(clock: Clock) -> None:
    bucket = limits.Bucket(rate=2.0, burst=3.0)
    assert [bucket.take() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    clock.now += 1.0  # two tokens, which two waiting requests have taken already
    assert bucket.take() == 0.5
    clock.now += 1000.0
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_token_that_was_given_back_is_there_for_the_next_request(clock: Clock) -> None:
    bucket = limits.Bucket(rate=2.0, burst=1.0)
    assert (bucket.take(), bucket.take()) == (0.0, 0.5)
    bucket.give_back()
    assert bucket.take() == 0.5


async def test_a_request_holds_one_slot_however_often_it_enters_and_leaves() -> None:
    slots = asyncio.Semaphore(2)
    one, two, three = (limits.Slot(slots) for _ in range(3))
    one.leave()  # it holds none
    for _ in range(2):
        await one.enter()
    await two.enter()
    assert slots.locked()
    waiting = asyncio.create_task(three.enter())
    await asyncio.sleep(0)
    assert not waiting.done()
    for _ in range(2):
        one.leave()
    await waiting
    assert slots.locked()
    two.leave()
    three.leave()
    await slots.acquire()
    await slots.acquire()
    assert slots.locked()


SCOPE = {"app": SimpleNamespace()}


async def test_a_node_has_one_state_and_those_longest_ago_are_forgotten_first() -> None:
    known = senders.Senders(limits.DoorLimits(rate=3.0, heartbeat_rate=0.5, parallel=1))
    first, second = known.get(b"first"), known.get(b"second")
    assert (first.requests.rate, first.heartbeats.rate) == (3.0, 0.5)
    assert known.get(b"first") is first  # which makes the second the oldest
    for number in range(4095):
        known.get(b"%d" % number)
    assert known.get(b"first") is first
    assert known.get(b"second") is not second


def test_a_node_whose_request_waits_is_not_forgotten() -> None:
    known = senders.Senders(limits.DoorLimits())
    busy = known.get(b"busy")
    busy.waiting = 1
    for number in range(5000):
        known.get(b"%d" % number)
    assert known.get(b"busy") is busy


async def test_a_key_is_looked_up_now_and_then_and_an_unknown_one_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    nodes: dict[bytes, int] = {b"a": 7}

    def find(app: object, key: bytes) -> int | None:
        asked.append(key)
        return nodes.get(key)

    monkeypatch.setattr(senders, "find_node_id", find)
    known = senders.Senders(limits.DoorLimits())
    sender = known.get(b"a")
    for _ in range(3):
        await known.require_admitted(SCOPE, sender, b"a")
    assert asked == [b"a"]
    assert sender.node == 7
    nodes.clear()
    sender.looked_up_at -= limits.KNOWN_SECONDS
    for _ in range(2):
        with pytest.raises(bodies.Refused, match="this key was not admitted") as caught:
            await known.require_admitted(SCOPE, known.get(b"a"), b"a")
        assert caught.value.status == 401
    assert asked == [b"a"] * 3


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


@pytest.mark.parametrize("parts", [[], [b""], [b"", b"a", bytes(1000)], [b"abc"] * 64])
def test_what_is_joined_comes_apart(parts: list[bytes]) -> None:
    assert unpack(pack(parts), 64) == parts


@pytest.mark.parametrize("data", [b"\0", b"\0\0\0", b"\0\0\0\1", b"\xff\xff\xff\xff" + bytes(9), pack([b"abc"])[:-1]])
def test_what_was_not_joined_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not at most 64 parts"):
        unpack(data, 64)


def test_an_order_names_the_maximum_size_of_its_reply() -> None:
    assert [parse_reply_limit(format_reply_limit(limit)) for limit in (None, 0, 2**40)] == [None, 0, 2**40]
    for group in ("", "3", "reply-bytes:", "reply-bytes:-1", "reply-bytes:1.5", "reply-bytes:" + "9" * 20):
        assert parse_reply_limit(group) is None


def test_parts_are_few() -> None:
    with pytest.raises(ValueError, match="not at most 2 parts"):
        unpack(pack([b""] * 3), 2)


def test_contents_come_along_up_to_a_size() -> None:
    computed: list[int] = []

    def contents() -> object:
        for size in (3, 4, 9, 1):
            computed.append(size)
            yield bytes(size)

    assert select_fitting(contents(), 8) == [bytes(3), bytes(4)]
    assert computed == [3, 4, 9]


def test_a_part_of_a_body_is_declared_in_a_header() -> None:
    part = UploadPart("ab" * 32, 5, 7, 100, 200)
    assert parse_upload({b"fedspan-upload": part.to_header().encode()}) == part
    assert parse_upload({b"other": b"value"}) is None


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"ab" * 32,
        b"ab" * 32 + b"/8/7/0/0",
        b"AB" * 32 + b"/0/7/0/0",
        b"ab" * 32 + b"/-1/7/0/0",
        b"ab" * 32 + b"/0/12345678901/0/0",
        b"ab" * 32 + b"/0/7/0/0\n",
        b"ab" * 32 + b"/0/\xd9\xa7/0/0",
    ],
)
def test_what_declares_no_part_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="not a SHA-256 and four numbers"):
        parse_upload({b"fedspan-upload": value})


@pytest.mark.parametrize(
    ("range", "tag", "offset"),
    [
        (b"bytes=5-", b'"t"', 5),
        (b"bytes=9-", b'"t"', 9),
        (b"bytes=10-", b'"t"', 0),
        (b"bytes=5-6", b'"t"', 0),
        (b"bytes=-5", b'"t"', 0),
        (b"bytes=5-", b'"u"', 0),
        (b"5", b'"t"', 0),
    ],
)
def test_the_rest_of_an_answer_is_sent_to_those_that_have_its_beginning(range: bytes, tag: bytes, offset: int) -> None:
    assert parse_offset({b"range": range, b"if-range": tag}, '"t"', 10) == offset


def test_the_first_part_is_read_without_the_others() -> None:
    assert read_first(pack([b"abc", bytes(1000)])) == b"abc"
    assert read_first(b"") == b""


@pytest.mark.parametrize(
    ("value", "work"),
    [
        (b"training/37", ("training", 37)),
        (b"hidden states/", ("hidden states", None)),
        (b"training/900", ("training", 100)),
        (b"", None),
        (b"training", None),
        (b"training/-1", None),
        (b"<b>training</b>/3", None),
        (b"Training/3", None),
        (b"t" * 32 + b"/3", None),
        (b"training/3\n", None),
        ("träge/3".encode(), None),
    ],
)
def test_a_node_says_what_it_does_in_small_letters(value: bytes, work: tuple[str, int | None] | None) -> None:
    assert parse_work({WORK_HEADER.encode(): value}) == work
    assert parse_work({}) is None
    if work is not None and work[1] != 100:
        assert NodeWork(*work).to_header().encode() == value
