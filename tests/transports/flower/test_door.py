"""The door in front of the SuperLink: what each role may send, how much of it, and how fast."""

import asyncio
import hashlib
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.transports.flower import adapter, connections, door, senders, wire

KEY = b"key of node 7"
ELSEWHERE = ("192.0.2.1", 7)
HERE = ("127.0.0.1", 7)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 7 has a key that was admitted; any other key is valid and was not."""
    monkeypatch.setattr(door, "is_node_key_required", lambda app: app.keyed)
    monkeypatch.setattr(door, "verify_node_headers", lambda headers: headers.get(b"key"))
    monkeypatch.setattr(senders, "find_node_id", lambda app, key: 7 if key == KEY else None)
    monkeypatch.setattr(door, "find_reply_limit", lambda app, node, order: None)


def reply(**changes: Any) -> Any:
    values = {"node": 7, "sender": 7, "is_to_server": True, "reply_to": "m", "objects": 6, "depth": 5}
    values |= {"request": b"head", **changes}
    return adapter.PushedReply(**values)


class Behind:
    """The app behind the door."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.bodies = seconds, list[bytes]()
        self.running = self.most = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        message = await receive() if receive is not None else {}
        self.bodies.append(message.get("body", b""))
        await asyncio.sleep(self.seconds)
        self.running -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Exchange:
    """The door's own requests, whose answers say what was asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.asked, self.woken = seconds, list[Any](), list[str]()
        self.error: BaseException | None = None
        self.left, self.pushed = list[int](), list[bytes]()

    def note_departure(self, node: int) -> None:
        self.left.append(node)

    async def acknowledge_heartbeat(self, body: bytes, node: int | None) -> bytes:
        if self.error is not None:
            raise self.error
        self.asked.append(node)
        return b"answer"

    async def find_task(self, token: str) -> str | None:
        return {"token": "task"}.get(token)

    async def take_order(self, node: int, received: str, gone: Any, slot: Any) -> bytes:
        self.asked.append((node, received))
        gone.close()
        if slot is not None:
            slot.leave()
        await asyncio.sleep(self.seconds)
        if slot is not None:
            await slot.enter()
        return b"order"

    async def stored(self, *arguments: Any) -> bytes:
        if self.error is not None:
            raise self.error
        self.asked.append(arguments)
        return b"stored"

    send_reply = send_orders = take_replies = cancel_orders = stored

    async def note_object(self, body: bytes) -> None:
        self.pushed.append(body)

    def wake_nodes(self) -> None:
        self.woken.append("nodes")

    def wake_runs(self) -> None:
        self.woken.append("runs")


async def request(
    made: Any,
    path: str,
    *,
    body: bytes = b"",
    key: bytes | None = KEY,
    client: tuple[str, int] | None = ELSEWHERE,
    keyed: bool = True,
    declared: int | None = None,
    receive: Callable[[], Awaitable[Any]] | None = None,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    method: str = "POST",
) -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def whole() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    length = str(len(body) if declared is None else declared).encode()
    own = ((b"content-length", length), *headers, *(((b"key", key),) if key is not None else ()))
    app = SimpleNamespace(keyed=keyed)
    scope = {"type": "http", "path": path, "client": client, "method": method, "headers": own, "app": app}
    await made({**scope, "server": ("127.0.0.1", 1)}, receive or whole, send)
    if sent[0]["status"] != 200:
        assert (b"connection", b"close") in sent[0]["headers"]
    return sent[0]["status"]


def status(path: str, **options: Any) -> int:
    return asyncio.run(request(door.Door(Behind(), exchange=Exchange()), path, **options))


def own_status(name: str, *parts: bytes, exchange: Exchange | None = None, **options: Any) -> int:
    """The status of one of the door's own requests of a node."""
    made = door.Door(Behind(), options.pop("limits", None), exchange=exchange or Exchange())
    return asyncio.run(request(made, f"{wire.NODE_PATH}{name}", body=wire.pack(parts), **options))


