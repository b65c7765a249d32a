"""The grid of a run's server: a run that is unknown or has ended is an error, and ends no process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from helpers.flower_names import broken, lookup, require

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")


def test_the_grid_has_what_the_server_of_a_run_needs() -> None:
    grid = lookup("flwr.superlink.grid", "HttpGrid", "the messages of a run")("127.0.0.1:1", insecure=True, token="t")
    for name in ("_runtime_client", "_retry_invoker", "node", "set_run", "get_node_ids", "close"):
        if not hasattr(grid, name):
            broken(f"HttpGrid.{name}", "the messages of a run")
    if not hasattr(grid._retry_invoker, "max_tries") or not callable(grid._retry_invoker.invoke):
        broken("HttpGrid._retry_invoker.max_tries", "ending a run without waiting for a lost SuperLink")
    if not callable(getattr(grid._retry_invoker, "should_giveup", None)):
        broken("HttpGrid._retry_invoker.should_giveup", "the reason why a run ended")
    client = lookup("flwr.supercore.runtime", "RuntimeHttpClient", "being the server of a run")
    if not isinstance(grid._runtime_client, client):
        broken("a RuntimeHttpClient as HttpGrid._runtime_client", "the messages of a run")
    calls = (
        "AcquireTask PullTaskInput PushTaskOutput SendTaskHeartbeat PullObject PushObject ConfirmMessageReceived close"
    )
    for name in (*calls.split(), "from_server_address"):
        if not hasattr(client, name):
            broken(f"RuntimeHttpClient.{name}", "being the server of a run")
    parameters = "server_address insecure root_certificates interceptors retry_invoker"
    require(parameters, client.from_server_address, "RuntimeHttpClient.from_server_address", "taking over a run")
    sender = lookup("flwr.supercore.heartbeat", "HeartbeatSender", "keeping a run alive")
    for name in ("start", "stop"):
        if not hasattr(sender, name):
            broken(f"HeartbeatSender.{name}", "keeping a run alive")
    if not hasattr(importlib.import_module("flwr.common.constant").ErrorCode, "MESSAGE_UNAVAILABLE"):
        broken("ErrorCode.MESSAGE_UNAVAILABLE", "the error that stands for a missing reply")
    grid.close()


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_no_longer_knows_the_run_is_an_error_and_ends_no_process(status: int, tmp_path: Path) -> None:
    """As after an outage in which the run's heartbeats expired: Flower's own retries would send SIGINT."""
    import httpx

    from fedspan.transports.flower.adapter import RunNotRunningException, TaskGrid

    with _answering(status, b"") as address:
        grid = TaskGrid(address, None, "stale")
        assert grid._send_heartbeat(), "the next message fails"
        expected = httpx.HTTPStatusError if status == 401 else RunNotRunningException
        with pytest.raises(expected), grid.serve_task():
            broken("an error", "the reason why a run ended")


def test_a_heartbeat_of_a_run_that_has_ended_ends_no_process() -> None:
    from fedspan.transports.flower.adapter import TaskGrid

    with _answering(200, b"") as address:  # an empty answer has success = false
        grid = TaskGrid(address, None, "stale")
        assert grid._send_heartbeat()
    grid._grid._retry_invoker.max_tries = 1
    assert not grid._send_heartbeat(), "nobody answers: it is repeated"


def test_a_heartbeat_that_the_server_failed_to_take_is_sent_again() -> None:
    from fedspan.transports.flower.adapter import TaskGrid

    with _answering(500, b"") as address:
        assert not TaskGrid(address, None, "token")._send_heartbeat()


@contextmanager
def _answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
