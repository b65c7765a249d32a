"""What a round asks of its aggregation: exchanges beside training, and which replies count in its reduction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from fedspan.core.method import Method
from fedspan.core.values import Client, Reduced, ServerState
from fedspan.federation.orders import Transport
from fedspan.federation.outcomes import Failure, Transfer
from fedspan.federation.progress import ClientData
from fedspan.federation.protocol import Masking, Reply
from fedspan.federation.settings import RoundSettings
from fedspan.federation.validation import ReplyRules
from fedspan.training.settings import TrainingSettings

__all__ = ["Aggregation", "AggregationFactory", "RoundContext", "Tally"]


@dataclass(frozen=True)
class RoundContext:
    """What a round is: its method, clients, state and rules.

    Args:
        method: The run's method.
        settings: Rounds, reduction and privacy.
        training: Settings of local training.
        members: All clients of the federation.
        state: The server's state before the round.
        ids: The selected clients, sorted.
        drawn: The same in the order in which they were drawn.
        wanted: Number of replies that the round wants.
        rules: When the round stands.
        transport: The way to the clients.
        run: The run's name.
    """

    method: Method
    settings: RoundSettings
    training: TrainingSettings
    members: Mapping[str, ClientData]
    state: ServerState
    ids: tuple[str, ...]
    drawn: tuple[str, ...]
    wanted: int
    rules: ReplyRules
    transport: Transport
    run: str

    @property
    def fresh(self) -> Client:
        """A client of the cohort, as if it held nothing."""
        ids = self.ids or tuple(self.members)[:1]
        return replace(self.members[ids[0]].client, held=None)


@dataclass
class Tally:
    """What happened in a round so far.

    Args:
        transfers: Messages sent and received.
        failures: Clients whose replies do not count, attempt by attempt.
        lost: Clients that lost their store.
    """

    transfers: list[Transfer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)


class Aggregation(Protocol):
    """One round's aggregation."""

    quorum: int
    """Replies that the round needs."""
    answers: dict[str, Reply]
    """The answers that count, without their bodies, by client."""

    def missing(self) -> tuple[str, ...]:
        """The clients that the next attempt asks."""
        ...

    def open(self, clients: Mapping[str, Client], attempt: int) -> Mapping[str, Masking | None]:
        """Begin an attempt.

        Args:
            clients: The clients that it asks.
            attempt: Its number, from 0.

        Returns:
            The clients that may train, with what each has to know of a secure sum.

        Raises:
            TooFew: If too few clients are left.
        """
        ...

    def take(self, client: Client, answer: Reply, attempt: int) -> bool:
        """Take a reply.

        Returns:
            Whether enough replies are there.

        Raises:
            ValueError: If the reply does not count.
        """
        ...

    def close(self, attempt: int) -> Reduced:
        """End an attempt.

        Returns:
            The round's reduction.

        Raises:
            TooFew: If too few replies count.
        """
        ...

    def good(self) -> Collection[str]:
        """Clients that are not to blame for a round that failed."""
        ...

    def remark(self) -> str | None:
        """What a user should know of the aggregation; None: nothing."""
        ...


AggregationFactory = Callable[[RoundContext, Tally], Aggregation]
"""Makes the aggregation of a round."""
