"""What a federation gives an engine to do, and what every engine offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from fedspan.core.values import Job, OptimizerState, Trained
from fedspan.engines.settings import TrainingSettings
from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.task import Examples, Task

__all__ = ["Assignment", "Engine"]


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


class Engine(Protocol):
    """Trains and evaluates jobs on one model."""

    @property
    def adapted(self) -> AdaptedModel:
        """The model."""
        ...

    @property
    def task(self) -> Task:
        """The learning problem."""
        ...

    @property
    def settings(self) -> TrainingSettings:
        """Local training."""
        ...

    @property
    def seed(self) -> int:
        """Of every draw."""
        ...

    def train_all(
        self,
        examples: Examples,
        sizes: Mapping[str, int],
        opened: Callable[[str], Assignment],
        finished: Callable[[Assignment, Trained], Assignment | None],
    ) -> None:
        """Train a round's clients, in any order.

        Args:
            examples: what the assignments' indices point into.
            sizes: the clients, and about how much work each is.
            opened: gives a client's first job; called once for each, shortly before it begins, by one thread at a time.
            finished: takes what came of a job and gives the client's next one, or None; by one thread at a time.

        Raises:
            FedspanError: if a loss stops being finite.
        """
        ...

    def predict(
        self, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, thorough: bool = False
    ) -> Tensor:
        """The model's predictions for some examples, one row each, in the order of ``indices``, float32 on the CPU."""
        ...
