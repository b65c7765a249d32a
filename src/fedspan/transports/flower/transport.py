"""The server side of a deployment: a transport over Flower's grid, and the invitations of nodes to a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
from flwr.app import ConfigRecord, Message, RecordDict

from fedspan.errors import FedspanError, escape_controls
from fedspan.federation.protocol import Envelope, OnReply, Orders, Transport
from fedspan.transports.flower.adapter import ObjectPushError
from fedspan.transports.flower.grid import Grid
from fedspan.transports.flower.messages import draw_salt, from_records, to_records
from fedspan.transports.flower.signing import Signer, UnsignedSigner
from fedspan.transports.flower.wire import BATCH_BYTES, format_reply_limit

__all__ = ["GridTransport", "Invitations", "invite", "roll_call"]

A = TypeVar("A", str, int)

_REINVITE_SECONDS = 5.0
"""Seconds after which a node that has not decided is invited again."""
_LONGEST_REASON = 500
"""Maximum number of characters of the reason that comes with a failure."""
_REVOKED = "its node's key was revoked"
_POLL = 0.05, 1.0
"""Polling interval for replies in seconds: initial and maximum."""
_MARGIN = 1 << 20
"""Maximum size of what a reply has beside its body, in bytes: its header, and Flower's records around both."""
_BATCH, _OVERHEAD = 64, 2048
"""Maximum number of orders of a request, and the size of an order's objects beside its header and body, in bytes."""


class GridTransport(Transport):
    """Sends envelopes to nodes and waits for their replies.

    Args:
        grid: Flower's grid.
        nodes: Flower's node id of each client.
        reconnect_timeout: Time limit for offline nodes in an exchange that waits for them, in seconds.
        signer: Signs orders and verifies replies; None: neither.
        revoked: Returns the nodes whose keys were revoked, which no exchange waits for.
        on_poll: Called again and again while replies are awaited.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[str, int],
        reconnect_timeout: float = 300.0,
        signer: Signer | None = None,
        revoked: Callable[[], Collection[int]] = tuple,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_poll = on_poll
        self.grid, self.nodes, self.reconnect_timeout = grid, nodes, reconnect_timeout
        self.signer, self.revoked = signer or UnsignedSigner(), revoked

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        """``Transport.exchange``."""
        for id, reply in self._receive_replies(orders, seconds, wait_for_offline):
            if on_reply(id, reply):
                return

    def _receive_replies(
        self, orders: Orders, seconds: float, wait_for_offline: bool
    ) -> Iterator[tuple[str, Envelope | str]]:
        unsent, pending = dict.fromkeys(orders), dict[str, _Sent[str]]()
        refused = set[str]()
        started, pause = time.monotonic(), _POLL[0]
        deadline, offline_until = (
            started + seconds,
            started + (min(seconds, self.reconnect_timeout) if wait_for_offline else 0.0),
        )
        while True:
            self._on_poll()
            revoked = self.revoked()
            for id in [id for id in unsent if self.nodes[id] in revoked]:
                del unsent[id]
                yield id, _REVOKED
            for message, sent in list(pending.items()):
                if sent.node in revoked:
                    del pending[message]
                    yield sent.to, _REVOKED
            online = set(self.grid.get_node_ids()) if unsent else set[int]()
            salt = draw_salt()
            for batch in _split_batches(orders, [id for id in unsent if self.nodes[id] in online]):
                lifetime = max(deadline - time.monotonic(), 0) + 60
                addressed = [(id, self.nodes[id], envelope, orders.compute_reply_bytes(id)) for id, envelope in batch]
                try:
                    try:
                        sent = _send(self.grid, self.signer, addressed, "train", lifetime, salt)
                    except httpx.HTTPStatusError as error:
                        if not _can_be_resent(error):
                            raise
                        salt = draw_salt()  # a node may have announced the body's name with other children
                        sent = _send(self.grid, self.signer, addressed, "train", lifetime, salt)
                except ObjectPushError:  # its node deleted the message while it was sent; only a large one is alone
                    salt = draw_salt()  # no object of the next message may have a name that this node knows
                    for id, _ in batch:
                        del unsent[id]
                        yield id, "its node confirmed an order that it had not received"
                    continue
                except httpx.HTTPStatusError as error:
                    if not _can_be_resent(error):
                        raise
                    salt = draw_salt()
                    refused.update(id for id, _ in batch)  # sent again while the exchange waits for offline nodes
                    continue
                pending.update(sent)
                for message in sent.values():
                    del unsent[message.to]
            if time.monotonic() >= offline_until:
                reason = f"was not online for {offline_until - started:g} s" if wait_for_offline else "is not online"
                for id in sorted(unsent):
                    yield id, "the SuperLink did not take its order" if id in refused else f"its node {reason}"
                unsent.clear()
            received_any, polled = False, time.monotonic()
            for id, reply in _receive(self.grid, self.signer, pending):
                received_any = True
                yield id, reply
            if not pending and not unsent:
                return
            if time.monotonic() > deadline:
                break
            pause = _POLL[0] if received_any else min(2 * pause, _POLL[1])
            time.sleep(max(0.0, polled + pause - time.monotonic()))  # a grid may have waited itself
        for id in sorted(sent.to for sent in pending.values()):
            yield id, f"no reply within {seconds:g} s"
        for id in sorted(unsent):
            yield id, f"its node was not online for {seconds:g} s"


@dataclass(frozen=True)
class _Sent(Generic[A]):
    """A message without a reply: its recipient, the node's id, and the nonce."""

    to: A
    node: int
    nonce: bytes


