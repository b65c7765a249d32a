"""Open orders of asynchronous rounds through a grid: beside exchanges, and until each one ends."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
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

    Like the real one, it cancels messages that were sent or that it was asked for before, and is not asked for now.
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
        ids = list(self.sent)[-len(messages) :]
        self._unanswered |= set(ids)
        return ids

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
    grid_transport = transport.GridTransport(grid, NODES)
    grid.silent = {2, 3}
    grid_transport.send_orders(make_orders("abc"), 60.0)
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    grid_transport.send_orders(make_orders("d"), 60.0)
    assert grid_transport.receive_reply() == ("d", Envelope("train d"))
    assert grid_transport.list_training() == {"b", "c"}
    grid.silent = {3}
    assert grid_transport.receive_reply() == ("b", Envelope("train b"))
    grid.silent = set()
    assert grid_transport.receive_reply() == ("c", Envelope("train c"))
    assert grid_transport.receive_reply() is None
    assert not grid.cancelled
    assert len(grid.sent) == 4


def test_an_exchange_cancels_no_open_order_and_loses_no_reply_to_one() -> None:
    """Also where the exchange ends early: it is enough when the first of its replies has arrived."""
    grid = Grid()
    grid_transport = transport.GridTransport(grid, NODES)
    grid.silent = {1, 2}
    grid_transport.send_orders(make_orders("ab"), 60.0)
    assert exchanged(grid_transport, {id: Envelope(id) for id in "cd"}, 60.0) == {id: Envelope(id) for id in "cd"}
    assert not grid.cancelled
    grid.silent = {2}
    assert len(exchanged(grid_transport, {id: Envelope(id) for id in "cd"}, 60.0, enough=1)) == 1
    assert grid_transport.list_training() == {"b"}  # the reply of a waits here
    assert grid_transport.retain_orders("ab") == {"a", "b"}
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    grid.silent = set()
    assert grid_transport.receive_reply() == ("b", Envelope("train b"))
    assert grid_transport.receive_reply() is None


def test_a_second_reply_to_an_order_and_one_to_a_closed_order_do_not_count() -> None:
    grid = Grid()
    grid_transport = transport.GridTransport(grid, NODES)
    grid.silent = {2, 3}
    grid_transport.send_orders(make_orders("abc"), 60.0)
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    assert grid_transport.retain_orders("bd") == {"b"}
    grid.repeated = [Reply(id, grid.sent[id].content) for id in ("m0", "m2")]  # of a, and of c, whose order is closed
    assert exchanged(grid_transport, {"d": Envelope("d")}, 60.0) == {"d": Envelope("d")}
    assert grid.cancelled == {"m2"}
    assert grid_transport.list_training() == {"b"}
    grid.repeated, grid.silent = [], set()
    assert grid_transport.receive_reply() == ("b", Envelope("train b"))
    assert grid_transport.receive_reply() is None


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
    grid_transport = transport.GridTransport(grid, NODES, signer=Nonces())
    grid_transport.send_orders(make_orders("a"), 60.0)
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    grid_transport.send_orders(make_orders("a"), 60.0)
    grid.sent["m1"] = grid.sent["m0"]  # what the node returns
    assert grid_transport.receive_reply() == ("a", "a reply to another order")
    assert grid_transport.receive_reply() is None


def test_clients_that_are_offline_revoked_or_silent_fail() -> None:
    revoked = list[int]()
    grid = Grid([1, 2, 3])
    grid_transport = transport.GridTransport(grid, NODES, reconnect_timeout=60.0, revoked=lambda: revoked)
    grid.silent = {1, 2, 3}
    began = time.monotonic()
    grid_transport.send_orders(make_orders("ad"), 60.0)
    assert grid_transport.receive_reply() == ("d", "its node is not online")
    revoked.append(1)
    assert grid_transport.receive_reply() == ("a", "its node's key was revoked")
    grid_transport.send_orders(make_orders("b"), 0.3)
    grid_transport.send_orders(make_orders("c"), 600.0)
    assert grid_transport.receive_reply() == ("b", "no reply within 0.3 s")
    assert time.monotonic() - began < 30
    assert (grid_transport.list_training(), grid_transport.list_stalled()) == ({"c"}, {"b"})  # b may train on
    assert grid_transport.retain_orders("bc") == {"c"}
    grid.silent = {3}
    grid_transport.send_orders(make_orders("b"), 60.0)
    assert grid_transport.receive_reply() == ("b", Envelope("train b"))
    assert (grid_transport.list_training(), grid_transport.list_stalled()) == ({"c"}, set())


def test_a_node_that_comes_back_in_time_receives_its_order_and_one_that_does_not_never_does() -> None:
    grid = Grid([1])
    grid_transport = transport.GridTransport(grid, NODES, reconnect_timeout=60.0)
    grid.silent = {1}
    grid_transport.send_orders(make_orders("ab"), 60.0, wait_for_offline=True)
    grid_transport.send_orders(make_orders("c"), 60.0, wait_for_offline=True)
    assert (grid_transport.list_training(), grid_transport.list_stalled()) == ({"a", "b", "c"}, {"b", "c"})
    grid.online = [1, 2]
    assert grid_transport.receive_reply() == ("b", Envelope("train b"))
    assert grid_transport.retain_orders("abc") == {"a"}  # the round has ended, and the order to c is not sent any more
    grid.online, grid.silent = [1, 2, 3], set()
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    assert grid_transport.receive_reply() is None
    assert len(grid.sent) == 2


def test_orders_that_are_closed_before_their_replies_were_requested_are_cancelled() -> None:
    """As at the end of a run: the last round sends orders, and takes replies that an evaluation has fetched."""
    grid = Grid()
    grid_transport = transport.GridTransport(grid, NODES)
    grid_transport.send_orders(make_orders("a"), 60.0)
    exchanged(grid_transport, {"d": Envelope("d")}, 60.0)  # fetches both replies
    grid.silent = {2, 3}
    grid_transport.send_orders(make_orders("bc"), 60.0)
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    assert grid_transport.retain_orders(()) == frozenset()
    exchanged(grid_transport, {"d": Envelope("d")}, 60.0)
    assert grid.cancelled == {"m2", "m3"}


def test_clients_that_are_assumed_to_train_are_stalled_until_they_answer() -> None:
    grid_transport = transport.GridTransport(Grid(), NODES)
    grid_transport.assume_training("ab")
    assert (grid_transport.list_training(), grid_transport.list_stalled()) == (set(), {"a", "b"})
    exchanged(grid_transport, {"b": Envelope("b")}, 60.0)
    assert grid_transport.list_stalled() == {"a"}


def test_an_order_that_is_open_holds_nothing_of_its_round() -> None:
    class Round:
        def create_order(self, id: str) -> Envelope:
            return Envelope(id)

    grid, round = Grid(), Round()
    grid.silent = {1}
    grid_transport = transport.GridTransport(grid, NODES)
    grid_transport.send_orders(Orders("train", "a", round.create_order), 60.0)
    reference = weakref.ref(round)
    del round
    gc.collect()
    assert grid_transport.list_training() == {"a"}
    assert reference() is None


def test_every_order_has_its_own_limit_of_the_reply() -> None:
    wire = pytest.importorskip("fedspan.transports.flower.wire")
    grid = Grid()
    grid_transport = transport.GridTransport(grid, NODES)
    grid_transport.send_orders(make_orders("a", bytes=1000), 60.0)
    grid_transport.send_orders(make_orders("b", bytes=2000), 60.0)
    limits = [wire.parse_reply_limit(message.metadata.group_id) for message in grid.sent.values()]
    assert limits[1] - limits[0] == 1000
