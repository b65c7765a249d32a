"""Reading the bodies of requests at the door: their size is declared and checked before the first byte is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fedspan.transports.flower.limits import DoorLimits
from fedspan.transports.flower.uploads import Upload
from fedspan.transports.flower.wire import UploadPart, parse_upload, unpack

__all__ = [
    "App",
    "Receive",
    "Refused",
    "Scope",
    "Send",
    "make_replay",
    "read_body",
    "read_declared_length",
    "read_declared_part",
    "read_into",
    "unpack_parts",
    "wait_for_disconnect",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """Raised to refuse a request.

    Args:
        status: HTTP status.
        reason: Reason in plain text, without anything that the request contains.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def read_declared_length(headers: dict[bytes, bytes], limit: int) -> int:
    """Return the size of the body that the headers declare.

    Raises:
        Refused: If they declare no length, or one above the maximum.
    """
    text = headers.get(b"content-length", b"")
    if not text.isdigit() or len(text) > 12 or b"transfer-encoding" in headers:
        raise Refused(411, "a body of a declared length is required")
    if int(text) > limit:
        raise Refused(413, f"at most {limit} bytes")
    return int(text)


def read_declared_part(headers: dict[bytes, bytes], limit: int) -> UploadPart | None:
    """Return the part of a body that the headers declare; None: the body is sent as a whole.

    Raises:
        Refused: If the declaration is not valid, or the whole body is larger than the maximum.
    """
    try:
        part = parse_upload(headers)
    except ValueError as error:
        raise Refused(400, "not a part of a body") from error
    if part is not None and part.total > limit:
        raise Refused(413, f"at most {limit} bytes")
    return part


async def read_body(receive: Receive, length: int, limits: DoorLimits) -> bytes:
    """Read a body of a known length in time."""
    upload = Upload(length)
    await read_into(receive, length, limits, upload, 0)
    return b"".join(upload.parts)


async def read_into(receive: Receive, length: int, limits: DoorLimits, upload: Upload, request: int) -> None:
    """Read a body, or the rest of one, of a known length in time, unless a later request takes over."""
    left = length
    try:
        async with asyncio.timeout(limits.body_seconds + length / limits.slowest):
            while True:
                async with asyncio.timeout(limits.body_seconds):
                    message = await receive()
                if message["type"] != "http.request":
                    raise Refused(400, "the connection was closed")
                if upload.requests != request:
                    raise Refused(416, "a later request sends this body")
                part = message.get("body", b"")
                left -= len(part)
                if left < 0:
                    raise Refused(413, f"more than the declared {length} bytes")
                upload.append(part)
                if not message.get("more_body", False):
                    if left:
                        raise Refused(400, f"less than the declared {length} bytes")
                    return
    except TimeoutError:
        raise Refused(408, "the body took too long") from None


def unpack_parts(body: bytes, most: int) -> list[bytes]:
    """Split a body of the door's own requests.

    Raises:
        Refused: If the body is not such a request.
    """
    try:
        return unpack(body, most)
    except ValueError as error:
        raise Refused(400, f"at most {most} parts with their lengths before them") from error


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass


def make_replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives a body that was read before, and then whatever follows."""
    is_sent = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
