"""The server side of a deployment: a transport over HTTP, whose envelopes are answered or given up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import httpx

from fedspan.errors import escape_controls
from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders
from fedspan.transports.http.server import OutgoingOrder, RunLink, Taken
from fedspan.transports.http.signing import MARGIN, Body, OrderSigner, UnsignedSigner

A = TypeVar("A", str, int)

BATCH = 64
"""Maximum number of orders of a request."""
_STORED = 4
"""Number of bodies that are looked up among those that were encrypted."""
_LONGEST_REASON = 500
"""Maximum number of characters of the reason that comes with a failure."""
_REVOKED = "its node's key was revoked"
_POLL = 0.05, 1.0
"""Polling interval for replies in seconds: initial and maximum."""


@dataclass(frozen=True)
class PendingMessage(Generic[A]):
    """A message without a reply: its recipient, the node's id, and the nonce."""

    to: A
    node: int
    nonce: bytes


@dataclass(frozen=True)
class Arrival(Generic[A]):
    """An answer that has arrived: the message without a reply until now, and what answers it."""

    sent: PendingMessage[A]
    taken: Taken
    signer: OrderSigner

    def read(self) -> Envelope | str:
        """Return the reply, or the reason why there is no valid one."""
        if self.taken.failure:  # unsigned, in anybody's words
            return escape_controls(self.taken.failure[:_LONGEST_REASON])
        try:
            return self.signer.open(self.taken.read(), self.sent.node, self.sent.nonce)
        except ValueError as error:
            return escape_controls(str(error)[:_LONGEST_REASON])


class Delivery:
    """Orders that are sent together, until each has a reply or a reason why there is none.

    Args:
        seconds: Time limit for the clients, in seconds.
        offline_seconds: Time limit for clients whose nodes are offline, in seconds; None: they are given up at once.
    """

    def __init__(
        self,
        link: RunLink,
        signer: OrderSigner,
        nodes: Mapping[str, int],
        orders: Orders,
        seconds: float,
        offline_seconds: float | None,
    ) -> None:
        self._link, self._signer, self._nodes, self._seconds = link, signer, nodes, seconds
        self._bodies = Bodies(link, signer)
        self._orders: Orders | None = orders
        self._offline_seconds = None if offline_seconds is None else min(seconds, offline_seconds)
        self.unsent = dict.fromkeys(orders)
        """The clients whose orders have not been sent."""
        self.pending: dict[str, PendingMessage[str]] = {}
        """The messages without a reply, by message id."""
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
        """Send the orders of the nodes that are online, and yield the clients that are given up with the reason."""
        for id in [id for id in self.unsent if self._nodes[id] in revoked]:
            del self.unsent[id]
            yield id, _REVOKED
        gone = {message: sent.to for message, sent in self.pending.items() if sent.node in revoked}
        self._close(gone)
        for id in gone.values():
            yield id, _REVOKED
        online = self._link.list_online() if self.unsent else {}
        ready, orders = [id for id in self.unsent if self._nodes[id] in online], self._orders
        if orders is not None:
            for start in range(0, len(ready), BATCH):
                batch = {id: self._nodes[id] for id in ready[start : start + BATCH]}
                addressed = [
                    (id, node, online[node], orders[id], orders.compute_reply_bytes(id)) for id, node in batch.items()
                ]
                sent, refused = send_envelopes(self._link, self._signer, addressed, self._bodies)
                self.pending.update(sent)
                for id in batch:
                    del self.unsent[id]
                yield from refused
        self._release_orders()
        if self.unsent and time.monotonic() >= self._offline_until:
            reason = "is not online"
            if self._offline_seconds is not None:
                reason = f"was not online for {self._offline_seconds:g} s"
            given_up, self.unsent = sorted(self.unsent), {}
            self._release_orders()
            for id in given_up:
                yield id, f"its node {reason}"

    def _release_orders(self) -> None:
        """Release what creates the orders, which holds a whole round, as soon as no order will be sent any more."""
        if not self.unsent:
            self._orders, self._bodies = None, Bodies(self._link, self._signer)

    def claim(self, taken: Taken) -> Arrival[str] | None:
        """Return an answer to a pending order, which is pending no longer; None: it is none."""
        return claim_reply(taken, self._signer, self.pending)

    def expire(self) -> Iterator[tuple[str, str]]:
        """Give up all clients without a reply, and yield them with the reason."""
        pending, unsent = sorted(sent.to for sent in self.pending.values()), sorted(self.unsent)
        self.close()
        for id in pending:
            yield id, f"no reply within {self._seconds:g} s"
        for id in unsent:
            yield id, f"its node was not online for {self._seconds:g} s"

    def retain(self, ids: Collection[str]) -> None:
        """Give up without a reason all orders that have not been sent, and those of all clients but the given ones."""
        self.unsent = {}
        self._release_orders()
        self._close({message: sent.to for message, sent in self.pending.items() if sent.to not in ids})

    def close(self) -> None:
        """Give up all orders without a reason."""
        self.retain(())

    def _close(self, messages: Collection[str]) -> None:
        self.pending = {message: sent for message, sent in self.pending.items() if message not in messages}
        self._link.cancel(list(messages))


