"""Limits on the requests of one node: concurrency, rate, and time of a body."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RequestLimits:
    """Limits on the requests of one node, whatever its address.

    Args:
        parallel: Requests that are processed at once; the others wait. One that waits for an order does not count.
        waiting: Requests that may wait; further ones are refused.
        rate: Requests per second in the long run; faster ones are delayed.
        burst: Requests that are not delayed after a pause.
        body_seconds: Time limit for the next piece of a body or of an answer, in seconds.
        slowest: Slowest transmission of both, in bytes per second, after the first ``body_seconds``.
        poll: Seconds for which a request waits for an order or for replies at most.
        offline: Seconds after its last request from which on a node counts as offline.
        reconnect: Seconds for which an order waits for a node that is offline, unless the node was stopped.
        lease: Seconds after its last request after which a run ends whose process is gone.
        forgotten: Seconds after its last request after which the session of a node without a key ends.
        sweep: Seconds between two searches for such runs and sessions.
        gather: Seconds for which an answer with replies waits for further ones.
        replies: Number of replies of an answer.
    """

    parallel: int = 2
    waiting: int = 16
    rate: float = 40.0
    burst: float = 120.0
    body_seconds: float = 15.0
    slowest: float = 8192.0
    poll: float = 50.0
    offline: float = 40.0
    reconnect: float = 60.0
    lease: float = 90.0
    forgotten: float = 86400.0
    sweep: float = 5.0
    gather: float = 0.05
    replies: int = 256


class Bucket:
    """A token bucket."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._tokens, self._refilled = burst, time.monotonic()

    def take(self) -> float:
        """Take a token, and return the number of seconds until it is available."""
        now = time.monotonic()
        self._tokens = min(self.burst, self._tokens + (now - self._refilled) * self.rate) - 1
        self._refilled = now
        return max(0.0, -self._tokens / self.rate)


@dataclass
class Sender:
    """The server's state of one node.

    Args:
        slots: The slots of its concurrent requests.
        bucket: The rate of its requests.
        waiting: Number of requests that wait for a slot.
    """

    slots: asyncio.Semaphore
    bucket: Bucket
    waiting: int = field(default=0)
