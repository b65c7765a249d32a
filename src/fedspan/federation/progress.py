"""What a run knows between rounds, what a round gives, and what is known of a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fedspan.core.method import Memory
from fedspan.core.values import Client, Job, OptimizerState, ServerState
from fedspan.federation.outcomes import Failure, Transfer
from fedspan.training.accounting import Charge

__all__ = ["ClientData", "Progress", "RoundResult", "stored_moments"]


@dataclass(frozen=True)
class ClientData:
    """A client: what is known of it, and where its examples are.

    Args:
        client: Its fixed facts (``Progress`` has ``held``).
        train: Indices of its training examples, int64.
        validation: Indices of its validation examples, int64.
        test: Indices of its test examples, int64.
    """

    client: Client
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Progress:
    """All that a run knows between rounds; the content of a checkpoint.

    Args:
        state: The server's state.
        memories: The clients' memories as of their last accepted replies, where this process stores them.
        held: Round of the last state that reached each client and whose reply was accepted.
        optimizers: Stored moments by client and phase, with the generation that they belong to.
    """

    state: ServerState
    memories: Mapping[str, Memory] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    optimizers: Mapping[str, tuple[OptimizerState, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundResult:
    """The result of a round.

    Args:
        progress: The progress after the round.
        transfers: Messages between server and clients, by client.
        cohort: Ids of the selected clients, sorted.
        lr: Learning rate of the round.
        loss: Mean training loss over the cohort's examples; NaN where no client reported one.
        failures: Clients whose replies do not count.
        charges: Privacy costs of the round.
        late: Selected clients that the round did not wait for.
    """

    progress: Progress
    transfers: tuple[Transfer, ...]
    cohort: tuple[str, ...]
    lr: float
    loss: float
    failures: tuple[Failure, ...] = ()
    charges: tuple[Charge, ...] = ()
    late: tuple[str, ...] = ()


def stored_moments(job: Job, kept: tuple[OptimizerState, int] | None, wanted: bool) -> OptimizerState | None:
    """The stored moments that a job continues with; None if there are none, or they are of another generation."""
    return None if kept is None or not wanted or kept[1] != job.generation else kept[0]
