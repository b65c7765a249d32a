"""A node's transfers: the limit on their bandwidth, and their progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

_FIRST_SHOWN, _SHOWN_EVERY = 3.0, 5.0
"""Seconds after which a transfer's progress is logged: for the first time, and then again."""
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
        self._subject, self._on_progress = subject, on_progress
        self._total, self._shown_at = 0, float("inf")

    def begin(self, total: int) -> None:
        """Begin with a message of some bytes."""
        self._total, self._shown_at = total, time.monotonic() + _FIRST_SHOWN - _SHOWN_EVERY

    def show(self, current: int) -> None:
        """Report how many bytes have been transferred, and log it if it is time."""
        self._on_progress()
        now = time.monotonic()
        if now - self._shown_at >= _SHOWN_EVERY:
            self._shown_at = now
            log.info("%s: %.1f of %.1f MB", self._subject, current / 1e6, self._total / 1e6)
