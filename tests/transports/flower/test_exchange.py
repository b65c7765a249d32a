"""Requests that the door answers itself: who is woken up, when, and how long an answer waits."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedspan[flower] is not installed")

from fedspan.transports.flower import adapter
from fedspan.transports.flower import exchange as exchanges

RUN = SimpleNamespace(run_id=5)


class Store:
    """A database with an order's id as its answer; counts the queries."""

    def __init__(self) -> None:
        self.orders: defaultdict[int, list[str]] = defaultdict(list)
        self.deleted, self.queries, self.asked = list[str](), 0, list[set[str]]()
        self.ended: set[str] = set()
        self.replied: set[str] = set()
        self.returned = list[tuple[int, str]]()
        self.unfinished: set[str] = set()

    def take_order(self, node: int) -> Any:
        self.queries += 1
        if not self.orders[node]:
            return None
        id = self.orders[node].pop(0)
        return adapter.SentOrder(id, b"", adapter.ObjectTree(), 0.0, 5), id.encode()

    def return_orders(self, node: int, received: str) -> None:
        self.returned.append((node, received))

    def repeat_order(self, order: Any) -> bytes | None:
        return None if order.id in self.ended else f"again {order.id}".encode()

    def delete(self, id: str) -> None:
        self.deleted.append(id)

    def acknowledge_heartbeat(self, body: bytes, node: int | None) -> bytes:
        self.deleted.append(f"heartbeat {node}")
        return b"acknowledged"

    def store_reply(self, request: bytes, contents: Sequence[bytes]) -> Any:
        id = request.decode()
        return adapter.StoredReply(RUN.run_id, id, id not in self.unfinished, b"stored")

    def is_push_finished(self, body: bytes) -> bool:
        return body.decode() not in self.unfinished

    def store_orders(self, task: Any, head: bytes, contents: Sequence[bytes]) -> tuple[set[int], bytes]:
        node, _, id = head.decode().partition(":")
        self.orders[int(node)].append(id)
        return {int(node)}, b"sent"

    def take_replies(self, task: Any, ids: set[str], grace: float, stopped: Iterable[int]) -> tuple[Any, bytes]:
        self.asked.append(ids)
        self.left = set(stopped)
        answer = ",".join(sorted(ids)).encode()
        return adapter.SentReplies(frozenset(ids & self.replied), answer, []), answer

    def repeat_replies(self, sent: Any) -> bytes:
        return b"again " + sent.head

    def delete_replies(self, sent: Any) -> None:
        self.deleted.append(sent.head.decode())


def make(**limits: Any) -> tuple[Any, Store]:
    store = Store()
    return exchanges.Exchange(store, exchanges.ExchangeLimits(**{"seconds": 30.0, **limits})), store


def take(exchange: Any, node: int = 7, received: str = "", gone: Awaitable[Any] | None = None) -> asyncio.Task[bytes]:
    return asyncio.ensure_future(exchange.take_order(node, received, gone or asyncio.Event().wait()))


async def settle() -> None:
    await asyncio.sleep(0.1)


async def test_the_orders_of_a_node_that_was_stopped_do_not_wait_until_it_is_back() -> None:
    exchange, store = make()
    await exchange.take_replies(RUN, ["a"], 0.0)
    assert store.left == set()
    waiting = asyncio.ensure_future(exchange.take_replies(RUN, ["a"], 20.0))
    await settle()
    exchange.note_departure(7)
    await asyncio.wait_for(waiting, 5)
    assert store.left == {7}
    take(exchange).cancel()
    order = take(exchange)
    await settle()
    await exchange.take_replies(RUN, ["a"], 0.0)
    exchange.wake_runs()
    await exchange.take_replies(RUN, ["a"], 0.0)
    assert store.left == set()
    order.cancel()


async def test_an_order_wakes_up_its_node_and_no_other() -> None:
    exchange, store = make()
    own, other = take(exchange), take(exchange, 8)
    await settle()
    assert not own.done()
    queries = store.queries
    assert await exchange.send_orders(RUN, b"7:first", []) == b"sent"
    assert await asyncio.wait_for(own, 5) == b"first"
    await settle()
    assert not other.done()
    assert store.queries == queries + 1
    other.cancel()


async def test_an_answer_without_an_order_comes_in_time_and_costs_one_query() -> None:
    exchange, store = make(seconds=0.3)
    began = time.monotonic()
    for _ in range(3):
        assert await take(exchange) == b""
    assert 0.9 <= time.monotonic() - began < 10
    assert store.queries == 1


