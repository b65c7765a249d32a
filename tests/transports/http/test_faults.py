"""Faults of a server: bodies cut anywhere, a full disk, a deleted or damaged database, a clock that jumps."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from fedspan.federation.protocol import Envelope
from fedspan.transports.http.client import Link, NodeConnection
from fedspan.transports.http.invitations import invite
from fedspan.transports.http.node import serve
from fedspan.transports.http.server import OutgoingOrder, RunLink, attach
from fedspan.transports.http.signing import Body, UnsignedSigner
from fedspan.transports.http.store import DATABASE, MESSAGES, Order, Store
from fedspan.transports.http.transport import Bodies, ServerTransport, send_envelopes
from helpers import refusals
from helpers.http_server import LocalServer, join, kill_serving, run_server, send_order, serve_here
from helpers.reply_transport import exchanged

UPLOAD = "a" * 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    with serve_here(tmp_path / "server") as made:
        yield made


@pytest.fixture
def run(server: LocalServer) -> Iterator[RunLink]:
    with attach(server.link, 2**20) as made:
        yield made


@pytest.fixture
def node(server: LocalServer) -> Iterator[NodeConnection]:
    with join(server.link.address) as made:
        yield made


def test_a_reply_that_is_cut_at_any_byte_is_continued_there(run: RunLink, node: NodeConnection) -> None:
    message = bytes(range(40))

    def cut(at: int) -> Iterator[bytes]:
        yield message[:at]
        raise httpx.WriteError("the connection breaks")

    for at in range(len(message)):
        id = send_order(run, node.node, Envelope("{}"), 1000)
        headers = {"authorization": f"Bearer {node.session}", "content-length": str(len(message))}
        query = f"upload={UPLOAD}&start=0&total={len(message)}"
        with pytest.raises(httpx.WriteError):
            node._client.put(f"order/{id}/reply?{query}", content=cut(at), headers=headers)
        node.send_reply(id, message, UPLOAD, is_continued=True)
        (taken,) = run.take_replies([id])
        assert taken.read() == message


def test_an_order_is_fetched_from_any_byte_on(run: RunLink, node: NodeConnection) -> None:
    envelope = Envelope("{}", bytes(range(40)))
    id = send_order(run, node.node, envelope)
    taken = node.take_order()
    assert taken is not None
    assert taken[2] is not None
    for start in range(len(taken[2])):
        data = bytearray(taken[2][:start])
        node._fetch_part(id, data)
        assert UnsignedSigner().open_order(bytes(data), node.node).envelope == envelope


def test_a_full_disk_costs_a_reply_some_time(
    server: LocalServer, run: RunLink, node: NodeConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/dev/full`` is a file to which nothing can be written, as on a full disk."""
    monkeypatch.setattr("fedspan.transports.http.client._PAUSE", 0.01)
    id = send_order(run, node.node, Envelope("{}"), 1000)
    part = server.link.folder / "messages" / f"{id}.part"
    begin = Store.begin_reply

    def begin_on_full_disk(store: Store, order: Order, upload: str, total: int) -> None:
        begin(store, order, upload, total)
        part.symlink_to("/dev/full")

    monkeypatch.setattr(Store, "begin_reply", begin_on_full_disk)
    with pytest.raises(httpx.ReadError, match="answered 503"):
        node.send_reply(id, b"reply", UPLOAD)
    monkeypatch.undo()
    part.unlink()
    node.send_reply(id, b"reply", UPLOAD, is_continued=True)
    (taken,) = run.take_replies([id])
    assert taken.read() == b"reply"


