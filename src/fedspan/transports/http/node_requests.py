"""The requests of nodes: the session that each is given for its signature, orders, replies, and base models.

Nothing of a body is read before its sender is known, and no node reaches another one's orders.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fedspan.errors import escape_controls
from fedspan.transports.http.connections import Connections
from fedspan.transports.http.keys import verify_join
from fedspan.transports.http.requests import (
    Bucket,
    Handler,
    Refused,
    RequestLimits,
    Run,
    Sender,
    get_token,
    guard,
    is_name,
    log,
    read_body,
    read_length,
)
from fedspan.transports.http.store import Order, Store
from fedspan.transports.http.wire import CHUNK, PROTOCOLS, parse_range

SESSION = "fedspan.session"
"""Where a request's scope has its session."""

_SMALL = 2**14
"""Maximum size of a request without a part of a reply, in bytes."""
_CHALLENGE_SECONDS = 60.0
_KEYS_SECONDS = 1.0
"""Seconds after which a request of a session notices that its node's key was revoked, at most."""
_LONGEST_REASON = 500
_PROTOCOL_NAMES = {str(protocol) for protocol in PROTOCOLS}


@dataclass
class Session:
    """A node that has joined.

    Args:
        token: What its requests have to prove that they are its own.
        process: The process that has joined, as it says.
        seen: When it sent its last request; a request that waits counts until it ends.
        polls: Number of its requests that wait for an order; only the latest goes on.
        signal: Set when an order was stored for it, or a later request waits.
        uploads: Number of the latest request that sends the reply to an order, by the order's id.
    """

    node: int
    token: str
    sealing: bytes
    process: str
    sender: Sender
    since: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)
    polls: int = 0
    number: int = 0
    has_left: bool = False
    work: str = ""
    signal: asyncio.Event = field(default_factory=asyncio.Event)
    uploads: dict[str, int] = field(default_factory=dict)

    def end_polls(self) -> None:
        """End the requests that wait for an order."""
        self.number += 1
        self.signal.set()


