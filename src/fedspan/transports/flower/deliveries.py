"""Envelopes on their way through Flower's grid: sent, answered, or given up."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
from flwr.app import Message

from fedspan.errors import escape_controls
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import Orders
from fedspan.transports.flower.adapter import ObjectPushError
from fedspan.transports.flower.grid import Grid
from fedspan.transports.flower.messages import draw_salt, from_records, to_records
from fedspan.transports.flower.signing import Signer
from fedspan.transports.flower.wire import BATCH_BYTES, format_reply_limit

__all__ = ["BATCH", "Delivery", "PendingMessage", "read_reply", "send_envelopes"]

A = TypeVar("A", str, int)

BATCH = 64
"""Maximum number of orders of a request."""
_OVERHEAD = 2048
"""Size of an order's objects beside its header and body, in bytes."""
_MARGIN = 1 << 20
"""Maximum size of what a reply has beside its body, in bytes: its header, and Flower's records around both."""
_LIFETIME = 60.0
"""Seconds for which a message outlives its time limit."""
_LONGEST_REASON = 500
"""Maximum number of characters of the reason that comes with a failure."""
_REVOKED = "its node's key was revoked"


@dataclass(frozen=True)
class PendingMessage(Generic[A]):
    """A message without a reply: its recipient, the node's id, and the nonce."""

    to: A
    node: int
    nonce: bytes


class Delivery:
    """Orders that are sent together, until each has a reply or a reason why there is none.

    Args:
        grid: Flower's grid.
        signer: Signs orders and verifies replies.
        nodes: Flower's node id of each client.
        orders: The orders.
        seconds: Time limit for the clients, in seconds.
        offline_seconds: Time limit for clients whose nodes are offline, in seconds; None: they are given up at once.
    """

    def __init__(
        self,
        grid: Grid,
        signer: Signer,
        nodes: Mapping[str, int],
        orders: Orders,
        seconds: float,
        offline_seconds: float | None,
    ) -> None:
        self._grid, self._signer, self._nodes, self._seconds = grid, signer, nodes, seconds
        self._orders: Orders | None = orders
        self._offline_seconds = None if offline_seconds is None else min(seconds, offline_seconds)
        self.unsent = dict.fromkeys(orders)
        """The clients whose orders have not been sent."""
        self.pending: dict[str, PendingMessage[str]] = {}
        """The messages without a reply, by message id."""
        self._refused = set[str]()
        started = time.monotonic()
        self._deadline, self._offline_until = started + seconds, started + (self._offline_seconds or 0.0)

    @property
    def is_done(self) -> bool:
        """Whether every order has a reply, or a reason why there is none."""
        return not self.pending and not self.unsent

    @property
    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() > self._deadline

    def list_clients(self) -> list[str]:
        """Return the clients without a reply."""
        return [*self.unsent, *(sent.to for sent in self.pending.values())]

    def send(self, revoked: Collection[int]) -> Iterator[tuple[str, str]]:
        """Send the orders of the nodes that are online, and yield the clients that are given up with the reason.

        Args:
            revoked: The nodes whose keys were revoked.
        """
        for id in [id for id in self.unsent if self._nodes[id] in revoked]:
            del self.unsent[id]
            yield id, _REVOKED
        for message, sent in list(self.pending.items()):
            if sent.node in revoked:
                del self.pending[message]
                yield sent.to, _REVOKED
        online = set(self._grid.get_node_ids()) if self.unsent else set[int]()
        salt = draw_salt()
        ready = [id for id in self.unsent if self._nodes[id] in online]
        for batch in () if self._orders is None else _split_batches(self._orders, ready):
            try:
                try:
                    sent = self._send_batch(batch, salt)
                except httpx.HTTPStatusError as error:
                    if not _can_be_resent(error):
                        raise
                    salt = draw_salt()  # a node may have announced the body's name with other children
                    sent = self._send_batch(batch, salt)
            except ObjectPushError:  # its node deleted the message while it was sent; only a large one is alone
                salt = draw_salt()  # no object of the next message may have a name that this node knows
                for id, _ in batch:
                    del self.unsent[id]
                    yield id, "its node confirmed an order that it had not received"
                continue
            except httpx.HTTPStatusError as error:
                if not _can_be_resent(error):
                    raise
                salt = draw_salt()
                self._refused.update(id for id, _ in batch)  # sent again while offline nodes are waited for
                continue
            self.pending.update(sent)
            for message in sent.values():
                del self.unsent[message.to]
        self._release_orders()
        if time.monotonic() >= self._offline_until:
            reason = "is not online"
            if self._offline_seconds is not None:
                reason = f"was not online for {self._offline_seconds:g} s"
            given_up, self.unsent = sorted(self.unsent), {}
            self._release_orders()
            for id in given_up:
                yield id, "the SuperLink did not take its order" if id in self._refused else f"its node {reason}"

    def _send_batch(self, batch: Iterable[tuple[str, Envelope]], salt: bytes) -> dict[str, PendingMessage[str]]:
        assert self._orders is not None
        lifetime = max(self._deadline - time.monotonic(), 0) + _LIFETIME
        addressed = [(id, self._nodes[id], envelope, self._orders.compute_reply_bytes(id)) for id, envelope in batch]
        return send_envelopes(self._grid, self._signer, addressed, "train", lifetime, salt)

    def _release_orders(self) -> None:
        """Release what creates the orders, which holds a whole round, as soon as no order will be sent any more."""
        if not self.unsent:
            self._orders = None

    def receive(self, message: Message) -> tuple[str, Envelope | str] | None:
        """Return the client and the reply of a message that is one to a pending order; None: it is not."""
        return read_reply(message, self._signer, self.pending)

    def expire(self) -> Iterator[tuple[str, str]]:
        """Give up all clients without a reply, and yield them with the reason."""
        pending, unsent = sorted(sent.to for sent in self.pending.values()), sorted(self.unsent)
        self.pending, self.unsent = {}, {}
        for id in pending:
            yield id, f"no reply within {self._seconds:g} s"
        for id in unsent:
            yield id, f"its node was not online for {self._seconds:g} s"

    def retain(self, ids: Collection[str]) -> None:
        """Give up without a reason all orders that have not been sent, and those of all clients but the given ones."""
        self.unsent = {}
        self._release_orders()
        self.pending = {message: sent for message, sent in self.pending.items() if sent.to in ids}


