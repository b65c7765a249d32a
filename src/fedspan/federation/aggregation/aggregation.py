"""The interface of a round's aggregation: exchanges besides training, and the replies that its reduction uses."""

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
    """The definition of a round: its method, clients, state and rules.

    Args:
        method: The run's method.
        settings: Rounds, reduction and privacy.
        training: Settings of local training.
        clients: All clients of the federation.
        state: The server's state before the round.
        ids: Ids of the selected clients, sorted.
        drawn: The same ids in the order in which they were drawn.
        wanted: Number of replies that the round aims for.
        rules: Rules for accepting replies and the round.
        transport: Transport to the clients.
        run: Name of the run.
    """

    method: Method
    settings: RoundSettings
    training: TrainingSettings
    clients: Mapping[str, ClientData]
    state: ServerState
    ids: tuple[str, ...]
    drawn: tuple[str, ...]
    wanted: int
    rules: ReplyRules
    transport: Transport
    run: str

    @property
    def fresh(self) -> Client:
        """Return a client of the cohort as if it stored nothing."""
        ids = self.ids or tuple(self.clients)[:1]
        return replace(self.clients[ids[0]].client, held=None)


@dataclass
class Tally:
    """The events of a round so far.

    Args:
        transfers: Messages sent and received.
        failures: Clients whose replies were not accepted, attempt by attempt.
        lost: Clients that lost their stored state.
    """

    transfers: list[Transfer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)


class Aggregation(Protocol):
    """One round's aggregation."""

    quorum: int
    """Number of replies that the round needs."""
    answers: dict[str, Reply]
    """The accepted replies without their bodies, by client."""

    def missing(self) -> tuple[str, ...]:
        """Return the clients that receive an order in the next attempt."""
        ...

    def open(self, clients: Mapping[str, Client], attempt: int) -> Mapping[str, Masking | None]:
        """Begin an attempt.

        Args:
            clients: The clients that receive an order.
            attempt: Number of the attempt, from 0.

        Returns:
            The clients that may train, with the parameters of the secure sum for each (None without one).

        Raises:
            TooFew: If too few clients remain.
        """
        ...

    def take(self, client: Client, answer: Reply, attempt: int) -> bool:
        """Process a reply.

        Returns:
            Whether enough replies have arrived.

        Raises:
            ValueError: If the reply is rejected.
        """
        ...

    def close(self, attempt: int) -> Reduced:
        """End an attempt.

        Returns:
            The round's reduction.

        Raises:
            TooFew: If too few replies were accepted.
        """
        ...

    def good(self) -> Collection[str]:
        """Return the clients that did not cause the failure of a round."""
        ...

    def remark(self) -> str | None:
        """Return a remark on the aggregation for the user, or None."""
        ...


AggregationFactory = Callable[[RoundContext, Tally], Aggregation]
"""Creates the aggregation of a round."""
