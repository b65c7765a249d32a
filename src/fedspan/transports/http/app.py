"""The server's requests, on one page: what a node may send, what the operator may send, and what they wait for.

| request | sender | answer |
|---|---|---|
| ``GET /v1/health`` | anyone | ``ok`` |
| ``POST /v1/join`` | a key, in headers | a challenge, and for the signed challenge a session |
| ``POST /v1/order`` | a session | waits for an order; its message, or the first MiB of it |
| ``GET /v1/order/ID`` | a session | the next MiB of a message, from ``Range`` on |
| ``PUT /v1/order/ID/reply`` | a session | stores a part of a reply; with the last one, the reply is there |
| ``GET /v1/order/ID/reply`` | a session | how many bytes of a reply have arrived |
| ``POST /v1/order/ID/failure`` | a session | stores why there is no reply |
| ``GET /v1/base/OFFER/FILE`` | a session | a MiB of a base model's file, from ``Range`` on |
| ``POST /v1/heartbeat``, ``/v1/leave`` | a session | stores what the node does; that it was stopped |
| ``POST /v1/nodes`` | the operator | the nodes |
| ``POST /v1/runs`` | the operator | a new run |
| ``POST /v1/runs/RUN/orders``, ``/replies``, ``/end`` | the operator | stores orders; waits for replies; ends a run |

The operator's requests have the secret of the server's folder. A node's have the session that it was given for its
signature, and nothing of a body is read before that is known. Sizes are declared and checked before a body is read. A
node reaches its own orders alone. Everything runs in one event loop: SQLite has one writer, and a statement takes less
time than passing it to a thread.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fedspan.errors import FedspanError, escape_controls
from fedspan.transports.http.connections import CONNECTIONS, Connections
from fedspan.transports.http.identities import verify_join
from fedspan.transports.http.limits import Bucket, RequestLimits, Sender
from fedspan.transports.http.store import RANDOM, Order, Store
from fedspan.transports.http.wire import CHUNK, PROTOCOLS, parse_range

__all__ = ["Server"]

_SMALL = 2**14
"""Maximum size of a request of a node without a part of a reply, in bytes."""
_PIECE = 2**16
"""Size in bytes of the pieces in which an answer is sent."""
_RUN_BYTES = 2**26
"""Maximum size of a request of the operator, in bytes."""
_CHALLENGE_SECONDS = 60.0
_KEYS_SECONDS = 1.0
"""Seconds after which a request of a session notices that its node's key was revoked, at most."""
_LONGEST_REASON = 500
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


_SESSION = "fedspan.session"
"""Where a request's scope has its session."""


