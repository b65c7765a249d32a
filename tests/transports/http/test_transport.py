"""Envelopes through a grid: who is waited for and how long, open orders, and two readers of one grid."""

import gc
import time
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fedspan.errors import FedspanError
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.transports.http import adapter, deliveries, messages, signing, transport, wire
from fedspan.transports.http import grid as grid_module
from helpers.pretend_grid import NODES, Grid, Reply
from helpers.reply_transport import exchanged

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


def test_after_the_object_that_exceeds_the_limit_no_other_is_fetched() -> None:
    tree = adapter.ObjectTree(object_id="a", children=[adapter.ObjectTree(object_id=f"{n}") for n in range(99)])
    pulled: list[str] = []

    def pull(id: str) -> bytes:
        pulled.append(id)
        return bytes(2**20)

    assert len(messages.fetch_objects(tree, pull, 100 * 2**20, {})) == len(pulled) == 100
    pulled.clear()
    with pytest.raises(messages.TooLarge, match="more than 2 MiB") as raised:
        messages.fetch_objects(tree, pull, 2 * 2**20, {})
    assert adapter.pull_failure(raised.value) == "more than 2 MiB, the maximum"
    assert len(pulled) < 30  # the third, and those that other threads had asked for


def test_two_readers_of_one_grid_get_their_own_replies() -> None:
    grid = Grid([1, 2, 3], {3: 1})
    shared = grid_module.SharedGrid(grid)
    invitations = transport.Invitations(shared.side, Envelope("hello"), known=[1, 2])
    assert list(invitations.send(60.0)) == []
    assert list(invitations.receive()) == []
    assert exchanged(transport.GridTransport(shared, NODES), {"a": Envelope("order")}, 10.0) == {"a": Envelope("order")}
    assert invitations.pending_nodes == {3}
    assert list(shared.pull_messages(())) == []
    assert [node for node, _ in invitations.receive()] == [3]
    assert not invitations.pending_nodes
    grid.online = [1, 2, 3, 4]
    assert list(invitations.send(60.0)) == []
    assert grid.sent["m2"].metadata.dst_node_id == 4  # each node is invited once
    grid.online = [1, 2, 4]
    assert list(invitations.send(60.0)) == []
    grid.online = [1, 2, 3, 4]
    assert list(invitations.send(60.0)) == []
    assert [message.metadata.dst_node_id for message in list(grid.sent.values())[-2:]] == [4, 3]  # 3 came back
    grid.online = [1, 2, 3]
    assert list(invitations.send(60.0)) == []
    assert invitations.pending_nodes == {3}  # who is offline is not waited for


def test_a_reply_that_is_held_for_the_other_reader_is_not_requested_again() -> None:
    grid = Grid([1, 2], {2: 2})
    shared = grid_module.SharedGrid(grid)
    invitations = transport.Invitations(shared.side, Envelope("hello"), known=[2])
    assert list(invitations.send(60.0)) == []
    assert list(invitations.receive()) == []
    assert exchanged(transport.GridTransport(shared, NODES), {"b": Envelope("order")}, 10.0) == {"b": Envelope("order")}
    assert grid.requests == [["m0", "m1"], ["m1"], ["m1"]]
    assert [node for node, _ in invitations.receive()] == [1]


