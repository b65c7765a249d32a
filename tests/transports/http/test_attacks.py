"""Attacks on a server at work, replayed: with an admitted key, without any, and from another user of its machine.

Each attack happens while an honest node participates in exchanges, which must end as they would without it.
"""

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import httpx
import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.transports.http.admissions import admit_node, open_audit_log, read_admissions, revoke_node
from fedspan.transports.http.connections import ConnectionLimits
from fedspan.transports.http.keys import load_node_key, make_node_key
from fedspan.transports.http.server import ServerLink, attach, list_nodes
from fedspan.transports.http.signing import MARGIN, ServerSigner, UnsignedSigner
from fedspan.transports.http.transport import ServerTransport
from fedspan.transports.http.wire import CHUNK, NodeWork
from helpers import http_server
from helpers.another_user import as_another_user
from helpers.hostile_node import HostileNode, connect, make_strange_keys, send_unauthenticated
from helpers.http_server import kill_serving, run_server
from helpers.reply_transport import exchanged

pytestmark = pytest.mark.slow

ECHO = """
import sys, threading
from pathlib import Path
from fedspan.transports.http.client import Link
from fedspan.transports.http.keys import load_node_key
from fedspan.transports.http.node import serve
key = load_node_key(Path(sys.argv[3]))
serve(Link(sys.argv[1], Path(sys.argv[2]), key, 2**24), lambda envelope: envelope, threading.Event())
"""


class Scene(NamedTuple):
    """A server at work, an honest node and a hostile one."""

    link: ServerLink
    authority: Path
    log: Path
    transport: Any
    hostile: HostileNode
    honest: int

    @property
    def address(self) -> str:
        return self.link.address

    def require_work(self) -> None:
        """Require that the honest node participates in an exchange, also with an empty body and a large one."""
        for body in (b"", b"abc", bytes(5 * 2**20)):
            order = Envelope('{"honest": true}', body)
            assert exchanged(self.transport, {"honest": order}, 60.0) == {"honest": order}, self.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("attacked")
    with run_server(folder / "server", insecure=False) as link:
        assert link.authority is not None
        for name in ("honest", "hostile"):
            admit_node(link, make_node_key(folder / f"{name}.key"), name)
        nodes = {one.name: id for id, one in read_admissions(link).items()}
        arguments = [link.address, str(link.authority), str(folder / "honest.key")]
        node = subprocess.Popen([sys.executable, "-c", ECHO, *arguments])
        try:
            hostile = HostileNode(link.address, link.authority, load_node_key(folder / "hostile.key"))
            hostile.join()
            assert hostile.node == nodes["hostile"]
            signer = ServerSigner(
                link.folder, lambda: {id: one.key.encode() for id, one in read_admissions(link).items()}
            )
            with attach(link, 2**24) as run:
                transport = ServerTransport(run, nodes, signer=signer)
                until = time.monotonic() + 120
                while nodes["honest"] not in run.list_online():
                    assert time.monotonic() < until
                    time.sleep(0.2)
                yield Scene(link, link.authority, link.folder / "server.log", transport, hostile, nodes["honest"])
            hostile.close()
        finally:
            node.kill()
            node.wait()


def send_order(scene: Scene, node: int, body: bytes = b"order", reply_bytes: int = 1000) -> str:
    """Send a node an order past the transport, and return its id."""
    with suppress(httpx.HTTPError):
        scene.hostile.connection.note_work(None)  # so that it counts as online
    return http_server.send_order(scene.transport.link, node, Envelope("{}", body), reply_bytes, scene.transport.signer)


@pytest.fixture
def order(scene: Scene) -> Iterator[str]:
    """The id of an order to the hostile node, which it has received."""
    id = send_order(scene, scene.hostile.node)
    taken = scene.hostile.connection.take_order()
    assert taken is not None
    assert taken[0] == id
    yield id
    scene.transport.link.cancel([id])


def take(scene: Scene, id: str, seconds: float = 30.0) -> Any:
    until = time.monotonic() + seconds
    while not (taken := list(scene.transport.link.take_replies([id]))):
        assert time.monotonic() < until
    return taken[0]


def test_what_a_node_says_that_it_does_is_kept_as_words_for_the_page(scene: Scene) -> None:
    link = scene.link
    for said, known in ((b"training/37", NodeWork("training", 37)), (b"<script>/1", None), (b"\xff" * 99, None)):
        assert scene.hostile.send("POST", "heartbeat", said).status_code == 200
        (node,) = [one for one in list_nodes(link, {}, {}) if one.id == str(scene.hostile.node)]
        assert node.work == known
    scene.require_work()


