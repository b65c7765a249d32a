"""Answers of the door to nodes: in pieces that wait for their reader, from an offset on, and observed on their way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from fedspan.transports.flower.bodies import Receive, Scope, Send
from fedspan.transports.flower.limits import DoorLimits
from fedspan.transports.flower.progress import ProgressClock
from fedspan.transports.flower.wire import RESUMABLE_BYTES, compute_tag, parse_offset

__all__ = ["AnswerProgress", "ResumableAnswer", "log_answer", "observe_answer", "send_answer", "split_answer"]

_PIECE_BYTES = 2**16
"""Size in bytes of the pieces in which answers are sent."""

log = logging.getLogger("fedspan.server")


async def send_answer(content: bytes, scope: Scope, receive: Receive, send: Send, tag: str = "") -> None:
    """Send an answer, or the rest of it to a node that has its beginning."""
    status, headers = 200, {}
    if tag:
        offset, headers = parse_offset(dict(scope["headers"]), tag, len(content)), {"etag": tag}
        if offset:
            status, headers["content-range"] = 206, f"bytes {offset}-{len(content) - 1}/{len(content)}"
            content = content[offset:]
    await Response(content, status, headers, "application/octet-stream")(scope, receive, send)


def split_answer(send: Send, limits: DoorLimits, abort: Callable[[], None]) -> Send:
    """Return a function that sends an answer in pieces, each after those before it have left for the node.

    Args:
        send: Sends the messages of an answer.
        limits: How long a piece, and the whole answer, may take.
        abort: Closes the connection at once, with what has not left yet: of a node that reads too slowly, or not at
            all.
    """
    is_lost = False

    async def send_split(message: MutableMapping[str, Any]) -> None:
        nonlocal is_lost
        if is_lost:
            return
        seconds = limits.body_seconds + len(message.get("body", b"")) / limits.slowest
        try:
            async with asyncio.timeout(seconds):
                for piece in _split(message):
                    async with asyncio.timeout(limits.body_seconds):
                        await send(piece)
        except TimeoutError:
            is_lost = True
            abort()

    return send_split


def _split(message: MutableMapping[str, Any]) -> Iterator[MutableMapping[str, Any]]:
    content = message.get("body", b"")
    if len(content) <= _PIECE_BYTES:
        yield message
        return
    for start in range(0, len(content), _PIECE_BYTES):
        end = start + _PIECE_BYTES
        yield {
            **message,
            "body": content[start:end],
            "more_body": end < len(content) or message.get("more_body", False),
        }


@dataclass
class AnswerProgress:
    """The progress of a message to a node, of which an answer is the whole or a part.

    Args:
        subject: What is sent.
        node: Name of the node.
        clock: Says when it is logged.
        is_first: Whether the answer is the message's first one.
        sent: Bytes of the message that were sent with other answers.
        total: Size of the message in bytes; 0: unknown.
    """

    subject: str
    node: str = "node"
    clock: ProgressClock = field(default_factory=ProgressClock)
    is_first: bool = True
    sent: int = 0
    total: int = 0


def log_answer(send: Send, progress: AnswerProgress) -> Send:
    """Return a function that sends the pieces of an answer, and logs the progress of its message now and then.

    Args:
        send: Sends the messages of an answer.
        progress: The progress, which is known as a whole when the answer begins.
    """
    total, done = 0, 0

    async def send_logged(message: MutableMapping[str, Any]) -> None:
        nonlocal total, done
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            left = int(headers.get(b"content-length", b"0"))
            total = int(headers.get(b"content-range", b"/%d" % left).rpartition(b"/")[2])
            done = total - left
            # a node that waited for an order received nothing so far
            progress.clock.begin(is_first=progress.is_first and not done)
        await send(message)
        done += len(message.get("body", b""))
        if progress.clock.is_due():
            sent, of = progress.sent + done, progress.total or progress.sent + total
            log.info("%s: %s sent: %.1f of %.1f MB", progress.node, progress.subject, sent / 1e6, max(sent, of) / 1e6)

    return send_logged


def observe_answer(send: Send, keep: Callable[[bytes], None]) -> Send:
    """Return a function that sends an answer, and passes on the content of one that succeeded."""
    parts, status = list[bytes](), 0

    async def send_observed(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))
            if status == 200 and not message.get("more_body", False):
                keep(b"".join(parts))
        await send(message)

    return send_observed


class ResumableAnswer:
    """Sends Flower's answer to a request for an object, or the rest of it to a node that has its beginning.

    Args:
        send: Sends the messages of an answer.
        headers: The request's headers.
        request: The request's body, which names the object by its hash.
    """

    def __init__(self, send: Send, headers: dict[bytes, bytes], request: bytes) -> None:
        self._send, self._headers, self._request = send, headers, request
        self._start: MutableMapping[str, Any] = {}
        self._parts: list[bytes] = []

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Take a message of the answer, and send all of them with the last one."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        content, start = b"".join(self._parts), self._start
        if start["status"] == 200 and len(content) >= RESUMABLE_BYTES:
            tag = compute_tag(self._request, len(content))
            offset = parse_offset(self._headers, tag, len(content))
            headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            headers += [(b"etag", tag.encode()), (b"content-length", b"%d" % (len(content) - offset))]
            if offset:
                headers.append((b"content-range", b"bytes %d-%d/%d" % (offset, len(content) - 1, len(content))))
            start = {**start, "status": 206 if offset else 200, "headers": headers}
            content = content[offset:]
        await self._send(start)
        await self._send({"type": "http.response.body", "body": content})
