"""What a server's rounds, evaluations and exports have in common: orders out, answers in, by a transport."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from fedspan.core.values import Client, Message
from fedspan.engines import wire
from fedspan.engines.broadcast import the_very_same
from fedspan.engines.parcels import Answer, Asked, Order, Parcel, open_answer

__all__ = ["Asking", "Forgot", "Transport", "opened", "serial"]


class Transport(Protocol):
    """Brings parcels to clients and their answers back."""

    def exchange(
        self, parcels: Mapping[str, Parcel], seconds: float, *, patient: bool = False
    ) -> Iterator[tuple[str, Parcel | str]]:
        """Send every client its parcel, and hand out what comes back, in any order, until all did or time is up.

        Who has enough stops taking; what comes after that is thrown away.

        Args:
            parcels: by client id.
            seconds: to wait.
            patient: wait for clients that can't be reached, too; else they are given up at once.

        Returns:
            Client ids with their answers, or with the reason in words why there is none.
        """
        ...


def serial() -> int:
    """A number that is greater than those before, across restarts of the server, too."""
    return time.time_ns() // 1000


class Asking:
    """Makes the orders of one exchange; messages in a row with the very same tensors are encoded once.

    Args:
        run: the name by which nodes know it.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._last: tuple[Message, bytes] | None = None

    def order(self, task: Asked, round: int, to: str, client: Client | None, message: Message) -> Order:
        """An order to a client, newer than all before it."""
        if self._last is None or not the_very_same(message, self._last[0]):
            self._last = (message, wire.encode(message))
        return Order(task, round, 0, 0.0, to, client, self._last[1], run=self.run, serial=serial())


class Forgot(ValueError):
    """A client that lost what it kept."""


def opened(back: Parcel | str) -> Answer:
    """What came back.

    Raises:
        ValueError: if it is no answer, or says that it failed; ``Forgot`` if that is why.
    """
    if isinstance(back, str):
        raise ValueError(back)
    answer = open_answer(back)
    if answer.lost:
        raise Forgot(answer.failed or "it lost what it kept")
    if answer.failed is not None:
        raise ValueError(answer.failed)
    return answer
