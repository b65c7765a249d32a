"""Envelopes through a grid: who is waited for, and how long."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from helpers.pretend_grid import NODES, Grid, Reply
from helpers.reply_transport import exchanged

transport = pytest.importorskip(
    "fedspan.transports.flower.transport", reason="the extra fedspan[flower] is not installed"
)
deliveries = pytest.importorskip("fedspan.transports.flower.deliveries")
grid_module = pytest.importorskip("fedspan.transports.flower.grid")


pytestmark = pytest.mark.usefixtures("identity")


ENVELOPES = {id: Envelope(id) for id in "abc"}


def test_everybody_answers_in_any_order() -> None:
    found = transport.GridTransport(Grid([1, 2, 3], {1: 2}), NODES)
    assert exchanged(found, ENVELOPES, 10.0) == ENVELOPES


def test_who_has_enough_waits_for_nobody() -> None:
    found = transport.GridTransport(Grid([1, 2, 3], {3: 10**6}), NODES)
    began = time.monotonic()
    taken = exchanged(found, ENVELOPES, 60.0, enough=2)
    assert list(taken) == ["a", "b"]
    assert time.monotonic() - began < 10


def test_who_is_offline_is_given_up_at_once_or_after_so_much_patience() -> None:
    found = transport.GridTransport(Grid([1, 2], {}), NODES, reconnect_timeout=0.5)
    assert exchanged(found, ENVELOPES, 60.0)["c"] == "its node is not online"
    began = time.monotonic()
    back = exchanged(found, ENVELOPES, 60.0, wait_for_offline=True)
    assert back["c"] == "its node was not online for 0.5 s"
    assert 0.5 <= time.monotonic() - began < 10
    assert isinstance(back["a"], Envelope)


def test_who_comes_back_in_time_is_asked() -> None:
    grid = Grid([1, 2], {1: 3})
    found = transport.GridTransport(grid, NODES, reconnect_timeout=30.0)
    back: dict[str, Any] = {}

    def replied(id: str, envelope: Envelope | str) -> bool:
        back[id] = envelope
        grid.online = [1, 2, 3]
        return False

    found.exchange(Orders("train", ENVELOPES, ENVELOPES.__getitem__), replied, 60.0, wait_for_offline=True)
    assert set(back) == set(NODES)
    assert all(isinstance(one, Envelope) for one in back.values())


def test_nobody_waits_for_a_node_whose_key_was_revoked() -> None:
    gone: list[int] = []
    grid = Grid([1, 2], {2: 10**6})  # 3 is offline, 2 has its order and does not answer
    found = transport.GridTransport(grid, NODES, reconnect_timeout=60.0, revoked=lambda: gone)
    back: dict[str, Any] = {}

    def replied(id: str, envelope: Envelope | str) -> bool:
        back[id] = envelope
        gone[:] = [2, 3]
        return False

    began = time.monotonic()
    found.exchange(Orders("train", ENVELOPES, ENVELOPES.__getitem__), replied, 60.0, wait_for_offline=True)
    assert back == {"a": ENVELOPES["a"], "b": "its node's key was revoked", "c": "its node's key was revoked"}
    assert time.monotonic() - began < 10


def test_the_reason_of_a_node_s_failure_is_short_and_obeyed_by_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's errors are not signed, and anybody's words."""

    class Failing(Reply):
        error = SimpleNamespace(code=1000, reason="\x1b[2J\x1b]52;c;cm0gLXJmIC8=\x07" + "a" * (4 << 20))

        def has_error(self) -> bool:
            return True

    monkeypatch.setattr(Grid, "pull_messages", lambda self, ids: [Failing(id, None) for id in ids])
    back = exchanged(transport.GridTransport(Grid([1, 2, 3], {}), NODES), ENVELOPES, 10.0)
    for reason in back.values():
        assert isinstance(reason, str)
        assert reason.startswith(r"its node failed (Flower's code 1000: \x1b[2J\x1b]52")
        assert reason.isprintable()
        assert len(reason) < 1000


def test_who_hangs_is_given_up_at_the_deadline() -> None:
    found = transport.GridTransport(Grid([1, 2, 3], {3: 10**6}), NODES)
    assert exchanged(found, ENVELOPES, 0.5)["c"] == "no reply within 0.5 s"


def test_an_order_names_how_large_its_reply_may_be() -> None:
    sizes, grid = {"a": 0, "b": 5 << 20, "c": 7}, Grid([1, 2, 3], {})
    orders = Orders("train", ENVELOPES, ENVELOPES.__getitem__, sizes.__getitem__)
    transport.GridTransport(grid, NODES).exchange(orders, lambda *_: False, 10.0)
    groups = {message.metadata.dst_node_id: message.metadata.group_id for message in grid.sent.values()}
    assert groups == {NODES[id]: f"reply-bytes:{size + 2**20}" for id, size in sizes.items()}


