"""Poisson samples of DP-SGD, and the noise that a privacy budget asks for."""

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
    """Examples of an optimizer step, on average, of a client with so many."""
    return min(count, settings.batch_size * settings.accumulate)


def private_steps(settings: TrainingSettings, job: Job, count: int) -> int:
    """Optimizer steps of a job over so many examples: as many as without privacy."""
    if not count:
        return 0
    steps = settings.steps if job.steps is None and job.epochs is None else job.steps
    if steps:
        return steps
    epochs = settings.epochs if job.epochs is None else job.epochs
    return math.ceil(math.ceil(count / settings.batch_size) * epochs / settings.accumulate)


def noise_for(privacy: Privacy, settings: TrainingSettings, jobs: Sequence[Job], count: int) -> float:
    """The noise over the clipping norm of a client with so many examples: the run's, or as little as its budget allows.

    Args:
        privacy: of the run.
        settings: local training.
        jobs: of a round.
        count: of the client's training examples.
    """
    if privacy.noise is not None:
        return privacy.noise
    assert privacy.epsilon is not None  # the config has one of the two
    steps = privacy.rounds * sum(private_steps(settings, job, count) for job in jobs)
    if not steps:
        return 0.0
    rate = expected_batch(settings, count) / count
    return calibrate_noise(rate, steps, privacy.epsilon, privacy.delta, privacy.accounting)


def release_of(privacy: Privacy, settings: TrainingSettings, jobs: Sequence[Job], count: int) -> tuple[Mechanism, int]:
    """What a round's jobs release of a client with so many examples: the kind, and how often."""
    rate = expected_batch(settings, count) / max(1, count)
    steps = sum(private_steps(settings, job, count) for job in jobs)
    return Mechanism(rate, noise_for(privacy, settings, jobs, count)), steps


def poisson_batches(privacy: Privacy, settings: TrainingSettings, work: Assignment) -> Iterator[np.ndarray]:
    """The samples of a job, each example in each of them by itself; some may be empty.

    Raises:
        FedspanError: if Opacus is not installed.
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
