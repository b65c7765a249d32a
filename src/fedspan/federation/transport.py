"""Transports: how the orders of an exchange reach their clients, and how the replies come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedspan.core.values import Trained
from fedspan.federation.progress import ClientState, OpenOrders, Progress
from fedspan.federation.protocol import Envelope
from fedspan.training.jobs import Assignment

OnReply = Callable[[str, Envelope | str], bool]
"""Takes a client's id and its reply or the reason for its absence; returns whether enough replies have arrived."""

OnTrained = Callable[[Assignment, Trained], None]
"""Takes every job that a client in this process trained."""


class Orders(Mapping[str, Envelope]):
    """The orders of one exchange by client id, each created on access, so that they need not be in memory at once.

    Args:
        task: The kind of exchange: ``train``, ``evaluate``, ``export`` or a phase of secure aggregation.
        reply_bytes: Computes the maximum size of the body of a client's reply, in bytes; None: unknown.
    """

    def __init__(
        self,
        task: str,
        ids: Iterable[str],
        make: Callable[[str], Envelope],
        reply_bytes: Callable[[str], int] | None = None,
    ) -> None:
        self.task, self._make, self._reply_bytes = task, make, reply_bytes
        self._ids = dict.fromkeys(ids)

    def replace_make(self, make: Callable[[str], Envelope]) -> Orders:
        """Return the exchange with orders that another function creates."""
        return Orders(self.task, self._ids, make, self._reply_bytes)

    def compute_reply_bytes(self, id: str) -> int | None:
        """Return the maximum size of the body of a client's reply, in bytes; None: unknown."""
        return None if self._reply_bytes is None else self._reply_bytes(id)

    def __getitem__(self, id: str) -> Envelope:
        if id not in self._ids:
            raise KeyError(id)
        return self._make(id)

    def __contains__(self, id: object) -> bool:
        return id in self._ids

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


class Transport(ABC):
    """Delivers orders to hosts and returns their replies."""

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        """Begin a round.

        Args:
            on_trained: Called with every trained job, if the clients are in this process.

        Raises:
            ValueError: If jobs cannot be observed because the clients are in other processes.
        """
        if on_trained is not None:
            raise ValueError("clients in other processes cannot be watched")

    def accept_replies(self, accepted: Collection[str]) -> Mapping[str, ClientState]:
        """Return the clients' stored states after the round, where this process stores them.

        Args:
            accepted: Ids of the clients whose replies were accepted; the state of others is dropped.
        """
        return {}

    def get_simulated_seconds(self) -> float | None:
        """Return the time that the round took on a simulated clock, in seconds; None: there is no such clock."""
        return None

    @abstractmethod
    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, wait_for_offline: bool = False) -> None:
        """Send every client its order and pass on the replies, in any order, until all have arrived or time is up.

        Args:
            on_reply: Called with each reply on arrival; after it returns True, later replies are discarded.
            seconds: Time limit for the clients, in seconds.
            wait_for_offline: Whether to wait for unreachable clients instead of giving them up at once.
        """

    def retain_orders(self, ids: Collection[str]) -> frozenset[str]:
        """Close the open orders of all clients but the given ones, and return those whose orders are still open.

        No order stays open after its exchange, unless the transport is asynchronous.
        """
        return frozenset()

    def list_training(self) -> frozenset[str]:
        """Return the clients that have not answered their open order."""
        return frozenset()

    def list_stalled(self) -> frozenset[str]:
        """Return the clients from which no reply is to be expected soon."""
        return frozenset()

    def select_resumable(self, open: OpenOrders) -> OpenOrders:
        """Return what a resumed run needs of open orders: with their states where this process trains the clients."""
        return open


class TimedTransport(Transport):
    """A transport whose clients train when the server says so, and reply by a simulated clock."""

    @abstractmethod
    def carry_out(self, orders: Orders, ids: Sequence[str], on_reply: Callable[[str, Envelope | str], object]) -> None:
        """Carry out orders to train, to compute statistics, or to evaluate.

        Args:
            on_reply: Called with each client's reply, in any order.
        """

    @abstractmethod
    def time_reply(self, id: str, round: int, attempt: int, seconds: float) -> tuple[float, str | None]:
        """Return when a client would reply to an order to train.

        Args:
            seconds: Time limit, in simulated seconds.

        Returns:
            The simulated time from the order to the reply or to the end of the wait for it, in seconds, and the reason
            if there is no reply; else None.
        """


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
        """``Transport.retain_orders``; every order that has not been sent is closed, too.

        A client whose order is closed may train on; its reply is discarded.
        """

    @abstractmethod
    def list_training(self) -> frozenset[str]:
        """``Transport.list_training``."""

    @abstractmethod
    def list_stalled(self) -> frozenset[str]:
        """``Transport.list_stalled``.

        Their open order has not been sent because they are offline, or they let the time limit of an order pass, or
        were assumed to train, and have not answered since.
        """

    @abstractmethod
    def assume_training(self, ids: Collection[str]) -> None:
        """Record that clients may train for orders that are closed, until they answer another one."""

    def select_resumable(self, open: OpenOrders) -> OpenOrders:
        """``Transport.select_resumable``: the clients' own machines hold the states that they train."""
        return replace(open, states={})
