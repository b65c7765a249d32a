"""The service of a data owner whose SuperNode takes part in Flower federations: it carries out what the app forwards.

Flower ships an app's code to the SuperNode, so whoever submits it decides what that code does. The host is a process of
another user, with data and limits that the app's code does not see: the code only reaches the host's socket, and for
the host all that comes over the socket is one server, that of the node's file.
"""

from __future__ import annotations

import errno
import logging
import os
import pwd
import socket
import stat
import struct
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingMixIn, UnixStreamServer
from threading import BoundedSemaphore, Event, Lock, Timer
from typing import Any

from fedspan.config.node import load_node, require_data
from fedspan.deployment.health import Heartbeat
from fedspan.deployment.node_folder import WORKER
from fedspan.deployment.supervisor import Supervisor
from fedspan.deployment.usage import UsageBook
from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.files import make_private_folder
from fedspan.processes import hold_folder
from fedspan.transports.flower.link import read_envelope, write_envelope

_CONNECTIONS = 4
"""Number of connections at once; each may hold a message of the largest size."""
_SECONDS = 60.0
"""Seconds in which a message has to arrive, and its reply to be taken."""
_STEP = 0.5
"""Seconds between two renewals of the heartbeat while no order is carried out."""

log = logging.getLogger("fedspan.node")


@contextmanager
def _limit_time(connection: socket.socket) -> Generator[None]:
    """Shut a connection down if this context takes too long, however often bytes arrive."""

    def shut_down() -> None:
        with suppress(OSError):  # the peer was faster
            connection.shutdown(socket.SHUT_RDWR)

    timer = Timer(_SECONDS, shut_down)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Handler(StreamRequestHandler):
    """One envelope and its reply."""

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        try:
            with _limit_time(self.connection):
                envelope = Envelope(*read_envelope(self.rfile, self.server.longest_body))
            reply = self.server.answer(envelope)
            with _limit_time(self.connection):
                write_envelope(self.wfile, reply.header, reply.body)
        except (FedspanError, OSError, ValueError) as error:
            log.warning("a message is not answered: %s", error)


class _Server(ThreadingMixIn, UnixStreamServer):
    """Takes envelopes of some users, by id, and answers one after the other; closing it waits for the current reply."""

    timeout = _STEP

    def __init__(self, path: str, users: set[int], longest_body: int, answer: Callable[[Envelope], Envelope]) -> None:
        super().__init__(path, _Handler)
        os.chmod(path, 0o666)  # the peer's user decides, not the file's mode
        self.longest_body, self.busy, self.stop = longest_body, Lock(), Event()
        self._users, self._answer, self._free = users, answer, BoundedSemaphore(_CONNECTIONS)

    def answer(self, envelope: Envelope) -> Envelope:
        """Carry out an envelope when those before it are done."""
        with self.busy:
            if self.stop.is_set():
                raise FedspanError("host", None, problem="it stops, and begins no other order")
            return self._answer(envelope)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        _, user, _ = struct.unpack("3i", request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user not in self._users:
            log.warning("a connection of user %d is refused; --user names the users that may connect", user)
            return False
        if not self._free.acquire(blocking=False):
            log.warning("a connection is refused: %d others have messages that are not answered yet", _CONNECTIONS)
            return False
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def host(path: str | Path, address: Path, user: str | None = None, stop: Event | None = None) -> None:
    """Carry out the orders that Flower's client app forwards, until stopped (by Ctrl-C, or ``stop``).

    Args:
        path: The node file; its ``server`` is the address of the SuperLink, under which the totals are counted.
        user: Name or id of the user that the SuperNode runs as; None: the user of this process.

    Raises:
        FedspanError: If the file has an error, other users may enter the node's folder, another process works in it, or
            the record of what servers have used is missing or damaged.
    """
    node, stop = load_node(path), stop or Event()
    require_data(node)
    users = {os.getuid(), os.getuid() if user is None else _find_user(user)}
    folder = Path(node.folder)
    make_private_folder(folder, "folder")
    heartbeat = Heartbeat(folder)
    worker = Supervisor(Path(path), node.limits.round_seconds, heartbeat.notify_watchdog)
    with hold_folder(folder, "node", "folder"), closing(worker):
        with hold_folder(folder, WORKER, "folder"):  # the process that a killed host left has ended
            book = UsageBook(node)
            book.begin()
            book.get_account()  # a lost book is reported here, and not only to the first app that asks
        with _listen(address, users, node.limits.message_bytes, worker.answer) as server:
            log.info("waiting for Flower's client app at %s", address)
            while not stop.is_set():
                server.handle_request()
                if not server.busy.locked():
                    heartbeat.renew()
            server.stop.set()
            address.unlink(missing_ok=True)


def _find_user(user: str) -> int:
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise FedspanError("--user", user, "the name or the id of a user of this machine") from None


def _listen(address: Path, users: set[int], longest_body: int, answer: Callable[[Envelope], Envelope]) -> _Server:
    """Create the socket, in place of one that a killed host left."""
    try:
        if address.exists() and stat.S_ISSOCK(address.lstat().st_mode):
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(_STEP)
                if other.connect_ex(str(address)) != errno.ECONNREFUSED:
                    raise FedspanError("--socket", str(address), problem="another process listens at this socket")
            address.unlink()
        return _Server(str(address), users, longest_body, answer)
    except OSError as error:
        raise FedspanError("--socket", str(address), "a path for a new socket", problem=f"{error}") from error