def _can_be_resent(error: httpx.HTTPStatusError) -> bool:
    """Return whether a refusal concerns the names of a request's objects, or the moment, rather than the request."""
    return error.response.status_code >= 500 or error.response.status_code == httpx.codes.CONFLICT


def _split_batches(orders: Orders, ids: Iterable[str]) -> Iterator[list[tuple[str, Envelope]]]:
    """Yield orders with their clients in batches that are sent in one request; a large order is one of its own."""
    batch, size = list[tuple[str, Envelope]](), 0
    for id in ids:
        envelope = orders[id]
        envelope_size = len(envelope.body) + len(envelope.header) + _OVERHEAD
        if batch and (size + envelope_size > BATCH_BYTES or len(batch) == _BATCH):
            yield batch
            batch, size = [], 0
        batch.append((id, envelope))
        size += envelope_size
    if batch:
        yield batch


def _send(
    grid: Grid,
    signer: Signer,
    addressed: Iterable[tuple[A, int, Envelope, int | None]],
    kind: str,
    seconds: float,
    salt: bytes,
) -> dict[str, _Sent[A]]:
    """Send envelopes in one request.

    Args:
        grid: Flower's grid.
        signer: Signs the envelopes.
        addressed: Tuples of recipient, Flower's id of the node, envelope, and maximum size of the reply's body in
            bytes (None: unknown).
        kind: Type of the messages.
        seconds: Lifetime of the messages.
        salt: Salt of their bodies.

    Returns:
        The messages that Flower accepted, by message id.
    """
    sent = list[_Sent[A]]()
    messages = list[Message]()
    for to, node, envelope, reply_bytes in addressed:
        sealed = signer.seal(envelope, node)
        group = format_reply_limit(None if reply_bytes is None else reply_bytes + _MARGIN)
        messages.append(Message(to_records(sealed, salt), node, kind, ttl=seconds, group_id=group))
        sent.append(_Sent(to, node, sealed.nonce))
    return {id: message for id, message in zip(grid.push_messages(messages), sent, strict=False) if id}


def _receive(grid: Grid, signer: Signer, pending: dict[str, _Sent[A]]) -> Iterator[tuple[A, Envelope | str]]:
    """Yield the available replies with their senders, and remove their messages from ``pending``."""
    for reply in grid.pull_messages(sorted(pending)) if pending else ():
        sent = pending.pop(reply.metadata.reply_to_message_id, None)
        if sent is None:
            continue
        if reply.has_error():
            reason = escape_controls((reply.error.reason or "none")[:_LONGEST_REASON])  # unsigned, in anybody's words
            yield sent.to, f"its node failed (Flower's code {reply.error.code}: {reason})"
            continue
        try:
            yield sent.to, signer.open(from_records(reply.content), sent.node, sent.nonce)
        except ValueError as error:
            yield sent.to, escape_controls(str(error)[:_LONGEST_REASON])


