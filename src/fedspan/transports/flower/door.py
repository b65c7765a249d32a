"""The door in front of Flower's SuperLink: every request passes it before anything of Flower's runs.

Flower serves nodes, commands and running servers on one port. It reads a body of any size before it checks who sent it,
stores messages in anybody's name, and accepts commands from any user of the machine. The door admits only what a role
allows:

- **Nodes** reach the nine paths that a node needs. The signed time in the headers is verified, and the key must be an
  admitted one, before a byte of the body is read. Bodies have a maximum size for each path and a time limit. A message
  must be a reply of the node itself to the server, of at most ``DoorLimits.objects`` objects, and the objects that
  follow may have ``DoorLimits.reply_bytes`` bytes in all. A node that sends faster than the limits waits.
- **The operator** reaches everything else, from a process of the same user on the same machine. Flower's commands carry
  no credentials, so the system's own record of who owns the connection decides.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from anyio.to_thread import current_default_thread_limiter, run_sync
from starlette.responses import PlainTextResponse

from fedspan.transports.flower.adapter import (
    NODE_API,
    OBJECT_BYTES,
    PIECE_BYTES,
    find_node_id,
    read_pushed_reply,
    requires_node_keys,
    verify_node_headers,
)
from fedspan.transports.flower.connections import CONNECTIONS, Connections
from fedspan.transports.flower.local_peer import peer_uid

__all__ = ["BODY_BYTES", "Door", "DoorLimits"]

_THREADS = 3
"""Number of requests processed at once; more than one, because Flower's log streams occupy their threads. Each request
writes to SQLite, which allows one writer, so the forty threads that FastAPI allows would mostly wait for each other."""

_SMALL = 64 * 2**10

BODY_BYTES = {
    "activate-node": _SMALL,
    "deactivate-node": _SMALL,
    "send-node-heartbeat": _SMALL,
    "get-run": _SMALL,
    "pull-messages": _SMALL,
    "pull-object": _SMALL,
    "confirm-message-received": _SMALL,
    "push-messages": 512 * 2**10,
    "push-object": OBJECT_BYTES + _SMALL,
}
"""Paths of the node API that nodes may use, and the maximum size of a request's body in bytes."""

_KEYLESS = {"register-node": _SMALL, "unregister-node": _SMALL}
"""Further paths of a server without keys, at which nodes register themselves."""

_PROMPT = "activate-node", "send-node-heartbeat"
"""Paths whose requests wait for no other ones: a node that is cut off in an upload comes back at once."""

_KNOWN_SECONDS = 5.0
"""Seconds for which an admitted key need not be looked up again; a revoked key is refused after that time."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class DoorLimits:
    """What one node may ask of the server.

    Args:
        reply_bytes: Maximum size of a reply's objects together, in bytes.
        parallel: Requests of a node that are processed at once; the others wait.
        waiting: Requests of a node that may wait; further ones are refused.
        rate: Requests of a node per second in the long run; faster ones are delayed.
        burst: Requests of a node that are not delayed after a pause.
        body_seconds: Time limit for the next part of a body, in seconds.
        slowest: Slowest transmission of a body, in bytes per second, after the first ``body_seconds``.
    """

    reply_bytes: int = 1 << 31
    parallel: int = 2
    waiting: int = 16
    rate: float = 40.0
    burst: float = 120.0
    body_seconds: float = 15.0
    slowest: float = 8192.0

    @property
    def objects(self) -> int:
        """Maximum number of objects of a reply: its pieces, and the records around them."""
        return 16 + self.reply_bytes // PIECE_BYTES


class Refused(Exception):
    """Raised to refuse a request.

    Args:
        status: HTTP status.
        reason: Reason in plain text, without anything that the request contains.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class _Sender:
    """What the door remembers of one node."""

    slots: asyncio.Semaphore
    tokens: float
    refilled: float
    waiting: int = 0
    reply_left: int = 0
    node: int | None = None
    looked_up: float = field(default=-_KNOWN_SECONDS)


