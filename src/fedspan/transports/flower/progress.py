"""When the server logs how far the messages of a node are, over all requests that transmit one message."""

from __future__ import annotations

import time
from collections import defaultdict

__all__ = ["SHOWN_EVERY", "ProgressClock", "ProgressClocks"]

SHOWN_EVERY = 5.0
"""Seconds between two lines of the log about one message. A longer pause ends a message."""


class ProgressClock:
    """Says when the progress of the messages of one node in one direction is logged: now and then."""

    def __init__(self) -> None:
        self._shown_at = self._moved_at = float("-inf")

    def begin(self, *, is_first: bool) -> None:
        """Begin a request that transmits a message, or a part of one.

        Args:
            is_first: Whether it is the first request of a message; otherwise it is one if nothing has moved for long.
        """
        now = time.monotonic()
        if is_first or now - self._moved_at > SHOWN_EVERY:
            self._shown_at = now
        self._moved_at = now

    def is_due(self) -> bool:
        """Return whether to log the progress, now that bytes have moved."""
        self._moved_at = now = time.monotonic()
        if now - self._shown_at < SHOWN_EVERY:
            return False
        self._shown_at = now
        return True


ProgressClocks = defaultdict[str, ProgressClock]
"""The clocks of a node by what is transmitted."""
