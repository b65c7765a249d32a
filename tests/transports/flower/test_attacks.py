"""Attacks on a server at work, replayed: with an admitted key, without any, and from another user of its machine.

Each attack happens while an honest node participates in exchanges, which must end as they would without it.
"""

import base64
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import httpx
import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from helpers.another_user import as_another_user
from helpers.hostile_node import HostileNode, connect, id_of, make_strange_keys, name_of, send_unauthenticated, tree_of
from helpers.reply_transport import exchanged

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from flwr.app import ConfigRecord

from fedspan.federation.transport import Orders
from fedspan.transports.flower.admissions import admit_node, open_audit_log, read_admissions, revoke_node
from fedspan.transports.flower.connections import ConnectionLimits
from fedspan.transports.flower.grid import attach
from fedspan.transports.flower.keys import load_node_key, make_node_key
from fedspan.transports.flower.messages import draw_salt, to_records
from fedspan.transports.flower.server import WORK, prepare_folder, read_link
from fedspan.transports.flower.signing import ServerSigner, UnsignedSigner
from fedspan.transports.flower.superlink import supervise
from fedspan.transports.flower.transport import GridTransport, Message
from fedspan.transports.flower.wire import WORK_HEADER, NodeWork
from fedspan.transports.flower.work import read_works

pytestmark = pytest.mark.slow

ECHO = """
import sys, threading
from pathlib import Path
from fedspan.transports.flower.keys import load_node_key
from fedspan.transports.flower.supernode import Link, serve
keys = load_node_key(Path(sys.argv[3]))
serve(Link(sys.argv[1], Path(sys.argv[2]), keys, 2**24), lambda envelope: envelope, threading.Event())
"""


class Scene(NamedTuple):
    """A server at work, an honest node and a hostile one."""

    address: str
    authority: Path
    log: Path
    transport: Any
    hostile: HostileNode
    honest: int
    server: Thread

    def require_work(self) -> None:
        """Require that the honest node participates in an exchange, also with an empty body and a large one."""
        for body in (b"", b"abc", bytes(5 * 2**20)):
            order = Envelope('{"honest": true}', body)
            assert exchanged(self.transport, {"honest": order}, 60.0) == {"honest": order}, self.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("attacked")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    link = prepare_folder(folder / "server", port, [], insecure=False)
    assert link.authority is not None
    stop, ready = Event(), Event()
    server = Thread(target=supervise, args=(folder / "server", link, "127.0.0.1", stop, ready.set))
    server.start()
    node = None
    try:
        assert ready.wait(120), (folder / "server" / "superlink.log").read_text()
        for name in ("honest", "hostile"):
            admit_node(link, make_node_key(folder / f"{name}.key"), name)
        nodes = {one.name: id for id, one in read_admissions(link).items()}
        arguments = [link.address, str(link.authority), str(folder / "honest.key")]
        node = subprocess.Popen([sys.executable, "-c", ECHO, *arguments])
        hostile = HostileNode(link.address, link.authority, load_node_key(folder / "hostile.key")[0])
        hostile.activate()
        assert hostile.node == nodes["hostile"]
        signer = ServerSigner(link.folder, lambda: {id: one.key.encode() for id, one in read_admissions(link).items()})
        with attach(link, 2**24) as grid:
            transport = GridTransport(grid, nodes, signer=signer)
            until = time.monotonic() + 120
            while nodes["honest"] not in set(grid.get_node_ids()):
                assert time.monotonic() < until
                time.sleep(0.2)
            log = folder / "server" / "superlink.log"
            yield Scene(link.address, link.authority, log, transport, hostile, nodes["honest"], server)
        hostile.close()
    finally:
        stop.set()
        if node is not None:
            node.kill()
            node.wait()
        server.join()


def received_order(scene: Scene) -> Any:
    """Send the hostile node an order, which it receives: the message without its content, and its objects' tree."""
    sealed = scene.transport.signer.seal(Envelope("{}", b"order"), scene.hostile.node)
    sent = Message(to_records(sealed, draw_salt()), dst_node_id=scene.hostile.node, message_type="train", ttl=600)
    (id,) = scene.transport.grid.push_messages([sent])
    until = time.monotonic() + 60
    while (pulled := scene.hostile.pull()) is None or pulled[0].metadata.message_id != id:
        assert time.monotonic() < until
        time.sleep(0.1)
    return pulled


