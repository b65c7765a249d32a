"""Predictions of several models in one pass: of equal shapes, on few examples each or on the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from fedspan.core.values import Job

ModelInputs = tuple[Job, np.ndarray]
"""A model, and the indices of the examples that it predicts, (examples,)."""


def build_prediction_key(job: Job) -> tuple[object, ...]:
    """Return the key of a model: models with equal keys can share a pass."""
    shapes = tuple((name, value.shape, value.dtype) for name, value in sorted(job.tensors.items()))
    return tuple(job.parametrization.items()), shapes


def split_windows(models: Iterable[ModelInputs], examples: int) -> Iterator[list[ModelInputs]]:
    """Yield consecutive models with at most ``examples`` examples together, at least one: only these are in memory."""
    window: list[ModelInputs] = []
    count = 0
    for model in models:
        if window and count + len(model[1]) > examples:
            yield window
            window, count = [], 0
        window.append(model)
        count += len(model[1])
    if window:
        yield window


def stack_models(window: Sequence[ModelInputs], models_per_pass: int, batch_size: int) -> list[list[int]]:
    """Decide which models share a pass, as positions in ``window``; those with the most examples come first.

    Args:
        window: The models.
        models_per_pass: Largest number of models in a pass.
        batch_size: Largest number of rows in a pass of several models; each has as many as the one with the most.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, (job, _) in enumerate(window):
        kinds.setdefault(build_prediction_key(job), []).append(index)
    stacks: list[list[int]] = []
    for positions in kinds.values():
        ordered = sorted(positions, key=lambda index: -len(window[index][1]))
        start = 0
        while start < len(ordered):
            rows = max(1, len(window[ordered[start]][1]))
            count = min(models_per_pass, max(1, batch_size // rows))
            stacks.append(ordered[start : start + count])
            start += count
    return stacks


def split_job_windows(jobs: Iterable[Job], count: int) -> Iterator[list[Job]]:
    """Yield consecutive models that predict the same examples, ``count`` at a time: only these are in memory."""
    remaining = iter(jobs)
    while window := list(islice(remaining, count)):
        yield window


def stack_on_shared_examples(window: Sequence[Job], models_per_pass: int, batch_size: int) -> list[list[int]]:
    """Decide which models share passes over the same examples, as positions in ``window``.

    Args:
        window: The models.
        models_per_pass: Largest number of models in a pass.
        batch_size: Largest number of rows in a pass; each model has at least one.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, job in enumerate(window):
        kinds.setdefault(build_prediction_key(job), []).append(index)
    count = max(1, min(models_per_pass, batch_size))
    return [
        positions[start : start + count] for positions in kinds.values() for start in range(0, len(positions), count)
    ]


def split_into_passes(batches: Sequence[np.ndarray], models: int, batch_size: int) -> list[np.ndarray]:
    """Split each batch of examples, so that every pass has at most ``batch_size`` rows, those of all models together.

    Each batch is split on its own: the passes over some of the batches do not depend on the others.
    """
    rows = max(1, batch_size // models)
    return [part for batch in batches for part in np.array_split(batch, -(-len(batch) // rows))]
