"""The door in front of Flower's SuperLink: every request passes it before anything of Flower's runs.

Flower serves nodes, commands and running servers on one port. It reads a body of any size before it checks who sent it,
stores messages in anybody's name, and accepts commands from any user of the machine. The door admits only what a role
allows:

- **Nodes** reach the nine paths of Flower's that a node needs, and the door's own (``wire``). The signed time in the
  headers is verified, and the key must be an admitted one, before a byte of the body is read. Bodies have a maximum
  size for each path and a time limit; what has arrived of one when its connection breaks is kept
  (``resumed_bodies``). A message must be a reply of the node itself to the server, and its objects may have as many
  bytes in all as the order allows (``wire``), and at most ``DoorLimits.reply_bytes``. A node that sends faster than
  the limits waits (``senders``).
- **The operator** reaches everything else, from a process of the same user on the same machine. Flower's commands carry
  no credentials, so the system's own record of who owns the connection decides.

The door answers its own paths and heartbeats itself (``exchange``), without Flower's layers of web framework.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyio.to_thread import current_default_thread_limiter, run_sync
from starlette.responses import PlainTextResponse

from fedspan.transports.flower.adapter import (
    ACTIVATE_NODE,
    CONFIRM_RECEIVED,
    DEACTIVATE_NODE,
    GET_RUN,
    NODE_API,
    OBJECT_BYTES,
    PULL_MESSAGES,
    PULL_OBJECT,
    PUSH_MESSAGES,
    PUSH_OBJECT,
    PUSH_ORDERS,
    REGISTER_NODE,
    SEND_HEARTBEAT,
    TASK_TOKEN_HEADER,
    UNREGISTER_NODE,
    MessageStore,
    PushedReply,
    RunNotRunningException,
    find_reply_limit,
    is_node_key_required,
    read_pushed_reply,
    verify_node_headers,
)
from fedspan.transports.flower.answers import (
    AnswerProgress,
    ResumableAnswer,
    log_answer,
    observe_answer,
    send_answer,
    split_answer,
)
from fedspan.transports.flower.base_answers import fetch_base
from fedspan.transports.flower.bodies import (
    App,
    Receive,
    Refused,
    Scope,
    Send,
    make_replay,
    read_body,
    read_declared_length,
    read_declared_part,
    unpack_parts,
    wait_for_disconnect,
)
from fedspan.transports.flower.connections import CONNECTIONS, Connections
from fedspan.transports.flower.exchange import Exchange, ExchangeLimits
from fedspan.transports.flower.limits import SMALL_BYTES, DoorLimits, Sender, Slot
from fedspan.transports.flower.local_peer import get_peer_uid
from fedspan.transports.flower.progress import ProgressClock
from fedspan.transports.flower.resumed_bodies import ResumedBodies
from fedspan.transports.flower.senders import Senders, require_room
from fedspan.transports.flower.wire import (
    BATCH_BYTES,
    CANCEL_ORDERS,
    FETCH_BASE,
    INLINE_BYTES,
    NODE_PATH,
    RESUMABLE_BYTES,
    RUN_PATH,
    SEND_ORDERS,
    SEND_REPLY,
    STOPPED_HEADER,
    TAKE_ORDER,
    TAKE_REPLIES,
    UPLOAD_OFFSET,
    UploadPart,
    compute_tag,
    parse_progress,
    parse_work,
    read_first,
)
from fedspan.transports.flower.work import WorkBook

__all__ = ["BODY_BYTES", "Door"]

_THREADS = 3
"""Number of requests processed at once; more than one, because Flower's log streams occupy their threads. Each request
writes to SQLite, which allows one writer, so the forty threads that FastAPI allows would mostly wait for each other."""

BODY_BYTES = {
    ACTIVATE_NODE: SMALL_BYTES,
    DEACTIVATE_NODE: SMALL_BYTES,
    SEND_HEARTBEAT: SMALL_BYTES,
    GET_RUN: SMALL_BYTES,
    PULL_MESSAGES: SMALL_BYTES,
    PULL_OBJECT: SMALL_BYTES,
    CONFIRM_RECEIVED: SMALL_BYTES,
    PUSH_OBJECT: OBJECT_BYTES + SMALL_BYTES,
}
"""Paths of the node API that nodes may use, and the maximum size of a request's body in bytes; ``push-messages`` is a
further one, whose size depends on the limits."""

_RUN_BYTES = 2 * BATCH_BYTES
"""Maximum size of a request of a run's server, in bytes: orders without content, and their objects."""

_BROWSER = b"origin", b"sec-fetch-site"
"""Headers that a browser adds to the requests of a web page; nodes and Flower's commands send none."""

