"""Poisson samples of DP-SGD, and the noise that a privacy budget requires."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fedspan.core.tensors import generator
from fedspan.core.values import Job
from fedspan.training.accounting import Mechanism, calibrate_noise, require_opacus
from fedspan.training.jobs import Assignment
from fedspan.training.settings import Privacy, TrainingSettings

__all__ = ["expected_batch", "noise_for", "poisson_batches", "private_steps", "release_of"]


def expected_batch(settings: TrainingSettings, count: int) -> int:
    """Compute the average number of examples of an optimizer step for a client with ``count`` examples."""
    return min(count, settings.batch_size * settings.accumulate)


def private_steps(settings: TrainingSettings, job: Job, count: int) -> int:
    """Compute the optimizer steps of a job over ``count`` examples: as many as without privacy."""
    if not count:
        return 0
    steps = settings.steps if job.steps is None and job.epochs is None else job.steps
    if steps:
        return steps
    epochs = settings.epochs if job.epochs is None else job.epochs
    return math.ceil(math.ceil(count / settings.batch_size) * epochs / settings.accumulate)


def noise_for(privacy: Privacy, settings: TrainingSettings, jobs: Sequence[Job], count: int) -> float:
    """Compute a client's noise over the clipping norm: the run's, or the smallest noise that its budget allows.

    Args:
        privacy: Privacy settings of the run.
        settings: Settings of local training.
        jobs: Jobs of a round.
        count: Number of the client's training examples.
    """
    if privacy.noise is not None:
        return privacy.noise
    assert privacy.epsilon is not None  # the config has noise or epsilon
    steps = privacy.rounds * sum(private_steps(settings, job, count) for job in jobs)
    if not steps:
        return 0.0
    rate = expected_batch(settings, count) / count
    return calibrate_noise(rate, steps, privacy.epsilon, privacy.delta, privacy.accounting)


def release_of(privacy: Privacy, settings: TrainingSettings, jobs: Sequence[Job], count: int) -> tuple[Mechanism, int]:
    """Return what a round's jobs release about a client with ``count`` examples: the mechanism and how often."""
    rate = expected_batch(settings, count) / max(1, count)
    steps = sum(private_steps(settings, job, count) for job in jobs)
    return Mechanism(rate, noise_for(privacy, settings, jobs, count)), steps


def poisson_batches(privacy: Privacy, settings: TrainingSettings, work: Assignment) -> Iterator[np.ndarray]:
    """Yield the samples of a job, drawing each example independently; a sample may be empty.

    Raises:
        FedspanError: If Opacus is not installed.
    """
    require_opacus()
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    count = len(work.indices)
    steps = private_steps(settings, work.job, count)
    if not steps:
        return
    seed = int.from_bytes(privacy.key, "big")
    sampler = UniformWithReplacementSampler(
        num_samples=count,
        sample_rate=expected_batch(settings, count) / count,
        generator=generator(seed, "poisson", work.round, work.client, work.job.phase),
        steps=steps,
    )
    for chosen in sampler:
        yield work.indices[np.array(chosen, np.int64)]
