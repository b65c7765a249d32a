"""What a federation gives an engine to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedspan.core.values import Job, OptimizerState

__all__ = ["Assignment"]


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
    """

    client: str
    round: int
    job: Job
    indices: np.ndarray
    lr: float
    kept: OptimizerState | None = None