@pytest.fixture
def order(scene: Scene) -> Iterator[Any]:
    """An order that the hostile node received, with the tree of its objects; no reply of its counts afterwards."""
    pulled = received_order(scene)
    yield pulled
    replies = scene.transport.grid.pull_messages([pulled[0].metadata.message_id])
    assert all(reply.has_error() for reply in replies)  # the order was cancelled if an exchange left it out


def ids_in(tree: Any) -> list[str]:
    return [tree.object_id, *(id for child in tree.children for id in ids_in(child))]


def test_what_a_node_says_that_it_does_is_kept_as_words_for_the_page(scene: Scene) -> None:
    path, until = scene.log.with_name(WORK), time.monotonic() + 60
    make_heartbeat = name_of("flwr.proto.heartbeat_pb2", "SendNodeHeartbeatRequest")
    heartbeat = make_heartbeat(node=scene.hostile.own(), heartbeat_interval=600.0)
    for said, known in (("training/37", NodeWork("training", 37)), ("<script>/1", None)):
        status, _ = scene.hostile.post("send-node-heartbeat", heartbeat, {WORK_HEADER: said})
        assert status == 200
        while read_works(path).get(str(scene.hostile.node)) != known:
            assert time.monotonic() < until
            time.sleep(0.1)
    scene.require_work()


def test_no_claim_about_an_object_that_others_send_stops_them(scene: Scene, order: Any) -> None:
    """Objects are named by their content; one whose name can be guessed could be announced with children."""
    claim_children(scene, *order)
    scene.require_work()


def claim_children(scene: Scene, message: Any, tree: Any) -> None:
    """Announce the constant object of an empty body, and every object of an order, with a child."""
    empty = ConfigRecord({"body": b""}).object_id
    child = tree_of(id_of(b"child"))
    for number, id in enumerate((empty, *ids_in(tree)[1:])):
        scene.hostile.reply(message, tree_of(id_of(b"%d" % number), [tree_of(id, [child])]))


def test_nobody_sends_in_the_name_of_another(scene: Scene, order: Any) -> None:
    message, _ = order
    own, honest = scene.hostile.node, scene.honest
    for changes in (
        dict(src_node_id=1, dst_node_id=honest),
        dict(src_node_id=1, dst_node_id=honest, reply_to_message_id=""),
        dict(src_node_id=honest),
        dict(dst_node_id=honest),
        dict(src_node_id=own, dst_node_id=honest, reply_to_message_id=""),
        dict(reply_to_message_id=""),
    ):
        status, content = scene.hostile.reply(message, tree_of(id_of(b"forged")), **changes)
        assert (status, changes) == (403, changes), content
    scene.require_work()


