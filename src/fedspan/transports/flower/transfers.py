"""A node's transfers: what outlives a broken connection, the limit on their bandwidth, and their progress.

Connections come and go; what a node has received of an answer, and which bodies it has sent in part, stays here, so
that the next connection transmits only the rest. Requests below ``wire.RESUMABLE_BYTES`` leave no trace here.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock

from fedspan.transports.flower.wire import UploadPart

__all__ = ["Bandwidth", "Download", "Pacer", "TransferProgress", "Transfers"]

_BLOCK = 2**14
"""Bytes that are sent or read at once: a pause follows each, and a TLS record has as many."""
_FIRST_SHOWN, _SHOWN_EVERY = 3.0, 5.0
"""Seconds after which a transfer's progress is logged: for the first time, and then again."""
_KEPT = 4
"""Maximum number of answers that are kept in part, and of bodies whose interruption is remembered."""

log = logging.getLogger("fedspan.node")


@dataclass(frozen=True)
class Bandwidth:
    """Limits on the bandwidth of a node's transfers.

    Args:
        up: Bytes per second that the node sends on average; None: no limit.
        down: Bytes per second that it receives; None: no limit.
    """

    up: float | None = None
    down: float | None = None


class Pacer:
    """Delays transfers so that they stay below a rate; those of several threads share it.

    Args:
        rate: Bytes per second; None: no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock, self._free_at = Lock(), 0.0

    def wait(self, size: int) -> None:
        """Wait until a number of bytes may be transferred after those before them."""
        if self.rate is None:
            return
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + size / self.rate
            pause = self._free_at - time.monotonic()
        time.sleep(max(0.0, pause))


class TransferProgress:
    """Logs the progress of a message now and then.

    Args:
        subject: What is transferred, and whether it is sent or received.
        on_progress: Called with every block.
    """

    def __init__(self, subject: str, on_progress: Callable[[], None] = lambda: None) -> None:
        self.subject, self._on_progress = subject, on_progress
        self.total = self.done = 0
        self._shown_at = float("inf")

    def begin(self, total: int, done: int = 0) -> None:
        """Begin with a message.

        Args:
            total: Size of the message, in bytes; 0: unknown.
            done: Bytes that were transferred before.
        """
        self.total, self.done = total, done
        self._shown_at = time.monotonic() + _FIRST_SHOWN - _SHOWN_EVERY

    def show(self, current: int) -> None:
        """Report progress, and log it if it is time.

        Args:
            current: Bytes of the body at hand, beside those that are done.
        """
        self._on_progress()
        now = time.monotonic()
        if now - self._shown_at < _SHOWN_EVERY:
            return
        self._shown_at = now
        done = (self.done + current) / 1e6
        if self.total:
            log.info("%s: %.1f of %.1f MB", self.subject, min(done, self.total / 1e6), self.total / 1e6)
        else:
            log.info("%s: %.1f MB", self.subject, done)


@dataclass
class Download:
    """An answer that was received in part.

    Args:
        tag: The answer's ``ETag``.
    """

    tag: str
    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def append(self, part: bytes) -> None:
        """Add bytes."""
        self.parts.append(part)
        self.size += len(part)


class Transfers:
    """The transfers of a node, over all of its connections.

    Args:
        bandwidth: Limits on their bandwidth; None: no limits.
        on_progress: Called with every block of a message.
    """

    def __init__(self, bandwidth: Bandwidth | None = None, on_progress: Callable[[], None] = lambda: None) -> None:
        bandwidth = bandwidth or Bandwidth()
        self.up, self.down = Pacer(bandwidth.up), Pacer(bandwidth.down)
        self.sent, self.received = (
            TransferProgress("reply sent", on_progress),
            TransferProgress("order received", on_progress),
        )
        self.interrupted: OrderedDict[str, None] = OrderedDict()
        """SHA-256 of the bodies of which a part may have arrived."""
        self._downloads: OrderedDict[tuple[str, bytes], Download] = OrderedDict()

    def note_interruption(self, digest: str) -> None:
        """Note that a part of a body may have arrived, given the body's SHA-256."""
        self.interrupted[digest] = None
        while len(self.interrupted) > _KEPT:
            self.interrupted.popitem(last=False)

    def find_download(self, path: str, request: bytes) -> Download | None:
        """Return what was received of the answer to a request; None: nothing."""
        return self._downloads.get((path, request))

    def keep_download(self, path: str, request: bytes, download: Download) -> None:
        """Keep what is received of an answer, in place of the oldest one if there are several."""
        self._downloads[path, request] = download
        while len(self._downloads) > _KEPT:
            self._downloads.popitem(last=False)

    def drop_download(self, path: str, request: bytes) -> None:
        """Forget what was received of an answer."""
        self._downloads.pop((path, request), None)

    def pace_upload(self, body: bytes, part: UploadPart, on_block: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the blocks of a part of a body, at the permitted rate.

        Args:
            body: The whole body.
            part: The part.
            on_block: Called before each block with the number of bytes before it.
        """
        for start in range(part.offset, len(body), _BLOCK):
            block = body[start : start + _BLOCK]
            on_block(start)
            self.up.wait(len(block))
            yield block