def test_nobody_reaches_the_order_of_another(scene: Scene) -> None:
    """Neither to read it, nor to reply to it, nor to say that it failed; a stranger's session is none."""
    id = send_order(scene, scene.honest, bytes(3 * 2**20), 2**24)
    assert scene.hostile.send("GET", f"order/{id}").status_code == 404
    assert scene.hostile.send("GET", f"order/{id}/reply?upload={'0' * 32}").status_code == 404
    assert scene.hostile.put(id, b"forged") == 404
    assert scene.hostile.send("POST", f"order/{id}/failure", b"it is mine").status_code == 404
    for session in ("", "Bearer", f"Bearer {'0' * 64}", "Basic YTpi"):
        assert scene.hostile.send("GET", f"order/{id}", authorization=session).status_code == 401
    taken = take(scene, id)
    assert taken.read()
    assert not taken.failure
    scene.require_work()


def test_a_reply_is_no_larger_than_its_order_allows(scene: Scene, order: str) -> None:
    most = 1000 + MARGIN
    assert scene.hostile.put(order, b"a", total=most + 1) == 413
    assert scene.hostile.put(order, bytes(CHUNK), total=most) == 200
    assert scene.hostile.put(order, bytes(2000), start=CHUNK, total=most) == 409
    scene.require_work()


@pytest.mark.parametrize(
    ("start", "total", "upload"),
    [(10, 99, "0" * 32), (99, 100, "0" * 32), (101, 100, "0" * 32), (100, 99, "0" * 32), (100, 200, "1" * 32)],
)
def test_a_part_that_overlaps_or_leaves_a_gap_or_has_another_total_is_refused(
    scene: Scene, order: str, start: int, total: int, upload: str
) -> None:
    assert scene.hostile.put(order, bytes(100), total=200) == 200
    assert scene.hostile.put(order, bytes(50), start, total, upload) == 409
    assert scene.hostile.send("GET", f"order/{order}/reply?upload={'0' * 32}").json() == {"bytes": 100}
    scene.require_work()


@pytest.mark.parametrize(
    "query",
    [
        "",
        "upload=../../secret&start=0&total=1",
        "upload=0&start=0&total=1",
        f"upload={'0' * 32}&start=-1&total=1",
        f"upload={'0' * 32}&start=0&total=0",
    ],
)
def test_a_part_without_its_place_is_refused(scene: Scene, order: str, query: str) -> None:
    assert scene.hostile.send("PUT", f"order/{order}/reply?{query}", b"a").status_code == 400


def test_a_reply_that_is_not_sealed_to_the_server_is_no_reply(scene: Scene) -> None:
    back = dict[str, Any]()

    def reply() -> None:
        taken = scene.hostile.connection.take_order()
        while taken is None:
            taken = scene.hostile.connection.take_order()
        assert scene.hostile.put(taken[0], b"\x01\x00\x00\x00\x05hello and more") == 200

    acting = Thread(target=reply)
    scene.hostile.connection.note_work(None)
    acting.start()
    envelopes = {id: Envelope("{}", id.encode()) for id in ("hostile", "honest")}
    scene.transport.exchange(
        Orders("train", envelopes, envelopes.__getitem__), lambda id, reply: bool(back.update({id: reply})), 30.0
    )
    acting.join()
    assert back["honest"] == envelopes["honest"]
    assert "not sealed to this receiver" in back["hostile"]


def test_a_replayed_reply_counts_once(scene: Scene) -> None:
    id = send_order(scene, scene.hostile.node)
    assert scene.hostile.put(id, b"reply") == 200
    assert scene.hostile.put(id, b"other") == 200
    assert take(scene, id).read() == b"reply"
    scene.transport.link.cancel([id])
    assert scene.hostile.put(id, b"reply") == 404
    assert not list(scene.transport.link.take_replies([id], 0))
    scene.require_work()


def test_an_order_that_nobody_waits_for_is_deleted_and_its_late_reply_is_not_stored(scene: Scene) -> None:
    id = send_order(scene, scene.hostile.node)
    assert scene.hostile.put(id, bytes(100), total=200) == 200
    scene.transport.link.cancel([id])
    assert scene.hostile.put(id, bytes(100), start=100, total=200) == 404
    assert not list((scene.log.parent / "messages").glob(f"{id}*"))
    scene.require_work()


def test_a_withheld_reply_delays_nobody_else(scene: Scene) -> None:
    back, arrived, began = dict[str, Any](), dict[str, float](), time.monotonic()
    scene.hostile.connection.note_work(None)

    def received(id: str, envelope: Any) -> bool:
        back[id], arrived[id] = envelope, time.monotonic() - began
        return False

    envelopes = {id: Envelope("{}", id.encode()) for id in ("hostile", "honest")}
    scene.transport.exchange(Orders("train", envelopes, envelopes.__getitem__), received, 10.0)
    assert back == {"honest": envelopes["honest"], "hostile": "no reply within 10 s"}
    assert arrived["honest"] < 9


