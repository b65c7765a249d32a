"""The interface of every engine, and training one client after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from fedspan.core.values import Job, Trained
from fedspan.models.adapted import AdaptedModel
from fedspan.tasks.task import Examples, Task
from fedspan.training.batching import ModelInputs
from fedspan.training.config import Privacy, TrainingSettings
from fedspan.training.jobs import Assignment
from fedspan.training.prefix import PrefixCaches
from fedspan.training.stages import Stages

OpenJob = Callable[[str], Assignment]
"""Returns a client's first job."""
FinishJob = Callable[[Assignment, Trained], Assignment | None]
"""Takes a job's result, and returns the client's next job, or None."""


class Predictor(Protocol):
    """Predicts examples with jobs.

    ``indices`` (examples,) and the parts of ``prepare`` point into the data set ``examples``; ``batch_size`` is that of
    the forward passes, also of those that models share.
    """

    def prepare(self, examples: Examples, parts: Sequence[np.ndarray]) -> None:
        """Precompute what passes over some examples can then skip, or need. The model loses its job.

        Args:
            parts: Indices of the examples, those of each client's part separately: the last bits may depend on which
                examples are computed together.
        """
        ...

    def predict(
        self, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, generate: bool = False
    ) -> Tensor:
        """Predict some examples: one row each, in the order of ``indices``, float32 on the CPU."""
        ...

    def predict_each(self, models: Iterable[ModelInputs], examples: Examples, batch_size: int) -> Iterator[Tensor]:
        """Yield ``predict`` of each of several models on its own examples, in their order.

        Args:
            models: The models, each with the indices of its examples; they are requested as they are needed.
        """
        ...

    def predict_shared_examples(
        self, jobs: Iterable[Job], examples: Examples, indices: np.ndarray, batch_size: int
    ) -> Iterator[Tensor]:
        """Yield ``predict`` of each of several models on the same examples, in the models' order.

        Args:
            jobs: The models; they are requested as they are needed.
        """
        ...


class Engine(Predictor, Protocol):
    """Trains and evaluates jobs on one model."""

    adapted: AdaptedModel
    """The model."""
    task: Task
    """The learning problem."""
    settings: TrainingSettings
    """Settings of local training."""
    privacy: Privacy | None
    """Privacy of the run, if it has any."""
    seed: int
    """Seed of every random draw."""
    stages: Stages
    """Reports the progress of long work."""

    @property
    def prefixes(self) -> PrefixCaches:
        """Hidden states that leave the model's frozen prefix, by data set."""
        ...

    def train_all(self, examples: Examples, sizes: Mapping[str, int], open_job: OpenJob, finish_job: FinishJob) -> None:
        """Train a round's clients, in any order.

        Args:
            examples: The data set that the assignments' indices point into.
            sizes: The clients, with the approximate work of each.
            open_job: Called once a client, shortly before it begins, by one thread at a time.
            finish_job: Called by one thread at a time.
        """
        ...

    def evaluate(
        self, client: str, job: Job, examples: Examples, indices: np.ndarray, batch_size: int, *, bounded: bool = False
    ) -> dict[str, float]:
        """Compute the task's metrics over a client's examples.

        Args:
            bounded: Whether no example contributes more than the task's bound to the loss (``losses.bound_loss``), and
                none to the results of others (``batching.AlikeGroups``).
        """
        ...

    def compute_features(self, job: Job | None, examples: Examples, indices: np.ndarray, batch_size: int) -> Tensor:
        """Compute the features that enter the output layer, one row per example, float32 on the CPU.

        Args:
            job: The model; None: the pretrained one.

        Raises:
            NoOutputLayer: If the model's logits are not those of one linear layer.
        """
        ...


def train_one_by_one(
    sizes: Mapping[str, int], open_job: OpenJob, train: Callable[[Assignment], Trained], finish_job: FinishJob
) -> None:
    """Train one client after another, each until its job has no further assignment.

    Args:
        sizes: Number of training examples of each client, as in ``Engine.train_all``.
        open_job: Returns a client's first assignment.
        train: Trains one assignment.
        finish_job: Returns a client's next assignment.
    """
    for client in sizes:
        assignment: Assignment | None = open_job(client)
        while assignment is not None:
            assignment = finish_job(assignment, train(assignment))
