"""Exchanges between a server and its clients: orders, made one by one, and the transport that brings replies back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping

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
"""Takes a client's id and its reply, or the reason why there is none; returns whether enough replies are there."""

OnTrained = Callable[[Assignment, Trained], None]
"""Takes every job that a client in this process has trained."""


class Orders(Mapping[str, Envelope]):
    """The orders of one exchange by client id, each made when it is taken: a cohort's are never in memory at once.

    Args:
        task: The kind of exchange: ``train``, ``evaluate``, ``export`` or a phase of secure aggregation.
        ids: Ids of the clients.
        make: Makes the order of a client.
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
    """Brings orders to hosts and replies back."""

    def begin(self, progress: Progress, on_trained: OnTrained | None = None) -> None:
        """Begin a round.

        Args:
            progress: The progress before the round.
            on_trained: Called with every job that was trained, where the clients are in this process.

        Raises:
            ValueError: If jobs cannot be watched, because the clients are in other processes.
        """
        if on_trained is not None:
            raise ValueError("clients in other processes cannot be watched")

    def stored(self) -> tuple[Mapping[str, Memory], Mapping[str, tuple[OptimizerState, int]]]:
        """The clients' memories and moments after the round, where they are in this process (see ``Progress``)."""
        return {}, {}

    @abstractmethod
    def exchange(self, orders: Orders, on_reply: OnReply, seconds: float, *, patient: bool = False) -> None:
        """Send every client its order and pass on the replies, in any order, until all are there or time is up.

        Args:
            orders: The orders.
            on_reply: Called with each reply as it comes; when it returns True, later replies are discarded.
            seconds: Time that the clients have, in seconds.
            patient: Wait for clients that cannot be reached, too, rather than give them up at once.
        """


def serial() -> int:
    """A number that is greater than those before, across restarts of the server, too."""
    return time.time_ns() // 1000


def share_tensors(one: Message, other: Message) -> bool:
    """Whether two messages hold the same tensor objects, so that one encoding serves both."""
    same = one.base is other.base and one.scalars == other.scalars and one.tensors.keys() == other.tensors.keys()
    return same and all(value is other.tensors[name] for name, value in one.tensors.items())


class OrderEncoder:
    """Makes the orders of one exchange; messages in a row that share their tensors are encoded once.

    Args:
        run: The name by which nodes know the run.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._last: tuple[Message, bytes] | None = None

    def order(self, task: OrderKind, round: int, to: str, client: Client | None, message: Message) -> Order:
        """An order to a client, with a greater serial than all before it."""
        if self._last is None or not share_tensors(message, self._last[0]):
            self._last = (message, serialization.encode(message))
        return Order(task, round, 0, 0.0, to, client, self._last[1], run=self.run, serial=serial())


class ClientLostState(ValueError):
    """A client that lost what it had stored."""


def open_reply(back: Envelope | str) -> Reply:
    """The answer in a reply.

    Raises:
        ValueError: If the reply cannot be decoded or reports a failure; ``ClientLostState`` if the client lost its
            store.
    """
    if isinstance(back, str):
        raise ValueError(back)
    answer = decode_reply(back)
    if answer.lost:
        raise ClientLostState(answer.failed or "it lost what it kept")
    if answer.failed is not None:
        raise ValueError(answer.failed)
    return answer