def test_a_full_disk_ends_its_run_with_the_reason(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with attach(server.link, 2**20) as other:
        monkeypatch.setattr(Store, "add_orders", fail)
        with (
            refusals.refused("server", r"failed with status 503, perhaps because its disk is full.*--resume"),
            attach(server.link, 2**20) as run,
            join(server.link.address) as node,
        ):
            send_order(run, node.node, Envelope("{}"))
        monkeypatch.undo()
        with join(server.link.address) as node:
            id = send_order(other, node.node, Envelope("{}"))
            node.send_reply(id, b"reply", UPLOAD)
            assert [taken.read() for taken in other.take_replies([id])] == [b"reply"]


def test_a_deleted_database_ends_its_runs_and_leaves_no_message(tmp_path: Path) -> None:
    """The serving process is killed, so that it opens a new database; the next run finds a server at work."""
    with run_server(tmp_path / "server") as link:

        def send_after_the_end() -> None:
            with attach(link, 2**20) as run, join(link.address) as node:
                send_order(run, node.node, Envelope("{}", b"body"))
                for path in link.folder.glob(f"{DATABASE}*"):
                    path.unlink()
                kill_serving(link)
                until = time.monotonic() + 60
                while True:
                    assert time.monotonic() < until
                    run.cancel(["0"])

        with refusals.refused("server", r"does not know this run.*--resume"):
            send_after_the_end()
        assert not list((link.folder / "messages").iterdir())
        with attach(link, 2**20) as run, join(link.address) as node:
            id = send_order(run, node.node, Envelope("{}", b"body"))
            taken = node.take_order()
            assert taken is not None
            assert taken[0] == id


def test_a_body_that_is_stored_while_the_server_restarts_is_there_for_its_orders(tmp_path: Path) -> None:
    with serve_here(tmp_path) as first:
        link, messages = first.link, first.link.folder / "messages"
        with attach(link, 2**20) as run:
            first.__exit__()
            name = run.store_body(b"body")
            (messages / f"{'0' * 32}.part").write_bytes(b"of an order that is no longer stored")
            second = LocalServer(link).__enter__()
            assert [path.name for path in messages.iterdir()] == [name]
            with join(link.address) as node:
                run.send_orders([OutgoingOrder(node.node, b"head", name, 1000)])
                taken = node.take_order()
            assert taken is not None
            assert taken[2] == b"headbody"
        assert not list(messages.iterdir())
        second.__exit__()


def test_a_damaged_database_is_named_with_the_way_on(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"no database" * 1000)
    with refusals.refused("server", r"orders\.db is damaged .*Remove it"):
        Store(tmp_path)


@pytest.mark.parametrize("jump", [86400 * 400, -86400 * 400])
def test_a_clock_that_jumps_ends_no_session_no_order_and_no_run(
    jump: int, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(server.link, 2**20) as run:
        stop, now = Event(), time.time
        link = Link(server.link.address, None, None, 2**20)
        node = Thread(target=serve, args=(link, lambda envelope: envelope, stop))
        node.start()
        try:
            (id, _) = next(invite(run, Envelope("hello"), 60.0))
            monkeypatch.setattr(time, "time", lambda: now() + jump)
            transport = ServerTransport(run, {"a": id})
            for _ in range(3):
                assert exchanged(transport, {"a": Envelope("{}")}, 30.0) == {"a": Envelope("{}")}
                time.sleep(0.2)
            assert list(run.list_online()) == [id]
        finally:
            monkeypatch.undo()
            stop.set()
            node.join()


def test_a_locked_database_is_not_called_damaged(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with refusals.refused("server", "cannot be opened") as caught:
            Store(tmp_path)
    assert "Remove it" not in str(caught.value)


def test_a_body_whose_last_order_was_given_up_is_stored_again(run: RunLink, node: NodeConnection) -> None:
    """One node has replied, and another that has the same body comes online after it."""
    signer, envelope = UnsignedSigner(), Envelope("{}", b"body")
    bodies = Bodies(run, signer)
    addressed = [("clinic", node.node, run.list_online()[node.node], envelope, 1000)]
    (first,), _ = send_envelopes(run, signer, addressed, bodies)
    run.cancel([first])
    (second,), refused = send_envelopes(run, signer, addressed, bodies)
    assert not refused
    taken = node.take_order()
    assert taken is not None
    assert taken[0] == second
    assert signer.open_order(taken[2], node.node).envelope == envelope


def test_a_node_to_which_nothing_can_be_sealed_fails_alone(run: RunLink, node: NodeConnection) -> None:
    """Its key was revoked in between, or it has joined with a sealing key that is none."""

    class Refusing(UnsignedSigner):
        def seal(self, header: str, body: Body, node: int, sealing: bytes) -> tuple[bytes, bytes]:
            if node == 5:
                raise ValueError("this key was revoked")
            return super().seal(header, body, node, sealing)

    signer = Refusing()
    addressed = [(id, id, b"", Envelope("{}"), 1000) for id in (5, node.node)]
    sent, refused = send_envelopes(run, signer, addressed, Bodies(run, signer))
    assert [one.to for one in sent.values()] == [node.node]
    assert refused == [(5, "this key was revoked")]


def test_an_error_of_the_disk_leaves_no_transaction_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.add_run("run")
    store.add_orders([Order(name * 32, "run", 7, b"head", "", 100) for name in "ab"])

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        with pytest.raises(OSError, match="read-only"):
            store.delete("run", ["a" * 32])
    store.add_orders([Order("c" * 32, "run", 7, b"head", "", 100)])
    store.delete("run", ["b" * 32])
    order = store.find_next_order(7)
    assert order is not None
    assert order.id == "c" * 32


def test_an_ended_session_does_not_write_into_a_reply(server: LocalServer, run: RunLink, node: NodeConnection) -> None:
    id = send_order(run, node.node, Envelope("{}"), 1000)
    sessions, part = server._server.config.app._nodes.sessions, server.link.folder / MESSAGES / f"{id}.part"
    session = sessions[node.node]

    def slowly() -> Iterator[bytes]:
        yield b"old"
        while not part.is_file() or not part.stat().st_size:
            time.sleep(0.01)
        sessions[node.node] = replace(session)
        yield b"!"

    headers = {"authorization": f"Bearer {node.session}", "content-length": "4"}
    answer = node._client.put(f"order/{id}/reply?upload={UPLOAD}&start=0&total=4", content=slowly(), headers=headers)
    sessions[node.node] = session
    assert answer.status_code == 401
    assert part.read_bytes() == b"old"


def test_a_node_that_trains_joins_a_restarted_server_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would count as offline until its training ends, and its order be given up."""
    monkeypatch.setattr("fedspan.transports.http.node._HEARTBEAT", 0.1)
    stop, began, ended = Event(), Event(), Event()

    def answer(envelope: Envelope) -> Envelope:
        if envelope.header == "train":
            began.set()
            assert ended.wait(60)
        return envelope

    with run_server(tmp_path) as server, attach(server, 2**20) as run:
        link = Link(server.address, None, None, 2**20)
        node = Thread(target=serve, args=(link, answer, stop))
        node.start()
        try:
            (id, _) = next(invite(run, Envelope("hello"), 60.0))
            send_order(run, id, Envelope("train"))
            assert began.wait(60)
            kill_serving(server)
            until, online = time.monotonic() + 60, {id}
            while not online - {id}:  # without keys, it has another id
                assert time.monotonic() < until
                with suppress(httpx.HTTPError):
                    online = set(run.list_online())
        finally:
            ended.set()
            stop.set()
            node.join()
