"""Requests that the door answers itself (``wire``): orders and replies with their objects, and answers that wait.

Whatever stores an order or a reply passes the door, so that it knows when a node or a run has something to fetch: a
request waits in the event loop, without a thread or a query, until then. What is stored stays in Flower's database.

An order counts as received when the node says so in its next request, or when its reply arrives. Until then the node
is sent it again, so that an order is not lost with the connection on which it was sent, nor with this process: what a
node was sent by the SuperLink before it restarted is looked up with the node's first request.
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

from fedspan.transports.flower.adapter import MessageStore, SentOrder, SentReplies
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
        reconnect: Seconds for which an order waits for a node that is offline, unless the node was stopped.
    """

    seconds: float = 20.0
    nodes: int = 8192
    runs: int = 64
    gather: float = 0.1
    replies: int = 64
    check: float = 5.0
    heartbeat: float = 5.0
    reconnect: float = 60.0


_HEARTBEAT, _OPERATOR, _NODE = 0, 1, 2
"""Urgencies of requests. Those of nodes keep their order, so that none has more turns than another."""


class _Turns:
    """A lock that goes to the most urgent of those that wait, and among these to the first."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = count()

    @asynccontextmanager
    async def take(self, urgency: int) -> AsyncGenerator[None]:
        """Hold the lock for the duration of the context."""
        if self._is_held:
            turn = asyncio.get_running_loop().create_future()
            heappush(self._waiting, (urgency, next(self._count), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)  # the lock stays held
                return
        self._is_held = False


@dataclass
class _Node:
    """The state of a node.

    Args:
        order_signal: Set unless the node is known to have no order waiting.
        is_known: Whether ``last_order`` is known; otherwise a SuperLink that ended since may have sent one.
        last_order: The last order sent to the node; None: it has received that order, or none was sent.
        unfinished: Id of the order to which the node sends its reply in pieces; empty: none.
        cancellation: Set to end the waiting request; only a node's latest request waits.
        lock: Held while an order is fetched.
    """

    order_signal: asyncio.Event = field(default_factory=asyncio.Event)
    is_known: bool = False
    last_order: SentOrder | None = None
    unfinished: str = ""
    cancellation: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.order_signal.set()


@dataclass
class _Run:
    """The state of a run.

    Args:
        reply_signal: Set when a reply is stored.
        ready_ids: Ids of the orders to which there are replies.
        checked_at: Time at which all orders of the run were last checked.
        last_replies: The replies sent last to the run's server, which may not have received them.
    """

    reply_signal: asyncio.Event = field(default_factory=asyncio.Event)
    ready_ids: set[str] = field(default_factory=set)
    checked_at: float = float("-inf")
    last_replies: SentReplies | None = None


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
        self._left: OrderedDict[int, None] = OrderedDict()
        """The nodes that were stopped and have not come back."""

    async def call(self, function: Callable[..., R], *args: Any, urgency: int = _NODE) -> R:
        """Call a method of the store when its turn comes: SQLite has one writer, so further threads would only wait.

        Args:
            function: The method to call.
            args: Positional arguments of the method.
            urgency: Priority of the call in the queue; smaller values come first.
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
            _get_recent(self._heartbeats, node, lambda: (now, answer), self.limits.nodes)
            self._heartbeats[node] = now, answer
        return answer

    async def find_task(self, token: str) -> Any:
        """Return the task of a run's server by its token; None: the token is not valid."""
        return await self.call(self.store.find_task, token, urgency=_OPERATOR)

    async def take_order(
        self, node: int, received: str, disconnect: Awaitable[object], slot: Slot | None = None
    ) -> bytes:
        """Wait for an order for a node.

        Args:
            node: Flower's id of the node.
            received: Id of the last order that the node received as a whole; empty: none.
            disconnect: Completes when the node's connection is closed; cancelled when the answer is ready.
            slot: The request's slot among the node's concurrent requests. It is released during the wait and held again
                when the answer contains an order. None: no limit.

        Returns:
            The order with its objects; empty: no order arrived in time, or the node has sent another request.
        """
        state = _get_recent(self._nodes, node, _Node, self.limits.nodes)
        self._left.pop(node, None)
        state.cancellation.set()
        state.cancellation = cancellation = asyncio.Event()
        deadline = time.monotonic() + self.limits.seconds
        interrupts = [asyncio.ensure_future(disconnect), asyncio.ensure_future(cancellation.wait())]
        try:
            while not any(interrupt.done() for interrupt in interrupts):
                answer = await self._fetch(node, state, received, cancellation)
                if answer is not None:
                    return answer
                if slot is not None:
                    slot.leave()
                order_wait = asyncio.ensure_future(state.order_signal.wait())
                left = deadline - time.monotonic()
                await asyncio.wait([order_wait, *interrupts], timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
                order_wait.cancel()
                if time.monotonic() >= deadline or any(interrupt.done() for interrupt in interrupts):
                    break
                if slot is not None:
                    await slot.enter()
        finally:
            for interrupt in interrupts:
                interrupt.cancel()
        return b""

    async def _fetch(self, node: int, state: _Node, received: str, cancellation: asyncio.Event) -> bytes | None:
        """Return the order that the node has not received, or the next one; None: no order, or it was cancelled."""
        async with state.lock:
            if cancellation.is_set():
                return None
            if not state.is_known or state.unfinished not in ("", received):  # a new process of the node
                await self.call(self.store.return_orders, node, received)
                state.is_known, state.unfinished = True, ""
                state.order_signal.set()
            if state.last_order is not None and state.last_order.id == received:
                await self.call(self.store.delete, received)
            elif state.last_order is not None:
                answer = await self.call(self.store.repeat_order, state.last_order)
                if answer is not None:
                    return answer
            state.last_order = None
            if not state.order_signal.is_set():
                return None
            state.order_signal.clear()  # an order that is stored from here on sets it again
            try:
                result = await self.call(self.store.take_order, node)
            except BaseException:
                state.order_signal.set()  # an order may be waiting all the same: the next request checks
                raise
            if result is None:
                return None
            state.order_signal.set()  # there may be another one
            state.last_order, answer = result
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
            state, run = self._nodes.get(node), self._runs.get(stored.run)
            if state is not None:
                state.unfinished = "" if stored.is_complete else stored.reply_to
                if state.last_order is not None and state.last_order.id == stored.reply_to:
                    state.last_order = None
            if run is not None and stored.is_complete:
                run.ready_ids.add(stored.reply_to)
                run.reply_signal.set()
        return stored.answer

    async def note_object(self, body: bytes) -> None:
        """Note that a node has pushed an object of a reply: with the last one, the run's server can take the reply.

        Args:
            body: Flower's request with the object.
        """
        if await self.call(self.store.is_push_finished, body):
            self.wake_runs()

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
            self._nodes[node].order_signal.set()
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
        run = _get_recent(self._runs, task.run_id, _Run, self.limits.runs)
        expected, limits = set(ids), self.limits
        if run.last_replies is not None:
            if run.last_replies.orders & expected:
                return await self.call(self.store.repeat_replies, run.last_replies, urgency=_OPERATOR)
            sent, run.last_replies = run.last_replies, None
            await self.call(self.store.delete_replies, sent, urgency=_OPERATOR)
        deadline, gather_deadline = time.monotonic() + min(seconds, limits.seconds), float("inf")
        while True:
            now = time.monotonic()
            run.ready_ids &= expected  # the others are no longer awaited
            if run.ready_ids:
                gather_deadline = min(gather_deadline, now + limits.gather)
            until = min(deadline, gather_deadline, run.checked_at + limits.check)
            if now >= until or len(run.ready_ids) >= min(limits.replies, len(expected)):
                break
            run.reply_signal.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(run.reply_signal.wait(), until - now)
        ids_to_take = set(sorted(run.ready_ids)[: limits.replies])
        if now >= run.checked_at + limits.check:
            run.checked_at = now
            ids_to_take |= expected - run.ready_ids
        run.ready_ids -= ids_to_take
        if not ids_to_take:
            return b""
        left = frozenset(self._left)
        sent, answer = await self.call(
            self.store.take_replies, task, ids_to_take, limits.reconnect, left, urgency=_OPERATOR
        )
        run.last_replies = sent if sent.orders else None
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

    def note_departure(self, node: int) -> None:
        """Note that a node was stopped: its orders do not wait until it is back."""
        _get_recent(self._left, node, lambda: None, self.limits.nodes)
        self.wake_runs()

    def wake_nodes(self) -> None:
        """Let all nodes fetch orders: one may have been stored by Flower's own requests."""
        for state in self._nodes.values():
            state.order_signal.set()

    def wake_runs(self) -> None:
        """Let all runs fetch replies: one may have been stored by Flower's own requests."""
        for run in self._runs.values():
            run.checked_at = float("-inf")
            run.reply_signal.set()


def _get_recent(entries: OrderedDict[int, R], key: int, make: Callable[[], R], maximum: int) -> R:
    """Return the entry of a key, made if there is none, and forget the least recent beyond a number of entries."""
    entry = entries.pop(key, None)
    entries[key] = entry = make() if entry is None else entry
    while len(entries) > maximum:
        entries.popitem(last=False)
    return entry