_SENT = {TAKE_ORDER: "order", PULL_OBJECT: "order", FETCH_BASE: "base model"}
"""What the answers are whose progress is logged."""
_KEYLESS = {REGISTER_NODE: SMALL_BYTES, UNREGISTER_NODE: SMALL_BYTES}
"""Further paths of a server without keys, at which nodes register themselves."""

_PROMPT = ACTIVATE_NODE, SEND_HEARTBEAT
"""Paths whose requests do not wait for others, so that a node whose upload was interrupted reconnects at once."""


@dataclass
class _NodeRequest:
    """A request that a node may send, whose body has arrived.

    Args:
        scope: Its scope.
        receive: Receives what follows its body.
        send: Sends its answer.
        headers: Its headers by name in lower case.
        body: Its whole body.
        part: The part of the body that it brought; None: it brought the body at once.
        key: Public key of the node; None: of a server without keys.
        sender: The door's state of the node; None: of a server without keys.
        slot: Its slot among the requests of the node; None: it does not wait for others.
        progress: What is logged about its answer.
    """

    scope: Scope
    receive: Receive
    send: Send
    headers: dict[bytes, bytes]
    body: bytes
    part: UploadPart | None
    key: bytes | None
    sender: Sender | None
    slot: Slot | None
    progress: AnswerProgress

    async def answer(self, answer: bytes, tag: str = "") -> None:
        """Send an answer of the door's own (``send_answer``)."""
        await send_answer(answer, self.scope, self.receive, self.send, tag)


