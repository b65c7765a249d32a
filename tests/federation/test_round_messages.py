"""How often a round encodes and decodes messages: each is encoded once, and decoded once on either side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedspan.config import parse_config
from fedspan.core.values import Message
from fedspan.federation import serialization
from fedspan.federation.protocol import Envelope
from fedspan.federation.reported_evaluation import ReportedEvaluator
from fedspan.federation.transport import Orders
from fedspan.runs.setup import prepare
from fedspan.transports.in_process import InProcess
from helpers import tiny

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
def test_a_round_encodes_and_decodes_its_order_and_each_reply_once(
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


@pytest.mark.parametrize("method", ["hetlora", "flexlora", "fedhm"])
def test_a_message_is_encoded_and_decoded_once_for_all_clients_of_a_rank(
    method: str, tiny_folder: Path, counts: Counts
) -> None:
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
