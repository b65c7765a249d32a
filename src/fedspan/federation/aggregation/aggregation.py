"""The interface of a round's aggregation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from fedspan.core.values import Client, Reduced
from fedspan.crypto import require_packages
from fedspan.federation.aggregation.plaintext import PlaintextAggregation
from fedspan.federation.protocol import Masking, OrderEncoder, Reply
from fedspan.federation.round_context import RoundContext, Tally


class Aggregation(Protocol):
    """One round's aggregation."""

    quorum: int
    """Number of replies that the round needs."""
    replies: dict[str, Reply]
    """The accepted replies without their bodies, by client."""
    clipped: Mapping[str, float]
    """The factors by which changes were scaled down, by client; of several quantities, the smallest one."""
    lowered: Mapping[str, float]
    """The factors by which weights were lowered, by client."""

    def get_missing(self) -> tuple[str, ...]:
        """Return the clients that receive an order in the next attempt."""
        ...

    def open(self, clients: Mapping[str, Client], attempt: int, encoder: OrderEncoder) -> Mapping[str, Masking | None]:
        """Begin an attempt.

        Args:
            encoder: Encoder of the round's orders, which an aggregation uses that needs their messages before them.

        Returns:
            The clients that may train, with the parameters of the secure sum for each (None without one).
        """
        ...

    def compute_reply_bytes(self, client: Client) -> int:
        """Return the maximum size of the body of a client's reply, in bytes."""
        ...

    def add(self, client: Client, reply: Reply, attempt: int) -> bool:
        """Process a reply.

        Returns:
            Whether enough replies have arrived.
        """
        ...

    def close(self, attempt: int) -> Reduced:
        """End an attempt."""
        ...

    def get_counted(self) -> Collection[str]:
        """Return the clients whose replies would count if the attempt ended now."""
        ...

    def get_succeeded(self) -> Collection[str]:
        """Return the clients that did not cause the failure of a round."""
        ...

    def get_note(self) -> str | None:
        """Return a note on the aggregation for the user, or None."""
        ...


def create_aggregation(context: RoundContext, tally: Tally) -> Aggregation:
    """Create a round's aggregation: in plaintext, or under secure aggregation if the settings have it."""
    secure = context.settings.secure
    if secure is None:
        return PlaintextAggregation(context, tally)
    require_packages()
    from fedspan.federation.aggregation.secure import SecureAggregation  # needs fedspan[secagg]

    return SecureAggregation(context, tally, secure)
