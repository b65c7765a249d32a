"""The state of a run between rounds, the result of a round with its transfers and failures, and facts about clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedspan.core.base import BaseUpdate
from fedspan.core.method import Memory
from fedspan.core.values import Client, OptimizerState, ServerState
from fedspan.errors import FedspanError, escape_controls
from fedspan.training.accounting import Charge

Direction = Literal["down", "up"]
"""``down``: from server to client; ``up``: from client to server."""
Purpose = Literal["train", "statistics", "evaluate", "export"]

_LONGEST_REASON = 4096
"""Maximum length of a failure's reason, in characters."""


class TooFew(Exception):
    """Too few clients remain in an attempt of a round; the failures hold the reasons."""


class TooFewReplies(FedspanError):
    """Too few clients sent a reply that was accepted, after all attempts."""


@dataclass(frozen=True)
class Transfer:
    """One transmitted message."""

    client: str
    direction: Direction
    """Direction of the transfer, ``down`` or ``up``."""
    bytes: int
    payload: int
    """Bytes of tensor data in the message."""
    purpose: Purpose = "train"


@dataclass(frozen=True)
class Failure:
    """A client whose reply was rejected, missing or counted less, or that was not evaluated or did not export."""

    client: str
    attempt: int
    """Attempt of the round, from 0."""
    reason: str
    """Reason in plain text, often in the client's words: stored with its control characters escaped, and cut to 4096
    characters."""
    purpose: Purpose = "train"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", escape_controls(self.reason[:_LONGEST_REASON]))


@dataclass(frozen=True)
class OutOfRoundEvents:
    """Events between server and clients outside the rounds."""

    transfers: tuple[Transfer, ...] = ()
    """Models that were sent for evaluation or export."""
    failures: tuple[Failure, ...] = ()
    """Clients that were not evaluated, and those whose statistics were rejected, missing or counted less."""


@dataclass(frozen=True)
class ClientData:
    """A client: its fixed facts and the indices of its examples."""

    client: Client
    """Fixed facts about the client (``Progress`` has the varying ones)."""
    train: np.ndarray
    """Indices of its training examples, int64."""
    validation: np.ndarray
    """Indices of its validation examples, int64."""
    test: np.ndarray
    """Indices of its test examples, int64."""
    max_weight: float | None = None
    """Largest weight of the client in means of replies and metrics, whatever it declares; None: any."""
    identity: str = ""
    """The client's lasting public key in OpenSSH's format, which signs its session keys of secure aggregation; empty:
    they are accepted unsigned."""
    ignored: int = 0
    """Number of further training examples, whose labels the run does not have."""


@dataclass(frozen=True)
class ClientState:
    """A client's state between rounds."""

    memory: Memory = field(default_factory=dict)
    moments: Mapping[str, tuple[OptimizerState, int]] = field(default_factory=dict)
    """Stored optimizer states by phase, with the generation that they belong to."""
    base: BaseUpdate = BaseUpdate()
    """The base update that the client holds; that of the pretrained model where the server's process stores the state,
    because this process has the base itself."""

    @property
    def is_empty(self) -> bool:
        """Whether the client stores nothing."""
        return not self.memory and not self.moments and self.base == BaseUpdate()


@dataclass(frozen=True)
class OpenOrder:
    """An order of asynchronous rounds whose reply has not arrived."""

    client: str
    round: int
    """Round of the state that it was sent, from 0."""
    attempt: int
    """Attempt of that round in which it was sent, from 0."""
    number: int
    """Number of the order in the run, from 0."""
    arrival: float
    """Time at which the simulated clock will show its reply, in seconds since the start of the run."""
    absence: str | None = None
    """Reason why there will be no reply at that time; None: there will be one."""


@dataclass(frozen=True)
class OpenOrders:
    """The state of asynchronous rounds between two updates."""

    orders: tuple[OpenOrder, ...] = ()
    """The orders without a reply."""
    number: int = 0
    clock: float = 0.0
    """The simulated clock, in seconds since the start of the run."""
    states: Mapping[int, ServerState] = field(default_factory=dict)
    """The earlier states of the server that belong to these orders, by round."""


@dataclass(frozen=True)
class Progress:
    """The complete state of a run between rounds; the content of a checkpoint."""

    state: ServerState
    states: Mapping[str, ClientState] = field(default_factory=dict)
    """The clients' stored states as of their last accepted replies, where this process stores them."""
    last_rounds: Mapping[str, int] = field(default_factory=dict)
    """Round of the last state that each client received and whose reply was accepted; without the clients that lost
    what they stored."""
    last_replies: Mapping[str, int] = field(default_factory=dict)
    """Round of the last accepted reply of each client that lost what it stored since then."""
    open: OpenOrders = field(default_factory=OpenOrders)
    """Orders that asynchronous rounds have sent and that have no reply yet."""

    def load_memory(self, client: str) -> Memory:
        """Return a client's memory, which may be read from a disk; empty if this process stores none."""
        return self.states.get(client, ClientState()).memory


@dataclass(frozen=True)
class RoundResult:
    """The result of a round."""

    progress: Progress
    transfers: tuple[Transfer, ...]
    """Messages between server and clients, by client."""
    cohort: tuple[str, ...]
    """Ids of the selected clients, sorted."""
    lr: float
    loss: float
    """Mean training loss over the cohort's examples; NaN if no client reported one."""
    failures: tuple[Failure, ...] = ()
    charges: tuple[Charge, ...] = ()
    late: tuple[str, ...] = ()
    """Selected clients that the round did not wait for."""
    simulated_seconds: float | None = None
    """Time that the round took on the simulated clock, in seconds; None: there is none."""
    clipped: Mapping[str, float] = field(default_factory=dict)
    """Factors by which the changes of replies were scaled down, by client, sorted."""
    lowered: Mapping[str, float] = field(default_factory=dict)
    """Factors by which weights were lowered, by client, sorted."""
    arrivals: tuple[tuple[str, int], ...] | None = None
    """In asynchronous rounds, the clients whose replies were accepted, in their order of arrival, each with the age of
    its order in rounds; None: the round was synchronous."""
