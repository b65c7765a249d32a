"""What a server asked of its nodes and what they answered, for its audit log: sizes and digests, never content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping

from fedspan.core.method import Memory
from fedspan.core.values import OptimizerState
from fedspan.federation.progress import Progress
from fedspan.federation.protocol import Envelope, OnReply, OnTrained, Orders, Transport
from fedspan.logs import AuditLog

__all__ = ["AUDIT", "AuditedTransport", "describe_envelope"]

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
    content = hashlib.sha256(envelope.header.encode(errors="surrogatepass"))
    content.update(envelope.body)
    return {
        **{name: value[:64] if isinstance(value, str) else value for name, value in description.items()},
        "bytes": len(envelope.header.encode(errors="surrogatepass")) + len(envelope.body),
        "sha256": content.hexdigest(),
    }


class AuditedTransport(Transport):
    """A transport that writes every order and every reply to an audit log before it passes them on.

    Args:
        inner: The transport.
        log: The audit log.
        run: Name of the run.
        nodes: Flower's node id of each client.
    """

    def __init__(self, inner: Transport, log: AuditLog, run: str, nodes: Mapping[str, int]) -> None:
        self.inner, self.log, self.run, self.nodes = inner, log, run, nodes

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        """``Transport.begin``."""
        self.inner.begin(progress, on_trained)

    def accept_replies(
        self, accepted: Collection[str]
    ) -> tuple[Mapping[str, Memory], Mapping[str, tuple[OptimizerState, int]]]:
        """``Transport.accept_replies``."""
        return self.inner.accept_replies(accepted)

    def get_simulated_seconds(self) -> float | None:
        """``Transport.get_simulated_seconds``."""
        return self.inner.get_simulated_seconds()

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        """``Transport.exchange``."""

        def order(id: str) -> Envelope:
            envelope = orders[id]
            self._write("asked", id, **describe_envelope(envelope))
            return envelope

        def received(id: str, reply: Envelope | str) -> bool:
            if isinstance(reply, str):
                self._write("failed", id, task=orders.task, reason=reply[:500])
            else:
                self._write("answered", id, **describe_envelope(reply))
            return on_reply(id, reply)

        audited = orders.replace_make(order)
        self.inner.exchange(audited, received, seconds, wait_for_offline=wait_for_offline)

    def _write(self, event: str, id: str, **facts: object) -> None:
        self.log.write(event, run=self.run, client=id, node=str(self.nodes.get(id, "")), **facts)