def test_nodes_reach_the_paths_that_they_need_and_no_others() -> None:
    for name in door.BODY_BYTES:
        if not name.startswith("push"):
            assert status(f"{door.NODE_API}{name}") == 200
            assert status(f"{door.NODE_API}{name}", method="GET") == 403
    for path in ("register-node", "unregister-node", "get-fab", "", "pull-messages/"):
        assert status(f"{door.NODE_API}{path}") == 403


def test_a_node_that_is_stopped_is_noted_and_another_request_is_none() -> None:
    exchange, stopped = Exchange(), ((b"fedspan-stopped", b"1"),)
    for name, headers in (("get-run", stopped), ("deactivate-node", ()), ("deactivate-node", stopped)):
        made = door.Door(Behind(), exchange=exchange)
        assert asyncio.run(request(made, f"{door.NODE_API}{name}", headers=headers)) == 200
        assert exchange.left == ([7] if name == "deactivate-node" and headers else [])


@pytest.mark.parametrize("client", [ELSEWHERE, ("::ffff:192.0.2.1", 7), ("2001:db8::1", 7), ("", 7), None])
def test_other_machines_reach_the_node_api_only(client: tuple[str, int] | None) -> None:
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/health", "/", "/v1/fleets", "/docs"):
        assert status(path, client=client) == 403


@pytest.mark.parametrize("owner", [0, None, 12345])
def test_this_machine_s_other_users_reach_the_node_api_only(owner: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "get_peer_uid", lambda *_: owner)
    for client in (HERE, ("::1", 7), ("::ffff:127.0.0.1", 7)):
        assert status("/v1/control/start-run", client=client) == (200 if owner == 0 else 403)


@pytest.mark.parametrize("name", [b"origin", b"sec-fetch-site"])
def test_no_web_site_commands_through_the_operator_s_browser(name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser is a process of the operator, and sends a web page's requests to this machine, too."""
    monkeypatch.setattr(door, "get_peer_uid", lambda *_: os.getuid())
    for path in ("/v1/control/start-run", f"{wire.RUN_PATH}send-orders", f"{door.NODE_API}register-node"):
        for value in (b"https://example.org", b"null", b"same-origin"):
            assert status(path, client=HERE, keyed=False, headers=((name, value),)) == 403
    assert status("/v1/control/start-run", client=HERE) == 200
    assert status(f"{door.NODE_API}register-node", client=HERE, keyed=False) == 200


def test_a_body_is_read_only_from_a_node_whose_key_was_admitted() -> None:
    async def never() -> Any:
        raise AssertionError("the body was read")

    path = f"{door.NODE_API}push-object"
    for key in (None, b"another key"):
        assert status(path, key=key, declared=1000, receive=never) == 401
    assert status(path, declared=800 * 2**20, receive=never) == 413
    for headers in (((b"transfer-encoding", b"chunked"),), ()):
        length = 5 if headers else -5
        assert status(path, declared=length, receive=never, headers=headers) == 411


def test_a_body_has_its_declared_length_and_arrives_in_time() -> None:
    async def stalled() -> Any:
        await asyncio.sleep(60)

    async def endless() -> Any:
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    async def closed() -> Any:
        return {"type": "http.disconnect"}

    limits = door.DoorLimits(body_seconds=0.1)
    for receive, expected in ((stalled, 408), (endless, 413), (closed, 400)):
        made = door.Door(Behind(), limits)
        assert asyncio.run(request(made, f"{door.NODE_API}pull-messages", declared=10, receive=receive)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 200),
        ({"sender": 1}, 403),
        ({"sender": 8}, 403),
        ({"node": 8, "sender": 8}, 403),
        ({"is_to_server": False}, 403),
        ({"reply_to": ""}, 403),
        ({"objects": 20_000}, 413),
        ({"depth": 9}, 413),
        (None, 400),
    ],
)
def test_a_message_is_the_node_s_own_reply_to_the_server(
    changes: dict[str, Any] | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: None if changes is None else reply(**changes))
    assert status(f"{door.NODE_API}push-messages") == expected
    exchange = Exchange()
    assert own_status(wire.SEND_REPLY, b"head", b"one", b"two", exchange=exchange) == expected
    assert exchange.asked == ([(7, b"head", [b"one", b"two"])] if expected == 200 else [])