@pytest.mark.parametrize(("size", "is_read"), [(1000, True), (1001, False)])
def test_a_server_reads_no_more_than_the_order_allows(
    size: int, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = adapter.ReplyHead("reply", "order", adapter.ObjectTree(object_id="reply"), {"reply": bytes(size)})
    grid = object.__new__(grid_module.LimitedGrid)
    for name, value in {
        "push_messages": lambda self, messages: ["order" for _ in messages],
        "take_replies": lambda self, ids, seconds: [head],
        "make_error": lambda self, order, reason: reason,
    }.items():
        monkeypatch.setattr(adapter.TaskGrid, name, value)
    monkeypatch.setattr(grid_module.LimitedGrid, "limit", 2000)
    monkeypatch.setattr(grid_module, "assemble_message", lambda id, contents, limit: f"{id} within {limit}")
    order = SimpleNamespace(metadata=SimpleNamespace(group_id="reply-bytes:1000"))
    assert grid.push_messages([order]) == ["order"]
    partial = grid_module.LimitedGrid._continue
    results: list[Any] = []

    def keep(self: Any, reply: Any) -> None:
        results.append(partial(self, reply))

    monkeypatch.setattr(grid_module.LimitedGrid, "_continue", keep)
    assert grid.pull_messages(["order"]) == []
    (result,) = results
    assert result == ("reply within 1000" if is_read else "the reply has more than 0.000953674 MiB, the maximum")


@pytest.mark.parametrize(
    ("status", "said"),
    [(500, "failed with status 500, perhaps because its disk is full.*--resume"), (401, "does not know this run")],
)
def test_a_run_ends_with_the_superlink_s_reason(
    status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    class Ended:
        def __init__(self, *_: object) -> None:
            pass

        def serve_task(self) -> Any:
            return nullcontext()

    monkeypatch.setattr(grid_module, "call_flower", lambda *_: {"run-id": "1"})
    monkeypatch.setattr(grid_module, "_take_over", lambda *_: "token")
    monkeypatch.setattr(grid_module, "LimitedGrid", Ended)
    link = SimpleNamespace(address="127.0.0.1:1", authority=None, secret=tmp_path / "secret")
    with pytest.raises(FedspanError, match=said), grid_module.attach(link, 1):
        raise httpx.HTTPStatusError("", request=httpx.Request("POST", "http://a"), response=httpx.Response(status))


FOUR = {"a": 1, "b": 2, "c": 3, "d": 4}


class OpenGrid:
    """Nodes that return the messages that they receive when the test says so.

    Like the real one, it cancels messages that were sent or that it was asked for before, and is not asked for now.
    """

    def __init__(self, online: Iterable[int] = FOUR.values()) -> None:
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
    grid = OpenGrid()
    grid_transport = transport.GridTransport(grid, FOUR)
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
    grid = OpenGrid()
    grid_transport = transport.GridTransport(grid, FOUR)
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
    grid = OpenGrid()
    grid_transport = transport.GridTransport(grid, FOUR)
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

    grid = OpenGrid()
    grid_transport = transport.GridTransport(grid, FOUR, signer=Nonces())
    grid_transport.send_orders(make_orders("a"), 60.0)
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    grid_transport.send_orders(make_orders("a"), 60.0)
    grid.sent["m1"] = grid.sent["m0"]  # what the node returns
    assert grid_transport.receive_reply() == ("a", "a reply to another order")
    assert grid_transport.receive_reply() is None


def test_clients_that_are_offline_revoked_or_silent_fail() -> None:
    revoked = list[int]()
    grid = OpenGrid([1, 2, 3])
    grid_transport = transport.GridTransport(grid, FOUR, reconnect_timeout=60.0, revoked=lambda: revoked)
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
    grid = OpenGrid([1])
    grid_transport = transport.GridTransport(grid, FOUR, reconnect_timeout=60.0)
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
    grid = OpenGrid()
    grid_transport = transport.GridTransport(grid, FOUR)
    grid_transport.send_orders(make_orders("a"), 60.0)
    exchanged(grid_transport, {"d": Envelope("d")}, 60.0)  # fetches both replies
    grid.silent = {2, 3}
    grid_transport.send_orders(make_orders("bc"), 60.0)
    assert grid_transport.receive_reply() == ("a", Envelope("train a"))
    assert grid_transport.retain_orders(()) == frozenset()
    exchanged(grid_transport, {"d": Envelope("d")}, 60.0)
    assert grid.cancelled == {"m2", "m3"}


def test_clients_that_are_assumed_to_train_are_stalled_until_they_answer() -> None:
    grid_transport = transport.GridTransport(OpenGrid(), FOUR)
    grid_transport.assume_training("ab")
    assert (grid_transport.list_training(), grid_transport.list_stalled()) == (set(), {"a", "b"})
    exchanged(grid_transport, {"b": Envelope("b")}, 60.0)
    assert grid_transport.list_stalled() == {"a"}


def test_an_order_that_is_open_holds_nothing_of_its_round() -> None:
    class Round:
        def create_order(self, id: str) -> Envelope:
            return Envelope(id)

    grid, round = OpenGrid(), Round()
    grid.silent = {1}
    grid_transport = transport.GridTransport(grid, FOUR)
    grid_transport.send_orders(Orders("train", "a", round.create_order), 60.0)
    reference = weakref.ref(round)
    del round
    gc.collect()
    assert grid_transport.list_training() == {"a"}
    assert reference() is None


def test_every_order_has_its_own_limit_of_the_reply() -> None:
    grid = OpenGrid()
    grid_transport = transport.GridTransport(grid, FOUR)
    grid_transport.send_orders(make_orders("a", bytes=1000), 60.0)
    grid_transport.send_orders(make_orders("b", bytes=2000), 60.0)
    limits = [wire.parse_reply_limit(message.metadata.group_id) for message in grid.sent.values()]
    assert limits[1] - limits[0] == 1000
