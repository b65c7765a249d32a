"""What every engine offers."""

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
        """Local training."""
        ...

    @property
    def seed(self) -> int:
        """Of every draw."""
        ...

    @property
    def prefixes(self) -> PrefixCaches:
        """Hidden states that leave the model's frozen prefix, by data set."""
        ...

    def ready(self, examples: Examples, indices: np.ndarray) -> None:
        """Compute beforehand what can be left out of passes over some examples. The model loses its job.

        Last bits may depend on which examples are given together: give every client's part on its own.
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