class NodeRequests:
    """The requests of nodes.

    Args:
        read_keys: Returns the public keys of the admitted nodes in OpenSSH's format, by id; None: without keys.
        identity: SHA-256 of the order key, which a node compares with its file of the authority.
        offers: Folder with the offers of base models (``deployment.base_offers``).
        connections: The server's connections; those that send an accepted request are marked as such.
    """

    def __init__(
        self,
        store: Store,
        runs: dict[str, Run],
        read_keys: Callable[[], Mapping[int, str]] | None,
        identity: bytes,
        limits: RequestLimits,
        offers: Path | None,
        connections: Connections,
    ) -> None:
        self.runs, self.connections, self.sessions = runs, connections, dict[int, Session]()
        self._store, self._limits, self._offers = store, limits, offers
        self._read_keys, self._identity, self._challenge_key = read_keys, identity, secrets.token_bytes(32)
        self._keys: Mapping[int, str] = {}
        self._keys_read = float("-inf")
        self._by_token = dict[str, Session]()
        self._senders = dict[int, Sender]()
        self._joined = dict[int, float]()
        """The moment of the latest challenge that each node has answered."""

    # Sessions

    async def join(self, request: Request) -> Response:
        """Give a session to a node that signs a challenge; only the keys of admitted nodes are parsed."""
        headers = request.headers
        if not _PROTOCOL_NAMES & set(headers.get("fedspan-protocols", "").split(",")):
            raise Refused(426, "no common version of the protocol: update fedspan", protocols=list(PROTOCOLS))
        if self._read_keys is None:
            return self._open_session(secrets.randbits(63), b"", request)
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
        return self._open_session(node, sealing, request)

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

    def _open_session(self, node: int, sealing: bytes, request: Request) -> Response:
        """Give a node a session in place of its earlier one, unless another process with its key is there.

        Two processes would end each other's sessions without end, and each would carry out a part of the orders. One
        that was killed has no connection.
        """
        sender, process = self._get_sender(node), request.headers.get("fedspan-process", "")
        if (earlier := self.sessions.get(node)) is not None:
            is_there = earlier.polls > 0 or self.connections.has_sender(node.to_bytes(8, "big"))
            if earlier.process != process and is_there and self.is_online(earlier):
                log.warning("node %d is refused: another process is connected with its key", node)
                raise Refused(409, "another process is connected with this node's key")
            self._drop_session(earlier)
        self._senders[node] = sender
        session = Session(node, secrets.token_hex(32), sealing, process, sender)
        self.sessions[node] = self._by_token[session.token] = session
        self.connections.accept(request.client, node.to_bytes(8, "big"), 2 * CHUNK)
        log.info("node %d has joined", node)
        return JSONResponse({"session": session.token, "node": node})

    def _get_sender(self, node: int) -> Sender:
        limits = self._limits
        if node not in self._senders:
            self._senders[node] = Sender(asyncio.Semaphore(limits.parallel), Bucket(limits.rate, limits.burst))
        return self._senders[node]

    def _drop_session(self, session: Session) -> None:
        del self._by_token[session.token], self.sessions[session.node]
        if self._read_keys is None:  # its id comes from this session
            self._senders.pop(session.node, None)
        session.end_polls()

    def _find_session(self, request: Request) -> Session:
        session = self._by_token.get(get_token(request))
        if session is None:
            raise Refused(401, "no session: join again")
        if not self._is_admitted(session):
            self._drop_session(session)
            raise Refused(403, "this key was not admitted")
        return session

    def _is_admitted(self, session: Session) -> bool:
        return self._read_keys is None or session.node in self._list_keys(_KEYS_SECONDS)

    def is_online(self, session: Session) -> bool:
        """Return whether a node is there: it waits for an order, or has sent a request a short time ago."""
        if session.has_left or not self._is_admitted(session):
            return False
        return session.polls > 0 or time.monotonic() - session.seen < self._limits.offline

    def sweep(self, now: float) -> None:
        """End the sessions of revoked nodes, and of those without keys that are long gone."""
        for session in list(self.sessions.values()):
            is_gone = self._read_keys is None and not session.polls and now - session.seen > self._limits.forgotten
            if is_gone or not self._is_admitted(session):
                self._drop_session(session)

    def serve(self, handler: Callable[[Request, Session], Awaitable[Response]], waits: bool = False) -> Handler:
        """Return a handler for requests with a session, within the node's limits.

        Args:
            waits: Whether its requests take no slot: they wait, or say that the node is there.
        """

        async def answer(request: Request) -> Response:
            session = self._find_session(request)
            request.scope[SESSION] = session
            length = read_length(request, CHUNK if request.method == "PUT" else _SMALL)
            self.connections.accept(request.client, session.node.to_bytes(8, "big"), length + CHUNK)
            sender, session.seen = session.sender, time.monotonic()
            delay = sender.bucket.take()
            if sender.waiting >= self._limits.waiting:
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

        return guard(answer)

    # Orders

    async def take_order(self, request: Request, session: Session) -> Response:
        """Wait for an order; a node's earlier request that still waits ends."""
        session.has_left, session.work = False, ""
        session.end_polls()
        number, deadline = session.number, time.monotonic() + self._limits.poll
        if await self._read_text(request):
            raise Refused(400, "a request for an order has no body")
        gone = asyncio.ensure_future(_wait_for_disconnect(request))
        session.polls += 1
        try:
            while number == session.number and self._is_admitted(session) and not gone.done():
                session.signal.clear()
                order = self._store.find_next_order(session.node)
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
        order = self._store.find_order(request.path_params["id"], session.node)
        if order is None:
            raise Refused(404, "no order of this node: its run has ended")
        return order

    def _send_part(self, order: Order, start: int) -> Response:
        content = self._store.read(order, start, CHUNK)
        total = len(order.head) + self._store.count_body_bytes(order)
        headers = {"fedspan-order": order.id, "fedspan-bytes": str(total), "fedspan-reply": str(order.reply_bytes)}
        return Response(content, 200, headers, "application/octet-stream")

    async def read_order(self, request: Request, session: Session) -> Response:
        """Send a further part of an order's message."""
        return self._send_part(self._find_order(request, session), parse_range(request.headers.get("range", "")))

    async def read_base(self, request: Request, session: Session) -> Response:
        """Send a part of a base model's file."""
        offer, file = request.path_params["offer"], request.path_params["file"]
        start = parse_range(request.headers.get("range", ""))
        if is_name(offer, 64) and is_name(file, 64) and self._offers is not None:
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

    # Replies

    async def count_reply(self, request: Request, session: Session) -> Response:
        """Say how many bytes of a reply have arrived."""
        order, upload = self._find_order(request, session), request.query_params.get("upload", "")
        session.uploads[order.id] = session.uploads.get(order.id, 0) + 1  # ends a request that still sends it
        return JSONResponse({"bytes": self._store.count_received(order, upload)})

    async def store_reply(self, request: Request, session: Session) -> Response:
        """Store a part of a reply as it arrives, so that what a broken connection has brought counts."""
        order, query = self._find_order(request, session), request.query_params
        if order.is_answered:
            return JSONResponse({"bytes": order.total})
        upload, start, total = query.get("upload", ""), query.get("start", ""), query.get("total", "")
        if not (is_name(upload, 32) and start.isdecimal() and total.isdecimal() and len(start + total) < 32):
            raise Refused(400, "not a part of a reply")
        if int(total) == 0:
            raise Refused(400, "a reply that is empty")
        if int(total) > order.reply_bytes:
            raise Refused(413, f"the reply to this order has at most {order.reply_bytes} bytes")
        length = read_length(request, CHUNK)
        if int(start) == 0:
            self._store.begin_reply(order, upload, int(total))
            order = order._replace(upload=upload, total=int(total))
        received = self._store.count_received(order, upload)
        if (int(start), int(total)) != (received, order.total) or received + length > order.total:
            raise Refused(409, "not the part that follows", bytes=received)
        number = session.uploads[order.id] = session.uploads.get(order.id, 0) + 1

        def append(data: bytes) -> None:
            session.seen = time.monotonic()
            if self.sessions.get(session.node) is not session:
                raise Refused(401, "the node has joined again")
            if session.uploads.get(order.id) != number or self._store.find_order(order.id, session.node) is None:
                raise Refused(409, "a later request sends this reply, or its run has ended", bytes=0)
            self._store.append(order, data)

        await read_body(request, self._limits, append)
        received = self._store.count_received(order, upload)
        if received == order.total:
            self._store.finish_reply(order)
            self._note_answer(order, session)
        return JSONResponse({"bytes": received})

    async def store_failure(self, request: Request, session: Session) -> Response:
        """Store why there is no reply."""
        reason = await self._read_text(request)
        order = self._find_order(request, session)
        if not order.is_answered:
            self._store.fail(order, escape_controls(reason[:_LONGEST_REASON]) or "it gives no reason")
            self._note_answer(order, session)
        return JSONResponse({})

    def _note_answer(self, order: Order, session: Session) -> None:
        session.uploads.pop(order.id, None)
        if (run := self.runs.get(order.run)) is not None:
            run.signal.set()

    # What a node does

    async def note_work(self, request: Request, session: Session) -> Response:
        """Store what a node does, as it says."""
        session.work = (await self._read_text(request))[:64]
        return JSONResponse({})

    async def leave(self, request: Request, session: Session) -> Response:
        """Store that a node was stopped."""
        log.info("node %d was stopped", session.node)
        session.has_left, session.seen = True, time.monotonic()
        session.end_polls()
        for run in self.runs.values():
            run.signal.set()
        return JSONResponse({})

    async def _read_text(self, request: Request) -> str:
        content = bytearray()
        await read_body(request, self._limits, content.extend)
        return content.decode(errors="replace")


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