def test_a_reply_is_no_larger_than_its_order_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def find_limit(app: Any, node: int, order: str) -> int:
        asked.append((node, order))
        return 1000

    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    monkeypatch.setattr(door, "find_reply_limit", find_limit)
    made = door.Door(Behind(), exchange=Exchange())

    async def run() -> list[int]:
        path = f"{wire.NODE_PATH}send-reply"
        found = [await request(made, path, body=wire.pack([b"", bytes(500), bytes(n)])) for n in (500, 501)]
        found.append(await request(made, f"{door.NODE_API}push-messages"))
        return [*found, *[await request(made, f"{door.NODE_API}push-object", body=bytes(n)) for n in (400, 600, 1)]]

    assert asyncio.run(run()) == [200, 413, 200, 200, 200, 413]
    assert set(asked) == {(7, "m")}
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply(objects=17))  # 16, and one for every 5 MiB
    assert own_status(wire.SEND_REPLY, b"head") == 413


@pytest.mark.parametrize("body", [b"", b"abc", bytes(100), bytes(range(256))])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    assert status(f"{door.NODE_API}push-messages", body=body) == 400


async def test_objects_belong_to_a_reply_and_are_no_larger_than_one_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    limits = door.DoorLimits(reply_bytes=2 * door.OBJECT_BYTES)
    made = door.Door(Behind(), limits)
    pieces = [bytes([number]) * door.OBJECT_BYTES for number in range(4)]
    found = [await request(made, f"{door.NODE_API}push-object", body=b"abc")]
    for _ in range(2):
        found.append(await request(made, f"{door.NODE_API}push-messages"))
        found += [await request(made, f"{door.NODE_API}push-object", body=piece) for piece in pieces]
    assert found == [413, *2 * [200, 200, 200, 200, 413]]


