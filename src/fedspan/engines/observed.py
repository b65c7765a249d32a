"""An engine that is looked at: what every client was given to train, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedspan.core.values import Job, Trained
from fedspan.engines.engine import Engine
from fedspan.engines.prefix_caches import PrefixCaches
from fedspan.engines.settings import TrainingSettings
from fedspan.engines.work import Assignment
from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.task import Examples, Task

__all__ = ["Local", "Observed"]


@dataclass(frozen=True)
class Local:
    """What a client trained.

    Args:
        first: its first job of the round.
        last: its last one.
        trained: what came of the last.
    """

    first: Job
    last: Job
    trained: Trained


class Observed:
    """An engine that keeps the jobs that pass through it.

    Args:
        inner: does the work.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner, self.found = inner, dict[str, Local]()

    @property
    def adapted(self) -> AdaptedModel:
        return self.inner.adapted

    @property
    def task(self) -> Task:
        return self.inner.task

    @property
    def settings(self) -> TrainingSettings:
        return self.inner.settings

    @property
    def seed(self) -> int:
        return self.inner.seed

    @property
    def prefixes(self) -> PrefixCaches:
        return self.inner.prefixes

    def ready(self, examples: Examples, indices: np.ndarray) -> None:
        self.inner.ready(examples, indices)

    def predict(
        self, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, thorough: bool = False
    ) -> Tensor:
        return self.inner.predict(job, examples, indices, batch_size, thorough=thorough)

    def train_all(
        self,
        examples: Examples,
        sizes: Mapping[str, int],
        opened: Callable[[str], Assignment],
        finished: Callable[[Assignment, Trained], Assignment | None],
    ) -> None:
        def kept(work: Assignment, trained: Trained) -> Assignment | None:
            before = self.found.get(work.client)
            self.found[work.client] = Local(before.first if before else work.job, work.job, trained)
            return finished(work, trained)

        self.inner.train_all(examples, sizes, opened, kept)
