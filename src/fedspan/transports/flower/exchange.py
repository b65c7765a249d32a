"""Requests that the door answers itself (``wire``): orders and replies with their objects, and answers that wait.

Whatever stores an order or a reply passes the door, so that it knows when a node or a run has something to fetch: a
request waits in the event loop, without a thread or a query, until then. What is stored stays in Flower's database.

An order counts as received when the node says so in its next request, or when its reply arrives. Until then the node
is sent it again, so that an order is not lost with the connection on which it was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from fedspan.transports.flower.adapter import GivenOrder, MessageStore, SentReplies
from fedspan.transports.flower.limits import Slot

__all__ = ["Exchange", "ExchangeLimits"]

R = TypeVar("R")


@dataclass(frozen=True)
class ExchangeLimits:
    """How long answers wait.

    Args:
        seconds: Seconds for which an answer waits at most.
        nodes: Number of nodes that are remembered; the one that has sent nothing for longest is forgotten, which costs
            a query when it sends something again.
        runs: Number of runs that are remembered.
        gather: Seconds for which an answer with replies waits for further ones.
        replies: Number of replies of an answer.
        check: Seconds after which all orders of a run are checked in the database, also for the replies that Flower
            itself makes for nodes that are no longer online.
        heartbeat: Seconds between two heartbeats of a node that are stored.
    """

    seconds: float = 20.0
    nodes: int = 8192
    runs: int = 64
    gather: float = 0.1
    replies: int = 64
    check: float = 5.0
    heartbeat: float = 5.0


_HEARTBEAT, _OPERATOR, _NODE = 0, 1, 2
"""Urgencies of requests. Those of nodes keep their order, so that none has more turns than another."""


class _Turns:
    """A lock that goes to the most urgent of those that wait, and among these to the first."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = count()

    @asynccontextmanager
    async def take(self, urgency: int) -> AsyncGenerator[None]:
        """Hold the lock for the duration of the context."""
        if self._taken:
            turn = asyncio.get_running_loop().create_future()
            heappush(self._waiting, (urgency, next(self._count), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)  # the lock stays taken
                return
        self._taken = False


@dataclass
class _Node:
    """What is known of a node.

    Args:
        news: Set unless it is known that no order waits for the node.
        given: The order that it was sent last; None: it has received it, or was sent none.
        ended: Set to end the request that waits; only a node's last one waits.
        lock: Held while an order is fetched.
    """

    news: asyncio.Event = field(default_factory=asyncio.Event)
    given: GivenOrder | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.news.set()


@dataclass
class _Run:
    """What is known of a run.

    Args:
        news: Set by a reply.
        ready: Ids of the orders to which there are replies.
        checked: Time at which all of its orders were last checked.
        sent: The replies that its server was sent last, and may not have received.
    """

    news: asyncio.Event = field(default_factory=asyncio.Event)
    ready: set[str] = field(default_factory=set)
    checked: float = float("-inf")
    sent: SentReplies | None = None


class Exchange:
    """The door's own requests.

    Args:
        store: The SuperLink's orders and replies.
        limits: How long answers wait.
    """

    def __init__(self, store: MessageStore, limits: ExchangeLimits | None = None) -> None:
        self.store, self.limits = store, limits or ExchangeLimits()
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._turns, self._thread = _Turns(), CapacityLimiter(1)
        self._heartbeats: OrderedDict[int, tuple[float, bytes]] = OrderedDict()

    async def call(self, function: Callable[..., R], *args: Any, urgency: int = _NODE) -> R:
        """Call a method of the store when it is its turn: SQLite has one writer, so further threads would only wait.

        Args:
            function: The method.
            args: Its arguments.
            urgency: Its place in the queue; a smaller one comes first.
        """
        async with self._turns.take(urgency):
            return await run_sync(function, *args, limiter=self._thread)

    async def acknowledge_heartbeat(self, body: bytes, node: int | None) -> bytes:
        """Process a heartbeat before anything else that waits: a node whose heartbeats are late counts as offline.

        Args:
            body: Flower's request.
            node: Flower's id of the node that sent it; None: any, without keys.

        Returns:
            Flower's answer; the last one, if the node sends heartbeats more often than it has to.

        Raises:
            ValueError: If it is no heartbeat of this node.
        """
        now = time.monotonic()
        if node is not None:
            last, answer = self._heartbeats.get(node, (float("-inf"), b""))
            if now - last < self.limits.heartbeat:
                return answer
        answer = await self.call(self.store.acknowledge_heartbeat, body, node, urgency=_HEARTBEAT)
        if node is not None:
            _recent(self._heartbeats, node, lambda: (now, answer), self.limits.nodes)
            self._heartbeats[node] = now, answer
        return answer

    async def find_task(self, token: str) -> Any:
        """Return the task of a run's server by its token; None: the token is not valid."""
        return await self.call(self.store.find_task, token, urgency=_OPERATOR)

    async def take_order(self, node: int, received: str, gone: Awaitable[object], slot: Slot | None = None) -> bytes:
        """Wait for an order for a node.

        Args:
            node: Flower's id of the node.
            received: Id of the last order that the node received as a whole; empty: none.
            gone: Ends when the node's connection is closed; it is cancelled.
            slot: The request's place among those of its node that are processed at once, which it leaves while it
                waits, and has again when the answer contains an order. None: there is no such limit.

        Returns:
            The order with its objects; empty: there was none in time, or the node has sent another request.
        """
        own = _recent(self._nodes, node, _Node, self.limits.nodes)
        own.ended.set()
        own.ended = ended = asyncio.Event()
        deadline = time.monotonic() + self.limits.seconds
        ends = [asyncio.ensure_future(gone), asyncio.ensure_future(ended.wait())]
        try:
            while not any(one.done() for one in ends):
                answer = await self._fetch(node, own, received, ended)
                if answer is not None:
                    return answer
                if slot is not None:
                    slot.leave()
                news = asyncio.ensure_future(own.news.wait())
                left = deadline - time.monotonic()
                await asyncio.wait([news, *ends], timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if time.monotonic() >= deadline or any(one.done() for one in ends):
                    break
                if slot is not None:
                    await slot.enter()
        finally:
            for one in ends:
                one.cancel()
        return b""

    async def _fetch(self, node: int, own: _Node, received: str, ended: asyncio.Event) -> bytes | None:
        """Return the order that the node has not received, or the next one; None: there is none, or `ended` is set."""
        async with own.lock:
            if ended.is_set():
                return None
            if own.given is not None and own.given.id == received:
                await self.call(self.store.delete, received)
            elif own.given is not None:
                answer = await self.call(self.store.repeat_order, own.given)
                if answer is not None:
                    return answer
            own.given = None
            if not own.news.is_set():
                return None
            own.news.clear()  # an order that is stored from here on sets it again
            try:
                taken = await self.call(self.store.take_order, node)
            except BaseException:
                own.news.set()  # an order may wait all the same: the next request looks for it
                raise
            if taken is None:
                return None
            own.news.set()  # there may be another one
            own.given, answer = taken
            return answer

    async def send_reply(self, node: int, request: Any, contents: Sequence[bytes]) -> bytes:
        """Store a node's reply with its objects.

        Args:
            node: Flower's id of the node.
            request: Flower's request with the reply without its content, from ``read_pushed_reply``.
            contents: Contents of its objects.

        Returns:
            Flower's answer.

        Raises:
            RunNotRunningException: If the run has ended.
            ValueError: If the reply or an object is not valid.
        """
        stored = await self.call(self.store.store_reply, request, contents)
        if stored.reply_to:
            own, run = self._nodes.get(node), self._runs.get(stored.run)
            if own is not None and own.given is not None and own.given.id == stored.reply_to:
                own.given = None
            if run is not None:
                run.ready.add(stored.reply_to)
                run.news.set()
        return stored.answer

    async def send_orders(self, task: Any, head: bytes, contents: Sequence[bytes]) -> bytes:
        """Store a run's orders with their objects, and wake up their nodes.

        Args:
            task: The task of the run's server.
            head: Flower's request, with the orders without their content.
            contents: Contents of their objects.

        Returns:
            Flower's answer.

        Raises:
            ValueError: If an order or an object is not valid.
        """
        nodes, answer = await self.call(self.store.store_orders, task, head, contents, urgency=_OPERATOR)
        for node in nodes & self._nodes.keys():
            self._nodes[node].news.set()
        return answer

    async def take_replies(self, task: Any, ids: Sequence[str], seconds: float) -> bytes:
        """Wait for replies to a run's orders.

        Args:
            task: The task of the run's server.
            ids: Ids of all orders whose replies the server waits for. It has received the replies that it was sent
                last, unless it waits for one of them still; then they are sent again.
            seconds: Seconds to wait.

        Returns:
            Flower's answer with the replies' objects; empty: there was no reply in time.
        """
        run = _recent(self._runs, task.run_id, _Run, self.limits.runs)
        expected, limits = set(ids), self.limits
        if run.sent is not None:
            if run.sent.orders & expected:
                return await self.call(self.store.repeat_replies, run.sent, urgency=_OPERATOR)
            sent, run.sent = run.sent, None
            await self.call(self.store.delete_replies, sent, urgency=_OPERATOR)
        deadline, gathered = time.monotonic() + min(seconds, limits.seconds), float("inf")
        while True:
            now = time.monotonic()
            run.ready &= expected  # nobody waits for the others any more
            if run.ready:
                gathered = min(gathered, now + limits.gather)
            until = min(deadline, gathered, run.checked + limits.check)
            if now >= until or len(run.ready) >= min(limits.replies, len(expected)):
                break
            run.news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(run.news.wait(), until - now)
        taken = set(sorted(run.ready)[: limits.replies])
        if now >= run.checked + limits.check:
            run.checked = now
            taken |= expected - run.ready
        run.ready -= taken
        if not taken:
            return b""
        sent, answer = await self.call(self.store.take_replies, task, taken, urgency=_OPERATOR)
        run.sent = sent if sent.orders else None
        return answer

    async def cancel_orders(self, task: Any, ids: Sequence[str]) -> bytes:
        """Delete a run's orders and the replies to them.

        Args:
            task: The task of the run's server.
            ids: Ids of the orders.

        Raises:
            ValueError: If an order is another run's.
        """
        await self.call(self.store.cancel_orders, task, ids, urgency=_OPERATOR)
        return b""

    def wake_nodes(self) -> None:
        """Let all nodes fetch orders: one may have been stored by Flower's own requests."""
        for own in self._nodes.values():
            own.news.set()

    def wake_runs(self) -> None:
        """Let all runs fetch replies: one may have been stored by Flower's own requests."""
        for run in self._runs.values():
            run.checked = float("-inf")
            run.news.set()


def _recent(known: OrderedDict[int, R], key: int, make: Callable[[], R], most: int) -> R:
    """Return the entry of a key, made if there is none, and forget the least recent beyond a number of entries."""
    entry = known.pop(key, None)
    known[key] = entry = make() if entry is None else entry
    while len(known) > most:
        known.popitem(last=False)
    return entry
