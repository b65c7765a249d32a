"""Metrics: the names that reports use, the direction that is better, and the format of displayed values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fedspan.errors import FedspanError

__all__ = ["METRICS", "Metric", "drop_undefined", "order_metrics", "rank_of", "register_metrics"]


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


_metrics: dict[str, Metric] = {
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
METRICS: Mapping[str, Metric] = MappingProxyType(_metrics)
"""Metrics by name, in the order of tables."""


def register_metrics(metrics: Mapping[str, Metric]) -> None:
    """Add metrics, for the tasks that compute them: all, or none if one is refused.

    Args:
        metrics: Title, direction and bounds by the name in reports, a Python identifier in lower case.

    Raises:
        FedspanError: If a name is no identifier, or belongs to another metric.
    """
    for name, metric in metrics.items():
        if not name.isidentifier() or name != name.lower():
            raise FedspanError("metric", name, "a Python identifier in lower case")
        if _metrics.get(name, metric) != metric:
            raise FedspanError("metric", name, problem=f"{name!r} is already the name of another metric")
    _metrics.update(metrics)


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
