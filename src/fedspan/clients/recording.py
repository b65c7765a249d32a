"""A record of a round's local training: the jobs of every client and their results."""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.core.values import Job, Trained
from fedspan.training.jobs import Assignment

__all__ = ["ClientTraining", "TrainingRecord"]


@dataclass(frozen=True)
class ClientTraining:
    """One client's training.

    Args:
        first: The client's first job of the round.
        last: The client's last job of the round.
        trained: The result of the last job.
    """

    first: Job
    last: Job
    trained: Trained


class TrainingRecord:
    """Records the jobs of a round (as the ``on_trained`` callback)."""

    def __init__(self) -> None:
        self.by_client: dict[str, ClientTraining] = {}

    def __call__(self, work: Assignment, trained: Trained) -> None:
        before = self.by_client.get(work.client)
        self.by_client[work.client] = ClientTraining(before.first if before else work.job, work.job, trained)
