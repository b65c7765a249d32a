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
import secrets
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fedspan.errors import FedspanError
from fedspan.transports.http.connections import CONNECTIONS, Connections
from fedspan.transports.http.node_requests import SESSION, NodeRequests
from fedspan.transports.http.requests import (
    Handler,
    Refused,
    RequestLimits,
    Run,
    get_token,
    guard,
    is_name,
    log,
    read_length,
)
from fedspan.transports.http.store import RANDOM, Order, Store

_RUN_BYTES = 2**26
"""Maximum size of a request of the operator, in bytes."""


class OperatorRequests:
    """The requests with the server's secret; they and their answers are plain values."""

    def __init__(self, store: Store, secret: str, nodes: NodeRequests, limits: RequestLimits) -> None:
        self._store, self._secret, self._nodes, self._limits = store, secret, nodes, limits
        self._runs, self._started = nodes.runs, time.monotonic()

    def serve(self, handler: Callable[[Any, str], Awaitable[Any]]) -> Handler:
        """Return a handler for requests of the operator."""

        async def answer(request: Request) -> Response:
            if not hmac.compare_digest(get_token(request).encode(), self._secret.encode()):
                raise Refused(403, "only for the server's operator")
            length = read_length(request, _RUN_BYTES)
            self._nodes.connections.accept(request.client, b"operator", None)
            run, body = request.path_params.get("run", ""), await request.body() if length else b"null"
            if run:
                if run not in self._runs:
                    raise Refused(404, "no such run: it has ended")
                self._runs[run].seen = time.monotonic()
            return JSONResponse(await handler(json.loads(body), run))

        return guard(answer)

    async def list_nodes(self, _: Any, run: str) -> Any:
        """Return the nodes that have joined."""
        now, clock = time.monotonic(), time.time()
        return [
            {
                "node": session.node,
                "online": is_online,
                "online_seconds": now - session.since if is_online else 0.0,
                "offline_since": None if is_online else clock - (now - session.seen),
                "work": session.work,
                "sealing": base64.b64encode(session.sealing).decode(),
            }
            for session in self._nodes.sessions.values()
            for is_online in (self._nodes.is_online(session),)
        ]

    async def add_run(self, _: Any, run: str) -> Any:
        """Begin a run, and return its name."""
        run = secrets.token_hex(16)
        self._store.add_run(run)
        self._runs[run] = Run()
        return run

    async def add_orders(self, rows: Any, run: str) -> Any:
        """Store orders, and return their ids."""
        orders = [
            Order(secrets.token_hex(16), run, row["node"], base64.b64decode(row["head"]), row["body"], row["reply"])
            for row in rows
        ]
        for body in {order.body for order in orders} - {""}:
            name, random = body[: len(run)], body[len(run) :]
            if name != run or not is_name(random, RANDOM) or not (self._store.messages / body).is_file():
                raise Refused(409, "a body that is not there")
        self._store.add_orders(orders)
        for order in orders:
            if (session := self._nodes.sessions.get(order.node)) is not None:
                session.signal.set()
        return [order.id for order in orders]

    async def take_replies(self, asked: Any, run: str) -> Any:
        """Delete orders that are not awaited any more, and wait for replies to the others."""
        self._store.delete(run, asked["done"])
        state, awaited, limits = self._runs[run], set(asked["awaited"]), self._limits
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
        return [row for row in self._store.list_answered(run) if row[0] in awaited]

    def _list_lost(self, run: str, awaited: set[str]) -> list[tuple[str, str]]:
        """Return the orders whose nodes are offline for too long, or were stopped, with the reason."""
        lost, oldest = list[tuple[str, str]](), time.monotonic() - self._limits.offline - self._limits.reconnect
        for id, node in self._store.list_open(run):
            session = self._nodes.sessions.get(node)
            if id not in awaited or (session is not None and self._nodes.is_online(session)):
                continue
            if session is not None and session.has_left:
                lost.append((id, "its node was stopped"))
            elif (self._started if session is None else session.seen) < oldest:
                lost.append((id, "its node went offline"))
        return lost

    async def end_run(self, _: Any, run: str) -> Any:
        """End a run."""
        self._forget_run(run)
        return {}

    def sweep(self, now: float) -> None:
        """End the runs whose process is gone."""
        for run, state in list(self._runs.items()):
            if now - state.seen > self._limits.lease:
                log.info("run %s: its process is gone", run)
                self._forget_run(run)

    def _forget_run(self, run: str) -> None:
        self._store.end_run(run)
        del self._runs[run]


