"""The interface of transports whose clients train on their own machines while the server does other things."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from fedspan.federation.protocol import Envelope, Orders, Transport

__all__ = ["AsynchronousTransport"]


class AsynchronousTransport(Transport):
    """A transport with open orders: they are sent now, and their replies are received later, beside other exchanges.

    A client has at most one open order. It is open until its reply is received, or the reason why there is none.
    """

    @abstractmethod
    def send_orders(self, orders: Orders, seconds: float, *, wait_for_offline: bool = False) -> None:
        """Send orders to clients without an open order, and return at once.

        Args:
            orders: The orders; each is created when its client is reached.
            seconds: Time limit for each client, in seconds.
            wait_for_offline: Whether to wait for unreachable clients instead of giving them up at once.
        """

    @abstractmethod
    def receive_reply(self) -> tuple[str, Envelope | str] | None:
        """Wait for the next reply to an open order.

        Returns:
            The client's id with its reply or the reason for its absence, in the order of arrival; None: no order is
            open.
        """

    @abstractmethod
    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        """Close the orders of all clients but the given ones, and every order that has not been sent.

        A client whose order is closed may train on; its reply is discarded.

        Returns:
            The clients whose orders are still open.
        """

    @abstractmethod
    def list_training(self) -> frozenset[str]:
        """Return the clients that have not answered their open order."""

    @abstractmethod
    def list_stalled(self) -> frozenset[str]:
        """Return the clients from which no reply is to be expected soon.

        Their open order has not been sent because they are offline, or they let the time limit of an order pass, or
        were assumed to train, and have not answered since.
        """

    @abstractmethod
    def assume_training(self, ids: Collection[str]) -> None:
        """Record that clients may train for orders that are closed, until they answer another one."""
