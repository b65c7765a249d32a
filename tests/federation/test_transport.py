"""The orders of an exchange, created when they are asked for, and what a transport need not say of itself."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from fedspan.core.values import ServerState
from fedspan.federation.progress import OpenOrders, Progress
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders, Transport


class Silent(Transport):
    """Whose clients never reply."""

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        """Send nothing."""


class SilentLater(AsynchronousTransport, Silent):
    """The same with open orders."""

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        """Send nothing."""

    def receive_reply(self) -> None:
        """Receive nothing."""

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        return frozenset(ids)

    def list_training(self) -> frozenset[str]:
        return frozenset()

    def list_stalled(self) -> frozenset[str]:
        return frozenset()

    def assume_training(self, ids: Collection[str]) -> None:
        """Assume nothing."""


def test_an_order_is_created_on_access_and_each_time() -> None:
    created: list[str] = []

    def create(id: str) -> Envelope:
        created.append(id)
        return Envelope(id.upper())

    orders = Orders("train", iter(["b", "a", "b"]), create)
    assert (list(orders), len(orders), "a" in orders, "c" in orders) == (["b", "a"], 2, True, False)
    assert created == []
    assert orders["a"] == Envelope("A")
    assert dict(orders) == {"b": Envelope("B"), "a": Envelope("A")}
    assert created == ["a", "b", "a"]
    with pytest.raises(KeyError, match="c"):
        orders["c"]
    assert created == ["a", "b", "a"]


def test_orders_of_another_function_go_to_the_same_clients_with_the_same_limits() -> None:
    orders = Orders("evaluate", ["a", "b"], Envelope, {"a": 5, "b": 0}.__getitem__)
    changed = orders.replace_make(lambda id: Envelope(f"<{orders[id].header}>"))
    assert dict(changed) == {"a": Envelope("<a>"), "b": Envelope("<b>")}
    assert changed.task == "evaluate"
    assert [changed.compute_reply_bytes(id) for id in "ab"] == [5, 0]
    assert Orders("evaluate", ["a"], Envelope).compute_reply_bytes("a") is None


def test_by_default_a_transport_stores_no_states_has_no_clock_and_leaves_no_order_open() -> None:
    transport = Silent()
    transport.begin(Progress(ServerState()))
    assert transport.accept_replies(["a"]) == {}
    assert transport.get_simulated_seconds() is None
    assert transport.retain_orders(["a"]) == transport.list_training() == transport.list_stalled() == frozenset()
    open = OpenOrders(number=3, states={1: ServerState(1)})
    assert transport.select_resumable(open) is open


def test_clients_of_other_processes_cannot_be_watched() -> None:
    with pytest.raises(ValueError, match="clients in other processes cannot be watched"):
        Silent().begin(Progress(ServerState()), lambda assignment, trained: None)


def test_a_resumed_asynchronous_run_needs_no_states_of_the_server() -> None:
    """The clients' own machines hold those that they train."""
    open = OpenOrders(number=3, clock=2.5, states={1: ServerState(1)})
    assert SilentLater().select_resumable(open) == OpenOrders(number=3, clock=2.5)
