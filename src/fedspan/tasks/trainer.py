"""The task of users' own trainers: they encode, compute the loss and the metrics; fedspan reads no example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fedspan.data.config import DataConfig
from fedspan.errors import FedspanError
from fedspan.tasks.definition import TaskDefinition

if TYPE_CHECKING:  # slow to import, and a worker of a cluster does not need it
    from fedspan.tasks.settings import TaskSettings


@dataclass(frozen=True)
class TrainerExamples:
    """The examples of users' own trainers: only their number is known."""

    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def lengths(self) -> np.ndarray:
        """Cost of each example, int64, (examples,): equal, because nothing is known of it."""
        return np.ones(self.count, np.int64)


class TrainerTask:
    """A learning problem that only users' own trainers know.

    Args:
        metric: Metric (of `fedspan.tasks.metrics`) by which rounds are compared.
    """

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def describe_examples(self, examples: Any) -> tuple[str, ...]:
        """``RunTask.describe_examples``: there are none."""
        return ()

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        problem = "examples, loss and predictions of this run are its owners' trainers' own. Load the adapter with PEFT"
        raise FedspanError("task", "trainer", problem=problem)

    encode = collate = predict = compute_loss = compute_client_losses = compute_metrics = _refuse
    decode_predictions = decode_targets = _refuse


def _build(processor: Any, settings: TaskSettings, data: DataConfig | None) -> TrainerTask:
    return TrainerTask(settings.metric)


TRAINER = TaskDefinition(
    name="trainer",
    title="what the trainers of fedspan.simulate define",
    head="classification",  # a head named as a classifier's trains whole
    build=_build,
)