@dataclass
class Session:
    """A node that has joined.

    Args:
        node: Its id.
        key: Its public key; empty: of a server without keys.
        sealing: Its signed sealing key.
        sender: What it may still send.
        since: When it joined, on this process's clock.
        seen: When it sent its last request; a request that waits counts until it ends.
        polls: Number of its requests that wait for an order; only the latest goes on.
        number: Number of the latest one.
        has_left: Whether it was stopped.
        work: What it does, as it says.
        signal: Set when an order was stored for it, or a later request waits.
    """

    node: int
    key: str
    sealing: bytes
    sender: Sender
    since: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)
    polls: int = 0
    number: int = 0
    has_left: bool = False
    work: str = ""
    signal: asyncio.Event = field(default_factory=asyncio.Event)
    uploads: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """A run whose process waits for replies.

    Args:
        seen: When its process sent its last request.
        signal: Set when a reply was stored.
    """

    seen: float = field(default_factory=time.monotonic)
    signal: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    """The requests of a server's nodes and of its operator.

    Args:
        store: The orders and replies.
        secret: The operator's secret.
        read_keys: Returns the public keys of the admitted nodes in OpenSSH's format, by id; None: without keys.
        identity: SHA-256 of the order key, which a node compares with its file of the authority.
        limits: Limits on requests.
        offers: Folder with the offers of base models (``deployment.base_offers``).
        connections: The server's connections; those that send an accepted request are marked as such.
    """

    def __init__(
        self,
        store: Store,
        secret: str,
        read_keys: Callable[[], Mapping[int, str]] | None,
        identity: bytes = b"",
        limits: RequestLimits | None = None,
        offers: Path | None = None,
        connections: Connections = CONNECTIONS,
    ) -> None:
        self.store, self.limits, self.connections = store, limits or RequestLimits(), connections
        self._secret, self._read_keys, self._identity, self._offers = secret, read_keys, identity, offers
        self._challenge_key, self._started = secrets.token_bytes(32), time.monotonic()
        self._keys: Mapping[int, str] = {}
        self._keys_read = float("-inf")
        self._sessions: dict[str, Session] = {}
        self._tokens: dict[int, str] = {}
        self._senders: dict[int, Sender] = {}
        """What each node may still send, by id."""
        self._joined: dict[int, float] = {}
        """The moment of the latest challenge that each node has answered."""
        self._runs = {run: Run() for run in store.list_runs()}
        node, operator = self._serve_node, self._serve_operator
        self._app = Starlette(
            routes=[
                Route("/v1/health", self._report_health),
                Route("/v1/join", self._guard(self._join), methods=["POST"]),
                Route("/v1/order", node(self._take_order, waits=True), methods=["POST"]),
                Route("/v1/order/{id}", node(self._read_order)),
                Route("/v1/order/{id}/reply", node(self._store_reply), methods=["PUT"]),
                Route("/v1/order/{id}/reply", node(self._count_reply)),
                Route("/v1/order/{id}/failure", node(self._store_failure), methods=["POST"]),
                Route("/v1/base/{offer}/{file}", node(self._read_base)),
                Route("/v1/heartbeat", node(self._note_work, waits=True), methods=["POST"]),
                Route("/v1/leave", node(self._leave, waits=True), methods=["POST"]),
                Route("/v1/nodes", operator(self._list_nodes), methods=["POST"]),
                Route("/v1/runs", operator(self._add_run), methods=["POST"]),
                Route("/v1/runs/{run}/orders", operator(self._add_orders), methods=["POST"]),
                Route("/v1/runs/{run}/replies", operator(self._take_replies), methods=["POST"]),
                Route("/v1/runs/{run}/end", operator(self._end_run), methods=["POST"]),
            ],
            lifespan=self._live,
        )
        self._app.router.redirect_slashes = False  # a path has one spelling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; one whose answer is not read in time loses its connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seconds = self.limits.body_seconds

        async def send_in_time(message: Any) -> None:
            body = message.get("body", b"")
            try:
                async with asyncio.timeout(seconds + len(body) / self.limits.slowest):
                    for start in range(0, len(body), _PIECE):  # each waits until the one before it was read
                        piece = {**message, "body": body[start : start + _PIECE], "more_body": True}
                        async with asyncio.timeout(seconds):
                            await send(piece)
                        if (session := scope.get(_SESSION)) is not None:
                            session.seen = time.monotonic()
                    await send({**message, "body": b""} if body else message)
            except TimeoutError:
                self.connections.abort(scope.get("client"))
                await asyncio.sleep(0.1)  # it is closed then, and uvicorn's log has no line about it

        await self._app(scope, receive, send_in_time)

    @asynccontextmanager
    async def _live(self, app: Starlette) -> AsyncGenerator[None]:
        task = asyncio.create_task(self._end_left_runs())
        yield
        task.cancel()

    async def _end_left_runs(self) -> None:
        """End the runs whose process is gone, and the sessions of revoked nodes and of those without keys long gone."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self.limits.sweep)
            now = time.monotonic()
            for state in self._runs.values():  # this process stood still: renewals may wait to be read
                state.seen += max(0.0, now - before - self.limits.sweep)
            try:
                self._sweep(now)
            except (FedspanError, sqlite3.Error, OSError) as error:
                log.warning("what is gone cannot be removed now: %s", error)

    def _sweep(self, now: float) -> None:
        for run, state in list(self._runs.items()):
            if now - state.seen > self.limits.lease:
                log.info("run %s: its process is gone", run)
                self._forget_run(run)
        for token, session in list(self._sessions.items()):
            is_gone = self._read_keys is None and not session.polls and now - session.seen > self.limits.forgotten
            if is_gone or not self._is_admitted(session):
                self._drop_session(token, session)

    def _guard(self, handler: Handler) -> Handler:
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

    # Nodes

    async def _report_health(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def _join(self, request: Request) -> Response:
        """Give a session to a node that signs a challenge; only the keys of admitted nodes are parsed."""
        headers = request.headers
        offered = {int(text) for text in headers.get("fedspan-protocols", "").split(",") if text in _PROTOCOL_NAMES}
        if not offered & set(PROTOCOLS):
            raise Refused(426, "no common version of the protocol: update fedspan", protocols=list(PROTOCOLS))
        if self._read_keys is None:
            token, node = self._open_session(secrets.randbits(63), "", b"", request)
            return JSONResponse({"session": token, "node": node})
        key = headers.get("fedspan-key", "")
        node = next((id for id, one in self._list_keys(0.0).items() if one == key), None) if key else None
        if node is None:
            raise Refused(403, "this key was not admitted")
        text = headers.get("fedspan-challenge", "")
        if not text:
            moment = f"{time.monotonic():.6f}"
            challenge = f"{moment}:{self._sign(moment, key)}"
            return JSONResponse({"challenge": challenge, "server": self._identity.hex()})
        moment, _, proof = text.partition(":")
        if not hmac.compare_digest(proof.encode(), self._sign(moment, key).encode()):
            raise Refused(401, "not a challenge of this server")
        if time.monotonic() - float(moment) > _CHALLENGE_SECONDS:
            raise Refused(401, "the challenge has expired")
        if float(moment) <= self._joined.get(node, 0.0):
            raise Refused(401, "the challenge is older than one that was answered")
        try:
            sealing = base64.b64decode(headers.get("fedspan-sealing", ""), validate=True)
            signature = base64.b64decode(headers.get("fedspan-signature", ""), validate=True)
            verify_join(key.encode(), signature, text.encode(), self._identity, sealing)
        except ValueError as error:
            raise Refused(403, "the challenge is not signed by this key") from error
        self._joined[node] = float(moment)
        await asyncio.sleep(self._get_sender(node).bucket.take())
        token, node = self._open_session(node, key, sealing, request)
        return JSONResponse({"session": token, "node": node})

    def _list_keys(self, age: float) -> Mapping[int, str]:
        """Return the keys of the admitted nodes, without comments, as they were at most so many seconds ago."""
        assert self._read_keys is not None
        now = time.monotonic()
        if now - self._keys_read >= age:
            self._keys = {id: " ".join(one.split()[:2]) for id, one in self._read_keys().items()}
            self._keys_read = now
        return self._keys

    def _sign(self, moment: str, key: str) -> str:
        return hmac.digest(self._challenge_key, f"{moment} {key}".encode(), "sha256").hex()

    def _open_session(self, node: int, key: str, sealing: bytes, request: Request) -> tuple[str, int]:
        """Give a node a session in place of its earlier one."""
        token = secrets.token_hex(32)
        earlier, sender = self._tokens.get(node), self._get_sender(node)
        if earlier is not None:
            self._drop_session(earlier, self._sessions[earlier])
            self._senders[node] = sender
        self._sessions[token] = Session(node, key, sealing, sender)
        self._tokens[node] = token
        self.connections.accept(request.client, node.to_bytes(8, "big"), 2 * CHUNK)
        log.info("node %d has joined", node)
        return token, node

    def _get_sender(self, node: int) -> Sender:
        limits = self.limits
        if node not in self._senders:
            self._senders[node] = Sender(asyncio.Semaphore(limits.parallel), Bucket(limits.rate, limits.burst))
        return self._senders[node]

    def _drop_session(self, token: str, session: Session) -> None:
        self._sessions.pop(token, None)
        self._tokens.pop(session.node, None)
        if self._read_keys is None:  # its id comes from this session
            self._senders.pop(session.node, None)
        session.number += 1
        session.signal.set()

    def _serve_node(self, handler: Callable[[Request, Session], Awaitable[Response]], waits: bool = False) -> Handler:
        """Return a handler for requests with a session, within the node's limits.

        Args:
            handler: Answers a request of a session.
            waits: Whether its requests take no slot: they wait, or say that the node is there.
        """

        async def answer(request: Request) -> Response:
            session = self._find_session(request)
            request.scope[_SESSION] = session
            length = _read_length(request, CHUNK if request.method == "PUT" else _SMALL)
            self.connections.accept(request.client, session.node.to_bytes(8, "big"), length + CHUNK)
            sender, session.seen = session.sender, time.monotonic()
            delay = sender.bucket.take()
            if sender.waiting >= self.limits.waiting:
                raise Refused(429, "too many requests at once")
            sender.waiting += 1
            try:
                if delay > 0:
                    await asyncio.sleep(delay)
                if not waits:
                    await sender.slots.acquire()
            finally:
                sender.waiting -= 1
            try:
                return await handler(request, session)
            finally:
                if not waits:
                    sender.slots.release()
                session.seen = time.monotonic()

        return self._guard(answer)

    def _find_session(self, request: Request) -> Session:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(token)
        if session is None:
            raise Refused(401, "no session: join again")
        if not self._is_admitted(session):
            self._drop_session(token, session)
            raise Refused(403, "this key was not admitted")
        return session

    def _is_admitted(self, session: Session) -> bool:
        return self._read_keys is None or session.node in self._list_keys(_KEYS_SECONDS)

    async def _take_order(self, request: Request, session: Session) -> Response:
        """Wait for an order; a node's earlier request that still waits ends."""
        session.has_left, session.work = False, ""
        session.number += 1
        number, deadline = session.number, time.monotonic() + self.limits.poll
        session.signal.set()
        body = await self._read_body(request)
        if body:
            raise Refused(400, "a request for an order has no body")
        gone = asyncio.ensure_future(_wait_for_disconnect(request))
        session.polls += 1
        try:
            while number == session.number and self._is_admitted(session) and not gone.done():
                session.signal.clear()
                order = self.store.find_next_order(session.node)
                if order is not None:
                    return self._send_part(order, 0)
                signal = asyncio.ensure_future(session.signal.wait())
                left = deadline - time.monotonic()
                await asyncio.wait([signal, gone], timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
                signal.cancel()
                if left <= 0:
                    break
        finally:
            session.polls -= 1
            gone.cancel()
        return Response(status_code=204)

    def _find_order(self, request: Request, session: Session) -> Order:
        order = self.store.find_order(request.path_params["id"], session.node)
        if order is None:
            raise Refused(404, "no order of this node: its run has ended")
        return order

    def _send_part(self, order: Order, start: int) -> Response:
        content = self.store.read(order, start, CHUNK)
        total = len(order.head) + self.store.count_body_bytes(order)
        headers = {"fedspan-order": order.id, "fedspan-bytes": str(total), "fedspan-reply": str(order.reply_bytes)}
        return Response(content, 200, headers, "application/octet-stream")

    async def _read_order(self, request: Request, session: Session) -> Response:
        return self._send_part(self._find_order(request, session), parse_range(request.headers.get("range", "")))

    async def _count_reply(self, request: Request, session: Session) -> Response:
        order, upload = self._find_order(request, session), request.query_params.get("upload", "")
        session.uploads[order.id] = session.uploads.get(order.id, 0) + 1  # ends a request that still sends it
        return JSONResponse({"bytes": self.store.count_received(order, upload)})

    async def _store_reply(self, request: Request, session: Session) -> Response:
        """Store a part of a reply as it arrives, so that what a broken connection has brought counts."""
        order, query = self._find_order(request, session), request.query_params
        if order.is_answered:
            return JSONResponse({"bytes": order.total})
        upload, start, total = query.get("upload", ""), query.get("start", ""), query.get("total", "")
        if not (_is_name(upload, 32) and start.isdecimal() and total.isdecimal() and len(start + total) < 32):
            raise Refused(400, "not a part of a reply")
        if int(total) == 0:
            raise Refused(400, "a reply that is empty")
        if int(total) > order.reply_bytes:
            raise Refused(413, f"the reply to this order has at most {order.reply_bytes} bytes")
        length = _read_length(request, CHUNK)
        if int(start) == 0:
            self.store.begin_reply(order, upload, int(total))
            order = order._replace(upload=upload, total=int(total))
        received = self.store.count_received(order, upload)
        if (int(start), int(total)) != (received, order.total) or received + length > order.total:
            raise Refused(409, "not the part that follows", bytes=received)
        number = session.uploads[order.id] = session.uploads.get(order.id, 0) + 1

        def append(data: bytes) -> None:
            session.seen = time.monotonic()
            if self._sessions.get(self._tokens.get(session.node, "")) is not session:
                raise Refused(401, "the node has joined again")
            if session.uploads.get(order.id) != number or self.store.find_order(order.id, session.node) is None:
                raise Refused(409, "a later request sends this reply, or its run has ended", bytes=0)
            self.store.append(order, data)

        await self._read_body(request, append)
        received = self.store.count_received(order, upload)
        if received == order.total:
            self.store.finish_reply(order)
            self._note_answer(order, session)
        return JSONResponse({"bytes": received})

    async def _store_failure(self, request: Request, session: Session) -> Response:
        reason = (await self._read_body(request)).decode(errors="replace")
        order = self._find_order(request, session)
        if not order.is_answered:
            self.store.fail(order, escape_controls(reason[:_LONGEST_REASON]))
            self._note_answer(order, session)
        return JSONResponse({})

    def _note_answer(self, order: Order, session: Session) -> None:
        session.uploads.pop(order.id, None)
        if (run := self._runs.get(order.run)) is not None:
            run.signal.set()

    async def _read_base(self, request: Request, session: Session) -> Response:
        offer, file = request.path_params["offer"], request.path_params["file"]
        start = parse_range(request.headers.get("range", ""))
        if _is_name(offer, 64) and _is_name(file, 64) and self._offers is not None:
            for path in sorted(self._offers.glob(f"{offer}.*.json")):  # each run that offers it has a file of its own
                with (
                    suppress(OSError, ValueError, KeyError),
                    Path(json.loads(path.read_bytes())[file]).open("rb") as it,
                ):
                    total = os.fstat(it.fileno()).st_size
                    it.seek(start)
                    if content := it.read(CHUNK):
                        return Response(content, 200, {"fedspan-bytes": str(total)}, "application/octet-stream")
        raise Refused(404, "not a file of a base model that is offered")

    async def _note_work(self, request: Request, session: Session) -> Response:
        session.work = (await self._read_body(request)).decode(errors="replace")[:64]
        return JSONResponse({})

    async def _leave(self, request: Request, session: Session) -> Response:
        log.info("node %d was stopped", session.node)
        session.has_left, session.seen = True, time.monotonic()
        session.number += 1
        session.signal.set()
        for run in self._runs.values():
            run.signal.set()
        return JSONResponse({})

    def _is_online(self, session: Session) -> bool:
        if session.has_left or not self._is_admitted(session):
            return False
        return session.polls > 0 or time.monotonic() - session.seen < self.limits.offline

    async def _read_body(self, request: Request, on_data: Callable[[bytes], None] | None = None) -> bytes:
        """Read a body in time; with ``on_data``, its pieces as they arrive."""
        length, parts = _read_length(request, CHUNK), list[bytes]()
        try:
            async with asyncio.timeout(self.limits.body_seconds + length / self.limits.slowest):
                is_over = False
                while not is_over:
                    async with asyncio.timeout(self.limits.body_seconds):
                        message = await request.receive()
                    if message["type"] != "http.request":
                        raise Refused(400, "the connection was closed")
                    if data := message.get("body", b""):
                        parts.append(data) if on_data is None else on_data(data)
                    is_over = not message.get("more_body", False)
        except TimeoutError:
            raise Refused(408, "the body took too long") from None
        return b"".join(parts)

    # The operator

    def _serve_operator(self, handler: Callable[[Any, str], Awaitable[Any]]) -> Handler:
        """Return a handler for requests with the server's secret; they and their answers are plain values."""

        async def answer(request: Request) -> Response:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode(), self._secret.encode()):
                raise Refused(403, "only for the server's operator")
            length = _read_length(request, _RUN_BYTES)
            self.connections.accept(request.client, b"operator", None)
            run, body = request.path_params.get("run", ""), await request.body() if length else b"null"
            if run:
                if run not in self._runs:
                    raise Refused(404, "no such run: it has ended")
                self._runs[run].seen = time.monotonic()
            return JSONResponse(await handler(json.loads(body), run))

        return self._guard(answer)

    async def _list_nodes(self, _: Any, run: str) -> Any:
        now, clock = time.monotonic(), time.time()
        return [
            {
                "node": session.node,
                "online": self._is_online(session),
                "online_seconds": now - session.since if self._is_online(session) else 0.0,
                "offline_since": None if self._is_online(session) else clock - (now - session.seen),
                "work": session.work,
                "sealing": base64.b64encode(session.sealing).decode(),
            }
            for session in self._sessions.values()
        ]

    async def _add_run(self, _: Any, run: str) -> Any:
        run = secrets.token_hex(16)
        self.store.add_run(run)
        self._runs[run] = Run()
        return run

    async def _add_orders(self, rows: Any, run: str) -> Any:
        orders = [
            Order(secrets.token_hex(16), run, row["node"], base64.b64decode(row["head"]), row["body"], row["reply"])
            for row in rows
        ]
        for body in {order.body for order in orders} - {""}:
            name, random = body[: len(run)], body[len(run) :]
            if name != run or not _is_name(random, RANDOM) or not (self.store.messages / body).is_file():
                raise Refused(409, "a body that is not there")
        self.store.add_orders(orders)
        for order in orders:
            if (token := self._tokens.get(order.node)) is not None:
                self._sessions[token].signal.set()
        return [order.id for order in orders]

    async def _take_replies(self, asked: Any, run: str) -> Any:
        """Delete orders that are not awaited any more, and wait for replies to the others."""
        self.store.delete(run, asked["done"])
        state, awaited, limits = self._runs[run], set(asked["awaited"]), self.limits
        deadline = time.monotonic() + min(asked["seconds"], limits.poll)
        while True:
            state.signal.clear()
            if self._list_answered(run, awaited):
                await asyncio.sleep(limits.gather)  # for further ones
                return {"replies": self._list_answered(run, awaited)[: limits.replies], "lost": []}
            lost, left = self._list_lost(run, awaited), deadline - time.monotonic()
            if lost or left <= 0:
                return {"replies": [], "lost": lost}
            with suppress(TimeoutError):
                await asyncio.wait_for(state.signal.wait(), min(1.0, left))
            state.seen = time.monotonic()

    def _list_answered(self, run: str, awaited: set[str]) -> list[tuple[str, str | None]]:
        return [row for row in self.store.list_answered(run) if row[0] in awaited]

    def _list_lost(self, run: str, awaited: set[str]) -> list[tuple[str, str]]:
        """Return the orders whose nodes are offline for too long, or were stopped, with the reason."""
        lost, oldest = list[tuple[str, str]](), time.monotonic() - self.limits.offline - self.limits.reconnect
        for id, node in self.store.list_open(run):
            session = self._sessions.get(self._tokens.get(node, ""))
            if id not in awaited or (session is not None and self._is_online(session)):
                continue
            if session is not None and session.has_left:
                lost.append((id, "its node was stopped"))
            elif (self._started if session is None else session.seen) < oldest:
                lost.append((id, "its node went offline"))
        return lost

    async def _end_run(self, _: Any, run: str) -> Any:
        self._forget_run(run)
        return {}

    def _forget_run(self, run: str) -> None:
        self.store.end_run(run)
        del self._runs[run]


_PROTOCOL_NAMES = {str(protocol) for protocol in PROTOCOLS}


def _is_name(text: str, length: int) -> bool:
    """Return whether a text is hexadecimal digits, as names of files are."""
    return len(text) == length and not set(text) - set("0123456789abcdef")


def _read_length(request: Request, limit: int) -> int:
    """Return the size of the body that the headers declare, which may be none."""
    text = request.headers.get("content-length", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 12 or "transfer-encoding" in request.headers:
        raise Refused(411, "a body of a declared length is required")
    if int(text) > limit:
        raise Refused(413, f"at most {limit} bytes")
    return int(text)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