def send_envelopes(
    grid: Grid,
    signer: Signer,
    addressed: Iterable[tuple[A, int, Envelope, int | None]],
    kind: str,
    seconds: float,
    salt: bytes,
) -> dict[str, PendingMessage[A]]:
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
    sent = list[PendingMessage[A]]()
    messages = list[Message]()
    for to, node, envelope, reply_bytes in addressed:
        sealed = signer.seal(envelope, node)
        group = format_reply_limit(None if reply_bytes is None else reply_bytes + _MARGIN)
        messages.append(Message(to_records(sealed, salt), node, kind, ttl=seconds, group_id=group))
        sent.append(PendingMessage(to, node, sealed.nonce))
    return {id: message for id, message in zip(grid.push_messages(messages), sent, strict=False) if id}


def read_reply(
    message: Message, signer: Signer, pending: dict[str, PendingMessage[A]]
) -> tuple[A, Envelope | str] | None:
    """Return the sender and the reply of a message, and remove what it answers from ``pending``.

    Args:
        message: The message.
        signer: Verifies the reply.
        pending: The messages without a reply, by message id.

    Returns:
        The sender with its reply, or with the reason why it is not valid; None: the message answers none of them.
    """
    sent = pending.pop(message.metadata.reply_to_message_id, None)
    if sent is None:
        return None
    if message.has_error():
        reason = escape_controls((message.error.reason or "none")[:_LONGEST_REASON])  # unsigned, in anybody's words
        return sent.to, f"its node failed (Flower's code {message.error.code}: {reason})"
    try:
        return sent.to, signer.open(from_records(message.content), sent.node, sent.nonce)
    except ValueError as error:
        return sent.to, escape_controls(str(error)[:_LONGEST_REASON])


def _can_be_resent(error: httpx.HTTPStatusError) -> bool:
    """Return whether a refusal concerns the names of a request's objects, or the moment, rather than the request."""
    return error.response.status_code >= 500 or error.response.status_code == httpx.codes.CONFLICT


def _split_batches(orders: Orders, ids: Iterable[str]) -> Iterator[list[tuple[str, Envelope]]]:
    """Yield orders with their clients in batches that are sent in one request; a large order is one of its own."""
    batch, size = list[tuple[str, Envelope]](), 0
    for id in ids:
        envelope = orders[id]
        envelope_size = len(envelope.body) + len(envelope.header) + _OVERHEAD
        if batch and (size + envelope_size > BATCH_BYTES or len(batch) == BATCH):
            yield batch
            batch, size = [], 0
        batch.append((id, envelope))
        size += envelope_size
    if batch:
        yield batch