def test_a_sent_message_whose_reply_is_not_requested_next_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the second reader of a shared grid are requested from the first call on."""
    adapter = pytest.importorskip("fedspan.transports.flower.adapter")
    grid, numbers, cancelled = object.__new__(grid_module.LimitedGrid), iter(range(9)), list[str]()
    for name, value in {
        "push_messages": lambda self, messages: [f"order {next(numbers)}" for _ in messages],
        "take_replies": lambda self, ids, seconds: [],
        "cancel_orders": lambda self, ids: cancelled.extend(ids),
    }.items():
        monkeypatch.setattr(adapter.TaskGrid, name, value)
    shared, order = grid_module.SharedGrid(grid), SimpleNamespace(metadata=SimpleNamespace(group_id=""))
    shared.side.push_messages([order])
    shared.push_messages([order, order])
    shared.pull_messages(["order 1"])
    assert cancelled == ["order 2"]
    shared.side.pull_messages([])
    shared.pull_messages([])
    assert cancelled == ["order 2", "order 0", "order 1"]


def test_objects_that_came_along_are_not_fetched_and_count() -> None:
    adapter = pytest.importorskip("fedspan.transports.flower.adapter")
    messages = pytest.importorskip("fedspan.transports.flower.messages")
    tree = adapter.ObjectTree(object_id="a", children=[adapter.ObjectTree(object_id="b")])
    known = {"a": b"12", "b": b"345", "of another message": b"6"}

    def pull(id: str) -> bytes:
        raise AssertionError(id)

    assert messages.fetch_objects(tree, pull, 5, known) == {"a": b"12", "b": b"345"}
    with pytest.raises(messages.TooLarge):
        messages.fetch_objects(tree, pull, 4, known)


def test_small_orders_share_requests_and_large_ones_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "BATCH", 3)
    monkeypatch.setattr(deliveries, "BATCH_BYTES", 10_000 + 3 * deliveries._OVERHEAD)
    bodies = {"a": 10, "b": 10, "c": 10, "d": 10, "e": 20_000, "f": 9_000, "g": 9_000}
    envelopes = {id: Envelope(id, bytes(size)) for id, size in bodies.items()}

    requests = list[int]()

    class Counting(Grid):
        def push_messages(self, messages: list[Any]) -> list[str]:
            requests.append(len(messages))
            return super().push_messages(messages)

    nodes = {id: number for number, id in enumerate(bodies)}
    grid = Counting(nodes.values(), {})
    assert exchanged(transport.GridTransport(grid, nodes), envelopes, 10.0) == envelopes
    assert requests == [3, 1, 1, 1, 1]


def test_an_order_that_the_superlink_does_not_take_is_sent_again() -> None:
    class Refusing(Grid):
        taken = 0

        def push_messages(self, messages: list[Any]) -> list[str]:
            self.taken += 1
            ids = super().push_messages(messages)
            return ["", *ids[1:]] if self.taken == 1 else ids

    grid = Refusing([1, 2, 3], {})
    found = exchanged(
        transport.GridTransport(grid, NODES, reconnect_timeout=5.0), ENVELOPES, 30.0, wait_for_offline=True
    )
    assert found == ENVELOPES
    assert grid.taken == 2


@pytest.mark.parametrize(("refusals", "status"), [(1, 409), (1, 503), (2, 409)])
def test_a_refused_batch_is_sent_again_at_once_under_other_names(refusals: int, status: int) -> None:
    class Refusing(Grid):
        bodies: tuple[Any, ...] = ()

        def push_messages(self, messages: list[Any]) -> list[str]:
            self.bodies = (*self.bodies, messages[0].content.object_id)
            if len(self.bodies) <= refusals:
                request = httpx.Request("POST", "https://a")
                raise httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status))
            return super().push_messages(messages)

    grid, found = Refusing([1, 2, 3], {}), dict[str, Any]()
    orders = Orders("train", ENVELOPES, ENVELOPES.__getitem__)
    transport.GridTransport(grid, NODES).exchange(orders, lambda id, reply: found.update({id: reply}), 10.0)
    assert found == (ENVELOPES if refusals == 1 else dict.fromkeys("abc", "the SuperLink did not take its order"))
    assert len(set(grid.bodies)) == len(grid.bodies) == 2


def test_a_node_that_has_not_decided_is_invited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_REINVITE_SECONDS", 0.2)
    undecided: set[int] = set()
    found: list[int] = []
    for node, _ in transport.invite(Grid([1, 2], {}), Envelope("hello"), 60.0, undecided=undecided):
        found.append(node)
        if node == 2:
            undecided.add(node)
        if len(found) == 4:
            break
    assert sorted(found) == [1, 2, 2, 2]