class Door:
    """Refuses requests that the sender's role does not allow.

    Args:
        app: The app that receives the accepted requests.
        limits: Limits on the requests of one node.
        connections: The server's connections; those that send an accepted request are marked as such.
        exchange: The door's own requests; None: those of the app's database.
        exchange_limits: How long answers wait; None: the defaults.
        offers: Folder with the offers of base models (``deployment.base_offers``); None: none are offered.
        work: File for what nodes do, as they say with their heartbeats (``WorkBook``); None: it is not written.
    """

    def __init__(
        self,
        app: App,
        limits: DoorLimits | None = None,
        connections: Connections | None = None,
        exchange: Exchange | None = None,
        exchange_limits: ExchangeLimits | None = None,
        offers: Path | None = None,
        work: Path | None = None,
    ) -> None:
        self.app, self.limits, self.connections = app, limits or DoorLimits(), connections or CONNECTIONS
        self._exchange, self._exchange_limits, self._offers = exchange, exchange_limits, offers
        head = self.limits.head_bytes
        self._body_bytes = BODY_BYTES | {PUSH_MESSAGES: head}
        self._own_body_bytes = {
            TAKE_ORDER: SMALL_BYTES,
            SEND_REPLY: head + INLINE_BYTES + SMALL_BYTES,
            UPLOAD_OFFSET: SMALL_BYTES,
            FETCH_BASE: SMALL_BYTES,
        }
        self._senders = Senders(self.limits)
        self._bodies = ResumedBodies(self.limits)
        self._work = WorkBook(work)
        self._handlers: dict[str, Callable[[_NodeRequest], Awaitable[None]]] = {
            TAKE_ORDER: self._take_order,
            FETCH_BASE: self._fetch_base,
            UPLOAD_OFFSET: self._find_offset,
            SEND_REPLY: self._send_reply,
            SEND_HEARTBEAT: self._acknowledge_heartbeat,
            PUSH_MESSAGES: self._push_messages,
            PUSH_OBJECT: self._push_object,
            PULL_OBJECT: self._pull_object,
            DEACTIVATE_NODE: self._deactivate_node,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it with a status of 4xx and close its connection."""
        if scope["type"] == "lifespan":
            current_default_thread_limiter().total_tokens = _THREADS
            await self.app(scope, receive, send)
            return
        try:
            if scope["type"] != "http":
                raise Refused(403, "only HTTP")
            if any(name in _BROWSER for name, _ in scope["headers"]):
                raise Refused(403, "not from a browser, where web sites send requests as its user")
            path = str(scope["path"])
            if path.startswith((NODE_API, NODE_PATH)):
                await self._serve_node(scope, receive, send)
                return
            await self._require_operator(scope)
            self.connections.accept(scope.get("client"), b"operator", None)
            if path.startswith(RUN_PATH):
                await self._serve_run(path[len(RUN_PATH) :], scope, receive, send)
                return
            await self.app(scope, receive, send)
            if path == PUSH_ORDERS and self._exchange is not None:
                self._exchange.wake_nodes()
        except Refused as refused:
            answer = PlainTextResponse(refused.reason, refused.status, headers={"connection": "close"})
            await answer(scope, receive, send)

    async def _require_operator(self, scope: Scope) -> None:
        client, server = scope.get("client"), scope.get("server")
        if not _is_loopback(client):
            raise Refused(403, "only from the server's own machine")
        owner = await run_sync(get_peer_uid, client, server)
        if owner not in (0, os.getuid()):
            raise Refused(403, "only from a process of the user that runs the server")

    def _get_exchange(self, scope: Scope) -> Exchange:
        if self._exchange is None:
            self._exchange = Exchange(MessageStore(scope["app"]), self._exchange_limits)
        return self._exchange

    async def _serve_run(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a run's server, whose token Flower has issued."""
        headers, exchange = dict[bytes, bytes](scope["headers"]), self._get_exchange(scope)
        token = headers.get(TASK_TOKEN_HEADER.encode(), b"").decode("latin-1")
        task = await exchange.find_task(token) if token else None
        if task is None:
            raise Refused(403, "not the server of a run")
        parts = unpack_parts(await read_body(receive, read_declared_length(headers, _RUN_BYTES), self.limits), 1 << 20)
        try:
            if path == SEND_ORDERS and parts:
                answer = await exchange.send_orders(task, parts[0], parts[1:])
            elif path == CANCEL_ORDERS:
                answer = await exchange.cancel_orders(task, [part.decode("latin-1") for part in parts])
            elif path == TAKE_REPLIES and parts:
                ids = [part.decode("latin-1") for part in parts[1:]]
                answer = await exchange.take_replies(task, ids, float(parts[0]))
            else:
                raise Refused(404, "not a path for the server of a run")
        except ValueError as error:
            raise Refused(409, f"not stored ({type(error).__name__})") from error
        await send_answer(answer, scope, receive, send)

    async def _serve_node(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, is_own = str(scope["path"]), str(scope["path"]).startswith(NODE_PATH)
        name, headers = path[len(NODE_PATH if is_own else NODE_API) :], dict[bytes, bytes](scope["headers"])
        has_keys = is_node_key_required(scope["app"])
        sizes = self._own_body_bytes if is_own else self._body_bytes if has_keys else self._body_bytes | _KEYLESS
        most = sizes.get(name)
        if most is None or scope["method"] != "POST":
            raise Refused(403, "not a path for nodes")
        length, part = read_declared_length(headers, most), read_declared_part(headers, most)
        sender: Sender | None = None
        progress = AnswerProgress(_SENT.get(name, ""))
        if name in _SENT:
            send = log_answer(send, progress)
        # A request's slot is held until nearly all of the answer has left.
        send = split_answer(send, self.limits, partial(self.connections.abort, scope.get("client")))
        key: bytes | None = None
        slot: Slot | None = None
        with ExitStack() as stack:
            if has_keys:
                key = verify_node_headers(headers)
                if key is None:
                    raise Refused(401, "no valid signature of a node")
                sender = self._senders.get(key)
                await self._senders.require_admitted(scope, sender, key)
                self.connections.accept(scope.get("client"), key, length + 2 * OBJECT_BYTES)
                if name not in _PROMPT:
                    slot = Slot(sender.slots)
                    stack.callback(slot.leave)
                    await self._senders.wait(sender, slot)
                elif sender.heartbeats.take() > 0:
                    sender.heartbeats.give_back()
                    raise Refused(429, "too many heartbeats")
            else:  # a trial on one machine, whose nodes cannot be told apart
                self.connections.accept(scope.get("client"), b"keyless", None)
            if sender is not None:
                progress.node, progress.clock = f"node {sender.node}", sender.clocks[progress.subject]
            if part is None:
                body = await read_body(receive, length, self.limits)
            else:
                clock = ProgressClock() if sender is None else sender.clocks["reply"]
                body = await self._bodies.read_part(receive, length, part, key, progress.node, clock)
            request = _NodeRequest(scope, receive, send, headers, body, part, key, sender, slot, progress)
            await self._handlers.get(name, self._forward)(request)

    async def _find_offset(self, request: _NodeRequest) -> None:
        await request.answer(await self._bodies.find_offset(request.body, request.key))

    async def _take_order(self, request: _NodeRequest) -> None:
        sender, parts = request.sender, unpack_parts(request.body, 2)
        if len(parts) != 2 or not parts[0].isdigit() or len(parts[0]) > 20 or len(parts[1]) > 64:
            raise Refused(400, "not a request for an order")
        if (node := int(parts[0])) >= 2**64:  # Flower's database has no such number
            raise Refused(400, "not the number of a node")
        if sender is not None and node != sender.node:
            raise Refused(403, "a request in the name of another node")
        received, exchange = parts[1].decode("latin-1"), self._get_exchange(request.scope)
        answer = await exchange.take_order(node, received, wait_for_disconnect(request.receive), request.slot)
        is_resumable = len(answer) >= RESUMABLE_BYTES
        await request.answer(answer, compute_tag(read_first(answer), len(answer)) if is_resumable else "")

    async def _fetch_base(self, request: _NodeRequest) -> None:
        progress = request.progress
        answer, progress.sent, progress.total = await fetch_base(self._offers, request.body)
        progress.is_first = progress.sent == 0
        is_resumable = len(answer) >= RESUMABLE_BYTES
        await request.answer(answer, compute_tag(request.body, len(answer)) if is_resumable else "")

    async def _send_reply(self, request: _NodeRequest) -> None:
        sender = request.sender
        async with self._bodies.keep_answer(request.key, request.part) as keep:
            answer = await self._store_reply(request.body, sender, request.scope)
            keep(answer)
        if sender is not None and sender.node is not None:
            self._work.note(sender.node, None)
        await request.answer(answer)

    async def _store_reply(self, body: bytes, sender: Sender | None, scope: Scope) -> bytes:
        head, *contents = unpack_parts(body, 1 + self.limits.objects) or [b""]
        reply = await self._require_reply(head, sender, scope)
        for content in contents:
            require_room(content, sender)
        try:
            return await self._get_exchange(scope).send_reply(reply.node, reply.request, contents)
        except RunNotRunningException as error:
            raise Refused(403, "the run has ended") from error
        except ValueError as error:
            raise Refused(409, "not a reply that can be stored") from error

    async def _acknowledge_heartbeat(self, request: _NodeRequest) -> None:
        sender, exchange = request.sender, self._get_exchange(request.scope)
        try:
            answer = await exchange.acknowledge_heartbeat(request.body, None if sender is None else sender.node)
        except ValueError as error:
            raise Refused(400, "not a heartbeat of this node") from error
        if sender is not None and sender.node is not None:
            self._work.note(sender.node, parse_work(request.headers))
        await request.answer(answer)

    async def _push_messages(self, request: _NodeRequest) -> None:
        await self._require_reply(request.body, request.sender, request.scope)
        await self._forward(request)
        if self._exchange is not None:
            self._exchange.wake_runs()

    async def _push_object(self, request: _NodeRequest) -> None:
        require_room(request.body, request.sender)
        await self._forward(request)
        if self._exchange is not None:
            await self._exchange.note_object(request.body)

    async def _pull_object(self, request: _NodeRequest) -> None:
        progress = request.progress
        progress.is_first = False
        progress.sent, progress.total = parse_progress(request.headers)
        request.send = ResumableAnswer(request.send, request.headers, request.body).send
        await self._forward(request)

    async def _deactivate_node(self, request: _NodeRequest) -> None:
        await self._forward(request)
        sender, is_stopped = request.sender, STOPPED_HEADER.encode() in request.headers
        if is_stopped and sender is not None and sender.node is not None:
            self._get_exchange(request.scope).note_departure(sender.node)

    async def _forward(self, request: _NodeRequest) -> None:
        """Have the app answer a request."""
        async with self._bodies.keep_answer(request.key, request.part) as keep:
            observed = request.send if request.part is None else observe_answer(request.send, keep)
            await self.app(request.scope, make_replay(request.body, request.receive), observed)

    async def _require_reply(self, head: bytes, sender: Sender | None, scope: Scope) -> PushedReply:
        """Check that a head announces one reply, of a node itself and to the server, and let its objects follow."""
        if len(head) > self.limits.head_bytes:
            raise Refused(413, f"the announcement of a reply has at most {self.limits.head_bytes} bytes")
        reply = await run_sync(read_pushed_reply, head, self.limits.objects)
        if reply is None:
            raise Refused(400, "not a single message with its objects")
        if reply.sender != reply.node or (sender is not None and reply.sender != sender.node):
            raise Refused(403, "a message in the name of another node")
        if not reply.is_to_server or not reply.reply_to:
            raise Refused(403, "nodes only reply to the server")
        ordered = await run_sync(find_reply_limit, scope["app"], reply.node, reply.reply_to)
        limits = self.limits if ordered is None else self.limits.restrict(ordered)
        if reply.objects > limits.objects or reply.depth > 8:
            raise Refused(413, f"the reply to this order has at most {limits.objects} objects")
        if sender is not None:
            # what surrounds the pieces counts, too; the limit of an order allows for it
            sender.reply_left = limits.reply_bytes + (OBJECT_BYTES if ordered is None else 0)
            sender.objects_left, sender.counted = reply.objects, set[bytes]()
        return reply


def _is_loopback(client: tuple[str, int] | None) -> bool:
    try:
        address = ipaddress.ip_address("" if client is None else client[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