class Bodies:
    """The bodies of the last orders, each encrypted and stored once for all orders that have it."""

    def __init__(self, link: RunLink, signer: OrderSigner) -> None:
        self._link, self._signer = link, signer
        self._stored = list[tuple[bytes, Body, str]]()

    def store(self, plain: bytes) -> tuple[Body, str]:
        """Return a body as it is sent, and its name on the server."""
        for known, body, name in self._stored:
            if known is plain:
                return body, name
        body = self._signer.encrypt(plain)
        name = self._link.store_body(body.data)
        body = replace(body, data=b"")
        self._stored = [(plain, body, name), *self._stored[: _STORED - 1]]
        return body, name

    def forget(self) -> None:
        """Forget the stored bodies: the server deletes one with the last order that has it."""
        self._stored.clear()


def send_envelopes(
    link: RunLink,
    signer: OrderSigner,
    addressed: Iterable[tuple[A, int, bytes, Envelope, int | None]],
    bodies: Bodies,
) -> tuple[dict[str, PendingMessage[A]], list[tuple[A, str]]]:
    """Send envelopes in one request.

    Args:
        addressed: Tuples of recipient, id of the node, its signed sealing key, envelope, and maximum size of the
            reply's body in bytes (None: that of the server).

    Returns:
        The messages, by id, and the recipients to whom nothing can be sealed, with the reason.
    """
    addressed = list(addressed)
    try:
        return _send(link, signer, addressed, bodies)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.CONFLICT:
            raise
        bodies.forget()  # one was deleted with the last order that had it
        return _send(link, signer, addressed, bodies)


def _send(
    link: RunLink,
    signer: OrderSigner,
    addressed: Iterable[tuple[A, int, bytes, Envelope, int | None]],
    bodies: Bodies,
) -> tuple[dict[str, PendingMessage[A]], list[tuple[A, str]]]:
    sent, orders, refused = list[PendingMessage[A]](), list[OutgoingOrder](), list[tuple[A, str]]()
    for to, node, sealing, envelope, reply_bytes in addressed:
        body, name = bodies.store(envelope.body)
        try:
            head, nonce = signer.seal(envelope.header, body, node, sealing)
        except ValueError as error:  # its key was revoked, or is none
            refused.append((to, escape_controls(str(error)[:_LONGEST_REASON])))
            continue
        limit = link.limit if reply_bytes is None else min(link.limit, reply_bytes)
        orders.append(OutgoingOrder(node, head, name, limit + MARGIN))
        sent.append(PendingMessage(to, node, nonce))
    return (dict(zip(link.send_orders(orders), sent, strict=True)) if orders else {}), refused


def claim_reply(taken: Taken, signer: OrderSigner, pending: dict[str, PendingMessage[A]]) -> Arrival[A] | None:
    """Remove what an answer answers from the messages without a reply.

    Returns:
        The answer with its message; None: it answers none of them.
    """
    sent = pending.pop(taken.order, None)
    return None if sent is None else Arrival(sent, taken, signer)