async def test_an_object_that_is_sent_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node repeats a request whose answer was lost; its reply must not become too large by that."""
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply(objects=2))
    monkeypatch.setattr(door, "find_reply_limit", lambda app, node, order: 3000)
    made = door.Door(Behind())
    found = [await request(made, f"{door.NODE_API}push-messages")]
    for body in (bytes(2000), bytes(2000), bytes(900), b"a third object"):
        found.append(await request(made, f"{door.NODE_API}push-object", body=body))
    assert found == [200, 200, 200, 200, 413]


async def test_one_node_s_requests_wait_for_each_other_and_not_for_those_of_others() -> None:
    behind = Behind(0.05)
    made = door.Door(behind, door.DoorLimits(parallel=2, waiting=4))
    path = f"{door.NODE_API}pull-messages"
    answers = await asyncio.gather(*(request(made, path) for _ in range(8)))
    assert sorted(answers) == [*6 * [200], 429, 429]
    assert behind.most == 2


@pytest.mark.parametrize(
    ("path", "parts"), [(f"{door.NODE_API}pull-messages", []), (f"{wire.NODE_PATH}take-order", [b"7", b""])]
)
async def test_a_node_in_a_hurry_is_slowed_down(path: str, parts: list[bytes]) -> None:
    made = door.Door(Behind(), door.DoorLimits(rate=20.0, burst=2.0), exchange=Exchange())
    began = time.monotonic()
    for _ in range(6):
        assert await request(made, path, body=wire.pack(parts)) == 200
    assert time.monotonic() - began >= 0.15


def test_without_keys_messages_are_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(f"{door.NODE_API}register-node", key=None, keyed=False) == 200
    for changes, expected in (({}, 200), ({"sender": 1}, 403)):
        monkeypatch.setattr(door, "read_pushed_reply", lambda *_, changes=changes: reply(**changes))
        assert status(f"{door.NODE_API}push-messages", key=None, keyed=False) == expected


def test_the_app_behind_receives_the_body() -> None:
    behind = Behind()
    assert asyncio.run(request(door.Door(behind), f"{door.NODE_API}pull-messages", body=b"abc")) == 200
    assert behind.bodies == [b"abc"]


def test_the_door_s_own_paths_are_for_admitted_nodes_alone() -> None:
    async def never() -> Any:
        raise AssertionError("the body was read")

    for name in (wire.TAKE_ORDER, wire.SEND_REPLY):
        for key in (None, b"another key"):
            assert own_status(name, key=key, declared=10, receive=never) == 401
        assert own_status(name, declared=32 * 2**20, receive=never) == 413
        assert own_status(name, method="GET") == 403
        assert status(f"{door.NODE_API}{name}") == 403
    for name in ("", "pull-object", "take-order/", "../run/send-orders"):
        assert own_status(name) == 403


def test_a_node_takes_its_own_orders() -> None:
    exchange = Exchange()
    assert own_status(wire.TAKE_ORDER, b"7", b"last", exchange=exchange) == 200
    assert exchange.asked == [(7, "last")]
    assert own_status(wire.TAKE_ORDER, b"8", b"", exchange=exchange) == 403
    assert own_status(wire.TAKE_ORDER, b"8", b"", exchange=exchange, keyed=False) == 200
    for parts in ((), (b"7",), (b"", b""), (b"-7", b""), (b"7" * 21, b""), (b"7", bytes(65)), (b"7", b"", b"")):
        assert own_status(wire.TAKE_ORDER, *parts) == 400
    for node, code in ((2**64 - 1, 200), (2**64, 400), (10**20 - 1, 400)):  # the database has numbers of 64 bits
        assert own_status(wire.TAKE_ORDER, str(node).encode(), b"", exchange=exchange, keyed=False) == code
    assert own_status(wire.TAKE_ORDER, declared=3, receive=lambda: whole(b"abc")) == 400


async def whole(body: bytes) -> Any:
    return {"type": "http.request", "body": body, "more_body": False}


async def test_a_node_that_waits_for_an_order_may_send_other_requests_and_not_too_many() -> None:
    behind, exchange = Behind(), Exchange(0.5)
    made = door.Door(behind, door.DoorLimits(parallel=1, waiting=2, rate=1e6), exchange=exchange)
    body = wire.pack([b"7", b""])
    waits = [asyncio.ensure_future(request(made, f"{wire.NODE_PATH}take-order", body=body)) for _ in range(4)]
    await asyncio.sleep(0.1)
    assert not any(one.done() for one in waits)
    assert await request(made, f"{door.NODE_API}pull-object") == 200
    assert await asyncio.gather(*waits) == 4 * [200]


def test_a_reply_is_no_larger_and_has_no_more_objects_than_one_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    limits = door.DoorLimits(reply_bytes=0)
    assert own_status(wire.SEND_REPLY, b"head", *[b""] * limits.objects, limits=limits) == 200
    assert own_status(wire.SEND_REPLY, b"head", *[b""] * (limits.objects + 1), limits=limits) == 400
    exchange = Exchange()
    made = door.Door(Behind(), door.DoorLimits(reply_bytes=1000 - door.OBJECT_BYTES), exchange=exchange)

    async def run() -> list[int]:
        path = f"{wire.NODE_PATH}send-reply"
        sizes = ((500, 500), (500, 501))
        found = [await request(made, path, body=wire.pack([b"", *map(bytes, pair)])) for pair in sizes]
        return [*found, await request(made, f"{door.NODE_API}push-object", body=bytes(501))]

    assert asyncio.run(run()) == [200, 413, 413]
    assert len(exchange.asked) == 1


def test_the_announcement_of_a_reply_is_small_on_both_paths() -> None:
    """Without the bound, an announcement of 5 MB of empty objects would keep the server busy for half a minute."""
    bound = door.DoorLimits().head_bytes
    assert bound < 2**17
    for excess, expected in ((0, 400), (1, 413)):
        head = bytes(bound + excess)
        assert own_status(wire.SEND_REPLY, head) == expected
        assert status(f"{door.NODE_API}push-messages", body=head) == expected


def test_what_can_t_be_stored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    exchange = Exchange()
    for error, expected in ((ValueError(), 409), (adapter.RunNotRunningException(), 403)):
        exchange.error = error
        assert own_status(wire.SEND_REPLY, b"head", exchange=exchange) == expected


def test_a_heartbeat_is_a_node_s_own() -> None:
    path, exchange = f"{door.NODE_API}send-node-heartbeat", Exchange()
    assert asyncio.run(request(door.Door(Behind(), exchange=exchange), path)) == 200
    assert exchange.asked == [7]
    exchange.error = ValueError()
    assert asyncio.run(request(door.Door(Behind(), exchange=exchange), path)) == 400


async def test_a_node_whose_reply_arrives_does_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    monkeypatch.setattr("fedspan.transports.flower.work._DELAY", 0.0)
    made, path = door.Door(Behind(), exchange=Exchange(), work=tmp_path / "work.json"), tmp_path / "work.json"
    said, found = ((wire.WORK_HEADER.encode(), b"training/97"),), list[str]()
    for name, headers, body in (
        (f"{door.NODE_API}send-node-heartbeat", said, b""),
        (f"{door.NODE_PATH}{wire.SEND_REPLY}", (), wire.pack([b"head"])),
    ):
        assert await request(made, name, headers=headers, body=body) == 200
        await made._work._writing
        found.append(path.read_text())
    first, second = found
    assert '"training", 97' in first
    assert second == "{}"


async def test_a_node_that_sends_heartbeats_all_the_time_is_refused_and_not_offline_afterwards() -> None:
    made = door.Door(Behind(), door.DoorLimits(heartbeat_rate=10.0, heartbeat_burst=3.0), exchange=Exchange())
    path = f"{door.NODE_API}send-node-heartbeat"
    found = [await request(made, path) for _ in range(6)]
    await asyncio.sleep(0.2)
    found += [await request(made, path), await request(made, f"{door.NODE_API}pull-messages")]
    assert found == [200, 200, 200, 429, 429, 429, 200, 200]


async def test_a_node_that_does_not_read_its_orders_is_sent_few_at_once() -> None:
    """A request for an order has its place again when its order is fetched, and until the answer is sent."""
    made = door.Door(Behind(), door.DoorLimits(parallel=2, rate=1e6), exchange=Exchange(0.05))
    sending, most = 0, 0

    async def one() -> None:
        nonlocal sending, most

        async def send(message: Any) -> None:
            nonlocal sending, most
            if message["type"] == "http.response.start":
                sending += 1
                most = max(most, sending)
                await asyncio.sleep(0.1)
                sending -= 1

        body = wire.pack([b"7", b""])
        headers = ((b"content-length", str(len(body)).encode()), (b"key", KEY))
        scope = {"type": "http", "path": f"{wire.NODE_PATH}take-order", "client": ELSEWHERE, "method": "POST"}
        scope |= {"headers": headers, "app": SimpleNamespace(keyed=True), "server": ("127.0.0.1", 1)}
        await made(scope, lambda: whole(body), send)

    await asyncio.gather(*(one() for _ in range(6)))
    assert most == 2


def test_a_run_s_requests_need_its_token_and_the_operator_s_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "get_peer_uid", lambda *_: 0)
    token = ((b"flwr-task-token", b"token"),)

    def run_status(name: str, *parts: bytes, **options: Any) -> int:
        exchange = options.pop("exchange", Exchange())
        made = door.Door(Behind(), exchange=exchange)
        given = {"client": HERE, "headers": token, **options}
        return asyncio.run(request(made, f"{wire.RUN_PATH}{name}", body=wire.pack(parts), **given))

    exchange = Exchange()
    assert run_status("send-orders", b"head", b"one", exchange=exchange) == 200
    assert run_status("take-replies", b"1.5", b"a", b"b", exchange=exchange) == 200
    assert run_status("cancel-orders", b"a", exchange=exchange) == 200
    assert exchange.asked == [("task", b"head", [b"one"]), ("task", ["a", "b"], 1.5), ("task", ["a"])]
    for headers in ((), ((b"flwr-task-token", b""),), ((b"flwr-task-token", b"another"),)):
        assert run_status("send-orders", b"head", headers=headers) == 403
    assert run_status("send-orders", b"head", client=ELSEWHERE) == 403
    assert run_status("other", b"head") == 404
    assert run_status("send-orders") == 404
    assert run_status("take-replies", b"soon") == 409
    monkeypatch.setattr(door, "get_peer_uid", lambda *_: 12345)
    assert run_status("send-orders", b"head") == 403


async def test_flower_s_own_requests_wake_up_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "get_peer_uid", lambda *_: 0)
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    exchange = Exchange()
    made = door.Door(Behind(), exchange=exchange)
    await request(made, f"{door.NODE_API}push-messages")
    await request(made, "/v1/runtime/push-messages", client=HERE)
    await request(made, "/v1/runtime/get-nodes", client=HERE)
    assert exchange.woken == ["runs", "nodes"]


def declare(body: bytes, offset: int = 0, **changes: int) -> tuple[tuple[bytes, bytes], ...]:
    """The header of a request that sends a body from an offset on."""
    part = wire.UploadPart(hashlib.sha256(body).hexdigest(), offset, changes.get("total", len(body)))
    return ((b"fedspan-upload", part.to_header().encode()),)


def make_broken(body: bytes) -> Callable[[], Awaitable[Any]]:
    """A connection that breaks after some bytes."""
    messages = [{"type": "http.request", "body": body, "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    return receive


async def test_what_a_broken_connection_has_brought_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    exchange, path = Exchange(), f"{wire.NODE_PATH}{wire.SEND_REPLY}"
    made, body = door.Door(Behind(), exchange=exchange), wire.pack([b"head", b"content" * 100])
    digest = hashlib.sha256(body).hexdigest().encode()
    broken = {"receive": make_broken(body[:300]), "declared": len(body), "headers": declare(body)}
    first = await request(made, path, **broken)
    offset = await request(made, f"{wire.NODE_PATH}{wire.UPLOAD_OFFSET}", body=digest)
    gap = await request(made, path, body=body[301:], headers=declare(body, 301))
    short = await request(made, path, body=body[:300], headers=declare(body))
    rest = await request(made, path, body=body[300:], headers=declare(body, 300))
    assert [first, offset, gap, short, rest] == [400, 200, 416, 400, 200]


@pytest.mark.parametrize("received", [300, 708])
async def test_what_nobody_reads_any_more_is_dropped_in_time(received: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only the end of a body is missing, or another request has asked for its offset meanwhile."""
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    path, body = f"{wire.NODE_PATH}{wire.SEND_REPLY}", wire.pack([b"head", b"content" * 100])
    made = door.Door(Behind(), door.DoorLimits(partial_seconds=0.05), exchange=Exchange())
    digest = hashlib.sha256(body).hexdigest()
    assert received <= len(body)
    sending, gate = make_broken(body[:received]), asyncio.Event()

    async def receive() -> Any:
        message = await sending()
        if message["type"] == "http.disconnect":
            await gate.wait()
        return message

    options = {"receive": receive, "declared": len(body), "headers": declare(body)}
    first = asyncio.create_task(request(made, path, **options))
    await asyncio.sleep(0)
    while not made._bodies._uploads.find_offset(KEY, digest):
        await asyncio.sleep(0)
    gate.set()
    await first
    found = [made._bodies._uploads.find_offset(KEY, digest)]
    await asyncio.sleep(0.1)
    assert [*found, made._bodies._uploads.find_offset(KEY, digest)] == [received, 0]