async def test_an_order_that_was_not_received_is_sent_again_until_it_is() -> None:
    exchange, store = make(seconds=0.3)
    store.orders[7] = ["first", "second"]
    assert await take(exchange) == b"first"
    assert await take(exchange) == b"again first"
    assert await take(exchange, received="another") == b"again first"
    assert await take(exchange, received="first") == b"second"
    assert store.deleted == ["first"]
    assert await exchange.send_reply(7, b"second", []) == b"stored"
    assert await take(exchange, received="second") == b""
    assert store.deleted == ["first"]  # the reply deleted the other one


async def test_orders_of_a_superlink_that_ended_are_looked_up_with_a_node_s_first_request() -> None:
    exchange, store = make()
    store.orders[7] = ["first", "second"]
    assert await take(exchange, received="zeroth") == b"first"
    assert await take(exchange, received="first") == b"second"
    assert store.returned == [(7, "zeroth")]


async def test_an_order_that_has_ended_is_not_sent_again() -> None:
    exchange, store = make()
    store.orders[7], store.ended = ["first", "second"], {"first"}
    assert await take(exchange) == b"first"
    assert await take(exchange) == b"second"


async def test_an_order_is_found_after_a_failure_of_the_database() -> None:
    exchange, store = make(seconds=0.3)
    working, store.orders[7] = store.take_order, ["first"]

    def locked(node: int) -> Any:
        raise OSError("database is locked")

    store.take_order = locked
    with pytest.raises(OSError, match="locked"):
        await take(exchange)
    store.take_order = working
    assert await take(exchange) == b"first"


async def test_a_node_waits_with_one_request() -> None:
    """Each further one ends the one before: a node that sends many holds no more of them than one that sends one."""
    exchange, _ = make()
    requests = [take(exchange) for _ in range(50)]
    await settle()
    assert [one.done() for one in requests] == [*49 * [True], False]
    await exchange.send_orders(RUN, b"7:first", [])
    assert await requests[-1] == b"first"
    assert {one.result() for one in requests[:-1]} == {b""}


async def test_a_request_that_was_superseded_while_another_was_processed_fetches_nothing() -> None:
    exchange, store = make()
    store.orders[7] = ["first"]
    blocked = Event()
    occupied = asyncio.ensure_future(exchange.call(blocked.wait))
    requests = [take(exchange) for _ in range(3)]
    await settle()
    blocked.set()
    assert await asyncio.gather(occupied, *requests) == [True, b"first", b"", b"again first"]
    assert store.queries == 1


async def test_a_request_leaves_its_place_while_it_waits_and_has_it_again_with_its_order() -> None:
    class Slot:
        is_held = True

        async def enter(self) -> None:
            self.is_held = True

        def leave(self) -> None:
            self.is_held = False

    exchange, _ = make()
    slot = Slot()
    waiting = asyncio.ensure_future(exchange.take_order(7, "", asyncio.Event().wait(), slot))
    await settle()
    assert not slot.is_held
    await exchange.send_orders(RUN, b"7:first", [])
    assert await asyncio.wait_for(waiting, 5) == b"first"
    assert slot.is_held


async def test_a_node_that_is_gone_is_sent_nothing() -> None:
    exchange, store = make()
    gone = asyncio.Event()
    request = take(exchange, gone=gone.wait())
    await settle()
    gone.set()
    assert await request == b""
    await exchange.send_orders(RUN, b"7:first", [])
    assert store.orders[7] == ["first"]
    assert await take(exchange) == b"first"


async def test_a_node_that_was_forgotten_is_looked_up() -> None:
    exchange, store = make(seconds=0.1, nodes=2)
    for node in (1, 2, 3):
        assert await take(exchange, node) == b""
    store.orders[1].append("first")  # while nothing is known of the node
    assert await take(exchange, 1) == b"first"
    assert len(exchange._nodes) == 2


async def test_orders_that_were_stored_otherwise_are_found_when_somebody_says_so() -> None:
    exchange, store = make()
    request = take(exchange)
    await settle()
    store.orders[7].append("first")
    exchange.wake_nodes()
    assert await asyncio.wait_for(request, 5) == b"first"


async def test_replies_are_answered_together_and_those_of_others_are_not_asked_for() -> None:
    exchange, _ = make(check=60.0, gather=0.3)
    ids = ["a", "b", "c"]
    assert await exchange.take_replies(RUN, ids, 0.0) == b"a,b,c"  # nothing is known yet: all are checked
    waiting = asyncio.ensure_future(exchange.take_replies(RUN, ids, 20.0))
    await settle()
    assert not waiting.done()
    for id in (b"b", b"foreign", b"a"):
        await exchange.send_reply(7, id, [])
    assert await asyncio.wait_for(waiting, 5) == b"a,b"
    began = time.monotonic()
    assert await exchange.take_replies(RUN, ["c"], 0.3) == b""
    assert 0.3 <= time.monotonic() - began < 5
    assert exchange._runs[5].ready_ids == set()


