"""Entries of a server's audit log for its orders and the nodes' replies: sizes and digests, never content."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from fedspan.federation.progress import ClientState, Progress
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import AsynchronousTransport, OnReply, OnTrained, Orders
from fedspan.logs import AuditLog

AUDIT = "audit.jsonl"
"""The audit log in a server's or a node's folder."""

_FACTS = "task", "round", "attempt", "serial"


def describe_envelope(envelope: Envelope) -> dict[str, object]:
    """Return what an audit log says of an envelope: kind, round, size and SHA-256.

    Args:
        envelope: An envelope whose header was decoded before, or that this process made.
    """
    try:
        header = json.loads(envelope.header)
    except (ValueError, RecursionError):
        header = None
    facts = {name: header[name] for name in _FACTS if name in header} if isinstance(header, dict) else {}
    description = {name: value for name, value in facts.items() if isinstance(value, str | int)}
    return {
        **{name: value[:64] if isinstance(value, str) else value for name, value in description.items()},
        "bytes": envelope.size,
        "sha256": envelope.sha256,
    }


class AuditedTransport(AsynchronousTransport):
    """A transport that writes every order and every reply to an audit log before it passes them on."""

    def __init__(self, inner: AsynchronousTransport, log: AuditLog, run: str, nodes: Mapping[str, int]) -> None:
        self.inner, self.log, self.run, self.nodes = inner, log, run, nodes
        self._tasks = dict[str, str]()

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        self.inner.begin(progress, on_trained)

    def accept_replies(self, accepted: Collection[str]) -> Mapping[str, ClientState]:
        return self.inner.accept_replies(accepted)

    def get_simulated_seconds(self) -> float | None:
        return self.inner.get_simulated_seconds()

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:

        def write_reply(id: str, reply: Envelope | str) -> bool:
            self._write_reply(id, orders.task, reply)
            return on_reply(id, reply)

        self.inner.exchange(self._audit(orders), write_reply, seconds, wait_for_offline=wait_for_offline)

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        self._tasks |= dict.fromkeys(orders, orders.task)
        self.inner.send_orders(self._audit(orders), seconds, wait_for_offline=wait_for_offline)

    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        received = self.inner.receive_reply()
        if received is not None:
            id, reply = received
            self._write_reply(id, self._tasks.pop(id), reply)
        return received

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        """``AsynchronousTransport.retain_orders``; closed orders are logged as failed."""
        retained = self.inner.retain_orders(ids)
        for id in sorted(self._tasks.keys() - retained):
            self._write_reply(id, self._tasks.pop(id), "the server closed its order")
        return retained

    def list_training(self) -> frozenset[str]:
        return self.inner.list_training()

    def list_stalled(self) -> frozenset[str]:
        return self.inner.list_stalled()

    def assume_training(self, ids: Collection[str]) -> None:
        self.inner.assume_training(ids)

    def _audit(self, orders: Orders) -> Orders:
        """Return the orders, each of which is logged when it is created."""

        def create(id: str) -> Envelope:
            envelope = orders[id]
            self._write("asked", id, **describe_envelope(envelope))
            return envelope

        return orders.replace_make(create)

    def _write_reply(self, id: str, task: str, reply: Envelope | str) -> None:
        if isinstance(reply, str):
            self._write("failed", id, task=task, reason=reply[:500])
        else:
            self._write("answered", id, **describe_envelope(reply))

    def _write(self, event: str, id: str, **facts: object) -> None:
        self.log.write(event, run=self.run, client=id, node=str(self.nodes.get(id, "")), **facts)