class ServerTransport(AsynchronousTransport):
    """Sends envelopes to nodes and waits for their replies.

    Args:
        reconnect_timeout: Time limit for offline nodes in an exchange that waits for them, in seconds.
        signer: Seals orders and opens replies; None: without keys.
        revoked: Returns the nodes whose keys were revoked, which no exchange waits for.
    """

    def __init__(
        self,
        link: RunLink,
        nodes: Mapping[str, int],
        reconnect_timeout: float = 300.0,
        signer: OrderSigner | None = None,
        revoked: Callable[[], Collection[int]] = tuple,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_poll = on_poll
        self.link, self.nodes, self.reconnect_timeout = link, nodes, reconnect_timeout
        self.signer, self.revoked = signer or UnsignedSigner(), revoked
        self._open = list[Delivery]()
        self._arrived = deque[tuple[str, str | Arrival[str]]]()
        self._overdue = set[str]()

    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        """``Transport.exchange``; replies to open orders that arrive meanwhile wait for ``receive_reply``."""
        delivery = self._create_delivery(orders, seconds, wait_for_offline)
        try:
            for id, reply in self._receive_replies(delivery):
                if on_reply(id, reply):
                    return
        finally:
            delivery.close()

    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        delivery = self._create_delivery(orders, seconds, wait_for_offline)
        self._open.append(delivery)
        self._arrived += delivery.send(self.revoked())

    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        pause = _POLL[0]
        while not self._arrived:
            if not self._open:
                return None
            polled = time.monotonic()
            self._on_poll()
            self._send_open(self.revoked())
            for _ in self._pull(None):
                pass  # there is no exchange beside the open orders
            self._expire_open()
            if not self._arrived and self._open:
                time.sleep(max(0.0, polled + pause - time.monotonic()))  # the server may have waited itself
                pause = min(2 * pause, _POLL[1])
        id, answer = self._arrived.popleft()
        return id, answer if isinstance(answer, str) else answer.read()

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        for delivery in self._open:
            delivery.retain(ids)
        self._open = [delivery for delivery in self._open if not delivery.is_done]
        unread = [answer for id, answer in self._arrived if id not in ids and isinstance(answer, Arrival)]
        self._arrived = deque((id, answer) for id, answer in self._arrived if id in ids)
        self.link.cancel([arrival.taken.order for arrival in unread])
        return frozenset((*self._list_open(), *(id for id, _ in self._arrived)))

    def list_training(self) -> frozenset[str]:
        return frozenset(self._list_open())

    def list_stalled(self) -> frozenset[str]:
        return frozenset((*self._overdue, *(id for delivery in self._open for id in delivery.unsent)))

    def assume_training(self, ids: Collection[str]) -> None:
        self._overdue.update(ids)

    def _list_open(self) -> Iterator[str]:
        for delivery in self._open:
            yield from delivery.list_clients()

    def _create_delivery(self, orders: Orders, seconds: float, wait_for_offline: bool) -> Delivery:
        offline_seconds = self.reconnect_timeout if wait_for_offline else None
        return Delivery(self.link, self.signer, self.nodes, orders, seconds, offline_seconds)

    def _receive_replies(self, delivery: Delivery) -> Iterator[tuple[str, Envelope | str]]:
        """Yield the replies of an exchange until all have arrived or its time is up."""
        pause = _POLL[0]
        while True:
            self._on_poll()
            revoked = self.revoked()
            yield from delivery.send(revoked)
            self._send_open(revoked)
            received_any, polled = False, time.monotonic()
            for id, reply in self._pull(delivery):
                received_any = True
                yield id, reply
            self._expire_open()
            if delivery.is_done:
                return
            if delivery.is_late:
                yield from delivery.expire()
                return
            pause = _POLL[0] if received_any else min(2 * pause, _POLL[1])
            time.sleep(max(0.0, polled + pause - time.monotonic()))  # the server may have waited itself

    def _send_open(self, revoked: Collection[int]) -> None:
        """Send open orders that have not been sent, as far as their nodes are online by now."""
        for delivery in self._open:
            self._arrived += delivery.send(revoked)

    def _expire_open(self) -> None:
        for delivery in self._open:
            if delivery.is_late:
                self._overdue.update(sent.to for sent in delivery.pending.values())
                self._arrived += delivery.expire()
        self._open = [delivery for delivery in self._open if not delivery.is_done]

    def _pull(self, delivery: Delivery | None) -> Iterator[tuple[str, Envelope | str]]:
        """Yield the available replies of an exchange; those to open orders wait, and are read when they are used."""
        deliveries = [*self._open, *(() if delivery is None else (delivery,))]
        ids = sorted(id for waiting in deliveries for id in waiting.pending)
        own = list[Taken]()
        for taken in self.link.take_replies(ids) if ids else ():
            claims = (waiting.claim(taken) for waiting in self._open)
            arrival = next((claimed for claimed in claims if claimed is not None), None)
            if arrival is None:
                own.append(taken)
            else:
                self._arrived.append((arrival.sent.to, arrival))
                self._record_answer(arrival)
        for taken in own:
            arrival = None if delivery is None else delivery.claim(taken)
            if arrival is not None:
                self._record_answer(arrival)
                yield arrival.sent.to, arrival.read()

    def _record_answer(self, arrival: Arrival[str]) -> None:
        """Record that a client has answered, so it does not train for an order that was closed before."""
        if not arrival.taken.failure:
            self._overdue.discard(arrival.sent.to)
