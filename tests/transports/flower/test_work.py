"""What nodes do, as their heartbeats say, on its way to the server's web page."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

import uvicorn

from fedspan.transports.flower import door, senders, work
from fedspan.transports.flower.adapter import NodeConnection
from fedspan.transports.flower.adapter import node as adapter_node
from fedspan.transports.flower.wire import NodeWork
from fedspan.transports.flower.work import FRESH_SECONDS, WorkBook, read_works


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_DELAY", 0.05)


async def settle(book: WorkBook) -> None:
    """Wait until what was noted is written."""
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

    made = door.Door(None, exchange=Exchange(), work=tmp_path / "work.json")  # type: ignore[arg-type]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await made({**scope, "app": SimpleNamespace()}, receive, send)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        served = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_level="critical"))
        thread = Thread(target=lambda: asyncio.run(served.serve([bound])), daemon=True)
        thread.start()
        until = time.monotonic() + 20
        while not served.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        connection = NodeConnection(f"127.0.0.1:{bound.getsockname()[1]}", None, adapter_node.generate_key_pairs(), 0)
        connection.node_id = 7
        try:
            for said, known in (
                (NodeWork("training", 37), {"7": NodeWork("training", 37)}),
                (NodeWork("evaluation", None), {"7": NodeWork("evaluation", None)}),
                (None, {}),
            ):
                connection.get_work = lambda said=said: said
                assert connection.renew()
                while read_works(tmp_path / "work.json") != known:
                    assert time.monotonic() < until
                    time.sleep(0.01)
        finally:
            connection._requests.client.close()
            served.should_exit = True
            thread.join(20)