async def test_replies_that_were_not_received_are_sent_again_until_they_are() -> None:
    exchange, store = make(check=60.0)
    store.replied = {"a", "b"}
    assert await exchange.take_replies(RUN, ["a", "b", "c"], 0.0) == b"a,b,c"
    assert await exchange.take_replies(RUN, ["a", "b", "c"], 0.0) == b"again a,b,c"
    assert store.deleted == []
    assert await exchange.take_replies(RUN, ["c"], 0.0) == b""
    assert store.deleted == ["a,b,c"]
    assert await exchange.take_replies(RUN, ["c"], 0.0) == b""
    assert store.deleted == ["a,b,c"]


async def test_an_unfinished_reply_is_answered_with_its_last_object() -> None:
    exchange, store = make()
    await exchange.take_replies(RUN, ["a"], 0.0)
    store.unfinished = {"a"}
    waiting = asyncio.ensure_future(exchange.take_replies(RUN, ["a"], 20.0))
    await exchange.send_reply(7, b"a", [])
    await exchange.note_object(b"a")
    await settle()
    assert not waiting.done()
    store.unfinished = set()
    await exchange.note_object(b"a")
    assert await asyncio.wait_for(waiting, 5) == b"a"


async def test_the_order_of_an_unfinished_reply_returns_to_a_new_process_of_its_node() -> None:
    exchange, store = make()
    store.orders[7] = ["a"]
    assert await take(exchange) == b"a"
    store.unfinished, store.returned = {"a"}, []
    await exchange.send_reply(7, b"a", [])
    same = take(exchange, received="a")  # the process that sends the reply
    await settle()
    assert store.returned == []
    new = take(exchange)
    await settle()
    assert store.returned == [(7, "")]
    assert await same == b""
    await exchange.send_orders(RUN, b"7:a", [])
    assert await new == b"a"
    store.unfinished = set()
    await exchange.send_reply(7, b"a", [])
    following = take(exchange, received="")
    await settle()
    assert store.returned == [(7, "")]
    following.cancel()


async def test_the_last_reply_is_answered_at_once() -> None:
    exchange, _ = make(check=60.0, gather=30.0)
    await exchange.take_replies(RUN, ["a", "b"], 0.0)
    waiting = asyncio.ensure_future(exchange.take_replies(RUN, ["a", "b"], 20.0))
    for id in (b"a", b"b"):
        await exchange.send_reply(7, id, [])
    assert await asyncio.wait_for(waiting, 5) == b"a,b"


async def test_an_answer_has_few_replies_and_all_orders_are_checked_now_and_then() -> None:
    exchange, _ = make(replies=2, check=0.5)
    ids = [f"{number}" for number in range(6)]
    await exchange.take_replies(RUN, ids, 0.0)
    for id in ids[:4]:
        await exchange.send_reply(7, id.encode(), [])
    assert await exchange.take_replies(RUN, ids, 20.0) == b"0,1"
    assert await exchange.take_replies(RUN, ids, 20.0) == b"2,3"
    assert await exchange.take_replies(RUN, ids[4:], 20.0) == b"4,5"  # after `check` seconds, without a reply


async def test_replies_that_were_stored_otherwise_are_found_when_somebody_says_so() -> None:
    exchange, _ = make(check=60.0)
    await exchange.take_replies(RUN, ["a"], 0.0)
    waiting = asyncio.ensure_future(exchange.take_replies(RUN, ["a"], 20.0))
    await settle()
    exchange.wake_runs()
    assert await asyncio.wait_for(waiting, 5) == b"a"


async def test_heartbeats_come_first_then_the_operator_and_nodes_in_their_order() -> None:
    exchange, _ = make()
    done = list[str]()
    blocked = Event()
    first = asyncio.ensure_future(exchange.call(blocked.wait))
    await settle()
    others = [
        asyncio.ensure_future(exchange.call(done.append, name, urgency=urgency))
        for name, urgency in (("a", 2), ("b", 2), ("operator", 1), ("c", 2), ("heartbeat", 0))
    ]
    await settle()
    others[1].cancel()
    blocked.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert done == ["heartbeat", "operator", "a", "c"]
    assert await exchange.call(len, "free") == 4


async def test_a_node_that_sends_heartbeats_all_the_time_costs_one_now_and_then() -> None:
    exchange, store = make(heartbeat=0.25)
    for node in (7, 7, 8, 7):
        assert await exchange.acknowledge_heartbeat(b"", node) == b"acknowledged"
    assert store.deleted == ["heartbeat 7", "heartbeat 8"]
    await asyncio.sleep(0.3)
    await exchange.acknowledge_heartbeat(b"", 7)
    assert store.deleted[2:] == ["heartbeat 7"]