class Door:
    """Refuses requests that the sender's role does not allow.

    Args:
        app: The app that receives the accepted requests.
        limits: What one node may ask.
        connections: The server's connections, which are told which of them sent an accepted request.
    """

    def __init__(self, app: App, limits: DoorLimits | None = None, connections: Connections | None = None) -> None:
        self.app, self.limits, self.connections = app, limits or DoorLimits(), connections or CONNECTIONS
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it with a status of 4xx and close its connection."""
        if scope["type"] == "lifespan":
            current_default_thread_limiter().total_tokens = _THREADS
            await self.app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise Refused(403, "only HTTP")
            if str(scope["path"]).startswith(NODE_API):
                await self._serve_node(scope, receive, send)
            else:
                await self._require_operator(scope)
                self.connections.accept(scope.get("client"), b"operator", None)
                await self.app(scope, receive, send)
        except Refused as refused:
            answer = PlainTextResponse(refused.reason, refused.status, headers={"connection": "close"})
            await answer(scope, receive, send)

    async def _require_operator(self, scope: Scope) -> None:
        client, server = scope.get("client"), scope.get("server")
        if not _is_loopback(client):
            raise Refused(403, "only from the server's own machine")
        owner = await run_sync(peer_uid, client, server)
        if owner not in (0, os.getuid()):
            raise Refused(403, "only from a process of the user that runs the server")

    async def _serve_node(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = str(scope["path"])[len(NODE_API) :], dict[bytes, bytes](scope["headers"])
        keyed = requires_node_keys(scope["app"])
        limit = (BODY_BYTES if keyed else BODY_BYTES | _KEYLESS).get(path)
        if limit is None or scope["method"] != "POST":
            raise Refused(403, "not a path for nodes")
        length = _declared_length(headers, limit)
        if not keyed:  # a trial on one machine: nobody can tell its nodes apart
            self.connections.accept(scope.get("client"), b"keyless", None)
            body = await _read(receive, length, self.limits)
            if path == "push-messages":
                self._require_reply(body, None)
            await self.app(scope, _replay(body, receive), send)
            return
        key = verify_node_headers(headers)
        if key is None:
            raise Refused(401, "no valid signature of a node")
        sender = self._sender(key)
        await self._require_admitted(scope, sender, key)
        self.connections.accept(scope.get("client"), key, length + 2 * OBJECT_BYTES)
        async with AsyncExitStack() as stack:
            if path not in _PROMPT:
                await self._wait(sender, stack)
            body = await _read(receive, length, self.limits)
            self._require_allowed(path, body, sender)
            await self.app(scope, _replay(body, receive), send)

    def _sender(self, key: bytes) -> _Sender:
        now = time.monotonic()
        sender = self._senders.pop(key, None)
        if sender is None:
            sender = _Sender(asyncio.Semaphore(self.limits.parallel), self.limits.burst, now)
        self._senders[key] = sender
        while len(self._senders) > 4096 and next(iter(self._senders.values())).waiting == 0:
            self._senders.popitem(last=False)
        return sender

    async def _require_admitted(self, scope: Scope, sender: _Sender, key: bytes) -> None:
        now = time.monotonic()
        if now - sender.looked_up >= _KNOWN_SECONDS:
            sender.node = await run_sync(find_node_id, scope["app"], key)
            sender.looked_up = now
        if sender.node is None:
            self._senders.pop(key, None)
            raise Refused(401, "this key was not admitted")

    async def _wait(self, sender: _Sender, stack: AsyncExitStack) -> None:
        """Delay a request until its sender may send one."""
        if sender.waiting >= self.limits.waiting:
            raise Refused(429, "too many requests at once")
        sender.waiting += 1
        try:
            await stack.enter_async_context(sender.slots)
        finally:
            sender.waiting -= 1
        now = time.monotonic()
        sender.tokens = min(self.limits.burst, sender.tokens + (now - sender.refilled) * self.limits.rate) - 1
        sender.refilled = now
        if sender.tokens < 0:
            await asyncio.sleep(-sender.tokens / self.limits.rate)

    def _require_allowed(self, path: str, body: bytes, sender: _Sender) -> None:
        """Check the messages and objects that a node stores."""
        if path == "push-messages":
            self._require_reply(body, sender.node)
            sender.reply_left = self.limits.reply_bytes + OBJECT_BYTES  # what surrounds the pieces counts, too
        elif path == "push-object":
            if len(body) > sender.reply_left:
                raise Refused(413, "the objects are larger than a reply may be, or belong to no reply")
            sender.reply_left -= len(body)

    def _require_reply(self, body: bytes, node: int | None) -> None:
        """Check that a body announces one reply, of a node itself and to the server."""
        reply = read_pushed_reply(body)
        if reply is None:
            raise Refused(400, "not one message with its objects")
        if reply.sender != reply.node or (node is not None and reply.sender != node):
            raise Refused(403, "a message in the name of another")
        if not reply.is_to_server or not reply.reply_to:
            raise Refused(403, "nodes only reply to the server")
        if reply.objects > self.limits.objects or reply.depth > 8:
            raise Refused(413, f"a reply has at most {self.limits.objects} objects")


def _declared_length(headers: dict[bytes, bytes], limit: int) -> int:
    """Return the size of the body that the headers declare.

    Raises:
        Refused: If they declare none, or one above the maximum.
    """
    text = headers.get(b"content-length", b"")
    if not text.isdigit() or len(text) > 12 or b"transfer-encoding" in headers:
        raise Refused(411, "a body of a declared length is required")
    if int(text) > limit:
        raise Refused(413, f"at most {limit} bytes")
    return int(text)


async def _read(receive: Receive, length: int, limits: DoorLimits) -> bytes:
    """Read a body of a known length in time."""
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.body_seconds + length / limits.slowest):
            while True:
                async with asyncio.timeout(limits.body_seconds):
                    message = await receive()
                if message["type"] != "http.request":
                    raise Refused(400, "the connection was closed")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > length:
                    raise Refused(413, f"more than the declared {length} bytes")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Refused(408, "the body took too long") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that receives a body that was read before, and then whatever follows."""
    is_sent = False

    async def replayed() -> MutableMapping[str, Any]:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _is_loopback(client: tuple[str, int] | None) -> bool:
    try:
        address = ipaddress.ip_address("" if client is None else client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
