"""A node service in a separate process: a hang or crash costs only the current order."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING

from fedspan.clients.refusals import refuse_any
from fedspan.config.node import load_node
from fedspan.deployment.console import log_to_console
from fedspan.deployment.last_order import LastOrderFile
from fedspan.deployment.node_folder import LAST_ORDER, TRAINING, WORKER, get_run_folder
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.federation.secagg.messages import decode_request
from fedspan.files import remove
from fedspan.processes import end_with_parent, hold_folder

if TYPE_CHECKING:
    from fedspan.deployment.node import NodeService

_LOADING = 3600.0
"""Time limit in seconds for an invitation and for loading a run's model, which may have to be downloaded."""

_STEP = 10.0
"""Seconds between two calls of ``on_wait``."""

log = logging.getLogger("fedspan.node")


class Supervisor:
    """Passes envelopes to a node service in another process, which is started on demand and killed after a timeout.

    An order that takes too long, or whose process ends, is answered with a refusal, and so never carried out again.

    Args:
        seconds: Time limit in seconds for an order after its run's model is loaded.
        on_wait: Called every few seconds while an order is carried out.
    """

    def __init__(self, path: Path, seconds: float, on_wait: Callable[[], None] = lambda: None) -> None:
        self.path, self.seconds, self._on_wait = path, seconds, on_wait
        self._loaded: str | None = None
        """The run whose model the process has certainly loaded."""
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def answer(self, envelope: Envelope) -> Envelope:
        try:
            order = decode_request(envelope)
        except ValueError:
            order = None
        line = self._connect()
        limit = self.seconds if order is not None and order.run == self._loaded else _LOADING
        try:
            line.send_bytes(envelope.header.encode())
            line.send_bytes(envelope.body)
            if self._wait(line, limit):
                line.recv_bytes()
                self._loaded = None if order is None else order.run
                limit = _LOADING if order is None else self.seconds
                if self._wait(line, limit):
                    return Envelope(line.recv_bytes().decode(), line.recv_bytes())
            error = FedspanError(
                "limits.round_seconds", limit, problem=f"an order took more than {limit:g} seconds and was stopped"
            )
        except (EOFError, OSError):
            error = FedspanError(
                "node", None, problem="the node's process ended, perhaps for lack of memory. See its log"
            )
        log.error("%s", error)
        self.close()
        if order is None:
            raise error
        folder = get_run_folder(Path(load_node(self.path).folder), order.run)
        if error.field == "limits.round_seconds":  # or another order would continue and exceed the limit again
            remove(folder / TRAINING)
        with suppress(FedspanError):  # answered already, or the disk is full, on which no order is begun
            last = LastOrderFile(folder / LAST_ORDER)
            last.begin(envelope, order.serial)
            last.close()
        return refuse_any(order, error)

    def _wait(self, line: Connection, seconds: float) -> bool:
        """Wait for the process, and return whether it has sent something within some seconds."""
        deadline = time.monotonic() + seconds
        while not line.poll(min(_STEP, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            self._on_wait()
        return True

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = self._loaded = None

    def _connect(self) -> Connection:
        if self._connection is None or self._process is None or not self._process.is_alive():
            self.close()
            context = multiprocessing.get_context("spawn")
            self._connection, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(str(self.path), child_end), daemon=True)
            process.start()
            self._process = process
            child_end.close()
        return self._connection


def _serve(path: str, connection: Connection) -> None:
    """Run the node service in the other process: bytes in, bytes out."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # the supervising process ends after the order, and this one then
        signal.signal(ending, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_with_parent(parent.join)
    log_to_console()
    node = load_node(Path(path))
    with hold_folder(Path(node.folder), WORKER, "folder"):
        from fedspan.deployment.node import NodeService  # torch, Transformers

        _answer_all(NodeService(node), connection)


def _answer_all(service: NodeService, connection: Connection) -> None:
    while True:
        try:
            envelope = Envelope(connection.recv_bytes().decode(), connection.recv_bytes())
        except EOFError:
            return
        service.load(envelope)
        connection.send_bytes(b"loaded")
        try:
            reply = service.answer(envelope)
        except ValueError:  # of an unknown kind: the reply reports nothing else
            log.exception("a message of an unknown kind")
            reply = Envelope("{}")
        connection.send_bytes(reply.header.encode())
        connection.send_bytes(reply.body)
