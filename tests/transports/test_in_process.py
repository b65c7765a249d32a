"""The transport of the simulator: dropouts and faults of second exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedspan.core.values import Message
from fedspan.federation.protocol import Order
from fedspan.runs.setup import Prepared, prepare
from helpers import tiny


def build_two_exchanges(folder: Path, simulation: dict[str, Any]) -> Prepared:
    federation = {"clients_per_round": None, "min_replies": 1, "deadline": 50000.0, "max_norm_ratio": None, "rounds": 3}
    method = {"name": "fedask", "r": 2}
    return prepare(tiny.config(folder, method=method, federation=federation, simulation=simulation))


def test_a_dropout_in_a_second_exchange_takes_a_deadline_of_its_own(tiny_folder: Path) -> None:
    federation = build_two_exchanges(tiny_folder, {"dropout": 0.3, "speed": {"median": 1000.0}}).federation
    progress, kinds = federation.begin(), set[tuple[bool, bool]]()
    for _ in range(3):
        result = federation.run_round(progress)
        progress = result.progress
        seconds = result.simulated_seconds
        second = [one.reason.startswith("second exchange") for one in result.failures]
        kinds.add((False in second, True in second))
        assert seconds is not None
        least = 50000.0 * len(set(second))
        assert seconds == least if False in second else least < seconds < least + 50000.0
    assert any(in_second for _, in_second in kinds)


def test_a_fault_s_change_of_a_second_reply_is_from_an_untrained_one(tiny_folder: Path) -> None:
    """A flipped sign mirrors the reply at that of a client whose training changes nothing, by hand A^T (B^T Q)."""
    federation = build_two_exchanges(tiny_folder, {"faults": {"kind": "sign-flip", "share": 0.25}}).federation
    transport = federation.transport
    tamper, seen = transport.host.tamper, list[tuple[Message, Message, Message]]()
    assert tamper is not None

    def watch(order: Order, message: Message, reply: Message) -> Message:
        altered = tamper(order, message, reply)
        if order.task == "second" and altered is not reply:
            seen.append((message, reply, altered))
        return altered

    transport.host.tamper = watch
    progress = federation.run_round(federation.begin()).progress
    seen.clear()
    federation.run_round(progress)
    (message, reply, altered), *_ = seen
    for layer in federation.method.spec.layers:
        A, B = (progress.state.tensors[f"{layer.name}/{slot}"].double() for slot in "AB")
        start = A.T @ (B.T @ message.tensors[f"{layer.name}/Q"].double())
        name = f"{layer.name}/P"
        assert float(start.norm()) > 0
        expected = 2 * start - reply.tensors[name].double()
        assert float((altered.tensors[name].double() - expected).norm()) < 1e-4 * float(expected.norm())