def test_a_body_without_a_session_is_not_read(scene: Scene) -> None:
    for path in ("/v1/order/0/reply", "/v1/join", "/v1/heartbeat"):
        for declared in (800 * 2**20, 2**20, 5):
            answer, sent = send_unauthenticated(scene.address, scene.authority, path, declared, 32 * 2**20)
            assert any(f" {status} " in answer for status in (401, 405, 413)) or not answer
            assert sent < 16 * 2**20
    scene.require_work()


def test_strangers_write_little_into_the_log_whatever_they_send(scene: Scene) -> None:
    """Keys of every kind, and long paths: each is refused without a word."""
    before = scene.log.stat().st_size
    authority = ssl.create_default_context(cafile=str(scene.authority))
    with httpx.Client(base_url=f"https://{scene.address}", verify=authority) as stranger:
        for key in make_strange_keys():
            for headers in ({}, {"fedspan-challenge": "1:2", "fedspan-signature": "AAAA", "fedspan-sealing": "AAAA"}):
                answer = stranger.post("/v1/join", headers={"fedspan-protocols": "1", "fedspan-key": key, **headers})
                assert answer.status_code == 403, key
        for _ in range(20):
            assert stranger.post("/v1/" + "a" * 14_000).status_code in (400, 404)
        assert stranger.post("/v1/join", headers={"fedspan-protocols": "0,7"}).status_code == 426
    time.sleep(1)
    with scene.log.open("rb") as log:
        log.seek(before)
        written = log.read()
    assert b"Traceback" not in written
    assert len(written) < 4000
    scene.require_work()


def test_a_challenge_is_answered_with_its_key_only(scene: Scene) -> None:
    """Not with another node's signature, nor for another key, nor with a sealing key that its key has not signed."""
    authority = ssl.create_default_context(cafile=str(scene.authority))
    keys = {one.name: " ".join(one.key.split()[:2]) for one in read_admissions(scene.link).values()}
    with httpx.Client(base_url=f"https://{scene.address}/v1/", verify=authority) as stranger:
        headers = {"fedspan-protocols": "1", "fedspan-key": keys["honest"]}
        challenge = stranger.post("join", headers=headers).json()["challenge"]
        for text in (challenge, "1:2", ":", "x", challenge.replace(":", ":0")):
            answer = stranger.post(
                "join",
                headers={**headers, "fedspan-challenge": text, "fedspan-signature": "AAAA", "fedspan-sealing": "AAAA"},
            )
            assert answer.status_code in (401, 403), text
    scene.require_work()


