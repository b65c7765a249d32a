"""Open orders of asynchronous rounds through a grid: beside exchanges, and until each one ends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from fedspan.federation.protocol import Envelope, Orders
from helpers.reply_transport import exchanged

transport = pytest.importorskip(
    "fedspan.transports.flower.transport", reason="the extra fedspan[flower] is not installed"
)

pytestmark = pytest.mark.usefixtures("identity")

NODES = {"a": 1, "b": 2, "c": 3, "d": 4}


class Reply:
    """As much of a Flower message as is inspected."""

    def __init__(self, id: str, content: Any) -> None:
        self.metadata, self.content = self, content
        self.reply_to_message_id = id

    def has_error(self) -> bool:
        return False


class Grid:
    """Nodes that return the messages that they receive when the test says so.

    Like the real one, it cancels messages that it was asked for before, and is not asked for now.
    """

    def __init__(self, online: Iterable[int] = NODES.values()) -> None:
        self.online, self.silent = list(online), set[int]()
        self.sent: dict[str, Any] = {}
        self.cancelled, self._unanswered = set[str](), set[str]()
        self.repeated = list[Any]()

    def get_node_ids(self) -> list[int]:
        return self.online

    def push_messages(self, messages: list[Any]) -> list[str]:
        for message in messages:
            self.sent[f"m{len(self.sent)}"] = message
        return list(self.sent)[-len(messages) :]

    def pull_messages(self, ids: list[str]) -> list[Any]:
        self.cancelled |= self._unanswered - set(ids)
        assert not self.cancelled & set(ids)
        ready = [id for id in ids if self.get_node(id) not in self.silent]
        self._unanswered = set(ids) - set(ready)
        return [*self.repeated, *(Reply(id, self.sent[id].content) for id in ready)]

    def get_node(self, id: str) -> int:
        return int(self.sent[id].metadata.dst_node_id)


def make_orders(ids: str, task: str = "train", bytes: int | None = None) -> Orders:
    limit = None if bytes is None else lambda _: bytes
    return Orders(task, ids, lambda id: Envelope(f"{task} {id}"), limit)


def test_replies_to_open_orders_arrive_one_by_one_and_further_orders_beside_them() -> None:
    grid = Grid()
    found = transport.GridTransport(grid, NODES)
    grid.silent = {2, 3}
    found.send_orders(make_orders("abc"), 60.0)
    assert found.receive_reply() == ("a", Envelope("train a"))
    found.send_orders(make_orders("d"), 60.0)
    assert found.receive_reply() == ("d", Envelope("train d"))
    assert found.list_training() == {"b", "c"}
    grid.silent = {3}
    assert found.receive_reply() == ("b", Envelope("train b"))
    grid.silent = set()
    assert found.receive_reply() == ("c", Envelope("train c"))
    assert found.receive_reply() is None
    assert not grid.cancelled
    assert len(grid.sent) == 4


def test_an_exchange_cancels_no_open_order_and_loses_no_reply_to_one() -> None:
    """Also where the exchange ends early: it is enough when the first of its replies has arrived."""
    grid = Grid()
    found = transport.GridTransport(grid, NODES)
    grid.silent = {1, 2}
    found.send_orders(make_orders("ab"), 60.0)
    assert exchanged(found, {id: Envelope(id) for id in "cd"}, 60.0) == {id: Envelope(id) for id in "cd"}
    assert not grid.cancelled
    grid.silent = {2}
    assert len(exchanged(found, {id: Envelope(id) for id in "cd"}, 60.0, enough=1)) == 1
    assert found.list_training() == {"b"}  # the reply of a waits here
    assert found.retain_orders("ab") == {"a", "b"}
    assert found.receive_reply() == ("a", Envelope("train a"))
    grid.silent = set()
    assert found.receive_reply() == ("b", Envelope("train b"))
    assert found.receive_reply() is None


def test_a_second_reply_to_an_order_and_one_to_a_closed_order_do_not_count() -> None:
    grid = Grid()
    found = transport.GridTransport(grid, NODES)
    grid.silent = {2, 3}
    found.send_orders(make_orders("abc"), 60.0)
    assert found.receive_reply() == ("a", Envelope("train a"))
    assert found.retain_orders("bd") == {"b"}
    grid.repeated = [Reply(id, grid.sent[id].content) for id in ("m0", "m2")]  # of a, and of c, whose order is closed
    assert exchanged(found, {"d": Envelope("d")}, 60.0) == {"d": Envelope("d")}
    assert grid.cancelled == {"m2"}
    assert found.list_training() == {"b"}
    grid.repeated, grid.silent = [], set()
    assert found.receive_reply() == ("b", Envelope("train b"))
    assert found.receive_reply() is None


def test_a_reply_that_answers_another_order_is_not_its_client_s() -> None:
    """The nonce of an order is that of its reply: a node that is sent a further one cannot answer it with the first."""
    signing = pytest.importorskip("fedspan.transports.flower.signing")

    class Nonces(signing.UnsignedSigner):
        def __init__(self) -> None:
            self.number = 0

        def seal(self, envelope: Envelope, node: int) -> Any:
            self.number += 1
            return signing.Sealed(envelope, str(self.number).encode(), b"")

        def open(self, sealed: Any, node: int, nonce: bytes) -> Envelope:
            if sealed.nonce != nonce:
                raise ValueError("a reply to another order")
            return sealed.envelope

    grid = Grid()
    found = transport.GridTransport(grid, NODES, signer=Nonces())
    found.send_orders(make_orders("a"), 60.0)
    assert found.receive_reply() == ("a", Envelope("train a"))
    found.send_orders(make_orders("a"), 60.0)
    grid.sent["m1"] = grid.sent["m0"]  # what the node returns
    assert found.receive_reply() == ("a", "a reply to another order")
    assert found.receive_reply() is None


def test_who_is_offline_revoked_or_silent_is_given_up() -> None:
    revoked = list[int]()
    grid = Grid([1, 2, 3])
    found = transport.GridTransport(grid, NODES, reconnect_timeout=60.0, revoked=lambda: revoked)
    grid.silent = {1, 2, 3}
    began = time.monotonic()
    found.send_orders(make_orders("ad"), 60.0)
    assert found.receive_reply() == ("d", "its node is not online")
    revoked.append(1)
    assert found.receive_reply() == ("a", "its node's key was revoked")
    found.send_orders(make_orders("b"), 0.3)
    found.send_orders(make_orders("c"), 600.0)
    assert found.receive_reply() == ("b", "no reply within 0.3 s")
    assert time.monotonic() - began < 30
    assert found.list_training() == {"b", "c"}  # b may train on
    assert found.retain_orders("bc") == {"c"}
    grid.silent = {3}
    found.send_orders(make_orders("b"), 60.0)
    assert found.receive_reply() == ("b", Envelope("train b"))
    assert found.list_training() == {"c"}


def test_a_node_that_comes_back_in_time_receives_its_order_and_one_that_does_not_never_does() -> None:
    grid = Grid([1])
    found = transport.GridTransport(grid, NODES, reconnect_timeout=60.0)
    grid.silent = {1}
    found.send_orders(make_orders("ab"), 60.0, wait_for_offline=True)
    found.send_orders(make_orders("c"), 60.0, wait_for_offline=True)
    assert found.list_training() == {"a", "b", "c"}
    grid.online = [1, 2]
    assert found.receive_reply() == ("b", Envelope("train b"))
    assert found.retain_orders("abc") == {"a"}  # the round has ended, and the order to c is not sent any more
    grid.online, grid.silent = [1, 2, 3], set()
    assert found.receive_reply() == ("a", Envelope("train a"))
    assert found.receive_reply() is None
    assert len(grid.sent) == 2


def test_every_order_has_its_own_limit_of_the_reply() -> None:
    wire = pytest.importorskip("fedspan.transports.flower.wire")
    grid = Grid()
    found = transport.GridTransport(grid, NODES)
    found.send_orders(make_orders("a", bytes=1000), 60.0)
    found.send_orders(make_orders("b", bytes=2000), 60.0)
    limits = [wire.parse_reply_limit(message.metadata.group_id) for message in grid.sent.values()]
    assert limits[1] - limits[0] == 1000
