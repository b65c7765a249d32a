"""Arrivals from clients on machines of their own: who receives an order, and whose order occupies a place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedspan.core.values import ServerState
from fedspan.federation.arrival_sources import Arrival, NodeArrivals
from fedspan.federation.progress import OpenOrder, OpenOrders
from fedspan.federation.protocol import Envelope
from fedspan.federation.settings import BufferedSettings
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders

IDS = ("a", "b", "c", "d", "e", "f")


class Machines(AsynchronousTransport):
    """Clients that reply at once unless they are silent or offline."""

    def __init__(self, silent: Collection[str] = ()) -> None:
        self.silent, self.offline = set(silent), set[str]()
        self.open = dict[str, None]()
        self.overdue = set[str]()
        self.sent = list[list[str]]()
        self.waited = list[bool]()

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        raise AssertionError("no order is sent beside the open ones")

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        assert not self.open.keys() & set(orders)
        self.open |= dict.fromkeys(orders)
        self.sent.append(list(orders))
        self.waited.append(wait_for_offline)

    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        for id in self.open:
            if id not in self.silent | self.offline:
                del self.open[id]
                return id, Envelope(id)
        return None  # a real one waits until the deadline

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        self.open = {id: None for id in self.open if id in ids and id not in self.offline}
        return frozenset(self.open)

    def list_training(self) -> frozenset[str]:
        return frozenset(self.open)

    def list_stalled(self) -> frozenset[str]:
        return frozenset(self.overdue | (self.offline & self.open.keys()))

    def assume_training(self, ids: Collection[str]) -> None:
        self.overdue |= set(ids)


def make_arrivals(
    machines: Machines, concurrency: int, open: OpenOrders | None = None, round: int = 0, **buffered: Any
) -> NodeArrivals:
    settings = SimpleNamespace(buffered=BufferedSettings(concurrency=concurrency, **buffered), seed=1)
    context = SimpleNamespace(
        settings=settings,
        clients=dict.fromkeys(IDS),
        state=SimpleNamespace(round=round),
        rules=SimpleNamespace(deadline=60.0),
    )
    return NodeArrivals(cast(Any, context), machines, open or OpenOrders(), lambda order: Envelope(order.client), len)


def take_all(arrivals: NodeArrivals, count: int, attempt: int) -> list[Arrival]:
    """Replies up to a number; each is returned as soon as it arrives."""
    taken = list[Arrival]()
    while len(taken) < count and (arrived := arrivals.take(count - len(taken), attempt)):
        assert len(arrived) == 1
        taken += arrived
    return taken


def list_states(*rounds: int) -> Mapping[int, ServerState]:
    return {round: cast(Any, round) for round in rounds}


def test_clients_that_were_silent_receive_orders_but_take_no_other_client_s_place() -> None:
    """Four of six never reply, and two places are less than four."""
    machines, open = Machines(silent="abcd"), OpenOrders()
    machines.overdue = set("abcd")
    for round in range(12):
        arrivals = make_arrivals(machines, 2, open, round)
        assert sorted(order.client for order, _ in take_all(arrivals, 2, 0)) == ["e", "f"]
        open = arrivals.close(list_states(*range(round + 1)))
    assert {id for ids in machines.sent for id in ids} == set(IDS)


def test_offline_clients_that_a_retry_waits_for_take_no_other_client_s_place() -> None:
    machines = Machines()
    first = make_arrivals(machines, 2)._clients.draw_client()
    machines.offline = {first, "a" if first != "a" else "b"}
    arrivals = make_arrivals(machines, 1)
    assert len(take_all(arrivals, 4, 1)) == 4
    assert set(machines.waited) == {True}
    assert not {order.client for order, _ in arrivals.take(0, 1)} & machines.offline


def test_an_order_that_is_too_old_is_closed_and_its_client_may_train_on() -> None:
    machines = Machines(silent="abc")
    machines.open = dict.fromkeys("abc")
    orders = tuple(OpenOrder(id, round, 0, round, 0.0) for round, id in enumerate("abc"))
    arrivals = make_arrivals(machines, 3, OpenOrders(orders, 3), 3, max_staleness=2)
    assert machines.open.keys() == {"b", "c"}
    assert machines.overdue == {"a"}
    (old, *others) = take_all(arrivals, 2, 0)
    assert old == (orders[0], None)  # the round knows the reason
    assert len(others) == 1
    assert others[0].order.client in "def"
    assert {id for ids in machines.sent for id in ids} <= set("def")
    assert set(arrivals.close(list_states(1, 2, 3)).states) <= {1, 2, 3}


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_client_whose_order_is_lost_with_its_server_may_train_on(is_lost: bool) -> None:
    machines = Machines()
    machines.open = {} if is_lost else {"a": None}
    make_arrivals(machines, 3, OpenOrders((OpenOrder("a", 0, 0, 0, 0.0),), 1), 1)
    assert machines.overdue == ({"a"} if is_lost else set())
