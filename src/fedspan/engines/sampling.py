"""Who and what is drawn: a round's clients, and DP-SGD's Poisson samples with the noise that a budget asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedspan.core.tensors import generator
from fedspan.core.values import Job
from fedspan.engines.accounting import Mechanism, calibrated, require_opacus
from fedspan.engines.settings import Privacy, TrainingSettings
from fedspan.engines.work import Assignment

__all__ = ["cohort_of", "expected_batch", "noise_for", "poisson_batches", "private_steps", "release_of"]


def cohort_of(seed: int, round: int, clients: int, size: int | None, more: int = 0) -> list[int]:
    """Positions of a round's clients and so many more, in the order in which they are drawn; all, in order, if all.

    Args:
        seed: the run's.
        round: number, from 0.
        clients: of the federation.
        size: of the cohort; None: all.
        more: clients to be asked beyond that.
    """
    if size is None or size >= clients:
        return list(range(clients))
    return torch.randperm(clients, generator=generator(seed, "cohort", round))[: size + more].tolist()


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
    return calibrated(rate, steps, privacy.epsilon, privacy.delta, privacy.accounting)


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
