"""The interface of a user's trainer, and what it trains in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fedspan.core.tensors import create_generator
from fedspan.training.config import TrainingSettings
from fedspan.training.jobs import Assignment
from fedspan.training.trainers.optimizer import JobOptimizer


@dataclass(frozen=True)
class RoundPlan:
    """What a trainer trains in one round.

    Args:
        lr: Learning rate of the round; it is constant within the round.
        epochs: Number of passes over the training examples, unless ``steps`` is given.
        steps: Number of optimizer steps; None: ``epochs`` epochs.
        seed: Seed of the round's random draws (order of the examples, dropout), below 2**31.
    """

    client: str
    round: int
    phase: str
    lr: float
    epochs: int
    steps: int | None
    seed: int


def plan_round(settings: TrainingSettings, seed: int, assignment: Assignment) -> RoundPlan:
    """Plan the training of an assignment: its job's steps or epochs, or else the run's; one epoch for a probe."""
    job = assignment.job
    steps = settings.local_steps if job.steps is None and job.epochs is None else job.steps
    epochs = settings.local_epochs if job.epochs is None else job.epochs
    rng = create_generator(seed, "trainer", assignment.round, assignment.client, job.phase)
    return RoundPlan(
        assignment.client,
        assignment.round,
        job.phase,
        assignment.lr,
        1 if job.steps == 0 else epochs,
        steps or None,
        int(torch.randint(2**31, (), generator=rng)),
    )


@runtime_checkable
class LocalTrainer(Protocol):
    """A user's trainer, with its model and its examples."""

    @property
    def root(self) -> nn.Module:
        """The module that trains: the model, or a module around it. All of it is frozen but for a job's tensors."""
        ...

    @property
    def model(self) -> nn.Module:
        """The model whose layers the method changes: ``root`` or a part of it."""
        ...

    @property
    def processor(self) -> object | None:
        """The tokenizer or image processor that is exported with the model; None: there is none."""
        ...

    @property
    def examples(self) -> int:
        """Number of training examples."""
        ...

    @property
    def validation_examples(self) -> int:
        """Number of examples that ``evaluate`` measures; 0: the trainer has no evaluation of its own."""
        ...

    def count_passes(self, epochs: int, steps: int | None) -> int:
        """Return the number of forward and backward passes of a process in some steps; ``steps`` None: some epochs."""
        ...

    def train(self, plan: RoundPlan, optimizer: JobOptimizer) -> float:
        """Train the installed tensors with ``optimizer`` and return the mean loss.

        Raises:
            FedspanError: If the trainer fails for a reason that its owner can correct.
        """
        ...

    def evaluate(self) -> dict[str, float]:
        """Measure the installed tensors on the trainer's own evaluation examples; metrics of ``tasks.metrics``."""
        ...
