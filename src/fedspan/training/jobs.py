"""What a federation gives an engine to do."""

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
        client: id, for draws and errors.
        round: number, for draws and errors.
        job: what to train.
        indices: the client's training examples, (examples,).
        lr: learning rate of the round.
        kept: moments of the client's earlier rounds, if the run keeps them.
        noise: of DP-SGD, over the clipping norm.
    """

    client: str
    round: int
    job: Job
    indices: np.ndarray
    lr: float
    kept: OptimizerState | None = None
    noise: float = 0.0


def not_finite(work: Assignment, value: float) -> FedspanError:
    """What is said of a loss that is infinite or no number."""
    expected = (
        f"the loss of client {work.client} in round {work.round + 1} became {value}; "
        "lower the learning rate or set training.max_grad_norm"
    )
    return FedspanError("training.lr", work.lr, expected)


def spec_of(work: Assignment, settings: TrainingSettings) -> OptimizerSpec:
    """The optimizer of a job."""
    return replace(settings.optimizer, lr=work.lr, **work.job.optimizer)  # pyright: ignore[reportArgumentType]
