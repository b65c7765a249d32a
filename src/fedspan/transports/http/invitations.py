"""The invitations of nodes to a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from fedspan.federation.protocol import Envelope
from fedspan.transports.http.server import RunLink
from fedspan.transports.http.signing import OrderSigner, UnsignedSigner
from fedspan.transports.http.transport import BATCH, Bodies, PendingMessage, claim_reply, send_envelopes

log = logging.getLogger(__name__)

_POLL = 1.0
"""Seconds to wait for replies, between two invitations of nodes that have come online."""
_REINVITE_SECONDS = 5.0
"""Seconds after which a node that has not decided is invited again."""


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
            yield from invitations.receive(_POLL)
            time.sleep(max(0.0, polled + _POLL / 2 - time.monotonic()))  # the server may have waited itself
    finally:
        invitations.close()
