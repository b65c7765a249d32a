"""Envelopes to nodes through a server: who is waited for and how long, open orders, and invitations beside them."""

import gc
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.transports.http import invitations, transport
from fedspan.transports.http.server import OutgoingOrder, Taken
from fedspan.transports.http.signing import MARGIN, UnsignedSigner
from helpers.reply_transport import exchanged

NODES = {"a": 1, "b": 2, "c": 3}
FOUR = {**NODES, "d": 4}
ENVELOPES = {id: Envelope(id) for id in "abc"}


class PretendServer:
    """A server whose nodes return the messages that they receive, after some polls, or when the test says so."""

    limit = 2**30

    def __init__(self, online: Iterable[int] = FOUR.values(), polls: Mapping[int, int] | None = None) -> None:
        self.online, self.silent, self.polls = list(online), set[int](), dict(polls or {})
        self.sent: dict[str, OutgoingOrder] = {}
        self.requests: list[list[str]] = []
        self.cancelled = set[str]()
        self.repeated = list[Taken]()
        self._bodies: dict[str, bytes] = {"": b""}

    def list_online(self) -> Mapping[int, bytes]:
        return dict.fromkeys(self.online, b"")

    def store_body(self, data: bytes) -> str:
        self._bodies[f"body {len(self._bodies)}"] = data
        return list(self._bodies)[-1]

    def send_orders(self, orders: Sequence[OutgoingOrder]) -> list[str]:
        first = len(self.sent)
        self.sent |= {f"m{first + number}": order for number, order in enumerate(orders)}
        return list(self.sent)[first:]

    def answer(self, id: str) -> Taken:
        """Return what a node sends back: the message that it received."""
        order = self.sent[id]
        return Taken(id, lambda: order.head + self._bodies[order.body])

    def take_replies(self, ids: Collection[str], seconds: float = 1.0) -> Iterable[Taken]:
        self.requests.append(list(ids))
        assert not self.cancelled & set(ids)
        back = list(self.repeated)
        for id in ids:
            node = self.sent[id].node
            self.polls[node] = self.polls.get(node, 0) - 1
            if self.polls[node] < 0 and node not in self.silent:
                back.append(self.answer(id))
        return back

    def cancel(self, ids: Collection[str]) -> None:
        self.cancelled |= set(ids)


def make_transport(server: PretendServer, nodes: Mapping[str, int] = NODES, **options: Any) -> Any:
    return transport.ServerTransport(server, nodes, **options)


def make_orders(ids: str, task: str = "train", bytes: int | None = None) -> Orders:
    limit = None if bytes is None else lambda _: bytes
    return Orders(task, ids, lambda id: Envelope(f"{task} {id}"), limit)


def test_everybody_answers_in_any_order_and_who_hangs_is_given_up_at_the_deadline() -> None:
    found = make_transport(PretendServer([1, 2, 3], {1: 2}))
    assert exchanged(found, ENVELOPES, 10.0) == ENVELOPES
    found = make_transport(PretendServer([1, 2, 3], {3: 10**6}))
    began = time.monotonic()
    taken = exchanged(found, ENVELOPES, 60.0, enough=2)
    assert list(taken) == ["a", "b"]
    assert time.monotonic() - began < 10
    assert exchanged(found, ENVELOPES, 0.5)["c"] == "no reply within 0.5 s"


def test_who_is_offline_is_given_up_at_once_or_after_so_much_patience() -> None:
    found = make_transport(PretendServer([1, 2], {}), reconnect_timeout=0.5)
    assert exchanged(found, ENVELOPES, 60.0)["c"] == "its node is not online"
    began = time.monotonic()
    back = exchanged(found, ENVELOPES, 60.0, wait_for_offline=True)
    assert back["c"] == "its node was not online for 0.5 s"
    assert 0.5 <= time.monotonic() - began < 10
    assert isinstance(back["a"], Envelope)


def exchange_with_change(nodes: transport.ServerTransport, change: Callable[[], object]) -> dict[str, Any]:
    """Exchange orders, with patience for nodes that are offline; the change comes with each reply."""
    back: dict[str, Any] = {}

    def replied(id: str, envelope: Envelope | str) -> bool:
        back[id] = envelope
        change()
        return False

    nodes.exchange(Orders("train", ENVELOPES, ENVELOPES.__getitem__), replied, 60.0, wait_for_offline=True)
    return back


