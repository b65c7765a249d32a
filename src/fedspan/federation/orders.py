"""Exchanges between a server and its clients: orders, created one by one, and the transport that returns replies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from fedspan.core.method import Memory
from fedspan.core.values import Client, Message, OptimizerState, Trained
from fedspan.federation import serialization
from fedspan.federation.progress import Progress
from fedspan.federation.protocol import Envelope, Order, OrderKind, Reply, decode_reply
from fedspan.training.jobs import Assignment

__all__ = [
    "ClientLostState",
    "OnReply",
    "OnTrained",
    "OrderEncoder",
    "Orders",
    "Transport",
    "open_reply",
    "serial",
    "share_tensors",
]

OnReply = Callable[[str, Envelope | str], bool]
"""Takes a client's id and its reply or the reason for its absence; returns whether enough replies have arrived."""

OnTrained = Callable[[Assignment, Trained], None]
"""Takes every job that a client in this process trained."""


class Orders(Mapping[str, Envelope]):
    """The orders of one exchange by client id, each created on access: they are never all in memory at once.

    Args:
        task: The kind of exchange: ``train``, ``evaluate``, ``export`` or a phase of secure aggregation.
        ids: Ids of the clients.
        make: Creates the order of a client.
    """

    def __init__(self, task: str, ids: Iterable[str], make: Callable[[str], Envelope]) -> None:
        self.task, self._make = task, make
        self._ids = dict.fromkeys(ids)

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
            progress: The progress before the round.
            on_trained: Called with every trained job, if the clients are in this process.

        Raises:
            ValueError: If jobs cannot be observed because the clients are in other processes.
        """
        if on_trained is not None:
            raise ValueError("clients in other processes cannot be watched")

    def stored(
        self, accepted: Collection[str]
    ) -> tuple[Mapping[str, Memory], Mapping[str, tuple[OptimizerState, int]]]:
        """Return the clients' memories and moments after the round, where they are in this process.

        Args:
            accepted: Ids of the clients whose replies were accepted; the state of others is dropped.
        """
        return {}, {}

    def simulated_seconds(self) -> float | None:
        """Return the time that the round took on a simulated clock, in seconds; None: there is no such clock."""
        return None

    @abstractmethod
    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, patient: bool = False) -> None:
        """Send every client its order and pass on the replies, in any order, until all have arrived or time is up.

        Args:
            orders: The orders.
            on_reply: Called with each reply on arrival; after it returns True, later replies are discarded.
            seconds: Time limit for the clients, in seconds.
            patient: Whether to wait for unreachable clients instead of giving them up at once.
        """


def serial() -> int:
    """Return a number greater than all earlier ones, also across restarts of the server."""
    return time.time_ns() // 1000


def share_tensors(one: Message, other: Message) -> bool:
    """Check whether two messages hold the same tensor objects, so that one encoding serves both."""
    same = one.base is other.base and one.scalars == other.scalars and one.tensors.keys() == other.tensors.keys()
    return same and all(value is other.tensors[name] for name, value in one.tensors.items())


class OrderEncoder:
    """Creates the orders of one exchange; consecutive messages that share their tensors are encoded once.

    Args:
        run: Name of the run, as its nodes know it.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._last: tuple[Message, bytes] | None = None

    def order(self, task: OrderKind, round: int, to: str, client: Client | None, message: Message) -> Order:
        """Create an order to a client, with a greater serial than all earlier orders."""
        if self._last is None or not share_tensors(message, self._last[0]):
            self._last = (message, serialization.encode(message))
        return Order(task, round, 0, 0.0, to, client, self._last[1], run=self.run, serial=serial())


class ClientLostState(ValueError):
    """Raised for a client that lost its stored state."""


def open_reply(back: Envelope | str) -> Reply:
    """Decode the reply in an envelope.

    Raises:
        ValueError: If the reply cannot be decoded or reports a failure; ``ClientLostState`` if the client lost its
            stored state.
    """
    if isinstance(back, str):
        raise ValueError(back)
    answer = decode_reply(back)
    if answer.lost:
        raise ClientLostState(answer.failed or "its stored state is lost")
    if answer.failed is not None:
        raise ValueError(answer.failed)
    return answer
