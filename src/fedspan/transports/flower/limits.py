"""Limits on the requests of one node: concurrency, rate and size of a reply."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from fedspan.transports.flower.adapter import PIECE_BYTES
from fedspan.transports.flower.progress import ProgressClock, ProgressClocks

__all__ = ["KNOWN_SECONDS", "SMALL_BYTES", "Bucket", "DoorLimits", "Sender", "Slot"]

SMALL_BYTES = 64 * 2**10
"""Maximum size of a request without objects, in bytes."""
_TREE_NODE = 80
"""Maximum size of an object in the announcement of a reply, in bytes: its hash in hexadecimal digits, and lengths."""

KNOWN_SECONDS = 5.0
"""Seconds for which an admitted key need not be looked up again; a revoked key is refused after that time."""


@dataclass(frozen=True)
class DoorLimits:
    """Limits on the requests of one node.

    Args:
        reply_bytes: Maximum size of a reply's objects together, in bytes, if its order names no smaller one.
        parallel: Requests of a node that are processed at once; the others wait. A request for an order does not count
            while there is none. Heartbeats and activations do not count, so that a busy node stays online.
        waiting: Requests of a node that may wait; further ones are refused.
        rate: Requests of a node per second in the long run, beside heartbeats and activations; faster ones are delayed.
        burst: Requests of a node that are not delayed after a pause.
        heartbeat_rate: Heartbeats and activations of a node per second in the long run; faster ones are refused.
        heartbeat_burst: Heartbeats and activations of a node that are not refused after a pause.
        body_seconds: Time limit for the next part of a body, in seconds.
        slowest: Slowest transmission of a body, in bytes per second, after the first ``body_seconds``.
        partial_bytes: Maximum size of what is kept of all nodes' interrupted bodies together, in bytes; beyond it the
            oldest are dropped, and sent again from the start.
        partial_seconds: Seconds for which an interrupted body is kept.
    """

    reply_bytes: int = 1 << 31
    parallel: int = 2
    waiting: int = 16
    rate: float = 40.0
    burst: float = 120.0
    heartbeat_rate: float = 1.0
    heartbeat_burst: float = 30.0
    body_seconds: float = 15.0
    slowest: float = 8192.0
    partial_bytes: int = 1 << 28
    partial_seconds: float = 900.0

    @property
    def objects(self) -> int:
        """Maximum number of objects of a reply: its pieces, and the records around them."""
        return 16 + self.reply_bytes // PIECE_BYTES

    @property
    def head_bytes(self) -> int:
        """Maximum size of the announcement of a reply, in bytes."""
        return SMALL_BYTES + self.objects * _TREE_NODE

    def restrict(self, reply_bytes: int) -> DoorLimits:
        """Return the limits for the reply to an order that names a maximum size, in bytes."""
        return replace(self, reply_bytes=min(self.reply_bytes, reply_bytes))


class Bucket:
    """A token bucket.

    Args:
        rate: Tokens that are added per second.
        burst: Maximum number of tokens.
    """

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._tokens, self._refilled = burst, time.monotonic()

    def take(self) -> float:
        """Take a token, and return the number of seconds until it is available."""
        now = time.monotonic()
        self._tokens = min(self.burst, self._tokens + (now - self._refilled) * self.rate) - 1
        self._refilled = now
        return max(0.0, -self._tokens / self.rate)

    def give_back(self) -> None:
        """Return an unused token."""
        self._tokens += 1


class Slot:
    """A request's slot among the concurrent requests of its node.

    Args:
        slots: The slots of the node.
    """

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots, self._is_held = slots, False

    async def enter(self) -> None:
        """Wait for a slot, unless the request holds one."""
        if not self._is_held:
            await self._slots.acquire()
            self._is_held = True

    def leave(self) -> None:
        """Release the slot, if the request holds one."""
        if self._is_held:
            self._is_held = False
            self._slots.release()


@dataclass
class Sender:
    """The door's state of one node."""

    slots: asyncio.Semaphore
    requests: Bucket
    heartbeats: Bucket
    waiting: int = 0
    reply_left: int = 0
    """Bytes that the objects of its latest reply may still have."""
    objects_left: int = 0
    """Number of objects that it may still send of that reply."""
    counted: set[bytes] = field(default_factory=set)
    """SHA-256 of the objects that were sent: one that is sent again, because an answer was lost, counts once."""
    clocks: ProgressClocks = field(default_factory=lambda: ProgressClocks(ProgressClock))
    node: int | None = None
    looked_up_at: float = field(default=-KNOWN_SECONDS)
