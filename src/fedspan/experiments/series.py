"""Several runs that belong together: what they share, what is told of them, and the numbers over their seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.runs.callbacks import Listener

__all__ = ["Step", "Watcher", "finite", "mean", "spread", "standard_error", "under_seed", "valid_seeds", "with_shared"]

_SHARED = ("task", "seed", "data", "partition", "baselines", "centralised_lr")


@dataclass(frozen=True)
class Step:
    """One run of a series.

    Args:
        name: of its folder.
        label: for people.
        group: what its seeds are averaged under: a method, or a trial's number.
        seed: the run's.
        config: the run's, whole.
    """

    name: str
    label: str
    group: str
    seed: int
    config: RunConfig


class Watcher(Listener):
    """What a series tells whoever watches, beside what its runs tell; every method does nothing by default."""

    def series_started(self, steps: Sequence[Step]) -> None:
        """All runs are planned, and their folder is there."""

    def run_started(self, step: Step) -> None:
        """A run is loaded, or read if it was finished before."""

    def run_finished(self, step: Step, metric: str, value: float | None, seconds: float, played: bool) -> None:
        """A run has its report; ``value`` is what the series compares, ``played`` is False if it was read only."""

    def run_failed(self, step: Step, why: str) -> None:
        """A run diverged, and the series goes on without it."""


def valid_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """The seeds of a series.

    Raises:
        FedspanError: none, one that is no seed, or one twice.
    """
    if not seeds:
        raise FedspanError("--seeds", [], "at least one whole number, such as 0,1,2")
    for position, seed in enumerate(seeds):
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise FedspanError("--seeds", seed, "a whole number from 0")
        if seed in seeds[:position]:
            raise FedspanError("--seeds", seed, "every seed once; a run with an equal seed gives equal numbers")
    return tuple(seeds)


def under_seed(config: RunConfig, seed: int, first: int, baselines: bool) -> RunConfig:
    """A run's config with a seed, on the division of the first seed unless the config names one.

    Args:
        config: without a seed of its own.
        seed: the run's.
        first: of the series.
        baselines: whether the run trains the config's baselines too.
    """
    partition = config.partition
    if partition.seed is None:
        partition = partition.model_copy(update={"seed": first})
    kept = config.baselines if baselines else []
    return config.model_copy(update={"seed": seed, "partition": partition, "baselines": kept})


def with_shared(shared: RunConfig, config: RunConfig, field: str, value: object) -> RunConfig:
    """``config``, if it can be compared with ``shared``: on the same data, and judged by the same metric.

    Args:
        shared: what all runs of the series have.
        config: of one of them.
        field: where the user said what differs.
        value: what the user said.

    Raises:
        FedspanError: if it can't.
    """
    differ = [name for name in _SHARED if getattr(shared, name) != getattr(config, name)]
    if shared.evaluation.metric != config.evaluation.metric:
        differ.append("evaluation.metric")
    if differ:
        raise FedspanError(
            field, value, f"another field: {differ[0]} is the same in all runs, or they can't be compared"
        )
    return config


def finite(scores: Mapping[str, Any] | None, metric: str) -> float | None:
    """A metric's value; None where it has none."""
    value = (scores or {}).get(metric)
    return None if value is None or not math.isfinite(value) else float(value)


def mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if any value is missing: a mean over fewer seeds is another number."""
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there and len(there) == len(values) else None


def spread(values: Sequence[float | None]) -> float | None:
    """The standard deviation of a sample (n - 1); None for fewer than two values, or if any is missing."""
    there = [value for value in values if value is not None]
    return float(np.std(there, ddof=1)) if len(there) == len(values) > 1 else None


def standard_error(values: Sequence[float | None]) -> float | None:
    """Of the mean: the deviation over the root of n; None where there is no deviation."""
    deviation = spread(values)
    return None if deviation is None else deviation / math.sqrt(len(values))