def test_who_comes_back_in_time_is_asked() -> None:
    server = PretendServer([1, 2], {1: 3})
    found = make_transport(server, reconnect_timeout=30.0)
    back = exchange_with_change(found, lambda: setattr(server, "online", [1, 2, 3]))
    assert set(back) == set(NODES)
    assert all(isinstance(one, Envelope) for one in back.values())


def test_nobody_waits_for_a_node_whose_key_was_revoked() -> None:
    gone: list[int] = []
    server = PretendServer([1, 2], {2: 10**6})  # 3 is offline, 2 has its order and does not answer
    found = make_transport(server, reconnect_timeout=60.0, revoked=lambda: gone)
    began = time.monotonic()
    back = exchange_with_change(found, lambda: gone.extend([2, 3]))
    assert back == {"a": ENVELOPES["a"], "b": "its node's key was revoked", "c": "its node's key was revoked"}
    assert time.monotonic() - began < 10


def test_the_reason_of_a_node_s_failure_is_short_and_obeyed_by_no_terminal() -> None:
    """It is not signed, and in anybody's words."""

    class Failing(PretendServer):
        def answer(self, id: str) -> Taken:
            return Taken(id, failure="\x1b[2J\x1b]52;c;cm0gLXJmIC8=\x07" + "a" * (4 << 20))

    back = exchanged(make_transport(Failing()), ENVELOPES, 10.0)
    for reason in back.values():
        assert isinstance(reason, str)
        assert reason.startswith(r"\x1b[2J\x1b]52")
        assert reason.isprintable()
        assert len(reason) < 1000


@pytest.mark.parametrize("data", [b"", b"\x02", b"\x01\0\0\0\5abc", b"\x01\xff\xff\xff\xff", b"\x01\0\0\0\0"])
def test_what_is_no_message_is_a_failure_of_its_node_alone(data: bytes) -> None:
    class Damaged(PretendServer):
        def answer(self, id: str) -> Taken:
            return Taken(id, lambda: data) if self.sent[id].node == 1 else super().answer(id)

    back = exchanged(make_transport(Damaged()), ENVELOPES, 10.0)
    assert isinstance(back.pop("a"), str)
    assert back == {id: ENVELOPES[id] for id in "bc"}


def test_an_order_names_how_large_its_reply_may_be() -> None:
    sizes, server = {"a": 0, "b": 5 << 20, "c": 2**40}, PretendServer()
    orders = Orders("train", ENVELOPES, ENVELOPES.__getitem__, sizes.__getitem__)
    make_transport(server).exchange(orders, lambda *_: False, 10.0)
    limits = {order.node: order.reply_bytes - MARGIN for order in server.sent.values()}
    assert limits == {1: 0, 2: 5 << 20, 3: server.limit}


def test_orders_share_requests_and_equal_bodies_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BATCH", 3)
    requests, body = list[int](), bytes(20_000)

    class Counting(PretendServer):
        def send_orders(self, orders: Sequence[OutgoingOrder]) -> list[str]:
            requests.append(len(orders))
            return super().send_orders(orders)

    envelopes = {id: Envelope(id, body if id != "g" else b"other") for id in "abcdefg"}
    nodes = {id: number for number, id in enumerate(envelopes)}
    server = Counting(nodes.values())
    assert exchanged(make_transport(server, nodes), envelopes, 10.0) == envelopes
    assert requests == [3, 3, 1]
    assert len({order.body for order in server.sent.values()}) == 2


def test_a_node_that_has_not_decided_is_invited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invitations, "_REINVITE_SECONDS", 0.2)
    undecided: set[int] = set()
    found: list[int] = []
    for node, _ in invitations.invite(PretendServer([1, 2]), Envelope("hello"), 60.0, undecided=undecided):
        found.append(node)
        if node == 2:
            undecided.add(node)
        if len(found) == 4:
            break
    assert sorted(found) == [1, 2, 2, 2]


def test_invitations_and_an_exchange_get_their_own_replies() -> None:
    server = PretendServer([1, 2, 3], {3: 1})
    opened = invitations.Invitations(server, Envelope("hello"), known=[1, 2])
    opened.send()
    assert list(opened.receive(1.0)) == []
    assert exchanged(make_transport(server), {"a": Envelope("order")}, 10.0) == {"a": Envelope("order")}
    assert opened.pending_nodes == {3}
    assert list(opened.receive(1.0)) == [(3, Envelope("hello"))]
    assert not opened.pending_nodes
    server.silent = {3, 4}
    for online, invited in (([1, 2, 3, 4], [4]), ([1, 2, 4], []), ([1, 2, 3, 4], [3]), ([1, 2, 3], [])):
        server.online, before = online, len(server.sent)
        opened.send()  # each node is invited once, and again if it came back
        assert [order.node for order in list(server.sent.values())[before:]] == invited
    assert opened.pending_nodes == {3}  # who is offline is not waited for
    opened.close()
    assert not opened.pending_nodes


