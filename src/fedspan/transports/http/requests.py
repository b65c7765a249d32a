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

from fedspan.transports.http.limits import RequestLimits

_BROWSER = "origin", "sec-fetch-site"
"""Headers that a browser adds to the requests of a web page; nodes and commands send none."""

log = logging.getLogger("fedspan.server")

Handler = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    """Raised to refuse a request.

    Args:
        status: HTTP status.
        reason: Reason in plain text, without anything that the request contains.
        facts: Plain values for the sender.
    """

    def __init__(self, status: int, reason: str, **facts: Any) -> None:
        super().__init__(reason)
        self.status, self.facts = status, {"reason": reason, **facts}


@dataclass
class Run:
    """A run whose process waits for replies.

    Args:
        seen: When its process sent its last request.
        signal: Set when a reply was stored, or a node was stopped.
    """

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