@pytest.mark.parametrize("path", ["push-messages", "send-reply"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_reply_has_few_objects(scene: Scene, order: Any, path: str, nested: bool) -> None:
    """20,000 objects in one reply, each announced, none sent."""
    message, _ = order
    objects = [tree_of(id_of(b"%d" % number)) for number in range(20_000)]
    tree = tree_of(id_of(b"root"), [tree_of(id_of(b"a"), objects)] if nested else objects)
    head = scene.hostile.announcement(message, tree)
    if path == "push-messages":
        status, _ = scene.hostile.post(path, head)
    else:
        status, _ = scene.hostile.post_own(path, head.SerializeToString())
    assert status == 413
    scene.require_work()
    assert "database is locked" not in scene.log.read_text()


def test_a_withheld_object_delays_nobody_else(scene: Scene) -> None:
    """A reply that is announced and never sent: the others' replies are there at once, and the round ends in time."""
    back: dict[str, Any] = {}
    arrived: dict[str, float] = {}
    began = time.monotonic()

    def reply() -> None:
        until = time.monotonic() + 60
        while (pulled := scene.hostile.pull()) is None and time.monotonic() < until:
            time.sleep(0.1)
        status, content = scene.hostile.reply(pulled[0], tree_of(id_of(os.urandom(8)), [tree_of(id_of(b"late"))]))
        assert status == 200, content

    acting = Thread(target=reply)
    acting.start()

    def received(id: str, envelope: Any) -> bool:
        back[id], arrived[id] = envelope, time.monotonic() - began
        return False

    envelopes = {id: Envelope("{}", id.encode()) for id in ("hostile", "honest")}
    scene.transport.exchange(Orders("train", envelopes, envelopes.__getitem__), received, 15.0)
    acting.join()
    assert back["honest"] == envelopes["honest"]
    assert back["hostile"] == "no reply within 15 s"
    assert arrived["honest"] < 14
    assert time.monotonic() - began < 40


def test_a_body_without_credentials_is_not_read(scene: Scene) -> None:
    for declared in (800 * 2**20, 2**20, 5):
        answer, sent = send_unauthenticated(scene.address, scene.authority, declared, 32 * 2**20)
        assert " 401 " in answer or " 413 " in answer or not answer
        assert sent < 16 * 2**20
    scene.require_work()


def test_strangers_write_little_into_the_log_whatever_they_send(scene: Scene) -> None:
    """Keys of every kind, and long paths: each is refused with one short line."""
    before = scene.log.stat().st_size
    authority = ssl.create_default_context(cafile=str(scene.authority))
    with httpx.Client(base_url=f"https://{scene.address}", verify=authority) as stranger:
        keys = make_strange_keys()
        for key in keys:
            headers = {**scene.hostile.headers(), "flwr-public-key": base64.b64encode(key).decode()}
            assert stranger.post("/v1/fleet/pull-messages", headers=headers).status_code == 401, key
        for _ in range(20):
            assert stranger.post("/v1/fleet/" + "a" * 15_000).status_code == 403
    time.sleep(1)
    with scene.log.open("rb") as log:
        log.seek(before)
        written = log.read()
    assert b"Traceback" not in written
    assert len(written) < 400 * (len(keys) + 20)
    scene.require_work()


def test_objects_without_a_reply_are_not_stored(scene: Scene) -> None:
    request = name_of("flwr.proto.message_pb2", "PushObjectRequest")
    for size in (10, 5 * 2**20, 5 * 2**20 + 2**18, 40 * 2**20):
        body = request(node=scene.hostile.own(), run_id=1, object_id="0" * 64, object_content=bytes(size))
        try:
            status, _ = scene.hostile.post("push-object", body)
        except httpx.HTTPError:  # the server closed the connection before the whole body was sent
            status = 413
        assert status == 413 or (status != 200 and size <= 5 * 2**20)
    scene.require_work()


def test_half_sent_requests_are_few_and_closed_soon(scene: Scene) -> None:
    limits, began = ConnectionLimits(), time.monotonic()
    lines: list[Any] = []
    refused = 0
    for _ in range(limits.per_address + 40):
        try:
            line = connect(scene.address, scene.authority)
            line.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: a\r\nContent-Le")
            lines.append(line)
        except OSError:
            refused += 1
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
    request = b"GET /v1/fleet/pull-messages HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    request += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    for _ in range(ConnectionLimits().per_address + 8):
        with connect(scene.address, scene.authority) as line:
            line.sendall(request)
            line.settimeout(30)
            assert b" 40" in line.recv(100)[:20]
    scene.require_work()


def test_another_user_of_the_machine_commands_nothing(scene: Scene) -> None:
    """Neither under its own address nor under that of a connection of the operator, in a header for proxies."""
    code = """
import ssl, sys, http.client
context = ssl._create_unverified_context()
host, port = sys.argv[1].split(":")
for header in ({}, {"x-forwarded-for": "127.0.0.1:" + sys.argv[2]}):
    for path in ("/v1/control/list-nodes", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/health"):
        line = http.client.HTTPSConnection(host, int(port), context=context, timeout=30)
        line.request("POST", path, body=b"", headers={"content-type": "application/protobuf", **header})
        print(line.getresponse().status)
"""
    with connect(scene.address, scene.authority) as operator:
        own = str(operator.getsockname()[1])
        command = [*as_another_user(), "-c", code, scene.address, own]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["403"] * 10, done.stderr


def test_a_message_that_the_server_did_not_sign_is_not_carried_out(scene: Scene) -> None:
    """Even one that was stored on the SuperLink past the door."""
    unsigned = GridTransport(scene.transport.grid, scene.transport.nodes, signer=UnsignedSigner())
    back = exchanged(unsigned, {"honest": Envelope('{"serial": 9007199254740991}')}, 60.0)
    assert "ValueError" in str(back["honest"])
    scene.require_work()


def test_a_revoked_node_is_out_while_the_server_runs(scene: Scene, tmp_path: Path) -> None:
    """No restart: its key is refused at the door within seconds, stays refused, and the others go on."""
    link = read_link(scene.log.parent)
    public = make_node_key(tmp_path / "stolen.key")
    admit_node(link, public, "stolen")
    stolen = HostileNode(scene.address, scene.authority, load_node_key(tmp_path / "stolen.key")[0])
    try:
        stolen.activate()
        assert stolen.pull() is None
        assert revoke_node(link, "stolen") == [stolen.node]
        until = time.monotonic() + 30
        request = name_of("flwr.proto.fleet_pb2", "PullMessagesRequest")(node=stolen.own())
        while stolen.post("pull-messages", request)[0] != 401:
            assert time.monotonic() < until
            time.sleep(0.2)
        with pytest.raises(FedspanError, match="this key was revoked, and stays so"):
            admit_node(link, public, "stolen")
    finally:
        stolen.close()
    (link.folder / "nodes.json").unlink()
    assert {one.name for one in read_admissions(link).values()} == {"honest", "hostile"}
    assert [row["event"] for row in open_audit_log(link).read()][-2:] == ["admitted", "revoked"]
    scene.require_work()


def test_requests_that_wait_for_orders_stop_nobody(scene: Scene) -> None:
    """Many at once from one node, most of which are cut off: the others' orders come, and so does this node's."""
    waiting = [
        Thread(target=lambda: suppressed(lambda: scene.hostile.post_own("take-order", *own(scene), cut=3.0)))
        for _ in range(40)
    ]
    for thread in waiting:
        thread.start()
    scene.require_work()
    for thread in waiting:
        thread.join()
    began = time.monotonic()
    scene.require_work()
    assert time.monotonic() - began < 30


def own(scene: Scene, received: str = "") -> tuple[bytes, bytes]:
    return str(scene.hostile.node).encode(), received.encode()


def suppressed(send: Any) -> None:
    with suppress(httpx.HTTPError):
        send()


def test_nobody_takes_the_order_of_another_or_claims_to_have_received_it(scene: Scene, order: Any) -> None:
    status, _ = scene.hostile.post_own("take-order", str(scene.honest).encode(), b"")
    assert status == 403
    sealed = scene.transport.signer.seal(Envelope("{}", b"for the honest node"), scene.honest)
    message = Message(to_records(sealed, draw_salt()), dst_node_id=scene.honest, message_type="train", ttl=600)
    (id,) = scene.transport.grid.push_messages([message])
    with suppress(httpx.ReadTimeout):  # nothing is waiting for it
        assert scene.hostile.post_own("take-order", *own(scene, id), cut=2.0)[1] == b""
    until = time.monotonic() + 60
    while not (replies := scene.transport.grid.pull_messages([id])):
        assert time.monotonic() < until
    assert not replies[0].has_error()


def test_a_reply_with_its_objects_is_the_node_s_own_and_its_objects_belong_to_it(scene: Scene, order: Any) -> None:
    message, _ = order
    content = b"not an object of Flower's"
    for changes in (dict(src_node_id=scene.honest), dict(dst_node_id=scene.honest), dict(reply_to_message_id="")):
        head = scene.hostile.announcement(message, tree_of(id_of(b"forged")), **changes).SerializeToString()
        assert scene.hostile.post_own("send-reply", head, content)[0] == 403
    head = scene.hostile.announcement(message, tree_of(id_of(content))).SerializeToString()
    assert scene.hostile.post_own("send-reply", head, content)[0] == 409
    head = scene.hostile.announcement(message, tree_of(id_of(b"another"))).SerializeToString()
    status, answer = scene.hostile.post_own("send-reply", head, content)  # an object that was not announced
    assert status == 200
    stored = name_of("flwr.proto.fleet_pb2", "PushMessagesResponse").FromString(answer)
    assert list(stored.objects_to_push) == [id_of(b"another")]
    scene.require_work()


@pytest.mark.parametrize("times", [{"ttl": math.nan}, {"created_at": math.nan}, {"ttl": math.inf}])
def test_a_reply_whose_times_are_no_numbers_is_not_stored(scene: Scene, order: Any, times: dict[str, float]) -> None:
    """The database would return NaN as nothing, with which the server could not take any reply."""
    message, _ = order
    head = scene.hostile.announcement(message, tree_of(id_of(b"root")), **times)
    assert scene.hostile.post("push-messages", head)[0] == 400
    assert scene.hostile.post_own("send-reply", head.SerializeToString())[0] == 400
    scene.require_work()


def test_a_reply_to_the_order_of_another_node_deletes_nothing(scene: Scene, order: Any) -> None:
    """A confirmation in the name of another: the order stays, and its own node answers it."""
    message, _ = order
    large = Envelope("{}", os.urandom(3 * 2**20))
    sealed = scene.transport.signer.seal(large, scene.honest)
    sent = Message(to_records(sealed, draw_salt()), dst_node_id=scene.honest, message_type="train", ttl=600)
    (id,) = scene.transport.grid.push_messages([sent])
    head = scene.hostile.announcement(message, tree_of(id_of(b"root")), reply_to_message_id=id).SerializeToString()
    scene.hostile.post_own("send-reply", head)
    until = time.monotonic() + 60
    while not (replies := scene.transport.grid.pull_messages([id])):
        assert time.monotonic() < until
    assert replies[0].metadata.src_node_id == scene.honest


def test_the_requests_of_a_run_are_not_for_nodes(scene: Scene) -> None:
    for name in ("send-orders", "take-replies"):
        answer = scene.hostile._client.post(
            f"/fedspan/run/{name}", content=b"", headers={**scene.hostile.headers(), "flwr-task-token": "guessed"}
        )
        assert answer.status_code == 403


def test_a_replayed_reply_counts_once(scene: Scene) -> None:
    """The same announcement again, before and after the reply was fetched: nothing is stored twice."""
    message, _ = received_order(scene)
    id, until = message.metadata.message_id, time.monotonic() + 60
    content = ConfigRecord({"a": 1}).deflate()
    head = scene.hostile.announcement(message, tree_of(id_of(content))).SerializeToString()
    assert [scene.hostile.post_own("send-reply", head, content)[0] for _ in range(2)] == [200, 200]
    while not (replies := scene.transport.grid.pull_messages([id])):
        assert time.monotonic() < until
    assert len(replies) == 1
    assert replies[0].has_error()  # its object is no message
    assert scene.hostile.post_own("send-reply", head, content)[0] == 200
    again = scene.transport.grid.pull_messages([id])
    assert all(one.has_error() for one in again)  # Flower's own: there is no such order any more
    scene.require_work()


def test_an_order_that_nobody_waits_for_is_deleted_and_its_late_reply_is_not_stored(scene: Scene) -> None:
    message, tree = received_order(scene)
    grid, id = scene.transport.grid, message.metadata.message_id
    assert grid.pull_messages([id]) == []
    assert grid.pull_messages([]) == []
    request = name_of("flwr.proto.message_pb2", "PullObjectRequest")
    for object_id in ids_in(tree):
        body = request(node=scene.hostile.own(), run_id=message.metadata.run_id, object_id=object_id)
        status, content = scene.hostile.post("pull-object", body)
        assert status == 200
        assert not name_of("flwr.proto.message_pb2", "PullObjectResponse").FromString(content).object_found
    head = scene.hostile.announcement(message, tree_of(id_of(b"late"))).SerializeToString()
    status, answer = scene.hostile.post_own("send-reply", head)
    assert status == 200
    assert not name_of("flwr.proto.fleet_pb2", "PushMessagesResponse").FromString(answer).objects_to_push
    scene.require_work()


def test_no_claim_about_an_object_stops_the_server_after_a_restart_and_without_the_attacker(scene: Scene) -> None:
    """The last test: what the claims left in the database, if anything, is there when the server starts again."""
    claim_children(scene, *received_order(scene))
    scene.hostile.close()
    children = Path(f"/proc/self/task/{scene.server.native_id}/children")
    (before,) = children.read_text().split()
    os.kill(int(before), signal.SIGKILL)
    until = time.monotonic() + 120
    while children.read_text().split() in ([], [before]):
        assert time.monotonic() < until, scene.log.read_text()[-3000:]
        time.sleep(0.2)
    order, until = {"honest": Envelope("{}", b"again")}, time.monotonic() + 240
    while exchanged(scene.transport, order, 30.0) != order:  # the node connects again after its old connection ended
        assert time.monotonic() < until, scene.log.read_text()[-3000:]
        time.sleep(1)
    scene.require_work()
