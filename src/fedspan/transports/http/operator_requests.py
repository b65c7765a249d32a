"""The requests of a server's operator, whose process runs on the server's machine: orders, and the replies to them."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fedspan.transports.http.node_requests import NodeRequests
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
