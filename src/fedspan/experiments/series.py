"""A series of runs: the shared fields of their configs, and statistics over their seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedspan.config import RunConfig
from fedspan.errors import FedspanError
from fedspan.progress.listener import Listener, Listeners, pass_on


class Watcher(Listener):
    """Listener for the events of a series and of its runs; every method does nothing by default.

    Examples:
        >>> class Failures(fedspan.Watcher):
        ...     def on_run_failure(self, step, reason):
        ...         print(step.name, reason)
        >>> fedspan.compare("config.yaml", "runs/two", ["fedit", "rolora"], listener=Failures())
    """

    def on_series_start(self, steps: Sequence[Step]) -> None:
        """Handle the start of a series: all runs are planned and the folder exists."""

    def on_run_start(self, step: Step) -> None:
        """Handle the start of a run, which is loaded, or read if it is already finished."""

    def on_run_finish(self, step: Step, metric: str, value: float | None, seconds: float, is_new: bool) -> None:
        """Handle the report of a run; ``value`` is the compared score, ``is_new`` is False for a run that was read."""

    def on_run_failure(self, step: Step, reason: str) -> None:
        """Handle the divergence of a run; the series continues without it."""


class Watchers(Listeners, Watcher):
    """Passes every event of a series on to several watchers, in their order."""


pass_on(Watcher, Watchers)


_SHARED = ("task", "seed", "data", "partition", "baselines", "centralized_lr")


@dataclass(frozen=True)
class Step:
    """One run of a series."""

    name: str
    label: str
    group: str
    """The group within which seeds are averaged: a method, or the number of a trial."""
    seed: int
    config: RunConfig


def validate_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Validate the seeds of a series."""
    if not seeds:
        raise FedspanError("--seeds", [], "at least one whole number, such as 0,1,2")
    for position, seed in enumerate(seeds):
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise FedspanError("--seeds", seed, "a whole number from 0")
        if seed in seeds[:position]:
            raise FedspanError(
                "--seeds", seed, problem=f"the seed {seed} is given twice, and equal seeds give equal numbers"
            )
    return tuple(seeds)


def set_seed(config: RunConfig, seed: int, first: int, baselines: bool) -> RunConfig:
    """Return a run's config with a seed, on the partition of the first seed unless the config sets its seed."""
    partition = config.partition
    if partition.seed is None:
        partition = partition.model_copy(update={"seed": first})
    baselines_of_seed = config.baselines if baselines else []
    return config.model_copy(update={"seed": seed, "partition": partition, "baselines": baselines_of_seed})


def require_comparable(shared: RunConfig, config: RunConfig, field: str, value: object) -> RunConfig:
    """Return ``config`` if it is comparable with ``shared``: the same data and the same metric.

    Args:
        shared: The config that holds the fields shared by all runs of the series.
        field: The option or field in which the user set the difference, named in the error.
    """
    differ = [name for name in _SHARED if getattr(shared, name) != getattr(config, name)]
    if shared.evaluation.metric != config.evaluation.metric:
        differ.append("evaluation.metric")
    if differ:
        raise FedspanError(
            field, value, problem=f"{value!r} changes {differ[0]}, which must be the same in all runs to compare them"
        )
    return config


def get_finite(scores: Mapping[str, Any] | None, metric: str) -> float | None:
    """Return the value of a metric; None if it is missing or not finite."""
    value = (scores or {}).get(metric)
    return None if value is None or not math.isfinite(value) else float(value)


def compute_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if any value is missing, as a mean over fewer seeds is a different quantity."""
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present and len(present) == len(values) else None


def compute_deviation(values: Sequence[float | None]) -> float | None:
    """Return the sample standard deviation (n - 1); None for fewer than two values, or if any is missing."""
    present = [value for value in values if value is not None]
    return float(np.std(present, ddof=1)) if len(present) == len(values) > 1 else None
