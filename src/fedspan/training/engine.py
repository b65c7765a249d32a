"""The interface of every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from fedspan.core.values import Job, Trained
from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.task import Examples, Task
from fedspan.training.jobs import Assignment
from fedspan.training.prefix_caches import PrefixCaches
from fedspan.training.settings import TrainingSettings

__all__ = ["Engine"]


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
        """Settings of local training."""
        ...

    @property
    def seed(self) -> int:
        """Seed of every random draw."""
        ...

    @property
    def prefixes(self) -> PrefixCaches:
        """Hidden states that leave the model's frozen prefix, by data set."""
        ...

    def ready(self, examples: Examples, indices: np.ndarray) -> None:
        """Precompute what passes over some examples can then skip. The model loses its job.

        The last bits may depend on which examples are computed together: pass every client's part separately.
        """
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
            examples: The data set that the assignments' indices point into.
            sizes: The clients, with the approximate work of each.
            opened: Returns a client's first job; called once a client, shortly before it begins, by one thread a time.
            finished: Takes a job's result and returns the client's next job, or None; by one thread at a time.

        Raises:
            FedspanError: If a loss stops being finite.
        """
        ...

    def predict(
        self, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, thorough: bool = False
    ) -> Tensor:
        """Predict some examples: one row each, in the order of ``indices``, float32 on the CPU."""
        ...
