"""What is measured: the names that reports use, which way is better, and how people read the values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it reads data with large libraries, and every command shows numbers
    from fedspan.data.columns import TaskName

__all__ = ["METRICS", "METRICS_OF", "Metric", "defined", "rank_of", "shown"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        title: what a table calls it.
        higher: whether more is better.
        percent: whether it is a share, shown in percent.
    """

    title: str
    higher: bool
    percent: bool = False


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy", True, percent=True),
    "macro_f1": Metric("macro-F1", True, percent=True),
    "f1": Metric("F1", True, percent=True),
    "matthews": Metric("Matthews", True),
    "pearson": Metric("Pearson", True),
    "spearman": Metric("Spearman", True),
    "exact_match": Metric("exact match", True, percent=True),
    "token_accuracy": Metric("token accuracy", True, percent=True),
    "perplexity": Metric("perplexity", False),
    "loss": Metric("loss", False),
}
"""By name. In the order in which tables show them."""

METRICS_OF: Mapping[TaskName, tuple[str, ...]] = {
    "sequence-classification": ("accuracy", "macro_f1", "f1", "matthews", "loss"),
    "regression": ("pearson", "spearman", "loss"),
    "causal-lm": ("loss", "perplexity", "token_accuracy"),
    "image-classification": ("accuracy", "macro_f1", "f1", "matthews", "loss"),
}
"""What each task measures in every round; by the first it is judged unless ``evaluation.metric`` says else."""


def defined(values: Mapping[str, float]) -> dict[str, float]:
    """Without those that have no value here: a correlation of one example, or of equal values."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def rank_of(metric: str, values: Mapping[str, float]) -> float:
    """A number that is larger where the metric is better; the smallest there is where it has no value."""
    if metric not in values:
        return -math.inf
    return values[metric] if METRICS[metric].higher else -values[metric]


def shown(names: Iterable[str]) -> list[str]:
    """The names that are metrics, in the order of tables."""
    there = set(names)
    return [name for name in METRICS if name in there]