def test_a_signed_challenge_opens_one_session(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it, such as a proxy that terminates TLS, does not end the node's session with it."""
    sent = list[dict[str, str]]()
    client = scene.hostile.client
    stream = client.stream

    def record(method: str, path: str, **options: Any) -> Any:
        sent.append(options["headers"])
        return stream(method, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(client, "stream", record)
        scene.hostile.join()
    assert "fedspan-signature" in sent[-1]
    assert client.post("join", headers=sent[-1]).status_code == 401
    scene.require_work()


def test_half_sent_requests_are_few_and_closed_soon(scene: Scene) -> None:
    limits, began = ConnectionLimits(), time.monotonic()
    lines: list[Any] = []
    for _ in range(limits.per_address + 40):
        with suppress(OSError):
            line = connect(scene.address, scene.authority)
            line.sendall(b"POST /v1/order HTTP/1.1\r\nHost: a\r\nContent-Le")
            lines.append(line)
    closed = 0
    for line in lines:
        line.settimeout(max(0.1, began + limits.seconds + 30 - time.monotonic()))
        try:
            closed += line.recv(1) == b""
        except TimeoutError:
            pass
        except OSError:
            closed += 1
        line.close()
    assert closed == len(lines)
    scene.require_work()


def test_connections_that_never_speak_tls_are_few_and_closed_soon(scene: Scene) -> None:
    limits, (host, _, port) = ConnectionLimits(), scene.address.rpartition(":")
    lines = [socket.create_connection((host, int(port)), 30) for _ in range(limits.per_address + 40)]
    began = time.monotonic()
    for line in lines:
        line.settimeout(max(0.1, began + limits.seconds + 20 - time.monotonic()))
        with suppress(ConnectionError):
            assert line.recv(1) == b""
        line.close()
    scene.require_work()


def test_refused_upgrades_take_no_place_for_good(scene: Scene) -> None:
    request = b"GET /v1/order HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    request += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    for _ in range(ConnectionLimits().per_address + 8):
        with connect(scene.address, scene.authority) as line:
            line.sendall(request)
            line.settimeout(30)
            assert b" 40" in line.recv(100)[:20]
    scene.require_work()


def test_another_user_of_the_machine_commands_nothing(scene: Scene) -> None:
    code = """
import ssl, sys, http.client
context = ssl._create_unverified_context()
host, port = sys.argv[1].split(":")
for header in ({}, {"authorization": "Bearer "}, {"x-forwarded-for": "127.0.0.1:" + sys.argv[2]}):
    for path in ("/v1/nodes", "/v1/runs", "/v1/runs/0/orders", "/v1/runs/0/replies"):
        line = http.client.HTTPSConnection(host, int(port), context=context, timeout=30)
        line.request("POST", path, body=b"", headers=header)
        print(line.getresponse().status)
"""
    with connect(scene.address, scene.authority) as operator:
        own = str(operator.getsockname()[1])
        command = [*as_another_user(), "-c", code, scene.address, own]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["403"] * 12, done.stderr


def test_the_requests_of_the_operator_are_not_for_nodes_nor_for_browsers(scene: Scene) -> None:
    for path in ("nodes", "runs", "runs/0/orders"):
        assert scene.hostile.send("POST", path, b"[]").status_code == 403
    secret = scene.link.secret.read_text()
    for header in ("origin", "sec-fetch-site"):
        answer = scene.hostile.send("POST", "nodes", authorization=f"Bearer {secret}", **{header: "https://a.example"})
        assert answer.status_code == 403


def test_a_message_that_the_server_did_not_sign_is_not_carried_out(scene: Scene) -> None:
    unsigned = ServerTransport(scene.transport.link, scene.transport.nodes, signer=UnsignedSigner())
    back = exchanged(unsigned, {"honest": Envelope('{"serial": 9007199254740991}')}, 60.0)
    assert "ValueError" in str(back["honest"])
    scene.require_work()


def test_a_revoked_node_is_out_while_the_server_runs(scene: Scene, tmp_path: Path) -> None:
    """No restart: its requests are refused within seconds, stay refused, and the others go on."""
    link = scene.link
    public = make_node_key(tmp_path / "stolen.key")
    admit_node(link, public, "stolen")
    stolen = HostileNode(scene.address, scene.authority, load_node_key(tmp_path / "stolen.key"))
    try:
        stolen.join()
        assert stolen.send("POST", "heartbeat").status_code == 200
        assert revoke_node(link, "stolen") == [stolen.node]
        until = time.monotonic() + 5
        while stolen.send("POST", "heartbeat").status_code not in (401, 403):
            assert time.monotonic() < until
            time.sleep(0.2)
        with pytest.raises(Exception, match="403"):
            stolen.join()
        with pytest.raises(FedspanError, match="this key was revoked, and stays so"):
            admit_node(link, public, "stolen")
    finally:
        stolen.close()
    (link.folder / "nodes.json").unlink()
    assert {one.name for one in read_admissions(link).values()} == {"honest", "hostile"}
    assert [row["event"] for row in open_audit_log(link).read()][-2:] == ["admitted", "revoked"]
    scene.require_work()


def test_requests_that_wait_for_orders_stop_nobody(scene: Scene) -> None:
    """Many at once from one node, most of which are cut off: the others' orders come."""

    def wait() -> None:
        with suppress(httpx.HTTPError):
            scene.hostile.send("POST", "order", seconds=3.0)

    waiting = [Thread(target=wait) for _ in range(40)]
    for thread in waiting:
        thread.start()
    scene.require_work()
    for thread in waiting:
        thread.join()
    began = time.monotonic()
    scene.require_work()
    assert time.monotonic() - began < 30


def test_a_server_that_is_killed_continues_with_its_orders(scene: Scene) -> None:
    """The last test: a reply that has arrived in part, and an order without one, are there after the restart."""
    id = send_order(scene, scene.hostile.node)
    assert scene.hostile.put(id, bytes(100), total=200) == 200
    kill_serving(scene.link)
    scene.hostile.close()
    order, until = {"honest": Envelope("{}", b"again")}, time.monotonic() + 120
    while exchanged(scene.transport, order, 30.0) != order:
        assert time.monotonic() < until, scene.log.read_text()[-3000:]
        time.sleep(1)
    back = HostileNode(scene.address, scene.authority, scene.hostile.signer.key)
    back.join()
    assert back.put(id, bytes(100), start=100, total=200) == 200
    assert take(scene, id).read() == bytes(200)
    back.close()
    scene.require_work()