def test_the_rest_of_a_reply_completes_it_and_an_altered_rest_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    path, body = f"{wire.NODE_PATH}{wire.SEND_REPLY}", wire.pack([b"head", b"content" * 100])

    async def run(rest: bytes) -> tuple[int, list[Any]]:
        exchange = Exchange()
        made = door.Door(Behind(), exchange=exchange)
        await request(made, path, receive=make_broken(body[:300]), declared=len(body), headers=declare(body))
        return await request(made, path, body=rest, headers=declare(body, 300)), exchange.asked

    assert asyncio.run(run(body[300:])) == (200, [(7, b"head", [b"content" * 100])])
    assert asyncio.run(run(bytes(len(body) - 300))) == (400, [])


def test_a_part_is_checked_before_its_first_byte_is_read() -> None:
    async def never() -> Any:
        raise AssertionError("read")

    path, most = f"{wire.NODE_PATH}{wire.SEND_REPLY}", 1 << 33
    assert status(path, declared=10, headers=declare(b"", total=most), receive=never) == 413
    assert status(path, declared=10, headers=declare(b"", total=11), receive=never) == 400
    assert status(path, declared=10, headers=((b"fedspan-upload", b"x"),), receive=never) == 400
    assert status(path, declared=7, headers=declare(b"", 3, total=10), receive=never) == 416
    assert status(path, declared=10, headers=declare(b"", total=10), receive=never, key=b"another") == 401


