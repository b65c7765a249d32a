"""Shared parts of the requests of nodes and of the operator: refusals, sizes and times of bodies, and the runs."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response


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
    """The server's state of one node."""

    slots: asyncio.Semaphore
    bucket: Bucket
    waiting: int = field(default=0)


_BROWSER = "origin", "sec-fetch-site"
"""Headers that a browser adds to the requests of a web page; nodes and commands send none."""

log = logging.getLogger("fedspan.server")

Handler = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    """Raised to refuse a request.

    Args:
        reason: Reason in plain text, without anything that the request contains.
    """

    def __init__(self, status: int, reason: str, **facts: Any) -> None:
        super().__init__(reason)
        self.status, self.facts = status, {"reason": reason, **facts}


@dataclass
class Run:
    """A run whose process waits for replies."""

    seen: float = field(default_factory=time.monotonic)
    signal: asyncio.Event = field(default_factory=asyncio.Event)


def guard(handler: Handler) -> Handler:
    """Return a handler whose refusals and disk errors are answers."""

    async def answer(request: Request) -> Response:
        try:
            if any(name in request.headers for name in _BROWSER):
                raise Refused(403, "not from a browser, where web sites send requests as its user")
            return await handler(request)
        except Refused as refused:
            headers = {"connection": "close"}  # what may follow of its body is not read
            return JSONResponse(refused.facts, refused.status, headers)
        except (sqlite3.Error, OSError) as error:
            log.warning("a request failed: %s", error)
            return JSONResponse({"reason": "the server's disk failed"}, 503, {"connection": "close"})

    return answer


def get_token(request: Request) -> str:
    """Return the token with which a request proves its sender; empty: it has none."""
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def is_name(text: str, length: int) -> bool:
    """Return whether a text is hexadecimal digits, as names of files are."""
    return len(text) == length and not set(text) - set("0123456789abcdef")


def read_length(request: Request, limit: int) -> int:
    """Return the size of the body that the headers declare, which may be none."""
    text = request.headers.get("content-length", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 12 or "transfer-encoding" in request.headers:
        raise Refused(411, "a body of a declared length is required")
    if int(text) > limit:
        raise Refused(413, f"at most {limit} bytes")
    return int(text)


async def read_body(request: Request, limits: RequestLimits, on_data: Callable[[bytes], None]) -> None:
    """Pass the pieces of a body on as they arrive in time; its size is that of ``read_length``."""
    seconds = limits.body_seconds + int(request.headers.get("content-length", "0")) / limits.slowest
    try:
        async with asyncio.timeout(seconds):
            is_over = False
            while not is_over:
                async with asyncio.timeout(limits.body_seconds):
                    message = await request.receive()
                if message["type"] != "http.request":
                    raise Refused(400, "the connection was closed")
                if data := message.get("body", b""):
                    on_data(data)
                is_over = not message.get("more_body", False)
    except TimeoutError:
        raise Refused(408, "the body took too long") from None
