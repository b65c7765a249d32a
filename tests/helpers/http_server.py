"""Servers of nodes for tests: in this process with limits of the test, or with a serving process as in a deployment."""

import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from fedspan.federation.protocol import Envelope
from fedspan.transports.http.client import Link, NodeConnection, open_client
from fedspan.transports.http.connections import BoundedProtocol, BoundedSocket, ConnectionLimits, Connections, bind
from fedspan.transports.http.requests import RequestLimits
from fedspan.transports.http.server import RunLink, ServerLink, prepare_folder
from fedspan.transports.http.signing import UnsignedSigner
from fedspan.transports.http.store import Store
from fedspan.transports.http.supervision import create_server, supervise
from fedspan.transports.http.transport import Bodies, send_envelopes

from .ports import free_port


class LocalServer:
    """A server in a thread of this process; the system holds ``buffer`` bytes of an answer that is not read."""

    def __init__(
        self,
        link: ServerLink,
        limits: RequestLimits | None = None,
        bounds: ConnectionLimits | None = None,
        buffer: int | None = None,
    ) -> None:
        self.link, self.limits, self.connections = link, limits or RequestLimits(), Connections(bounds)
        self._buffer = buffer
        self.store: Store | None = None
        self._server: Any = None
        self._ready = Event()
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        own = {"bounds": self.connections}
        protocol = type("Protocol", (BoundedProtocol,), own)
        with closing(Store(self.link.folder)) as self.store:
            self._server = create_server(self.link, self.store, self.limits, protocol)
            bound = bind("127.0.0.1", int(self.link.address.rpartition(":")[2]))
            if self._buffer is not None:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer)
            self._ready.set()
            self._server.run([type("Socket", (BoundedSocket,), own).take_over(bound)])

    def __enter__(self) -> "LocalServer":
        self._thread.start()
        assert self._ready.wait(20)
        until = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def serve_here(folder: Path, **options: Any) -> Generator[LocalServer]:
    """Serve in this process without keys, at a free port."""
    with LocalServer(prepare_folder(folder, free_port(), [], insecure=True), **options) as server:
        yield server


@contextmanager
def run_server(
    folder: Path, *, insecure: bool = True, hosts: tuple[str, ...] = (), proxies: tuple[str, ...] = ()
) -> Generator[ServerLink]:
    """Run a server as ``fedspan server`` does, at a free port, with a serving process."""
    link = prepare_folder(folder, free_port(), hosts, insecure=insecure)
    with run_supervised(link, proxies=proxies):
        yield link


@contextmanager
def run_supervised(link: ServerLink, **options: Any) -> Generator[None]:
    """Run the server of a prepared folder, with a serving process."""
    stop, ready = Event(), Event()
    server = Thread(target=supervise, args=(link.folder, link, "127.0.0.1", stop, ready.set), kwargs=options)
    server.start()
    try:
        assert ready.wait(120), (link.folder / "server.log").read_text()
        yield
    finally:
        stop.set()
        server.join()


def kill_serving(link: ServerLink) -> None:
    """Kill the serving process of a server that ``run_server`` runs; it is started again."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"fedspan.transports.http.supervision" in command and str(link.folder).encode() in command:
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def join(address: str, **options: Any) -> Generator[NodeConnection]:
    """Be a node without keys that has joined a server."""
    link = Link(address, None, None, 2**30, **options)
    with open_client(link) as client:
        connection = NodeConnection(link, link.create_signer(), client)
        connection.join()
        yield connection


def send_order(run: RunLink, node: int, envelope: Envelope, reply_bytes: int = 1000, signer: Any = None) -> str:
    """Send a node an order past the transport, and return its id."""
    signer = signer or UnsignedSigner()
    addressed = [("", node, run.list_online()[node], envelope, reply_bytes)]
    return next(iter(send_envelopes(run, signer, addressed, Bodies(run, signer))[0]))