def roll_call(grid: Grid, count: int, seconds: float) -> dict[int, int]:
    """Query every node of a simulation for its partition number.

    Args:
        grid: Flower's grid.
        count: Number of nodes to wait for.
        seconds: Seconds to wait for the nodes, and again for their replies.

    Returns:
        Node ids by partition number.

    Raises:
        FedspanError: If some nodes do not reply.
    """
    deadline = time.monotonic() + seconds
    while len(nodes := list(grid.get_node_ids())) < count and time.monotonic() < deadline:
        time.sleep(_POLL[1])
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query", ttl=seconds) for node in nodes]
    pending = dict(zip(grid.push_messages(messages), nodes, strict=True))
    nodes_by_partition: dict[int, int] = {}
    while pending and time.monotonic() < deadline + seconds:
        for reply in grid.pull_messages(sorted(pending)):
            node = pending.pop(reply.metadata.reply_to_message_id)
            record = None if reply.has_error() else reply.content.get("fedspan.node")
            partition = record.get("partition") if isinstance(record, ConfigRecord) else None
            if isinstance(partition, int):
                nodes_by_partition[partition] = node
        time.sleep(_POLL[0])
    if sorted(nodes_by_partition) != list(range(count)):
        raise FedspanError(
            "nodes",
            sorted(nodes_by_partition),
            problem=f"only {len(nodes_by_partition)} of {count} nodes answered. See Flower's log",
        )
    return nodes_by_partition


class Invitations:
    """The invitations of a run to all nodes that are or come online.

    A node that goes offline is invited again when it comes back; its earlier invitation is void.

    Args:
        grid: Flower's grid.
        envelope: The invitation.
        signer: Signs the invitation and verifies replies; None: neither.
        undecided: Nodes that are invited again some seconds later. The caller adds nodes that have not decided yet.
        known: Nodes that are not invited while they stay online.
    """

    def __init__(
        self,
        grid: Grid,
        envelope: Envelope,
        signer: Signer | None = None,
        undecided: set[int] | None = None,
        known: Iterable[int] = (),
    ) -> None:
        self._grid, self._envelope, self._signer = grid, envelope, signer or UnsignedSigner()
        self._undecided = set[int]() if undecided is None else undecided
        self._invited_at = dict.fromkeys(known, float("inf"))
        self._pending: dict[str, _Sent[int]] = {}

    @property
    def pending_nodes(self) -> frozenset[int]:
        """The invited nodes that have not replied."""
        return frozenset(sent.node for sent in self._pending.values())

    def send(self, lifetime: float) -> Iterator[tuple[int, str]]:
        """Invite the nodes that were not invited, or have not decided, and yield those that cannot be with the reason.

        Args:
            lifetime: Lifetime of the invitations, in seconds.
        """
        salt, now, invited_at = draw_salt(), time.monotonic(), self._invited_at
        online = set(self._grid.get_node_ids())
        for node in invited_at.keys() - online:
            del invited_at[node]
            self._undecided.discard(node)
        self._pending = {message: sent for message, sent in self._pending.items() if sent.node in online}
        due = [
            node
            for node in sorted(online)
            if node not in invited_at or (node in self._undecided and now - invited_at[node] >= _REINVITE_SECONDS)
        ]
        for start in range(0, len(due), _BATCH):
            addressed = [(node, node, self._envelope, 0) for node in due[start : start + _BATCH]]
            invited_at |= dict.fromkeys(due[start : start + _BATCH], now)
            self._undecided.difference_update(due[start : start + _BATCH])
            try:
                self._pending.update(_send(self._grid, self._signer, addressed, "query", lifetime, salt))
            except ObjectPushError:  # only of a large invitation
                salt = draw_salt()
                for node, *_ in addressed:
                    yield node, "it confirmed an invitation that it had not received"

    def receive(self) -> Iterator[tuple[int, Envelope | str]]:
        """Yield the nodes that have replied, with their replies or the reason for a missing one."""
        yield from _receive(self._grid, self._signer, self._pending)


def invite(
    grid: Grid,
    envelope: Envelope,
    seconds: float,
    signer: Signer | None = None,
    undecided: set[int] | None = None,
) -> Iterator[tuple[int, Envelope | str]]:
    """Send an envelope to all current and newly connecting nodes until time is up or the caller stops iterating.

    Args:
        grid: Flower's grid.
        envelope: The invitation.
        seconds: Seconds to wait.
        signer: Signs the invitation and verifies replies; None: neither.
        undecided: Nodes that are invited again some seconds later. The caller adds nodes that have not decided yet.

    Returns:
        Node ids with their replies, or with the reason for a missing reply in plain text.
    """
    deadline = time.monotonic() + seconds
    invitations = Invitations(grid, envelope, signer, undecided)
    while time.monotonic() < deadline:
        yield from invitations.send(max(1.0, deadline - time.monotonic()) + 60)
        polled = time.monotonic()
        yield from invitations.receive()
        time.sleep(max(0.0, polled + _POLL[1] / 2 - time.monotonic()))  # a grid may have waited itself
