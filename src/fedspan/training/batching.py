"""The examples of every batch: a function of (seed, client, round, phase, epoch), the same in every engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fedspan.core.tensors import generator
from fedspan.tasks.task import Examples
from fedspan.training.jobs import Assignment
from fedspan.training.settings import TrainingSettings

__all__ = ["epoch_batches", "evaluation_batches", "job_batches", "training_batches"]

_WINDOW = 8


def epoch_batches(
    indices: np.ndarray, lengths: np.ndarray, batch_size: int, rng: torch.Generator, group_by_length: bool
) -> list[np.ndarray]:
    """Draw the batches of one epoch: every index once, ``batch_size`` at a time (the last batch may be smaller).

    With ``group_by_length``, each window of 8 shuffled batches is sorted by length before it is cut, and the batches
    are shuffled again. This reduces padding, and batches still differ from epoch to epoch.
    """
    shuffled = indices[torch.randperm(len(indices), generator=rng).numpy()]
    if not group_by_length:
        return [shuffled[at : at + batch_size] for at in range(0, len(shuffled), batch_size)]
    window = _WINDOW * batch_size
    batches: list[np.ndarray] = []
    for start in range(0, len(shuffled), window):
        part = shuffled[start : start + window]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[at : at + batch_size] for at in range(0, len(part), batch_size)]
    return [batches[int(at)] for at in torch.randperm(len(batches), generator=rng)]


def training_batches(
    indices: np.ndarray,
    lengths: np.ndarray,
    *,
    batch_size: int,
    epochs: int,
    batches: int | None,
    seed: int,
    key: tuple[int | str, ...],
    group_by_length: bool,
) -> Iterator[np.ndarray]:
    """Yield the batches of a job: ``epochs`` epochs, or exactly ``batches`` batches (over as many epochs as needed)."""
    epoch, given = 0, 0
    if not len(indices):  # no number of epochs would ever yield a batch
        return
    while epoch < epochs if batches is None else given < batches:
        rng = generator(seed, "batches", *key, epoch)
        for batch in epoch_batches(indices, lengths, batch_size, rng, group_by_length):
            if batches is not None and given == batches:
                return
            yield batch
            given += 1
        epoch += 1


def job_batches(settings: TrainingSettings, seed: int, work: Assignment, examples: Examples) -> Iterator[np.ndarray]:
    """Yield an assignment's batches: epochs or steps as set by its job, or else by the run; one epoch for a probe."""
    job = work.job
    steps = settings.steps if job.steps is None and job.epochs is None else job.steps
    epochs = settings.epochs if job.epochs is None else job.epochs
    return training_batches(
        work.indices,
        examples.lengths,
        batch_size=settings.batch_size,
        epochs=1 if job.steps == 0 else epochs,
        batches=steps * settings.accumulate if steps else None,
        seed=seed,
        key=(work.round, work.client, job.phase),
        group_by_length=settings.group_by_length,
    )


def evaluation_batches(indices: np.ndarray, lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Split all indices into batches of similar length."""
    ordered = indices[np.argsort(lengths[indices], kind="stable")]
    return [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]