def test_replies_to_open_orders_arrive_one_by_one_and_further_orders_beside_them() -> None:
    server = PretendServer()
    nodes = make_transport(server, FOUR)
    server.silent = {2, 3}
    nodes.send_orders(make_orders("abc"), 60.0)
    assert nodes.receive_reply() == ("a", Envelope("train a"))
    nodes.send_orders(make_orders("d"), 60.0)
    assert nodes.receive_reply() == ("d", Envelope("train d"))
    assert nodes.list_training() == {"b", "c"}
    server.silent = {3}
    assert nodes.receive_reply() == ("b", Envelope("train b"))
    server.silent = set()
    assert nodes.receive_reply() == ("c", Envelope("train c"))
    assert nodes.receive_reply() is None
    assert not server.cancelled
    assert len(server.sent) == 4


def test_an_exchange_cancels_no_open_order_and_loses_no_reply_to_one() -> None:
    """Also where the exchange ends early: it is enough when the first of its replies has arrived."""
    server = PretendServer()
    nodes = make_transport(server, FOUR)
    server.silent = {1, 2}
    nodes.send_orders(make_orders("ab"), 60.0)
    assert exchanged(nodes, {id: Envelope(id) for id in "cd"}, 60.0) == {id: Envelope(id) for id in "cd"}
    assert not server.cancelled
    server.silent = {2}
    assert len(exchanged(nodes, {id: Envelope(id) for id in "cd"}, 60.0, enough=1)) == 1
    assert nodes.list_training() == {"b"}  # the reply of a waits here
    assert nodes.retain_orders("ab") == {"a", "b"}
    assert nodes.receive_reply() == ("a", Envelope("train a"))
    server.silent = set()
    assert nodes.receive_reply() == ("b", Envelope("train b"))
    assert nodes.receive_reply() is None


def test_replies_that_arrived_together_are_read_one_by_one() -> None:
    """Those of an exchange, and those to open orders beside it, of which a dropped one is given up unread."""
    reads = list[str]()

    class Counting(PretendServer):
        def answer(self, id: str) -> Taken:
            taken = super().answer(id)
            return Taken(id, lambda: reads.append(id) or taken.read())

    server = Counting()
    nodes = make_transport(server, FOUR)
    nodes.send_orders(make_orders("ab"), 60.0)
    read_before_each = list[int]()

    def count(id: str, reply: Envelope | str) -> bool:
        read_before_each.append(len(reads))
        return False

    nodes.exchange(make_orders("cd"), count, 60.0)
    assert read_before_each == [1, 2]
    assert nodes.retain_orders("a") == {"a"}
    assert server.cancelled == {"m1"}
    assert nodes.receive_reply() == ("a", Envelope("train a"))
    assert reads == ["m2", "m3", "m0"]


def test_a_second_reply_to_an_order_and_one_to_a_closed_order_do_not_count() -> None:
    server = PretendServer()
    nodes = make_transport(server, FOUR)
    server.silent = {2, 3}
    nodes.send_orders(make_orders("abc"), 60.0)
    assert nodes.receive_reply() == ("a", Envelope("train a"))
    assert nodes.retain_orders("bd") == {"b"}
    server.repeated = [server.answer(id) for id in ("m0", "m2")]  # of a, and of c, whose order is closed
    assert exchanged(nodes, {"d": Envelope("d")}, 60.0) == {"d": Envelope("d")}
    assert server.cancelled == {"m2"}
    assert nodes.list_training() == {"b"}
    server.repeated, server.silent = [], set()
    assert nodes.receive_reply() == ("b", Envelope("train b"))
    assert nodes.receive_reply() is None


