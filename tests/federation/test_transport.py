"""Orders of an exchange, created when they are asked for; each message is encoded once and decoded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.core.values import Message, ServerState
from fedspan.federation import serialization
from fedspan.federation.progress import OpenOrders, Progress
from fedspan.federation.protocol import Envelope
from fedspan.federation.reported_evaluation import ReportedEvaluator
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders, Transport
from fedspan.runs.setup import prepare
from fedspan.transports.in_process import InProcess
from helpers import tiny
from helpers.families import others_slow


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


CLIENTS = len(tiny.SITES)


class Counts:
    """The bodies that were encoded and decoded, and those that clients replied with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded, self.decoded, self.replies = Counter[bytes](), Counter[bytes](), list[bytes]()
        encode, decode, carry_out = serialization.encode, serialization.decode, InProcess.carry_out

        def count_encoding(message: Message) -> bytes:
            body = encode(message)
            self.encoded[body] += 1
            return body

        def count_decoding(body: bytes) -> Message:
            self.decoded[body] += 1
            return decode(body)

        def watch(
            transport: InProcess, orders: Orders, ids: Sequence[str], on_reply: Callable[[str, Envelope | str], object]
        ) -> None:
            def pass_on(id: str, reply: Envelope | str) -> object:
                assert isinstance(reply, Envelope)
                self.replies.append(reply.body)
                return on_reply(id, reply)

            carry_out(transport, orders, ids, pass_on)

        monkeypatch.setattr(serialization, "encode", count_encoding)
        monkeypatch.setattr(serialization, "decode", count_decoding)
        monkeypatch.setattr(InProcess, "carry_out", watch)

    def clear(self) -> None:
        self.encoded.clear()
        self.decoded.clear()
        self.replies.clear()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="replies that wait for the clipping"),
        pytest.param({"federation": {"clip_ratio": None}}, id="replies that are folded"),
        pytest.param({"simulation": {"speed": {"median": 10.0}}}, id="replies that are compared"),
        pytest.param({"method": {"name": "flora"}}, id="changes of the base"),
        pytest.param({"method": {"wrappers": [{"name": "low-precision"}]}}, id="low precision"),
        pytest.param({"federation": {"secure": {}}}, id="masked replies"),
    ],
)
def test_a_round_encodes_its_order_and_each_reply_once(
    changes: Mapping[str, Any], tiny_folder: Path, counts: Counts
) -> None:
    if "secure" in changes.get("federation", {}):
        pytest.importorskip("Crypto", reason="the extra fedspan[secagg] is not installed")
    changes = {**changes, "federation": {"clients_per_round": None, **changes.get("federation", {})}}
    federation = prepare(tiny.config(tiny_folder, **changes)).federation
    progress = federation.begin()
    for _ in range(2):
        counts.clear()
        result = federation.run_round(progress)
        progress = result.progress
        assert not result.failures
        assert len(set(counts.replies)) == CLIENTS
        assert counts.encoded == counts.decoded
        assert sorted(counts.encoded.values()) == [1] * (1 + CLIENTS)


@pytest.mark.parametrize("method", others_slow(["hetlora", "flexlora", "fedhm"], ["hetlora", "flexlora"]))
def test_a_message_is_encoded_once_for_all_clients_of_a_rank(method: str, tiny_folder: Path, counts: Counts) -> None:
    """Also where clients of one rank do not follow one another."""
    settings = tiny.settings(tiny_folder, method={"name": method})
    settings["partition"] = {"partitioner": "iid", "clients": 12}
    settings["federation"] = {"rounds": 2, "clients_per_round": None, "ranks": [1, 2, 4]}
    federation = prepare(parse_config(settings)).federation
    progress = federation.begin()
    for _ in range(2):
        counts.clear()
        result = federation.run_round(progress)
        progress = result.progress
        assert not result.failures
        assert len(counts.replies) == 12
        orders = {body: count for body, count in counts.encoded.items() if body not in counts.replies}
        assert sum(orders.values()) == (1 if method == "flexlora" and progress.state.round == 1 else 3)
        assert {body: counts.decoded[body] for body in orders} == orders


def test_asynchronous_rounds_decode_each_reply_once(tiny_folder: Path, counts: Counts) -> None:
    """Also where some replies are rejected, so that the round takes further ones."""
    changes: dict[str, Any] = {
        "federation": {"clients_per_round": 2, "buffered": {"concurrency": 4}},
        "simulation": {"speed": {"median": 10.0}, "faults": {"share": 0.25, "kind": "nan"}},
    }
    federation = prepare(tiny.config(tiny_folder, **changes)).federation
    progress, rejected = federation.begin(), 0
    for _ in range(3):
        counts.clear()
        result = federation.run_round(progress)
        progress = result.progress
        rejected += len(result.failures)
        assert {body: counts.encoded[body] for body in counts.replies} == dict.fromkeys(counts.replies, 1)
        assert {body: counts.decoded[body] for body in counts.replies} == dict.fromkeys(counts.replies, 1)
    assert rejected


def test_an_evaluation_of_one_model_encodes_and_decodes_it_once(tiny_folder: Path, counts: Counts) -> None:
    federation = prepare(tiny.config(tiny_folder)).federation
    progress = federation.begin()
    scores, _ = ReportedEvaluator(federation, 8).evaluate_clients(progress)
    assert len(scores.by_client) == CLIENTS
    assert counts.encoded == counts.decoded
    assert sum(counts.encoded.values()) == 1
