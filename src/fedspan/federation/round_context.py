"""The definition of a round, and the record of its events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedspan.core.method import Method
from fedspan.core.values import Client, Message, ServerState
from fedspan.federation.changes import ChangeSize
from fedspan.federation.config import RoundSettings
from fedspan.federation.plausibility import limit_weights
from fedspan.federation.progress import ClientData, Failure, Purpose, Transfer
from fedspan.federation.transport import Transport
from fedspan.training.config import TrainingSettings


@dataclass(frozen=True)
class RoundContext:
    """The definition of a round: its method, clients, state and settings."""

    method: Method
    settings: RoundSettings
    training: TrainingSettings
    clients: Mapping[str, ClientData]
    state: ServerState
    ids: tuple[str, ...]
    """Ids of the selected clients, sorted."""
    draw_order: tuple[str, ...]
    """The same ids in the order in which they were drawn."""
    target: int
    """Number of replies that the round aims for."""
    transport: Transport
    run: str
    task: Literal["train", "second", "statistics"] = "train"
    """Kind of the orders whose replies are aggregated."""
    check: Callable[[Message, Client], None] | None = None
    """Further check of a reply in plaintext, which raises ``ValueError``; None: no further check."""
    measure: Callable[[Message], ChangeSize] | None = None
    """Returns the size by which replies are scaled down; None: that of their changes."""
    absent: frozenset[str] = frozenset()
    """Clients of the cohort that are not waited for if the others suffice."""
    sent: Mapping[str, ServerState] = field(default_factory=dict)
    """Earlier states of the server that clients of the round train, by client; the others train ``state``."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors by which the round's first exchange scaled changes down, by client, which also apply to the changes of
    the second one."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Limited weights of the clients that the round's first exchange selected, which also limit those of the second
    one; empty: they are computed."""

    def limit_weights(self) -> Mapping[str, float]:
        """Return the weights of the selected clients, limited by what they and the whole cohort may have.

        In a second exchange they are those of the first one, which may have selected more clients.
        """
        selected = {id: self.clients[id] for id in self.ids}
        return self.weights or limit_weights(selected, self.settings.max_weight_ratio)

    def get_sent_state(self, id: str) -> ServerState:
        """Return the state of the server that a client of the round was sent."""
        return self.sent.get(id, self.state)

    @property
    def purpose(self) -> Purpose:
        """Purpose of the round's messages in the ledger; both exchanges of a round are part of the training."""
        return "statistics" if self.task == "statistics" else "train"

    @property
    def new_client(self) -> Client:
        """Return a client of the cohort as if it stored nothing."""
        ids = self.ids or tuple(self.clients)[:1]
        return replace(self.clients[ids[0]].client, last_round=None)


@dataclass
class Tally:
    """The events of a round so far."""

    transfers: list[Transfer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    """Clients whose replies were not accepted, attempt by attempt."""
    lost: set[str] = field(default_factory=set)

    def extend(self, other: Tally) -> None:
        """Add the transfers and failures of the round's second exchange."""
        self.transfers += other.transfers
        self.failures += [replace(one, reason=f"second exchange: {one.reason}") for one in other.failures]

    def sort_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers by client and direction: they happen in no particular order."""
        return tuple(sorted(self.transfers, key=lambda transfer: (transfer.client, transfer.direction)))

    def sort_failures(self) -> tuple[Failure, ...]:
        """Return the failures by attempt and client: they happen in no particular order."""
        return tuple(sorted(self.failures, key=lambda failure: (failure.attempt, failure.client)))