def test_clients_that_are_offline_revoked_or_silent_fail() -> None:
    revoked = list[int]()
    server = PretendServer([1, 2, 3])
    nodes = make_transport(server, FOUR, reconnect_timeout=60.0, revoked=lambda: revoked)
    server.silent = {1, 2, 3}
    began = time.monotonic()
    nodes.send_orders(make_orders("ad"), 60.0)
    assert nodes.receive_reply() == ("d", "its node is not online")
    revoked.append(1)
    assert nodes.receive_reply() == ("a", "its node's key was revoked")
    nodes.send_orders(make_orders("b"), 0.3)
    nodes.send_orders(make_orders("c"), 600.0)
    assert nodes.receive_reply() == ("b", "no reply within 0.3 s")
    assert time.monotonic() - began < 30
    assert (nodes.list_training(), nodes.list_stalled()) == ({"c"}, {"b"})  # b may train on
    assert nodes.retain_orders("bc") == {"c"}
    server.silent = {3}
    nodes.send_orders(make_orders("b"), 60.0)
    assert nodes.receive_reply() == ("b", Envelope("train b"))
    assert (nodes.list_training(), nodes.list_stalled()) == ({"c"}, set())


def test_a_node_that_comes_back_in_time_receives_its_order_and_one_that_does_not_never_does() -> None:
    server = PretendServer([1])
    nodes = make_transport(server, FOUR, reconnect_timeout=60.0)
    server.silent = {1}
    nodes.send_orders(make_orders("ab"), 60.0, wait_for_offline=True)
    nodes.send_orders(make_orders("c"), 60.0, wait_for_offline=True)
    assert (nodes.list_training(), nodes.list_stalled()) == ({"a", "b", "c"}, {"b", "c"})
    server.online = [1, 2]
    assert nodes.receive_reply() == ("b", Envelope("train b"))
    assert nodes.retain_orders("abc") == {"a"}  # the round has ended, and the order to c is not sent any more
    server.online, server.silent = [1, 2, 3], set()
    assert nodes.receive_reply() == ("a", Envelope("train a"))
    assert nodes.receive_reply() is None
    assert len(server.sent) == 2


def test_orders_that_are_closed_before_their_replies_were_requested_are_cancelled() -> None:
    """As at the end of a run: the last round sends orders, and takes replies that an evaluation has fetched."""
    server = PretendServer()
    nodes = make_transport(server, FOUR)
    nodes.send_orders(make_orders("a"), 60.0)
    exchanged(nodes, {"d": Envelope("d")}, 60.0)  # fetches both replies
    server.silent = {2, 3}
    nodes.send_orders(make_orders("bc"), 60.0)
    assert nodes.receive_reply() == ("a", Envelope("train a"))
    assert nodes.retain_orders(()) == frozenset()
    exchanged(nodes, {"d": Envelope("d")}, 60.0)
    assert server.cancelled == {"m2", "m3"}


def test_clients_that_are_assumed_to_train_are_stalled_until_they_answer() -> None:
    """Also if nobody has read the answer yet."""
    nodes = make_transport(PretendServer(), FOUR)
    nodes.assume_training("abc")
    assert (nodes.list_training(), nodes.list_stalled()) == (set(), set("abc"))
    exchanged(nodes, {"b": Envelope("b")}, 60.0)
    assert nodes.list_stalled() == {"a", "c"}
    nodes.send_orders(make_orders("a"), 60.0)
    exchanged(nodes, {"d": Envelope("d")}, 60.0)  # fetches both replies
    assert (nodes.list_training(), nodes.list_stalled()) == (set(), {"c"})
    assert nodes.receive_reply() == ("a", Envelope("train a"))


def test_an_order_that_is_open_holds_nothing_of_its_round() -> None:
    class Round:
        def create_order(self, id: str) -> Envelope:
            return Envelope(id)

    server, round = PretendServer(), Round()
    server.silent = {1}
    nodes = make_transport(server, FOUR)
    nodes.send_orders(Orders("train", "a", round.create_order), 60.0)
    reference = weakref.ref(round)
    del round
    gc.collect()
    assert nodes.list_training() == {"a"}
    assert reference() is None


def test_a_reply_that_answers_another_order_is_not_its_client_s() -> None:
    """The nonce of an order is that of its reply: a node that is sent a further one cannot answer it with the first."""

    class Nonces(UnsignedSigner):
        def open(self, message: bytes, node: int, nonce: bytes) -> Envelope:
            order = self.open_order(message, node)
            if order.nonce != nonce:
                raise ValueError("a reply to another order")
            return order.envelope

    server = PretendServer()
    nodes = make_transport(server, signer=Nonces())
    nodes.send_orders(make_orders("a"), 60.0)
    assert nodes.receive_reply() == ("a", Envelope("train a"))
    nodes.send_orders(make_orders("a"), 60.0)
    server.sent["m1"] = server.sent["m0"]  # what the node returns
    assert nodes.receive_reply() == ("a", "a reply to another order")
    assert nodes.receive_reply() is None
