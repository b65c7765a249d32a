"""Metrics: the names that reports use, the direction that is better, and the format of displayed values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports large libraries, and every command shows numbers
    from fedspan.data.columns import TaskName

__all__ = ["CLASSIFIERS", "METRICS", "METRICS_OF", "Metric", "drop_undefined", "order_metrics", "rank_of"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        title: Name in tables.
        higher: Whether higher is better.
        percent: Whether it is a share, shown in percent.
        least: Smallest possible value.
        most: Largest possible value; of metrics without a bound, far above any that a trained model has.
    """

    title: str
    higher: bool
    percent: bool = False
    least: float = 0.0
    most: float = 1.0

    @property
    def bounded(self) -> bool:
        """Whether the metric itself has an upper bound."""
        return self.most < _UNBOUNDED

    def accepts(self, value: float) -> bool:
        """Check whether a value is possible, but for rounding; NaN is not."""
        return self.least - _ROUNDING <= value <= self.most + _ROUNDING


_UNBOUNDED = 1e15
_ROUNDING = 1e-6


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy", True, percent=True),
    "macro_f1": Metric("macro-F1", True, percent=True),
    "f1": Metric("F1", True, percent=True),
    "matthews": Metric("Matthews", True, least=-1.0),
    "pearson": Metric("Pearson", True, least=-1.0),
    "spearman": Metric("Spearman", True, least=-1.0),
    "exact_match": Metric("exact match", True, percent=True),
    "token_accuracy": Metric("token accuracy", True, percent=True),
    "perplexity": Metric("perplexity", False, least=1.0, most=_UNBOUNDED),
    "loss": Metric("loss", False, most=_UNBOUNDED),
}
"""Metrics by name, in the order of tables."""

METRICS_OF: Mapping[TaskName, tuple[str, ...]] = {
    "sequence-classification": ("accuracy", "macro_f1", "f1", "matthews", "loss"),
    "regression": ("pearson", "spearman", "loss"),
    "causal-lm": ("loss", "perplexity", "token_accuracy"),
    "image-classification": ("accuracy", "macro_f1", "f1", "matthews", "loss"),
    "trainer": ("loss", *(name for name in METRICS if name != "loss")),
}
"""Metrics of each task in every round; the first one judges it unless ``evaluation.metric`` is set."""


CLASSIFIERS: tuple[TaskName, ...] = ("sequence-classification", "image-classification")
"""Tasks whose answers are one of several labels."""


def drop_undefined(values: Mapping[str, float]) -> dict[str, float]:
    """Remove undefined values: a correlation of one example, or of equal values."""
    return {name: value for name, value in values.items() if not math.isnan(value)}


def rank_of(metric: str, values: Mapping[str, float]) -> float:
    """Return a number that is larger if the metric is better; the smallest one if the metric has no value."""
    if metric not in values:
        return -math.inf
    return values[metric] if METRICS[metric].higher else -values[metric]


def order_metrics(names: Iterable[str]) -> list[str]:
    """Return the names that are metrics, in the order of tables."""
    there = set(names)
    return [name for name in METRICS if name in there]