@pytest.mark.parametrize("digest", [b"", b"a" * 63, b"a" * 65, b"/" * 64])
def test_an_offset_is_that_of_a_body(digest: bytes) -> None:
    assert status(f"{wire.NODE_PATH}{wire.UPLOAD_OFFSET}", body=digest) == 400


def test_a_node_fetches_files_of_base_models_that_are_offered_and_no_others(tmp_path: Path) -> None:
    content, offer, file = bytes(range(250)) * 4, "a" * 64, "b" * 64
    (tmp_path / "weights").write_bytes(content)
    for run in ("ended", "1"):  # each run that offers the model has a file
        (tmp_path / f"{offer}.{run}.json").write_text(json.dumps({file: str(tmp_path / "weights")}))
    (tmp_path / f"{offer}.ended.json").unlink()
    made = door.Door(Behind(), exchange=Exchange(), offers=tmp_path)

    def fetch(*parts: str, door: Any = made, **options: Any) -> int:
        body = wire.pack([part.encode() for part in parts])
        return asyncio.run(request(door, f"{wire.NODE_PATH}{wire.FETCH_BASE}", body=body, **options))

    assert fetch(offer, file, "0") == 200
    assert fetch(offer, "c" * 64, "0") == 404
    assert fetch(offer, file) == 400
    assert fetch(offer, file, "0", key=b"another") == 401
    assert fetch(offer, file, "0", door=door.Door(Behind(), exchange=Exchange())) == 404


