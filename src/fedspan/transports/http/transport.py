"""The server side of a deployment: a transport over HTTP, and the invitations of nodes to a run."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from fedspan.federation.protocol import Envelope
from fedspan.federation.transport import AsynchronousTransport, OnReply, Orders
from fedspan.transports.http.deliveries import (
    BATCH,
    Arrival,
    Bodies,
    Delivery,
    PendingMessage,
    claim_reply,
    send_envelopes,
)
from fedspan.transports.http.link import RunLink, Taken
from fedspan.transports.http.signing import OrderSigner, UnsignedSigner

log = logging.getLogger(__name__)

_REINVITE_SECONDS = 5.0
"""Seconds after which a node that has not decided is invited again."""
_POLL = 0.05, 1.0
"""Polling interval for replies in seconds: initial and maximum."""


class ServerTransport(AsynchronousTransport):
    """Sends envelopes to nodes and waits for their replies.

    Args:
        reconnect_timeout: Time limit for offline nodes in an exchange that waits for them, in seconds.
        signer: Seals orders and opens replies; None: without keys.
        revoked: Returns the nodes whose keys were revoked, which no exchange waits for.
        on_poll: Called again and again while replies are awaited.
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
        """``AsynchronousTransport.send_orders``."""
        delivery = self._create_delivery(orders, seconds, wait_for_offline)
        self._open.append(delivery)
        self._arrived += delivery.send(self.revoked())

    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        """``AsynchronousTransport.receive_reply``."""
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
        """``AsynchronousTransport.retain_orders``."""
        for delivery in self._open:
            delivery.retain(ids)
        self._open = [delivery for delivery in self._open if not delivery.is_done]
        unread = [answer for id, answer in self._arrived if id not in ids and isinstance(answer, Arrival)]
        self._arrived = deque((id, answer) for id, answer in self._arrived if id in ids)
        self.link.cancel([arrival.taken.order for arrival in unread])
        return frozenset((*self._list_open(), *(id for id, _ in self._arrived)))

    def list_training(self) -> frozenset[str]:
        """``AsynchronousTransport.list_training``."""
        return frozenset(self._list_open())

    def list_stalled(self) -> frozenset[str]:
        """``AsynchronousTransport.list_stalled``."""
        return frozenset((*self._overdue, *(id for delivery in self._open for id in delivery.unsent)))

    def assume_training(self, ids: Collection[str]) -> None:
        """``AsynchronousTransport.assume_training``."""
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
        """Give up the open orders whose time limits have passed."""
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


class Invitations:
    """The invitations of a run to all nodes that are or come online.

    A node that goes offline is invited again when it comes back; its earlier invitation is void.

    Args:
        signer: Seals the invitation and opens replies; None: without keys.
        undecided: Nodes that are invited again some seconds later. The caller adds nodes that have not decided yet.
        known: Nodes that are not invited while they stay online.
    """

    def __init__(
        self,
        link: RunLink,
        envelope: Envelope,
        signer: OrderSigner | None = None,
        undecided: set[int] | None = None,
        known: Iterable[int] = (),
    ) -> None:
        self._link, self._envelope, self._signer = link, envelope, signer or UnsignedSigner()
        self._undecided = set[int]() if undecided is None else undecided
        self._invited_at = dict.fromkeys(known, float("inf"))
        self._pending: dict[str, PendingMessage[int]] = {}

    @property
    def pending_nodes(self) -> frozenset[int]:
        """The invited nodes that have not replied."""
        return frozenset(sent.node for sent in self._pending.values())

    def send(self) -> None:
        """Invite the nodes that were not invited, or have not decided."""
        now, invited_at, online = time.monotonic(), self._invited_at, self._link.list_online()
        for node in invited_at.keys() - online.keys():
            del invited_at[node]
            self._undecided.discard(node)
        gone = [message for message, sent in self._pending.items() if sent.node not in online]
        for message in gone:
            del self._pending[message]
        self._link.cancel(gone)
        due = [
            node
            for node in sorted(online)
            if node not in invited_at or (node in self._undecided and now - invited_at[node] >= _REINVITE_SECONDS)
        ]
        invited_at |= dict.fromkeys(due, now)
        self._undecided.difference_update(due)
        bodies = Bodies(self._link, self._signer)
        for start in range(0, len(due), BATCH):
            addressed = [(node, node, online[node], self._envelope, 0) for node in due[start : start + BATCH]]
            sent, refused = send_envelopes(self._link, self._signer, addressed, bodies)
            self._pending.update(sent)
            for node, reason in refused:
                log.warning("node %d cannot be invited: %s", node, reason)

    def receive(self, seconds: float) -> Iterator[tuple[int, Envelope | str]]:
        """Yield the nodes that have replied, with their replies or the reason for a missing one.

        Args:
            seconds: Seconds to wait for the first reply.
        """
        for taken in self._link.take_replies(list(self._pending), seconds) if self._pending else ():
            if (arrival := claim_reply(taken, self._signer, self._pending)) is not None:
                yield arrival.sent.to, arrival.read()

    def close(self) -> None:
        """Give up the invitations without a reply."""
        self._link.cancel(list(self._pending))
        self._pending = {}


def invite(
    link: RunLink,
    envelope: Envelope,
    seconds: float,
    signer: OrderSigner | None = None,
    undecided: set[int] | None = None,
) -> Iterator[tuple[int, Envelope | str]]:
    """Invite nodes (``Invitations``) until time is up or the caller stops iterating; yield what they reply."""
    deadline = time.monotonic() + seconds
    invitations = Invitations(link, envelope, signer, undecided)
    try:
        while time.monotonic() < deadline:
            invitations.send()
            polled = time.monotonic()
            yield from invitations.receive(_POLL[1])
            time.sleep(max(0.0, polled + _POLL[1] / 2 - time.monotonic()))  # the server may have waited itself
    finally:
        invitations.close()
