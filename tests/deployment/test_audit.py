"""A server's audit log has every order and reply, with the digests that the node's own log has."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedspan.deployment.audit import AUDIT, AuditedTransport, describe_envelope
from fedspan.deployment.node import NodeService
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.logs import AuditLog
from helpers.node_service import CLIENT, node, served


def test_both_sides_log_the_same_orders_and_replies(tiny_folder: Path, tmp_path: Path) -> None:
    service = NodeService(node(tiny_folder, tmp_path / "node"))
    run, transport = served(tiny_folder, service)
    log = AuditLog(tmp_path / "server" / AUDIT)
    federation: Any = run.federation
    federation.transport = AuditedTransport(transport, log, "run", {CLIENT: 2**63})
    assert not federation.run_round(federation.begin()).failures
    ours, theirs = log.read(), AuditLog(tmp_path / "node" / AUDIT).read()
    shared = ("event", "task", "round", "bytes", "sha256", "run")
    asked = [{name: row[name] for name in shared} for row in ours if row["event"] in ("asked", "answered")]
    assert asked == [{name: row[name] for name in shared} for row in theirs if row["event"] in ("asked", "answered")]
    assert len(asked) == 2
    assert {row["node"] for row in ours} == {str(2**63)}


def test_a_missing_reply_is_logged_with_its_reason(tmp_path: Path) -> None:
    class Broken(AuditedTransport):
        def exchange(self, orders: Any, on_reply: Any, seconds: float, *, wait_for_offline: bool = False) -> None:
            on_reply("a", "no reply within 5 s")

    log = AuditLog(tmp_path / AUDIT)
    inner = Broken(None, log, "", {})  # type: ignore[arg-type]
    heard: list[Any] = []
    transport = AuditedTransport(inner, log, "run", {"a": 1})
    transport.exchange(Orders("train", "a", lambda _: Envelope("{}")), lambda *one: bool(heard.append(one)), 5.0)
    (row,) = log.read()
    assert (row["event"], row["client"], row["reason"]) == ("failed", "a", "no reply within 5 s")
    assert heard == [("a", "no reply within 5 s")]


def test_open_orders_are_logged_with_their_ends(tmp_path: Path) -> None:
    replies = [("a", Envelope('{"task": "train", "round": 3}')), ("b", "no reply within 5 s")]

    class Open:
        def send_orders(self, orders: Any, seconds: float, *, wait_for_offline: bool = False) -> None:
            assert [orders[id].header for id in orders] == ["{}"] * 3

        def receive_reply(self) -> Any:
            return replies.pop(0) if replies else None

        def retain_orders(self, ids: Any) -> frozenset[str]:
            return frozenset(ids)

        def list_training(self) -> frozenset[str]:
            return frozenset("c")

    log, inner = AuditLog(tmp_path / AUDIT), Open()
    transport = AuditedTransport(inner, log, "run", {"a": 1, "b": 2, "c": 3})  # type: ignore[arg-type]
    transport.send_orders(Orders("train", "abc", lambda _: Envelope("{}")), 5.0)
    received = [transport.receive_reply() for _ in range(3)]
    assert [reply and reply[0] for reply in received] == ["a", "b", None]
    assert transport.list_training() == {"c"}
    assert transport.retain_orders("c") == {"c"}
    assert transport.retain_orders("") == frozenset()
    assert [(row["event"], row["client"]) for row in log.read()] == [
        ("asked", "a"), ("asked", "b"), ("asked", "c"), ("answered", "a"), ("failed", "b"), ("failed", "c"),
    ]  # fmt: skip
    assert log.read()[3]["round"] == 3
    assert [row["reason"] for row in log.read()[4:]] == ["no reply within 5 s", "the server closed its order"]


def test_a_hostile_header_is_described_in_few_bytes() -> None:
    for header in ("[" * 9999, '{"task": "' + "x" * 9999 + '", "round": [1], "serial": {}}', "\ud800", "{}"):
        description = describe_envelope(Envelope(header, b"abc"))
        assert len(str(description)) < 300
        assert set(description) <= {"task", "bytes", "sha256"}


def test_the_digest_of_an_envelope_is_that_of_what_is_sent() -> None:
    envelope = Envelope('{"task": "train", "round": 2}', b"abc")
    sent = envelope.header.encode() + envelope.body
    expected = {"task": "train", "round": 2, "bytes": len(sent), "sha256": hashlib.sha256(sent).hexdigest()}
    assert describe_envelope(envelope) == expected
    other = replace(envelope, body=b"abd")
    assert other.sha256 != envelope.sha256
    assert Envelope(envelope.header, b"abc") == envelope
