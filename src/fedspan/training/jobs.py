"""The assignments that a federation gives an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedspan.core.values import Job, OptimizerSpec, OptimizerState
from fedspan.errors import FedspanError
from fedspan.training.settings import TrainingSettings

__all__ = ["Assignment", "not_finite", "spec_of"]


@dataclass(frozen=True)
class Assignment:
    """One job of one client, with all that its training depends on.

    Args:
        client: The client's id, for random draws and errors.
        round: The round's number, for random draws and errors.
        job: The job to train.
        indices: The client's training examples, (examples,).
        lr: Learning rate of the round.
        kept: Moments of the client's earlier rounds, if the run stores them.
        noise: Noise of DP-SGD over the clipping norm.
    """

    client: str
    round: int
    job: Job
    indices: np.ndarray
    lr: float
    kept: OptimizerState | None = None
    noise: float = 0.0


def not_finite(work: Assignment, value: float) -> FedspanError:
    """Build the error for a loss that is infinite or NaN."""
    expected = (
        f"the loss of client {work.client} in round {work.round + 1} became {value}; "
        "lower the learning rate or set training.max_grad_norm"
    )
    return FedspanError("training.lr", work.lr, expected)


def spec_of(work: Assignment, settings: TrainingSettings) -> OptimizerSpec:
    """Return the optimizer settings of a job."""
    return replace(settings.optimizer, lr=work.lr, **work.job.optimizer)  # pyright: ignore[reportArgumentType]