_PIECE = 2**16
"""Size in bytes of the pieces in which an answer is sent."""


class Server:
    """The requests of a server's nodes and of its operator (``NodeRequests``, ``OperatorRequests``)."""

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
        self._limits, self._connections = limits or RequestLimits(), connections
        self._runs = {run: Run() for run in store.list_runs()}
        self._nodes = NodeRequests(store, self._runs, read_keys, identity, self._limits, offers, connections)
        self._operator = OperatorRequests(store, secret, self._nodes, self._limits)
        nodes, operator = self._nodes, self._operator
        self._app = Starlette(
            routes=[
                Route("/v1/health", _report_health),
                Route("/v1/join", guard(nodes.join), methods=["POST"]),
                Route("/v1/order", nodes.serve(nodes.take_order, waits=True), methods=["POST"]),
                Route("/v1/order/{id}", nodes.serve(nodes.read_order)),
                Route("/v1/order/{id}/reply", nodes.serve(nodes.store_reply), methods=["PUT"]),
                Route("/v1/order/{id}/reply", nodes.serve(nodes.count_reply)),
                Route("/v1/order/{id}/failure", nodes.serve(nodes.store_failure), methods=["POST"]),
                Route("/v1/base/{offer}/{file}", nodes.serve(nodes.read_base)),
                Route("/v1/heartbeat", nodes.serve(nodes.note_work, waits=True), methods=["POST"]),
                Route("/v1/leave", nodes.serve(nodes.leave, waits=True), methods=["POST"]),
                Route("/v1/nodes", operator.serve(operator.list_nodes), methods=["POST"]),
                Route("/v1/runs", operator.serve(operator.add_run), methods=["POST"]),
                Route("/v1/runs/{run}/orders", operator.serve(operator.add_orders), methods=["POST"]),
                Route("/v1/runs/{run}/replies", operator.serve(operator.take_replies), methods=["POST"]),
                Route("/v1/runs/{run}/end", operator.serve(operator.end_run), methods=["POST"]),
            ],
            lifespan=self._live,
        )
        self._app.router.redirect_slashes = False  # a path has one spelling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; one whose answer is not read in time loses its connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seconds = self._limits.body_seconds

        async def send_in_time(message: Any) -> None:
            body = message.get("body", b"")
            try:
                async with asyncio.timeout(seconds + len(body) / self._limits.slowest):
                    for start in range(0, len(body), _PIECE):  # each waits until the one before it was read
                        piece = {**message, "body": body[start : start + _PIECE], "more_body": True}
                        async with asyncio.timeout(seconds):
                            await send(piece)
                        if (session := scope.get(SESSION)) is not None:
                            session.seen = time.monotonic()
                    await send({**message, "body": b""} if body else message)
            except TimeoutError:
                self._connections.abort(scope.get("client"))
                await asyncio.sleep(0.1)  # it is closed then, and uvicorn's log has no line about it

        await self._app(scope, receive, send_in_time)

    @asynccontextmanager
    async def _live(self, app: Starlette) -> AsyncGenerator[None]:
        task = asyncio.create_task(self._sweep())
        yield
        task.cancel()

    async def _sweep(self) -> None:
        """End, again and again, the runs and the sessions that are gone."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._limits.sweep)
            now = time.monotonic()
            for state in self._runs.values():  # this process stood still: renewals may wait to be read
                state.seen += max(0.0, now - before - self._limits.sweep)
            try:
                self._operator.sweep(now)
                self._nodes.sweep(now)
            except (FedspanError, sqlite3.Error, OSError) as error:
                log.warning("what is gone cannot be removed now: %s", error)


async def _report_health(request: Request) -> Response:
    return PlainTextResponse("ok")