async def test_bytes_of_a_base_model_leave_in_pieces_and_a_node_that_does_not_read_holds_no_slot(
    tmp_path: Path,
) -> None:
    content, offer, file = bytes(range(251)) * 1000, "a" * 64, "b" * 64
    (tmp_path / "weights").write_bytes(content)
    (tmp_path / f"{offer}.1.json").write_text(json.dumps({file: str(tmp_path / "weights")}))
    made = door.Door(Behind(), door.DoorLimits(body_seconds=0.2, parallel=2), exchange=Exchange(), offers=tmp_path)
    body = wire.pack([offer.encode(), file.encode(), b"0"])

    async def run(pieces: int) -> list[Any]:
        """The messages of an answer of which a node reads some pieces."""
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > pieces:
                await asyncio.Event().wait()

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        headers = [(b"content-length", b"%d" % len(body)), (b"key", KEY)]
        path = f"{wire.NODE_PATH}{wire.FETCH_BASE}"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ELSEWHERE}
        await asyncio.wait_for(made({**scope, "app": SimpleNamespace(keyed=True)}, receive, send), 10)
        return sent

    whole = await run(99)
    assert b"".join(message.get("body", b"") for message in whole) == content
    assert [message["more_body"] for message in whole[1:]] == [True, True, True, False]
    for _ in range(3):  # more than the node has slots
        assert len(await run(2)) == 3


