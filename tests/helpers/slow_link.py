"""A link between a node and a server that is slow and breaks again and again: a TCP proxy on this machine."""

import socket
import struct
import time
from contextlib import suppress
from threading import Event, Lock, Thread

_BLOCK = 4096
_BURST = 0.2
"""Seconds of transmission that a link that was idle, or a thread that was late, makes up for."""


class SlowLink:
    """A proxy in front of a port of this machine, with a rate in each direction, and whose connections are cut.

    Args:
        port: The server's port.
        rate: Bytes per second in each direction, of all connections together.
        cut_after: Seconds after which all connections are cut, again and again; None: never.
        is_cut: Whether they are cut from the start on, and not only when ``cutting`` is set.
    """

    def __init__(self, port: int, rate: float, cut_after: float | None = None, *, is_cut: bool = True) -> None:
        self.target, self.rate, self.cut_after = port, rate, cut_after
        self.cutting = Event()
        if is_cut:
            self.cutting.set()
        self.up = self.received = 0
        """Bytes that were forwarded to the server, and to the node."""
        self.cuts = 0
        self._stop, self._lock = Event(), Lock()
        self._free_at = {"up": 0.0, "down": 0.0}
        self._open: list[socket.socket] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _BLOCK)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        self._threads = [Thread(target=self._accept, daemon=True), Thread(target=self._cut, daemon=True)]

    def __enter__(self) -> "SlowLink":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Cut all connections: both ends see a reset."""
        with self._lock:
            sockets, self._open = self._open, []
        for end in sockets:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.cuts += bool(sockets)

    def _cut(self) -> None:
        while self.cut_after is not None and not self._stop.wait(self.cut_after):
            if self.cutting.is_set():
                self.cut()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _BLOCK)
            try:
                far.connect(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open += [near, far]
            Thread(target=self._forward, args=(near, far, "up"), daemon=True).start()
            Thread(target=self._forward, args=(far, near, "down"), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(_BLOCK):
                with self._lock:
                    begin = max(self._free_at[direction], time.monotonic() - _BURST)
                    self._free_at[direction] = begin + len(data) / self.rate
                time.sleep(max(0.0, self._free_at[direction] - time.monotonic()))
                target.sendall(data)
                with self._lock:
                    if direction == "up":
                        self.up += len(data)
                    else:
                        self.received += len(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