@pytest.mark.parametrize("name", [f"{wire.NODE_PATH}take-order", f"{door.NODE_API}pull-object"])
async def test_a_large_answer_that_nobody_reads_is_neither_buffered_nor_kept(name: str) -> None:
    """On real connections: more than the node has slots, each with a large answer, none of which it reads."""
    uvicorn = pytest.importorskip("uvicorn")
    content, bounds = bytes(8 * 2**20), connections.Connections()
    limits = door.DoorLimits(body_seconds=0.5, parallel=2, rate=1e6)
    body = wire.pack([b"7", b""])

    class Full(Exchange):
        async def take_order(self, *arguments: Any) -> bytes:
            await super().take_order(*arguments)
            return content

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content})

    made = door.Door(behind, limits, bounds, exchange=Full())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await made({**scope, "app": SimpleNamespace(keyed=True)}, receive, send)

    async def open_request(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
        made.connect((host, port))
        reader, writer = await asyncio.open_connection(sock=made, limit=2**14)  # reads no more on its own
        head = f"POST {name} HTTP/1.1\r\nHost: a\r\nkey: {KEY.decode()}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    protocol = type("Protocol", (connections.BoundedProtocol,), {"bounds": bounds})
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        address = listening.getsockname()
        silent = [await open_request(*address) for _ in range(5)]
        await asyncio.sleep(0.3)
        open_ones = list(bounds._open.values())
        assert len(open_ones) == 5
        waiting = [one.transport.get_write_buffer_size() for one in open_ones]
        assert 0 < max(waiting) <= 2 * 2**16 + 2**10
        assert sum(size > 0 for size in waiting) == limits.parallel
        reader, own = await open_request(*address)
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert answer.startswith(b"HTTP/1.1 200")
        assert await asyncio.wait_for(reader.readexactly(len(content)), 20) == content
        await asyncio.sleep(1)  # the last of the others had its slot beside this one
        assert not any(one in bounds._open.values() for one in open_ones)
        for _, writer in (*silent, (reader, own)):
            writer.close()
        server.should_exit = True
        await serving


@pytest.mark.parametrize("path", ["own", "flower"])
async def test_a_lost_answer_is_repeated_and_its_body_not_processed_again(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "read_pushed_reply", lambda *_: reply())
    behind, exchange, answers = Behind(), Exchange(), list[Any]()
    made, body = door.Door(behind, exchange=exchange), wire.pack([b"head", b"content"])
    digest = hashlib.sha256(body).hexdigest().encode()
    name = f"{wire.NODE_PATH}{wire.SEND_REPLY}" if path == "own" else f"{door.NODE_API}push-object"
    answer = door.send_answer

    async def answer_and_note(content: bytes, *arguments: Any) -> None:
        answers.append(content)
        await answer(content, *arguments)

    monkeypatch.setattr(door, "send_answer", answer_and_note)
    await request(made, f"{door.NODE_API}push-messages", body=b"head")  # makes room for the object
    behind.bodies.clear()
    await request(made, name, body=body, headers=declare(body))
    await request(made, f"{wire.NODE_PATH}{wire.UPLOAD_OFFSET}", body=digest)
    assert answers[-1] == (b"taken:stored" if path == "own" else b"taken:")
    assert len(exchange.asked) + len(behind.bodies) == 1
